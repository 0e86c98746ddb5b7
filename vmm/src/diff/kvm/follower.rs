//! The machine in KVM that follows the interpreter: a vCPU and memory of its own.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hindsight_cpu::state::{CpuState, XsaveArea};
use hindsight_regs::apic::{ApicBase, DEFAULT_BASE};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::error::{KvmDiffError, NotComparable};
use super::follow_action::KvmAbilities;
use crate::deterministic::DeterministicMachine;
use crate::kvm::KvmDevice;
use crate::kvm::exit::KvmExit;
use crate::kvm::kick_timer::KickTimer;
use crate::kvm::vcpu::{GuestDebug, KvmVcpuFd};
use crate::kvm::vm::KvmVm;
use crate::memory;
use crate::memory::layout::is_firmware;
use crate::probe;
use crate::probe::ProbeVerdict;
use crate::state::{PAGE, Pages};

/// IA32_APIC_BASE of the bootstrap processor, with the local APIC enabled. KVM has no APIC here.
const APIC_BASE: u64 = DEFAULT_BASE | ApicBase::EN.union(ApicBase::BSP).bits();
/// The time limit of one instruction: longer than any takes, even under nested virtualization.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// KVM_INTERNAL_ERROR_EMULATION: KVM's instruction emulator lacks the instruction.
const EMULATION_ERROR: u32 = 1;
/// Maximum number of stops before an instruction has completed.
///
/// KVM may stop after each element of a repeated string instruction, or before the breakpoint.
const MAX_STOPS: u32 = 1 << 24;

/// How KVM ended one step.
#[derive(Debug)]
pub(super) enum KvmStepEnd {
    /// KVM executed the instruction. Its state is that after the instruction.
    Executed,
    /// The instruction needs a device, an MSR or the models. KVM has not completed it.
    NeedsHost,
    /// KVM exited for a reason that no instruction causes.
    Failed(String),
}

/// A vCPU in KVM with its memory.
#[derive(Debug)]
pub(super) struct Follower {
    vcpu: KvmVcpuFd,
    memory: GuestMemoryMmap,
    kick_timer: KickTimer,
    pub abilities: KvmAbilities,
    /// The state that was read from KVM last.
    state: Box<CpuState>,
}

impl Follower {
    /// Creates a machine with the CPUID of `leader` and as much memory, all zero.
    pub fn new(leader: &DeterministicMachine) -> Result<Self, KvmDiffError> {
        let kvm = KvmDevice::open()?;
        let board = leader.board();
        let mut ranges = Vec::new();
        for region in board.ram.map.iter() {
            let len = usize::try_from(region.len()).map_err(|_| NotComparable::MemoryTooLarge)?;
            ranges.push((region.start_addr(), len));
        }
        let memory = memory::allocate(&ranges, false)?;
        let vm: Arc<KvmVm> = KvmVm::with_rom(&kvm, &memory, is_firmware)?;
        let vcpu = KvmVcpuFd::new(&vm, 0)?;
        vcpu.set_cpuid(0, &board.package.cpuid)?;
        Ok(Self {
            vcpu,
            memory,
            kick_timer: KickTimer::new()?,
            abilities: measured_abilities()?,
            state: Box::new(CpuState::reset()),
        })
    }

    /// Sets all registers.
    pub fn load(&mut self, state: &CpuState) -> Result<(), KvmDiffError> {
        // Complete what the last exit left pending. Its result is overwritten.
        for _ in 0..MAX_STOPS {
            if self.vcpu.complete()?.is_none() {
                break;
            }
        }
        let loaded = self.vcpu.load(state, APIC_BASE);
        loaded.map_err(|source| KvmDiffError::State {
            cr0: state.cr0,
            cr4: state.cr4,
            efer: state.efer,
            source,
        })
    }

    /// Executes from the current RIP, `from`, to RIP `to`, where `stop` stops.
    pub fn execute(
        &mut self,
        stop: &GuestDebug,
        from: u64,
        to: u64,
    ) -> Result<KvmStepEnd, KvmDiffError> {
        self.vcpu.set_guest_debug(stop)?;
        self.kick_timer.arm(TIME_LIMIT);
        let end = self.run(from, to);
        self.kick_timer.disarm();
        end
    }

    fn run(&mut self, from: u64, to: u64) -> Result<KvmStepEnd, KvmDiffError> {
        for _ in 0..MAX_STOPS {
            let failure = match self.vcpu.run()?.1 {
                KvmExit::Debug { .. } => {
                    let rip = self.vcpu.regs_at_exit().regs.rip;
                    // RIP does not change between the elements of a repeated string instruction,
                    // nor on a KVM that stops before it executes.
                    if rip == to || rip != from {
                        return Ok(KvmStepEnd::Executed);
                    }
                    continue;
                }
                KvmExit::Io { .. }
                | KvmExit::MmioRead { .. }
                | KvmExit::MmioWrite { .. }
                | KvmExit::Rdmsr { .. }
                | KvmExit::Wrmsr { .. }
                | KvmExit::Halt
                | KvmExit::TprLowered => return Ok(self.needs_host(from, to)),
                KvmExit::InternalError(error) if error.suberror == EMULATION_ERROR => {
                    return Ok(self.needs_host(from, to));
                }
                KvmExit::Kicked => format!("KVM did not stop within {} s", TIME_LIMIT.as_secs()),
                KvmExit::Shutdown => "a triple fault".to_owned(),
                KvmExit::InternalError(error) => error.to_string(),
                other => format!("{other:?}"),
            };
            return Ok(KvmStepEnd::Failed(failure));
        }
        let failure = format!("KVM stopped {MAX_STOPS} times before the instruction ended");
        Ok(KvmStepEnd::Failed(failure))
    }

