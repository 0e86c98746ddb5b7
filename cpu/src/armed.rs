//! What the guest has armed: the facilities that need every retired instruction to be seen.
//!
//! A guest that has armed nothing runs natively. What of this set a host's KVM can do by itself is
//! not known here; the rule that puts both together is the VMM's.

use core::fmt;

use bitflags::bitflags;
use hindsight_regs::branch::DebugCtl;
use serde::{Deserialize, Serialize};

bitflags! {
    /// Facilities of one virtual processor that are switched on and act on what it executes.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Armed: u32 {
        /// Last branches are recorded: IA32_DEBUGCTL.LBR.
        const LBR = 1 << 0;
        /// Single-step on branches: IA32_DEBUGCTL.BTF.
        const BTF = 1 << 1;
        /// Branches are stored in the DS area: IA32_DEBUGCTL.TR and BTS.
        const BTS = 1 << 2;
        /// Branch trace messages: IA32_DEBUGCTL.TR without BTS.
        const BTM = 1 << 3;
        /// A performance counter is switched on.
        const PMU = 1 << 4;
        /// A counter takes precise samples.
        const PEBS = 1 << 5;
        /// Cache or bandwidth is monitored or allocated.
        const RDT = 1 << 6;
        /// Breakpoints on transactions: IA32_DEBUGCTL.RTM.
        const RTM = 1 << 7;
        /// DR7 enables a breakpoint on instruction execution.
        const CODE_BREAKPOINT = 1 << 8;
        /// DR7 enables a breakpoint on data writes or accesses.
        const DATA_BREAKPOINT = 1 << 9;
        /// DR7 enables a breakpoint on I/O ports, and CR4.DE is set.
        const IO_BREAKPOINT = 1 << 10;
        /// DR7.GD: accesses to debug registers trap.
        const GENERAL_DETECT = 1 << 11;
    }
}

/// Fields of DR7, and CR4.DE. SDM Vol. 3B, "Debug Control Register (DR7)".
mod dr7 {
    pub(super) const GD: u64 = 1 << 13;
    pub(super) const CR4_DE: u64 = 1 << 3;
    /// R/Wn: execution, writes, I/O (with CR4.DE), reads and writes.
    pub(super) const EXECUTE: u64 = 0b00;
    pub(super) const IO: u64 = 0b10;
}

impl Armed {
    /// What a value of IA32_DEBUGCTL arms.
    pub fn by_debugctl(ctl: DebugCtl) -> Self {
        let has = |bit, armed| {
            if ctl.contains(bit) {
                armed
            } else {
                Self::empty()
            }
        };
        // BTS alone stores nothing: it says where messages go.
        let messages = if ctl.contains(DebugCtl::BTS) {
            Self::BTS
        } else {
            Self::BTM
        };
        has(DebugCtl::LBR, Self::LBR)
            | has(DebugCtl::BTF, Self::BTF)
            | has(DebugCtl::RTM, Self::RTM)
            | has(DebugCtl::TR, messages)
    }

    /// What a value of DR7 arms, with this CR4.
    pub fn by_dr7(value: u64, cr4: u64) -> Self {
        let mut armed = Self::empty();
        armed.set(Self::GENERAL_DETECT, value & dr7::GD != 0);
        let enabled = (0..4).filter(|n| value >> (2 * n) & 0b11 != 0);
        for breakpoint in enabled {
            armed |= match value >> (16 + 4 * breakpoint) & 0b11 {
                dr7::EXECUTE => Self::CODE_BREAKPOINT,
                dr7::IO if cr4 & dr7::CR4_DE != 0 => Self::IO_BREAKPOINT,
                // Without CR4.DE the encoding is undefined, and matches nothing.
                dr7::IO => Self::empty(),
                _ => Self::DATA_BREAKPOINT,
            };
        }
        armed
    }
}

impl fmt::Display for Armed {
    /// The names, with commas; "nothing" where none is armed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (name, _)) in self.iter_names().enumerate() {
            let before = if index == 0 { "" } else { ", " };
            write!(f, "{before}{}", name.replace('_', " "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules BTM-01, BTM-02 and BTM-04: TR decides whether, BTS where to.
    #[test]
    fn debugctl_arms_what_it_switches_on() {
        let by = |bits| Armed::by_debugctl(DebugCtl::from_bits_retain(bits));
        assert_eq!(by(0), Armed::empty());
        assert_eq!(by(1), Armed::LBR);
        assert_eq!(by(3), Armed::LBR | Armed::BTF);
        assert_eq!(by(1 << 6), Armed::BTM);
        assert_eq!(by(0b11 << 6), Armed::BTS);
        assert_eq!(by(1 << 7), Armed::empty());
        // BTINT, BTS_OFF and the freezes say how, not whether.
        assert_eq!(by(0b111 << 8 | 0b1111 << 11), Armed::empty());
    }

    #[test]
    fn dr7_arms_by_the_kind_of_breakpoint() {
        const DE: u64 = 1 << 3;
        assert_eq!(Armed::by_dr7(0x400, DE), Armed::empty());
        assert_eq!(Armed::by_dr7(0x401, DE), Armed::CODE_BREAKPOINT);
        assert_eq!(
            Armed::by_dr7(1 << 3 | 0b01 << 20, DE),
            Armed::DATA_BREAKPOINT
        );
        assert_eq!(
            Armed::by_dr7(1 << 7 | 0b11 << 28, DE),
            Armed::DATA_BREAKPOINT
        );
        assert_eq!(Armed::by_dr7(1 << 4 | 0b10 << 24, DE), Armed::IO_BREAKPOINT);
        assert_eq!(Armed::by_dr7(1 << 4 | 0b10 << 24, 0), Armed::empty());
        // Conditions of breakpoints that are off do not count.
        assert_eq!(Armed::by_dr7(0xffff_0000, DE), Armed::empty());
        assert_eq!(Armed::by_dr7(1 << 13, 0), Armed::GENERAL_DETECT);
    }

    #[test]
    fn shown_by_name() {
        assert_eq!(Armed::empty().to_string(), "nothing");
        let both = Armed::LBR | Armed::IO_BREAKPOINT;
        assert_eq!(both.to_string(), "LBR, IO BREAKPOINT");
    }
}
