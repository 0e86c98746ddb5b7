//! Transactions of a processor: XBEGIN, XEND and XABORT, what they save and undo, and their accesses
//! to memory. SDM Vol. 1, "Programming with Intel Transactional Synchronization Extensions".
//!
//! Code in a transaction is decoded for it alone ([`Core::block_key`]): instructions that cannot be
//! part of one become operations that abort it. Its accesses all take the slow path, which leads to
//! [`shared`]. No transaction is open outside [`crate::Vcpu::run`].

mod careful;
pub(crate) mod shared;

use crate::core::{Core, DB, Fault};
use crate::events::{Cause as Why, Event, Shutdown};
use crate::ops::Done;
use crate::platform::BranchClass;
use crate::thunk::Vectors;
use hindsight_cpu::pmu::Ring;
use hindsight_cpu::transaction::{AbortCause as Cause, NEST_MAX, TransactionEvent as Step};
use hindsight_regs::dr::Dr7;
use shared::{Loss, Seat};
use std::sync::Arc;

/// The transaction of a processor, if there is one.
#[derive(Debug)]
pub(crate) struct Region {
    /// How deep XBEGIN is nested; 0: there is none.
    depth: u8,
    /// The state before the outermost XBEGIN.
    saved: Box<Saved>,
    /// What the other processors see of this one.
    seat: Arc<Seat>,
    /// A page walk met an entry that the transaction has written.
    walked: bool,
    /// The #DB that comes next is about a transaction.
    debugged: bool,
}

/// What an abort brings back.
#[derive(Debug, Default)]
struct Saved {
    gpr: [u64; 16],
    rflags: u64,
    vec: Vectors,
    /// RIP of the XBEGIN.
    rip: u64,
    /// Where it goes on after an abort.
    fallback: u64,
    /// Cycles at its start.
    cycles: u64,
}

impl Region {
    pub(crate) fn new(seat: Arc<Seat>) -> Self {
        Self {
            depth: 0,
            saved: Box::default(),
            seat,
            walked: false,
            debugged: false,
        }
    }
}

impl From<Loss> for Fault {
    fn from(loss: Loss) -> Self {
        Self::Transaction(match loss {
            Loss::Conflict => Cause::Conflict,
            Loss::Writes => Cause::Writes,
            Loss::Reads => Cause::Reads,
        })
    }
}

/// The access or the instruction cannot be part of a transaction.
pub(crate) const UNFIT: Fault = Fault::Transaction(Cause::Instruction);

impl Core {
    /// A transaction is open.
    pub(crate) fn in_region(&self) -> bool {
        self.region.depth != 0
    }

    /// Guest code goes on: follows whether accesses must ask for transactions.
    pub(crate) fn mind_others(&mut self) {
        let careful = self.region.seat.run(&self.memory.shared);
        if careful != self.careful {
            self.careful = careful;
            self.update_set();
        }
    }

    /// Nothing of the guest runs any more. A transaction does not outlive that.
    pub(crate) fn end_run(&mut self) {
        self.leave_region(Cause::Event);
        self.region.seat.leave();
    }

    /// XBEGIN at `rip`, with `next` behind it.
    pub(crate) fn begin_region(&mut self, rip: u64, next: u64, fallback: u64) -> Done {
        if self.region.depth == NEST_MAX {
            return Err(Fault::Transaction(Cause::Nesting));
        }
        self.region.depth += 1;
        self.rip = next;
        if self.region.depth > 1 {
            return Ok(());
        }
        let (rflags, cycles) = (self.rflags(), self.cycles());
        let saved = &mut *self.region.saved;
        saved.gpr.copy_from_slice(&self.regs[..16]);
        saved.vec.clone_from(&*self.vec);
        (saved.rip, saved.fallback) = (rip, fallback);
        (saved.rflags, saved.cycles) = (rflags, cycles);
        self.region.walked = false;
        self.tell_branches();
        let ring = Ring::of(self.cpl);
        self.platform().transaction(Step::Begun, ring);
        // Records of branches go to memory at once, which no transaction can take back.
        let possible = self.platform().may_transact() && self.rec.observe.bts.is_none();
        if possible && self.memory.shared.begin(&self.region.seat) {
            self.follow_region();
            return Ok(());
        }
        self.rip = rip;
        self.abort_region(if possible {
            Cause::Event
        } else {
            Cause::Instruction
        });
        Ok(())
    }

    /// XEND.
    pub(crate) fn end_region(&mut self) -> Done {
        if self.region.depth > 1 {
            self.region.depth -= 1;
            return Ok(());
        }
        let memory = Arc::clone(&self.memory);
        let seat = Arc::clone(&self.region.seat);
        memory
            .shared
            .commit(&seat, |gpa, data| self.put_phys(gpa, data))?;
        self.region.depth = 0;
        self.close_region(Step::Committed);
        Ok(())
    }

    /// Aborts the transaction, if there is one.
    pub(crate) fn leave_region(&mut self, cause: Cause) {
        if self.in_region() {
            self.abort_region(cause);
        }
    }

    /// At a boundary: follows what others did to the transaction.
    pub(crate) fn look_at_region(&mut self) {
        if self.in_region() && self.memory.shared.is_lost(&self.region.seat) {
            self.abort_region(Cause::Conflict);
        }
    }

