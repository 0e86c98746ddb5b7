//! Computes the sums of a trace that the page shows.

use std::collections::{BTreeMap, HashMap};

use hindsight_trace::TraceHeader;
use serde::Serialize;

use crate::code::execution;
use crate::flamegraph::name;
use crate::flow::Flow;
use crate::functions::costs;
use crate::input::Guest;
use crate::lines::LineTable;
use crate::stack::{CallTree, FunctionIndex};
use crate::timeline::{SampledRun, describe, nanoseconds};

/// Maximum number of rows of each table.
const FUNCTIONS_MAX: usize = 1000;
const BRANCHES_MAX: usize = 300;
const EVENTS_MAX: usize = 2000;
/// Columns of the time line.
const COLUMNS: u64 = 400;
/// A frame is drawn if it has at least 1 / `FRAME_SHARE` of all instructions.
const FRAME_SHARE: u64 = 5000;

#[derive(Serialize)]
struct FunctionRow {
    name: String,
    calls: u64,
    own: u64,
    inclusive: u64,
}

#[derive(Serialize)]
struct HotBranch {
    from: String,
    to: String,
    class: &'static str,
    count: u64,
    mispredicted: u64,
    line: String,
}

#[derive(Serialize)]
struct ListedEvent {
    cpu: u32,
    at: u64,
    ns: u64,
    kind: &'static str,
    text: String,
}

#[derive(Serialize)]
struct FileRow {
    path: String,
    lines: usize,
    hit: usize,
}

/// A frame of the flame graph; its parent comes before it.
#[derive(Serialize)]
struct FrameRow {
    parent: usize,
    name: usize,
    own: u64,
    inclusive: u64,
    calls: u64,
}

/// The function that one vCPU spent most instructions in, for each column of the time line.
#[derive(Serialize)]
struct LaneRow {
    cpu: u32,
    /// Index of the function's name, or -1 where nothing ran.
    functions: Vec<i64>,
}

/// Everything that the page shows.
#[derive(Serialize)]
pub(super) struct PageData {
    title: String,
    image: String,
    writer: String,
    cpu: String,
    cpus: u32,
    seed: Option<u64>,
    selection: String,
    records: u64,
    branches: u64,
    instructions: u64,
    ns: u64,
    names: Vec<String>,
    functions: Vec<FunctionRow>,
    frames: Vec<FrameRow>,
    hot: Vec<HotBranch>,
    events: Vec<ListedEvent>,
    more_events: u64,
    vectors: BTreeMap<u8, u64>,
    /// Events in each column of the time line, by kind.
    event_columns: BTreeMap<&'static str, Vec<u32>>,
    lanes: Vec<LaneRow>,
    files: Vec<FileRow>,
    /// Why there is no coverage.
    no_coverage: String,
}

/// Names, each once.
struct NameTable<'a> {
    guest: &'a Guest,
    indices: HashMap<FunctionIndex, usize>,
    names: Vec<String>,
}

impl NameTable<'_> {
    fn index(&mut self, function: FunctionIndex) -> usize {
        *self.indices.entry(function).or_insert_with(|| {
            self.names
                .push(name(function, &self.guest.functions).to_owned());
            self.names.len() - 1
        })
    }
}

impl PageData {
    pub(super) fn new(header: &TraceHeader, guest: &Guest, flow: &Flow, run: &SampledRun) -> Self {
        let mut names = NameTable {
            guest,
            indices: HashMap::new(),
            names: Vec::new(),
        };
        let span = TimeSpan::of(run);
        let frames = frames(&flow.tree, &mut names);
        let lanes = lanes(run, &span, &mut names);
        let lines = LineTable::of(&guest.image).unwrap_or_default();
        let (files, no_coverage) = match coverage(flow, guest, &lines) {
            Ok(files) => (files, String::new()),
            Err(reason) => (Vec::new(), reason),
        };
        let mut functions = costs(&flow.tree, &guest.functions);
        functions.truncate(FUNCTIONS_MAX);
        let path = &header.image.path;
        Self {
            title: path.rsplit('/').next().unwrap_or(path).to_owned(),
            image: path.clone(),
            writer: header.writer.clone(),
            cpu: header.cpu.clone(),
            cpus: header.cpus,
            seed: header.seed,
            selection: header.selection.clone(),
            records: flow.records,
            branches: flow.branches,
            instructions: flow.tree.inclusive().first().copied().unwrap_or(0),
            ns: nanoseconds(span.end - span.begin, header),
            functions: functions
                .into_iter()
                .map(|cost| FunctionRow {
                    name: cost.name,
                    calls: cost.calls,
                    own: cost.own,
                    inclusive: cost.inclusive,
                })
                .collect(),
            frames,
            hot: hot_branches(flow, guest, &lines),
            events: events(run, header),
            more_events: run.dropped + (run.marks.len().saturating_sub(EVENTS_MAX)) as u64,
            vectors: flow.vectors.clone(),
            event_columns: event_columns(run, &span),
            lanes,
            files,
            no_coverage,
            names: names.names,
        }
    }
}

/// The time that the run took, in ticks.
struct TimeSpan {
    begin: u64,
    end: u64,
}

impl TimeSpan {
    fn of(run: &SampledRun) -> Self {
        let samples = run.vcpus.values().filter_map(|vcpu| vcpu.samples.first());
        let marks = run.marks.iter().map(|mark| mark.ticks);
        let begin = samples
            .map(|sample| sample.ticks)
            .chain(marks.clone())
            .min();
        let end = run
            .vcpus
            .values()
            .map(|vcpu| vcpu.last_ticks)
            .chain(marks)
            .max();
        let begin = begin.unwrap_or(0);
        Self {
            begin,
            end: end.unwrap_or(0).max(begin + 1),
        }
    }

