//! One time line of what the guest kept and what the monitor saw.
//!
//! The two have different clocks where KVM ignores the TSC offset. Each phase begins with an OUT
//! that the guest stamps just before and the monitor sees just after: the smallest difference of
//! all of them is taken as the clocks' offset.

use std::collections::BTreeMap;
use std::ops::Range;

use hindsight_devices::clock::Ticks;

use crate::demo::explain::{self, MsrAccess};
use crate::demo::guest::Run;
use crate::demo::log::{Branch, Caught, Entry, Picture, Record};
use crate::demo::symbols::{self, Symbols};
use crate::vcpu::recorder::{ExitKind, RecordedEvent, RecordedKind};

/// The port by which the guest stamps a phase.
const MARK_PORT: u16 = 0xe0;
const APIC_PAGE: Range<u64> = 0xfee0_0000..0xfee0_1000;

/// What the guest did, ready to be drawn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Story {
    /// Why the guest did not come to its end, if so.
    pub problem: Option<String>,
    /// Ticks in a second.
    pub hz: u64,
    /// When it was over.
    pub end: Ticks,
    /// Its parts, in order.
    pub phases: Vec<Phase>,
    /// What it computed.
    pub results: Vec<(String, u64)>,
    /// What it drew.
    pub picture: Option<Picture>,
    /// Exceptions its handlers took.
    pub exceptions: Vec<ExceptionRow>,
    /// MSR accesses that the models answered, for the table.
    pub msrs: Vec<MsrRow>,
    /// When its timer's interrupts were taken.
    pub ticks: Vec<Ticks>,
    /// When the processor stopped for the monitor.
    pub exits: Vec<Ticks>,
    /// Kinds of exits, most frequent first.
    pub kinds: Vec<KindRow>,
    /// Where samples found the guest.
    pub profiles: Vec<Profile>,
    /// What its LBR stack told about the way to a fault, oldest first.
    pub way: Vec<BranchRow>,
    /// The fault.
    pub fault: Option<FaultRow>,
    /// How many times longer ring 0 takes than ring 3 to do the same.
    pub ring0_slower: Option<u64>,
}

/// A part of the guest's run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// The level of its work.
    pub cpl: u8,
    /// When.
    pub time: Range<Ticks>,
}

/// An exception.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExceptionRow {
    /// When.
    pub at: Ticks,
    /// Level of the code that raised it.
    pub cpl: u8,
    /// Mnemonic, such as #PF.
    pub mnemonic: &'static str,
    /// Symbol, or address.
    pub place: String,
    /// The instruction.
    pub instruction: String,
    /// Why.
    pub why: String,
}

/// An entry of the LBR stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchRow {
    /// Symbol of the branch.
    pub from: String,
    /// The instruction, without its operand.
    pub instruction: String,
    /// Symbol of its target.
    pub to: String,
}

/// What the branches led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRow {
    /// Mnemonic, such as #DE.
    pub mnemonic: &'static str,
    /// Symbol.
    pub place: String,
    /// The instruction.
    pub instruction: String,
}

/// An access to an MSR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsrRow {
    /// When.
    pub at: Ticks,
    /// Which, and with what answer.
    pub access: MsrAccess,
    /// The manual's name.
    pub name: String,
    /// Why it was answered so.
    pub why: String,
}

/// Exits of one kind, or something that is measured against them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KindRow {
    /// What it is.
    pub name: String,
    /// How many; 0 for what does not exit to us.
    pub count: usize,
    /// Nanoseconds this program took for one: the median.
    pub ours_ns: Option<u64>,
    /// Nanoseconds the guest lost by one: the median of its stopwatch.
    pub guest_ns: Option<u64>,
}

/// Where samples found the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// What they are, after their number.
    pub about: String,
    /// Samples by symbol, most first.
    pub hits: Vec<(String, usize)>,
}

impl Profile {
    /// Counts the symbols of `addresses`.
    pub fn new(about: &str, addresses: &[u64], symbols: &Symbols) -> Self {
        let mut counts = BTreeMap::<String, usize>::new();
        for &address in addresses {
            let name = symbols.find(address).map(|(name, _)| name.to_owned());
            *counts
                .entry(name.unwrap_or_else(|| format!("{address:#x}")))
                .or_default() += 1;
        }
        let mut hits: Vec<_> = counts.into_iter().collect();
        hits.sort_by_key(|hit| std::cmp::Reverse(hit.1));
        Self {
            about: about.to_owned(),
            hits,
        }
    }

