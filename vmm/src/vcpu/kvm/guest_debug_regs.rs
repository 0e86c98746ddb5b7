//! Decides who owns the debug registers of a vCPU under KVM: the guest or the monitor.
//!
//! Also decides when they must be read, and which breakpoints are hit by an access that KVM leaves
//! to the monitor. All functions are pure; [`super::debugging`] calls them.

use std::time::{Duration, Instant};

use hindsight_cpu::debug::DebugRegisters;
use hindsight_regs::cr::Cr4;
use hindsight_regs::dr::{BreakpointIndex, Condition, Dr7};

use crate::kvm::exit::{KvmExit, PortData};

/// L0 to G3 of DR7.
const ENABLES: u64 = 0xff;

/// How long a guest without enabled breakpoints keeps its debug registers.
///
/// Once the monitor has taken them back, the guest's next MOV DR exits, and an operating system may
/// set and clear breakpoints at each context switch.
const COOLDOWN: Duration = Duration::from_millis(5);

/// Whose DR0-3 and DR7 are in the processor while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DebugRegsOwner {
    /// The monitor's values: only GD is set, so that the guest's next MOV DR exits.
    ///
    /// The guest has no breakpoint enabled.
    Monitor,
    /// The guest's own values.
    Guest,
}

/// An access that KVM hands to the monitor without checking it for breakpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitAccess {
    /// IN, OUT, INS, OUTS.
    Port {
        /// First port.
        port: u16,
        /// Bytes of one element.
        size: u64,
    },
    /// A read or write where there is no RAM.
    Memory {
        /// Guest-physical address.
        gpa: u64,
        /// Bytes.
        len: u64,
        /// Whether it is a write.
        write: bool,
    },
}

impl ExitAccess {
    /// The access of an exit; `None` for exits of other kinds.
    pub const fn of(exit: &KvmExit<'_>) -> Option<Self> {
        Some(match exit {
            KvmExit::Io {
                port,
                size,
                data: PortData::In(_) | PortData::Out(_),
            } => Self::Port {
                port: *port,
                size: *size as u64,
            },
            KvmExit::MmioRead { address, data } => Self::Memory {
                gpa: *address,
                len: data.len() as u64,
                write: false,
            },
            KvmExit::MmioWrite { address, data } => Self::Memory {
                gpa: *address,
                len: data.len() as u64,
                write: true,
            },
            _ => return None,
        })
    }

    /// Returns the breakpoints that the access hits, as DR6\[3:0\].
    ///
    /// `translate` maps a linear address to a guest-physical one, or to `None` if it is not mapped.
    pub fn hits(
        self,
        registers: &DebugRegisters,
        cr4: u64,
        translate: impl FnMut(u64) -> Option<u64>,
    ) -> u64 {
        match self {
            Self::Port { port, size } => registers.io_hits(port, size, cr4 & Cr4::DE.bits() != 0),
            Self::Memory { gpa, len, write } => {
                physical_breakpoints(registers, translate).data_hits(gpa, len, write)
            }
        }
    }
}

/// Returns the data breakpoints with guest-physical in place of linear addresses.
///
/// The bytes that a breakpoint covers never cross a page.
fn physical_breakpoints(
    registers: &DebugRegisters,
    mut translate: impl FnMut(u64) -> Option<u64>,
) -> DebugRegisters {
    let mut physical = *registers;
    let control = Dr7(registers.control);
    for (slot, address) in (0..).map(BreakpointIndex).zip(&mut physical.addresses) {
        let data = matches!(
            control.condition(slot),
            Condition::Write | Condition::ReadWrite
        );
        let mapped = (control.is_enabled(slot) && data).then(|| translate(*address));
        match mapped.flatten() {
            Some(gpa) => *address = gpa,
            None => physical.control &= !(0b11 << (2 * slot.0)),
        }
    }
    physical
}

/// Tracks the owner of one vCPU's debug registers.
#[derive(Clone, Copy, Debug)]
pub struct GuestDebugRegs {
    /// This KVM exits on MOV DR when the monitor's DR7 has GD set.
    intercepts_mov_dr: bool,
    owner: DebugRegsOwner,
    /// The time since which the guest owns the registers and has no breakpoint enabled.
    idle_since: Option<Instant>,
}

impl GuestDebugRegs {
    /// The owner for a vCPU whose DR7 is `control`.
    pub const fn new(intercepts_mov_dr: bool, control: u64) -> Self {
        let enabled = control & (ENABLES | Dr7::GD) != 0;
        let owner = if intercepts_mov_dr && !enabled {
            DebugRegsOwner::Monitor
        } else {
            DebugRegsOwner::Guest
        };
        Self {
            intercepts_mov_dr,
            owner,
            idle_since: None,
        }
    }

    /// Who owns the registers.
    pub const fn owner(&self) -> DebugRegsOwner {
        self.owner
    }

    /// Whether the registers must be read after an exit with this access and this CR4.
    pub const fn must_read(&self, access: Option<ExitAccess>, cr4: u64) -> bool {
        match (self.owner, access) {
            // Their contents are known: nothing is enabled.
            (DebugRegsOwner::Monitor, _) => false,
            // Whether anything is still enabled decides who owns them.
            (DebugRegsOwner::Guest, _) if self.intercepts_mov_dr => true,
            (DebugRegsOwner::Guest, Some(ExitAccess::Port { .. })) => cr4 & Cr4::DE.bits() != 0,
            (DebugRegsOwner::Guest, Some(ExitAccess::Memory { .. })) => true,
            (DebugRegsOwner::Guest, None) => false,
        }
    }

