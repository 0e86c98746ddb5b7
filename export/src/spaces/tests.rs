//! The names of addresses, for logs of processes.

use std::rc::Rc;

use super::builder::SPACE_RANGES_MAX;
use super::*;
use crate::elf::ElfCode;
use crate::symbols::Function;
use hindsight_trace::{LoggedFunction, LoggedMapping, ProcessEvent, ProcessRecord};

fn record(ticks: u64, event: ProcessEvent) -> ProcessRecord {
    ProcessRecord {
        cpu: 0,
        at: ticks,
        ticks,
        event,
    }
}

fn map(tgid: u32, start: u64, path: &str) -> ProcessEvent {
    ProcessEvent::Map(LoggedMapping {
        tgid,
        start,
        len: 0x1000,
        offset: 0x1000,
        path: path.to_owned(),
        build_id: String::new(),
    })
}

fn file(path: &str, function: &str) -> ProcessEvent {
    ProcessEvent::File {
        path: path.to_owned(),
        build_id: String::new(),
        functions: vec![LoggedFunction(0x40_1010, 0x20, function.to_owned())],
        segments: vec![(0x40_1000, 0x1000, 0x1000)],
    }
}

/// A table of two programs, each with one function 10H bytes into its code.
fn table(events: Vec<(u64, ProcessEvent)>) -> FunctionTable {
    let kernel = ProcessEvent::Kernel {
        base: 0xffff_ffff_8100_0000,
        functions: vec![LoggedFunction(0x10, 0, "schedule".to_owned())],
    };
    let files = [file("/bin/a", "a_main"), file("/bin/b", "b_main")];
    let log = std::iter::once(kernel).chain(files);
    let mut log: Vec<_> = log.map(|event| record(0, event)).collect();
    log.extend(
        events
            .into_iter()
            .map(|(ticks, event)| record(ticks, event)),
    );
    FunctionTable::default().with_processes(&log, &mut |_, _| None)
}

fn name(table: &FunctionTable, tgid: u32, ticks: u64, address: u64) -> String {
    let (space, _) = table.spaces().at(tgid, ticks);
    table.name_address_in(space, address)
}

#[test]
fn address_is_named_by_the_program_that_the_process_executes() {
    let exec = |tgid| ProcessEvent::Exec {
        tgid,
        name: "x".to_owned(),
    };
    let fork = ProcessEvent::Fork {
        parent: 1,
        tgid: 2,
        pid: 2,
    };
    let table = table(vec![
        (1, exec(1)),
        (2, map(1, 0x5000, "/bin/a")),
        (10, fork),
        (20, exec(2)),
        (21, map(2, 0x5000, "/bin/b")),
    ]);
    assert_eq!(name(&table, 1, 5, 0x5014), "a_main+0x4");
    assert_eq!(name(&table, 2, 15, 0x5010), "a_main");
    assert_eq!(name(&table, 2, 20, 0x5010), "0x5010");
    assert_eq!(name(&table, 2, 30, 0x5010), "b_main");
    assert_eq!(name(&table, 1, 30, 0x5010), "a_main");
    assert_eq!(name(&table, 3, 30, 0x5010), "0x5010");
    assert_eq!(name(&table, 1, 30, 0x5030), "0x5030");
    assert_eq!(name(&table, 9, 0, 0xffff_ffff_8100_0010), "schedule");
}

#[test]
fn mapping_over_another_one_replaces_it_from_then_on() {
    let table = table(vec![
        (2, map(1, 0x5000, "/bin/a")),
        (9, map(1, 0x5000, "/bin/unknown")),
        (12, map(1, 0x5000, "/bin/b")),
    ]);
    assert_eq!(name(&table, 1, 5, 0x5010), "a_main");
    assert_eq!(name(&table, 1, 10, 0x5010), "0x5010");
    assert_eq!(name(&table, 1, 12, 0x5010), "b_main");
}

/// Every mapping of a log of `kinds` of them.
fn many(tgid: impl Fn(u64) -> u32, start: impl Fn(u64) -> u64, count: u64) -> FunctionTable {
    table(
        (0..count)
            .map(|n| (n, map(tgid(n), start(n), "/bin/a")))
            .collect(),
    )
}