    /// All samples.
    pub fn total(&self) -> usize {
        self.hits.iter().map(|hit| hit.1).sum()
    }
}

impl Story {
    /// Tells the story of a run.
    pub fn of(run: Run) -> Self {
        let hz = run.msrs.tsc_hz;
        let mut story = Self {
            problem: run.problem,
            hz,
            end: run.events.last().map_or(0, |event| event.at),
            picture: run.picture,
            ..Self::default()
        };
        let offset = offset(&run.events, &run.log);
        let mut costs = BTreeMap::<String, Vec<Ticks>>::new();
        let mut hits = Vec::new();
        for record in run.log {
            let at = record.tsc.wrapping_add(offset).min(story.end);
            match record.entry {
                Entry::Phase { name, cpl } => story.begin(at, name, cpl),
                Entry::Exception(caught) => {
                    let row = exception_row(at, &caught, &run.symbols);
                    story.exceptions.push(row);
                }
                Entry::Tick { rip, cpl } => {
                    story.ticks.push(at);
                    // At ring 0 it can only come while the guest halts.
                    if cpl == 3 {
                        hits.push(rip);
                    }
                }
                Entry::Cost { name, ticks } => costs.entry(name).or_default().push(ticks),
                Entry::Result { name, value } => story.results.push((name, value)),
                Entry::Branch(branch) => story.way.extend(branch_row(&branch, &run.symbols)),
                Entry::Fault { vector, rip } => {
                    story.fault = Some(fault_row(vector, rip, &run.symbols));
                }
            }
        }
        story.begin(story.end, String::new(), 0);
        story.phases.pop();
        story.phases.retain(|phase| phase.name != "end");
        let traced: Vec<u64> = run.branches.iter().map(|branch| branch.from).collect();
        for (about, addresses) in [
            ("of its timer's interrupts found it here", &hits),
            (
                "branches of a small program, each one: stored by its own BTS",
                &traced,
            ),
        ] {
            let profile = Profile::new(about, addresses, &run.symbols);
            story
                .profiles
                .extend((!addresses.is_empty()).then_some(profile));
        }
        let mut sieve = |name| costs.remove(name).and_then(|mut times| median(&mut times));
        let (ring0, ring3) = (sieve("sieve, ring 0"), sieve("sieve, ring 3"));
        story.ring0_slower = ring0.zip(ring3).map(|(slow, fast)| slow / fast.max(1));
        story.see(&run.events, costs);
        for row in &mut story.msrs {
            row.why = explain::msr(&row.access, &run.msrs);
        }
        story
    }

    /// Ends the phase before and begins one.
    fn begin(&mut self, at: Ticks, name: String, cpl: u8) {
        match self.phases.last_mut() {
            Some(last) => last.time.end = at,
            None => self.phases.push(Phase {
                name: "boot".to_owned(),
                cpl: 0,
                time: 0..at,
            }),
        }
        let time = at..at;
        self.phases.push(Phase { name, cpl, time });
    }

    /// Takes over what the monitor saw.
    fn see(&mut self, events: &[RecordedEvent], mut costs: BTreeMap<String, Vec<Ticks>>) {
        let mut ours = BTreeMap::<&str, Vec<Ticks>>::new();
        let mut since: Option<(Ticks, &str)> = None;
        let msrs = self.phases.iter().find(|phase| phase.name == "MSRs");
        let msrs = msrs.map_or(0..0, |phase| phase.time.clone());
        for event in events {
            match event.kind {
                RecordedKind::Exit(kind) => {
                    self.exits.push(event.at);
                    since = Some((event.at, class(kind)));
                }
                RecordedKind::Enter => {
                    if let Some((at, class)) = since.take() {
                        ours.entry(class).or_default().push(event.at - at);
                    }
                }
                RecordedKind::Rdmsr { index, answer } => {
                    self.see_msr(event.at, &msrs, index, None, answer);
                }
                RecordedKind::Wrmsr {
                    index,
                    value,
                    accepted,
                } => {
                    let answer = accepted.then_some(0);
                    self.see_msr(event.at, &msrs, index, Some(value), answer);
                }
                RecordedKind::Interrupt { .. } => {}
            }
        }
        let ns = |ticks: Ticks| nanoseconds(ticks, self.hz);
        for (class, mut times) in ours {
            self.kinds.push(KindRow {
                name: class.to_owned(),
                count: times.len(),
                // What passes at HLT is sleep.
                ours_ns: (class != HALT)
                    .then(|| median(&mut times))
                    .flatten()
                    .map(ns),
                guest_ns: costs.remove(class).and_then(|mut t| median(&mut t)).map(ns),
            });
        }
        self.kinds.sort_by_key(|row| std::cmp::Reverse(row.count));
        for (name, mut times) in costs {
            self.kinds.push(KindRow {
                name,
                guest_ns: median(&mut times).map(ns),
                ..KindRow::default()
            });
        }
    }