    /// An instruction in the transaction did not complete.
    pub(crate) fn fault_in_region(&mut self, fault: Fault) -> Result<(), Shutdown> {
        self.stops.hit = None;
        match fault {
            Fault::Debug(bits) => return self.debug_in_region(bits),
            Fault::Transaction(Cause::Debug) => return self.debug_in_region(0),
            Fault::Transaction(cause) => self.abort_region(cause),
            _ => self.abort_region(Cause::Instruction),
        }
        Ok(())
    }

    /// A condition for #DB, with its bits of DR6, or for #BP was met in the transaction.
    pub(crate) fn debug_in_region(&mut self, bits: u64) -> Result<(), Shutdown> {
        if !self.debugs_regions() {
            self.abort_region(Cause::Debug);
            return Ok(());
        }
        self.tell_branches();
        self.roll_back();
        self.close_region(Step::Aborted(Cause::Debug));
        self.debug_bits(bits);
        self.region.debugged = true;
        self.deliver(Event {
            vector: DB,
            cause: Why::Exception,
            code: None,
            rf: false,
        })
    }

    /// The #DB that is delivered is about a transaction.
    pub(crate) fn take_debugged(&mut self) -> bool {
        std::mem::take(&mut self.region.debugged)
    }

    /// Advanced debugging of transactions is on.
    fn debugs_regions(&self) -> bool {
        self.st.dr7 & Dr7::RTM != 0 && self.rec.observe.debugs_transactions
    }

    /// Undoes everything since the outermost XBEGIN, and goes to its fallback address.
    fn abort_region(&mut self, cause: Cause) {
        let cycles = self.cycles().wrapping_sub(self.region.saved.cycles);
        let about = (self.region.saved.rip, cause.pebs_information(cycles));
        self.counters.note_abort(about);
        let nested = self.region.depth > 1;
        let place = (self.rip, self.cs_base(), self.cpl);
        self.roll_back();
        self.put(0, cause.status(nested));
        self.rip = self.region.saved.fallback;
        self.note_far(place, self.rip, BranchClass::Abort);
        self.tell_branches();
        self.close_region(Step::Aborted(cause));
    }

    /// The state is that before the outermost XBEGIN.
    fn roll_back(&mut self) {
        self.memory.shared.end(&self.region.seat);
        self.region.depth = 0;
        let saved = &*self.region.saved;
        let rflags = saved.rflags;
        self.regs[..16].copy_from_slice(&saved.gpr);
        (*self.vec).clone_from(&saved.vec);
        self.rip = saved.rip;
        self.set_rflags(rflags);
        (self.trap, self.trap_pending, self.hits) = (0, false, 0);
        self.repeat = false;
        self.st.events.deferred_db = 0;
    }

    /// The transaction is over: who follows it is told.
    fn close_region(&mut self, step: Step) {
        self.tell_branches();
        let ring = Ring::of(self.cpl);
        self.platform().transaction(step, ring);
        self.follow_region();
    }

    /// Whether there is a transaction has changed.
    fn follow_region(&mut self) {
        self.reobserve();
        self.mind_others();
        self.update_set();
        self.update_ctx();
    }

    /// Forgets the transaction: the state is replaced.
    pub(crate) fn drop_region(&mut self) {
        self.memory.shared.end(&self.region.seat);
        self.region.depth = 0;
        self.region.debugged = false;
    }
}

/// Accesses to memory.
impl Core {
    /// A load within a page.
    pub(crate) fn load_in_region(&mut self, gpa: u64, data: &mut [u8]) -> Done {
        if data.is_empty() {
            return Ok(());
        }
        let memory = &self.memory;
        if memory.page(gpa).is_none() {
            return Err(UNFIT);
        }
        memory.shared.read(&self.region.seat, gpa, data, |data| {
            memory.read(gpa, data);
        })?;
        Ok(())
    }

    /// A store within a page.
    pub(crate) fn store_in_region(&mut self, gpa: u64, data: &[u8]) -> Done {
        if data.is_empty() {
            return Ok(());
        }
        let page = self.memory.page(gpa).filter(|page| page.writable);
        let page = page.ok_or(UNFIT)?;
        // Code that was decoded, perhaps for this transaction.
        if page.code() != 0 && self.cache.covers(gpa, data.len()) == Some(true) {
            return Err(UNFIT);
        }
        self.memory.shared.write(&self.region.seat, gpa, data)?;
        Ok(())
    }

    /// Code of this length is fetched: not what the transaction itself has written.
    pub(crate) fn fetch_in_region(&self, gpa: u64, len: usize) -> Done {
        if self.in_region() && self.memory.shared.wrote(&self.region.seat, gpa, len) {
            return Err(UNFIT);
        }
        Ok(())
    }

    /// An entry of a paging structure is read.
    pub(crate) fn walk_in_region(&mut self, gpa: u64) {
        if self.in_region() && self.memory.shared.wrote(&self.region.seat, gpa, 1) {
            self.region.walked = true;
        }
    }

    /// A page walk is over.
    pub(crate) fn walked_in_region(&mut self) -> Done {
        if std::mem::take(&mut self.region.walked) {
            return Err(UNFIT);
        }
        Ok(())
    }
}
