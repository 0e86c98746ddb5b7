//! Samples of the call stacks at equal intervals, for pictures with a time axis.

use std::collections::HashMap;

use hindsight_cpu::branch::BranchClass;
use hindsight_trace::{Event, Record, TraceHeader};

use crate::flow::Vcpus;
use crate::input::RecordStream;
use crate::stack::CallTree;
use crate::symbols::FunctionTable;

/// Maximum number of samples of a vCPU; when there are more, every second one is dropped.
const SAMPLES_MAX: usize = 1 << 16;
/// Maximum number of marks of a trace; later ones are counted only.
const MARKS_MAX: usize = 1 << 17;
/// Instructions between two samples at first.
const INTERVAL: u64 = 64;

/// The call stack of a vCPU at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StackSample {
    pub(crate) ticks: u64,
    /// Instructions up to the next sample.
    pub(crate) instructions: u64,
    pub(crate) node: u32,
}

/// An event with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) cpu: u32,
    pub(crate) ticks: u64,
    pub(crate) at: u64,
    pub(crate) event: Event,
}

/// The samples of one vCPU.
#[derive(Debug)]
pub(crate) struct SampledStacks {
    pub(crate) samples: Vec<StackSample>,
    pub(crate) last_ticks: u64,
    interval: u64,
    next_at: u64,
    last_at: u64,
}

impl SampledStacks {
    fn new(record: &Record) -> Self {
        Self {
            samples: Vec::new(),
            last_ticks: record.ticks,
            interval: INTERVAL,
            next_at: record.at,
            last_at: record.at,
        }
    }

    fn add(&mut self, record: &Record, node: u32) {
        self.last_ticks = record.ticks;
        if record.at < self.next_at {
            return;
        }
        if let Some(last) = self.samples.last_mut() {
            last.instructions = record.at - self.last_at;
        }
        self.samples.push(StackSample {
            ticks: record.ticks,
            instructions: 0,
            node,
        });
        self.last_at = record.at;
        self.next_at = record.at + self.interval;
        if self.samples.len() >= SAMPLES_MAX {
            self.thin_out();
        }
    }

    /// Drops every second sample.
    fn thin_out(&mut self) {
        let pairs = self.samples.chunks(2);
        let merged = pairs.map(|pair| StackSample {
            instructions: pair.iter().map(|sample| sample.instructions).sum(),
            ..pair[0]
        });
        self.samples = merged.collect();
        self.interval *= 2;
    }
}

/// A trace as it is drawn over time.
#[derive(Debug)]
pub(crate) struct SampledRun {
    pub(crate) tree: CallTree,
    pub(crate) vcpus: HashMap<u32, SampledStacks>,
    /// In the order of the trace.
    pub(crate) marks: Vec<Mark>,
    /// Number of marks beyond the limit, which were dropped.
    pub(crate) dropped: u64,
}

/// Whether an event gets a mark. Of the branches, only transactional aborts do.
const fn is_mark(event: &Event) -> bool {
    match event {
        Event::Branch(branch) => matches!(branch.class, BranchClass::Abort),
        Event::Time { .. } | Event::Access { .. } => false,
        _ => true,
    }
}

impl SampledRun {
    /// Samples `records`.
    pub(crate) fn of(
        records: RecordStream<'_>,
        header: &TraceHeader,
        functions: &FunctionTable,
    ) -> Self {
        let mut timeline = Self {
            tree: CallTree::new(),
            vcpus: HashMap::new(),
            marks: Vec::new(),
            dropped: 0,
        };
        let mut flows = Vcpus::new(header);
        for record in records {
            let Some(record) = record else {
                flows.clear();
                continue;
            };
            timeline.add(&record, &mut flows, functions);
        }
        timeline
    }

    fn add(&mut self, record: &Record, flows: &mut Vcpus, functions: &FunctionTable) {
        let flow = flows.of(record);
        if flow.follow(record, &mut self.tree, functions).is_some() {
            let sampled = self.vcpus.entry(record.cpu);
            let sampled = sampled.or_insert_with(|| SampledStacks::new(record));
            sampled.add(record, flow.stack.top());
        }
        if is_mark(&record.event) {
            if self.marks.len() < MARKS_MAX {
                let Record {
                    cpu,
                    at,
                    ticks,
                    event,
                } = *record;
                self.marks.push(Mark {
                    cpu,
                    ticks,
                    at,
                    event,
                });
            } else {
                self.dropped += 1;
            }
        }
    }

    /// The vCPUs with their samples, in order of their numbers.
    pub(crate) fn by_cpu(&self) -> Vec<(u32, &SampledStacks)> {
        let mut vcpus: Vec<_> = self
            .vcpus
            .iter()
            .map(|(&cpu, sampled)| (cpu, sampled))
            .collect();
        vcpus.sort_by_key(|(cpu, _)| *cpu);
        vcpus
    }
}

/// Converts a reading of the clock to nanoseconds.
pub(crate) fn nanoseconds(ticks: u64, header: &TraceHeader) -> u64 {
    let ns = u128::from(ticks) * 1_000_000_000 / u128::from(header.tsc_hz.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// A mark in a few words: what it is, and its numbers.
pub(crate) fn describe(event: &Event) -> (&'static str, String) {
    match *event {
        Event::Delivery {
            vector,
            error_code,
            address,
        } => {
            let mut text = format!("vector {vector:#x}");
            text += &error_code.map_or(String::new(), |code| format!(" error {code:#x}"));
            text += &address.map_or(String::new(), |address| format!(" address {address:#x}"));
            (
                if vector < 32 {
                    "exception"
                } else {
                    "interrupt"
                },
                text,
            )
        }
        Event::MsrRead { index, value } => {
            let value = value.map_or("#GP".to_owned(), |value| format!("{value:#x}"));
            ("rdmsr", format!("{index:#x} = {value}"))
        }
        Event::MsrWrite {
            index,
            value,
            accepted,
        } => {
            let fault = if accepted { "" } else { " #GP" };
            ("wrmsr", format!("{index:#x} = {value:#x}{fault}"))
        }
        Event::Device(access) => {
            let name = match (access.port, access.write) {
                (true, false) => "in",
                (true, true) => "out",
                (false, false) => "mmio read",
                (false, true) => "mmio write",
            };
            (name, format!("{:#x} = {:#x}", access.address, access.value))
        }
        Event::ControlRegister { number, value } => {
            ("control register", format!("cr{number} = {value:#x}"))
        }
        Event::Halt => ("hlt", String::new()),
        Event::Branch(_) => ("abort", String::new()),
        Event::Task(Some(task)) => ("task", format!("{} {}", task.name(), task.pid)),
        Event::Task(None) => ("task", "unknown".to_owned()),
        Event::Access { .. } | Event::Time { .. } => ("event", String::new()),
    }
}