    /// Accesses outside of the phase that is about them are not worth a row.
    fn see_msr(
        &mut self,
        at: Ticks,
        phase: &Range<Ticks>,
        index: u32,
        written: Option<u64>,
        answer: Option<u64>,
    ) {
        if phase.contains(&at) {
            self.msrs.push(MsrRow {
                at,
                access: MsrAccess {
                    index,
                    written,
                    answer,
                },
                name: explain::msr_name(index),
                why: String::new(),
            });
        }
    }
}

/// What to add to the guest's TSC to get the monitor's time.
fn offset(events: &[RecordedEvent], log: &[Record]) -> u64 {
    let seen = events
        .iter()
        .filter(|event| event.kind == RecordedKind::Exit(ExitKind::PortWrite(MARK_PORT)));
    let stamped = log
        .iter()
        .filter(|record| matches!(record.entry, Entry::Phase { .. }));
    let difference = |(event, record): (&RecordedEvent, &Record)| event.at.wrapping_sub(record.tsc);
    seen.zip(stamped)
        .map(difference)
        .min_by_key(|offset| offset.cast_signed())
        .unwrap_or(0)
}

/// An entry of the LBR stack; one that is empty has no row.
fn branch_row(branch: &Branch, symbols: &Symbols) -> Option<BranchRow> {
    let text = mnemonic_at(branch.from, symbols);
    (branch.from != 0).then(|| BranchRow {
        from: symbols.place(branch.from),
        instruction: text,
        to: symbols.place(branch.to),
    })
}

/// The first word of the instruction there.
fn mnemonic_at(address: u64, symbols: &Symbols) -> String {
    let instruction = symbols.instruction(address);
    let text = instruction.as_ref().map(symbols::disassemble);
    let text = text.unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

fn fault_row(vector: u8, rip: u64, symbols: &Symbols) -> FaultRow {
    let instruction = symbols.instruction(rip);
    FaultRow {
        mnemonic: explain::mnemonic(vector),
        place: symbols.place(rip),
        instruction: instruction
            .as_ref()
            .map(symbols::disassemble)
            .unwrap_or_default(),
    }
}

fn exception_row(at: Ticks, caught: &Caught, symbols: &Symbols) -> ExceptionRow {
    let instruction = symbols.instruction(caught.rip);
    ExceptionRow {
        at,
        cpl: caught.cpl,
        mnemonic: explain::mnemonic(caught.vector),
        place: symbols.place(caught.rip),
        instruction: instruction
            .as_ref()
            .map_or_else(String::new, symbols::disassemble),
        why: explain::exception(caught, instruction.as_ref()),
    }
}

const HALT: &str = "HLT";

/// The exit's name in the table; the guest's stopwatch uses the same.
fn class(kind: ExitKind) -> &'static str {
    match kind {
        ExitKind::PortRead(_) => "port read",
        ExitKind::PortWrite(_) => "port write",
        ExitKind::MmioRead(address) if APIC_PAGE.contains(&address) => "APIC read",
        ExitKind::MmioWrite(address) if APIC_PAGE.contains(&address) => "APIC write",
        ExitKind::MmioRead(_) => "MMIO read",
        ExitKind::MmioWrite(_) => "MMIO write",
        ExitKind::Rdmsr(_) => "RDMSR",
        ExitKind::Wrmsr(_) => "WRMSR",
        ExitKind::Halt => HALT,
        ExitKind::Window => "interrupt window",
        ExitKind::Kicked => "kick (interrupt)",
        ExitKind::Other => "other",
    }
}

fn median(times: &mut [Ticks]) -> Option<Ticks> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

