//! Selects the records of a trace: by kind, privilege level, address, and part of the run.

use hindsight_cpu::branch::BranchClass;

use crate::event::{BranchEvent, Event, EventKinds};
use crate::process::LinuxTask;

/// The n-th time that a vCPU executes the instruction at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passage {
    /// Linear address.
    pub address: u64,
    /// Counts from 1.
    pub nth: u64,
}

/// What ends the trace of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The vCPU executes an address.
    Passage(Passage),
    /// An exception is delivered to the vCPU.
    Exception,
}

/// The part of a run that is traced, for each vCPU by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Begin at the branch that follows this passage.
    pub from: Option<Passage>,
    /// End with the branch that does this.
    pub until: Option<End>,
    /// Begin after this many instructions, counted from the start of the run.
    pub after: u64,
    /// End after this many instructions, counted from the first record.
    pub length: Option<u64>,
}

/// The tasks of a Linux guest that are traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessFilter {
    /// Those with this name.
    Name(String),
    /// The threads of this process, or the thread with this number.
    Pid(u32),
}

impl ProcessFilter {
    fn matches(&self, task: &LinuxTask) -> bool {
        match self {
            Self::Name(name) => task.name() == *name,
            Self::Pid(pid) => task.tgid == *pid || task.pid == *pid,
        }
    }
}

/// Which records a trace has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Kinds of events.
    pub kinds: EventKinds,
    /// Privilege levels as a mask: bit n is CPL n.
    pub cpls: u8,
    /// First and last linear address of the code; empty for all.
    pub ranges: Vec<(u64, u64)>,
    /// The tasks; empty for all, and for code before the first task is known.
    pub processes: Vec<ProcessFilter>,
    /// The part of the run.
    pub window: Window,
}

impl Default for Selection {
    fn default() -> Self {
        Self {
            kinds: EventKinds::BRANCHES,
            cpls: 0xf,
            ranges: Vec::new(),
            processes: Vec::new(),
            window: Window::default(),
        }
    }
}

impl Selection {
    /// The kinds of events that an engine must report. They include branches if the selection
    /// depends on the code that runs.
    pub fn reported_kinds(&self) -> EventKinds {
        let window = &self.window;
        let processes = if self.processes.is_empty() {
            EventKinds::empty()
        } else {
            EventKinds::PROCESSES
        };
        let kinds = self.kinds | processes;
        let follows_code = window.from.is_some()
            || window.until.is_some()
            || self.cpls & 0xf != 0xf
            || !self.ranges.is_empty();
        if follows_code {
            kinds | EventKinds::BRANCHES
        } else {
            kinds
        }
    }
}

/// The position of a vCPU relative to the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WindowPhase {
    Before,
    /// The window began at this count of instructions.
    Inside(u64),
    Over,
}

/// Selects the records of one vCPU.
#[derive(Debug)]
pub(crate) struct Selector {
    selection: Selection,
    phase: WindowPhase,
    /// How often the addresses of `from` and `until` have been executed.
    passed: [u64; 2],
    /// The target of the last branch, where the code that runs began.
    last_to: Option<u64>,
    cpl: u8,
    /// Whether the task that runs is selected.
    in_process: bool,
}

impl Selector {
    pub(crate) fn new(selection: Selection) -> Self {
        Self {
            in_process: selection.processes.is_empty(),
            selection,
            phase: WindowPhase::Before,
            passed: [0; 2],
            last_to: None,
            cpl: 0,
        }
    }

    /// Whether the window is over: no later record is selected.
    pub(crate) fn is_over(&self) -> bool {
        self.phase == WindowPhase::Over
    }

    /// Whether a record is selected. Must be called for each record, in order.
    pub(crate) fn selects(&mut self, at: u64, event: &Event) -> bool {
        let in_window = self.follow_window(at, event);
        let in_process = self.follow_process(event);
        let selected =
            in_window && in_process && self.selects_kind(event) && self.selects_code(event);
        if let Event::Branch(branch) = event {
            self.last_to = Some(branch.to);
            self.cpl = branch.to_cpl;
        }
        selected
    }

