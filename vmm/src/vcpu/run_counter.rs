//! Counts everything that a vCPU does, exactly, for `hindsight stat`.
//!
//! The counts are the run's own: predictor and caches are models apart from those that the guest's
//! performance counters use, so that counting changes nothing that a guest can read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use hindsight_cpu::branch::{Branch, BranchClass};
use hindsight_cpu::pmu::{EventKind, EventTotals, Ring};
use hindsight_cpu::uarch::{
    AccessEvents, CacheGeometry, CacheModel, CoreUarch, InstructionAccesses, MemoryAccess,
    Requester,
};
use hindsight_interp::{Delivery, DeliveryKind};
use hindsight_regs::vector::Vector;

use crate::sync::lock;

/// Maximum number of regions that a guest may begin by port writes.
const PORT_REGIONS_MAX: usize = 256;
/// The deepest recursion of a region's function that is followed.
const DEPTH_MAX: usize = 4096;
/// The longest instruction: a return goes to at most as many bytes after its call.
const INSTRUCTION_MAX: u64 = 15;

/// Names of the counts, in the order of [`Counts`].
pub const NAMES: [&str; 21] = [
    "instructions",
    "instructions.user",
    "branches.taken",
    "branches.not-taken",
    "branches.jump",
    "branches.call",
    "branches.return",
    "branches.far",
    "mispredictions",
    "exceptions",
    "page-faults",
    "interrupts",
    "loads",
    "stores",
    "loads.l1",
    "loads.l2",
    "loads.l3",
    "loads.memory",
    "llc-references",
    "llc-misses",
    "device-accesses",
];

/// A value for each of [`NAMES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts(pub [u64; NAMES.len()]);

impl Counts {
    /// Adds the counts of another vCPU or another pass.
    pub fn add(&mut self, other: &Self) {
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            *sum = sum.wrapping_add(count);
        }
    }

    /// The counts since `earlier`.
    fn since(&self, earlier: &Self) -> Self {
        let mut difference = *self;
        for (count, before) in difference.0.iter_mut().zip(earlier.0) {
            *count = count.wrapping_sub(before);
        }
        difference
    }
}

/// The counts of a part of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionCounts {
    /// How often the region was entered.
    pub entries: u64,
    /// What was counted between the beginnings and ends of the region.
    pub counts: Counts,
}

/// What all vCPUs of a run counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// The whole run.
    pub total: Counts,
    /// Regions by name.
    pub regions: BTreeMap<String, RegionCounts>,
}

/// A function whose executions are a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionRegion {
    /// The function's name.
    pub name: String,
    /// The function's linear address.
    pub address: u64,
}

/// What is counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountOptions {
    /// Count loads, stores, cache accesses and mispredictions, which is several times slower.
    pub models: bool,
    /// Regions by function.
    pub functions: Vec<FunctionRegion>,
    /// A port to which the guest writes the number of a region that begins, or 0 for its end.
    pub region_port: Option<u16>,
}

/// A region that a function or a number names, on one vCPU.
#[derive(Debug, Default)]
struct OpenRegion {
    /// The counts when the region began; `None` while it is not open.
    begun: Option<Counts>,
    /// Addresses of the calls of the function that have not returned, the innermost last.
    callers: Vec<u64>,
    sum: RegionCounts,
}

impl OpenRegion {
    fn begin(&mut self, now: Counts) {
        self.begun = Some(now);
        self.sum.entries += 1;
    }

    fn end(&mut self, now: &Counts) {
        if let Some(begun) = self.begun.take() {
            self.sum.counts.add(&now.since(&begun));
        }
    }
}

/// Counts what one vCPU does. Adds it to the run's counts when it is dropped.
#[derive(Debug)]
pub struct RunCounter {
    options: Arc<CountOptions>,
    run: Arc<Mutex<RunCounts>>,
    unit: CoreUarch,
    l3: CacheModel,
    totals: EventTotals,
    /// Exceptions, page faults, interrupts and accesses of devices.
    exceptions: u64,
    page_faults: u64,
    interrupts: u64,
    device_accesses: u64,
    functions: Vec<OpenRegion>,
    ports: BTreeMap<u64, OpenRegion>,
}

impl RunCounter {
    /// A counter that adds to `run`.
    pub fn new(options: Arc<CountOptions>, run: Arc<Mutex<RunCounts>>) -> Self {
        let mut functions = Vec::new();
        functions.resize_with(options.functions.len(), OpenRegion::default);
        Self {
            options,
            run,
            unit: CoreUarch::default(),
            l3: CacheModel::new(CacheGeometry::L3),
            totals: EventTotals::default(),
            exceptions: 0,
            page_faults: 0,
            interrupts: 0,
            device_accesses: 0,
            functions,
            ports: BTreeMap::new(),
        }
    }

