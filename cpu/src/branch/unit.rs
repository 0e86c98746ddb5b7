//! The MSRs of branch recording, and what follows from them.

use hindsight_regs::branch::{CYC_CNT_MAX, DebugCtl, LBR_DEPTH, LbrInfo, LbrSelect};
use hindsight_regs::msr as regs;
use hindsight_regs::vector::GpFault;
use thiserror::Error;

use super::lbr::{Lbr, LbrEntry};
use super::record_format::RecordFormat;
use super::{Branch, BtsConfig, Observe};
use crate::facility::Facilities;
use crate::model::{CpuModel, LbrModel, ModelDefinition};
use crate::state::canonical;

/// Saved state of a [`BranchUnit`]: the values of its MSRs, and its hidden state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BranchState {
    /// IA32_DEBUGCTL.
    pub debugctl: u64,
    /// IA32_DS_AREA.
    pub ds_area: u64,
    /// MSR_LBR_SELECT.
    pub select: u64,
    /// MSR_LASTBRANCH_TOS.
    pub tos: u64,
    /// FROM, TO and INFO of each LBR entry.
    pub entries: [[u64; 3]; LBR_DEPTH],
    /// From and to of the branch recorded last.
    pub last: [u64; 2],
    /// MSR_LER_FROM_LIP and MSR_LER_TO_LIP.
    pub ler: [u64; 2],
    /// Retired instructions, modulo 2^32, at the last update of the LBR stack.
    pub since: u32,
    /// Cycles lost to mispredictions since then.
    pub lost: u32,
    /// The LBR stack is frozen: IA32_PERF_GLOBAL_STATUS.LBR_FRZ.
    pub frozen: bool,
}

/// A saved value that no write could have left there.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("saved {register} of branch recording holds an invalid value {value:#x}")]
#[non_exhaustive]
pub struct BranchStateError {
    /// The register.
    pub register: &'static str,
    /// The offending value.
    pub value: u64,
}

/// Branch recording of one processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchUnit {
    facilities: Facilities,
    model: &'static ModelDefinition,
    debugctl: DebugCtl,
    ds_area: u64,
    lbr: Lbr,
    frozen: bool,
}

/// The three MSRs of an LBR entry.
#[derive(Clone, Copy)]
enum EntryField {
    From,
    To,
    Info,
}

/// The LBR entry and field of an MSR of the model's stack.
fn entry_of(model: &LbrModel, index: u32) -> Option<(usize, EntryField)> {
    let fields = [
        (model.from, EntryField::From),
        (model.to, EntryField::To),
        (regs::MSR_LBR_INFO_0, EntryField::Info),
    ];
    fields.into_iter().find_map(|(first, field)| {
        let entry = usize::try_from(index.checked_sub(first)?).ok()?;
        (entry < model.depth).then_some((entry, field))
    })
}

/// The bits of MSR_LBR_INFO_x that exist.
const INFO_BITS: u64 = LbrInfo::all().bits() | CYC_CNT_MAX;

