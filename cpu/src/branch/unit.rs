//! The MSRs of branch recording, and what follows from them.

use hindsight_regs::branch::{DebugCtl, LBR_DEPTH, LbrCtl, LbrSelect};
use hindsight_regs::msr as regs;
use hindsight_regs::vector::GpFault;
use thiserror::Error;

use super::lbr::{Lbr, LbrEntry, suppressed};
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
    /// IA32_LBR_CTL.
    pub control: u64,
    /// Number of LBR entries: IA32_LBR_DEPTH, or that of the model.
    pub depth: u64,
    /// FROM, TO and INFO of each LBR entry.
    pub entries: [[u64; 3]; LBR_DEPTH],
    /// From, to and IA32_LER_INFO of the branch recorded last.
    pub last: [u64; 3],
    /// MSR_LER_FROM_LIP, MSR_LER_TO_LIP and IA32_LER_INFO.
    pub ler: [u64; 3],
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
    /// IA32_LBR_CTL; what it filters is [`Lbr::select`].
    control: LbrCtl,
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

/// The number and field of an MSR of the model's stack.
fn entry_of(model: &LbrModel, index: u32) -> Option<(usize, EntryField)> {
    let fields = [
        (model.from, EntryField::From),
        (model.to, EntryField::To),
        (model.info(), EntryField::Info),
    ];
    fields.into_iter().find_map(|(first, field)| {
        let entry = usize::try_from(index.checked_sub(first)?).ok()?;
        (entry < model.depth).then_some((entry, field))
    })
}

impl BranchUnit {
    /// Makes the unit of a model in its state after RESET.
    pub fn new(facilities: Facilities, model: CpuModel) -> Self {
        Self {
            facilities,
            model: model.definition(),
            debugctl: DebugCtl::empty(),
            ds_area: 0,
            control: LbrCtl::empty(),
            lbr: Lbr::new(
                &model.definition().lbr,
                facilities.contains(Facilities::RTM),
            ),
            frozen: false,
        }
    }

    const fn is_architectural(&self) -> bool {
        self.model.lbr.is_architectural()
    }

    /// The bits of IA32_DEBUGCTL that keep what is written: not LBR with architectural LBR.
    fn debugctl_bits(&self, value: u64) -> DebugCtl {
        let mut debugctl = DebugCtl::from_bits_retain(value);
        if self.is_architectural() {
            debugctl.remove(DebugCtl::LBR);
        }
        debugctl
    }

    /// The index of an entry in the ring, of its number in the MSRs.
    ///
    /// Architectural LBR counts from the newest one.
    const fn position(&self, number: usize) -> usize {
        if self.is_architectural() {
            self.lbr.wrap(self.lbr.tos + LBR_DEPTH - number)
        } else {
            number
        }
    }

