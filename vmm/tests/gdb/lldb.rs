//! A session of lldb.

use crate::rig::{Guest, Run, in_order};

#[test]
fn lldb_debugs_by_source_line() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.lldb(
        "thread list
        breakpoint set --name queue_put --condition job==9
        continue
        bt
        frame variable
        expression job + 1
        finish
        thread step-inst
        register read rip cr0
        breakpoint delete --force
        watchpoint set variable jobs.guard
        continue
        watchpoint delete --force
        memory read --count 4 0x200000
        process plugin packet monitor mem
        continue
        ",
    );
    in_order(
        &text,
        &[
            "thread #1",
            "stop reason = breakpoint 1.1",
            "queue_put(queue=",
            "main at main.c",
            "(long) job = 9",
            "= 10",
            "Return value: (int) $1 = 1",
            "instruction step into",
            "cr0 = 0x",
            "stop reason = watchpoint 1",
            "0x00200000: ",
            "RAM",
            "exited with status = 3",
        ],
    );
    // lldb prints this at a time of its own.
    assert!(text.contains("new value: 27"), "{text}");
    assert_eq!(run.finish().0, Some(3));
}

#[test]
fn lldb_reads_how_memory_is_mapped() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.lldb(
        "breakpoint set --name queue_put
        continue
        memory region `$pc`
        memory region `$sp`
        memory region 0x500000000000
        process kill
        ",
    );
    // The sample's page tables map 4 GiB.
    in_order(
        &text,
        &[
            "memory region `$pc`",
            "[0x0000000000000000-0x0000000100000000) rwx",
            "memory region `$sp`",
            "[0x0000000000000000-0x0000000100000000) rwx",
            "memory region 0x500000000000",
            "[0x0000000100000000-0xffffffffffffffff) ---",
        ],
    );
}
