//! What a user does with gdb.

use crate::rig::{Guest, Run, in_order};

#[test]
fn source_level_session_reaches_the_end_of_the_guest() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "info threads
        break queue_put if job == 9
        continue
        backtrace
        info locals
        print *queue
        finish
        next
        tbreak queue_take
        continue
        stepi
        x/i $pc
        until
        delete
        print total = 1000
        continue
        ",
    );
    in_order(
        &text,
        &[
            "_start () at",
            "\"vCPU 0\" (runs, 64-bit, CPL 0)",
            "Breakpoint 1, queue_put (queue=",
            "job=job@entry=9) at",
            "#1  ",
            "work (count=20)",
            "#2  ",
            "main () at",
            "put = 2",
            "Value returned is $",
            "Temporary breakpoint 2, queue_take",
            "=> 0x",
            "exited with code 03",
        ],
    );
    let (status, output) = run.finish();
    assert_eq!(
        (status, output.as_str()),
        (Some(3), "the guard is broken\n")
    );
}

#[test]
fn registers_show_flags_and_take_values() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "print $efer
        print $cr0
        print $cs_access
        print $dr7
        print/x $mxcsr
        print $debugctl
        print/x $gdtr_limit
        set $rbx = 0x123456789
        print/x $rbx
        set $xmm3.v2_int64[0] = 0x1122334455667788
        print/x $xmm3.v2_int64[0]
        set $st2 = 2.5
        print $st2
        set $k_gs_base = 0xffff800000000000
        print/x $k_gs_base
        monitor msr 0xc0000102
        set $cr0 = 0
        print $cr0
        monitor msr tsc_aux 7
        print $tsc_aux
        stepi
        print/x $rbx
        print/x $xmm3.v2_int64[0]
        print $st2
        info registers rip eflags cs fs_base
        monitor regs system
        monitor regs nothing
        monitor pt 0x200000
        set $efer = $efer | 0x800
        monitor pt 0x200000
        kill
        ",
    );
    in_order(
        &text,
        &[
            "= [ LME LMA ]",
            "= [ PE ET PG ]",
            "TYPE=11",
            "= [ ",
            "= 0x1f80",
            "= [ ]",
            "= 0x2f",
            "= 0x123456789",
            "= 0x1122334455667788",
            "= 2.5",
            "= 0xffff800000000000",
            "0xc0000102 = 0xffff800000000000",
            "0xc0000103 = 0x7",
            "= 7",
            "= 0x123456789",
            "= 0x1122334455667788",
            "= 2.5",
            "rip",
            "eflags",
            "idtr_base",
            "no registers of a group nothing",
            "--X",
            "--X",
        ],
    );
    assert_eq!(run.finish().0, Some(0), "killed by gdb");
}

#[test]
fn non_canonical_addresses_are_not_mapped() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "print/x *(char *)0x200000
        print *(char *)0x8000000000200000
        set var *(char *)0x8000000000200000 = 0x55
        print/x *(char *)0x200000 == 0x55
        monitor pt 0x8000000000200000
        monitor disas 0x8000000000200000
        kill
        ",
    );
    in_order(
        &text,
        &[
            "$1 = 0x",
            "Cannot access memory at address 0x8000000000200000",
            "Cannot access memory at address 0x8000000000200000",
            "$2 = 0x0",
            "0x8000000000200000 is not canonical",
            "0x8000000000200000 is not mapped",
        ],
    );
}

#[test]
fn register_write_that_the_processor_refuses_fails() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "set $cr4 = 0xffffffffUL
        set $cr3 = 0xffffffffffffffffUL
        set $eflags = 0x20002
        set $efer = 0x400UL
        set $cr0 = 0x80000010UL
        print $cr4
        print $efer
        stepi
        kill
        ",
    );
    in_order(
        &text,
        &[
            "\"cr4\"; remote failure reply 'E.the processor cannot have this value",
            "\"cr3\"; remote failure reply 'E.the processor cannot have this value",
            "\"eflags\"; remote failure reply 'E.the processor cannot have this value",
            "\"efer\"; remote failure reply 'E.the processor cannot have this value",
            "\"cr0\"; remote failure reply 'E.the processor cannot have this value",
            "= [ PAE",
            "= [ LME LMA ]",
        ],
    );
    assert_eq!(run.finish().0, Some(0), "killed by gdb");
}