    fn follow_window(&mut self, at: u64, event: &Event) -> bool {
        let window = self.selection.window;
        if self.phase == WindowPhase::Before {
            let reached = window.from.is_none_or(|from| self.passes(0, event, from));
            if reached && at >= window.after {
                self.phase = WindowPhase::Inside(at);
            }
        }
        let WindowPhase::Inside(since) = self.phase else {
            return false;
        };
        if window
            .length
            .is_some_and(|length| at.saturating_sub(since) > length)
        {
            self.phase = WindowPhase::Over;
            return false;
        }
        let ends = match window.until {
            None => false,
            Some(End::Passage(until)) => self.passes(1, event, until),
            Some(End::Exception) => {
                matches!(event, Event::Branch(branch) if branch.class == BranchClass::Exception)
            }
        };
        if ends {
            self.phase = WindowPhase::Over;
        }
        true
    }

    /// Whether the task that runs is selected. A switch is if one of its two tasks is.
    fn follow_process(&mut self, event: &Event) -> bool {
        let before = self.in_process;
        if let Event::Task(task) = event
            && !self.selection.processes.is_empty()
        {
            let mut filters = self.selection.processes.iter();
            let matches = |task: &LinuxTask| filters.any(|filter| filter.matches(task));
            self.in_process = task.as_ref().is_some_and(matches);
        }
        before || self.in_process
    }

    /// Counts a passage if the code between the last branch and this one contains its address.
    /// Returns whether the passage has happened often enough.
    fn passes(&mut self, which: usize, event: &Event, passage: Passage) -> bool {
        if let Event::Branch(BranchEvent { from, .. }) = *event {
            let start = self.last_to.unwrap_or(from);
            let passed = &mut self.passed[which];
            *passed += u64::from((start..=from).contains(&passage.address));
        }
        self.passed[which] >= passage.nth.max(1)
    }

    fn selects_kind(&self, event: &Event) -> bool {
        use BranchClass::{
            Abort, CallNext, Debug, DirectCall, Exception, Far, IndirectCall, Interrupt, Return,
            SoftwareInterrupt,
        };
        let of_branch = |class| match class {
            Exception | Debug | SoftwareInterrupt => EventKinds::EXCEPTIONS | EventKinds::CALLS,
            Interrupt => EventKinds::INTERRUPTS | EventKinds::CALLS,
            DirectCall | CallNext | IndirectCall | Return | Far | Abort => EventKinds::CALLS,
            _ => EventKinds::empty(),
        };
        let kinds = match *event {
            Event::Branch(branch) => EventKinds::BRANCHES | of_branch(branch.class),
            Event::Delivery { .. } => EventKinds::EXCEPTIONS | EventKinds::INTERRUPTS,
            Event::MsrRead { .. } | Event::MsrWrite { .. } => EventKinds::MSR,
            Event::Device(_) => EventKinds::IO,
            Event::ControlRegister { .. } | Event::Halt => EventKinds::MODE,
            Event::Access { .. } => EventKinds::ACCESSES,
            Event::Time { .. } => return true,
            Event::Task(_) if !self.selection.processes.is_empty() => return true,
            Event::Task(_) => EventKinds::PROCESSES,
        };
        self.selection.kinds.intersects(kinds)
    }

