//! A debugger's wishes in the debug registers of a processor that runs natively.
//!
//! KVM_SET_GUEST_DEBUG gives a debugger what a processor has: four breakpoints, and single steps.
//! [`fit`] is the whole rule of when that is enough, and pure: (what the debugger wants) x (where the
//! processor stands) x (what this host's KVM was measured to do). [`HwBreakpointSupport::measure`] asks doctor,
//! [`crate::vcpu::kvm`] has KVM do it, and beyond it the machine runs in the interpreter.

use hindsight_cpu::armed::Armed;
use hindsight_cpu::debug::Registers;
use hindsight_cpu::state::{Activity, CpuState};
use hindsight_cpu::stops::{MsrStops, StopConditions, StopHit, Watchpoint};
use hindsight_regs::dr::{Condition, Dr7, Length, Slot};

use super::stop::{ResumeAction, Unsupported};
use crate::kvm::host_support::HwBreakpointSupport;

/// RFLAGS.TF.
const FLAG_TF: u64 = 1 << 8;
/// Breakpoints that a processor has.
const SLOTS: usize = 4;

/// What of a processor's state decides whether KVM can debug it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebugStatus {
    /// The guest has armed something in its own debug registers.
    armed: bool,
    /// The next thing it does is not one untrapped instruction.
    busy: bool,
}

impl From<&CpuState> for DebugStatus {
    fn from(state: &CpuState) -> Self {
        let events = &state.events;
        let waits = events.exception.is_some() || events.interrupt.is_some() || events.nmi_pending;
        let runs = state.activity == Activity::Running && state.rflags & FLAG_TF == 0;
        Self {
            armed: !Armed::by_dr7(state.dr7, state.cr4).is_empty(),
            busy: waits || !runs,
        }
    }
}

/// What one slot stops for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotUse {
    Execute(u64),
    Data {
        watch: Watchpoint,
        at: u64,
        len: Length,
    },
}

/// Stops as the hw_breakpoints of a processor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HwBreakpoints(Vec<SlotUse>);

impl HwBreakpoints {
    /// The hw_breakpoints for these stops.
    ///
    /// # Errors
    ///
    /// When a processor has not got what it takes.
    pub fn new(stops: &StopConditions) -> Result<Self, Unsupported> {
        let others = !stops.ports.is_empty() || stops.msrs != MsrStops::None;
        if others || stops.exceptions != 0 || stops.controls != 0 {
            return Err(Unsupported::Kind);
        }
        if stops.execute.len() + stops.watchpoints.len() > SLOTS {
            return Err(Unsupported::HwBreakpoints);
        }
        let mut uses: Vec<_> = stops
            .execute
            .iter()
            .copied()
            .map(SlotUse::Execute)
            .collect();
        for &watch in &stops.watchpoints {
            if !watch.write {
                return Err(Unsupported::Reads);
            }
            for (at, len) in pieces(watch.at, watch.len) {
                uses.push(SlotUse::Data { watch, at, len });
                if uses.len() > SLOTS {
                    return Err(Unsupported::HwBreakpoints);
                }
            }
        }
        Ok(Self(uses))
    }

    /// None is used.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// DR0-3 and DR7, with general detect, and without the breakpoint at the address `but`.
    pub fn registers(&self, but: Option<u64>) -> Registers {
        let mut registers = Registers::RESET;
        let mut control = Dr7(registers.control | Dr7::GD);
        let places = (0..).map(Slot).zip(&mut registers.addresses);
        for (used, (slot, address)) in self.0.iter().zip(places) {
            match *used {
                SlotUse::Execute(at) if but == Some(at) => {}
                SlotUse::Execute(at) => {
                    *address = at;
                    control = control.with(slot, Condition::Execute, Length::One);
                }
                SlotUse::Data { watch, at, len } => {
                    *address = at;
                    let condition = match watch.read {
                        true => Condition::ReadWrite,
                        false => Condition::Write,
                    };
                    control = control.with(slot, condition, len);
                }
            }
        }
        registers.control = control.0;
        registers
    }

    /// What B0-3 of DR6 say that the processor stopped for, with its next instruction at the linear
    /// address `at`. A bit may also be set for a breakpoint that is not there.
    pub fn hit(&self, dr6: u64, at: u64) -> Option<StopHit> {
        let met = self.0.iter().enumerate();
        let met = met.filter(|(slot, _)| dr6 >> slot & 1 != 0);
        met.map(|(_, used)| *used).find_map(|used| match used {
            SlotUse::Execute(place) => (place == at).then_some(StopHit::Execute(place)),
            SlotUse::Data { watch, at, .. } => Some(StopHit::Watchpoint {
                watchpoint: watch,
                at: at.max(watch.at),
                write: !watch.read,
            }),
        })
    }
}

