//! What is noted of branches, interrupts and exceptions, and who gets it.
//!
//! Branches go into a buffer. [`Recording::due`] is the count at which one compare in the branch
//! handlers leads to [`Core::branches_due`]: every time while the branch trace store is on, because
//! the guest may look at its records with the next instruction; otherwise when the models must be
//! asked, or the buffer is full.

#![expect(unsafe_code, reason = "a branch is noted in three stores")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "the clock of branches is cut to 32 bits"
)]

use crate::core::Core;
use crate::mmu::Want;
use crate::op::{Op, slot};
use crate::platform::{Branch, BranchClass, Observe};
use crate::seg::canonical;
use crate::tlb::Set;
use hindsight_cpu::branch::BtsConfig;
use hindsight_cpu::branch::bts::{self, BtsFastPath, BtsOutcome, DsMemory};
use hindsight_cpu::state::seg;
use std::mem::offset_of;
use std::ptr::with_exposed_provenance_mut;

/// Branches kept before they are told, a power of two: few enough to stay in the first-level cache.
const BRANCHES: usize = 256;

/// Bytes of the BTS fields at the start of the DS management area.
const DS_FIELDS: u64 = 32;

/// Where the fields after the addresses are in their word, in bits.
const CLASS: usize = (offset_of!(Branch, class) - AT) * 8;
const CPL: usize = (offset_of!(Branch, cpl) - AT) * 8;
const TO_CPL: usize = (offset_of!(Branch, to_cpl) - AT) * 8;
const AT: usize = offset_of!(Branch, at);
const _: () = assert!(
    offset_of!(Branch, from) == 0
        && offset_of!(Branch, to) == 8
        && AT == 16
        && size_of::<Branch>() == 24
        && size_of::<BranchClass>() == 1
        && offset_of!(Branch, mispredicted) == 23
        && align_of::<Branch>() == 8
);

const NO_BRANCH: Branch = Branch {
    from: 0,
    to: 0,
    at: 0,
    class: BranchClass::Far,
    cpl: 0,
    to_cpl: 0,
    mispredicted: false,
};

/// Where the next records of the branch trace store go, as the TLB had it: see [`Core::aim`].
#[derive(Clone, Copy, Debug, Default)]
struct Aim {
    /// [`Tlb::epoch`](crate::tlb::Tlb::epoch) of then; 0 for none.
    epoch: u64,
    /// Host address of the DS management area.
    area: u64,
    /// Linear address of the buffer's page.
    page: u64,
    /// What to add to a linear address in it to get the host address.
    add: u64,
    quiet: BtsFastPath,
}

/// Branches on their way to the platform.
pub(crate) struct Recording {
    pub(crate) observe: Observe,
    aim: Aim,
    buffer: [Branch; BRANCHES],
    /// Branches in the buffer.
    count: usize,
    /// Count at which [`Core::branches_due`] must be asked.
    due: usize,
    /// Count at which they must be told.
    full: usize,
    /// Branches told so far.
    told: u64,
    /// Retired instructions at the end of the slice, modulo 2^32.
    stamp: u32,
    /// Of all noted ones, those that were not taken.
    not_taken: u64,
    /// The privilege level, where the last word of a near branch has it.
    levels: u64,
}

impl Recording {
    pub(crate) fn new() -> Self {
        Self {
            observe: Observe::default(),
            aim: Aim::default(),
            buffer: [NO_BRANCH; BRANCHES],
            stamp: 0,
            count: 0,
            due: BRANCHES,
            full: BRANCHES,
            told: 0,
            not_taken: 0,
            levels: 0,
        }
    }

    /// Sets when the next branch is looked at.
    fn plan(&mut self) {
        self.full = match self.observe.every as usize {
            0 => BRANCHES,
            n => n.min(BRANCHES),
        };
        self.due = if self.observe.bts.is_some() || !self.observe.branches {
            self.count + 1
        } else {
            self.full
        };
    }

    /// The level, the mode or who wants branches may have changed.
    pub(crate) fn aim_lost(&mut self) {
        self.aim = Aim::default();
    }

