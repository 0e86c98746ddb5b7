//! The public interface of the interpreter.

use crate::core::Core;
use crate::features::Features;
use crate::memory::Memory;
use crate::platform::Platform;
use crate::registers::Reg;
use hindsight_cpu::stops::{StopConditions, StopHit};

use hindsight_cpu::armed::Armed;
use hindsight_cpu::state::CpuState;
use hindsight_regs::rflags::Rflags;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why [`Vcpu::run`] or [`Vcpu::step`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Exactly as many instructions as the budget allows have been executed.
    Budget,
    /// The processor executed HLT, or waits for a start-up IPI.
    ///
    /// No event is pending that would wake it. It may be run again at any time.
    Halted,
    /// A triple fault; the state is that before the last delivery.
    Shutdown,
    /// [`Kicker::kick`] was called.
    Kicked,
    /// [`crate::Pending::leave`] was set, or the guest does nothing but fault.
    ///
    /// In the latter case the handler of each exception raises the next one before its first
    /// instruction retires.
    Leave,
    /// A condition of [`Vcpu::set_stops`] was met.
    Stop(StopHit),
    /// [`Vcpu::step`] is complete; or, after [`Vcpu::stop_at_exceptions`], an exception was
    /// delivered.
    Stepped,
    /// The guest executed an instruction that the interpreter does not implement.
    Missing {
        /// The instruction's bytes, and what follows them in the page; the rest is 0.
        bytes: [u8; 15],
        /// RIP of the instruction.
        rip: u64,
    },
}

/// Makes [`Vcpu::run`] on another thread return soon.
#[derive(Clone, Debug, Default)]
pub struct Kicker(Arc<AtomicBool>);

impl Kicker {
    /// Makes the current run, or else the next one, return [`Exit::Kicked`].
    ///
    /// It returns within some microseconds.
    pub fn kick(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn take(&self) -> bool {
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Acquire)
    }
}

/// Statistics of a processor since [`Vcpu::new`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Stats {
    /// Retired instructions; a repeated string instruction counts once.
    pub retired: u64,
    /// Those that started at CPL 1 to 3.
    pub user: u64,
    /// Number of blocks decoded.
    pub blocks: u64,
    /// Lookups of blocks to which neither a link nor the jump cache led.
    pub lookups: u64,
    /// Number of times that all blocks were dropped.
    pub drops: u64,
    /// Number of entries made in the TLBs.
    pub tlb_fills: u64,
    /// Retired instructions in translated code.
    pub translated: u64,
    /// Units of translated code that were made.
    pub units: u64,
    /// Current size of translated code in bytes.
    pub translated_bytes: u64,
    /// Number of times that all translated code was dropped.
    pub evictions: u64,
    /// How often translated code was left.
    pub unit_exits: UnitExits,
}

/// How often translated code was left, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct UnitExits {
    /// Before an instruction that the interpreter executes.
    pub instructions: u64,
    /// At a direct branch to code that is not translated.
    pub edges: u64,
    /// At a branch to another page whose target the jump cache does not have.
    pub jumps: u64,
    /// At the end of a slice.
    pub slices: u64,
    /// To process recorded branches.
    pub branches: u64,
}

/// One virtual processor, run by the interpreter.
#[derive(Debug)]
pub struct Vcpu {
    core: Box<Core>,
    kicker: Kicker,
    /// Whether the constant properties of the platform have been read.
    prepared: bool,
}

impl Vcpu {
    /// Creates a processor in its state after RESET.
    pub fn new(memory: Arc<Memory>) -> Self {
        Self {
            core: Box::new(Core::new(memory)),
            kicker: Kicker::default(),
            prepared: false,
        }
    }

    /// Replaces the architectural state.
    pub fn load(&mut self, state: &CpuState) {
        self.core.load(state);
    }

    /// Stores the architectural state.
    pub fn store(&mut self, state: &mut CpuState) {
        self.core.store(state);
    }

    /// RIP, between two runs.
    pub fn rip(&self) -> u64 {
        self.core.regs.rip
    }

    /// Whether maskable interrupts are enabled (RFLAGS.IF), between two runs.
    pub fn interrupts_enabled(&self) -> bool {
        self.core.regs.rflags().contains(Rflags::IF)
    }

    /// Linear address of the next instruction, between two runs.
    pub fn code_address(&self) -> u64 {
        self.core.code_lin(self.core.regs.rip)
    }

    /// RSP, between two runs.
    pub fn stack_pointer(&self) -> u64 {
        self.core.regs.get(Reg::Rsp)
    }

    /// Sets the stop conditions of a debugger, which the guest cannot detect.
    pub fn set_stops(&mut self, stops: &StopConditions) {
        self.core.set_stops(stops);
    }

    /// Reports that something other than a processor wrote guest memory: `len` bytes at `gpa`.
    pub fn code_changed(&mut self, gpa: u64, len: u64) {
        self.core.memory.changed(gpa, len);
    }

    /// Reports that another engine ran the guest, and may have changed code anywhere.
    ///
    /// Decoded code is compared with memory before it is used again.
    pub fn distrust_code(&mut self) {
        self.core.code.distrust();
        self.core.new_code_context();
    }

    /// Whether the guest invalidated translations since the last call.
    ///
    /// Another engine that caches translations must drop them before it runs the guest.
    pub fn take_flushed(&mut self) -> bool {
        self.core.mmu.take_flushed()
    }