/// Aligned pieces of 8, 4, 2 and 1 bytes that are exactly these bytes, of which there is at least one.
fn pieces(at: u64, len: u64) -> impl Iterator<Item = (u64, Length)> {
    let mut next = Some((at, len.max(1)));
    std::iter::from_fn(move || {
        let (at, left) = next?;
        let sizes = [
            (8, Length::Eight),
            (4, Length::Four),
            (2, Length::Two),
            (1, Length::One),
        ];
        let fits = |&(size, _): &(u64, Length)| size <= left && at.is_multiple_of(size);
        let (size, length) = sizes.into_iter().find(fits)?;
        next = at.checked_add(size).zip(left.checked_sub(size));
        next = next.filter(|&(_, left)| left != 0);
        Some((at, length))
    })
}

/// The rule: the hw_breakpoints by which KVM does what a debugger wants of a processor.
///
/// # Errors
///
/// What is beyond KVM.
pub fn fit(
    stops: &StopConditions,
    plan: ResumeAction,
    at: DebugStatus,
    able: &HwBreakpointSupport,
) -> Result<HwBreakpoints, Unsupported> {
    let hw_breakpoints = HwBreakpoints::new(stops)?;
    let needs = |ability: &Result<(), String>| ability.clone().map_err(Unsupported::Probe);
    if !stops.execute.is_empty() {
        needs(&able.execute)?;
    }
    if !stops.watchpoints.is_empty() {
        needs(&able.data)?;
    }
    if !hw_breakpoints.is_empty() && at.armed {
        return Err(Unsupported::Guest);
    }
    match plan {
        ResumeAction::Run => {}
        ResumeAction::Step {
            mask_interrupts: true,
            ..
        } if !at.busy => needs(&able.step)?,
        ResumeAction::Step { .. } | ResumeAction::StepBack { .. } | ResumeAction::RunBack => {
            return Err(Unsupported::Step);
        }
    }
    Ok(hw_breakpoints)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_cpu::stops::PortWatchpoint;

    const ABLE: HwBreakpointSupport = HwBreakpointSupport {
        execute: Ok(()),
        data: Ok(()),
        step: Ok(()),
    };
    const IDLE: DebugStatus = DebugStatus {
        armed: false,
        busy: false,
    };
    const STEP: ResumeAction = ResumeAction::Step {
        mask_interrupts: true,
        range: None,
    };

    fn watch(at: u64, len: u64, read: bool, write: bool) -> Watchpoint {
        Watchpoint {
            at,
            len,
            read,
            write,
        }
    }

    fn stops(execute: &[u64], watches: &[Watchpoint]) -> StopConditions {
        StopConditions {
            execute: execute.to_vec(),
            watchpoints: watches.to_vec(),
            ..StopConditions::default()
        }
    }

    fn beyond(stops: &StopConditions) -> Option<Unsupported> {
        fit(stops, ResumeAction::Run, IDLE, &ABLE).err()
    }

    #[test]
    fn four_slots_are_enough_for_four_breakpoints_and_no_more() {
        assert_eq!(beyond(&stops(&[1, 2, 3, 4], &[])), None);
        assert_eq!(
            beyond(&stops(&[1, 2, 3, 4, 5], &[])),
            Some(Unsupported::HwBreakpoints)
        );
        let word = watch(0x1000, 8, false, true);
        assert_eq!(beyond(&stops(&[1, 2, 3], &[word])), None);
        assert_eq!(
            beyond(&stops(&[1, 2, 3, 4], &[word])),
            Some(Unsupported::HwBreakpoints)
        );
        // Three bytes from an odd address take two hw_breakpoints, seven take three, a page too many.
        let odd = |len| stops(&[1, 2], &[watch(0x1001, len, true, true)]);
        assert_eq!(beyond(&odd(3)), None);
        assert_eq!(beyond(&odd(7)), Some(Unsupported::HwBreakpoints));
        for len in [0x1000, u64::MAX] {
            assert_eq!(beyond(&odd(len)), Some(Unsupported::HwBreakpoints));
        }
    }

    /// SDM Vol. 3B, "Debug Address Registers (DR0-DR3)": what a breakpoint covers is aligned.
    #[test]
    fn slots_cover_exactly_what_is_watched() {
        let bytes = |length| match length {
            Length::One => 1,
            Length::Two => 2,
            Length::Four => 4,
            Length::Eight => 8,
        };
        for at in 0x1000..0x1010_u64 {
            for len in 1..=24_u64 {
                let mut next = at;
                for (piece, length) in pieces(at, len) {
                    assert_eq!(piece, next);
                    assert!(piece.is_multiple_of(bytes(length)));
                    next += bytes(length);
                }
                assert_eq!(next, at + len);
            }
        }
        assert_eq!(pieces(u64::MAX, 1).count(), 1);
        assert_eq!(pieces(u64::MAX, 9).count(), 1);
    }

    #[test]
    fn what_a_processor_has_no_breakpoint_for_is_beyond() {
        let read = watch(0x1000, 4, true, false);
        assert_eq!(beyond(&stops(&[], &[read])), Some(Unsupported::Reads));
        let port = PortWatchpoint {
            first: 1,
            last: 1,
            read: true,
            write: true,
        };
        let ports = StopConditions {
            ports: vec![port],
            ..StopConditions::default()
        };
        let exceptions = StopConditions {
            exceptions: 1,
            ..StopConditions::default()
        };
        let controls = StopConditions {
            controls: 1,
            ..StopConditions::default()
        };
        let msrs = StopConditions {
            msrs: MsrStops::All,
            ..StopConditions::default()
        };
        for stops in [ports, exceptions, controls, msrs] {
            assert_eq!(beyond(&stops), Some(Unsupported::Kind));
        }
    }

    #[test]
    fn what_kvm_lacks_is_beyond_only_where_it_is_wanted() {
        let lacks = |name: &str| Err(format!("{name}: nothing"));
        let able = HwBreakpointSupport {
            execute: lacks("execute"),
            data: lacks("data"),
            step: lacks("step"),
        };
        let code = stops(&[1], &[]);
        let data = stops(&[], &[watch(0x1000, 4, false, true)]);
        let none = StopConditions::default();
        let wanted = [
            (&code, ResumeAction::Run, "execute"),
            (&data, ResumeAction::Run, "data"),
            (&none, STEP, "step"),
        ];
        for (stops, plan, name) in wanted {
            let found = fit(stops, plan, IDLE, &able).unwrap_err();
            assert_eq!(found, Unsupported::Probe(format!("{name}: nothing")));
            assert!(fit(stops, plan, IDLE, &ABLE).is_ok());
        }
        assert!(fit(&none, ResumeAction::Run, IDLE, &able).is_ok());
    }

    #[test]
    fn a_guest_with_breakpoints_keeps_them() {
        let armed = DebugStatus {
            armed: true,
            ..IDLE
        };
        let found = fit(&stops(&[1], &[]), ResumeAction::Run, armed, &ABLE);
        assert_eq!(found, Err(Unsupported::Guest));
        assert!(fit(&StopConditions::default(), ResumeAction::Run, armed, &ABLE).is_ok());
    }

    #[test]
    fn kvm_steps_only_over_a_plain_instruction() {
        let mut state = CpuState::reset();
        let steps =
            |state: &CpuState| fit(&StopConditions::default(), STEP, state.into(), &ABLE).is_ok();
        assert!(steps(&state));
        state.rflags |= FLAG_TF;
        assert!(!steps(&state), "the guest steps itself");
        state = CpuState::reset();
        state.events.interrupt = Some(0x20);
        assert!(!steps(&state), "it would run the handler");
        state = CpuState::reset();
        state.activity = Activity::Halted;
        assert!(!steps(&state));
        let loud = ResumeAction::Step {
            mask_interrupts: false,
            range: None,
        };
        let into_handlers = fit(&StopConditions::default(), loud, IDLE, &ABLE);
        assert_eq!(into_handlers, Err(Unsupported::Step));
    }

    #[test]
    fn a_stop_is_for_what_its_slot_is_used_for() {
        let word = watch(0x1002, 6, false, true);
        let hw_breakpoints = HwBreakpoints::new(&stops(&[0x2000], &[word])).unwrap();
        let registers = hw_breakpoints.registers(None);
        assert_eq!(registers.addresses, [0x2000, 0x1002, 0x1004, 0]);
        // G0-G2, GD, bit 10; R/W1 and R/W2 are 01, LEN1 is 01 and LEN2 is 11.
        assert_eq!(registers.control, 0x0d50_242a);
        assert_eq!(hw_breakpoints.registers(Some(0x2000)).control, 0x0d50_2428);
        assert_eq!(
            hw_breakpoints.hit(0b0001, 0x2000),
            Some(StopHit::Execute(0x2000))
        );
        assert_eq!(hw_breakpoints.hit(0b0001, 0x2001), None);
        let written = StopHit::Watchpoint {
            watchpoint: word,
            at: 0x1004,
            write: true,
        };
        assert_eq!(hw_breakpoints.hit(0b0100, 0x2001), Some(written));
        assert_eq!(
            hw_breakpoints.hit(0b1000, 0x2000),
            None,
            "not a slot of ours"
        );
    }
}