    /// Whether memory accesses are counted.
    pub fn counts_accesses(&self) -> bool {
        self.options.models
    }

    /// Whether each branch must be reported at once, so that a region has what belongs to it.
    pub fn has_regions(&self) -> bool {
        !self.options.functions.is_empty() || self.options.region_port.is_some()
    }

    /// Sets the instructions retired so far, and how many of them at CPL 1 to 3.
    pub fn set_retired(&mut self, count: u64, user: u64) {
        let system = count.wrapping_sub(user);
        self.totals.set(EventKind::Instruction, Ring::Os, system);
        self.totals.set(EventKind::Instruction, Ring::User, user);
    }

    /// The counts so far.
    fn now(&self) -> Counts {
        let sum = |kinds: &[EventKind]| {
            let of = |&kind| self.totals.get(kind, Ring::Os) + self.totals.get(kind, Ring::User);
            kinds.iter().map(of).sum::<u64>()
        };
        let mispredicted = [
            EventKind::MispredictedTaken,
            EventKind::MispredictedNotTaken,
            EventKind::MispredictedJump,
            EventKind::MispredictedCall,
        ];
        Counts([
            sum(&[EventKind::Instruction]),
            self.totals.get(EventKind::Instruction, Ring::User),
            sum(&[EventKind::TakenConditional]),
            sum(&[EventKind::NotTaken]),
            sum(&[EventKind::Jump]),
            sum(&[EventKind::Call]),
            sum(&[EventKind::Return]),
            sum(&[EventKind::Far]),
            sum(&mispredicted),
            self.exceptions,
            self.page_faults,
            self.interrupts,
            sum(&[EventKind::Load]),
            sum(&[EventKind::Store]),
            sum(&[EventKind::LoadL1]),
            sum(&[EventKind::LoadL2]),
            sum(&[EventKind::LoadL3]),
            sum(&[EventKind::LoadMemory]),
            sum(&[EventKind::LlcReference]),
            sum(&[EventKind::LlcMiss]),
            self.device_accesses,
        ])
    }

    /// Counts branches, those among them that were not taken. `cs_base`: see
    /// [`hindsight_interp::Observer::branches`].
    pub fn branches(&mut self, cs_base: u64, branches: &[Branch]) {
        let mut branches = branches.to_vec();
        if self.options.models {
            self.unit.resolve(&mut branches);
        }
        self.totals.add_branches(&branches);
        if !self.functions.is_empty() {
            for branch in &branches {
                self.follow_functions(cs_base, branch);
            }
        }
    }

    fn follow_functions(&mut self, cs_base: u64, branch: &Branch) {
        use BranchClass::{DirectCall, DirectJump, Far, IndirectCall, IndirectJump, Return};
        let to = branch.to.wrapping_add(cs_base);
        let from = branch.from.wrapping_add(cs_base);
        let mut now = None;
        for index in 0..self.functions.len() {
            let address = self.options.functions[index].address;
            let is_open = self.functions[index].begun.is_some();
            let enters = to == address
                && match branch.class {
                    DirectCall | IndirectCall => true,
                    DirectJump | IndirectJump | Far => !is_open,
                    _ => false,
                };
            let returns = is_open && matches!(branch.class, Return | Far);
            if enters || returns {
                let now = *now.get_or_insert_with(|| self.now());
                let region = &mut self.functions[index];
                if enters {
                    region.enter(from, now);
                } else {
                    region.leave(to, &now);
                }
            }
        }
    }

    /// Counts the memory accesses of an instruction.
    pub fn accesses(&mut self, ring: Ring, accesses: &InstructionAccesses<'_>) {
        let events = AccessEvents {
            totals: &mut self.totals,
            ring,
            late_threshold: u64::MAX,
        };
        let requester = Requester::default();
        self.unit
            .access(accesses, Some(&mut self.l3), &requester, events);
        self.unit.take_memory_traffic(|_| ());
    }

    /// Applies an access of a block, as [`hindsight_interp::Observer::line_access`] has it.
    pub fn line_access(&mut self, ring: Ring, access: &MemoryAccess) {
        let events = AccessEvents {
            totals: &mut self.totals,
            ring,
            late_threshold: u64::MAX,
        };
        let requester = Requester::default();
        self.unit
            .access_line(access, Some(&mut self.l3), &requester, events);
        self.unit.take_memory_traffic(|_| ());
    }

    /// Counts the loads and stores of a block.
    pub fn block_accesses(&mut self, ring: Ring, loads: u64, stores: u64) {
        let events = AccessEvents {
            totals: &mut self.totals,
            ring,
            late_threshold: u64::MAX,
        };
        self.unit.count_block(loads, stores, true, events);
    }

