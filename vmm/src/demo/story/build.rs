//! Builds the story of a run.
//!
//! The guest and the monitor have different clocks if KVM ignores the TSC offset. Each phase begins
//! with an OUT: the guest logs its TSC just before, and the monitor records the exit just after.
//! The smallest difference of all these pairs is the offset between the clocks.

use std::collections::BTreeMap;
use std::ops::Range;

use hindsight_devices::clock::Ticks;

use super::{
    BranchRow, ExceptionRow, ExitRow, FaultRow, MsrRow, SampleProfile, Story, StoryPhase,
    nanoseconds,
};
use crate::demo::explain::{self, MsrAccess};
use crate::demo::guest::DemoRun;
use crate::demo::log::{CaughtException, DemoEntry, DemoRecord, TracedBranch};
use crate::demo::symbols::{self, Symbols};
use crate::vcpu::recorder::{ExitKind, RecordedEvent, RecordedKind};

/// The port by which the guest marks the beginning of a phase.
const MARK_PORT: u16 = 0xe0;
const APIC_PAGE: Range<u64> = 0xfee0_0000..0xfee0_1000;

impl Story {
    /// The story of a run.
    pub fn of(run: DemoRun) -> Self {
        let hz = run.msrs.tsc_hz;
        let mut story = Self {
            problem: run.problem,
            hz,
            end: run.events.last().map_or(0, |event| event.at),
            picture: run.picture,
            ..Self::default()
        };
        let offset = clock_offset(&run.events, &run.log);
        let mut costs = BTreeMap::<String, Vec<Ticks>>::new();
        let mut hits = Vec::new();
        for record in run.log {
            let at = record.tsc.wrapping_add(offset).min(story.end);
            match record.entry {
                DemoEntry::Phase { name, cpl } => story.begin(at, name, cpl),
                DemoEntry::Exception(caught) => {
                    let row = exception_row(at, &caught, &run.symbols);
                    story.exceptions.push(row);
                }
                DemoEntry::Tick { rip, cpl } => {
                    story.ticks.push(at);
                    // At ring 0, interrupts are enabled only while the guest is halted.
                    if cpl == 3 {
                        hits.push(rip);
                    }
                }
                DemoEntry::Cost { name, ticks } => costs.entry(name).or_default().push(ticks),
                DemoEntry::Result { name, value } => story.results.push((name, value)),
                DemoEntry::Branch(branch) => {
                    story.branches.extend(branch_row(&branch, &run.symbols));
                }
                DemoEntry::Fault { vector, rip } => {
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
            let profile = SampleProfile::new(about, addresses, &run.symbols);
            story
                .profiles
                .extend((!addresses.is_empty()).then_some(profile));
        }
        let mut sieve = |name| costs.remove(name).and_then(|mut times| median(&mut times));
        let (ring0, ring3) = (sieve("sieve, ring 0"), sieve("sieve, ring 3"));
        story.ring0_slower = ring0.zip(ring3).map(|(slow, fast)| slow / fast.max(1));
        story.add_events(&run.events, costs);
        for row in &mut story.msrs {
            row.reason = explain::msr(&row.access, &run.msrs);
        }
        story
    }

    /// Ends the last phase and begins a new one.
    fn begin(&mut self, at: Ticks, name: String, cpl: u8) {
        match self.phases.last_mut() {
            Some(last) => last.time.end = at,
            None => self.phases.push(StoryPhase {
                name: "boot".to_owned(),
                cpl: 0,
                time: 0..at,
            }),
        }
        let time = at..at;
        self.phases.push(StoryPhase { name, cpl, time });
    }

    /// Adds the events that the monitor recorded. `costs` are the times that the guest measured.
    fn add_events(&mut self, events: &[RecordedEvent], mut costs: BTreeMap<String, Vec<Ticks>>) {
        let mut monitor = BTreeMap::<&str, Vec<Ticks>>::new();
        let mut since: Option<(Ticks, &str)> = None;
        let msrs = self.phases.iter().find(|phase| phase.name == "MSRs");
        let msrs = msrs.map_or(0..0, |phase| phase.time.clone());
        for event in events {
            match event.kind {
                RecordedKind::Exit(kind) => {
                    self.exits.push(event.at);
                    since = Some((event.at, exit_name(kind)));
                }
                RecordedKind::Enter => {
                    if let Some((at, name)) = since.take() {
                        monitor.entry(name).or_default().push(event.at - at);
                    }
                }
                RecordedKind::Rdmsr { index, answer } => {
                    self.add_msr(event.at, &msrs, index, None, answer);
                }
                RecordedKind::Wrmsr {
                    index,
                    value,
                    accepted,
                } => {
                    let answer = accepted.then_some(0);
                    self.add_msr(event.at, &msrs, index, Some(value), answer);
                }
                RecordedKind::Interrupt { .. } => {}
            }
        }
        let ns = |ticks: Ticks| nanoseconds(ticks, self.hz);
        for (name, mut times) in monitor {
            self.exit_rows.push(ExitRow {
                name: name.to_owned(),
                count: times.len(),
                // At HLT, the monitor sleeps.
                monitor_ns: (name != HALT).then(|| median(&mut times)).flatten().map(ns),
                guest_ns: costs.remove(name).and_then(|mut t| median(&mut t)).map(ns),
            });
        }
        self.exit_rows
            .sort_by_key(|row| std::cmp::Reverse(row.count));
        for (name, mut times) in costs {
            self.exit_rows.push(ExitRow {
                name,
                guest_ns: median(&mut times).map(ns),
                ..ExitRow::default()
            });
        }
    }

    /// Adds an MSR access if it is in the phase about MSRs.
    fn add_msr(
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
                reason: String::new(),
            });
        }
    }
}

