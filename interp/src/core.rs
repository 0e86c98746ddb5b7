//! The live state of one virtual processor, and the small things every handler uses.

#![expect(
    unsafe_code,
    reason = "the platform is reached through a pointer that outlives the run"
)]
#![expect(
    clippy::cast_possible_truncation,
    reason = "registers are cut to the operand width"
)]

use crate::block::Cache;
use crate::counting::Counters;
use crate::decode::Features;
use crate::flags::{AC, ARITH, Flags, IF, RF, TF, VM};
use crate::memory::Memory;
use crate::op::{HIGH, Next, Op, slot};
use crate::platform::Platform;
use crate::portable::Functions;
use crate::recording::Recording;
use crate::stops::Armed;
use crate::thunk::{Thunks, Vectors};
use crate::tlb::{First, Set, Tlb};
use crate::transaction::Region;
use crate::word::Word;
use hindsight_cpu::state::{CpuState, Segment, seg};
use hindsight_cpu::transaction::AbortCause as Cause;
use std::ptr::NonNull;
use std::sync::Arc;

pub(crate) const CR0_PE: u64 = 1;
pub(crate) const CR0_MP: u64 = 1 << 1;
pub(crate) const CR0_EM: u64 = 1 << 2;
pub(crate) const CR0_TS: u64 = 1 << 3;
pub(crate) const CR0_ET: u64 = 1 << 4;
pub(crate) const CR0_WP: u64 = 1 << 16;
pub(crate) const CR0_AM: u64 = 1 << 18;
pub(crate) const CR0_PG: u64 = 1 << 31;
pub(crate) const CR4_VME: u64 = 1;
pub(crate) const CR4_PVI: u64 = 1 << 1;
pub(crate) const CR4_TSD: u64 = 1 << 2;
pub(crate) const CR4_DE: u64 = 1 << 3;
pub(crate) const CR4_PSE: u64 = 1 << 4;
pub(crate) const CR4_PAE: u64 = 1 << 5;
pub(crate) const CR4_PGE: u64 = 1 << 7;
pub(crate) const CR4_PCE: u64 = 1 << 8;
pub(crate) const CR4_OSFXSR: u64 = 1 << 9;
pub(crate) const CR4_UMIP: u64 = 1 << 11;
pub(crate) const CR4_FSGSBASE: u64 = 1 << 16;
pub(crate) const CR4_PCIDE: u64 = 1 << 17;
pub(crate) const CR4_OSXSAVE: u64 = 1 << 18;
pub(crate) const CR4_SMEP: u64 = 1 << 20;
pub(crate) const CR4_SMAP: u64 = 1 << 21;
pub(crate) const CR4_PKE: u64 = 1 << 22;
pub(crate) const EFER_SCE: u64 = 1;
pub(crate) const EFER_LME: u64 = 1 << 8;
pub(crate) const EFER_LMA: u64 = 1 << 10;
pub(crate) const EFER_NXE: u64 = 1 << 11;

pub(crate) const DE: u8 = 0;
pub(crate) const DB: u8 = 1;
pub(crate) const BP: u8 = 3;
pub(crate) const OFV: u8 = 4;
pub(crate) const BR: u8 = 5;
pub(crate) const UD: u8 = 6;
pub(crate) const NM: u8 = 7;
pub(crate) const DF: u8 = 8;
pub(crate) const TS: u8 = 10;
pub(crate) const NP: u8 = 11;
pub(crate) const SS: u8 = 12;
pub(crate) const GP: u8 = 13;
pub(crate) const PF: u8 = 14;
pub(crate) const MF: u8 = 16;
pub(crate) const ACV: u8 = 17;
pub(crate) const XM: u8 = 19;

/// Why an instruction did not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An exception without further data.
    Plain(u8),
    /// An exception with an error code.
    Code(u8, u32),
    /// A page fault: error code and CR2.
    Page(u32, u64),
    /// #DB of the fault class, with the DR6 bits to merge.
    Debug(u64),
    /// An instruction that the interpreter lacks.
    Missing,
    /// The string instruction stopped between two iterations; it goes on later.
    Repeat,
    /// The transaction aborts.
    Transaction(Cause),
    /// RSM met a save area that no processor can have left: the processor shuts down.
    Shutdown,
}

