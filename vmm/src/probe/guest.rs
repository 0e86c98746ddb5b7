//! The tiny guest that a probe runs, and the bench that makes it. What is in it says
//! [`crate::probe::image`], why it stopped [`crate::probe::stop`].

use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

use kvm_bindings::{
    CpuId, Msrs, kvm_debug_exit_arch, kvm_guest_debug, kvm_msr_entry, kvm_regs, kvm_sregs,
};
use kvm_ioctls::{Kvm, VcpuExit};
use thiserror::Error;

use crate::host_clock::thread_cpu_time;
use crate::kvm::kick_timer::KickTimer;
use crate::kvm::tiny_vm::{TinyVm, TinyVmSetup};
use crate::kvm::{KvmError, decode, ioctl};
pub(crate) use crate::probe::code::Code;
use crate::probe::code::code;
pub(crate) use crate::probe::image::*;
use crate::probe::stop::name_instruction;
pub(crate) use crate::probe::stop::{Stop, Trap};

/// How long one guest may run in all; a probe that hangs costs no more.
pub(crate) const BUDGET: Duration = Duration::from_millis(50);

/// How much longer than that it may take on a host that is busy with other things.
const LOAD_MAX: u32 = 10;
code! {
    /// Takes all breakpoints of the guest's own away.
    fn disarms { "mov eax, 0x400", "mov dr7, rax", "out 0xd1, al" }
    /// Runs in system-management mode, in 16-bit code.
    fn smm_handler { "out 0xd1, al", "rsm" }
}

/// An ioctl that KVM refused.
#[derive(Debug, Error)]
#[error("{call}: {source}")]
pub(crate) struct Refused {
    call: &'static str,
    source: io::Error,
}

/// Names the call behind an error.
pub(crate) trait Named<T> {
    /// See the trait.
    fn named(self, call: &'static str) -> Result<T, Refused>;
}

impl<T, E: Into<io::Error>> Named<T> for Result<T, E> {
    fn named(self, call: &'static str) -> Result<T, Refused> {
        self.map_err(|error| Refused {
            call,
            source: error.into(),
        })
    }
}

/// Makes guests: what all probes share.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) kvm: Kvm,
    pub(crate) cpuid: CpuId,
    kick_timer: KickTimer,
    image: Vec<u8>,
    /// A guest has hung since somebody last asked.
    pub(crate) hung: Cell<bool>,
}

impl Bench {
    /// Opens `/dev/kvm`, and makes sure that it really gives a virtual machine.
    pub(crate) fn open() -> Result<Self, KvmError> {
        let kvm = crate::kvm::open_device()?;
        // Another hypervisor that holds the hardware shows only here.
        drop(kvm.create_vm().map_err(|error| match error.errno() {
            libc::EBUSY => KvmError::Busy,
            _ => ioctl("KVM_CREATE_VM")(error),
        })?);
        let cpuid = kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(ioctl("KVM_GET_SUPPORTED_CPUID"))?;
        let kick_timer = KickTimer::new().map_err(|source| KvmError::Ioctl {
            call: "timer_create",
            source,
        })?;
        Ok(Self {
            kvm,
            cpuid,
            kick_timer,
            image: image(),
            hung: Cell::new(false),
        })
    }

    /// One register (EAX, EBX, ECX, EDX as 0 to 3) of what KVM offers; 0 where there is nothing.
    pub(crate) fn offered(&self, leaf: u32, subleaf: u32, register: usize) -> u32 {
        self.cpuid
            .as_slice()
            .iter()
            .find(|e| e.function == leaf && e.index == subleaf)
            .map_or(0, |e| [e.eax, e.ebx, e.ecx, e.edx][register & 3])
    }

    /// A guest of its own that has not run yet.
    pub(crate) fn guest(&self, level: Level, code: Code) -> Result<Guest<'_>, Refused> {
        self.guest_in(level, code, |_| Ok(()))
    }

    /// The same, with `setup` done to the VM before it has a vCPU.
    pub(crate) fn guest_in(
        &self,
        level: Level,
        code: Code,
        setup: impl FnOnce(&TinyVmSetup<'_>) -> Result<(), kvm_ioctls::Error>,
    ) -> Result<Guest<'_>, Refused> {
        let tiny = TinyVm::new(&self.kvm, MEMORY, setup).named("creating a VM")?;
        tiny.write(0, &self.image).named("guest memory")?;
        tiny.write(SMM_HANDLER, smm_handler().bytes())
            .named("guest memory")?;
        tiny.write(CODE, code.bytes()).named("guest memory")?;
        tiny.vcpu()
            .set_cpuid2(&self.cpuid)
            .named("KVM_SET_CPUID2")?;
        let mut sregs = tiny.vcpu().get_sregs().named("KVM_GET_SREGS")?;
        long_mode(&mut sregs, level);
        tiny.vcpu().set_sregs(&sregs).named("KVM_SET_SREGS")?;
        let (_, ss) = level.selectors();
        let regs = kvm_regs {
            rip: CODE,
            rsp: STACK,
            rflags: 2 | IOPL3,
            rsi: u64::from(ss),
            r8: USER_STACK,
            r9: DATA,
            ..Default::default()
        };
        tiny.vcpu().set_regs(&regs).named("KVM_SET_REGS")?;
        Ok(Guest {
            tiny,
            bench: self,
            left: BUDGET,
            msr_reply: MsrReply::default(),
            code,
        })
    }
}

