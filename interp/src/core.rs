//! The live state of one virtual processor, and how its parts depend on each other.

use crate::branch_buffer::BranchBuffer;
use crate::code::CodeCache;
use crate::counters::Counters;
use crate::debug_state::DebugState;
use crate::exit::ExitState;
use crate::fault::{ExitReason, Fault};
use crate::features::Features;
use crate::jit::Jit;
use crate::memory::{Memory, MemoryHandle};
use crate::mmu::{Mmu, TlbSet};
use crate::mode::ExecutionMode;
use crate::platform::{Platform, RetiredCounts};
use crate::platform_slot::PlatformSlot;
use crate::portable::transcendental::Functions;
use crate::progress::Progress;
use crate::registers::{Reg, Registers};
use crate::thunk::cache::Thunks;
use crate::thunk::vectors::Vectors;
use crate::transaction::state::Transaction;
use hindsight_cpu::state::{CpuState, PendingException, Segment, seg};
use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;
use std::sync::Arc;

/// An operation of this processor.
pub(crate) type Op = crate::code::Op<Core>;
/// An operation that is not the last of its block.
pub(crate) type InnerOp<'b> = crate::code::InnerOp<'b, Core>;
/// The last operation of a block.
pub(crate) type LastOp<'b> = crate::code::LastOp<'b, Core>;
/// The result of a handler.
pub(crate) type Next = crate::code::Next<Core>;
/// How an operation is executed.
pub(crate) type Handler = crate::code::Handler<Core>;
/// Executes an operation that is not the last of its block.
pub(crate) type InnerHandler = crate::code::InnerHandler<Core>;
/// Executes the last operation of a block.
pub(crate) type LastHandler = crate::code::LastHandler<Core>;

/// One virtual processor.
///
/// The parts that handlers use most come first.
#[repr(C)]
pub(crate) struct Core {
    /// General registers, RIP, RFLAGS.
    pub(crate) regs: Registers,
    /// Budget and counts of the current slice.
    pub(crate) progress: Progress,
    /// CPL, code size and other state derived from the segment and control registers.
    pub(crate) mode: ExecutionMode,
    /// Why and how the dispatch loop is left.
    pub(crate) exit: ExitState,
    /// The TLBs.
    pub(crate) mmu: Mmu,
    /// Decoded blocks.
    pub(crate) code: CodeCache<Self>,
    /// The number of times that a block is entered before it is translated.
    pub(crate) hot_after: u64,
    /// Translated code.
    pub(crate) jit: Jit,
    /// Branches that have not been reported to the platform.
    pub(crate) branches: BranchBuffer,
    /// Data for performance counters, besides retired instructions.
    pub(crate) counters: Counters,
    /// Breakpoints and traps.
    pub(crate) debug: DebugState,
    /// The processor's transaction.
    pub(crate) transaction: Transaction,
    /// Whether a transaction is open: every access is then checked for conflicts.
    pub(crate) checks_conflicts: bool,
    /// The rest of the architectural state.
    ///
    /// While the guest runs, the other parts take precedence over it.
    pub(crate) state: CpuState,
    /// Vector and x87 registers.
    pub(crate) vec: Box<Vectors>,
    /// Whether FERR# may be asserted.
    pub(crate) ferr: bool,
    /// Thunks, which execute instructions on the host.
    pub(crate) thunks: Thunks,
    /// Instruction-set extensions that CPUID reports.
    pub(crate) features: Features,
    /// Whether results must be the same on every host: see [`crate::portable`].
    pub(crate) portable: bool,
    /// Transcendental functions in software, if results must be portable.
    pub(crate) functions: Option<Functions>,
    /// Guest memory.
    pub(crate) memory: MemoryHandle,
    platform: PlatformSlot,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("rip", &self.regs.rip)
            .finish_non_exhaustive()
    }
}

impl Core {
    /// Creates a processor in its state after RESET.
    pub(crate) fn new(memory: Arc<Memory>) -> Self {
        let mut core = Self {
            regs: Registers::new(),
            progress: Progress::new(),
            mode: ExecutionMode::new(),
            exit: ExitState::new(),
            mmu: Mmu::new(),
            code: CodeCache::new(),
            hot_after: Jit::HOT_AFTER,
            jit: Jit::default(),
            branches: BranchBuffer::new(),
            counters: Counters::new(),
            debug: DebugState::new(),
            transaction: Transaction::new(memory.shared.add_processor()),
            checks_conflicts: false,
            state: CpuState::reset(),
            vec: Box::default(),
            ferr: false,
            thunks: Thunks::default(),
            features: Features::none(),
            portable: false,
            functions: None,
            memory: MemoryHandle::new(memory),
            platform: PlatformSlot::new(),
        };
        core.load(&CpuState::reset());
        core
    }

