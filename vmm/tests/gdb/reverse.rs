//! Going back in deterministic runs.

use crate::rig::{Guest, Run, in_order};

#[test]
fn writer_of_a_corrupted_word_is_found_backwards() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "break print
        continue
        print jobs.guard == 0x5ca1ab1e
        watch jobs.guard
        reverse-continue
        backtrace
        reverse-continue
        print jobs.guard == 0x5ca1ab1e
        delete
        monitor goto
        reverse-stepi
        monitor goto
        stepi
        monitor goto
        break work
        reverse-continue
        print jobs.put
        reverse-stepi
        delete
        reverse-continue
        info symbol $pc
        continue
        ",
    );
    in_order(
        &text,
        &[
            "Breakpoint 1, print",
            "= 0",
            "Hardware watchpoint 2: jobs.guard",
            "Old value = 57",
            "New value = 27",
            "queue_put",
            "Old value = 27",
            "New value = 1554098974",
            "= 1",
            "work (count=20)",
            "= 0",
            "No more reverse-execution history.",
            "_start in section .text",
            "exited with code 03",
        ],
    );
    let (status, output) = run.finish();
    assert_eq!(status, Some(3));
    assert!(output.ends_with("the guard is broken\n"), "{output}");
}

#[test]
fn goes_to_any_instruction_and_back() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "monitor goto 100
        maintenance flush register-cache
        print $there = $pc
        monitor goto 10
        monitor goto 100
        maintenance flush register-cache
        print $there == $pc
        monitor goto x
        kill
        ",
    );
    in_order(
        &text,
        &[
            "at instruction 100",
            "at instruction 10",
            "at instruction 100",
            "x is not a number",
        ],
    );
    assert!(text.contains("$2 = 1"), "{text}");
}

#[test]
fn other_runs_do_not_go_back() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb("reverse-stepi\nmonitor goto 1\nkill\n");
    assert!(text.contains("does not support"), "{text}");
    assert!(text.contains("only a run with --deterministic"), "{text}");
}