    /// The end of a step that exited for the host.
    ///
    /// RIP is `from` or, where KVM has advanced it already, `to`. Elsewhere KVM has executed more
    /// than the step.
    fn needs_host(&self, from: u64, to: u64) -> KvmStepEnd {
        match self.vcpu.regs_at_exit().regs.rip {
            rip if rip == from || rip == to => KvmStepEnd::NeedsHost,
            rip => KvmStepEnd::Failed(format!(
                "KVM continued to {rip:#x}, where an instruction exits to the host"
            )),
        }
    }

    /// Reads all registers.
    pub fn state(&mut self) -> Result<&CpuState, KvmDiffError> {
        self.vcpu.store(&mut self.state)?;
        Ok(&self.state)
    }

    /// Updates the registers that KVM stores at each exit, without a system call.
    ///
    /// The others are as at the last call of [`Self::state`].
    pub fn regs_at_exit(&mut self) -> &CpuState {
        self.vcpu.store_regs_at_exit(&mut self.state);
        &self.state
    }

    /// Reads the XSAVE area, also while an exit is pending.
    pub fn vectors(&self) -> Result<XsaveArea, KvmDiffError> {
        let mut area = XsaveArea::default();
        self.vcpu.store_xsave(&mut area)?;
        Ok(area)
    }

    /// Sets RFLAGS.
    pub fn set_rflags(&mut self, rflags: u64) -> Result<(), KvmDiffError> {
        Ok(self.vcpu.set_rflags_at_exit(rflags)?)
    }

    /// Reads a page of memory.
    pub fn page(&self, gpa: u64) -> Result<[u8; PAGE], KvmDiffError> {
        let mut page = [0; PAGE];
        let read = self.memory.read_slice(&mut page, GuestAddress(gpa));
        read.map_err(io::Error::other)?;
        Ok(page)
    }

    /// Copies the pages at `addresses` to KVM's memory.
    pub fn copy_pages(
        &self,
        pages: &Pages,
        addresses: impl IntoIterator<Item = u64>,
    ) -> Result<(), KvmDiffError> {
        for gpa in addresses {
            let page = pages.get(gpa).unwrap_or(&[0; PAGE]);
            let written = self.memory.write_slice(page, GuestAddress(gpa));
            written.map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Copies all pages to KVM's memory, and clears the others.
    pub fn copy_memory(&mut self, pages: &Pages) -> Result<(), KvmDiffError> {
        // Paging structures may change too.
        self.vcpu.flush_tlb_on_load();
        let nonzero = self.nonzero_pages()?;
        let cleared = nonzero.into_iter().filter(|&gpa| pages.get(gpa).is_none());
        self.copy_pages(pages, cleared)?;
        self.copy_pages(pages, pages.iter().map(|(gpa, _)| gpa))
    }

    /// The addresses of the pages that are not all zero.
    fn nonzero_pages(&self) -> Result<Vec<u64>, KvmDiffError> {
        let mut found = Vec::new();
        memory::nonzero_pages(&self.memory, |offset, _| {
            found.extend(memory::offset_to_address(&self.memory, offset));
        })?;
        Ok(found)
    }
}

/// What this host's KVM can do, as doctor's probes measure it.
fn measured_abilities() -> Result<KvmAbilities, KvmDiffError> {
    const STEP: [&str; 2] = ["step-cpl0", "step-cpl3"];
    const BREAKPOINT: [&str; 2] = ["hostbp-exec-cpl0", "hostbp-exec-cpl3"];
    let findings = probe::findings(STEP.into_iter().chain(BREAKPOINT))?;
    let has_verdict = |name: &str, verdicts: &[ProbeVerdict]| {
        let finding = findings.get(name);
        finding.is_some_and(|finding| verdicts.contains(&finding.verdict))
    };
    // A single-step that differs does so at exits and in interrupt shadows, which are not stepped.
    let [step_kernel, step_user] =
        STEP.map(|name| has_verdict(name, &[ProbeVerdict::Works, ProbeVerdict::Differs]));
    let breakpoint = BREAKPOINT
        .iter()
        .all(|name| has_verdict(name, &[ProbeVerdict::Works]));
    Ok(KvmAbilities {
        step_kernel,
        step_user,
        breakpoint,
    })
}