    /// Whether [`CpuState`] holds all of the state between two instructions.
    ///
    /// That is, no shadow, no trap and no event is pending. Otherwise, run one more instruction, at
    /// most a few times.
    pub fn at_clean_boundary(&self) -> bool {
        let events = &self.core.state.events;
        self.core.debug.pending_trap().is_none()
            && events.exception.is_none()
            && events.interrupt.is_none()
            && !events.mov_ss_shadow
            && !events.sti_shadow
            && events.deferred_db == 0
    }

    /// Returns the facilities that the debug registers and RFLAGS.TF arm.
    pub fn armed(&self) -> Armed {
        let mut armed = Armed::from_dr7(self.core.state.dr7, self.core.state.cr4);
        armed.set(Armed::SINGLE_STEP, self.core.regs.flag(Rflags::TF));
        armed
    }

    /// Guest memory.
    pub fn memory(&self) -> &Arc<Memory> {
        self.core.memory.shared_memory()
    }

    /// Flushes all translations from the TLBs, as a processor may at any time.
    ///
    /// Call it after [`Memory::take_dirty`], so that the next writes are marked.
    pub fn forget_translations(&mut self) {
        self.core.flush_tlb();
    }

    /// Core cycles so far: see [`RetiredCounts::cycles`](crate::RetiredCounts::cycles).
    pub fn cycles(&self) -> u64 {
        self.core.progress.cycles()
    }

    /// Sets [`Stats::retired`], [`Stats::user`] and [`Vcpu::cycles`]: for a restored snapshot.
    pub fn set_retired(&mut self, retired: u64, user: u64, cycles: u64) {
        self.core.progress.set_totals(retired, cycles);
        self.core.counters.set_user(user);
    }

    /// Returns a handle that stops a run from another thread.
    pub fn kicker(&self) -> Kicker {
        self.kicker.clone()
    }

    /// Sets when blocks are translated, and into how many bytes of code at most.
    ///
    /// A block is translated after `after_runs` runs, and at least one; `u64::MAX` disables
    /// translation. The defaults are 50 runs and 64 MiB.
    ///
    /// Results do not depend on it.
    pub fn set_translation(&mut self, after_runs: u64, bytes: usize) {
        self.core.hot_after = after_runs.max(1);
        self.core.jit.set_capacity(bytes);
    }

    /// Returns the statistics so far.
    pub fn stats(&self) -> Stats {
        let core = &self.core;
        let (jit, bytes) = core.jit.stats();
        Stats {
            retired: core.progress.retired_before_slice(),
            user: core.counters.user(0),
            blocks: core.code.decoded(),
            lookups: core.code.lookups(),
            drops: core.code.epoch(),
            tlb_fills: core.mmu.fills(),
            translated: jit.retired,
            units: jit.units,
            translated_bytes: bytes as u64,
            evictions: jit.evictions,
            unit_exits: jit.exits,
        }
    }

    /// Returns how often each mnemonic retired, the most frequent first.
    pub fn mix(&self) -> Vec<(String, u64)> {
        self.core.collect_runs();
        self.core.code.mix().list()
    }

    /// Runs until an exit is due, for at most `budget` core cycles.
    ///
    /// A core cycle is a retired instruction, or an iteration of a repeated string instruction
    /// after its first.
    pub fn run<P: Platform>(&mut self, platform: &mut P, budget: u64) -> Exit {
        self.enter(platform, |core, kicker| core.run(kicker, budget))
    }

    /// Executes one instruction, or delivers one event, for a debugger.
    ///
    /// Ignores a breakpoint at the instruction, and returns [`Exit::Stepped`]. With
    /// `mask_interrupts`, interrupts, NMIs and SMIs stay pending, unless the processor is halted.
    pub fn step<P: Platform>(&mut self, platform: &mut P, mask_interrupts: bool) -> Exit {
        self.core.debug.stops.mask_interrupts = mask_interrupts;
        let exit = self.enter(platform, |core, _| core.step());
        self.core.debug.stops.mask_interrupts = false;
        exit
    }

    /// Sets whether all instructions with VEX and EVEX encodings run in software, and those of AES,
    /// PCLMULQDQ, GFNI and SHA.
    ///
    /// They do so anyway on a host that lacks them. Results are the same, but for the estimates and
    /// what the manual leaves undefined. Call this before the first run.
    pub const fn set_software_vectors(&mut self, on: bool) {
        self.core.thunks.policy.all_vectors = on;
    }

    /// Sets whether [`Vcpu::run`] returns [`Exit::Stepped`] after an exception.
    ///
    /// That is, after an instruction has raised an exception instead of retiring, and the exception
    /// was delivered.
    pub const fn stop_at_exceptions(&mut self, stop: bool) {
        self.core.debug.stops.at_exceptions = stop;
    }

    /// Lends the platform to the processor, and begins and ends a run.
    fn enter(
        &mut self,
        platform: &mut dyn Platform,
        run: impl FnOnce(&mut Core, &Kicker) -> Exit,
    ) -> Exit {
        if !self.prepared {
            self.prepared = true;
            self.core.features = Features::of(platform);
            self.core.portable = platform.portable_results();
            self.core.thunks.policy.portable = self.core.portable;
            let width = platform.cpuid(0x8000_0008, 0)[0] & 0xff;
            self.core.mmu.set_phys_width(width);
        }
        let kicker = &self.kicker;
        self.core.with_platform(platform, |core| {
            core.follow_transactions();
            let exit = run(core, kicker);
            core.end_run();
            core.report_branches();
            exit
        })
    }
}
