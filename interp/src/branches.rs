//! Records branches, interrupts and exceptions: for the platform, and into the BTS buffer.

#![expect(
    unsafe_code,
    reason = "where BTS records go is kept as host addresses from the TLB"
)]

use crate::branch_buffer::{BranchBuffer, BranchRecords, BtsTarget, BtsWindow};
use crate::code::Op;
use crate::core::Core;
use crate::platform::{Branch, BranchClass, Ring, SystemEvent};
use hindsight_cpu::branch::BtsConfig;
use hindsight_cpu::branch::bts::{self, BtsFastPath, BtsOutcome};

/// Bytes of the BTS fields at the start of the DS management area.
const BTS_FIELDS: usize = 32;

/// The source of a far branch or an event: RIP, base of CS, and CPL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BranchSource {
    pub(crate) rip: u64,
    pub(crate) cs_base: u64,
    pub(crate) cpl: u8,
}

impl Core {
    /// Queries the platform for what to report, and applies that.
    pub(crate) fn update_observe(&mut self) {
        let observe = self.platform().observe();
        if observe != *self.branches.observe() {
            self.branches.set_observe(observe);
            self.update_context();
            self.exit.requested = true;
        }
        self.update_counting();
    }

    /// The source of a far branch or an event at `rip`, before it changes CS or the CPL.
    pub(crate) fn branch_source(&self, rip: u64) -> BranchSource {
        BranchSource {
            rip,
            cs_base: self.regs.cs_base(),
            cpl: self.mode.cpl(),
        }
    }

    /// Adds a near branch to the buffer.
    ///
    /// Returns true if the caller must call [`Core::handle_due_branches`].
    #[inline(always)]
    fn push_branch(&mut self, from: u64, to: u64, class: BranchClass) -> bool {
        let stamp = self.progress.branch_stamp();
        self.branches.push(from, to, class, stamp)
    }

    /// Records a near branch of 64-bit code.
    ///
    /// Returns true if the caller must call [`Core::handle_due_branches`].
    #[inline(always)]
    pub(crate) fn record_near(&mut self, from: u64, to: u64, class: BranchClass) -> bool {
        let epoch = self.mmu.writes.epoch();
        !self.branches.store_near(from, to, epoch) && self.push_branch(from, to, class)
    }

    /// Records a near branch in a handler.
    ///
    /// The handler must check [`ExitState::requested`](crate::exit::ExitState) afterwards.
    pub(crate) fn record_branch(&mut self, from: u64, to: u64, class: BranchClass) {
        if self.branches.records()
            && self.push_branch(from, to, class)
            && self.handle_due_branches()
        {
            self.exit.requested = true;
        }
    }

    /// Records a conditional branch that was not taken.
    ///
    /// Returns true if the block must be left.
    #[cold]
    #[inline(never)]
    pub(crate) fn record_not_taken(&mut self, from: u64, to: u64) -> bool {
        let stamp = self.progress.branch_stamp();
        self.branches.push_not_taken(from, to, stamp) && self.handle_due_branches()
    }

    /// Whether conditional branches that are not taken are recorded too.
    #[inline(always)]
    pub(crate) fn records_not_taken(&self) -> bool {
        self.branches.observe().not_taken
    }

    /// The class of a direct call.
    pub(crate) fn call_class(&self, op: &Op<Self>, to: u64) -> BranchClass {
        if to == self.rip_after(op) {
            BranchClass::CallNext
        } else {
            BranchClass::DirectCall
        }
    }

    /// Records a far branch or an event that is complete.
    ///
    /// The caller must end the block, so that a boundary follows.
    pub(crate) fn record_far(&mut self, from: BranchSource, to: u64, class: BranchClass) {
        if !self.branches.records() {
            return;
        }
        if self.branches.is_full() {
            self.report_branches();
        } else if from.cs_base != self.regs.cs_base() {
            self.report_branches_of(from.cs_base);
        }
        let branch = Branch {
            from: from.rip,
            to,
            at: self.progress.branch_stamp(),
            class,
            cpl: from.cpl,
            to_cpl: self.mode.cpl(),
            mispredicted: false,
        };
        self.branches.push_far(branch);
        if let Some(how) = self.branches.observe().bts {
            let to_base = self.regs.cs_base();
            self.store_record(&how, &branch, from.cs_base, to_base);
        }
        self.branches.keep_handled();
    }