    /// Replaces the whole architectural state.
    pub(crate) fn load(&mut self, state: &CpuState) {
        self.drop_transaction();
        self.state = state.clone();
        self.regs.general_mut().copy_from_slice(&state.gpr);
        self.regs.rip = state.rip;
        self.mode.set_cpl(state.cpl());
        self.regs.set_rflags(Rflags::from_bits_retain(state.rflags));
        self.vec.load(&state.xsave);
        // The platform knows the level of FERR#; the next x87 instruction reports it.
        self.ferr = true;
        self.debug.clear_trap();
        self.flush_tlb();
        self.jit.forget_lines();
        self.update_debug();
        self.update_mode();
    }

    /// Stores the whole architectural state.
    pub(crate) fn store(&mut self, state: &mut CpuState) {
        self.sync_state();
        state.clone_from(&self.state);
        self.vec.store(&mut state.xsave);
        if let Some(bits) = self.debug.pending_trap() {
            state.events.exception = Some(PendingException {
                vector: Vector::DB.0,
                error_code: None,
                payload: Some(bits),
            });
        }
    }

    /// Updates registers, RIP and RFLAGS of [`Core::state`].
    fn sync_state(&mut self) {
        self.state.gpr.copy_from_slice(self.regs.general());
        self.state.rip = self.regs.rip;
        self.state.rflags = self.regs.rflags().bits();
    }

    /// Whether any of these bits of IA32_EFER is set.
    pub(crate) fn efer(&self, bits: Efer) -> bool {
        self.state.efer & bits.bits() != 0
    }

    /// Whether IA-32e mode is active.
    pub(crate) fn lma(&self) -> bool {
        self.efer(Efer::LMA)
    }

    /// Whether any of these bits of CR0 is set.
    pub(crate) fn cr0(&self, bits: Cr0) -> bool {
        self.state.cr0 & bits.bits() != 0
    }

    /// Whether any of these bits of CR4 is set.
    pub(crate) fn cr4(&self, bits: Cr4) -> bool {
        self.state.cr4 & bits.bits() != 0
    }

    /// Segment register CS.
    pub(crate) fn cs(&self) -> Segment {
        self.state.seg[seg::CS]
    }

    /// Updates the mode after a change of CS, SS, segment bases, CR0, EFER, CPL or VM.
    pub(crate) fn update_mode(&mut self) {
        self.mode.update(&self.state, self.regs.v86());
        for i in 0..6 {
            let flat = self.mode.is_64bit() && i < seg::FS;
            let base = if flat { 0 } else { self.state.seg[i].base };
            self.regs.set(Reg::segment_base(i), base);
        }
        self.update_rights();
        self.update_context();
    }

    /// Updates the access rights after a change of CPL, RFLAGS.AC, CR0.AM or CR4.SMAP.
    ///
    /// Also called when what observes accesses has changed.
    pub(crate) fn update_rights(&mut self) {
        let ac = self.regs.flag(Rflags::AC);
        let cpl = self.mode.cpl();
        let rights = match cpl {
            3 if ac && self.cr0(Cr0::AM) => TlbSet::UserAligned,
            3 => TlbSet::User,
            _ if ac && self.cr4(Cr4::SMAP) => TlbSet::SupervisorNoSmap,
            _ => TlbSet::Supervisor,
        };
        let every_access = self.counters.counts_accesses();
        self.mmu
            .set_rights(rights, every_access, self.checks_conflicts);
        self.branches.set_cpl(cpl);
        self.branches.forget_bts_target();
    }

    /// Updates the context of the jump cache after a change of [`Core::block_key`].
    pub(crate) fn update_context(&mut self) {
        let user = self.mode.cpl() == 3;
        self.code.set_context(self.block_key(), user);
    }