/// The monitor's clock minus the guest's TSC.
fn clock_offset(events: &[RecordedEvent], log: &[DemoRecord]) -> u64 {
    let exits = events
        .iter()
        .filter(|event| event.kind == RecordedKind::Exit(ExitKind::PortWrite(MARK_PORT)));
    let phases = log
        .iter()
        .filter(|record| matches!(record.entry, DemoEntry::Phase { .. }));
    let difference =
        |(event, record): (&RecordedEvent, &DemoRecord)| event.at.wrapping_sub(record.tsc);
    exits
        .zip(phases)
        .map(difference)
        .min_by_key(|offset| offset.cast_signed())
        .unwrap_or(0)
}

/// The row of an LBR entry; `None` if the entry is empty.
fn branch_row(branch: &TracedBranch, symbols: &Symbols) -> Option<BranchRow> {
    let text = mnemonic_at(branch.from, symbols);
    (branch.from != 0).then(|| BranchRow {
        from: symbols.name_address(branch.from),
        instruction: text,
        to: symbols.name_address(branch.to),
    })
}

/// The mnemonic of the instruction at `address`.
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
        location: symbols.name_address(rip),
        instruction: instruction
            .as_ref()
            .map(symbols::disassemble)
            .unwrap_or_default(),
    }
}

fn exception_row(at: Ticks, caught: &CaughtException, symbols: &Symbols) -> ExceptionRow {
    let instruction = symbols.instruction(caught.rip);
    ExceptionRow {
        at,
        cpl: caught.cpl,
        mnemonic: explain::mnemonic(caught.vector),
        location: symbols.name_address(caught.rip),
        instruction: instruction
            .as_ref()
            .map_or_else(String::new, symbols::disassemble),
        reason: explain::exception(caught, instruction.as_ref()),
    }
}

const HALT: &str = "HLT";

/// The name of an exit in the table. The guest's stopwatch uses the same names.
fn exit_name(kind: ExitKind) -> &'static str {
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

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_cpu::facility::Facilities;
    use hindsight_cpu::msr::MsrConfig;

    /// A run whose guest's TSC is 1000 ahead of the monitor's clock.
    fn run() -> DemoRun {
        let event = |at, kind| RecordedEvent { at, cpu: 0, kind };
        let mark = RecordedKind::Exit(ExitKind::PortWrite(MARK_PORT));
        let record = |tsc, entry| DemoRecord { tsc, entry };
        let phase = |tsc, name: &str, cpl| {
            let name = name.to_owned();
            record(tsc, DemoEntry::Phase { name, cpl })
        };
        let sieve = |name: &str, ticks| DemoEntry::Cost {
            name: name.to_owned(),
            ticks,
        };
        let cost = |ticks| sieve("RDMSR", ticks);
        DemoRun {
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
                record(1150, DemoEntry::Tick { rip: 0x10, cpl: 3 }),
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
            msrs: MsrConfig::new(Facilities::KVM, 1_000_000_000).with_uarch(true),
        }
    }

    #[test]
    fn guest_times_are_converted_to_the_clock_of_the_monitor() {
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
    fn exit_rows_have_the_medians_of_monitor_and_guest() {
        let story = Story::of(run());
        let writes = &story.exit_rows[0];
        assert_eq!((writes.name.as_str(), writes.count), ("port write", 3));
        assert_eq!((writes.monitor_ns, writes.guest_ns), (Some(3), None));
        let reads = &story.exit_rows[1];
        assert_eq!((reads.name.as_str(), reads.guest_ns), ("RDMSR", Some(20)));
        assert_eq!(story.exits.len(), 5);
        assert_eq!(story.exit_rows.len(), 2, "the sieve is not an exit");
        assert_eq!(story.ring0_slower, Some(20));
    }

    #[test]
    fn msr_accesses_in_the_msr_phase_have_a_reason() {
        let story = Story::of(run());
        let row = &story.msrs[0];
        assert_eq!(
            (row.name.as_str(), row.access.answer),
            ("IA32_TSC_ADJUST", Some(7))
        );
        assert_eq!(row.reason, "TSC model");
        assert_eq!(story.msrs.len(), 1);
    }

    #[test]
    fn empty_run_has_an_empty_story() {
        let story = Story::of(DemoRun {
            events: Vec::new(),
            log: Vec::new(),
            ..run()
        });
        assert_eq!((story.end, story.exits.len()), (0, 0));
        assert!(story.profiles.is_empty());
    }
}