/// What the next MSR exit is answered.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct MsrReply {
    pub(crate) value: u64,
    /// The guest gets #GP.
    pub(crate) fault: bool,
}

/// A guest of one probe.
#[derive(Debug)]
pub(crate) struct Guest<'b> {
    pub(crate) tiny: TinyVm,
    bench: &'b Bench,
    left: Duration,
    pub(crate) msr_reply: MsrReply,
    code: Code,
}

impl Guest<'_> {
    /// Address of the code's mark.
    pub(crate) fn mark(&self) -> u64 {
        CODE + self.code.mark()
    }

    /// Runs until it stops for a reason of its own, or has used up its time: processor time, so
    /// that a loaded host does not look like a hang, with an end in real time too.
    pub(crate) fn run(&mut self) -> Stop {
        let (start, used) = (Instant::now(), thread_cpu_time());
        let spent = || (thread_cpu_time().saturating_sub(used)).max(start.elapsed() / LOAD_MAX);
        self.bench
            .kick_timer
            .arm(self.left.max(Duration::from_micros(1)));
        let stop = loop {
            match self.run_once() {
                Stop::Error { errno: libc::EINTR } if spent() >= self.left => break Stop::Hung,
                Stop::Error {
                    errno: libc::EINTR | libc::EAGAIN,
                } => {}
                stop => break stop,
            }
        };
        self.bench.kick_timer.disarm();
        self.left = self.left.saturating_sub(spent());
        self.bench
            .hung
            .set(self.bench.hung.get() || stop == Stop::Hung);
        self.refine(stop)
    }

    /// Runs for `time` at most, and says whether it still ran then.
    pub(crate) fn run_for(&mut self, time: Duration) -> Stop {
        self.left = time;
        self.run()
    }

    /// One KVM_RUN and nothing else: to be timed, by code that cannot hang.
    pub(crate) fn run_raw(&mut self) -> Stop {
        self.run_once()
    }

    fn run_once(&mut self) -> Stop {
        match self.tiny.run() {
            Ok(VcpuExit::IoOut(port, data)) => Stop::Out {
                port,
                data: data.to_vec(),
            },
            Ok(VcpuExit::IoIn(port, data)) => {
                data.fill(0x5a);
                Stop::In {
                    port,
                    size: data.len(),
                }
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                data.fill(0x5a);
                Stop::MmioRead {
                    address,
                    size: data.len(),
                }
            }
            Ok(VcpuExit::MmioWrite(address, data)) => Stop::MmioWrite {
                address,
                data: data.to_vec(),
            },
            Ok(VcpuExit::X86Rdmsr(exit)) => {
                *exit.data = self.msr_reply.value;
                *exit.error = u8::from(self.msr_reply.fault);
                Stop::Rdmsr { index: exit.index }
            }
            Ok(VcpuExit::X86Wrmsr(exit)) => {
                *exit.error = u8::from(self.msr_reply.fault);
                Stop::Wrmsr {
                    index: exit.index,
                    value: exit.data,
                }
            }
            Ok(VcpuExit::Debug(kvm_debug_exit_arch {
                exception, pc, dr6, ..
            })) => Stop::Debug {
                rip: pc,
                vector: exception,
                dr6,
            },
            Ok(VcpuExit::Hlt) => Stop::Halt,
            Ok(VcpuExit::IrqWindowOpen) => Stop::InterruptWindow,
            Ok(VcpuExit::InternalError) => Stop::Internal {
                suberror: 0,
                instruction: String::new(),
            },
            Ok(VcpuExit::Shutdown) => Stop::Shutdown,
            Ok(VcpuExit::FailEntry(reason, _)) => Stop::FailEntry { reason },
            Ok(exit) => Stop::Strange(format!("{exit:?}")),
            Err(error) => Stop::Error {
                errno: error.errno(),
            },
        }
    }

    /// Adds what the exit itself does not say.
    fn refine(&mut self, stop: Stop) -> Stop {
        match stop {
            Stop::Out {
                port: PORT_DONE, ..
            } => Stop::Done,
            Stop::Out {
                port: PORT_REPORT, ..
            } => self.trap().map_or(stop, Stop::Trap),
            Stop::Internal { .. } => {
                decode::internal_error(self.tiny.kvm_run()).map_or(stop, |error| Stop::Internal {
                    suberror: error.suberror,
                    instruction: name_instruction(&error.bytes),
                })
            }
            stop => stop,
        }
    }

    fn trap(&self) -> Option<Trap> {
        let regs = self.tiny.vcpu().get_regs().ok()?;
        let vector = regs.rip.checked_sub(STUBS)? / 16;
        let has_error = has_error_code(vector);
        let frame = regs.rsp.checked_add(if has_error { 8 } else { 0 })?;
        let word = |n: u64| self.tiny.read_u64(frame.checked_add(8 * n)?).ok();
        Some(Trap {
            vector,
            error: if has_error {
                self.tiny.read_u64(regs.rsp).ok()?
            } else {
                0
            },
            rip: word(0)?,
            cs: word(1)?,
            rflags: word(2)?,
            ss: word(4)?,
            frame,
        })
    }

    /// Changes the RFLAGS that a handler will return to.
    pub(crate) fn set_trap_rflags(&self, trap: Trap, rflags: u64) -> Result<(), Refused> {
        self.tiny
            .write(trap.frame + 16, &rflags.to_le_bytes())
            .named("guest memory")
    }

    /// Lets the pending exit take effect without running any more guest code.
    pub(crate) fn complete(&mut self) -> Stop {
        self.tiny.set_immediate_exit(true);
        let stop = self.run_once();
        self.tiny.set_immediate_exit(false);
        self.refine(stop)
    }

    /// Has the guest clear its own DR7. In QEMU's emulated SVM a breakpoint that a guest leaves
    /// armed goes on to stop later guests, at the same linear address.
    pub(crate) fn disarm(&mut self) -> Result<(), Refused> {
        const PLACE: u64 = CODE + 0x800;
        self.complete();
        self.tiny
            .write(PLACE, disarms().bytes())
            .named("guest memory")?;
        self.edit_sregs(|sregs| long_mode(sregs, Level::Kernel))?;
        self.edit_regs(|regs| {
            regs.rip = PLACE;
            regs.rsp = STACK;
            regs.rflags = 2;
        })?;
        self.left = BUDGET;
        self.run();
        Ok(())
    }

    /// General registers.
    pub(crate) fn regs(&self) -> Result<kvm_regs, Refused> {
        self.tiny.vcpu().get_regs().named("KVM_GET_REGS")
    }

    /// Changes general registers.
    pub(crate) fn edit_regs(&self, edit: impl FnOnce(&mut kvm_regs)) -> Result<(), Refused> {
        let mut regs = self.regs()?;
        edit(&mut regs);
        self.tiny.vcpu().set_regs(&regs).named("KVM_SET_REGS")
    }

    /// Changes system registers.
    pub(crate) fn edit_sregs(&self, edit: impl FnOnce(&mut kvm_sregs)) -> Result<(), Refused> {
        let mut sregs = self.tiny.vcpu().get_sregs().named("KVM_GET_SREGS")?;
        edit(&mut sregs);
        self.tiny.vcpu().set_sregs(&sregs).named("KVM_SET_SREGS")
    }

    /// System registers.
    pub(crate) fn sregs(&self) -> Result<kvm_sregs, Refused> {
        self.tiny.vcpu().get_sregs().named("KVM_GET_SREGS")
    }

    /// KVM_SET_MSRS with one MSR.
    pub(crate) fn set_msr(&self, index: u32, data: u64) -> Result<(), Refused> {
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[entry])
            .map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))
            .named("KVM_SET_MSRS")?;
        match self.tiny.vcpu().set_msrs(&msrs).named("KVM_SET_MSRS")? {
            1 => Ok(()),
            _ => {
                Err(io::Error::other(format!("does not take MSR {index:#x}"))).named("KVM_SET_MSRS")
            }
        }
    }

    /// DR6 as the guest sees it.
    pub(crate) fn dr6(&self) -> Result<u64, Refused> {
        Ok(self
            .tiny
            .vcpu()
            .get_debug_regs()
            .named("KVM_GET_DEBUGREGS")?
            .dr6)
    }

    /// KVM_SET_GUEST_DEBUG with these control bits, DR0 and DR7.
    pub(crate) fn debug(&self, control: u32, dr0: u64, dr7: u64) -> Result<(), Refused> {
        let mut debug = kvm_guest_debug {
            control,
            ..Default::default()
        };
        debug.arch.debugreg[0] = dr0;
        debug.arch.debugreg[7] = dr7;
        self.tiny
            .vcpu()
            .set_guest_debug(&debug)
            .named("KVM_SET_GUEST_DEBUG")
    }
}