    /// Returns the state that determines how code is decoded; bit 6 is free.
    pub(crate) fn block_key(&self) -> u8 {
        // Code sizes are 2, 4 and 8. Another bit beside that of 4 marks the flat 32-bit mode.
        let code = self.mode.code_size() | u8::from(self.mode.is_flat_32bit()) << 3;
        u8::from(self.in_transaction())
            | code
            | u8::from(self.is_code_limited()) << 4
            | u8::from(self.branches.records()) << 5
    }

    /// Whether the limit of CS must be checked.
    pub(crate) fn is_code_limited(&self) -> bool {
        !self.mode.is_64bit() && self.cs().limit != u32::MAX
    }

    /// The current process-context identifier.
    pub(crate) fn pcid(&self) -> u16 {
        if self.cr4(Cr4::PCIDE) {
            (self.state.cr3 & 0xfff) as u16
        } else {
            0
        }
    }

    /// Flushes all translations from the TLBs.
    pub(crate) fn flush_tlb(&mut self) {
        self.mmu.flush(self.pcid());
        self.new_code_context();
    }

    /// Flushes the translations of all process contexts, but not global ones.
    pub(crate) fn flush_local_tlb(&mut self) {
        self.mmu.flush_locals(self.pcid());
        self.new_code_context();
    }

    /// Makes the process context of CR3 current.
    ///
    /// Flushes its translations but global ones, unless `keep`.
    pub(crate) fn load_context(&mut self, keep: bool) {
        let change = self.mmu.load_context(self.pcid(), keep);
        self.update_rights();
        self.code.select_context(change.index, change.keeps);
        self.update_context();
    }

    /// INVLPG.
    pub(crate) fn invalidate_page(&mut self, lin: u64) {
        let large = self.mmu.evict(lin);
        if large {
            self.new_code_context();
        } else {
            self.code.forget_jumps(lin);
        }
        self.jit.evict(lin, large);
    }

    /// Invalidates what is known about which code is at which RIP.
    pub(crate) fn new_code_context(&mut self) {
        self.code.new_generation();
        self.update_context();
    }

    /// The linear address of a memory operand in 64-bit mode with 64-bit addresses.
    #[inline(always)]
    pub(crate) fn ea64(&self, op: &Op) -> u64 {
        self.regs
            .get(op.base)
            .wrapping_add(self.regs.get(op.index) << (op.scale & 3))
            .wrapping_add(op.disp)
            .wrapping_add(self.regs.get(op.seg_base))
    }

    /// The offset of a memory operand in any mode.
    pub(crate) fn offset(&self, op: &Op) -> u64 {
        let ea = self
            .regs
            .get(op.base)
            .wrapping_add(self.regs.get(op.index) << (op.scale & 3))
            .wrapping_add(op.disp);
        truncate(ea, op.address_size)
    }

    /// Returns RIP of an operation.
    #[inline(always)]
    pub(crate) fn rip_of(&self, op: &Op) -> u64 {
        self.rip64_of(op) & self.mode.ip_mask()
    }

    /// RIP of an operation in 64-bit mode.
    #[inline(always)]
    pub(crate) fn rip64_of(&self, op: &Op) -> u64 {
        self.regs
            .get(Reg::BlockRip)
            .wrapping_add(u64::from(op.offset))
    }

    /// RIP of the instruction after an operation.
    #[inline(always)]
    pub(crate) fn rip_after(&self, op: &Op) -> u64 {
        self.rip64_of(op).wrapping_add(u64::from(op.len)) & self.mode.ip_mask()
    }

    /// Leaves the dispatch loop.
    #[inline(always)]
    pub(crate) fn leave(&mut self, reason: ExitReason) -> Next {
        self.exit.reason = reason;
        Next::EXIT
    }

    /// Leaves the dispatch loop at `op`, which faulted.
    #[cold]
    #[inline(never)]
    pub(crate) fn fault_at(&mut self, op: &Op, fault: Fault) -> Next {
        if std::mem::take(&mut self.exit.switched_task) {
            // The instruction is complete, and RIP is that of the new task.
            self.progress.give_back(op.remaining.saturating_sub(1));
        } else {
            self.regs.rip = self.rip_of(op);
            self.code.mix.ended_early(op.id(), false);
            self.progress.give_back(op.remaining);
        }
        self.progress.end_operation();
        self.exit.fault = fault;
        self.leave(ExitReason::Fault)
    }

