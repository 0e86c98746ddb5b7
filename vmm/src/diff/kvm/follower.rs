//! The same machine in KVM: a processor and memory of its own, which follow the interpreter.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hindsight_cpu::state::{CpuState, XsaveArea};
use hindsight_regs::apic::{ApicBase, DEFAULT_BASE};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::deterministic::DeterministicMachine;
use crate::diff::kvm::plan::Abilities;
use crate::diff::kvm::{KvmDiffError, Refused};
use crate::kvm::Host;
use crate::kvm::exit::Exit;
use crate::kvm::tiny::Alarm;
use crate::kvm::vcpu::{GuestDebug, KvmVcpuFd};
use crate::kvm::vm::KvmVm;
use crate::memory;
use crate::probe;
use crate::probe::Verdict;
use crate::state::{PAGE, Pages};

/// The local APIC's base address, enabled, of the bootstrap processor. KVM has no APIC of its own here.
const APIC_BASE: u64 = DEFAULT_BASE | ApicBase::EN.union(ApicBase::BSP).bits();
/// Longer than any instruction takes, even in an emulated KVM.
const LIMIT: Duration = Duration::from_secs(10);
/// KVM_INTERNAL_ERROR_EMULATION: an instruction that KVM's own emulator lacks.
const EMULATION: u32 = 1;
/// Elements of a repeated string instruction, and stops on the way to a breakpoint.
const STOPS_MAX: u32 = 1 << 24;

/// How an instruction went in KVM.
#[derive(Debug)]
pub(super) enum Executed {
    /// It was executed, and this is the state after it.
    Done,
    /// It needs a device, an MSR or the models: it was not executed, or not wholly.
    Outside,
    /// KVM stopped otherwise.
    Failed(String),
}

/// A processor in KVM with memory.
#[derive(Debug)]
pub(super) struct Follower {
    vcpu: KvmVcpuFd,
    memory: GuestMemoryMmap,
    alarm: Alarm,
    pub abilities: Abilities,
    state: Box<CpuState>,
}

impl Follower {
    /// A machine like `leader`, with its CPUID and as much memory, all zero.
    pub fn new(leader: &DeterministicMachine) -> Result<Self, KvmDiffError> {
        let host = Host::open()?;
        let board = leader.board();
        let mut ranges = Vec::new();
        for region in board.ram.map.iter() {
            let len = usize::try_from(region.len()).map_err(|_| Refused::Memory)?;
            ranges.push((region.start_addr(), len));
        }
        let memory = memory::allocate(&ranges, false)?;
        let vm: Arc<KvmVm> = KvmVm::new(&host, &memory)?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid(0, &board.package.cpuid)?;
        Ok(Self {
            vcpu,
            memory,
            alarm: Alarm::new().map_err(KvmDiffError::Io)?,
            abilities: abilities()?,
            state: Box::new(CpuState::reset()),
        })
    }