pub(crate) const GP0: Fault = Fault::Code(GP, 0);
pub(crate) const UD_: Fault = Fault::Plain(UD);

/// Why the dispatch loop was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The next block must be looked up.
    Lookup,
    /// The budget does not cover the next block, or the block is dead.
    Budget,
    /// The event state may have changed.
    Poll,
    /// [`Core::fault`] holds a fault.
    Fault,
    /// A software interrupt: vector and whether the gate's DPL counts.
    SoftInt(u8, SoftKind),
}

/// How a software interrupt was raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SoftKind {
    /// INT n.
    Int,
    /// INT3 and INTO.
    Trap,
    /// INT1.
    Icebp,
}

/// One virtual processor.
pub(crate) struct Core {
    /// General registers, then [`slot`]s.
    pub(crate) regs: [u64; 32],
    /// Instructions that may still be started.
    pub(crate) budget: i64,
    pub(crate) cc: Flags,
    pub(crate) rd: Tlb,
    pub(crate) wr: Tlb,
    pub(crate) ex: Tlb,
    /// The TLB set of explicit accesses.
    pub(crate) set: Set,
    /// Where the fast path looks for their pages: there, or where none is.
    pub(crate) first: First,
    /// Where locked accesses look for theirs.
    pub(crate) locked: First,
    /// Where the DS mechanism looks for its own.
    pub(crate) ds: First,
    /// Context of the jump cache: generation, mode and privilege.
    pub(crate) ctx: u64,
    /// All ones in 64-bit mode, else 32 ones.
    pub(crate) ip_mask: u64,
    pub(crate) stack_mask: u64,
    /// The segments that leave nothing to check but the end of 4 GiB, a bit for each: see
    /// [`crate::seg::is_open`].
    pub(crate) open: u8,
    /// RFLAGS without the arithmetic flags.
    pub(crate) fl: u64,
    /// Valid between blocks.
    pub(crate) rip: u64,
    /// [`Op::left`] of the general operation that runs.
    pub(crate) left: u8,
    /// The block must be left after this operation.
    pub(crate) leave: bool,
    pub(crate) why: Leave,
    pub(crate) fault: Fault,
    /// Code size in bytes: 2, 4 or 8.
    pub(crate) code: u8,
    pub(crate) cpl: u8,
    /// CR0.PE set and not virtual-8086.
    pub(crate) prot: bool,
    /// An unlinked direct branch that left the block.
    pub(crate) link_from: Next,
    pub(crate) exit_op: Box<Op>,
    pub(crate) cache: Cache,
    pub(crate) rec: Recording,
    pub(crate) counters: Counters,
    /// Everything that is not above; the fields above overrule it while running.
    pub(crate) st: CpuState,
    pub(crate) vec: Box<Vectors>,
    pub(crate) thunks: Thunks,
    pub(crate) features: Features,
    /// Nothing may depend on the host's processor: see [`crate::portable`].
    pub(crate) portable: bool,
    pub(crate) functions: Option<Functions>,
    pub(crate) memory: Arc<Memory>,
    /// Data breakpoints hit by the instruction that runs: DR6 bits.
    pub(crate) hits: u64,
    /// Single-step and breakpoint traps to deliver at the boundary: DR6 bits.
    pub(crate) trap: u64,
    /// A trap waits even if `trap` is 0.
    pub(crate) trap_pending: bool,
    pub(crate) watching: bool,
    /// The first and the last byte of all that is.
    pub(crate) watched: (u64, u64),
    /// What a debugger outside the machine stops for.
    pub(crate) stops: Armed,
    /// RIP of the last software interrupt.
    pub(crate) soft_rip: u64,
    /// Its operation.
    pub(crate) soft_op: Next,
    /// The REP instruction stopped between iterations.
    pub(crate) repeat: bool,
    /// No single step follows the instruction, whatever TF was at its start: SYSCALL that clears TF (rule TF-09),
    /// and a switch of tasks (TF-22).
    pub(crate) no_step: bool,
    /// Retired instructions before the current slice.
    pub(crate) retired_base: u64,
    /// Budget at the start of the slice.
    pub(crate) slice: i64,
    /// Cycles of the slice that retired nothing: iterations of repeated string instructions.
    pub(crate) extra: i64,
    /// Such cycles before the current slice.
    pub(crate) extra_base: u64,
    /// Budget kept from an instruction that is executed alone.
    pub(crate) reserve: i64,
    /// Instructions that may be started after the slice.
    pub(crate) beyond: i64,
    /// The processor's transaction.
    pub(crate) region: Region,
    /// Some processor has a transaction open: every access asks for it.
    pub(crate) careful: bool,
    /// Translations were invalidated since somebody asked last.
    pub(crate) flushed: bool,
    pub(crate) phys_mask: u64,
    pub(crate) generation: u64,
    /// Our bit in [`Memory`]'s page marks.
    pub(crate) who: u64,
    pub(crate) seen_log: u64,
    pub(crate) seen_epoch: u64,
    /// Counts of slow events, for statistics.
    pub(crate) tlb_fills: u64,
    pub(crate) platform: Option<NonNull<dyn Platform>>,
}

