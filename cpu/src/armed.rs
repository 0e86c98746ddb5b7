//! The facilities that a guest has armed: those that act on what it executes.
//!
//! A guest that has armed nothing can run under KVM. Which of these facilities a given KVM provides
//! by itself is not known here; the policy that combines both is the monitor's.

use core::fmt;

use bitflags::bitflags;
use hindsight_regs::branch::DebugCtl;
use hindsight_regs::cr::Cr4;
use hindsight_regs::dr::{BreakpointIndex, Condition, Dr7};

bitflags! {
    /// Facilities of one vCPU that are switched on and act on what it executes.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct Armed: u32 {
        /// The LBR stack records: IA32_DEBUGCTL.LBR or IA32_LBR_CTL.LBREn.
        const LBR = 1 << 0;
        /// Single-step on branches: IA32_DEBUGCTL.BTF.
        const BTF = 1 << 1;
        /// Branches are stored in the DS area: IA32_DEBUGCTL.TR and BTS.
        const BTS = 1 << 2;
        /// Branch trace messages: IA32_DEBUGCTL.TR without BTS.
        const BTM = 1 << 3;
        /// A performance counter is enabled.
        const PMU = 1 << 4;
        /// A counter takes PEBS records.
        const PEBS = 1 << 5;
        /// Cache or bandwidth is monitored or allocated.
        const RDT = 1 << 6;
        /// Breakpoints in transactions: IA32_DEBUGCTL.RTM.
        const RTM = 1 << 7;
        /// DR7 enables a breakpoint on instruction execution.
        const CODE_BREAKPOINT = 1 << 8;
        /// DR7 enables a breakpoint on data writes or accesses.
        const DATA_BREAKPOINT = 1 << 9;
        /// DR7 enables a breakpoint on I/O ports, and CR4.DE is set.
        const IO_BREAKPOINT = 1 << 10;
        /// DR7.GD: accesses to debug registers raise #DB.
        const GENERAL_DETECT = 1 << 11;
        /// RFLAGS.TF is set, or was a moment ago: the guest single-steps.
        const SINGLE_STEP = 1 << 12;
    }
}

impl Armed {
    /// The facilities that a value of IA32_DEBUGCTL arms.
    pub fn from_debugctl(ctl: DebugCtl) -> Self {
        let mut armed = Self::empty();
        armed.set(Self::LBR, ctl.contains(DebugCtl::LBR));
        armed.set(Self::BTF, ctl.contains(DebugCtl::BTF));
        armed.set(Self::RTM, ctl.contains(DebugCtl::RTM));
        // BTS without TR stores nothing: it only selects where branch records go.
        if ctl.contains(DebugCtl::TR) {
            let stored = ctl.contains(DebugCtl::BTS);
            armed |= if stored { Self::BTS } else { Self::BTM };
        }
        armed
    }

    /// The facilities that a value of DR7 arms; `cr4` is the value of CR4.
    ///
    /// SDM Vol. 3B, "Debug Control Register (DR7)".
    pub fn from_dr7(value: u64, cr4: u64) -> Self {
        let (dr7, de) = (Dr7(value), cr4 & Cr4::DE.bits() != 0);
        let mut armed = Self::empty();
        armed.set(Self::GENERAL_DETECT, value & Dr7::GD != 0);
        for index in BreakpointIndex::ALL {
            if !dr7.is_enabled(index) {
                continue;
            }
            armed |= match dr7.condition(index) {
                Condition::Execute => Self::CODE_BREAKPOINT,
                Condition::Io if de => Self::IO_BREAKPOINT,
                // Without CR4.DE the encoding is undefined, and matches nothing.
                Condition::Io => Self::empty(),
                Condition::Write | Condition::ReadWrite => Self::DATA_BREAKPOINT,
            };
        }
        armed
    }
}

impl fmt::Display for Armed {
    /// The names, separated by commas; "nothing" for the empty set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (name, _)) in self.iter_names().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{}", name.replace('_', " "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules BTM-01, BTM-02 and BTM-04: TR decides whether branches are traced, BTS where to.
    #[test]
    fn debugctl_arms_the_facilities_it_enables() {
        let from = |bits| Armed::from_debugctl(DebugCtl::from_bits_retain(bits));
        assert_eq!(from(0), Armed::empty());
        assert_eq!(from(1), Armed::LBR);
        assert_eq!(from(3), Armed::LBR | Armed::BTF);
        assert_eq!(from(1 << 6), Armed::BTM);
        assert_eq!(from(0b11 << 6), Armed::BTS);
        assert_eq!(from(1 << 7), Armed::empty());
        assert_eq!(from(1 << 15), Armed::RTM);
        // BTINT, BTS_OFF and the freezes arm nothing by themselves.
        assert_eq!(from(0b111 << 8 | 0b1111 << 11), Armed::empty());
    }

    #[test]
    fn dr7_arms_by_the_condition_of_its_breakpoints() {
        const DE: u64 = 1 << 3;
        let rows = [
            (0x400, DE, Armed::empty()),
            (0x401, DE, Armed::CODE_BREAKPOINT),
            (1 << 3 | 0b01 << 20, DE, Armed::DATA_BREAKPOINT),
            (1 << 7 | 0b11 << 28, DE, Armed::DATA_BREAKPOINT),
            (1 << 4 | 0b10 << 24, DE, Armed::IO_BREAKPOINT),
            (1 << 4 | 0b10 << 24, 0, Armed::empty()),
            // Conditions of breakpoints that are not enabled do not count.
            (0xffff_0000, DE, Armed::empty()),
            (1 << 13, 0, Armed::GENERAL_DETECT),
        ];
        for (dr7, cr4, expected) in rows {
            assert_eq!(Armed::from_dr7(dr7, cr4), expected, "{dr7:#x} {cr4:#x}");
        }
    }

    #[test]
    fn display_lists_the_names() {
        assert_eq!(Armed::empty().to_string(), "nothing");
        let both = Armed::LBR | Armed::IO_BREAKPOINT;
        assert_eq!(both.to_string(), "LBR, IO BREAKPOINT");
    }
}