    /// Updates the owner after the registers were read, with `control` as DR7.
    ///
    /// Returns whether the monitor becomes the owner, because no breakpoint was enabled for
    /// [`COOLDOWN`].
    pub fn update(&mut self, control: u64, now: Instant) -> bool {
        let next = Self::new(self.intercepts_mov_dr, control);
        if self.owner == next.owner {
            self.idle_since = None;
            return false;
        }
        let since = *self.idle_since.get_or_insert(now);
        let cooled_down = now.saturating_duration_since(since) >= COOLDOWN;
        if cooled_down {
            *self = next;
        }
        cooled_down
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_regs::dr::Length;

    const DE: u64 = Cr4::DE.bits();

    const WRITE: ExitAccess = ExitAccess::Memory {
        gpa: 0xfee0_00b0,
        len: 4,
        write: true,
    };
    const READ: ExitAccess = ExitAccess::Memory {
        gpa: 0xfee0_00b0,
        len: 4,
        write: false,
    };

    fn registers(armed: &[(u64, Condition, Length)]) -> DebugRegisters {
        let mut registers = DebugRegisters::RESET;
        for (slot, &(address, condition, length)) in (0..).zip(armed) {
            registers.addresses[usize::from(slot)] = address;
            registers.control = Dr7(registers.control)
                .with_breakpoint(BreakpointIndex(slot), condition, length)
                .0;
        }
        registers
    }

    const fn port(port: u16, size: u64) -> ExitAccess {
        ExitAccess::Port { port, size }
    }

    fn unmapped(_: u64) -> Option<u64> {
        None
    }

    /// Rules IOB-01 and IOB-02: only with CR4.DE, and by overlap.
    #[test]
    fn port_breakpoint_hits_by_overlap_and_only_with_cr4_de() {
        let r = registers(&[
            (0x60, Condition::Io, Length::One),
            (0x3f8, Condition::Io, Length::Four),
        ]);
        assert_eq!(port(0x60, 1).hits(&r, DE, unmapped), 0b01);
        assert_eq!(port(0x5e, 4).hits(&r, DE, unmapped), 0b01);
        assert_eq!(port(0x3fb, 1).hits(&r, DE, unmapped), 0b10);
        assert_eq!(port(0x3fc, 1).hits(&r, DE, unmapped), 0);
        assert_eq!(port(0x60, 1).hits(&r, 0, unmapped), 0);
    }

    #[test]
    fn data_breakpoint_hits_only_where_it_is_mapped() {
        let r = registers(&[
            (0x7000_00b0, Condition::Write, Length::Four),
            (0x7000_00b2, Condition::ReadWrite, Length::One),
            (0xfee0_00b0, Condition::ReadWrite, Length::Four),
            (0xfee0_00b0, Condition::Execute, Length::One),
        ]);
        let apic = |linear: u64| (linear >> 12 == 0x7_0000).then_some(0xfee0_0000 | linear & 0xfff);
        assert_eq!(WRITE.hits(&r, 0, apic), 0b011);
        assert_eq!(READ.hits(&r, 0, apic), 0b010);
        assert_eq!(WRITE.hits(&r, 0, unmapped), 0);
        assert_eq!(WRITE.hits(&r, 0, Some), 0b100);
    }

    #[test]
    fn monitor_owns_debug_registers_only_while_nothing_is_enabled_and_mov_dr_exits() {
        let data = registers(&[(0, Condition::Write, Length::One)]).control;
        assert_eq!(
            GuestDebugRegs::new(true, 0x400).owner(),
            DebugRegsOwner::Monitor
        );
        assert_eq!(
            GuestDebugRegs::new(true, 0xffff_0400).owner(),
            DebugRegsOwner::Monitor
        );
        for control in [data, 0x402, 0x480, 0x2400] {
            assert_eq!(
                GuestDebugRegs::new(true, control).owner(),
                DebugRegsOwner::Guest
            );
        }
        assert_eq!(
            GuestDebugRegs::new(false, 0x400).owner(),
            DebugRegsOwner::Guest
        );
    }

    #[test]
    fn debug_registers_are_read_only_where_they_can_matter() {
        // The monitor's: never.
        for access in [None, Some(WRITE), Some(port(0x60, 1))] {
            assert!(!GuestDebugRegs::new(true, 0x400).must_read(access, DE));
        }
        // The guest's, on a KVM that exits on MOV DR: always.
        for access in [None, Some(WRITE), Some(port(0x60, 1))] {
            assert!(GuestDebugRegs::new(true, 0x401).must_read(access, 0));
        }
        // The guest's, on another KVM: where a breakpoint can be hit.
        let regs = GuestDebugRegs::new(false, 0x400);
        assert!(!regs.must_read(None, DE));
        assert!(!regs.must_read(Some(port(0x60, 1)), 0));
        assert!(regs.must_read(Some(port(0x60, 1)), DE));
        assert!(regs.must_read(Some(READ), 0));
    }

    #[test]
    fn cooldown_returns_debug_registers_to_the_monitor() {
        let start = Instant::now();
        let mut regs = GuestDebugRegs::new(true, 0x401);
        assert!(!regs.update(0x401, start));
        assert!(!regs.update(0x400, start));
        assert!(!regs.update(0x400, start + COOLDOWN / 2));
        // Enabled again: the cooldown starts anew.
        assert!(!regs.update(0x404, start + COOLDOWN));
        assert!(!regs.update(0x400, start + COOLDOWN));
        assert!(regs.update(0x400, start + 2 * COOLDOWN));
        assert_eq!(regs.owner(), DebugRegsOwner::Monitor);
        // Where KVM does not exit on MOV DR, the guest keeps them.
        let mut regs = GuestDebugRegs::new(false, 0x400);
        assert!(!regs.update(0x400, start));
        assert!(!regs.update(0x400, start + 2 * COOLDOWN));
    }
}
