//! The debug registers of a guest that runs natively: who holds them, when they are looked at, and
//! which breakpoints are met by the accesses that KVM hands to us.
//!
//! Everything here is pure; [`crate::vcpu::kvm`] asks KVM and does what follows.

use std::time::{Duration, Instant};

use hindsight_cpu::debug::Registers;
use hindsight_regs::dr::{Condition, Dr7, Slot};

use crate::kvm::exit::{KvmExit, PortData};

/// CR4.DE: R/W = 10 in DR7 is a breakpoint on ports.
const CR4_DE: u64 = 1 << 3;
/// L0 to G3 of DR7.
const ENABLES: u64 = 0xff;

/// For how long a guest that has no breakpoint any more keeps its debug registers: taking them back
/// makes its next MOV DR an exit, and debuggers set and clear breakpoints at each context switch.
const COOLDOWN: Duration = Duration::from_millis(5);

/// Whose DR0-3 and DR7 are in the processor while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DebugRegsOwner {
    /// Ours, with nothing but GD: the guest has nothing enabled, and its next MOV DR exits first.
    Us,
    /// The guest's own.
    Guest,
}

/// An access that KVM hands to us, and whose breakpoints it does not look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitAccess {
    /// IN, OUT, INS, OUTS.
    Port {
        /// First port.
        port: u16,
        /// Bytes of one element.
        size: u64,
    },
    /// A read or write where there is no memory.
    Memory {
        /// Guest-physical address.
        gpa: u64,
        /// Bytes.
        len: u64,
        /// Whether it writes.
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

    /// The breakpoints that it meets, as DR6\[3:0\]. `translate` gives the guest-physical address of
    /// a linear one, or `None` where nothing is mapped.
    pub fn meets(
        self,
        registers: &Registers,
        cr4: u64,
        translate: impl FnMut(u64) -> Option<u64>,
    ) -> u64 {
        match self {
            Self::Port { port, size } => registers.port(port, size, cr4 & CR4_DE != 0),
            Self::Memory { gpa, len, write } => {
                physical(registers, translate).accessed(gpa, len, write)
            }
        }
    }
}

/// The data breakpoints alone, at guest-physical addresses: what one watches never crosses a page.
fn physical(registers: &Registers, mut translate: impl FnMut(u64) -> Option<u64>) -> Registers {
    let mut there = *registers;
    let control = Dr7(registers.control);
    for (slot, address) in (0..).map(Slot).zip(&mut there.addresses) {
        let data = matches!(
            control.condition(slot),
            Condition::Write | Condition::ReadWrite
        );
        let found = (control.armed(slot) && data).then(|| translate(*address));
        match found.flatten() {
            Some(gpa) => *address = gpa,
            None => there.control &= !(0b11 << (2 * slot.0)),
        }
    }
    there
}

/// How the debug registers of one processor are followed.
#[derive(Clone, Copy, Debug)]
pub struct GuestDebugRegs {
    /// This KVM exits on MOV DR when our DR7 has GD set.
    detects: bool,
    holder: DebugRegsOwner,
    /// Since when the guest, which holds them, was seen to have nothing enabled.
    idle_since: Option<Instant>,
}

impl GuestDebugRegs {
    /// For a processor whose DR7 is `control`.
    pub const fn new(detects: bool, control: u64) -> Self {
        let enabled = control & (ENABLES | Dr7::GD) != 0;
        let holder = if detects && !enabled {
            DebugRegsOwner::Us
        } else {
            DebugRegsOwner::Guest
        };
        Self {
            detects,
            holder,
            idle_since: None,
        }
    }

    /// Who holds the registers.
    pub const fn holder(&self) -> DebugRegsOwner {
        self.holder
    }

    /// Whether they must be looked at after an exit with this access and this CR4.
    pub const fn looks(&self, access: Option<ExitAccess>, cr4: u64) -> bool {
        match (self.holder, access) {
            // What they hold is known: nothing that is enabled.
            (DebugRegsOwner::Us, _) => false,
            // Whether they still hold anything decides about who holds them.
            (DebugRegsOwner::Guest, _) if self.detects => true,
            (DebugRegsOwner::Guest, Some(ExitAccess::Port { .. })) => cr4 & CR4_DE != 0,
            (DebugRegsOwner::Guest, Some(ExitAccess::Memory { .. })) => true,
            (DebugRegsOwner::Guest, None) => false,
        }
    }