#[test]
fn msr_command_takes_names_of_registers() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "monitor msr efer
        monitor msr 0xc0000080 0x501
        print $efer
        monitor msr efer 0x100
        monitor msr gs_base 0x1234
        monitor msr fs_base
        print $gs_base
        monitor msr k_gs_base
        monitor msr debugctl
        monitor msr rax
        kill
        ",
    );
    in_order(
        &text,
        &[
            "0xc0000080 = 0x500",
            "0xc0000080 = 0x501",
            "= [ SCE LME LMA ]",
            "cannot have this value",
            "0xc0000101 = 0x1234",
            "0xc0000100 = 0x0",
            "= 4660",
            "0xc0000102 = 0x0",
            "0x1d9 = 0x0",
            "rax is neither",
        ],
    );
}

#[test]
fn more_than_four_watchpoints_of_every_kind_stop_the_guest() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "break work
        continue
        watch jobs.guard
        watch jobs.slots[0]
        watch jobs.slots[1]
        watch jobs.slots[2]
        watch jobs.slots[3]
        watch jobs.slots[4]
        rwatch total
        awatch jobs.taken
        continue
        continue
        delete 3-9
        continue
        info symbol $pc
        ",
    );
    in_order(
        &text,
        &[
            "Breakpoint 1, work",
            "Hardware watchpoint 2: jobs.guard",
            "Hardware read watchpoint 8: total",
            "Hardware access (read/write) watchpoint 9: jobs.taken",
            "Hardware access (read/write) watchpoint 9: jobs.taken",
            "Value = 0",
            "Hardware watchpoint 3: jobs.slots[0]",
            "Old value = 0",
            "New value = 3",
            "Hardware watchpoint 2: jobs.guard",
            "New value = 27",
            "queue_put",
        ],
    );
}

#[test]
fn session_follows_the_guest_from_real_mode_to_64_bit_mode() {
    let run = Run::waiting(Guest::Real("modes"), &[]);
    let text = run.gdb(
        "monitor mode i8086
        unset tdesc filename
        break *real
        continue
        x/i $pc
        print/x $cs
        print/x $ip
        stepi
        print/x $ebx & 0xffff
        watch *(int *)0x500
        continue
        delete 2
        monitor mode i386
        unset tdesc filename
        hbreak *protected
        continue
        stepi
        print/x $eax & 0xffff
        x/i $pc
        monitor mode x86_64
        unset tdesc filename
        hbreak *long_mode
        continue
        stepi
        print/x $r15
        print $efer
        print/x *(int *)0x500
        continue
        ",
    );
    in_order(
        &text,
        &[
            "mode is i8086",
            "Breakpoint 1, real () at",
            "=> 0x7c0d <real>:\tmov    $0x1234,%bx",
            "= 0x7c0",
            "= 0xd",
            "= 0x1234",
            "atchpoint 2: *(int *)0x500",
            "New value = -17958194",
            "mode is i386",
            "Breakpoint 3, protected () at",
            "= 0x10",
            "mov    %eax,%ds",
            "mode is x86_64",
            "Breakpoint 4, long_mode () at",
            "= 0x1122334455667788",
            "= [ LME LMA ]",
            "= 0xfeedface",
            "exited with code 01",
        ],
    );
}

#[test]
fn guest_debug_registers_work_under_a_debugger() {
    let undisturbed = Run::start(Guest::Long("debug"), &[]);
    assert_eq!(undisturbed.finish().0, Some(1), "without a debugger");
    let run = Run::waiting(Guest::Long("debug"), &[]);
    let text = run.gdb(
        "hbreak mine
        break handler
        watch *(long *)&watched
        awatch *(int *)&plain
        continue
        stepi
        continue
        stepi
        stepi
        print $dr7
        print $dr6
        delete
        continue
        ",
    );
    in_order(
        &text,
        &[
            "Hardware access (read/write) watchpoint 4: *(int *)&plain",
            "Breakpoint 1, mine () at",
            "handler () at",
            "G0 G1",
            "= [ RTM ]",
            "exited with code 01",
        ],
    );
    assert_eq!(run.finish().0, Some(1));
}

#[test]
fn clients_attach_detach_and_interrupt_repeatedly() {
    let run = Run::start(Guest::Long("spin"), &["--trace", "gdb"]);
    for _ in 0..3 {
        let text = run.gdb("print *(long *)&count\nstepi\ndetach\n");
        in_order(&text, &["$1 = ", "detached"]);
    }
    let gdb = run.spawn_gdb("continue\ninfo registers rip\nkill\n");
    run.wait_for("the guest to run", || run.stderr().contains("<- vCont;c"));
    gdb.interrupt();
    in_order(&gdb.wait(), &["Program received signal SIGINT", "rip"]);
    assert_eq!(run.finish().0, Some(0));
}

