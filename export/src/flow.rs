//! What the guest executed, summed up: code, branches and calls.

use std::collections::{BTreeMap, HashMap};

use hindsight_cpu::branch::BranchClass;
use hindsight_trace::{BranchEvent, Event, LinuxTask, Record, TraceHeader};

use crate::input::RecordStream;
use crate::spaces::RunningTask;
use crate::stack::{CallStack, CallTree, FlowBranch};
use crate::symbols::FunctionTable;

/// Maximum number of distinct branches that are counted, and most distinct spans.
const DISTINCT_MAX: usize = 8 << 20;

/// Straight code that was executed: from the target of a branch up to the next branch or event.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span {
    /// Address of the first instruction.
    pub(crate) start: u64,
    /// End of the span, exclusive: the address of the instruction that an event interrupted, or one
    /// more than the address of the branch.
    pub(crate) end: u64,
}

/// How often a span was executed, and the number of its instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpanCount {
    pub(crate) count: u64,
    pub(crate) instructions: u64,
}

/// A branch with its target.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Edge {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// How often a branch went to its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EdgeCount {
    pub(crate) class: BranchClass,
    pub(crate) count: u64,
    pub(crate) mispredicted: u64,
}

/// The position of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct VcpuFlow {
    pub(crate) stack: CallStack,
    pub(crate) running: RunningTask,
    /// Code of all tasks is traced.
    is_complete: bool,
    /// Start of the current span, and the count of instructions at it.
    begun: Option<(u64, u64)>,
}

/// A branch, and the code before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowStep {
    pub(crate) branch: FlowBranch,
    /// The code before the branch; `None` for the first branch of a vCPU.
    pub(crate) span: Option<(Span, u64)>,
    pub(crate) mispredicted: bool,
}

impl VcpuFlow {
    /// Advances by a record; returns the branch and the span before it, if it is a branch.
    pub(crate) fn follow(
        &mut self,
        record: &Record,
        tree: &mut CallTree,
        functions: &FunctionTable,
    ) -> Option<FlowStep> {
        if let Event::Task(task) = record.event {
            self.switch(task, record, tree, functions);
        }
        let Event::Branch(BranchEvent {
            from,
            to,
            class,
            cpl,
            to_cpl,
            mispredicted,
        }) = record.event
        else {
            return None;
        };
        self.running.advance(record.ticks, functions);
        let space = self.running.space;
        let span = self.begun.and_then(|(start, at)| {
            let instructions = record.at.saturating_sub(at);
            let end = from.saturating_add(u64::from(class.is_instruction()));
            (start <= from).then_some((Span { start, end }, instructions))
        });
        if let Some((span, instructions)) = span {
            self.stack.enter((space, span.start), cpl, tree, functions);
            self.stack.spend(tree, instructions);
        }
        let branch = FlowBranch {
            space,
            from,
            to,
            class,
            cpl,
            to_cpl,
        };
        self.stack.follow(&branch, tree, functions);
        self.begun = Some((to, record.at));
        Some(FlowStep {
            branch,
            span,
            mispredicted,
        })
    }
}

/// The key of a task's stack. Each vCPU has an idle task of its own.
const fn stack_key(task: Option<LinuxTask>, cpu: u32) -> (u32, u32) {
    match task {
        Some(LinuxTask { pid: 0, .. }) | None => (cpu, 0),
        Some(task) => (u32::MAX, task.pid),
    }
}

impl VcpuFlow {
    /// Switches to the stack and the code of a task.
    fn switch(
        &mut self,
        task: Option<LinuxTask>,
        record: &Record,
        tree: &mut CallTree,
        functions: &FunctionTable,
    ) {
        let old = stack_key(self.running.task, record.cpu);
        tree.park(old, std::mem::take(&mut self.stack));
        self.running.switch(task, record.ticks, functions);
        let name = task.and_then(|task| functions.spaces().name(&task));
        self.stack = match (task, name) {
            (Some(_), Some(_)) => tree.unpark(stack_key(task, record.cpu), name),
            _ => CallStack::default(),
        };
        // In a trace of some processes, the code after this may be of a later time.
        if !self.is_complete {
            self.begun = None;
        }
    }
}

