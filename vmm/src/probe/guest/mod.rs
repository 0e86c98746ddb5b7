//! The tiny guest that a probe runs. [`image`] has its memory and registers, [`stop`] why it
//! stopped.

pub(super) mod code;
pub(super) mod image;
pub(super) mod stop;

use std::io;
use std::time::{Duration, Instant};

use kvm_bindings::{
    Msrs, kvm_debug_exit_arch, kvm_guest_debug, kvm_msr_entry, kvm_regs, kvm_sregs,
};
use kvm_ioctls::VcpuExit;

use crate::host_clock::thread_cpu_time;
use crate::kvm::decode;
use crate::kvm::tiny_vm::{TinyVm, TinyVmSetup};
use crate::probe::context::{NameCall, ProbeContext, RefusedCall};
pub(super) use code::GuestCode;
pub(super) use image::*;
use stop::{BUDGET, name_instruction};
pub(super) use stop::{GuestStop, Trap};

/// How much longer than its budget a guest may run in real time, on a busy host.
const LOAD_MAX: u32 = 10;

code::code! {
    /// Disarms the guest's own breakpoints.
    fn disarms { "mov eax, 0x400", "mov dr7, rax", "out 0xd1, al" }
    /// Runs in system-management mode, in 16-bit code.
    fn smm_handler { "out 0xd1, al", "rsm" }
}

impl ProbeContext {
    /// Creates a guest that has not run yet.
    pub(crate) fn guest(
        &self,
        level: StartLevel,
        code: GuestCode,
    ) -> Result<ProbeGuest<'_>, RefusedCall> {
        self.guest_in(level, code, |_| Ok(()))
    }

    /// Like [`Self::guest`]; `setup` configures the VM before its vCPU exists.
    pub(crate) fn guest_in(
        &self,
        level: StartLevel,
        code: GuestCode,
        setup: impl FnOnce(&TinyVmSetup<'_>) -> Result<(), kvm_ioctls::Error>,
    ) -> Result<ProbeGuest<'_>, RefusedCall> {
        let vm = TinyVm::new(&self.kvm, MEMORY, setup).named("creating a VM")?;
        vm.write(0, &self.image).named("guest memory")?;
        vm.write(SMM_HANDLER, smm_handler().bytes())
            .named("guest memory")?;
        vm.write(CODE, code.bytes()).named("guest memory")?;
        vm.vcpu().set_cpuid2(&self.cpuid).named("KVM_SET_CPUID2")?;
        let mut sregs = vm.vcpu().get_sregs().named("KVM_GET_SREGS")?;
        long_mode(&mut sregs, level);
        vm.vcpu().set_sregs(&sregs).named("KVM_SET_SREGS")?;
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
        vm.vcpu().set_regs(&regs).named("KVM_SET_REGS")?;
        Ok(ProbeGuest {
            vm,
            context: self,
            left: BUDGET,
            msr_reply: MsrExitReply::default(),
            code,
        })
    }
}

/// The outcome of the next MSR exit.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct MsrExitReply {
    pub(crate) value: u64,
    /// The guest gets #GP.
    pub(crate) fault: bool,
}

/// A guest of a probe.
#[derive(Debug)]
pub(crate) struct ProbeGuest<'b> {
    pub(crate) vm: TinyVm,
    context: &'b ProbeContext,
    /// CPU time that is left of the budget.
    left: Duration,
    pub(crate) msr_reply: MsrExitReply,
    code: GuestCode,
}