#[test]
fn triple_fault_waits_for_a_debugger() {
    let run = Run::start(Guest::Long("spin"), &[]);
    run.gdb("set variable *(int *)&stop = 1\ndetach\n");
    run.wait_for("the report", || {
        run.stderr().contains("waits for a debugger")
    });
    assert!(run.stderr().contains("triple-faulted"));
    let text = run.gdb("info threads\nx/i $pc\nprint $idtr_limit\ncontinue\n");
    if run.stderr().contains("KVM has reset the processor") {
        // KVM on AMD.
        let parts = [
            "shut down",
            "real mode",
            "$1 = 65535",
            "exited with code 04",
        ];
        in_order(&text, &parts);
    } else {
        in_order(
            &text,
            &[
                "shut down by a triple fault",
                "ud2",
                "$1 = 0",
                "exited with code 04",
            ],
        );
    }
    assert_eq!(run.finish().0, Some(4));
}

#[test]
fn vcpus_step_independently() {
    let run = Run::waiting(Guest::Long("two"), &["--cpus", "2"]);
    let text = run.gdb(
        "info threads
        break spin0
        continue
        delete
        stepi
        thread 2
        print/x $cs
        set scheduler-locking on
        print $before = *(long *)&count0
        stepi
        stepi
        stepi
        print $before == *(long *)&count0
        thread 1
        print $before = *(int *)&count1
        stepi
        stepi
        print $before == *(int *)&count1
        set scheduler-locking off
        info threads
        kill
        ",
    );
    in_order(
        &text,
        &[
            "\"vCPU 0\" (runs, 64-bit, CPL 0)",
            "\"vCPU 1\" (waits for SIPI, real mode, CPL 0)",
            "spin0 () at",
            "[Switching to thread 2",
            "= 0x800",
            "= 1",
            "[Switching to thread 1",
            "= 1",
            "\"vCPU 1\" (runs, real mode, CPL 0)",
        ],
    );
}

#[test]
fn phys_command_selects_physical_addresses() {
    let run = Run::waiting(Guest::Real("modes"), &[]);
    let text = run.gdb(
        "monitor phys on
        set *(int *)0x9000 = 0x5eed
        print/x *(int *)0x9000
        print *(char *)0xfee00020
        monitor phys off
        monitor phys maybe
        monitor
        kill
        ",
    );
    in_order(
        &text,
        &[
            "phys is on",
            "= 0x5eed",
            "Cannot access memory at address 0xfee00020",
            "phys is off",
            "usage: monitor phys on|off",
            "help [COMMAND]",
        ],
    );
}

#[test]
fn gdb_calls_functions_of_the_guest() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "break work
        continue
        print queue_put(&jobs, 5)
        print queue_take(&jobs)
        print jobs.taken
        backtrace 1
        kill
        ",
    );
    in_order(
        &text,
        &["$1 = 1", "$2 = 5", "$3 = 1", "#0  work (count=20)"],
    );
}

#[test]
fn screendump_writes_the_picture_of_the_display() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("picture.png");
    let first = folder.path().join("first.png");
    let options = ["--display", picture.to_str().unwrap(), "--sandbox=strict"];
    let run = Run::waiting(Guest::Sample, &options);
    let text = run.gdb(&format!(
        "set {{short}}0xb8000 = 0x1e48
        monitor screendump
        shell cp {0} {1}
        set {{short}}0xb8000 = 0x0720
        monitor screendump
        shell cmp -s {0} {1} || echo the pictures differ
        monitor screendump other.png
        ",
        picture.display(),
        first.display()
    ));
    let written = "the picture is written";
    in_order(
        &text,
        &[written, written, "the pictures differ", "screendump"],
    );
    for picture in [picture, first] {
        let png = std::fs::read(picture).unwrap();
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"));
        assert!(png.ends_with(b"IEND\xaeB`\x82"), "nothing follows");
    }
}

#[test]
fn sendkey_presses_keys_where_there_is_a_keyboard() {
    let run = Run::waiting(Guest::Sample, &["--display", "text"]);
    let text = run.gdb(
        "monitor sendkey h i shift-1 ret
        monitor sendkey nokey
        monitor sendkey
        ",
    );
    let expected = ["the keys are pressed", "there is no key nokey", "KEYS"];
    in_order(&text, &expected);
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb("monitor sendkey a");
    in_order(&text, &["there is no keyboard: it needs --display"]);
}

#[test]
fn screendump_without_a_file_names_the_option() {
    let run = Run::waiting(Guest::Sample, &["--display", "text"]);
    let text = run.gdb("monitor screendump");
    in_order(
        &text,
        &["the run has no file for pictures: --display FILE.png"],
    );
}
