//! The divergence finder: where two deterministic runs first differ.
//!
//! Both runs go forward side by side, compared by their hashes. Where those differ, the place is
//! bisected by the whole state of both machines, with their checkpoints, down to one instruction:
//! before it they were the same, after it they are not.

use std::fmt;

use hindsight_cpu::branch::Branch;
use hindsight_cpu::state::{CpuState, seg};
use serde_json::Value;

use crate::deterministic::RunStop;
use crate::deterministic::Timeline;
use crate::memory::page_walk;
use crate::state::{PAGE, RestoreError, Snapshot};
use crate::vcpu::crash::instruction;

/// How far the search is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// No difference up to this place.
    Same(u64),
    /// The difference lies between these places.
    Between(u64, u64),
}

/// What came of a comparison.
#[derive(Debug)]
pub enum Verdict {
    /// No difference.
    Same {
        /// How far was compared.
        place: u64,
        /// Both runs ended there.
        ended: bool,
    },
    /// The first difference.
    Different(Box<Divergence>),
}

/// Where two runs part.
#[derive(Debug)]
pub struct Divergence {
    /// The first place at which they differ; 0: from the start.
    pub place: u64,
    /// The instruction that made the difference, if one did.
    pub instruction: Option<Executed>,
    /// What differs: the name, then both values.
    pub differences: Vec<(String, String, String)>,
    /// There are more differences than that.
    pub more: bool,
    /// Both machines at that place.
    pub sides: [Side; 2],
    /// Memory was different from the start, and was not compared.
    pub memory_ignored: bool,
}

impl Divergence {
    /// Makes side a of side b.
    pub fn swap(&mut self) {
        self.sides.swap(0, 1);
        for (_, a, b) in &mut self.differences {
            std::mem::swap(a, b);
        }
    }
}

/// The last instruction of a run that was still the same in both.
#[derive(Debug)]
pub struct Executed {
    /// Which processor.
    pub cpu: usize,
    /// Its state before.
    pub before: CpuState,
    /// The instruction, disassembled, with its bytes.
    pub text: String,
}

/// One machine where they differ.
#[derive(Debug)]
pub struct Side {
    /// The run ended there.
    pub ended: bool,
    /// The processor that made the difference.
    pub state: CpuState,
    /// Its last branches, the oldest first.
    pub branches: Vec<Branch>,
}

/// Most differences that are listed.
pub(super) const LISTED: usize = 40;

/// Compares two runs from where the timelines begin, up to instruction `limit`, looking every
/// `stride` instructions.
///
/// # Errors
///
/// When guest memory cannot be read or written.
pub fn compare(
    timelines: [Timeline; 2],
    limit: u64,
    stride: u64,
    progress: &mut dyn FnMut(Progress),
) -> Result<Verdict, RestoreError> {
    let mut pair = Pair::new(timelines)?;
    if let Some(found) = pair.at_start()? {
        return Ok(Verdict::Different(Box::new(found)));
    }
    let mut same: u64 = pair.timelines[0].begin();
    loop {
        let next = same.saturating_add(stride.max(1)).min(limit);
        let (stops, places) = pair.go_to(next)?;
        let differ = stops[0] != stops[1] || places[0] != places[1] || pair.hash(0) != pair.hash(1);
        let over = stops[0] != RunStop::Reached || next == limit;
        // What no event has shown yet shows in the whole state at the end.
        if differ || over && !pair.same_here()? {
            let place = pair.bisect(same, next, progress)?;
            return Ok(Verdict::Different(Box::new(pair.explain(place)?)));
        }
        if over {
            return Ok(Verdict::Same {
                place: places[0],
                ended: stops[0] != RunStop::Reached,
            });
        }
        same = next;
        progress(Progress::Same(same));
    }
}

struct Pair {
    timelines: [Timeline; 2],
    compare_memory: bool,
}

impl Pair {
    fn new(mut timelines: [Timeline; 2]) -> Result<Self, RestoreError> {
        let [a, b] = &mut timelines;
        let same = a.machine().save()?.memory == b.machine().save()?.memory;
        Ok(Self {
            timelines,
            compare_memory: same,
        })
    }

    fn go_to(&mut self, place: u64) -> Result<([RunStop; 2], [u64; 2]), RestoreError> {
        let [a, b] = &mut self.timelines;
        let stops = [a.go_to(place)?, b.go_to(place)?];
        Ok((stops, [a.place(), b.place()]))
    }