#[test]
fn long_logs_take_no_quadratic_time() {
    let start = std::time::Instant::now();
    let last = SPACE_RANGES_MAX as u64 - 1;
    // Descending addresses of one process: each range precedes those before.
    let one = many(|_| 1, |n| 0x1000 * (200_000 - n), 70_000);
    let at = |n: u64| name(&one, 1, u64::MAX, 0x1000 * (200_000 - n) + 0x10);
    assert_eq!(
        (at(0), at(last)),
        ("a_main".to_owned(), "a_main".to_owned())
    );
    assert_ne!(at(last + 1), "a_main", "more ranges than Linux permits");
    // As many processes as mappings, and then as many mappings again.
    let several = many(
        |n| u32::try_from(n % 50_000).unwrap(),
        |n| 0x1000 * (n + 1),
        100_000,
    );
    assert_eq!(
        name(&several, 49_999, u64::MAX, 0x1000 * 100_000 + 0x10),
        "a_main"
    );
    assert!(start.elapsed().as_secs() < 20);
}

#[test]
fn file_that_the_host_lacks_is_requested_once() {
    let mut log = vec![record(
        0,
        ProcessEvent::Kernel {
            base: 0,
            functions: vec![LoggedFunction(0x10, 0, "schedule".to_owned())],
        },
    )];
    log.extend((0..10).map(|n| record(n, map(1, 0x1000 * (n + 1), "/bin/none"))));
    let mut calls = 0;
    let mut host = |_: &str, _: &str| {
        calls += 1;
        None
    };
    let _ = FunctionTable::default().with_processes(&log, &mut host);
    assert_eq!(calls, 1);
}

#[test]
fn functions_of_a_debug_file_have_the_segments_of_the_log() {
    let code = Rc::new(ElfCode {
        build_id: String::new(),
        segments: vec![CodeSegment {
            address: 0x40_1000,
            offset: 0x1000,
            size: 0,
        }],
        functions: vec![Function {
            address: 0x40_1020,
            size: 0x10,
            name: "debug".to_owned(),
        }],
    });
    let kernel = ProcessEvent::Kernel {
        base: 0,
        functions: vec![LoggedFunction(0x10, 0, "schedule".to_owned())],
    };
    let events = [
        kernel,
        file("/bin/a", "a_main"),
        file("/bin/b", "b_main"),
        map(1, 0x5000, "/bin/a"),
        map(2, 0x5000, "/bin/b"),
    ];
    let log: Vec<_> = events.into_iter().map(|event| record(0, event)).collect();
    let mut host = |_: &str, _: &str| Some(code.clone());
    let table = FunctionTable::default().with_processes(&log, &mut host);
    assert_eq!(name(&table, 1, 5, 0x5024), "debug+0x4");
    assert_eq!(name(&table, 2, 5, 0x5024), "debug+0x4");
}

#[test]
fn file_that_was_rebuilt_has_its_new_functions() {
    let table = table(vec![
        (1, map(1, 0x5000, "/bin/a")),
        (2, file("/bin/a", "new_main")),
        (3, map(2, 0x5000, "/bin/a")),
    ]);
    assert_eq!(name(&table, 1, 9, 0x5010), "a_main");
    assert_eq!(name(&table, 2, 9, 0x5010), "new_main");
}

#[test]
fn log_without_its_end_names_nothing_after_it() {
    let table = table(vec![
        (1, map(1, 0x5000, "/bin/a")),
        (5, ProcessEvent::Truncated {}),
        (6, map(2, 0x5000, "/bin/b")),
    ]);
    assert_eq!(name(&table, 1, 4, 0x5010), "a_main");
    assert_eq!(name(&table, 1, 5, 0x5010), "0x5010");
    assert_eq!(name(&table, 2, 9, 0x5010), "0x5010");
}

#[test]
fn last_function_of_the_kernel_ends_with_its_page() {
    let module = ProcessEvent::Module {
        name: "overlay".to_owned(),
        start: 0xffff_ffff_c000_0000,
        len: 0x1000,
        functions: vec![LoggedFunction(0, 0x10, "open".to_owned())],
    };
    let table = table(vec![(1, module)]);
    assert_eq!(table.name_address(0xffff_ffff_8100_0fff), "schedule+0xfef");
    assert_eq!(
        table.name_address(0xffff_ffff_8100_1000),
        "0xffffffff81001000"
    );
    assert_eq!(table.name_address(0xffff_ffff_c000_0000), "open [overlay]");
}
