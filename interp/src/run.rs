//! The run loop: dispatch, boundaries, exact stepping.

#![expect(
    unsafe_code,
    reason = "links are set and the platform is kept through raw pointers"
)]

use crate::core::{Core, Fault, Leave};
use crate::decode::{EXACT, Features};
use crate::events::{Cause as Why, Event, Shutdown};
use crate::flags::RF;
use crate::memory::Memory;
use crate::op::{DEAD, Next, slot};
use crate::ops::branch;
use crate::platform::Platform;
use crate::stops::{Hit, Stops};
use hindsight_cpu::armed::Armed;
use hindsight_cpu::state::{Activity, CpuState, gpr};
use hindsight_cpu::transaction::AbortCause as Cause;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Instructions between two looks at pending interrupts.
const SLICE: i64 = 4096;

/// Events without a retired instruction after which the caller may look around.
const STUCK: u32 = 1000;

/// Why [`Vcpu::run`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The budget is used up, to the instruction.
    Budget,
    /// HLT, and nothing pends that would wake the processor. Running again is allowed at any time.
    Halted,
    /// A triple fault; the state is that before the last delivery.
    Shutdown,
    /// [`Kicker::kick`] was called.
    Kicked,
    /// [`crate::Pending::leave`] was set, or the guest does nothing but fault: an exception whose
    /// handler raises the next one before its first instruction retires.
    Leave,
    /// Something of [`Vcpu::set_stops`] was reached.
    Stop(Hit),
    /// [`Vcpu::step`] did what it does.
    Stepped,
    /// An instruction that the interpreter lacks: its bytes (the unused ones are 0) and RIP.
    Missing {
        /// The instruction's bytes.
        bytes: [u8; 15],
        /// Where it stands.
        rip: u64,
    },
}

/// Makes a [`Vcpu::run`] on another thread return soon.
#[derive(Clone, Debug, Default)]
pub struct Kicker(Arc<AtomicBool>);

impl Kicker {
    /// The run in progress, or the next one, returns [`Exit::Kicked`] within some microseconds.
    pub fn kick(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn take(&self) -> bool {
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Acquire)
    }
}

/// Figures about the work done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Retired instructions; a repeated string instruction counts once.
    pub retired: u64,
    /// Of these, the ones that started at CPL 1 to 3.
    pub user: u64,
    /// Blocks decoded.
    pub blocks: u64,
    /// Blocks looked up because neither a link nor the jump cache led to them.
    pub lookups: u64,
    /// Times all blocks were dropped.
    pub drops: u64,
    /// Entries made in the TLBs.
    pub tlb_fills: u64,
}

/// One virtual processor, run by the interpreter.
#[derive(Debug)]
pub struct Vcpu {
    core: Box<Core>,
    kicker: Kicker,
    prepared: bool,
}

impl Vcpu {
    /// A processor in its state after RESET.
    pub fn new(memory: Arc<Memory>) -> Self {
        Self {
            core: Box::new(Core::new(memory)),
            kicker: Kicker::default(),
            prepared: false,
        }
    }

    /// Takes over a state.
    pub fn load(&mut self, state: &CpuState) {
        self.core.load(state);
    }

    /// Gives the state.
    pub fn store(&mut self, state: &mut CpuState) {
        self.core.store(state);
    }

    /// RIP, between two runs.
    pub fn rip(&self) -> u64 {
        self.core.rip
    }

    /// Linear address of the next instruction, between two runs.
    pub fn code_address(&self) -> u64 {
        self.core.code_lin(self.core.rip)
    }

    /// RSP, between two runs.
    pub fn stack_pointer(&self) -> u64 {
        self.core.regs[gpr::RSP]
    }

    /// What a debugger outside the machine stops for from now on. The guest cannot tell.
    pub fn set_stops(&mut self, stops: &Stops) {
        self.core.set_stops(stops);
    }

