//! Switches of tasks and the process log, as they are written and read back.

use std::io::Cursor;

use super::tests::{SharedFile, branch, header, options};
use super::*;
use crate::event::Record;
use crate::process::{LinuxTask, ProcessEvent};
use crate::reader::TraceReader;
use crate::select::{ProcessFilter, Window};

fn task(pid: u32, tgid: u32, name: &str) -> Event {
    let mut comm = [0; 16];
    comm[..name.len()].copy_from_slice(name.as_bytes());
    Event::Task(Some(LinuxTask { pid, tgid, comm }))
}

/// A trace of four tasks, each of which takes ten branches of three instructions.
fn trace(selection: Selection, last: Option<u64>) -> TraceReader<Cursor<Vec<u8>>> {
    let file = SharedFile::new(usize::MAX);
    let writer =
        TraceWriter::start(Box::new(file.clone()), &header(1), options(selection, last)).unwrap();
    let mut tracer = writer.tracer(0);
    let tasks = [
        task(1, 1, "init"),
        task(7, 5, "worker"),
        Event::Task(None),
        task(5, 5, "sort"),
    ];
    let mut at = 0;
    for event in tasks {
        tracer.event(at, at, event);
        tracer.process(
            at,
            at,
            ProcessEvent::Exec {
                tgid: 5,
                name: format!("at {at}"),
            },
        );
        let branches: Vec<_> = (0..10).map(|n| branch(n, at + 3 * (n + 1))).collect();
        at += 30;
        tracer.branches(0, &branches, at, at);
        at += 1;
    }
    drop(tracer);
    writer.finish().unwrap();
    TraceReader::new(Cursor::new(file.take())).unwrap()
}

fn processes(kinds: EventKinds, filters: &[ProcessFilter]) -> Selection {
    Selection {
        kinds,
        processes: filters.to_vec(),
        ..Selection::default()
    }
}

/// The names of the tasks, and the counts of the branches after each.
fn summary(records: impl Iterator<Item = Record>) -> Vec<(Option<String>, usize)> {
    let mut tasks = Vec::new();
    for record in records {
        match (record.event, tasks.last_mut()) {
            (Event::Task(task), _) => tasks.push((task.map(|task| task.name()), 0)),
            (Event::Branch(_), Some((_, count))) => *count += 1,
            _ => {}
        }
    }
    tasks
}

#[test]
fn process_filter_selects_the_branches_of_its_tasks() {
    let of = |filter| {
        let mut trace = trace(processes(EventKinds::BRANCHES, &[filter]), None);
        summary(trace.records().map(Result::unwrap))
    };
    let named = |name: &str| Some(name.to_owned());
    assert_eq!(
        of(ProcessFilter::Name("sort".to_owned())),
        [(named("sort"), 10)]
    );
    assert_eq!(
        of(ProcessFilter::Pid(5)),
        [(named("worker"), 10), (None, 0), (named("sort"), 10)]
    );
    assert_eq!(
        of(ProcessFilter::Pid(7)),
        [(named("worker"), 10), (None, 0)]
    );
    assert!(of(ProcessFilter::Name("other".to_owned())).is_empty());
}

#[test]
fn range_begins_with_the_task_that_runs() {
    let kinds = EventKinds::BRANCHES | EventKinds::PROCESSES;
    let mut trace = trace(processes(kinds, &[]), None);
    let records: Vec<_> = trace.records_within(40..=70).map(Result::unwrap).collect();
    assert_eq!(records[0].event, task(7, 5, "worker"));
    assert_eq!((records[0].at, records[1].at), (40, 40));
    let tasks = summary(records.into_iter());
    assert_eq!(tasks, [(Some("worker".to_owned()), 8), (None, 2)]);
}

#[test]
fn process_log_is_complete_whatever_is_selected() {
    let window = Selection {
        window: Window {
            after: 100,
            ..Window::default()
        },
        ..processes(EventKinds::BRANCHES | EventKinds::PROCESSES, &[])
    };
    for (selection, last) in [
        (window, None),
        (processes(EventKinds::PROCESSES, &[]), Some(1)),
    ] {
        let mut trace = trace(selection, last);
        let log = trace.processes(&mut |error| panic!("{error}"));
        let at: Vec<_> = log.iter().map(|record| record.at).collect();
        assert_eq!(at, [0, 31, 62, 93]);
    }
}

#[test]
fn every_block_begins_with_the_task_that_runs() {
    let window = Selection {
        window: Window {
            after: 100,
            ..Window::default()
        },
        ..processes(EventKinds::BRANCHES | EventKinds::PROCESSES, &[])
    };
    let mut trace = trace(window, None);
    let tasks = summary(trace.records().map(Result::unwrap));
    assert_eq!(tasks, [(Some("sort".to_owned()), 8)]);
}

#[test]
fn clock_is_right_after_code_that_is_not_selected() {
    let file = SharedFile::new(usize::MAX);
    let filter = [ProcessFilter::Pid(5)];
    let selection = processes(EventKinds::BRANCHES, &filter);
    let options = options(selection, None);
    let writer = TraceWriter::start(Box::new(file.clone()), &header(1), options).unwrap();
    let mut tracer = writer.tracer(0);
    tracer.event(0, 0, task(5, 5, "sort"));
    tracer.branches(0, &[branch(0, 10)], 10, 10);
    tracer.event(20, 20, task(1, 1, "init"));
    // The clock jumps twice while another process runs.
    tracer.branches(0, &[branch(1, 30)], 30, 1030);
    tracer.branches(0, &[branch(2, 40)], 40, 5040);
    tracer.event(50, 5050, task(5, 5, "sort"));
    tracer.branches(0, &[branch(3, 60)], 60, 5060);
    drop(tracer);
    writer.finish().unwrap();
    let mut trace = TraceReader::new(Cursor::new(file.take())).unwrap();
    let records = trace.records().map(Result::unwrap);
    let branches = records.filter(|record| matches!(record.event, Event::Branch(_)));
    let times: Vec<_> = branches.map(|record| (record.at, record.ticks)).collect();
    assert_eq!(times, [(10, 10), (60, 5060)]);
}
