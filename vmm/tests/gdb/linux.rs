//! Debian's cloud kernel, with the symbols from its own memory only. The images are in the folder
//! `$HINDSIGHT_GUESTS`.

use std::path::PathBuf;

use crate::rig::{Guest, Run, in_order};
use crate::trace::records;

/// gdb commands that run Linux from the first instruction until it begins to schedule.
///
/// The unpacked kernel begins at 16 MiB, and is not mapped at its link address yet.
const TO_SCHEDULING: &str = "hbreak *0x1000000
        continue
        symbol-file target:/kernel
        delete
        hbreak *&start_kernel
        continue
        info symbol $pc
        stepi 3
        info symbol $pc
        delete
        print *(int *)&system_state
        watch *(int *)&system_state
        continue
        ";

/// Lines that gdb prints for [`TO_SCHEDULING`].
const SCHEDULES: [&str; 6] = [
    "start_kernel in section .init.text",
    "start_kernel + ",
    "= 0",
    "Hardware watchpoint 3: *(int *)&system_state",
    "Old value = 0",
    "New value = 1",
];

/// Starts Linux, which tests itself and powers the machine off.
fn linux(more: &[&str]) -> Run {
    let folder = std::env::var_os("HINDSIGHT_GUESTS").expect("HINDSIGHT_GUESTS names the images");
    let folder = PathBuf::from(folder);
    let initrd = folder.join("initrd.gz");
    let initrd = initrd.to_str().unwrap();
    let line = "console=ttyS0 quiet panic=-1 hindsight.selftest nokaslr";
    let mut arguments = vec!["--memory", "256M", "--cmdline", line, "--initrd", initrd];
    arguments.extend(more);
    Run::waiting(Guest::Image(folder.join("vmlinuz")), &arguments)
}

#[test]
#[ignore = "boots Linux with the guest images of HINDSIGHT_GUESTS; ci/test images runs it"]
fn record_of_a_panic_reaches_back_to_its_cause() {
    let folder = std::env::var_os("HINDSIGHT_GUESTS").expect("HINDSIGHT_GUESTS names the images");
    let console = tempfile::NamedTempFile::new().unwrap();
    let serial = format!("file:{}", console.path().display());
    let line = "console=ttyS0 panic=0 nokaslr root=/dev/none";
    let run = Run::start(
        Guest::Image(PathBuf::from(folder).join("vmlinuz")),
        &[
            "--memory=256M",
            "--cmdline",
            line,
            "--serial",
            &serial,
            "--record",
            // The cause is 15 000 branches back. gdb takes minutes to read 65 536.
            "branches=20000",
        ],
    );
    let log = || std::fs::read_to_string(console.path()).unwrap_or_default();
    run.wait_for("the panic", || log().contains("end Kernel panic"));
    // The kernel waits in a loop for good, which takes no more of the record with time.
    std::thread::sleep(std::time::Duration::from_secs(5));
    let text = run.gdb(
        "symbol-file target:/kernel
        record function-call-history 1,100000
        kill
        ",
    );
    in_order(&text, &["mount_block_root", "panic", "delay_tsc"]);
}

#[test]
#[ignore = "boots Linux with the guest images of HINDSIGHT_GUESTS; ci/test images runs it"]
fn record_ends_at_a_function_that_only_guest_memory_names() {
    let folder = std::env::var_os("HINDSIGHT_GUESTS").expect("HINDSIGHT_GUESTS names the images");
    let console = tempfile::NamedTempFile::new().unwrap();
    let serial = format!("file:{}", console.path().display());
    // The kernel puts itself at a random address.
    let run = Run::start(
        Guest::Image(PathBuf::from(folder).join("vmlinuz")),
        &[
            "--memory=512M",
            "--cmdline",
            "console=ttyS0 panic=0 root=/dev/none",
            "--serial",
            &serial,
            "--record",
            "branches=500,stop=panic",
        ],
    );
    let log = || std::fs::read_to_string(console.path()).unwrap_or_default();
    run.wait_for("the panic", || log().contains("end Kernel panic"));
    let text = run.gdb(
        "symbol-file target:/kernel
        record function-call-history 1,1000
        kill
        ",
    );
    let numbered = |line: &&str| line.starts_with(|first: char| first.is_ascii_digit());
    let history: Vec<_> = text.lines().filter(numbered).collect();
    let history = history.join("\n");
    in_order(&history, &["printk_all_partitions", "mount_block_root"]);
    // The call of panic is the last branch; gdb does not list its target.
    for later in ["\tpanic", "delay_tsc"] {
        assert!(!history.contains(later), "{text}");
    }
}

#[test]
#[ignore = "boots Linux with the guest images of HINDSIGHT_GUESTS; ci/test images runs it"]
fn kernel_symbols_are_read_from_guest_memory() {
    let run = linux(&["--deterministic"]);
    let script = "backtrace 1
        continue
        delete
        continue
        watch *(int *)&system_state
        reverse-continue
        info symbol $pc
        monitor goto
        reverse-continue
        info symbol $pc
        print *(int *)&system_state
        monitor kaslr
        kill
        ";
    let text = run.gdb(&format!("{TO_SCHEDULING}{script}"));
    let parts = [
        "the guest switches the machine off",
        "Old value = 5",
        "New value = 3",
        "in section .text",
        "at instruction ",
        "Old value = 3",
        "New value = 2",
        "kernel_init",
        "symbol-file target:/kernel",
    ];
    in_order(&text, &[&SCHEDULES[..], &parts].concat());
}

#[test]
#[ignore = "boots Linux with the guest images of HINDSIGHT_GUESTS; ci/test images runs it"]
fn kernel_boots_after_the_debugger_detaches() {
    let run = linux(&[]);
    let script = "delete
        info symbol $pc
        detach
        ";
    let text = run.gdb(&format!("{TO_SCHEDULING}{script}"));
    let parts = ["in section .text", "detached"];
    in_order(&text, &[&SCHEDULES[..], &parts].concat());
    let (status, text) = run.finish();
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("selftest passed"), "{text}");
}

#[test]
#[ignore = "boots Linux with the guest images of HINDSIGHT_GUESTS; ci/test images runs it"]
fn trace_names_the_functions_of_the_kernel() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("t");
    let run = linux(&["--sandbox=strict", "--trace-out", trace.to_str().unwrap()]);
    let script = "delete
        monitor trace start calls
        hbreak *&kernel_init
        continue
        monitor trace stop
        kill
        ";
    let text = run.gdb(&format!("{TO_SCHEDULING}{script}"));
    let parts = ["calls are traced to", "kernel_init", " records, "];
    in_order(&text, &[&SCHEDULES[..], &parts].concat());
    let lines = records(&trace);
    assert!(lines[0].contains(" rest_init+"), "{}", lines[0]);
    // The boot task leaves the processor, and `kernel_init` runs in its own task.
    let has_call = |call: &str| lines.iter().any(|line| line.contains(call));
    assert!(has_call("-> schedule_preempt_disabled") && has_call("-> finish_task_switch"));
    let last = lines.last().unwrap();
    assert!(last.ends_with("-> kernel_init"), "{last}");
}