    /// Leaves the dispatch loop after `op`, which completed.
    #[cold]
    #[inline(never)]
    pub(crate) fn leave_after(&mut self, op: &Op) -> Next {
        self.exit.requested = false;
        self.regs.rip = self.rip_after(op);
        if op.remaining > 1 {
            self.code.mix.ended_early(op.id(), true);
        }
        self.progress.give_back(op.remaining.saturating_sub(1));
        self.progress.end_operation();
        self.leave(ExitReason::Poll)
    }

    /// Leaves the dispatch loop for a boundary.
    ///
    /// For an operation that has ended its block and set RIP.
    pub(crate) fn leave_at_boundary(&mut self) -> Next {
        self.exit.requested = false;
        self.progress.end_operation();
        self.leave(ExitReason::Poll)
    }

    /// Lends the platform to the processor while `f` runs.
    pub(crate) fn with_platform<R>(
        &mut self,
        platform: &mut dyn Platform,
        f: impl FnOnce(&mut Self) -> R,
    ) -> R {
        PlatformSlot::lend(self, |core| &mut core.platform, platform, f)
    }

    /// Returns the platform, after its clock and counts were advanced.
    ///
    /// Translated code has its own counts: while it runs, they stay as they are.
    pub(crate) fn platform(&mut self) -> &mut dyn Platform {
        self.platform_and_branches().0
    }

    /// Returns the platform, after its clock and counts were advanced, and the buffer.
    pub(crate) fn platform_and_branches(&mut self) -> (&mut dyn Platform, &mut BranchBuffer) {
        let counts = RetiredCounts {
            instructions: self.progress.retired(),
            user: self.counters.user(self.progress.retired_in_slice()),
            cycles: self.progress.cycles(),
        };
        debug_assert!(counts.user <= counts.instructions);
        let platform = self.platform.get();
        if !self.jit.in_unit {
            platform.advance(counts);
        }
        (platform, &mut self.branches)
    }

    /// Returns the stack pointer, truncated to the stack size.
    pub(crate) fn sp(&self) -> u64 {
        self.regs.get(Reg::Rsp) & self.mode.stack_mask()
    }

    /// Sets the low bits of the stack pointer, as many as the stack size has.
    pub(crate) fn set_sp(&mut self, v: u64) {
        self.set_sp_masked(v, self.mode.stack_mask());
    }

    /// Sets the bits of the stack pointer that are in the mask of its stack size.
    pub(crate) fn set_sp_masked(&mut self, v: u64, mask: u64) {
        let rsp = match mask {
            0xffff => (v & 0xffff) | (self.regs.get(Reg::Rsp) & !0xffff),
            mask => v & mask,
        };
        self.regs.set(Reg::Rsp, rsp);
    }

    /// Whether a pending virtual interrupt raises #GP before the next instruction.
    ///
    /// It is pending while virtual interrupts are enabled. SDM Vol. 3A, "Class 2—Maskable Hardware
    /// Interrupt Handling in Virtual-8086 Mode Using the Virtual Interrupt Mechanism" and
    /// "Protected-Mode Virtual Interrupts".
    pub(crate) fn has_virtual_interrupt(&self) -> bool {
        let both = Rflags::VIP | Rflags::VIF;
        let extension = if self.regs.v86() { Cr4::VME } else { Cr4::PVI };
        self.regs.system_flags().contains(both)
            && self.mode.cpl() == 3
            && self.regs.iopl() < 3
            && self.cr4(extension)
    }

    /// Whether instructions must be executed one at a time, on the exact path.
    pub(crate) fn needs_exact(&self) -> bool {
        self.needs_exact_events() || self.counters.counts_accesses()
    }

    /// Whether each instruction must be executed alone for another reason than its accesses.
    pub(crate) fn needs_exact_events(&self) -> bool {
        let events = &self.state.events;
        self.regs.flag(Rflags::TF | Rflags::RF)
            || self.has_virtual_interrupt()
            || events.mov_ss_shadow
            || events.sti_shadow
            || self.has_exec_breakpoints()
    }
}

/// Returns the low `size` bytes of a value.
pub(crate) fn truncate(v: u64, size: u8) -> u64 {
    match size {
        1 => v & 0xff,
        2 => v & 0xffff,
        4 => v & 0xffff_ffff,
        _ => v,
    }
}