// SAFETY: the raw pointers inside (blocks, exit operation) point to memory the value owns; the
// platform pointer is only set during `Vcpu::run`, on the running thread.
unsafe impl Send for Core {}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("rip", &self.rip)
            .finish_non_exhaustive()
    }
}

fn exit_op(_: &mut Core, op: &Op) -> Next {
    std::ptr::from_ref(op)
}

impl Core {
    pub(crate) fn new(memory: Arc<Memory>) -> Self {
        let mut core = Self {
            regs: [0; 32],
            budget: 0,
            cc: Flags::default(),
            rd: Tlb::new(),
            wr: Tlb::new(),
            ex: Tlb::new(),
            set: Set::Supervisor,
            first: Set::Supervisor.first(),
            locked: Set::Supervisor.first(),
            ds: Set::SupervisorAc.first(),
            ctx: 0,
            ip_mask: 0,
            stack_mask: 0,
            open: 0,
            fl: 2,
            rip: 0,
            left: 0,
            leave: false,
            why: Leave::Poll,
            fault: Fault::Missing,
            code: 2,
            cpl: 0,
            prot: false,
            link_from: std::ptr::null(),
            exit_op: Box::new(Op::new(exit_op)),
            cache: Cache::new(),
            rec: Recording::new(),
            counters: Counters::new(),
            st: CpuState::reset(),
            vec: Box::default(),
            thunks: Thunks::default(),
            features: Features::none(),
            portable: false,
            functions: None,
            hits: 0,
            trap: 0,
            trap_pending: false,
            watching: false,
            watched: (u64::MAX, 0),
            stops: Armed::new(),
            soft_rip: 0,
            soft_op: std::ptr::null(),
            repeat: false,
            no_step: false,
            retired_base: 0,
            slice: 0,
            extra: 0,
            extra_base: 0,
            reserve: 0,
            beyond: 0,
            region: Region::new(memory.shared.join()),
            careful: false,
            flushed: false,
            phys_mask: (1 << 46) - 1,
            generation: 1,
            who: memory.join(),
            seen_log: memory.log_len(),
            seen_epoch: memory.code_epoch(),
            tlb_fills: 0,
            memory,
            platform: None,
        };
        core.load(&CpuState::reset());
        core
    }

    /// Takes over a whole state.
    pub(crate) fn load(&mut self, st: &CpuState) {
        self.drop_region();
        self.st = st.clone();
        self.regs[..16].copy_from_slice(&st.gpr);
        self.rip = st.rip;
        self.cpl = st.cpl();
        self.set_rflags(st.rflags);
        self.vec.load(&st.xsave);
        self.trap = 0;
        self.trap_pending = false;
        self.repeat = false;
        self.flush_tlb();
        self.update_debug();
        self.update_mode();
    }

    /// Gives the whole state.
    pub(crate) fn store(&mut self, st: &mut CpuState) {
        self.sync_state();
        st.clone_from(&self.st);
        self.vec.store(&mut st.xsave);
        if self.trap_pending {
            st.events.exception = Some(hindsight_cpu::state::PendingException {
                vector: DB,
                error_code: None,
                payload: Some(self.trap),
            });
        }
    }