    /// They were looked at: DR7 is `control`. `true`: they have been idle for long enough, and are
    /// ours from now on.
    pub fn looked(&mut self, control: u64, now: Instant) -> bool {
        let next = Self::new(self.detects, control);
        if self.holder == next.holder {
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

    fn registers(armed: &[(u64, Condition, Length)]) -> Registers {
        let mut registers = Registers::RESET;
        for (slot, &(address, condition, length)) in (0..).zip(armed) {
            registers.addresses[usize::from(slot)] = address;
            registers.control = Dr7(registers.control).with(Slot(slot), condition, length).0;
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
    fn port_breakpoints_are_met_by_overlap_and_with_de() {
        let r = registers(&[
            (0x60, Condition::Io, Length::One),
            (0x3f8, Condition::Io, Length::Four),
        ]);
        assert_eq!(port(0x60, 1).meets(&r, CR4_DE, unmapped), 0b01);
        assert_eq!(port(0x5e, 4).meets(&r, CR4_DE, unmapped), 0b01);
        assert_eq!(port(0x3fb, 1).meets(&r, CR4_DE, unmapped), 0b10);
        assert_eq!(port(0x3fc, 1).meets(&r, CR4_DE, unmapped), 0);
        assert_eq!(port(0x60, 1).meets(&r, 0, unmapped), 0);
    }

    #[test]
    fn data_breakpoints_are_met_where_they_are_mapped() {
        let r = registers(&[
            (0x7000_00b0, Condition::Write, Length::Four),
            (0x7000_00b2, Condition::ReadWrite, Length::One),
            (0xfee0_00b0, Condition::ReadWrite, Length::Four),
            (0xfee0_00b0, Condition::Execute, Length::One),
        ]);
        let apic = |linear: u64| (linear >> 12 == 0x7_0000).then_some(0xfee0_0000 | linear & 0xfff);
        assert_eq!(WRITE.meets(&r, 0, apic), 0b011);
        assert_eq!(READ.meets(&r, 0, apic), 0b010);
        assert_eq!(WRITE.meets(&r, 0, unmapped), 0);
        assert_eq!(WRITE.meets(&r, 0, Some), 0b100);
    }

    #[test]
    fn they_are_ours_exactly_while_nothing_is_enabled_and_kvm_tells() {
        let data = registers(&[(0, Condition::Write, Length::One)]).control;
        assert_eq!(
            GuestDebugRegs::new(true, 0x400).holder(),
            DebugRegsOwner::Us
        );
        assert_eq!(
            GuestDebugRegs::new(true, 0xffff_0400).holder(),
            DebugRegsOwner::Us
        );
        for control in [data, 0x402, 0x480, 0x2400] {
            assert_eq!(
                GuestDebugRegs::new(true, control).holder(),
                DebugRegsOwner::Guest
            );
        }
        assert_eq!(
            GuestDebugRegs::new(false, 0x400).holder(),
            DebugRegsOwner::Guest
        );
    }

    #[test]
    fn registers_are_looked_at_only_where_something_can_follow() {
        // Ours: never.
        for access in [None, Some(WRITE), Some(port(0x60, 1))] {
            assert!(!GuestDebugRegs::new(true, 0x400).looks(access, CR4_DE));
        }
        // The guest's, on a KVM that tells of MOV DR: always.
        for access in [None, Some(WRITE), Some(port(0x60, 1))] {
            assert!(GuestDebugRegs::new(true, 0x401).looks(access, 0));
        }
        // The guest's, on another: where a breakpoint can be met.
        let watch = GuestDebugRegs::new(false, 0x400);
        assert!(!watch.looks(None, CR4_DE));
        assert!(!watch.looks(Some(port(0x60, 1)), 0));
        assert!(watch.looks(Some(port(0x60, 1)), CR4_DE));
        assert!(watch.looks(Some(READ), 0));
    }

    #[test]
    fn they_are_taken_back_when_nothing_was_enabled_for_a_while() {
        let start = Instant::now();
        let mut watch = GuestDebugRegs::new(true, 0x401);
        assert!(!watch.looked(0x401, start));
        assert!(!watch.looked(0x400, start));
        assert!(!watch.looked(0x400, start + COOLDOWN / 2));
        // Enabled again meanwhile: the time begins anew.
        assert!(!watch.looked(0x404, start + COOLDOWN));
        assert!(!watch.looked(0x400, start + COOLDOWN));
        assert!(watch.looked(0x400, start + 2 * COOLDOWN));
        assert_eq!(watch.holder(), DebugRegsOwner::Us);
        // Where KVM does not tell, they stay with the guest.
        let mut watch = GuestDebugRegs::new(false, 0x400);
        assert!(!watch.looked(0x400, start));
        assert!(!watch.looked(0x400, start + 2 * COOLDOWN));
    }
}