    /// Handles the branch that was added last: stores its BTS record.
    ///
    /// Returns whether the block must be left before the next instruction.
    #[inline(never)]
    pub(crate) fn handle_due_branches(&mut self) -> bool {
        let Some(how) = self.branches.observe().bts else {
            return !self.branches.keep_handled();
        };
        let mut interrupts = false;
        if let Some(&branch) = self.branches.last() {
            let base = self.regs.cs_base();
            interrupts = self.store_record(&how, &branch, base, base);
        }
        interrupts | !self.branches.keep_handled()
    }

    /// Stores the BTS record of a branch; returns whether an interrupt was requested.
    #[inline(always)]
    fn store_record(
        &mut self,
        how: &BtsConfig,
        branch: &Branch,
        from_base: u64,
        to_base: u64,
    ) -> bool {
        if branch.class == BranchClass::NotTaken || !how.stores(branch.cpl) {
            return false;
        }
        let mask = if self.lma() { u64::MAX } else { 0xffff_ffff };
        let from = branch.from.wrapping_add(from_base) & mask;
        let to = branch.to.wrapping_add(to_base) & mask;
        let stored = bts::store(self, how, from, to);
        self.find_bts_target(how);
        stored == BtsOutcome::AtThreshold && self.request_pmi()
    }

    /// Sets the BTS target for the next records, if the fast path can apply.
    ///
    /// [`BranchBuffer::store_near`] serves only 64-bit code, whose segments have no base, at a
    /// privilege level whose branches are stored, while nothing else observes them.
    ///
    /// [`BranchBuffer::store_near`]: crate::branch_buffer::BranchBuffer::store_near
    fn find_bts_target(&mut self, how: &BtsConfig) {
        self.branches.forget_bts_target();
        if self.branches.observe().branches || !self.mode.is_64bit() || !how.stores(self.mode.cpl())
        {
            return;
        }
        let ds = self.mmu.ds();
        let Some(area) = self.mmu.writes.find_bytes(how.area, BTS_FIELDS, ds) else {
            return;
        };
        let Some(index) = self.ds_fast_read(how.area.wrapping_add(8)) else {
            return;
        };
        let page = index & !0xfff;
        // An index in the last page could overflow.
        if page == !0xfff {
            return;
        }
        if let Some(bytes) = self.mmu.writes.find_bytes(page, 4096, ds) {
            let target = BtsTarget {
                epoch: self.mmu.writes.epoch(),
                area: area.host(),
                page,
                add: bytes.host().wrapping_sub(page),
                fast_path: BtsFastPath::new(how.interrupt),
            };
            // SAFETY: the TLB for writes contains the page and all of the fields now, and evicts a
            // page only with a new epoch.
            unsafe { self.branches.set_bts_target(target) };
        }
    }

    /// Returns how translated code must record near branches at the current privilege level.
    pub(crate) fn branch_records(&self) -> BranchRecords {
        let observe = self.branches.observe();
        match &observe.bts {
            _ if !self.branches.records() => BranchRecords::None,
            None if self.branches.counts_paths() && observe.not_taken => BranchRecords::PathsAll,
            None if self.branches.counts_paths() => BranchRecords::Paths,
            None if observe.not_taken => BranchRecords::StampedAll,
            None if observe.newest != 0 && observe.every == 0 => BranchRecords::Paths,
            None => BranchRecords::Stamped,
            Some(_) if observe.branches => BranchRecords::Unsupported,
            Some(how) if how.stores(self.mode.cpl()) => BranchRecords::Bts,
            Some(_) => BranchRecords::None,
        }
    }