    fn hash(&mut self, side: usize) -> u128 {
        self.timelines[side].machine().trace_hash()
    }

    fn snapshots(&mut self) -> Result<[Snapshot; 2], RestoreError> {
        let [a, b] = &mut self.timelines;
        let mut both = [a.machine().save()?, b.machine().save()?];
        for snapshot in &mut both {
            // The generator's state is no difference before a number was asked for.
            snapshot
                .vcpus
                .iter_mut()
                .for_each(|vcpu| vcpu.log.random = 0);
        }
        Ok(both)
    }

    fn same_here(&mut self) -> Result<bool, RestoreError> {
        let memory = self.compare_memory;
        let [a, b] = self.snapshots()?;
        Ok(a.vcpus == b.vcpus
            && (a.ticks, a.schedule) == (b.ticks, b.schedule)
            && a.interrupts == b.interrupts
            && a.devices == b.devices
            && (!memory || a.memory == b.memory))
    }

    /// The machines differ before the first instruction.
    fn at_start(&mut self) -> Result<Option<Divergence>, RestoreError> {
        let begin = self.timelines[0].begin();
        if self.same_here()? {
            return Ok(None);
        }
        self.differences_at(begin, None).map(Some)
    }

    /// The first place in `same + 1 ..= different` at which the machines differ for good.
    fn bisect(
        &mut self,
        same: u64,
        different: u64,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<u64, RestoreError> {
        let (mut low, mut high) = (same, different);
        self.go_to(low)?;
        if !self.same_here()? {
            // It began where no event showed it.
            low = self.timelines[0].begin();
        }
        while high - low > 1 {
            progress(Progress::Between(low, high));
            let middle = low + (high - low) / 2;
            let (stops, places) = self.go_to(middle)?;
            if stops[0] == stops[1] && places[0] == places[1] && self.same_here()? {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(high)
    }

    /// What happened at `place`, which is the first that differs.
    fn explain(&mut self, place: u64) -> Result<Divergence, RestoreError> {
        self.go_to(place.saturating_sub(1))?;
        let machine = self.timelines[0].machine();
        let before = machine.retired();
        let states: Vec<_> = (0..before.len()).map(|cpu| machine.state(cpu)).collect();
        self.go_to(place)?;
        let machine = self.timelines[0].machine();
        let after = machine.retired();
        let moved = before.iter().zip(&after).position(|(old, new)| old != new);
        let cpu = moved.unwrap_or(machine.current());
        let state = states.into_iter().nth(cpu).flatten();
        let executed = state.map(|before| {
            let linear = before.seg[seg::CS].base.wrapping_add(before.rip);
            let code = page_walk::read_linear(&machine.board().ram.map, &before, linear, 15);
            let text = instruction(&before, &code).unwrap_or_else(|| "no instruction".to_owned());
            Executed { cpu, before, text }
        });
        self.differences_at(place, executed)
    }

    fn differences_at(
        &mut self,
        place: u64,
        instruction: Option<Executed>,
    ) -> Result<Divergence, RestoreError> {
        let (stops, _) = self.go_to(place)?;
        let [a, b] = self.snapshots()?;
        let mut list = Differences::default();
        list.walk(String::new(), &state_of(&a), &state_of(&b));
        if self.compare_memory {
            list.memory(&a, &b);
        }
        let cpu = instruction.as_ref().map_or(0, |executed| executed.cpu);
        let [one, two] = &mut self.timelines;
        let side = |timeline: &mut Timeline, stop| {
            let machine = timeline.machine();
            Side {
                ended: stop != RunStop::Reached,
                state: machine.state(cpu).unwrap_or_else(CpuState::reset),
                branches: machine.last_branches(cpu),
            }
        };
        let sides = [side(one, stops[0]), side(two, stops[1])];
        Ok(Divergence {
            place,
            instruction,
            differences: list.found,
            more: list.more,
            sides,
            memory_ignored: !self.compare_memory,
        })
    }
}

/// All but memory, as a tree.
fn state_of(snapshot: &Snapshot) -> Value {
    let value = |value: Result<Value, serde_json::Error>| value.unwrap_or(Value::Null);
    let mut tree = serde_json::Map::new();
    let vcpus = snapshot.vcpus.iter().enumerate().map(|(id, vcpu)| {
        let vcpu = value(serde_json::to_value(vcpu));
        (id.to_string(), vcpu)
    });
    tree.insert("cpu".to_owned(), Value::Object(vcpus.collect()));
    let mut put = |name: &str, part| tree.insert(name.to_owned(), value(part));
    put("interrupts", serde_json::to_value(&snapshot.interrupts));
    put("devices", serde_json::to_value(&snapshot.devices));
    put("ticks", serde_json::to_value(snapshot.ticks));
    put("schedule", serde_json::to_value(snapshot.schedule));
    Value::Object(tree)
}

/// Leaves of two trees that differ: the name, then both values.
#[derive(Default)]
pub(super) struct Differences {
    pub found: Vec<(String, String, String)>,
    more: bool,
}

const GPR_NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];
const SEGMENT_NAMES: [&str; 6] = ["es", "cs", "ss", "ds", "fs", "gs"];

impl Differences {
    fn add(&mut self, name: String, a: String, b: String) {
        if self.found.len() < LISTED {
            self.found.push((name, a, b));
        } else {
            self.more = true;
        }
    }

    pub fn walk(&mut self, path: String, a: &Value, b: &Value) {
        let below = |name: &str| {
            if path.is_empty() {
                name.to_owned()
            } else {
                format!("{path}.{name}")
            }
        };
        match (a, b) {
            _ if a == b => {}
            (Value::Object(one), Value::Object(two)) => {
                let names = one
                    .keys()
                    .chain(two.keys().filter(|&k| !one.contains_key(k)));
                for name in names {
                    let of =
                        |map: &serde_json::Map<_, _>| map.get(name).cloned().unwrap_or(Value::Null);
                    self.walk(below(name), &of(one), &of(two));
                }
            }
            (Value::Array(one), Value::Array(two)) => {
                for index in 0..one.len().max(two.len()) {
                    let of = |list: &[Value]| list.get(index).cloned().unwrap_or(Value::Null);
                    self.walk(below(&element(&path, index)), &of(one), &of(two));
                }
            }
            _ => self.add(path, shown(a), shown(b)),
        }
    }

    /// The first words of memory that differ.
    fn memory(&mut self, a: &Snapshot, b: &Snapshot) {
        const ZEROS: [u8; PAGE] = [0; PAGE];
        for gpa in a.memory.differing(&b.memory) {
            let (one, two) = (
                a.memory.get(gpa).unwrap_or(&ZEROS),
                b.memory.get(gpa).unwrap_or(&ZEROS),
            );
            let words = one.chunks(8).zip(two.chunks(8)).zip((gpa..).step_by(8));
            for ((one, two), at) in words.filter(|((one, two), _)| one != two) {
                self.add(format!("memory {at:#x}"), hex(one), hex(two));
            }
        }
    }
}

/// The name of an element of the list at `path`.
fn element(path: &str, index: usize) -> String {
    let names: &[&str] = match path.rsplit('.').next() {
        Some("gpr") => &GPR_NAMES,
        Some("seg") => &SEGMENT_NAMES,
        _ => &[],
    };
    names
        .get(index)
        .map_or_else(|| index.to_string(), |&name| name.to_owned())
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn shown(value: &Value) -> String {
    match value.as_u64() {
        Some(number) => format!("{number:#x}"),
        None if value.is_null() => "-".to_owned(),
        None => value.to_string(),
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.instruction {
            None => writeln!(f, "the machines differ before the first instruction")?,
            Some(executed) => {
                let Executed { cpu, before, text } = executed;
                writeln!(
                    f,
                    "the runs part at instruction {}: cpu {cpu} at {:#x}: {text}",
                    self.place, before.rip
                )?;
            }
        }
        if self.memory_ignored {
            writeln!(f, "(memory differs from the start and is not compared)")?;
        }
        for (name, a, b) in &self.differences {
            writeln!(f, "  {name}: a {a}, b {b}")?;
        }
        if self.more {
            writeln!(f, "  and more")?;
        }
        for (name, side) in ["a", "b"].into_iter().zip(&self.sides) {
            let ended = if side.ended {
                ", where the run ended"
            } else {
                ""
            };
            writeln!(f, "{name} after it{ended}:")?;
            write!(
                f,
                "{}",
                hindsight_cpu::register_dump::RegisterDump(&side.state)
            )?;
            writeln!(f, "{name}'s last branches, the oldest first:")?;
            for branch in &side.branches {
                writeln!(
                    f,
                    "  {:#x} -> {:#x} {:?}",
                    branch.from, branch.to, branch.class
                )?;
            }
        }
        Ok(())
    }
}