    /// Tells that something other than a processor wrote guest memory.
    pub fn code_changed(&mut self, gpa: u64, len: u64) {
        self.core.memory.changed(gpa, len);
    }

    /// Tells that something else ran the guest: its code may have changed anywhere. What was
    /// decoded is compared with memory before it is used again.
    pub fn distrust_code(&mut self) {
        self.core.cache.distrust();
        self.core.new_context();
    }

    /// Whether the guest invalidated translations since the last call: something else that keeps some must forget
    /// them before it runs the guest.
    pub fn take_flushed(&mut self) -> bool {
        std::mem::take(&mut self.core.flushed)
    }

    /// Whether the state between two instructions is all there is: no shadow, no trap and no event
    /// under way. Otherwise running one instruction more, at most a few times, gets there.
    pub fn at_clean_boundary(&self) -> bool {
        let events = &self.core.st.events;
        !self.core.trap_pending
            && events.exception.is_none()
            && events.interrupt.is_none()
            && !events.mov_ss_shadow
            && !events.sti_shadow
            && events.deferred_db == 0
    }

    /// What the debug registers arm.
    pub fn armed_by_dr7(&self) -> Armed {
        Armed::from_dr7(self.core.st.dr7, self.core.st.cr4)
    }

    /// Guest memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.core.memory
    }

    /// Forgets all translations, as a processor may at any time. Needed after
    /// [`Memory::take_dirty`], for the next writes to be marked.
    pub fn forget_translations(&mut self) {
        self.core.flush_tlb();
    }

    /// Core cycles so far: see [`Platform::retired`].
    pub fn cycles(&self) -> u64 {
        self.core.cycles()
    }

    /// Sets [`Stats::retired`], [`Stats::user`] and [`Vcpu::cycles`]: for a restored snapshot.
    pub fn set_retired(&mut self, retired: u64, user: u64, cycles: u64) {
        self.core.retired_base = retired;
        self.core.counters.set_user(user);
        self.core.extra_base = cycles.wrapping_sub(retired);
        // An event may be delivered, and its place noted, before the next slice begins.
        self.core.update_stamp();
    }

    /// For stopping a run from another thread.
    pub fn kicker(&self) -> Kicker {
        self.kicker.clone()
    }

    /// Work done so far.
    pub fn stats(&self) -> Stats {
        Stats {
            retired: self.core.retired_base,
            user: self.core.counters.user(0),
            blocks: self.core.cache.decoded,
            lookups: self.core.cache.lookups,
            drops: self.core.cache.epoch,
            tlb_fills: self.core.tlb_fills,
        }
    }

    /// How often each instruction retired, by mnemonic, the most frequent first.
    pub fn mix(&self) -> Vec<(String, u64)> {
        self.core.cache.mix().list()
    }

    /// Runs until something stops it, at most `budget` core cycles: as many instructions, less one
    /// for each iteration of a repeated string instruction beyond its first.
    pub fn run<P: Platform>(&mut self, platform: &mut P, budget: u64) -> Exit {
        self.enter(platform, |vcpu| vcpu.run_inner(budget))
    }

    /// For a debugger: executes one instruction, whether or not a breakpoint is set there, or
    /// delivers one event, and comes back with [`Exit::Stepped`]. With `quiet`, interrupts and NMIs
    /// wait meanwhile, unless the processor is halted.
    pub fn step<P: Platform>(&mut self, platform: &mut P, quiet: bool) -> Exit {
        self.core.stops.quiet = quiet;
        let exit = self.enter(platform, Self::step_inner);
        self.core.stops.quiet = false;
        exit
    }

    /// Whether [`Vcpu::run`] comes back with [`Exit::Stepped`] when an instruction has raised an exception instead of
    /// retiring, and that was delivered.
    pub const fn stop_at_exceptions(&mut self, stop: bool) {
        self.core.stops.at_exceptions = stop;
    }

    fn enter<P: Platform>(
        &mut self,
        platform: &mut P,
        inner: impl FnOnce(&mut Self) -> Exit,
    ) -> Exit {
        if !self.prepared {
            self.prepared = true;
            self.core.features = Features::of(platform);
            self.core.portable = platform.portable();
            let width = platform.cpuid(0x8000_0008, 0)[0] & 0xff;
            if (32..=52).contains(&width) {
                self.core.phys_mask = (1 << width) - 1;
            }
        }
        let platform: &mut dyn Platform = platform;
        // SAFETY: only the lifetime is erased; the pointer is taken away again below, before the
        // reference it came from ends. A panic in between leaves it in a value that is not run
        // again without setting it anew.
        let erased: NonNull<dyn Platform + 'static> =
            unsafe { std::mem::transmute(NonNull::from(platform)) };
        self.core.platform = Some(erased);
        self.core.mind_others();
        let exit = inner(self);
        self.core.end_run();
        self.core.tell_branches();
        self.core.platform = None;
        exit
    }

    fn step_inner(&mut self) -> Exit {
        let core = &mut *self.core;
        core.catch_up();
        core.reobserve();
        core.stops.hit = None;
        let before = core.stops.deliveries;
        if let Some(e) = core.st.events.exception.take() {
            return match core.deliver_saved(e) {
                Ok(()) => core.stopped().unwrap_or(Exit::Stepped),
                Err(Shutdown) => core.shutdown(),
            };
        }
        match core.boundary() {
            Ok(None) if core.stops.deliveries != before => {
                return core.stopped().unwrap_or(Exit::Stepped);
            }
            Ok(None) => {}
            Ok(Some(exit)) => return exit,
            Err(Shutdown) => return core.shutdown(),
        }
        core.mind_others();
        core.begin_slice(1, 1);
        let outcome = core.step();
        core.account();
        let outcome = outcome.and_then(|exit| {
            if core.trap_pending && core.stops.hit.is_none() {
                core.deliver_trap()?;
            }
            Ok(exit)
        });
        match outcome {
            Ok(Some(exit)) => exit,
            Ok(None) => core.stopped().unwrap_or(Exit::Stepped),
            Err(Shutdown) => core.shutdown(),
        }
    }

    fn run_inner(&mut self, budget: u64) -> Exit {
        let core = &mut *self.core;
        core.catch_up();
        core.reobserve();
        core.stops.hit = None;
        if let Some(e) = core.st.events.exception.take()
            && core.deliver_saved(e).is_err()
        {
            return core.shutdown();
        }
        let mut stuck = 0;
        let mut rest = i64::try_from(budget).unwrap_or(i64::MAX);
        loop {
            if self.kicker.take() {
                return Exit::Kicked;
            }
            core.catch_up();
            match core.boundary() {
                Ok(None) => {}
                Ok(Some(exit)) => return exit,
                Err(Shutdown) => return core.shutdown(),
            }
            if let Some(exit) = core.stopped() {
                return exit;
            }
            if rest <= 0 {
                return Exit::Budget;
            }
            core.mind_others();
            core.begin_slice(rest, SLICE);
            let delivered = core.stops.deliveries;
            let outcome = core.slice();
            let used = core.account();
            rest -= used;
            stuck = if used == 0 { stuck + 1 } else { 0 };
            if stuck > STUCK {
                return Exit::Leave;
            }
            match outcome {
                Ok(None) => {}
                Ok(Some(exit)) => return exit,
                Err(Shutdown) => return core.shutdown(),
            }
            if let Some(exit) = core.stopped() {
                return exit;
            }
            if core.stops.at_exceptions && used == 0 && core.stops.deliveries != delivered {
                return Exit::Stepped;
            }
        }
    }
}