    /// Takes over registers.
    pub fn load(&mut self, state: &CpuState) -> Result<(), KvmDiffError> {
        // Whatever an exit left half done; its result is overwritten.
        for _ in 0..STOPS_MAX {
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

    /// Executes from RIP `from`, where it is, until RIP is `to`.
    pub fn execute(
        &mut self,
        stop: &GuestDebug,
        from: u64,
        to: u64,
    ) -> Result<Executed, KvmDiffError> {
        self.vcpu.set_guest_debug(stop)?;
        self.alarm.arm(LIMIT);
        let executed = self.run(from, to);
        self.alarm.disarm();
        executed
    }

    fn run(&mut self, from: u64, to: u64) -> Result<Executed, KvmDiffError> {
        for _ in 0..STOPS_MAX {
            let failed = match self.vcpu.run()?.1 {
                Exit::Debug { .. } => {
                    let rip = self.vcpu.at_exit().regs.rip;
                    // An element of a repeated instruction leaves RIP where it was, and so does a
                    // KVM that stops before it executes.
                    if rip == to || rip != from {
                        return Ok(Executed::Done);
                    }
                    continue;
                }
                Exit::Io { .. }
                | Exit::MmioRead { .. }
                | Exit::MmioWrite { .. }
                | Exit::Rdmsr { .. }
                | Exit::Wrmsr { .. }
                | Exit::Halt
                | Exit::TprLowered => return Ok(self.outside(from, to)),
                Exit::InternalError(error) if error.suberror == EMULATION => {
                    return Ok(self.outside(from, to));
                }
                Exit::Kicked => format!("no stop within {} s", LIMIT.as_secs()),
                Exit::Shutdown => "a triple fault".to_owned(),
                Exit::InternalError(error) => error.to_string(),
                other => format!("{other:?}"),
            };
            return Ok(Executed::Failed(failed));
        }
        Ok(Executed::Failed("too many stops".to_owned()))
    }

    /// An exit of the instruction at `from`, or of the one before `to`; of others none belongs here.
    fn outside(&self, from: u64, to: u64) -> Executed {
        match self.vcpu.at_exit().regs.rip {
            rip if rip == from || rip == to => Executed::Outside,
            rip => Executed::Failed(format!("it went on to {rip:#x}, and needs the host there")),
        }
    }

    /// The registers.
    pub fn state(&mut self) -> Result<&CpuState, KvmDiffError> {
        self.vcpu.store(&mut self.state)?;
        Ok(&self.state)
    }

    /// The general and segment registers, at little cost; all else is as it was at the last look.
    pub fn glance(&mut self) -> &CpuState {
        self.vcpu.store_at_exit(&mut self.state);
        &self.state
    }

    /// The vector registers, also where an instruction is half done.
    pub fn vectors(&self) -> Result<XsaveArea, KvmDiffError> {
        let mut area = XsaveArea::default();
        self.vcpu.store_xsave(&mut area)?;
        Ok(area)
    }

    /// Changes RFLAGS.
    pub fn set_flags(&mut self, rflags: u64) -> Result<(), KvmDiffError> {
        Ok(self.vcpu.set_flags_at_exit(rflags)?)
    }

    /// A page of memory.
    pub fn page(&self, gpa: u64) -> Result<[u8; PAGE], KvmDiffError> {
        let mut page = [0; PAGE];
        let read = self.memory.read_slice(&mut page, GuestAddress(gpa));
        read.map_err(io::Error::other)?;
        Ok(page)
    }

    /// Takes over these pages of memory.
    pub fn take(
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

    /// Takes over all memory, page tables too.
    pub fn take_all(&mut self, pages: &Pages) -> Result<(), KvmDiffError> {
        self.vcpu.forget_translations();
        let stale = self.nonzero()?;
        let gone = stale.into_iter().filter(|&gpa| pages.get(gpa).is_none());
        self.take(pages, gone)?;
        self.take(pages, pages.iter().map(|(gpa, _)| gpa))
    }

    /// The pages that are not all zero.
    pub fn nonzero(&self) -> Result<Vec<u64>, KvmDiffError> {
        let mut found = Vec::new();
        memory::nonzero_pages(&self.memory, |offset, _| {
            found.extend(memory::address(&self.memory, offset));
        })?;
        Ok(found)
    }
}

/// Asks doctor.
fn abilities() -> Result<Abilities, KvmDiffError> {
    let names = [
        "step-cpl0",
        "step-cpl3",
        "hostbp-exec-cpl0",
        "hostbp-exec-cpl3",
    ];
    let found = probe::findings(names)?;
    let is = |name: &str, wanted: &[Verdict]| {
        found.get(name).is_some_and(|f| wanted.contains(&f.verdict))
    };
    // What it does differently is about exits and shadows, which we do not step over.
    let steps = [Verdict::Works, Verdict::Differs];
    Ok(Abilities {
        step_kernel: is("step-cpl0", &steps),
        step_user: is("step-cpl3", &steps),
        breakpoint: names[2..].iter().all(|name| is(name, &[Verdict::Works])),
    })
}