    /// Whether the MSR exists now: not if it is of an entry beyond IA32_LBR_DEPTH.
    pub(crate) fn has(&self, index: u32) -> bool {
        entry_of(&self.model.lbr, index).is_none_or(|(entry, _)| entry < self.lbr.depth)
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
            regs::MSR_LER_FROM_LIP => self.lbr.ler.from,
            regs::MSR_LER_TO_LIP => self.lbr.ler.to,
            regs::IA32_LER_INFO => self.lbr.ler.info,
            regs::IA32_LBR_CTL => self.control.bits(),
            regs::IA32_LBR_DEPTH => self.lbr.depth as u64,
            _ => entry_of(&self.model.lbr, index).map_or(0, |(entry, field)| {
                let entry = self.lbr.entries[self.position(entry)];
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
            regs::IA32_DEBUGCTL => self.debugctl = self.debugctl_bits(value),
            regs::MSR_LBR_SELECT => self.lbr.select = LbrSelect::from_bits_retain(value),
            regs::MSR_LASTBRANCH_TOS => {
                self.lbr.tos = self.lbr.wrap(usize::try_from(value).unwrap_or(0));
            }
            regs::IA32_DS_AREA if canonical(value) => self.ds_area = value,
            regs::MSR_LER_FROM_LIP if canonical(value) => self.lbr.ler.from = value,
            regs::MSR_LER_TO_LIP if canonical(value) => self.lbr.ler.to = value,
            regs::IA32_LER_INFO => self.lbr.ler.info = value & self.lbr.format.info_bits(),
            regs::IA32_LBR_CTL => self.set_control(LbrCtl::from_bits_retain(value)),
            regs::IA32_LBR_DEPTH => self.set_depth(value)?,
            _ => return self.write_entry(index, value),
        }
        Ok(())
    }

    fn write_entry(&mut self, index: u32, value: u64) -> Result<(), GpFault> {
        let (number, field) = entry_of(&self.model.lbr, index).ok_or(GpFault)?;
        let format = self.lbr.format;
        let entry = self.position(number);
        let entry = &mut self.lbr.entries[entry];
        match field {
            EntryField::Info => entry.info = value & format.info_bits(),
            EntryField::To if canonical(value) => entry.to = value,
            EntryField::From if format.accepts(value) => entry.from = value,
            _ => return Err(GpFault),
        }
        Ok(())
    }

    fn set_control(&mut self, control: LbrCtl) {
        self.control = control;
        self.lbr.select = suppressed(control);
    }

    /// Sets IA32_LBR_DEPTH, which clears all entries.
    fn set_depth(&mut self, depth: u64) -> Result<(), GpFault> {
        let depth = usize::try_from(depth).map_err(|_| GpFault)?;
        if !self.model.lbr.depths().contains(&depth) {
            return Err(GpFault);
        }
        self.lbr.depth = depth;
        self.lbr.tos = 0;
        self.lbr.entries = [LbrEntry::default(); LBR_DEPTH];
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
        self.is_enabled() && !self.frozen
    }

    /// Whether the LBR stack is enabled: IA32_DEBUGCTL.LBR, or IA32_LBR_CTL.LBREn.
    pub(crate) const fn is_enabled(&self) -> bool {
        if self.is_architectural() {
            self.control.contains(LbrCtl::ENABLE)
        } else {
            self.debugctl.contains(DebugCtl::LBR)
        }
    }

    /// Sets IA32_DEBUGCTL without the checks of WRMSR, for system-management mode.
    pub(crate) fn set_debugctl(&mut self, debugctl: DebugCtl) {
        self.debugctl = self.debugctl_bits(debugctl.bits());
    }

    /// Clears IA32_LBR_CTL.LBREn. Returns whether it was set.
    pub(crate) fn disable_architectural(&mut self) -> bool {
        let enabled = self.control.contains(LbrCtl::ENABLE);
        self.control.remove(LbrCtl::ENABLE);
        enabled
    }

    /// Restores the value of IA32_LBR_CTL.LBREn.
    pub(crate) fn enable_architectural(&mut self, on: bool) {
        self.control
            .set(LbrCtl::ENABLE, on && self.is_architectural());
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
            debug_exceptions: self.is_enabled() || ctl.contains(DebugCtl::BTF),
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
        self.disable_architectural();
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

    /// Applies INIT (rules DCTL-11, RST-06, RST-07, GEN-32).
    ///
    /// IA32_DEBUGCTL and IA32_LBR_CTL.LBREn are cleared, all else stays.
    pub fn init(&mut self) {
        self.debugctl = DebugCtl::empty();
        self.disable_architectural();
    }

    /// The state as plain data.
    pub fn save(&self) -> BranchState {
        let lbr = &self.lbr;
        BranchState {
            debugctl: self.debugctl.bits(),
            ds_area: self.ds_area,
            select: match self.is_architectural() {
                true => 0,
                false => lbr.select.bits(),
            },
            tos: lbr.tos as u64,
            control: self.control.bits(),
            depth: lbr.depth as u64,
            entries: lbr.entries.map(|e| [e.from, e.to, e.info]),
            last: [lbr.last.from, lbr.last.to, lbr.last.info],
            ler: [lbr.ler.from, lbr.ler.to, lbr.ler.info],
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
        let limit = self.model.writable_bits(regs::IA32_DEBUGCTL);
        let ctl = self.facilities.debugctl_mask() & limit.unwrap_or(u64::MAX);
        let ctl = self.debugctl_bits(ctl).bits();
        check("IA32_DEBUGCTL", state.debugctl, state.debugctl & !ctl == 0)?;
        let select = match self.model.lbr.select {
            true => self.model.writable_bits(regs::MSR_LBR_SELECT),
            false => Some(0),
        };
        let select = LbrSelect::all().bits() & select.unwrap_or(u64::MAX);
        check("MSR_LBR_SELECT", state.select, state.select & !select == 0)?;
        let control = match self.is_architectural() {
            true => LbrCtl::all().bits(),
            false => 0,
        };
        check("IA32_LBR_CTL", state.control, state.control & !control == 0)?;
        let depth = usize::try_from(state.depth).unwrap_or(0);
        let possible = self.model.lbr.depths().contains(&depth);
        check("IA32_LBR_DEPTH", state.depth, possible)?;
        let tos = usize::try_from(state.tos).unwrap_or(LBR_DEPTH);
        check("MSR_LASTBRANCH_TOS", state.tos, tos < depth)?;
        check("IA32_DS_AREA", state.ds_area, canonical(state.ds_area))?;
        self.check_entries(state, depth)?;
        self.debugctl = DebugCtl::from_bits_retain(state.debugctl);
        self.ds_area = state.ds_area;
        self.control = LbrCtl::from_bits_retain(state.control);
        self.frozen = state.frozen;
        let entry = |[from, to, info]: [u64; 3]| LbrEntry { from, to, info };
        self.lbr = Lbr {
            entries: state.entries.map(entry),
            depth,
            tos,
            select: match self.is_architectural() {
                true => suppressed(self.control),
                false => LbrSelect::from_bits_retain(state.select),
            },
            last: entry(state.last),
            ler: entry(state.ler),
            since: state.since,
            lost: state.lost,
            in_transaction: false,
            ..self.lbr
        };
        Ok(())
    }

    /// Checks the saved records of a stack with `depth` entries.
    fn check_entries(&self, state: &BranchState, depth: usize) -> Result<(), BranchStateError> {
        let format = self.lbr.format;
        for (n, [from, to, info]) in state.entries.into_iter().enumerate() {
            let exists = n < depth;
            let possible = exists && format.accepts_saved(from);
            check("MSR_LASTBRANCH_FROM_IP", from, from == 0 || possible)?;
            let possible = exists && canonical(to);
            check("MSR_LASTBRANCH_TO_IP", to, to == 0 || possible)?;
            let possible = exists && info & !format.info_bits() == 0;
            check("MSR_LBR_INFO", info, info == 0 || possible)?;
        }
        let ler_info = match self.is_architectural() {
            true => format.info_bits(),
            false => 0,
        };
        for [from, to, info] in [state.last, state.ler] {
            check("last exception record", from, canonical(from))?;
            check("last exception record", to, canonical(to))?;
            check("IA32_LER_INFO", info, info & !ler_info == 0)?;
        }
        Ok(())
    }
}

/// The error for a saved value that is not possible.
const fn check(register: &'static str, value: u64, possible: bool) -> Result<(), BranchStateError> {
    if possible {
        Ok(())
    } else {
        Err(BranchStateError { register, value })
    }
}

#[cfg(test)]
mod tests;
