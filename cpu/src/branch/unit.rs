//! IA32_DEBUGCTL and the MSRs of branch recording, and who follows them.

use hindsight_regs::branch::{DebugCtl, LBR_DEPTH, LbrInfo, LbrSelect};
use hindsight_regs::msr as regs;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::lbr::{Entry, Lbr};
use super::{Branch, Observe, Store};
use crate::facility::Facilities;

/// Saved state of a [`BranchUnit`]: the values of its MSRs, and what they do not show.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchState {
    /// IA32_DEBUGCTL.
    pub debugctl: u64,
    /// IA32_DS_AREA.
    pub ds_area: u64,
    /// MSR_LBR_SELECT.
    pub select: u64,
    /// MSR_LASTBRANCH_TOS.
    pub tos: u64,
    /// FROM, TO and INFO of each entry.
    pub entries: [[u64; 3]; LBR_DEPTH],
    /// From and to of the branch recorded last.
    pub last: [u64; 2],
    /// MSR_LER_FROM_LIP and MSR_LER_TO_LIP.
    pub ler: [u64; 2],
    /// Retired instructions, modulo 2^32, at the last update of the stack.
    pub since: u32,
    /// Cycles lost to wrong predictions since then.
    pub lost: u32,
    /// The stack is frozen: IA32_PERF_GLOBAL_STATUS.LBR_FRZ.
    pub frozen: bool,
}

/// A saved value that no write could have left there.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("saved branch recording holds an impossible {what}: {value:#x}")]
pub struct BranchStateError {
    /// Which register.
    pub what: &'static str,
    /// The offending value.
    pub value: u64,
}

/// Branch recording of one processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchUnit {
    facilities: Facilities,
    debugctl: DebugCtl,
    ds_area: u64,
    lbr: Lbr,
    frozen: bool,
}

/// Linear addresses have 48 bits (parameter `LIN_W`).
const fn canonical(address: u64) -> bool {
    (address << 16).cast_signed() >> 16 == address.cast_signed()
}

/// Entry and kind (FROM 0, TO 1, INFO 2) of an MSR of the stack.
fn entry_of(index: u32) -> Option<(usize, usize)> {
    let bases = [
        regs::MSR_LASTBRANCH_0_FROM_IP,
        regs::MSR_LASTBRANCH_0_TO_IP,
        regs::MSR_LBR_INFO_0,
    ];
    bases.iter().enumerate().find_map(|(kind, &base)| {
        let entry = usize::try_from(index.checked_sub(base)?).ok()?;
        (entry < LBR_DEPTH).then_some((entry, kind))
    })
}

const INFO_BITS: u64 = LbrInfo::all().bits() | hindsight_regs::branch::CYC_CNT_MAX;

impl BranchUnit {
    /// After RESET.
    pub fn new(facilities: Facilities) -> Self {
        Self {
            facilities,
            debugctl: DebugCtl::empty(),
            ds_area: 0,
            lbr: Lbr::default(),
            frozen: false,
        }
    }

    /// IA32_DEBUGCTL.
    pub const fn debugctl(&self) -> DebugCtl {
        self.debugctl
    }

    /// IA32_DS_AREA, a linear address.
    pub const fn ds_area(&self) -> u64 {
        self.ds_area
    }

    /// RDMSR of one of this unit's rows.
    pub fn read(&self, index: u32) -> u64 {
        match index {
            regs::IA32_DEBUGCTL => self.debugctl.bits(),
            regs::IA32_DS_AREA => self.ds_area,
            regs::MSR_LBR_SELECT => self.lbr.select.bits(),
            regs::MSR_LASTBRANCH_TOS => self.lbr.tos as u64,
            regs::MSR_LER_FROM_LIP => self.lbr.ler.0,
            regs::MSR_LER_TO_LIP => self.lbr.ler.1,
            _ => entry_of(index).map_or(0, |(entry, kind)| {
                let entry = self.lbr.entries[entry];
                [entry.from, entry.to, entry.info][kind]
            }),
        }
    }

    /// WRMSR of one of this unit's rows, whose reserved bits were checked. `false`: #GP(0), and
    /// nothing changed.
    #[must_use]
    pub fn write(&mut self, index: u32, value: u64) -> bool {
        match index {
            regs::IA32_DEBUGCTL => self.debugctl = DebugCtl::from_bits_retain(value),
            regs::MSR_LBR_SELECT => self.lbr.select = LbrSelect::from_bits_retain(value),
            regs::MSR_LASTBRANCH_TOS => {
                self.lbr.tos = usize::try_from(value).unwrap_or(0) % LBR_DEPTH;
            }
            regs::IA32_DS_AREA if canonical(value) => self.ds_area = value,
            regs::MSR_LER_FROM_LIP if canonical(value) => self.lbr.ler.0 = value,
            regs::MSR_LER_TO_LIP if canonical(value) => self.lbr.ler.1 = value,
            _ => match entry_of(index) {
                Some((entry, 2)) => self.lbr.entries[entry].info = value & INFO_BITS,
                Some((entry, 1)) if canonical(value) => self.lbr.entries[entry].to = value,
                Some((entry, 0)) if canonical(value) => self.lbr.entries[entry].from = value,
                _ => return false,
            },
        }
        true
    }