    /// Whether privilege level and address are selected. A branch is selected if its source or its
    /// target is.
    fn selects_code(&self, event: &Event) -> bool {
        let selection = &self.selection;
        let at_level = |cpl: u8| selection.cpls >> (cpl & 3) & 1 != 0;
        let in_range = |at: u64| {
            let mut ranges = selection.ranges.iter();
            selection.ranges.is_empty() || ranges.any(|&(first, last)| (first..=last).contains(&at))
        };
        match *event {
            Event::Branch(BranchEvent {
                from,
                to,
                cpl,
                to_cpl,
                ..
            }) => at_level(cpl) && in_range(from) || at_level(to_cpl) && in_range(to),
            Event::Time { .. } | Event::Task(_) => true,
            _ => at_level(self.cpl) && self.last_to.is_none_or(in_range),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::DeviceAccess;

    fn branch(from: u64, to: u64, class: BranchClass, cpl: u8) -> Event {
        Event::Branch(BranchEvent {
            from,
            to,
            class,
            cpl,
            to_cpl: cpl,
            mispredicted: false,
        })
    }

    fn selected(selection: Selection, events: &[(u64, Event)]) -> Vec<u64> {
        let mut selector = Selector::new(selection);
        let chosen = events
            .iter()
            .filter(|(at, event)| selector.selects(*at, event));
        chosen.map(|&(at, _)| at).collect()
    }

    const JUMP: BranchClass = BranchClass::DirectJump;

    #[test]
    fn window_begins_and_ends_at_passages_also_in_the_middle_of_code() {
        let events = [
            (10, branch(0x110, 0x200, JUMP, 0)),
            (20, branch(0x220, 0x100, JUMP, 0)),
            (30, branch(0x110, 0x200, JUMP, 0)),
            (40, branch(0x220, 0x300, JUMP, 0)),
            (50, branch(0x310, 0x400, JUMP, 0)),
        ];
        let window = |from, until| Selection {
            window: Window {
                from,
                until,
                ..Window::default()
            },
            ..Selection::default()
        };
        let passage = |address, nth| Passage { address, nth };
        let second = window(Some(passage(0x208, 2)), None);
        assert_eq!(selected(second, &events), [40, 50]);
        let until = window(None, Some(End::Passage(passage(0x105, 1))));
        assert_eq!(selected(until, &events), [10, 20, 30]);
        let counted = Selection {
            window: Window {
                after: 15,
                length: Some(20),
                ..Window::default()
            },
            ..Selection::default()
        };
        assert_eq!(selected(counted, &events), [20, 30, 40]);
    }

    #[test]
    fn until_exception_ends_with_the_exception() {
        let events = [
            (1, branch(1, 2, JUMP, 0)),
            (2, branch(3, 4, BranchClass::Exception, 0)),
            (3, branch(5, 6, JUMP, 0)),
        ];
        let selection = Selection {
            window: Window {
                until: Some(End::Exception),
                ..Window::default()
            },
            ..Selection::default()
        };
        assert_eq!(selected(selection, &events), [1, 2]);
    }

    #[test]
    fn kinds_levels_and_ranges_select_records() {
        let io = Event::Device(DeviceAccess {
            port: true,
            write: true,
            address: 1,
            size: 1,
            value: 2,
        });
        let events = [
            (1, branch(0x10, 0x20, JUMP, 0)),
            (2, branch(0x21, 0x30, BranchClass::DirectCall, 3)),
            (3, io),
            (4, branch(0x31, 0x40, BranchClass::Interrupt, 3)),
        ];
        let of = |kinds| Selection {
            kinds,
            ..Selection::default()
        };
        assert_eq!(selected(of(EventKinds::BRANCHES), &events), [1, 2, 4]);
        assert_eq!(selected(of(EventKinds::CALLS), &events), [2, 4]);
        assert_eq!(
            selected(of(EventKinds::INTERRUPTS | EventKinds::IO), &events),
            [3, 4]
        );
        let user = Selection {
            cpls: 8,
            ..Selection::default()
        };
        assert_eq!(selected(user, &events), [2, 4]);
        let range = Selection {
            ranges: vec![(0x40, 0x4f)],
            kinds: EventKinds::BRANCHES | EventKinds::IO,
            ..Selection::default()
        };
        assert_eq!(selected(range, &events), [4]);
    }
}