    /// Returns where translated code can store BTS records now.
    pub(crate) fn bts_window(&mut self) -> Option<BtsWindow> {
        let epoch = self.mmu.writes.epoch();
        if let Some(window) = self.branches.bts_window(epoch) {
            return Some(window);
        }
        let how = self.branches.observe().bts?;
        self.find_bts_target(&how);
        self.branches.bts_window(epoch)
    }

    /// Requests the interrupt of a BTS buffer that has reached its threshold.
    #[cold]
    fn request_pmi(&mut self) -> bool {
        // The interrupt may freeze LBRs and counters, which must include this branch.
        self.report_branches();
        self.platform().request_pmi();
        self.update_observe();
        true
    }

    /// Reports branches if a report is due. Called at instruction boundaries.
    pub(crate) fn report_due_branches(&mut self) {
        if self.branches.report_is_due() {
            self.report_branches();
        }
    }

    /// Reports all branches in the buffer.
    #[cold]
    pub(crate) fn report_branches(&mut self) {
        self.report_branches_of(self.regs.cs_base());
    }

    /// Reports all branches in the buffer, which are those of code with this base of CS.
    fn report_branches_of(&mut self, cs_base: u64) {
        if self.pass_branches(cs_base) {
            self.update_observe();
        }
    }

    /// Adds the branches that translated code has recorded: `count` records of paths.
    ///
    /// Reports those for which the buffer has no room. Nothing but the LBR stack uses the branches, so
    /// what must be observed stays the same. The counters must not be brought up to date here: an
    /// overflow could freeze the LBR stack before the branches in the buffer are in it.
    pub(crate) fn add_paths(&mut self, count: usize) {
        if self.branches.observe().counted {
            if let Some(translator) = self.jit.translator() {
                let counts = translator.count_branches(count);
                self.branches.add_counts(&counts);
            }
            return;
        }
        let end_stamp = self.progress.end_stamp();
        let cs_base = self.regs.cs_base();
        let mut added = self.skip_paths(count);
        while added < count {
            let Some(translator) = self.jit.translator() else {
                return;
            };
            added += self.branches.add_paths(translator, added..count, end_stamp);
            if added < count || self.branches.is_full() {
                // No path is longer than the buffer.
                self.pass_branches(cs_base);
            }
        }
    }

    /// Reports only the number of branches that later ones supersede, if the platform allows that.
    ///
    /// Returns the number of records of translated code whose branches they are.
    fn skip_paths(&mut self, count: usize) -> usize {
        let newest = self.branches.observe().newest as usize;
        let Some(translator) = self.jit.translator().filter(|_| newest != 0) else {
            return 0;
        };
        let (records, branches) = translator.superseded(count, newest);
        if branches != 0 {
            self.pass_branches(self.regs.cs_base());
            self.branches.skip(branches);
            self.platform().skip_branches(branches);
        }
        records
    }

    /// Passes all branches in the buffer to the platform; returns whether there were any.
    fn pass_branches(&mut self, cs_base: u64) -> bool {
        let counts = self.branches.take_counts();
        let count = self.branches.empty();
        let (platform, branches) = self.platform_and_branches();
        if let Some(counts) = counts {
            for (ring, counts) in [Ring::Os, Ring::User].into_iter().zip(counts) {
                for (class, count) in BranchBuffer::kinds().into_iter().zip(counts) {
                    platform.count_branches(ring, class, count);
                }
            }
        }
        // The counters are brought up to date once, with all branches: an overflow can freeze them.
        if count != 0 {
            platform.branches(cs_base, branches.emptied(count));
        } else if counts.is_some() {
            platform.counted_branches();
        }
        count != 0 || counts.is_some()
    }

    /// Reports a system event that has completed, if the platform requests these.
    pub(crate) fn report_system_event(&mut self, event: impl FnOnce(&Self) -> SystemEvent) {
        if self.branches.observe().system_events {
            let event = event(self);
            self.platform().system_event(event);
        }
    }

    /// Reports that a #DB is about to be delivered, if that changes a model.
    pub(crate) fn report_debug_exception(&mut self) {
        if self.branches.observe().debug_exceptions {
            self.report_branches();
            self.platform().debug_exception();
            self.update_observe();
        }
    }
}