/// Ticks as nanoseconds.
pub fn nanoseconds(ticks: Ticks, hz: u64) -> u64 {
    let ns = u128::from(ticks) * 1_000_000_000 / u128::from(hz.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_cpu::facility::Facilities;
    use hindsight_cpu::msr::MsrConfig;

    /// Of a guest whose TSC is 1000 ahead of the monitor's clock.
    fn run() -> Run {
        let event = |at, kind| RecordedEvent { at, cpu: 0, kind };
        let mark = RecordedKind::Exit(ExitKind::PortWrite(MARK_PORT));
        let record = |tsc, entry| Record { tsc, entry };
        let phase = |tsc, name: &str, cpl| {
            let name = name.to_owned();
            record(tsc, Entry::Phase { name, cpl })
        };
        let sieve = |name: &str, ticks| Entry::Cost {
            name: name.to_owned(),
            ticks,
        };
        let cost = |ticks| sieve("RDMSR", ticks);
        Run {
            problem: None,
            events: vec![
                event(0, RecordedKind::Enter),
                event(102, mark),
                event(103, RecordedKind::Enter),
                event(200, mark),
                event(203, RecordedKind::Enter),
                event(250, RecordedKind::Exit(ExitKind::Rdmsr(0x3b))),
                event(
                    251,
                    RecordedKind::Rdmsr {
                        index: 0x3b,
                        answer: Some(7),
                    },
                ),
                event(255, RecordedKind::Enter),
                event(300, mark),
                event(305, RecordedKind::Enter),
                event(400, RecordedKind::Exit(ExitKind::PortWrite(0xf4))),
            ],
            log: vec![
                phase(1100, "compute", 3),
                record(1150, Entry::Tick { rip: 0x10, cpl: 3 }),
                phase(1200, "MSRs", 0),
                record(1250, cost(30)),
                record(1251, cost(10)),
                record(1252, cost(20)),
                record(1253, sieve("sieve, ring 0", 100)),
                record(1254, sieve("sieve, ring 3", 5)),
                phase(1299, "end", 0),
            ],
            picture: None,
            branches: Vec::new(),
            symbols: Symbols::default(),
            image_len: 0,
            msrs: MsrConfig {
                facilities: Facilities::KVM,
                tsc_hz: 1_000_000_000,
                uarch: true,
            },
        }
    }

    #[test]
    fn guest_times_are_brought_to_the_clock_of_the_monitor() {
        let story = Story::of(run());
        let phases: Vec<_> = story
            .phases
            .iter()
            .map(|p| (p.name.as_str(), p.time.clone()))
            .collect();
        assert_eq!(
            phases,
            [("boot", 0..100), ("compute", 100..200), ("MSRs", 200..299)]
        );
        assert_eq!(story.ticks, [150]);
        assert_eq!(story.end, 400);
    }

    #[test]
    fn exits_have_the_median_of_both_sides() {
        let story = Story::of(run());
        let writes = &story.kinds[0];
        assert_eq!((writes.name.as_str(), writes.count), ("port write", 3));
        assert_eq!((writes.ours_ns, writes.guest_ns), (Some(3), None));
        let reads = &story.kinds[1];
        assert_eq!((reads.name.as_str(), reads.guest_ns), ("RDMSR", Some(20)));
        assert_eq!(story.exits.len(), 5);
        assert_eq!(story.kinds.len(), 2, "the sieve is no exit");
        assert_eq!(story.ring0_slower, Some(20));
    }

    #[test]
    fn msr_accesses_of_their_phase_are_explained() {
        let story = Story::of(run());
        let row = &story.msrs[0];
        assert_eq!(
            (row.name.as_str(), row.access.answer),
            ("IA32_TSC_ADJUST", Some(7))
        );
        assert_eq!(row.why, "TSC model");
        assert_eq!(story.msrs.len(), 1);
    }

    #[test]
    fn empty_run_has_an_empty_story() {
        let story = Story::of(Run {
            events: Vec::new(),
            log: Vec::new(),
            ..run()
        });
        assert_eq!((story.end, story.exits.len()), (0, 0));
        assert!(story.profiles.is_empty());
    }

    #[test]
    fn profile_counts_symbols_most_first() {
        let profile = Profile::new("test", &[1, 2, 2], &Symbols::default());
        assert_eq!(profile.hits, [("0x2".to_owned(), 2), ("0x1".to_owned(), 1)]);
        assert_eq!(profile.total(), 3);
    }
}