impl ProbeGuest<'_> {
    /// Address of the code's mark.
    pub(crate) fn mark(&self) -> u64 {
        CODE + self.code.mark()
    }

    /// Runs until the guest stops by itself, or has used up its budget.
    ///
    /// The budget is CPU time, so that a busy host does not look like a hang. There is a limit in
    /// real time too.
    pub(crate) fn run(&mut self) -> GuestStop {
        let (start, used) = (Instant::now(), thread_cpu_time());
        let spent = || (thread_cpu_time().saturating_sub(used)).max(start.elapsed() / LOAD_MAX);
        self.context
            .kick_timer
            .arm(self.left.max(Duration::from_micros(1)));
        let stop = loop {
            match self.run_once() {
                GuestStop::Error { errno: libc::EINTR } if spent() >= self.left => {
                    break GuestStop::Hung;
                }
                GuestStop::Error {
                    errno: libc::EINTR | libc::EAGAIN,
                } => {}
                stop => break stop,
            }
        };
        self.context.kick_timer.disarm();
        self.left = self.left.saturating_sub(spent());
        self.context
            .hung
            .set(self.context.hung.get() || stop == GuestStop::Hung);
        self.refine(stop)
    }

    /// Runs with `time` as the budget. The guest hangs if it still runs then.
    pub(crate) fn run_for(&mut self, time: Duration) -> GuestStop {
        self.left = time;
        self.run()
    }

    /// Runs KVM_RUN once, to measure its time. The guest must not hang.
    pub(crate) fn run_raw(&mut self) -> GuestStop {
        self.run_once()
    }

    fn run_once(&mut self) -> GuestStop {
        match self.vm.run() {
            Ok(VcpuExit::IoOut(port, data)) => GuestStop::Out {
                port,
                data: data.to_vec(),
            },
            Ok(VcpuExit::IoIn(port, data)) => {
                data.fill(0x5a);
                GuestStop::In {
                    port,
                    size: data.len(),
                }
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                data.fill(0x5a);
                GuestStop::MmioRead {
                    address,
                    size: data.len(),
                }
            }
            Ok(VcpuExit::MmioWrite(address, data)) => GuestStop::MmioWrite {
                address,
                data: data.to_vec(),
            },
            Ok(VcpuExit::X86Rdmsr(exit)) => {
                *exit.data = self.msr_reply.value;
                *exit.error = u8::from(self.msr_reply.fault);
                GuestStop::Rdmsr { index: exit.index }
            }
            Ok(VcpuExit::X86Wrmsr(exit)) => {
                *exit.error = u8::from(self.msr_reply.fault);
                GuestStop::Wrmsr {
                    index: exit.index,
                    value: exit.data,
                }
            }
            Ok(VcpuExit::Debug(kvm_debug_exit_arch {
                exception, pc, dr6, ..
            })) => GuestStop::Debug {
                rip: pc,
                vector: exception,
                dr6,
            },
            Ok(VcpuExit::Hlt) => GuestStop::Halt,
            Ok(VcpuExit::IrqWindowOpen) => GuestStop::InterruptWindow,
            Ok(VcpuExit::InternalError) => GuestStop::Internal {
                suberror: 0,
                instruction: String::new(),
            },
            Ok(VcpuExit::Shutdown) => GuestStop::Shutdown,
            Ok(VcpuExit::FailEntry(reason, _)) => GuestStop::FailEntry { reason },
            Ok(exit) => GuestStop::Unexpected(format!("{exit:?}")),
            Err(error) => GuestStop::Error {
                errno: error.errno(),
            },
        }
    }

    /// Adds details that the exit itself does not contain.
    fn refine(&mut self, stop: GuestStop) -> GuestStop {
        match stop {
            GuestStop::Out {
                port: PORT_DONE, ..
            } => GuestStop::Done,
            GuestStop::Out {
                port: PORT_REPORT, ..
            } => self.trap().map_or(stop, GuestStop::Trap),
            GuestStop::Internal { .. } => {
                decode::internal_error(self.vm.kvm_run()).map_or(stop, |error| {
                    GuestStop::Internal {
                        suberror: error.suberror,
                        instruction: name_instruction(&error.bytes),
                    }
                })
            }
            stop => stop,
        }
    }

    fn trap(&self) -> Option<Trap> {
        let regs = self.vm.vcpu().get_regs().ok()?;
        let vector = regs.rip.checked_sub(STUBS)? / 16;
        let has_error = has_error_code(vector);
        let frame = regs.rsp.checked_add(if has_error { 8 } else { 0 })?;
        let word = |n: u64| self.vm.read_u64(frame.checked_add(8 * n)?).ok();
        Some(Trap {
            vector,
            error: if has_error {
                self.vm.read_u64(regs.rsp).ok()?
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

    /// Sets the RFLAGS that the handler of `trap` will restore.
    pub(crate) fn set_trap_rflags(&self, trap: Trap, rflags: u64) -> Result<(), RefusedCall> {
        self.vm
            .write(trap.frame + 16, &rflags.to_le_bytes())
            .named("guest memory")
    }

    /// Completes the pending exit without running more guest code.
    pub(crate) fn complete(&mut self) -> GuestStop {
        self.vm.set_immediate_exit(true);
        let stop = self.run_once();
        self.vm.set_immediate_exit(false);
        self.refine(stop)
    }

    /// Makes the guest clear its own DR7.
    ///
    /// In QEMU's emulated SVM, a breakpoint that a guest leaves armed stops later guests at the
    /// same linear address.
    pub(crate) fn disarm(&mut self) -> Result<(), RefusedCall> {
        const DISARM: u64 = CODE + 0x800;
        self.complete();
        self.vm
            .write(DISARM, disarms().bytes())
            .named("guest memory")?;
        self.edit_sregs(|sregs| long_mode(sregs, StartLevel::Kernel))?;
        self.edit_regs(|regs| {
            regs.rip = DISARM;
            regs.rsp = STACK;
            regs.rflags = 2;
        })?;
        self.left = BUDGET;
        self.run();
        Ok(())
    }

    /// The general registers.
    pub(crate) fn regs(&self) -> Result<kvm_regs, RefusedCall> {
        self.vm.vcpu().get_regs().named("KVM_GET_REGS")
    }

    /// Edits the general registers.
    pub(crate) fn edit_regs(&self, edit: impl FnOnce(&mut kvm_regs)) -> Result<(), RefusedCall> {
        let mut regs = self.regs()?;
        edit(&mut regs);
        self.vm.vcpu().set_regs(&regs).named("KVM_SET_REGS")
    }

    /// Edits the system registers.
    pub(crate) fn edit_sregs(&self, edit: impl FnOnce(&mut kvm_sregs)) -> Result<(), RefusedCall> {
        let mut sregs = self.vm.vcpu().get_sregs().named("KVM_GET_SREGS")?;
        edit(&mut sregs);
        self.vm.vcpu().set_sregs(&sregs).named("KVM_SET_SREGS")
    }

    /// The system registers.
    pub(crate) fn sregs(&self) -> Result<kvm_sregs, RefusedCall> {
        self.vm.vcpu().get_sregs().named("KVM_GET_SREGS")
    }

    /// KVM_SET_MSRS with one MSR.
    pub(crate) fn set_msr(&self, index: u32, data: u64) -> Result<(), RefusedCall> {
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[entry])
            .map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))
            .named("KVM_SET_MSRS")?;
        match self.vm.vcpu().set_msrs(&msrs).named("KVM_SET_MSRS")? {
            1 => Ok(()),
            _ => Err(io::Error::other(format!("refuses MSR {index:#x}"))).named("KVM_SET_MSRS"),
        }
    }

    /// The guest's DR6.
    pub(crate) fn dr6(&self) -> Result<u64, RefusedCall> {
        Ok(self
            .vm
            .vcpu()
            .get_debug_regs()
            .named("KVM_GET_DEBUGREGS")?
            .dr6)
    }

    /// KVM_SET_GUEST_DEBUG with these control bits, DR0 and DR7.
    pub(crate) fn debug(&self, control: u32, dr0: u64, dr7: u64) -> Result<(), RefusedCall> {
        let mut debug = kvm_guest_debug {
            control,
            ..Default::default()
        };
        debug.arch.debugreg[0] = dr0;
        debug.arch.debugreg[7] = dr7;
        self.vm
            .vcpu()
            .set_guest_debug(&debug)
            .named("KVM_SET_GUEST_DEBUG")
    }
}