    /// Takes what an engine observed, in order.
    pub fn record(&mut self, branches: &[Branch]) {
        if self.records() {
            self.lbr.record(branches);
        }
    }

    /// The LBR stack records (rule LBR-03).
    pub const fn records(&self) -> bool {
        self.debugctl.contains(DebugCtl::LBR) && !self.frozen
    }

    /// What system-management mode makes of IA32_DEBUGCTL.
    pub(crate) const fn set_debugctl(&mut self, debugctl: DebugCtl) {
        self.debugctl = debugctl;
    }

    /// What an engine must report and do.
    pub fn observe(&self) -> Observe {
        let ctl = self.debugctl;
        let messages = self.messages();
        let store = Store {
            area: self.ds_area,
            interrupt: ctl.contains(DebugCtl::BTINT),
            off_os: ctl.contains(DebugCtl::BTS_OFF_OS),
            off_usr: ctl.contains(DebugCtl::BTS_OFF_USR),
        };
        let stores = ctl.contains(DebugCtl::TR.union(DebugCtl::BTS));
        let step_on_branch = ctl.contains(DebugCtl::BTF);
        Observe {
            branches: self.records() || messages,
            store: stores.then_some(store),
            step_on_branch,
            debugs_transactions: ctl.contains(DebugCtl::RTM),
            debug_exceptions: ctl.intersects(DebugCtl::LBR.union(DebugCtl::BTF)),
            ..Observe::default()
        }
    }

    /// Branch trace messages go to the bus (rules BTM-01, BTM-02).
    pub const fn messages(&self) -> bool {
        self.debugctl.contains(DebugCtl::TR) && !self.debugctl.contains(DebugCtl::BTS)
    }

    /// Whether a message is sent for a branch that starts at this privilege level (rule BTM-05).
    pub const fn sends(&self, cpl: u8) -> bool {
        let off = if cpl == 0 {
            DebugCtl::BTS_OFF_OS
        } else {
            DebugCtl::BTS_OFF_USR
        };
        self.messages() && !self.debugctl.contains(off)
    }

    /// A transaction begins or ends: what [`BranchUnit::record`] takes next is in one or not.
    pub const fn set_in_transaction(&mut self, on: bool) {
        self.lbr.in_transaction = on;
    }

    /// A #DB is about to be delivered: rule DCTL-06.
    pub fn debug_exception(&mut self) {
        self.debugctl.remove(DebugCtl::LBR | DebugCtl::BTF);
    }

    /// A machine-check exception is about to be delivered: rule DCTL-12.
    pub fn machine_check(&mut self) {
        let recording = DebugCtl::TR | DebugCtl::BTS | DebugCtl::BTINT;
        self.debugctl.remove(recording);
    }

    /// IA32_PERF_GLOBAL_STATUS.LBR_FRZ changed.
    pub const fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// Applies INIT (rules DCTL-11, RST-06, RST-07): IA32_DEBUGCTL is cleared, all else stays.
    pub const fn init(&mut self) {
        self.debugctl = DebugCtl::empty();
    }

    /// Everything there is to save.
    pub fn save(&self) -> BranchState {
        let lbr = &self.lbr;
        BranchState {
            debugctl: self.debugctl.bits(),
            ds_area: self.ds_area,
            select: lbr.select.bits(),
            tos: lbr.tos as u64,
            entries: lbr.entries.map(|e| [e.from, e.to, e.info]),
            last: [lbr.last.0, lbr.last.1],
            ler: [lbr.ler.0, lbr.ler.1],
            since: lbr.since,
            lost: lbr.lost,
            frozen: self.frozen,
        }
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    ///
    /// Refuses values that no write could have left; the unit is then as before.
    pub fn restore(&mut self, state: &BranchState) -> Result<(), BranchStateError> {
        let check = |what, value, good| {
            if good {
                Ok(())
            } else {
                Err(BranchStateError { what, value })
            }
        };
        let ctl = self.facilities.debugctl_mask();
        check("IA32_DEBUGCTL", state.debugctl, state.debugctl & !ctl == 0)?;
        let select = LbrSelect::all().bits();
        check("MSR_LBR_SELECT", state.select, state.select & !select == 0)?;
        let tos = usize::try_from(state.tos).unwrap_or(LBR_DEPTH);
        check("MSR_LASTBRANCH_TOS", state.tos, tos < LBR_DEPTH)?;
        check("IA32_DS_AREA", state.ds_area, canonical(state.ds_area))?;
        for [from, to, info] in state.entries {
            check("MSR_LASTBRANCH_FROM_IP", from, canonical(from))?;
            check("MSR_LASTBRANCH_TO_IP", to, canonical(to))?;
            check("MSR_LBR_INFO", info, info & !INFO_BITS == 0)?;
        }
        for address in state.last.into_iter().chain(state.ler) {
            check("last exception record", address, canonical(address))?;
        }
        self.debugctl = DebugCtl::from_bits_retain(state.debugctl);
        self.ds_area = state.ds_area;
        self.frozen = state.frozen;
        self.lbr = Lbr {
            entries: state
                .entries
                .map(|[from, to, info]| Entry { from, to, info }),
            tos,
            select: LbrSelect::from_bits_retain(state.select),
            last: (state.last[0], state.last[1]),
            ler: (state.ler[0], state.ler[1]),
            since: state.since,
            lost: state.lost,
            in_transaction: false,
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests;
