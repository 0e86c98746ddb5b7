//! A debugger's stops in the debug registers of a vCPU that runs under KVM.
//!
//! KVM_SET_GUEST_DEBUG gives a debugger what a processor has: four breakpoints, and single steps.
//! [`allocate`] decides whether that is enough. It is a pure function of the debugger's
//! requirements, the state of the vCPU, and the findings about this host's KVM.
//! [`crate::vcpu::kvm`] programs KVM; beyond that, the machine runs in the interpreter.

use hindsight_cpu::armed::Armed;
use hindsight_cpu::debug::DebugRegisters;
use hindsight_cpu::state::{Activity, CpuState};
use hindsight_cpu::stops::{MsrStops, StopConditions, StopHit, Watchpoint};
use hindsight_regs::dr::{BreakpointIndex, Condition, Dr7, Length};
use hindsight_regs::rflags::Rflags;

use super::stop::{ResumeAction, Unsupported};
use crate::kvm::host_support::HwBreakpointSupport;

/// Breakpoints that a processor has.
const HW_BREAKPOINTS: usize = 4;

/// The part of a vCPU's state that decides whether KVM can debug it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebugStatus {
    /// The guest has armed something in its own debug registers.
    armed: bool,
    /// Whether the vCPU would do more than execute its next instruction.
    ///
    /// An event waits for delivery, the guest single-steps itself, or the vCPU is not running.
    busy: bool,
}

impl From<&CpuState> for DebugStatus {
    fn from(state: &CpuState) -> Self {
        let events = &state.events;
        let waits = events.exception.is_some() || events.interrupt.is_some() || events.nmi_pending;
        let runs = state.activity == Activity::Running && state.rflags & Rflags::TF.bits() == 0;
        Self {
            armed: !Armed::from_dr7(state.dr7, state.cr4).is_empty(),
            busy: waits || !runs,
        }
    }
}

/// What one hardware breakpoint stops for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HwBreakpoint {
    Execute(u64),
    Data {
        watch: Watchpoint,
        at: u64,
        len: Length,
    },
}

/// A debugger's stops as hardware breakpoints, at most four.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HwBreakpoints(Vec<HwBreakpoint>);

impl HwBreakpoints {
    /// The hardware breakpoints for these stops.
    ///
    /// # Errors
    ///
    /// When a processor does not have the breakpoints that they need.
    pub fn new(stops: &StopConditions) -> Result<Self, Unsupported> {
        let others = !stops.ports.is_empty() || stops.msrs != MsrStops::None;
        if others || stops.exceptions != 0 || stops.controls != 0 {
            return Err(Unsupported::Kind);
        }
        if stops.execute.len() + stops.watchpoints.len() > HW_BREAKPOINTS {
            return Err(Unsupported::TooMany);
        }
        let execute = stops.execute.iter().copied();
        let mut breakpoints: Vec<_> = execute.map(HwBreakpoint::Execute).collect();
        for &watch in &stops.watchpoints {
            if !watch.write {
                return Err(Unsupported::ReadsOnly);
            }
            for (at, len) in aligned_pieces(watch.at, watch.len) {
                breakpoints.push(HwBreakpoint::Data { watch, at, len });
                if breakpoints.len() > HW_BREAKPOINTS {
                    return Err(Unsupported::TooMany);
                }
            }
        }
        Ok(Self(breakpoints))
    }

    /// Whether no hardware breakpoint is used.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// DR0-3 and DR7, with general detect, and without the breakpoint at the address `except`.
    pub fn registers(&self, except: Option<u64>) -> DebugRegisters {
        let mut registers = DebugRegisters::RESET;
        let mut control = Dr7(registers.control | Dr7::GD);
        let indexed_addresses = (0..).map(BreakpointIndex).zip(&mut registers.addresses);
        for (breakpoint, (index, address)) in self.0.iter().zip(indexed_addresses) {
            match *breakpoint {
                HwBreakpoint::Execute(at) if except == Some(at) => {}
                HwBreakpoint::Execute(at) => {
                    *address = at;
                    control = control.with_breakpoint(index, Condition::Execute, Length::One);
                }
                HwBreakpoint::Data { watch, at, len } => {
                    *address = at;
                    let condition = match watch.read {
                        true => Condition::ReadWrite,
                        false => Condition::Write,
                    };
                    control = control.with_breakpoint(index, condition, len);
                }
            }
        }
        registers.control = control.0;
        registers
    }