    /// Flushes the line at `gpa`, or all lines, from the cache models.
    pub fn flushed(&mut self, gpa: Option<u64>) {
        match gpa {
            Some(gpa) => self.unit.flush(&mut self.l3, gpa),
            None => {
                self.unit.flush_all();
                self.l3.clear(|_| ());
            }
        }
    }

    /// Counts the delivery of an exception or interrupt.
    pub fn delivery(&mut self, delivery: &Delivery) {
        match delivery.kind {
            _ if delivery.outcome.is_err() => {}
            DeliveryKind::External => self.interrupts += 1,
            DeliveryKind::Exception => {
                self.exceptions += 1;
                self.page_faults += u64::from(delivery.vector == Vector::PF);
            }
            DeliveryKind::Software => {}
        }
    }

    /// Counts an access to a port or to the memory of a device.
    pub fn device_access(&mut self) {
        self.device_accesses += 1;
    }

    /// Begins or ends a region, if `port` is the one for that.
    pub fn port_write(&mut self, port: u16, value: u64) {
        if self.options.region_port != Some(port) {
            return;
        }
        let now = self.now();
        self.ports.values_mut().for_each(|region| region.end(&now));
        if value != 0 && (self.ports.len() < PORT_REGIONS_MAX || self.ports.contains_key(&value)) {
            self.ports.entry(value).or_default().begin(now);
        }
    }
}

impl OpenRegion {
    /// The function is called from `from`, or entered by a jump.
    fn enter(&mut self, from: u64, now: Counts) {
        if self.begun.is_none() {
            self.begin(now);
        }
        if self.callers.len() < DEPTH_MAX {
            self.callers.push(from);
        }
    }

    /// A return to `to`, which may be to a caller of the function.
    fn leave(&mut self, to: u64, now: &Counts) {
        let returns_to = |caller: &u64| (1..=INSTRUCTION_MAX).contains(&to.wrapping_sub(*caller));
        if let Some(index) = self.callers.iter().rposition(returns_to) {
            self.callers.truncate(index);
            if index == 0 {
                self.end(now);
            }
        }
    }
}

impl Drop for RunCounter {
    fn drop(&mut self) {
        let now = self.now();
        let mut run = lock(&self.run);
        run.total.add(&now);
        let functions = self.options.functions.iter().zip(&mut self.functions);
        let functions = functions.map(|(function, region)| (function.name.clone(), region));
        let ports = self.ports.iter_mut();
        let ports = ports.map(|(number, region)| (number.to_string(), region));
        for (name, region) in functions.chain(ports) {
            region.end(&now);
            let sum = run.regions.entry(name).or_default();
            sum.entries += region.sum.entries;
            sum.counts.add(&region.sum.counts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_of_a_recursive_function_ends_with_its_outermost_return() {
        let options = CountOptions {
            functions: vec![FunctionRegion {
                name: "f".to_owned(),
                address: 0x100,
            }],
            ..CountOptions::default()
        };
        let run = Arc::default();
        let mut counter = RunCounter::new(Arc::new(options), Arc::clone(&run));
        let steps = [
            (10, 0x10, 0x100, BranchClass::DirectCall),
            (20, 0x110, 0x100, BranchClass::DirectCall),
            (30, 0x120, 0x115, BranchClass::Return),
            (40, 0x120, 0x15, BranchClass::Return),
            (90, 0x30, 0x100, BranchClass::IndirectCall),
            (95, 0x120, 0x32, BranchClass::Return),
        ];
        for (at, from, to, class) in steps {
            counter.set_retired(at, 0);
            counter.branches(0, &[Branch::new(class, from, to)]);
        }
        drop(counter);
        let run = lock(&run).clone();
        let region = run.regions["f"];
        assert_eq!((region.entries, region.counts.0[0]), (2, 35));
        assert_eq!(run.total.0[0], 95);
        assert_eq!(run.total.0[5], 3, "calls");
    }

    #[test]
    fn port_writes_begin_and_end_numbered_regions() {
        let options = CountOptions {
            region_port: Some(0x3f0),
            ..CountOptions::default()
        };
        let run = Arc::default();
        let mut counter = RunCounter::new(Arc::new(options), Arc::clone(&run));
        for (at, value) in [(10, 7), (25, 8), (30, 0), (50, 7)] {
            counter.set_retired(at, 0);
            counter.port_write(0x3f0, value);
        }
        counter.set_retired(60, 0);
        drop(counter);
        let run = lock(&run).clone();
        let of = |name: &str| (run.regions[name].entries, run.regions[name].counts.0[0]);
        assert_eq!((of("7"), of("8")), ((2, 25), (1, 5)));
    }

    #[test]
    fn every_count_has_one_name() {
        let mut names = NAMES.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Counts::default().0.len());
    }
}