impl BranchUnit {
    /// Makes the unit of a model in its state after RESET.
    pub fn new(facilities: Facilities, model: CpuModel) -> Self {
        Self {
            facilities,
            model: model.definition(),
            debugctl: DebugCtl::empty(),
            ds_area: 0,
            lbr: Lbr::new(
                &model.definition().lbr,
                facilities.contains(Facilities::RTM),
            ),
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

    /// RDMSR of an MSR of this unit; 0 for any other.
    pub fn read(&self, index: u32) -> u64 {
        match index {
            regs::IA32_DEBUGCTL => self.debugctl.bits(),
            regs::IA32_DS_AREA => self.ds_area,
            regs::MSR_LBR_SELECT => self.lbr.select.bits(),
            regs::MSR_LASTBRANCH_TOS => self.lbr.tos as u64,
            regs::MSR_LER_FROM_LIP => self.lbr.ler.0,
            regs::MSR_LER_TO_LIP => self.lbr.ler.1,
            _ => entry_of(&self.model.lbr, index).map_or(0, |(entry, field)| {
                let entry = self.lbr.entries[entry];
                match field {
                    EntryField::From => entry.from,
                    EntryField::To => entry.to,
                    EntryField::Info => entry.info,
                }
            }),
        }
    }

    /// WRMSR of an MSR of this unit. The caller has checked reserved bits.
    ///
    /// # Errors
    ///
    /// [`GpFault`] for an address that is not canonical, and for an MSR that is not of this unit;
    /// nothing changed.
    pub fn write(&mut self, index: u32, value: u64) -> Result<(), GpFault> {
        match index {
            regs::IA32_DEBUGCTL => self.debugctl = DebugCtl::from_bits_retain(value),
            regs::MSR_LBR_SELECT => self.lbr.select = LbrSelect::from_bits_retain(value),
            regs::MSR_LASTBRANCH_TOS => {
                self.lbr.tos = self.lbr.wrap(usize::try_from(value).unwrap_or(0));
            }
            regs::IA32_DS_AREA if canonical(value) => self.ds_area = value,
            regs::MSR_LER_FROM_LIP if canonical(value) => self.lbr.ler.0 = value,
            regs::MSR_LER_TO_LIP if canonical(value) => self.lbr.ler.1 = value,
            _ => match entry_of(&self.model.lbr, index) {
                Some((entry, EntryField::Info)) => {
                    self.lbr.entries[entry].info = value & INFO_BITS;
                }
                Some((entry, EntryField::To)) if canonical(value) => {
                    self.lbr.entries[entry].to = value;
                }
                Some((entry, EntryField::From)) if self.lbr.format.accepts(value) => {
                    self.lbr.entries[entry].from = value;
                }
                _ => return Err(GpFault),
            },
        }
        Ok(())
    }

    /// Records the branches that an engine reported, in order.
    pub fn record(&mut self, branches: &[Branch]) {
        if self.records() {
            self.lbr.record(branches);
        }
    }

    /// Accounts for near branches that were taken before those that [`BranchUnit::record`] gets next:
    /// at least [`Observe::newest`] near branches.
    pub fn skip(&mut self, count: u64) {
        if self.records() {
            self.lbr.skip_overwritten(count);
        }
    }

    /// FROM, TO and INFO of the entries of the LBR stack, the newest one first; 0 in those that do not
    /// exist.
    pub(crate) fn newest_first(&self) -> [[u64; 3]; LBR_DEPTH] {
        let mut found = [[0; 3]; LBR_DEPTH];
        for (age, found) in found.iter_mut().enumerate().take(self.lbr.depth) {
            let entry = self.lbr.entries[self.lbr.wrap(self.lbr.tos + LBR_DEPTH - age)];
            *found = [entry.from, entry.to, entry.info];
        }
        found
    }

    /// Whether the LBR stack records (rule LBR-03).
    pub const fn records(&self) -> bool {
        self.debugctl.contains(DebugCtl::LBR) && !self.frozen
    }

    /// Sets IA32_DEBUGCTL without the checks of WRMSR, for system-management mode.
    pub(crate) const fn set_debugctl(&mut self, debugctl: DebugCtl) {
        self.debugctl = debugctl;
    }

    /// Returns what an engine must report to this unit, and what it must do itself.
    pub fn observe(&self) -> Observe {
        let ctl = self.debugctl;
        let bts = BtsConfig {
            area: self.ds_area,
            interrupt: ctl.contains(DebugCtl::BTINT),
            off_os: ctl.contains(DebugCtl::BTS_OFF_OS),
            off_usr: ctl.contains(DebugCtl::BTS_OFF_USR),
        };
        let stores = ctl.contains(DebugCtl::TR.union(DebugCtl::BTS));
        Observe {
            branches: self.records() || self.sends_btm(),
            bts: stores.then_some(bts),
            step_on_branch: ctl.contains(DebugCtl::BTF),
            debugs_transactions: ctl.contains(DebugCtl::RTM),
            debug_exceptions: ctl.intersects(DebugCtl::LBR.union(DebugCtl::BTF)),
            newest: if self.records() && !self.sends_btm() {
                self.lbr.newest()
            } else {
                0
            },
            counted: false,
            ..Observe::default()
        }
    }

    /// Whether branch trace messages are sent (rules BTM-01, BTM-02).
    pub const fn sends_btm(&self) -> bool {
        self.debugctl.contains(DebugCtl::TR) && !self.debugctl.contains(DebugCtl::BTS)
    }

    /// Whether a message is sent for a branch that starts at this privilege level (rule BTM-05).
    pub const fn sends_btm_at(&self, cpl: u8) -> bool {
        let off = if cpl == 0 {
            DebugCtl::BTS_OFF_OS
        } else {
            DebugCtl::BTS_OFF_USR
        };
        self.sends_btm() && !self.debugctl.contains(off)
    }

    /// Says whether the branches that [`BranchUnit::record`] gets next are inside a transaction.
    pub const fn set_in_transaction(&mut self, on: bool) {
        self.lbr.in_transaction = on;
    }

    /// Clears LBR and BTF, before a #DB is delivered (rule DCTL-06).
    pub fn debug_exception(&mut self) {
        self.debugctl.remove(DebugCtl::LBR | DebugCtl::BTF);
    }

    /// Clears TR, BTS and BTINT, before a machine check is delivered (rule DCTL-12).
    pub fn machine_check(&mut self) {
        let tracing = DebugCtl::TR | DebugCtl::BTS | DebugCtl::BTINT;
        self.debugctl.remove(tracing);
    }

    /// Stops the LBR stack for a PMI by clearing IA32_DEBUGCTL.LBR, before perfmon version 4.
    pub(crate) fn clear_lbr(&mut self) {
        self.debugctl.remove(DebugCtl::LBR);
    }

    /// Stops or restarts the LBR stack: IA32_PERF_GLOBAL_STATUS.LBR_FRZ.
    pub const fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// Applies INIT (rules DCTL-11, RST-06, RST-07): IA32_DEBUGCTL is cleared, all else stays.
    pub const fn init(&mut self) {
        self.debugctl = DebugCtl::empty();
    }

    /// The state as plain data.
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

    /// Replaces the state by a saved one.
    ///
    /// # Errors
    ///
    /// Rejects values that no write could have left; the unit is then unchanged.
    pub fn restore(&mut self, state: &BranchState) -> Result<(), BranchStateError> {
        let check = |register, value, possible| {
            if possible {
                Ok(())
            } else {
                Err(BranchStateError { register, value })
            }
        };
        let limit = self.model.writable_bits(regs::IA32_DEBUGCTL);
        let ctl = self.facilities.debugctl_mask() & limit.unwrap_or(u64::MAX);
        check("IA32_DEBUGCTL", state.debugctl, state.debugctl & !ctl == 0)?;
        let limit = match self.model.lbr.select {
            true => self.model.writable_bits(regs::MSR_LBR_SELECT),
            false => Some(0),
        };
        let select = LbrSelect::all().bits() & limit.unwrap_or(u64::MAX);
        check("MSR_LBR_SELECT", state.select, state.select & !select == 0)?;
        let tos = usize::try_from(state.tos).unwrap_or(LBR_DEPTH);
        check("MSR_LASTBRANCH_TOS", state.tos, tos < self.lbr.depth)?;
        check("IA32_DS_AREA", state.ds_area, canonical(state.ds_area))?;
        let info_bits = match self.lbr.format {
            RecordFormat::Info => INFO_BITS,
            _ => 0,
        };
        for (n, [from, to, info]) in state.entries.into_iter().enumerate() {
            let exists = n < self.lbr.depth;
            let possible = self.lbr.format.accepts_saved(from);
            check(
                "MSR_LASTBRANCH_FROM_IP",
                from,
                from == 0 || exists && possible,
            )?;
            check(
                "MSR_LASTBRANCH_TO_IP",
                to,
                to == 0 || exists && canonical(to),
            )?;
            check(
                "MSR_LBR_INFO",
                info,
                info & !info_bits == 0 && (exists || info == 0),
            )?;
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
                .map(|[from, to, info]| LbrEntry { from, to, info }),
            tos,
            select: LbrSelect::from_bits_retain(state.select),
            last: (state.last[0], state.last[1]),
            ler: (state.ler[0], state.ler[1]),
            since: state.since,
            lost: state.lost,
            in_transaction: false,
            ..self.lbr
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests;