type Outcome = Result<Option<Exit>, Shutdown>;

impl Core {
    fn shutdown(&mut self) -> Exit {
        self.st.activity = Activity::Shutdown;
        Exit::Shutdown
    }

    /// The exit for what the debugger stops at, if anything was reached.
    fn stopped(&mut self) -> Option<Exit> {
        self.stops.hit.take().map(Exit::Stop)
    }

    /// Begins a slice of so many cycles.
    pub(crate) fn begin(&mut self, cycles: i64) {
        self.slice = cycles;
        self.budget = cycles;
        self.update_stamp();
    }

    fn deliver_saved(&mut self, e: hindsight_cpu::state::PendingException) -> Result<(), Shutdown> {
        match (e.vector, e.payload) {
            (crate::core::PF, Some(cr2)) => self.st.cr2 = cr2,
            (crate::core::DB, Some(bits)) => self.debug_bits(bits),
            _ => {}
        }
        self.st.activity = Activity::Running;
        let rf = !matches!(e.vector, 1 | 3 | 4 | 8);
        self.stops.pass = true;
        self.deliver(Event {
            vector: e.vector,
            cause: Why::Exception,
            code: e.error_code,
            rf,
        })
    }

    /// What happens between instructions: traps, NMI, interrupts, halts.
    fn boundary(&mut self) -> Outcome {
        self.look_at_region();
        self.look_at_counters();
        loop {
            self.tell_if_due();
            if matches!(self.st.activity, Activity::WaitForSipi | Activity::Shutdown) {
                return Ok(Some(Exit::Halted));
            }
            if self.trap_pending {
                self.st.activity = Activity::Running;
                self.deliver_trap()?;
                continue;
            }
            if self.stops.hit.is_some() {
                return Ok(None);
            }
            if let Some(vector) = self.st.events.interrupt.take() {
                self.interrupt(vector)?;
                continue;
            }
            let e = self.st.events;
            let quiet = self.stops.quiet && self.st.activity == Activity::Running;
            let nmi_open = !quiet && !e.nmi_blocked && !e.mov_ss_shadow && !e.sti_shadow;
            let pending = self.platform().pending();
            if pending.leave {
                return Ok(Some(Exit::Leave));
            }
            if pending.smi && !quiet && !e.mov_ss_shadow && !e.sti_shadow && !self.in_smm() {
                self.platform().acknowledge_smi();
                self.leave_region(Cause::Event);
                self.system_management();
                continue;
            }
            if nmi_open && (pending.nmi || e.nmi_pending) {
                self.leave_region(Cause::Event);
                if e.nmi_pending {
                    self.st.events.nmi_pending = false;
                } else {
                    self.platform().acknowledge_nmi();
                }
                self.st.activity = Activity::Running;
                self.st.events.nmi_blocked = true;
                self.deliver(Event {
                    vector: 2,
                    cause: Why::External,
                    code: None,
                    rf: self.flag(RF),
                })?;
                continue;
            }
            let open = !quiet && self.interrupts_on() && !e.mov_ss_shadow && !e.sti_shadow;
            if pending.interrupt
                && open
                && let Some(vector) = self.platform().acknowledge()
            {
                self.leave_region(Cause::Event);
                self.interrupt(vector)?;
                continue;
            }
            return Ok((self.st.activity == Activity::Halted).then_some(Exit::Halted));
        }
    }