/// Everything that a trace says about the executed code.
#[derive(Debug)]
pub(crate) struct Flow {
    pub(crate) tree: CallTree,
    pub(crate) spans: HashMap<Span, SpanCount>,
    pub(crate) edges: HashMap<Edge, EdgeCount>,
    /// Deliveries by vector.
    pub(crate) vectors: BTreeMap<u8, u64>,
    pub(crate) records: u64,
    pub(crate) branches: u64,
    /// There were more spans and edges than are counted.
    pub(crate) overflowed: bool,
    /// The trace has all branches, so that the code between two of them is known.
    pub(crate) is_contiguous: bool,
}

/// Whether a trace has all branches of a part of a run.
pub(crate) fn is_contiguous(header: &TraceHeader) -> bool {
    let selects_code = |option: &str| header.selection.contains(option);
    let has_branches = header.events.iter().any(|kind| kind == "branches");
    let selects_code = ["--cpl", "--range", "--process"]
        .into_iter()
        .any(selects_code);
    has_branches && !selects_code
}

impl Flow {
    /// Sums up `records`.
    pub(crate) fn of(
        records: RecordStream<'_>,
        functions: &FunctionTable,
        header: &TraceHeader,
    ) -> Self {
        let mut flow = Self {
            tree: CallTree::new(),
            spans: HashMap::new(),
            edges: HashMap::new(),
            vectors: BTreeMap::new(),
            records: 0,
            branches: 0,
            overflowed: false,
            is_contiguous: is_contiguous(header),
        };
        let mut vcpus = Vcpus::new(header);
        for record in records {
            let Some(record) = record else {
                vcpus.clear();
                continue;
            };
            flow.records += 1;
            if let Event::Delivery { vector, .. } = record.event {
                *flow.vectors.entry(vector).or_default() += 1;
            }
            let vcpu = vcpus.of(&record);
            if let Some(step) = vcpu.follow(&record, &mut flow.tree, functions) {
                flow.add(&step);
            }
        }
        flow
    }

    fn add(&mut self, step: &FlowStep) {
        self.branches += 1;
        if self.spans.len() + self.edges.len() >= 2 * DISTINCT_MAX {
            self.overflowed = true;
            return;
        }
        if let Some((span, instructions)) = step.span
            && self.is_contiguous
            && span.start < span.end
        {
            let counted = self.spans.entry(span).or_default();
            counted.count += 1;
            counted.instructions += instructions;
        }
        let edge = Edge {
            from: step.branch.from,
            to: step.branch.to,
        };
        let counted = self.edges.entry(edge).or_insert(EdgeCount {
            class: step.branch.class,
            count: 0,
            mispredicted: 0,
        });
        counted.count += 1;
        counted.mispredicted += u64::from(step.mispredicted);
    }
}

/// The vCPUs of a trace, added at their first record.
#[derive(Debug)]
pub(crate) struct Vcpus {
    flows: HashMap<u32, VcpuFlow>,
    /// Where vCPU 0 starts, if the trace begins there.
    start: Option<u64>,
    /// Code of all tasks is traced.
    is_complete: bool,
}

impl Vcpus {
    pub(crate) fn new(header: &TraceHeader) -> Self {
        let from_start = header.selection.is_empty();
        Self {
            flows: HashMap::new(),
            start: from_start.then_some(header.start),
            is_complete: !header.selection.contains("--process"),
        }
    }

    /// The vCPU of a record.
    pub(crate) fn of(&mut self, record: &Record) -> &mut VcpuFlow {
        let start = &mut self.start;
        self.flows.entry(record.cpu).or_insert_with(|| VcpuFlow {
            is_complete: self.is_complete,
            begun: start.take_if(|_| record.cpu == 0).map(|start| (start, 0)),
            ..VcpuFlow::default()
        })
    }

    /// Drops the position of every vCPU, because records are missing.
    pub(crate) fn clear(&mut self) {
        self.flows.clear();
        self.start = None;
    }
}
