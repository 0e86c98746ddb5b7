//! Tests of `hindsight dump`: the guest as a core file.

use std::fs;
use std::process::{Command, Output};

use crate::rig::{Guest, Run, hindsight, in_order};

/// Runs `hindsight dump` for the guest.
fn dump(run: &Run, file: &str) -> Output {
    let address = format!("unix:{}", run.socket().display());
    let path = run.folder().join(file);
    let mut command = hindsight();
    command.arg("dump").arg(address).arg(path);
    command.output().unwrap()
}

/// Runs gdb commands on a core file of the guest, and returns what gdb printed.
fn examine(run: &Run, file: &str, script: &[&str]) -> String {
    let mut command = Command::new("gdb");
    command.args(["-nx", "-batch"]).args(run.symbols());
    command.arg(run.folder().join(file));
    script.iter().for_each(|line| {
        command.args(["-ex", line]);
    });
    let output = command
        .output()
        .expect("gdb is needed: apt-get install gdb");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn dump_has_registers_and_memory_of_a_crashed_guest() {
    let run = Run::waiting(Guest::Sample, &["--cpus", "2", "--memory", "4M"]);
    run.gdb("break queue_put if job == 9\ncontinue\nset var $rip = 0\nset var *(char *)0 = 0x0f\ndetach");
    let output = dump(&run, "core");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("core: 5 MiB\n"));
    let text = examine(
        &run,
        "core",
        &["info threads", "print jobs.put", "x/i &queue_put"],
    );
    in_order(&text, &["LWP 1", "LWP 2", "$1 = 2", "<queue_put>"]);
    // Most of the guest's memory was never touched.
    let metadata = fs::metadata(run.folder().join("core")).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512 < 4 << 20);
}

#[test]
fn dump_without_a_guest_fails_and_leaves_no_file() {
    let run = Run::waiting(Guest::Sample, &[]);
    let mut client = run.connect();
    assert_ne!(client.ask("?"), "");
    let output = dump(&run, "core");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("another debugger may be connected"), "{text}");
    assert!(!run.folder().join("core").exists());
    drop(client);
}

#[test]
fn gdb_writes_a_core_file_of_a_connected_guest() {
    let run = Run::waiting(Guest::Sample, &["--memory", "4M"]);
    let core = run.folder().join("gcore");
    let text = run.gdb(&format!(
        "break queue_put if job == 9\ncontinue\nmonitor phys\ngenerate-core-file {}\nkill",
        core.display()
    ));
    in_order(&text, &["Breakpoint 1", "Saved corefile"]);
    let text = examine(&run, "gcore", &["backtrace", "print queue->put"]);
    in_order(
        &text,
        &["queue_put (queue=", "work (count=20)", "main ()", "$1 = 2"],
    );
}

#[test]
fn start_at_an_instruction_leaves_gdb_with_new_registers() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.extended_gdb(
        "break queue_put if job == 9
        continue
        starti 10
        info registers rip
        monitor goto
        starti
        monitor goto
        continue
        print job
        kill",
    );
    in_order(
        &text,
        &[
            "Breakpoint 1, queue_put",
            "Program stopped.",
            "rip ",
            "at instruction 10",
            "Program stopped.",
            "at instruction 10",
            "Breakpoint 1, queue_put",
            "$1 = 9",
        ],
    );
    let (code, _) = run.finish();
    assert_eq!(code, Some(0));
}

#[test]
fn time_limit_does_not_count_while_a_debugger_holds_the_guest() {
    let run = Run::waiting(Guest::Sample, &["--timeout", "2"]);
    let text = run
        .gdb("break queue_put if job == 9\ncontinue\nshell sleep 3\nprint job\ndelete\ncontinue");
    in_order(&text, &["Breakpoint 1", "$1 = 9", "exited"]);
    assert_ne!(run.finish().0, Some(124));
}