    /// The branch noted last, as long as it was not told.
    pub(crate) fn last(&self) -> Option<&Branch> {
        self.buffer.get(self.count.checked_sub(1)?)
    }

    /// How many branches were taken so far, modulo 2^64, while they were noted.
    pub(crate) fn taken(&self) -> u64 {
        let noted = self.told.wrapping_add(self.count as u64);
        noted.wrapping_sub(self.not_taken)
    }
}

impl Core {
    /// Asks the platform what to report, and follows.
    pub(crate) fn reobserve(&mut self) {
        let observe = self.platform().observe();
        if observe != self.rec.observe {
            self.set_observe(observe);
            self.leave = true;
        }
        self.recount();
    }

    pub(crate) fn set_observe(&mut self, observe: Observe) {
        self.rec.observe = observe;
        self.rec.aim_lost();
        self.rec.plan();
        self.update_ctx();
    }

    /// Base of CS, as it counts in the current mode.
    pub(crate) fn cs_base(&self) -> u64 {
        self.regs[usize::from(slot::SEG_BASE) + seg::CS]
    }

    /// After changes of CPL.
    pub(crate) fn update_levels(&mut self) {
        self.rec.levels = u64::from(self.cpl) * (1 << CPL | 1 << TO_CPL);
    }

    /// Notes a near branch; answers whether [`Core::branches_due`] must be asked.
    #[inline(always)]
    pub(crate) fn note(&mut self, from: u64, to: u64, class: BranchClass) -> bool {
        let rest = u64::from(self.now()) | (class as u64) << CLASS | self.rec.levels;
        let i = self.rec.count;
        let place = &raw mut self.rec.buffer[i & (BRANCHES - 1)];
        // SAFETY: the three words are a `Branch`, as the constants check; its last byte, `mispredicted`, is 0.
        unsafe { place.cast::<[u64; 3]>().write([from, to, rest]) };
        self.rec.count = i + 1;
        i + 1 >= self.rec.due
    }

    /// Stores a near branch of 64-bit code, or notes it; answers whether [`Core::branches_due`] must be asked.
    #[inline(always)]
    pub(crate) fn note_and_store(&mut self, from: u64, to: u64, class: BranchClass) -> bool {
        !self.store_near(from, to) && self.note(from, to, class)
    }

    /// Retired instructions with the block that ends here.
    #[inline(always)]
    fn now(&self) -> u32 {
        self.rec
            .stamp
            .wrapping_sub(self.budget.cast_unsigned() as u32)
    }

    /// The slice, what it spent on more than instructions, or the count of retired ones changed.
    pub(crate) fn update_stamp(&mut self) {
        let end = (self.slice - self.extra).cast_unsigned();
        let end = self.retired_base.wrapping_add(end);
        self.rec.stamp = end as u32;
    }

    /// Notes a near branch in a handler that looks at [`Core::leave`].
    pub(crate) fn record(&mut self, from: u64, to: u64, class: BranchClass) {
        if self.rec.observe.needs_branches() && self.note(from, to, class) && self.branches_due() {
            self.leave = true;
        }
    }