    fn column(&self, ticks: u64) -> usize {
        let offset = u128::from(ticks.clamp(self.begin, self.end) - self.begin);
        let column = offset * u128::from(COLUMNS) / u128::from(self.end - self.begin);
        usize::try_from(column.min(u128::from(COLUMNS - 1))).unwrap_or(0)
    }
}

/// The frames that are wide enough to be drawn.
fn frames(tree: &CallTree, names: &mut NameTable<'_>) -> Vec<FrameRow> {
    let inclusive = tree.inclusive();
    let least = inclusive.first().map_or(0, |all| all / FRAME_SHARE).max(1);
    let mut indices = HashMap::from([(CallTree::ROOT, 0)]);
    let mut frames = vec![FrameRow {
        parent: 0,
        name: names.index(None),
        own: 0,
        inclusive: inclusive.first().copied().unwrap_or(0),
        calls: 0,
    }];
    for (number, (node, &below)) in (0..).zip(tree.nodes().iter().zip(&inclusive)).skip(1) {
        let parent = indices.get(&node.parent).copied();
        if let (Some(parent), true) = (parent, below >= least) {
            indices.insert(number, frames.len());
            frames.push(FrameRow {
                parent,
                name: names.index(node.function),
                own: node.own,
                inclusive: below,
                calls: node.calls,
            });
        }
    }
    frames
}

/// For each vCPU and column, the function that ran most.
fn lanes(run: &SampledRun, span: &TimeSpan, names: &mut NameTable<'_>) -> Vec<LaneRow> {
    let columns = usize::try_from(COLUMNS).unwrap_or(0);
    let mut lanes = Vec::new();
    for (cpu, sampled) in run.by_cpu() {
        let mut sums: Vec<HashMap<FunctionIndex, u64>> = vec![HashMap::new(); columns];
        for sample in &sampled.samples {
            let function = run.tree.node(sample.node).function;
            let column = &mut sums[span.column(sample.ticks)];
            *column.entry(function).or_default() += sample.instructions.max(1);
        }
        let most = |column: &HashMap<FunctionIndex, u64>| {
            let most = column
                .iter()
                .max_by_key(|(function, count)| (**count, **function));
            most.map(|(function, _)| *function)
        };
        let functions = sums.iter().map(|column| match most(column) {
            Some(function) => i64::try_from(names.index(function)).unwrap_or(-1),
            None => -1,
        });
        lanes.push(LaneRow {
            cpu,
            functions: functions.collect(),
        });
    }
    lanes
}

fn hot_branches(flow: &Flow, guest: &Guest, lines: &LineTable) -> Vec<HotBranch> {
    let mut edges: Vec<_> = flow.edges.iter().collect();
    edges.sort_by_key(|(edge, counted)| (std::cmp::Reverse(counted.count), **edge));
    edges.truncate(BRANCHES_MAX);
    let rows = edges.into_iter().map(|(edge, counted)| HotBranch {
        from: guest.functions.name_address(edge.from),
        to: guest.functions.name_address(edge.to),
        class: counted.class.short_name(),
        count: counted.count,
        mispredicted: counted.mispredicted,
        line: lines.find(edge.from).map_or(String::new(), |line| {
            let path = &lines.files[line.file];
            format!("{}:{}", path.rsplit('/').next().unwrap_or(path), line.line)
        }),
    });
    rows.collect()
}

fn events(run: &SampledRun, header: &TraceHeader) -> Vec<ListedEvent> {
    let rows = run.marks.iter().take(EVENTS_MAX).map(|mark| {
        let (kind, text) = describe(&mark.event);
        ListedEvent {
            cpu: mark.cpu,
            at: mark.at,
            ns: nanoseconds(mark.ticks, header),
            kind,
            text,
        }
    });
    rows.collect()
}

fn event_columns(run: &SampledRun, span: &TimeSpan) -> BTreeMap<&'static str, Vec<u32>> {
    let columns = usize::try_from(COLUMNS).unwrap_or(0);
    let mut kinds = BTreeMap::<_, Vec<u32>>::new();
    for mark in &run.marks {
        let (kind, _) = describe(&mark.event);
        let counts = kinds.entry(kind).or_insert_with(|| vec![0; columns]);
        counts[span.column(mark.ticks)] += 1;
    }
    kinds
}

/// Counts lines and executed lines of each source file; an error says why it cannot.
fn coverage(flow: &Flow, guest: &Guest, lines: &LineTable) -> Result<Vec<FileRow>, String> {
    if !flow.is_contiguous {
        return Err("the trace has not all branches".to_owned());
    }
    if lines.files.is_empty() {
        return Err("the image has no debug information".to_owned());
    }
    let counts = execution(flow, &guest.image).map_err(|error| error.to_string())?;
    let mut files: Vec<BTreeMap<u32, bool>> = vec![BTreeMap::new(); lines.files.len()];
    for &(address, len, line) in &lines.rows {
        let executed = counts
            .range(address..address.saturating_add(len.max(1)))
            .next()
            .is_some();
        *files[line.file].entry(line.line).or_default() |= executed;
    }
    let rows = lines.files.iter().zip(files).map(|(path, lines)| FileRow {
        path: path.clone(),
        lines: lines.len(),
        hit: lines.values().filter(|hit| **hit).count(),
    });
    Ok(rows.collect())
}