    /// The stop that B0-3 of DR6 report, for a vCPU whose next instruction is at the linear address
    /// `at`. A processor may also set a bit for a breakpoint that was not hit.
    pub fn hit(&self, dr6: u64, at: u64) -> Option<StopHit> {
        let reported = self.0.iter().enumerate();
        let reported = reported.filter(|(slot, _)| dr6 >> slot & 1 != 0);
        reported
            .map(|(_, breakpoint)| *breakpoint)
            .find_map(|breakpoint| match breakpoint {
                HwBreakpoint::Execute(address) => {
                    (address == at).then_some(StopHit::Execute(address))
                }
                HwBreakpoint::Data { watch, at, .. } => Some(StopHit::Watchpoint {
                    watchpoint: watch,
                    at: at.max(watch.at),
                    write: !watch.read,
                }),
            })
    }
}

/// Splits `len` bytes at `at` into naturally aligned pieces of 8, 4, 2 and 1 bytes.
///
/// There is at least one piece.
fn aligned_pieces(at: u64, len: u64) -> impl Iterator<Item = (u64, Length)> {
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

/// The hardware breakpoints by which KVM does what a debugger requires of a vCPU.
///
/// # Errors
///
/// When KVM cannot do it.
pub fn allocate(
    stops: &StopConditions,
    action: ResumeAction,
    status: DebugStatus,
    support: &HwBreakpointSupport,
) -> Result<HwBreakpoints, Unsupported> {
    let breakpoints = HwBreakpoints::new(stops)?;
    let needs = |support: &Result<(), String>| support.clone().map_err(Unsupported::Probe);
    if !stops.execute.is_empty() {
        needs(&support.execute)?;
    }
    if !stops.watchpoints.is_empty() {
        needs(&support.data)?;
    }
    if !breakpoints.is_empty() && status.armed {
        return Err(Unsupported::GuestBreakpoints);
    }
    match action {
        ResumeAction::Run => {}
        ResumeAction::Step {
            mask_interrupts: true,
            ..
        } if !status.busy => needs(&support.step)?,
        ResumeAction::Step { .. } | ResumeAction::StepBack { .. } | ResumeAction::RunBack => {
            return Err(Unsupported::Step);
        }
    }
    Ok(breakpoints)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_cpu::stops::PortWatchpoint;

    const SUPPORTED: HwBreakpointSupport = HwBreakpointSupport {
        execute: Ok(()),
        data: Ok(()),
        step: Ok(()),
    };
    const READY: DebugStatus = DebugStatus {
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
        let mut stops = StopConditions::default();
        stops.execute = execute.to_vec();
        stops.watchpoints = watches.to_vec();
        stops
    }

    fn refusal(stops: &StopConditions) -> Option<Unsupported> {
        allocate(stops, ResumeAction::Run, READY, &SUPPORTED).err()
    }

    #[test]
    fn four_breakpoints_fit_and_a_fifth_is_refused() {
        assert_eq!(refusal(&stops(&[1, 2, 3, 4], &[])), None);
        assert_eq!(
            refusal(&stops(&[1, 2, 3, 4, 5], &[])),
            Some(Unsupported::TooMany)
        );
        let word = watch(0x1000, 8, false, true);
        assert_eq!(refusal(&stops(&[1, 2, 3], &[word])), None);
        assert_eq!(
            refusal(&stops(&[1, 2, 3, 4], &[word])),
            Some(Unsupported::TooMany)
        );
        // Three bytes from an odd address take two breakpoints, seven take three, a page too many.
        let odd = |len| stops(&[1, 2], &[watch(0x1001, len, true, true)]);
        assert_eq!(refusal(&odd(3)), None);
        assert_eq!(refusal(&odd(7)), Some(Unsupported::TooMany));
        for len in [0x1000, u64::MAX] {
            assert_eq!(refusal(&odd(len)), Some(Unsupported::TooMany));
        }
    }

    /// SDM Vol. 3B, "Debug Address Registers (DR0-DR3)": a breakpoint covers aligned bytes.
    #[test]
    fn breakpoints_cover_exactly_the_watched_bytes() {
        let bytes = |length| match length {
            Length::One => 1,
            Length::Two => 2,
            Length::Four => 4,
            Length::Eight => 8,
        };
        for at in 0x1000..0x1010_u64 {
            for len in 1..=24_u64 {
                let mut next = at;
                for (piece, length) in aligned_pieces(at, len) {
                    assert_eq!(piece, next);
                    assert!(piece.is_multiple_of(bytes(length)));
                    next += bytes(length);
                }
                assert_eq!(next, at + len);
            }
        }
        assert_eq!(aligned_pieces(u64::MAX, 1).count(), 1);
        assert_eq!(aligned_pieces(u64::MAX, 9).count(), 1);
    }

    #[test]
    fn what_a_processor_has_no_breakpoint_for_is_refusal() {
        let read = watch(0x1000, 4, true, false);
        assert_eq!(refusal(&stops(&[], &[read])), Some(Unsupported::ReadsOnly));
        let port = PortWatchpoint {
            first: 1,
            last: 1,
            read: true,
            write: true,
        };
        let mut ports = StopConditions::default();
        ports.ports = vec![port];
        let mut exceptions = StopConditions::default();
        exceptions.exceptions = 1;
        let mut controls = StopConditions::default();
        controls.controls = 1;
        let mut msrs = StopConditions::default();
        msrs.msrs = MsrStops::All;
        for stops in [ports, exceptions, controls, msrs] {
            assert_eq!(refusal(&stops), Some(Unsupported::Kind));
        }
    }

    #[test]
    fn missing_kvm_support_matters_only_where_it_is_needed() {
        let lacks = |name: &str| Err(format!("{name}: nothing"));
        let unsupported = HwBreakpointSupport {
            execute: lacks("execute"),
            data: lacks("data"),
            step: lacks("step"),
        };
        let code = stops(&[1], &[]);
        let data = stops(&[], &[watch(0x1000, 4, false, true)]);
        let none = StopConditions::default();
        let rows = [
            (&code, ResumeAction::Run, "execute"),
            (&data, ResumeAction::Run, "data"),
            (&none, STEP, "step"),
        ];
        for (stops, action, name) in rows {
            let found = allocate(stops, action, READY, &unsupported).unwrap_err();
            assert_eq!(found, Unsupported::Probe(format!("{name}: nothing")));
            assert!(allocate(stops, action, READY, &SUPPORTED).is_ok());
        }
        assert!(allocate(&none, ResumeAction::Run, READY, &unsupported).is_ok());
    }

    #[test]
    fn guest_with_breakpoints_keeps_them() {
        let armed = DebugStatus {
            armed: true,
            ..READY
        };
        let found = allocate(&stops(&[1], &[]), ResumeAction::Run, armed, &SUPPORTED);
        assert_eq!(found, Err(Unsupported::GuestBreakpoints));
        assert!(
            allocate(
                &StopConditions::default(),
                ResumeAction::Run,
                armed,
                &SUPPORTED
            )
            .is_ok()
        );
    }

    #[test]
    fn kvm_steps_only_over_a_plain_instruction() {
        let mut state = CpuState::reset();
        let steps = |state: &CpuState| {
            allocate(&StopConditions::default(), STEP, state.into(), &SUPPORTED).is_ok()
        };
        assert!(steps(&state));
        state.rflags |= Rflags::TF.bits();
        assert!(!steps(&state), "the guest steps itself");
        state = CpuState::reset();
        state.events.interrupt = Some(0x20);
        assert!(!steps(&state), "it would run the handler");
        state = CpuState::reset();
        state.activity = Activity::Halted;
        assert!(!steps(&state));
        let with_interrupts = ResumeAction::Step {
            mask_interrupts: false,
            range: None,
        };
        let into_handlers = allocate(
            &StopConditions::default(),
            with_interrupts,
            READY,
            &SUPPORTED,
        );
        assert_eq!(into_handlers, Err(Unsupported::Step));
    }

    #[test]
    fn hit_names_the_stop_of_its_breakpoint() {
        let word = watch(0x1002, 6, false, true);
        let breakpoints = HwBreakpoints::new(&stops(&[0x2000], &[word])).unwrap();
        let registers = breakpoints.registers(None);
        assert_eq!(registers.addresses, [0x2000, 0x1002, 0x1004, 0]);
        // G0-G2, GD, bit 10; R/W1 and R/W2 are 01, LEN1 is 01 and LEN2 is 11.
        assert_eq!(registers.control, 0x0d50_242a);
        assert_eq!(breakpoints.registers(Some(0x2000)).control, 0x0d50_2428);
        assert_eq!(
            breakpoints.hit(0b0001, 0x2000),
            Some(StopHit::Execute(0x2000))
        );
        assert_eq!(breakpoints.hit(0b0001, 0x2001), None);
        let written = StopHit::Watchpoint {
            watchpoint: word,
            at: 0x1004,
            write: true,
        };
        assert_eq!(breakpoints.hit(0b0100, 0x2001), Some(written));
        assert_eq!(
            breakpoints.hit(0b1000, 0x2000),
            None,
            "not a breakpoint of the debugger"
        );
    }
}