    /// Notes a conditional branch that was not taken, if that is wanted.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_not_taken(&mut self, from: u64, to: u64) -> bool {
        self.rec.not_taken += 1;
        self.note(from, to, BranchClass::NotTaken) && self.branches_due()
    }

    /// Conditional branches that are not taken are wanted too.
    #[inline(always)]
    pub(crate) fn wants_not_taken(&self) -> bool {
        self.rec.observe.not_taken
    }

    /// Class of a direct call.
    pub(crate) fn call_class(&self, op: &Op, to: u64) -> BranchClass {
        if to == self.rip_after(op) {
            BranchClass::CallNext
        } else {
            BranchClass::DirectCall
        }
    }

    /// Notes a far branch or an event that is over; `from_base` was CS.base before it. A boundary
    /// follows.
    pub(crate) fn note_far(
        &mut self,
        (from, from_base, cpl): (u64, u64, u8),
        to: u64,
        class: BranchClass,
    ) {
        if !self.rec.observe.needs_branches() {
            return;
        }
        if self.rec.count >= BRANCHES {
            self.tell_branches();
        } else if from_base != self.cs_base() {
            self.tell_branches_of(from_base);
        }
        let branch = Branch {
            from,
            to,
            at: self.now(),
            class,
            cpl,
            to_cpl: self.cpl,
            mispredicted: false,
        };
        self.rec.buffer[self.rec.count & (BRANCHES - 1)] = branch;
        self.rec.count += 1;
        if let Some(how) = self.rec.observe.bts {
            let to_base = self.cs_base();
            let mask = self.linear_mask();
            self.store_record(&how, &branch, (from_base, to_base, mask));
        }
        self.noted();
    }

    /// Stores a near branch as mostly: where the one before it went, with nothing else to do. `false`: it must be noted
    /// for [`Core::branches_due`] to store it, or nobody wants it stored.
    #[inline(always)]
    fn store_near(&mut self, from: u64, to: u64) -> bool {
        let aim = &self.rec.aim;
        if aim.epoch != self.wr.epoch() {
            return false;
        }
        let area = with_exposed_provenance_mut::<u64>(aim.area as usize);
        // SAFETY: the TLB had all of the area as writable, and has forgotten nothing since.
        let field = |n| unsafe { area.add(n).read_unaligned() };
        let index = field(1);
        if index.wrapping_sub(aim.page) > 4096 - bts::RECORD {
            return false;
        }
        let Some(end) = aim.quiet.next_index(index, || field(2), || field(3)) else {
            return false;
        };
        let record = with_exposed_provenance_mut::<[u64; 3]>(index.wrapping_add(aim.add) as usize);
        // SAFETY: as above, for the page that all of the record is in.
        unsafe {
            record.write_unaligned([from, to, 0]);
            area.add(1).write_unaligned(end);
        }
        self.rec.told = self.rec.told.wrapping_add(1);
        true
    }

    /// After a record: where the next ones go, if all of the following is so: 64-bit mode, which adds no base;
    /// a level that wants them; nobody else who does; the DS management area and the page in the TLB.
    fn aim(&mut self, how: &BtsConfig) {
        self.rec.aim_lost();
        if self.rec.observe.branches || self.code != 8 || !how.stores(self.cpl) {
            return;
        }
        let Some(area) = self.wr.find(how.area, DS_FIELDS, self.ds) else {
            return;
        };
        let Some(page) = self.ds_fast_read(how.area.wrapping_add(8)) else {
            return;
        };
        let page = page & !0xfff;
        // An index in the last page could overflow.
        if page == !0xfff {
            return;
        }
        if let Some(host) = self.wr.find(page, 4096, self.ds) {
            self.rec.aim = Aim {
                epoch: self.wr.epoch(),
                area,
                page,
                add: host.wrapping_sub(page),
                quiet: BtsFastPath::new(how.interrupt),
            };
        }
    }

    /// The branch noted last was one to look at: stores it, and answers whether the models must be
    /// asked before the next instruction.
    #[inline(never)]
    pub(crate) fn branches_due(&mut self) -> bool {
        let Some(how) = self.rec.observe.bts else {
            // Nobody but single-step on branches may have wanted it.
            return !self.noted();
        };
        let branch = self.rec.buffer[(self.rec.count - 1) & (BRANCHES - 1)];
        let base = self.cs_base();
        let mask = self.linear_mask();
        let interrupts = self.store_record(&how, &branch, (base, base, mask));
        interrupts | !self.noted()
    }

    /// After a branch was looked at: keeps it for the platform, if that wants it. Answers whether
    /// there is room for another.
    fn noted(&mut self) -> bool {
        let rec = &mut self.rec;
        if !rec.observe.branches {
            rec.told = rec.told.wrapping_add(rec.count as u64);
            rec.count = 0;
            return true;
        }
        rec.plan();
        rec.count < rec.full
    }

    /// Stores a branch in the BTS buffer; answers whether an interrupt was requested.
    #[inline(always)]
    fn store_record(
        &mut self,
        how: &BtsConfig,
        branch: &Branch,
        (from_base, to_base, mask): (u64, u64, u64),
    ) -> bool {
        if branch.class == BranchClass::NotTaken || !how.stores(branch.cpl) {
            return false;
        }
        let from = branch.from.wrapping_add(from_base) & mask;
        let to = branch.to.wrapping_add(to_base) & mask;
        let stored = bts::store(self, how, from, to);
        self.aim(how);
        stored == BtsOutcome::AtThreshold && self.ask_for_pmi()
    }

    #[cold]
    fn ask_for_pmi(&mut self) -> bool {
        // What the request freezes must not miss this branch.
        self.tell_branches();
        self.platform().request_pmi();
        self.reobserve();
        true
    }

    /// The bits of a linear address in the current mode.
    fn linear_mask(&self) -> u64 {
        if self.lma() { u64::MAX } else { 0xffff_ffff }
    }

    /// At a boundary: tells the branches if they are due.
    pub(crate) fn tell_if_due(&mut self) {
        if self.rec.count >= self.rec.full {
            self.tell_branches();
        }
    }

    /// Gives all noted branches to the platform.
    #[cold]
    pub(crate) fn tell_branches(&mut self) {
        self.tell_branches_of(self.cs_base());
    }

    /// Gives all noted branches, of code with this base of CS, to the platform.
    fn tell_branches_of(&mut self, base: u64) {
        let n = std::mem::take(&mut self.rec.count).min(BRANCHES);
        if n == 0 {
            return;
        }
        self.rec.told = self.rec.told.wrapping_add(n as u64);
        self.rec.plan();
        let (platform, recording) = self.platform_and_recording();
        platform.code_base(base);
        platform.branches(&mut recording.buffer[..n]);
        self.reobserve();
    }

    /// A #DB is about to be delivered: what that changes in the models.
    pub(crate) fn tell_debug_exception(&mut self) {
        if self.rec.observe.debug_exceptions {
            self.tell_branches();
            self.platform().debug_exception();
            self.reobserve();
        }
    }

    /// Guest-physical address of a byte that the DS mechanism accesses; none where it would fault.
    fn ds_address(&mut self, linear: u64, want: Want) -> Option<u64> {
        if (self.lma() && !canonical(linear)) || (!self.lma() && linear >> 32 != 0) {
            return None;
        }
        // Neither SMAP nor protection keys count (rule DS-04).
        let pkru = std::mem::take(&mut self.vec.pkru);
        let found = self.translate(linear, want, Set::SupervisorAc);
        self.vec.pkru = pkru;
        let found = found.ok()?;
        let page = self.memory.page(found.gpa)?;
        if want == Want::Write && !page.writable {
            return None;
        }
        if pkru == 0 {
            self.enter(linear, found, want, Set::SupervisorAc);
        }
        Some(found.gpa)
    }

    /// The two pieces of an access that may reach into a second page.
    fn ds_pieces(&mut self, linear: u64, len: usize, want: Want) -> Option<[(u64, usize); 2]> {
        let first = len.min(Self::page_rest(linear));
        let low = self.ds_address(linear, want)?;
        let high = if first < len {
            self.ds_address(linear.wrapping_add(first as u64), want)?
        } else {
            0
        };
        Some([(low, first), (high, len - first)])
    }
}

impl DsMemory for Core {
    fn read(&mut self, linear: u64) -> Option<u64> {
        if let Some(value) = self.ds_fast_read(linear) {
            return Some(value);
        }
        let mut bytes = [0; 8];
        let mut done = 0;
        for (gpa, len) in self.ds_pieces(linear, 8, Want::Read)? {
            self.read_phys(gpa, &mut bytes[done..done + len]);
            done += len;
        }
        Some(u64::from_le_bytes(bytes))
    }

    fn writable(&mut self, linear: u64) -> bool {
        self.ds_can_write(linear) || self.ds_pieces(linear, 8, Want::Write).is_some()
    }

    fn write(&mut self, linear: u64, words: &[u64]) -> bool {
        if self.ds_fast_write(linear, words) {
            return true;
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let Some(pieces) = self.ds_pieces(linear, bytes.len(), Want::Write) else {
            return false;
        };
        let mut done = 0;
        for (gpa, len) in pieces {
            self.write_phys(gpa, &bytes[done..done + len]);
            done += len;
        }
        true
    }
}