    fn interrupt(&mut self, vector: u8) -> Result<(), Shutdown> {
        self.st.activity = Activity::Running;
        self.deliver(Event {
            vector,
            cause: Why::External,
            code: None,
            rf: self.flag(RF),
        })
    }

    /// Runs until the budget of the slice is used up or the boundary must be looked at.
    fn slice(&mut self) -> Outcome {
        // An event since the last block went elsewhere than the branch that ended it.
        self.link_from = std::ptr::null();
        while self.budget > 0 {
            if self.stops.execute {
                let lin = self.code_lin(self.rip);
                if self.stops.at(lin) {
                    self.stops.hit = Some(Hit::Execute(lin));
                    return Ok(None);
                }
            }
            if self.needs_exact() {
                return self.step();
            }
            let first = match self.known() {
                Some(first) => first,
                None => match self.find(false) {
                    Ok(first) => first,
                    Err(fault) => return self.fault(fault),
                },
            };
            if i64::from(crate::block::count(first)) > self.budget {
                if self.budget < self.slice
                    && i64::from(crate::block::count(first)) <= self.budget + self.beyond
                {
                    // Only the slice ends here: the next one begins with this block.
                    return Ok(None);
                }
                // The deadline lies inside the block.
                let outcome = self.step()?;
                if outcome.is_some() || !matches!(self.why, Leave::Lookup | Leave::Budget) {
                    return Ok(outcome);
                }
                continue;
            }
            branch::start(self, first);
            self.dispatch(first);
            match self.why {
                Leave::Lookup | Leave::Budget => {}
                Leave::Poll => {
                    self.after_instruction(false);
                    return Ok(None);
                }
                Leave::Fault => return self.fault(self.fault),
                Leave::SoftInt(vector, kind) => {
                    self.deliver(Self::soft_event(vector, kind))?;
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    /// Executes exactly one instruction, with all that may happen around it.
    fn step(&mut self) -> Outcome {
        self.why = Leave::Lookup;
        let lin = self.code_lin(self.rip);
        let e = &self.st.events;
        if !self.flag(RF) && !e.mov_ss_shadow {
            let bits = self.exec_hits(lin);
            if bits != 0 {
                self.why = Leave::Poll;
                if self.in_region() {
                    return self.debug_in_region(bits).map(|()| None);
                }
                self.debug_bits(bits);
                self.deliver(Event {
                    vector: crate::core::DB,
                    cause: Why::Exception,
                    code: None,
                    rf: false,
                })?;
                return Ok(None);
            }
        }
        let first = match self.find(true) {
            Ok(first) => first,
            Err(fault) => return self.fault(fault),
        };
        let had_ss_shadow = self.st.events.mov_ss_shadow;
        let tf = self.tf();
        // What BTF is when the instruction starts counts (rule BTF-12).
        let (on_branch, taken) = (self.rec.observe.step_on_branch, self.rec.taken());
        self.st.events.mov_ss_shadow = false;
        self.st.events.sti_shadow = false;
        self.repeat = self.flag(RF);
        self.no_step = false;
        self.fl &= !RF;
        self.begin_accesses(lin);
        self.dispatch_one(first);
        self.end_accesses();
        if had_ss_shadow {
            self.st.events.mov_ss_shadow = false;
        }
        match self.why {
            Leave::Fault => self.fault(self.fault),
            Leave::SoftInt(vector, kind) => {
                let mut deferred = std::mem::take(&mut self.st.events.deferred_db);
                if kind == crate::core::SoftKind::Icebp && deferred != 0 {
                    // Its own #DB reports what MOV SS held back.
                    self.debug_bits(std::mem::take(&mut deferred));
                }
                self.deliver(Self::soft_event(vector, kind))?;
                if deferred != 0 {
                    self.trap |= deferred;
                    self.trap_pending = true;
                }
                Ok(None)
            }
            _ => {
                let tf = tf && !self.no_step && (!on_branch || self.rec.taken() != taken);
                self.after_instruction(tf);
                if tf || self.trap_pending {
                    self.why = Leave::Poll;
                }
                Ok(None)
            }
        }
    }

    /// Executes a block of one instruction, and does not follow it into the next block.
    fn dispatch_one(&mut self, first: Next) {
        let (budget, slice) = (self.budget, self.slice);
        self.begin(slice - budget + 1);
        self.budget = 1;
        self.reserve = budget - 1;
        branch::start(self, first);
        self.dispatch(first);
        self.budget += budget - 1;
        self.reserve = 0;
        self.slice = slice;
        self.update_stamp();
        if matches!(self.why, Leave::Lookup | Leave::Budget) {
            self.link_from = std::ptr::null();
        }
    }

    /// Delivers a fault, or turns it into an exit.
    fn fault(&mut self, fault: Fault) -> Outcome {
        self.leave = false;
        self.why = Leave::Poll;
        if self.in_region() && fault != Fault::Repeat {
            return self.fault_in_region(fault).map(|()| None);
        }
        match fault {
            Fault::Missing => return Ok(Some(self.missing())),
            Fault::Shutdown => return Err(Shutdown),
            Fault::Repeat => {
                // Not retired: it goes on after whatever pends was seen to.
                self.fl |= RF;
                // An iteration is no branch (rule BTF-11).
                let tf = self.tf() && !self.rec.observe.step_on_branch;
                self.after_instruction(tf);
                return Ok(None);
            }
            _ => {}
        }
        self.hits = 0;
        self.stops.hit = None;
        self.st.events.deferred_db = 0;
        self.deliver_fault(fault)?;
        Ok(None)
    }

    fn missing(&mut self) -> Exit {
        let mut bytes = [0; 15];
        let lin = self.code_lin(self.rip);
        if let Ok(gpa) = self.translate_code(lin) {
            let len = Self::page_rest(lin).min(15);
            self.get_phys(gpa, &mut bytes[..len]);
            self.leave = false;
        }
        Exit::Missing {
            bytes,
            rip: self.rip,
        }
    }

    /// The block at RIP, if the jump cache has it.
    fn known(&mut self) -> Option<Next> {
        let first = self.cache.jump(self.rip, self.ctx)?;
        if crate::block::count(first) == DEAD {
            return None;
        }
        let from = std::mem::replace(&mut self.link_from, std::ptr::null());
        if !from.is_null() {
            // SAFETY: nothing was freed since the branch left its block.
            unsafe { (*from).link.set(first) };
        }
        Some(first)
    }

    /// The block at RIP, from the cache or decoded.
    fn find(&mut self, exact: bool) -> Result<Next, Fault> {
        let rip = self.rip;
        let from = std::mem::replace(&mut self.link_from, std::ptr::null());
        let epoch = self.cache.epoch;
        self.cache.lookups += 1;
        self.cache.tidy();
        let lin = self.code_lin(rip);
        if self.code != 8 && rip > self.cs().limit.into() {
            return Err(crate::core::GP0);
        }
        let gpa = self.translate_code(lin)?;
        let key = self.block_key() | if exact { EXACT } else { 0 };
        let memory = &self.memory;
        self.cache
            .recheck(gpa, key, |gpa, bytes| memory.read(gpa, bytes));
        let known = self
            .cache
            .find(gpa, key)
            .map(|b| (b.first(), b.second, b.len));
        let mut first = None;
        if let Some((op, second, len)) = known {
            let end = rip.wrapping_add(u64::from(len) - 1);
            let within = self.code == 8 || end <= self.cs().limit.into();
            let same = match second {
                None => true,
                Some(page) => {
                    let next = lin.wrapping_add(Self::page_rest(lin) as u64) & self.ip_mask;
                    self.translate_code(next)? == page
                }
            };
            if within && same {
                first = Some(op);
            }
        }
        let first = match first {
            Some(first) => first,
            None => self.decode(rip, gpa, exact)?,
        };
        if !exact {
            let limited = self.code != 8 && self.cs().limit != u32::MAX;
            let split = self.stops.splits(lin);
            if !limited && !split {
                self.cache.set_jump(rip, self.ctx, first);
            }
            if !from.is_null() && !split && epoch == self.cache.epoch {
                // SAFETY: the branch is in a block that was not freed: the epoch is the same.
                unsafe { (*from).link.set(first) };
            }
        }
        Ok(first)
    }

    /// Executes operations until one leaves. [`slot::BLOCK_RIP`] and the budget are set.
    fn dispatch(&mut self, first: Next) {
        let exit: Next = std::ptr::from_ref(&*self.exit_op);
        self.leave = false;
        let mut op = first;
        debug_assert_eq!(self.reg(slot::BLOCK_RIP), self.rip);
        while op != exit {
            // Handlers follow each other by themselves: mostly, one call gets to the end.
            op = crate::op::run(self, op);
        }
    }
}