    /// Brings registers, RIP and flags of [`Core::st`] up to date.
    pub(crate) fn sync_state(&mut self) {
        self.st.gpr.copy_from_slice(&self.regs[..16]);
        self.st.rip = self.rip;
        self.st.rflags = self.rflags();
    }

    pub(crate) fn rflags(&self) -> u64 {
        self.fl | self.cc.bits()
    }

    pub(crate) fn set_rflags(&mut self, v: u64) {
        self.cc = Flags::explicit(v);
        self.fl = (v & !ARITH & 0x3f_7fd7) | 2;
    }

    pub(crate) fn flag(&self, mask: u64) -> bool {
        self.fl & mask != 0
    }

    pub(crate) fn v86(&self) -> bool {
        self.fl & VM != 0
    }

    pub(crate) fn lma(&self) -> bool {
        self.st.efer & EFER_LMA != 0
    }

    pub(crate) fn iopl(&self) -> u8 {
        (self.fl >> 12 & 3) as u8
    }

    pub(crate) fn cr0(&self, mask: u64) -> bool {
        self.st.cr0 & mask != 0
    }

    pub(crate) fn cr4(&self, mask: u64) -> bool {
        self.st.cr4 & mask != 0
    }

    /// Recomputes all that depends on CS, SS, CR0, EFER, CPL and EFLAGS.VM.
    pub(crate) fn update_mode(&mut self) {
        let cs = self.st.seg[seg::CS];
        self.prot = self.cr0(CR0_PE) && !self.v86();
        self.code = match (self.lma() && cs.long(), cs.default_big()) {
            (true, _) => 8,
            (_, true) => 4,
            _ => 2,
        };
        let wide = self.code == 8;
        self.ip_mask = if wide { u64::MAX } else { 0xffff_ffff };
        self.stack_mask = match (wide, self.st.seg[seg::SS].default_big()) {
            (true, _) => u64::MAX,
            (_, true) => 0xffff_ffff,
            _ => 0xffff,
        };
        self.open = 0;
        for i in 0..6 {
            let zero = wide && i < seg::FS;
            self.open |= u8::from(crate::seg::is_open(self.st.seg[i])) << i;
            self.regs[slot::SEG_BASE as usize + i] = if zero { 0 } else { self.st.seg[i].base };
        }
        self.update_set();
        self.update_ctx();
    }

    /// Recomputes the TLB set: after changes of CPL, EFLAGS.AC, CR0.AM.
    pub(crate) fn update_set(&mut self) {
        self.update_levels();
        let ac = self.flag(AC);
        let set = match self.cpl {
            3 if ac && self.cr0(CR0_AM) => Set::Never,
            3 => Set::User,
            _ if ac && self.cr4(CR4_SMAP) => Set::SupervisorAc,
            _ => Set::Supervisor,
        };
        let seen = self.counters.tells_accesses();
        let unless = |slow: bool, set: Set| if slow { Set::Never } else { set }.first();
        self.set = set;
        // Where every access is to be seen, no fast path finds its page.
        self.first = unless(seen || self.careful, set);
        self.locked = unless(self.careful, set);
        self.ds = unless(self.careful, Set::SupervisorAc);
        self.rec.aim_lost();
    }

    pub(crate) fn update_ctx(&mut self) {
        let user = u64::from(self.cpl == 3) << 7;
        self.ctx = self.generation << 8 | user | u64::from(self.block_key());
    }

    /// What besides its bytes decides how code is decoded.
    pub(crate) fn block_key(&self) -> u8 {
        let limited = self.code != 8 && self.st.seg[seg::CS].limit != u32::MAX;
        let observed = self.rec.observe.needs_branches();
        // Code sizes are 2, 4 and 8, so that a second bit beside that of 4 tells a fifth mode.
        let code = self.code | u8::from(self.opens_memory()) << 3;
        u8::from(self.in_region()) | code | u8::from(limited) << 4 | u8::from(observed) << 5
    }

    /// In 32-bit code: DS, ES and SS are all [open](crate::seg::is_open).
    pub(crate) fn opens_memory(&self) -> bool {
        const USUAL: u8 = 1 << seg::DS | 1 << seg::ES | 1 << seg::SS;
        self.code == 4 && self.open & USUAL == USUAL
    }

    /// Forgets all translations.
    pub(crate) fn flush_tlb(&mut self) {
        self.flushed = true;
        self.rd.flush();
        self.wr.flush();
        self.ex.flush();
        self.new_context();
    }

    /// Forgets the translations that a load of CR3 invalidates: all but those of global pages.
    pub(crate) fn flush_local_tlb(&mut self) {
        self.flushed = true;
        self.rd.flush_locals();
        self.wr.flush_locals();
        self.ex.flush_locals();
        self.new_context();
    }

    /// Forgets which code is behind which RIP.
    pub(crate) fn new_context(&mut self) {
        self.generation += 1;
        self.update_ctx();
    }

    #[inline(always)]
    pub(crate) fn reg(&self, i: u8) -> u64 {
        *self.place(i)
    }

    /// A register by its number in an operation.
    #[inline(always)]
    fn place(&self, i: u8) -> &u64 {
        debug_assert!(i < 32);
        // SAFETY: the decoder gives numbers below 32, or with `HIGH` for operands of a byte, which mask it.
        unsafe { self.regs.get_unchecked(i as usize) }
    }

    #[inline(always)]
    fn place_mut(&mut self, i: u8) -> &mut u64 {
        debug_assert!(i < 32);
        // SAFETY: as in `place`.
        unsafe { self.regs.get_unchecked_mut(i as usize) }
    }

    #[inline(always)]
    pub(crate) fn set_reg(&mut self, i: u8, v: u64) {
        *self.place_mut(i) = v;
    }

    /// A register operand of width `T`.
    #[inline(always)]
    pub(crate) fn get<T: Word>(&self, i: u8) -> T {
        if T::HIGH {
            T::from_u64(self.reg(i & !HIGH) >> (u32::from(i & HIGH) >> 2))
        } else {
            T::from_u64(self.reg(i))
        }
    }

    /// Writes a register operand of width `T`.
    #[inline(always)]
    pub(crate) fn put<T: Word>(&mut self, i: u8, v: T) {
        if T::HIGH && i & HIGH != 0 {
            let reg = self.place_mut(i & !HIGH);
            *reg = (*reg & !0xff00) | v.zext() << 8;
        } else {
            let reg = self.place_mut(i);
            *reg = v.merge(*reg);
        }
    }

    /// A register operand of `size` bytes, zero-extended.
    pub(crate) fn get_sized(&self, i: u8, size: u8) -> u64 {
        match size {
            1 => self.get::<u8>(i).zext(),
            2 => self.get::<u16>(i).zext(),
            4 => self.get::<u32>(i).zext(),
            _ => self.reg(i),
        }
    }

    /// Writes a register operand of `size` bytes.
    pub(crate) fn put_sized(&mut self, i: u8, size: u8, v: u64) {
        match size {
            1 => self.put(i, v as u8),
            2 => self.put(i, v as u16),
            4 => self.put(i, v as u32),
            _ => self.set_reg(i, v),
        }
    }

    /// The linear address of a memory operand in 64-bit mode with 64-bit addresses.
    #[inline(always)]
    pub(crate) fn ea64(&self, op: &Op) -> u64 {
        self.reg(op.base)
            .wrapping_add(self.reg(op.index) << (op.scale & 3))
            .wrapping_add(op.disp)
            .wrapping_add(self.reg(slot::SEG_BASE + op.seg))
    }

    /// The offset of a memory operand in any mode.
    pub(crate) fn offset(&self, op: &Op) -> u64 {
        let ea = self
            .reg(op.base)
            .wrapping_add(self.reg(op.index) << (op.scale & 3))
            .wrapping_add(op.disp);
        cut(ea, op.asz)
    }

    /// RIP of an operation.
    #[inline(always)]
    pub(crate) fn rip_of(&self, op: &Op) -> u64 {
        self.reg(slot::BLOCK_RIP).wrapping_add(u64::from(op.at)) & self.ip_mask
    }

    /// RIP of an operation in 64-bit mode.
    #[inline(always)]
    pub(crate) fn rip64_of(&self, op: &Op) -> u64 {
        self.reg(slot::BLOCK_RIP).wrapping_add(u64::from(op.at))
    }

    /// RIP of the instruction after an operation.
    #[inline(always)]
    pub(crate) fn rip_after(&self, op: &Op) -> u64 {
        self.reg(slot::BLOCK_RIP)
            .wrapping_add(u64::from(op.at))
            .wrapping_add(u64::from(op.len))
            & self.ip_mask
    }

    /// Leaves the dispatch loop.
    #[inline(always)]
    pub(crate) fn exit(&mut self, why: Leave) -> Next {
        self.why = why;
        std::ptr::from_ref(&*self.exit_op)
    }

    /// Ends a block at `op` with a fault.
    #[cold]
    #[inline(never)]
    pub(crate) fn fault_at(&mut self, op: &Op, fault: Fault) -> Next {
        self.rip = self.rip_of(op);
        self.cache.mix.ended(op, false);
        self.budget += i64::from(op.left);
        self.left = 0;
        self.fault = fault;
        self.exit(Leave::Fault)
    }

    /// Ends a block after `op`, which completed.
    #[cold]
    #[inline(never)]
    pub(crate) fn leave_after(&mut self, op: &Op) -> Next {
        self.leave = false;
        self.rip = self.rip_after(op);
        if op.left > 1 {
            self.cache.mix.ended(op, true);
        }
        self.budget += i64::from(op.left.saturating_sub(1));
        self.left = 0;
        self.exit(Leave::Poll)
    }

    /// Retired instructions, not counting the one that runs.
    pub(crate) fn retired(&self) -> u64 {
        self.retired_base.wrapping_add(self.used())
    }

    /// Instructions retired in the current slice, not counting the one that runs.
    fn used(&self) -> u64 {
        let used = (self.slice - self.budget - i64::from(self.left) - self.extra).max(0);
        used.cast_unsigned()
    }

    /// Core cycles so far: one for each retired instruction, and one for each iteration of a repeated
    /// string instruction beyond its first.
    pub(crate) fn cycles(&self) -> u64 {
        let extra = self.extra_base.wrapping_add_signed(self.extra);
        self.retired().wrapping_add(extra)
    }

    /// The machine around, told the time.
    pub(crate) fn platform(&mut self) -> &mut dyn Platform {
        self.platform_and_recording().0
    }

    /// The machine around, told the time, and what was noted for it.
    pub(crate) fn platform_and_recording(&mut self) -> (&mut dyn Platform, &mut Recording) {
        let (count, cycles) = (self.retired(), self.cycles());
        let user = self.counters.user(self.used());
        let Some(mut platform) = self.platform else {
            unreachable!("handlers only run inside Vcpu::run, which sets the platform");
        };
        // SAFETY: set by `Vcpu::run` from a live unique reference and cleared before it returns;
        // handlers only run in between, and no handler keeps the reference.
        let platform = unsafe { platform.as_mut() };
        platform.retired(count, user, cycles);
        (platform, &mut self.rec)
    }

    /// The stack pointer as the current stack size shows it.
    pub(crate) fn sp(&self) -> u64 {
        self.regs[4] & self.stack_mask
    }

    pub(crate) fn set_sp(&mut self, v: u64) {
        self.regs[4] = match self.stack_mask {
            0xffff => (v & 0xffff) | (self.regs[4] & !0xffff),
            mask => v & mask,
        };
    }

    /// An interrupt may be taken as far as the flags go.
    pub(crate) fn interrupts_on(&self) -> bool {
        self.flag(IF)
    }

    /// Something needs one instruction at a time.
    pub(crate) fn needs_exact(&self) -> bool {
        let e = &self.st.events;
        self.fl & (TF | RF) != 0
            || e.mov_ss_shadow
            || e.sti_shadow
            || self.exec_breakpoints()
            || self.counters.tells_accesses()
    }

    pub(crate) fn cs(&self) -> Segment {
        self.st.seg[seg::CS]
    }
}

/// The low `size` bytes.
pub(crate) fn cut(v: u64, size: u8) -> u64 {
    match size {
        1 => v & 0xff,
        2 => v & 0xffff,
        4 => v & 0xffff_ffff,
        _ => v,
    }
}
