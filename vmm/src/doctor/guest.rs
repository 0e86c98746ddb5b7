//! The tiny guest that a probe runs: 64-bit mode with a GDT, IDT, TSS and page tables made by the
//! host, one page of code, and handlers that report every exception by a port write.
//!
//! Linear addresses equal physical ones in the first 2 MiB; memory ends at [`MEMORY`], what is
//! above it exits as MMIO, and what is above 2 MiB is not mapped. Everything may be used at CPL3.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use iced_x86::{Decoder, DecoderOptions};
use kvm_bindings::{
    CpuId, Msrs, kvm_debug_exit_arch, kvm_guest_debug, kvm_msr_entry, kvm_regs, kvm_segment,
    kvm_sregs,
};
use kvm_ioctls::{Kvm, VcpuExit, VmFd};
use thiserror::Error;

pub(super) use super::code::Code;
use super::code::code;
use crate::kvm::tiny::{Alarm, TinyVm, thread_time};
use crate::kvm::{KvmError, ioctl, ioctls};

/// Where the processor enters system-management mode: SMBASE after reset, and 0x8000.
const SMM_HANDLER: u64 = 0x3_8000;
/// Size of guest memory in bytes: room for the SMM state save area.
pub(super) const MEMORY: usize = 0x4_0000;
const GDT: u64 = 0x1000;
const IDT: u64 = 0x2000;
const TSS: u64 = 0x3000;
const PML4: u64 = 0x4000;
const PDPT: u64 = 0x5000;
const PD: u64 = 0x6000;
const STUBS: u64 = 0x7000;
/// A page for the guest's data; R9 at the start.
pub(super) const DATA: u64 = 0x8000;
const DATA_START: usize = 0x8000;
/// Top of the stack that exceptions use.
const HANDLER_STACK: u64 = 0xa000;
/// Top of the stack: RSP at the start.
pub(super) const STACK: u64 = 0xb000;
/// Top of a second stack, for the way to CPL3; R8 at the start.
pub(super) const USER_STACK: u64 = 0xbf00;
/// Where the probe's code is.
pub(super) const CODE: u64 = 0xc000;
/// A page behind which there is no memory, only MMIO.
pub(super) const MMIO: u64 = 0x10_0000;
/// A linear address that is not mapped.
pub(super) const UNMAPPED: u64 = 0x4000_0000;

/// Handlers write here.
const PORT_REPORT: u16 = 0xd0;
/// Guest code writes here when it has got where it should.
pub(super) const PORT_DONE: u16 = 0xd1;

pub(super) const KERNEL_CS: u16 = 0x08;
pub(super) const KERNEL_SS: u16 = 0x10;
pub(super) const USER_SS: u16 = 0x1b;
pub(super) const USER_CS: u16 = 0x23;
const TSS_SELECTOR: u16 = 0x28;
/// The TSS proper, an I/O map for 0x400 ports, and its closing byte of ones.
const TSS_LIMIT: u32 = 0x67 + 0x80 + 1;

/// RFLAGS.TF.
pub(super) const TF: u64 = 1 << 8;
/// RFLAGS.IF.
pub(super) const IF: u64 = 1 << 9;
/// RFLAGS.RF.
pub(super) const RF: u64 = 1 << 16;
const IOPL3: u64 = 3 << 12;

/// How long one guest may run in all; a probe that hangs costs no more.
const BUDGET: Duration = Duration::from_millis(50);

/// How much longer than that it may take on a host that is busy with other things.
const LOAD_MAX: u32 = 10;

code! {
    /// A handler. The host knows the vector by where it is.
    fn handler { "out 0xd0, al", "iretq" }
    /// The same where the processor pushes an error code.
    fn handler_with_error { "out 0xd0, al", "add rsp, 8", "iretq" }
    /// Runs in system-management mode, in 16-bit code.
    fn smm_handler { "out 0xd1, al", "rsm" }
}

/// An ioctl that KVM refused.
#[derive(Debug, Error)]
#[error("{call}: {source}")]
pub(super) struct Refused {
    call: &'static str,
    source: io::Error,
}

/// Names the call behind an error.
pub(super) trait Named<T> {
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

/// Where a guest starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// CPL 0.
    Kernel,
    /// CPL 3, with I/O allowed.
    User,
}

impl Level {
    /// Code and stack segment selectors.
    pub(super) fn selectors(self) -> (u16, u16) {
        match self {
            Self::Kernel => (KERNEL_CS, KERNEL_SS),
            Self::User => (USER_CS, USER_SS),
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "CPL0",
            Self::User => "CPL3",
        })
    }
}

/// An exception or interrupt as the guest's handler found it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trap {
    pub(super) vector: u64,
    pub(super) error: u64,
    pub(super) rip: u64,
    pub(super) cs: u64,
    pub(super) rflags: u64,
    pub(super) ss: u64,
    /// Where the frame is: the address of its RIP.
    pub(super) frame: u64,
}

/// Why a guest stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stop {
    /// It wrote to [`PORT_DONE`].
    Done,
    /// Its handler reports an exception or interrupt.
    Trap(Trap),
    /// KVM_EXIT_DEBUG.
    Debug {
        rip: u64,
        vector: u32,
        dr6: u64,
    },
    /// OUT to another port.
    Out {
        port: u16,
        data: Vec<u8>,
    },
    /// IN; answered with bytes of 0x5a.
    In {
        port: u16,
        size: usize,
    },
    MmioRead {
        address: u64,
        size: usize,
    },
    MmioWrite {
        address: u64,
        data: Vec<u8>,
    },
    Rdmsr {
        index: u32,
    },
    Wrmsr {
        index: u32,
        value: u64,
    },
    Halt,
    InterruptWindow,
    /// KVM_EXIT_INTERNAL_ERROR, with the instruction where KVM gave it.
    Internal {
        suberror: u32,
        instruction: String,
    },
    Shutdown,
    FailEntry {
        reason: u64,
    },
    /// KVM_RUN failed.
    Error {
        errno: i32,
    },
    /// The budget is used up.
    Hung,
    /// Any other exit, named as kvm-ioctls does.
    Strange(String),
}

fn has_error_code(vector: u64) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21)
}

fn exception_name(vector: u64) -> String {
    let name = match vector {
        0 => "#DE",
        1 => "#DB",
        2 => "NMI",
        3 => "#BP",
        6 => "#UD",
        7 => "#NM",
        8 => "#DF",
        10 => "#TS",
        11 => "#NP",
        12 => "#SS",
        13 => "#GP",
        14 => "#PF",
        _ => return format!("vector {vector:#x}"),
    };
    name.to_owned()
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("the guest runs on"),
            Self::Trap(trap) => write!(f, "guest gets {}", exception_name(trap.vector)),
            Self::Debug { vector, dr6, .. } => {
                write!(f, "debug exit (vector {vector}, DR6 {dr6:#x})")
            }
            Self::Out { port, .. } => write!(f, "OUT exit, port {port:#x}"),
            Self::In { port, .. } => write!(f, "IN exit, port {port:#x}"),
            Self::MmioRead { address, .. } => write!(f, "MMIO read exit, {address:#x}"),
            Self::MmioWrite { address, .. } => write!(f, "MMIO write exit, {address:#x}"),
            Self::Rdmsr { index } => write!(f, "RDMSR exit, {index:#x}"),
            Self::Wrmsr { index, .. } => write!(f, "WRMSR exit, {index:#x}"),
            Self::Halt => f.write_str("HLT exit"),
            Self::InterruptWindow => f.write_str("interrupt-window exit"),
            Self::Internal {
                suberror: 1,
                instruction,
            } if !instruction.is_empty() => {
                write!(f, "internal error (cannot emulate {instruction})")
            }
            Self::Internal { suberror: 1, .. } => f.write_str("internal error (cannot emulate)"),
            Self::Internal { suberror, .. } => write!(f, "internal error (suberror {suberror})"),
            Self::Shutdown => f.write_str("triple fault"),
            Self::FailEntry { reason } => write!(f, "entry fails (reason {reason:#x})"),
            Self::Error { errno } => {
                write!(f, "KVM_RUN fails: {}", io::Error::from_raw_os_error(*errno))
            }
            Self::Hung => write!(f, "hangs (over {} ms)", BUDGET.as_millis()),
            Self::Strange(exit) => write!(f, "unexpected exit {exit}"),
        }
    }
}

/// Makes guests: what all probes share.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) kvm: Kvm,
    pub(super) cpuid: CpuId,
    alarm: Alarm,
    image: Vec<u8>,
}

impl Bench {
    /// Opens `/dev/kvm`, and makes sure that it really gives a virtual machine.
    pub(super) fn open() -> Result<Self, KvmError> {
        let kvm = crate::kvm::open_device()?;
        // Another hypervisor that holds the hardware shows only here.
        drop(kvm.create_vm().map_err(|error| match error.errno() {
            libc::EBUSY => KvmError::Busy,
            _ => ioctl("KVM_CREATE_VM")(error),
        })?);
        let cpuid = kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(ioctl("KVM_GET_SUPPORTED_CPUID"))?;
        let alarm = Alarm::new().map_err(|source| KvmError::Ioctl {
            call: "timer_create",
            source,
        })?;
        Ok(Self {
            kvm,
            cpuid,
            alarm,
            image: image(),
        })
    }

    /// One register (EAX, EBX, ECX, EDX as 0 to 3) of what KVM offers; 0 where there is nothing.
    pub(super) fn offered(&self, leaf: u32, subleaf: u32, register: usize) -> u32 {
        self.cpuid
            .as_slice()
            .iter()
            .find(|e| e.function == leaf && e.index == subleaf)
            .map_or(0, |e| [e.eax, e.ebx, e.ecx, e.edx][register & 3])
    }

    /// A guest of its own that has not run yet.
    pub(super) fn guest(&self, level: Level, code: Code) -> Result<Guest<'_>, Refused> {
        self.guest_in(level, code, |_| Ok(()))
    }

    /// The same, with `setup` done to the VM before it has a vCPU.
    pub(super) fn guest_in(
        &self,
        level: Level,
        code: Code,
        setup: impl FnOnce(&VmFd) -> Result<(), kvm_ioctls::Error>,
    ) -> Result<Guest<'_>, Refused> {
        let tiny = TinyVm::new(&self.kvm, MEMORY, setup).named("creating a VM")?;
        tiny.write(0, &self.image).named("guest memory")?;
        tiny.write(SMM_HANDLER, smm_handler().bytes())
            .named("guest memory")?;
        tiny.write(CODE, code.bytes()).named("guest memory")?;
        tiny.vcpu.set_cpuid2(&self.cpuid).named("KVM_SET_CPUID2")?;
        let mut sregs = tiny.vcpu.get_sregs().named("KVM_GET_SREGS")?;
        long_mode(&mut sregs, level);
        tiny.vcpu.set_sregs(&sregs).named("KVM_SET_SREGS")?;
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
        tiny.vcpu.set_regs(&regs).named("KVM_SET_REGS")?;
        Ok(Guest {
            tiny,
            alarm: &self.alarm,
            left: BUDGET,
            msr_reply: MsrReply::default(),
            code,
        })
    }
}

/// What every guest finds in memory from 0 on: tables and handlers.
fn image() -> Vec<u8> {
    const PRESENT_WRITE_USER: u64 = 0b111;
    const LARGE_PAGE: u64 = 1 << 7;
    let mut image = vec![0; DATA_START];
    let mut put = |address: u64, bytes: &[u8]| {
        let at = usize::try_from(address).expect("an address below DATA fits");
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    let bytes = |words: &[u64]| {
        words
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    put(PML4, &bytes(&[PDPT | PRESENT_WRITE_USER]));
    put(PDPT, &bytes(&[PD | PRESENT_WRITE_USER]));
    put(PD, &bytes(&[LARGE_PAGE | PRESENT_WRITE_USER]));
    // Null, code and data at 0, data and code at 3, TSS: access bytes 0x9b 0x93 0xf3 0xfb 0x8b.
    let gdt = [
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
        0x0000_8b00_0000_0000 | (TSS << 16) | u64::from(TSS_LIMIT),
        0,
    ];
    put(GDT, &bytes(&gdt));
    // RSP0 at 4, IST1 at 36, the I/O map base at 102; the map allows every port it covers.
    put(TSS + 4, &STACK.to_le_bytes());
    put(TSS + 36, &HANDLER_STACK.to_le_bytes());
    put(TSS + 102, &0x68_u16.to_le_bytes());
    put(TSS + u64::from(TSS_LIMIT), &[0xff]);
    for vector in 0..256 {
        let code = if has_error_code(vector) {
            handler_with_error()
        } else {
            handler()
        };
        let handler = STUBS + vector * 16;
        put(handler, code.bytes());
        // An interrupt gate that INT n may use from CPL3, on IST1.
        put(
            IDT + vector * 16,
            &bytes(&[handler | (u64::from(KERNEL_CS) << 16) | (0xee01 << 32)]),
        );
    }
    image
}

fn segment(selector: u16, kind: u8) -> kvm_segment {
    let code = kind & 8 != 0;
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        dpl: u8::try_from(selector & 3).unwrap_or(0),
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    }
}

fn long_mode(sregs: &mut kvm_sregs, level: Level) {
    let (cs, ss) = level.selectors();
    sregs.cs = segment(cs, 0xb);
    sregs.ss = segment(ss, 0x3);
    sregs.ds = segment(ss, 0x3);
    sregs.es = sregs.ds;
    sregs.fs = sregs.ds;
    sregs.gs = sregs.ds;
    sregs.tr = kvm_segment {
        base: TSS,
        limit: TSS_LIMIT,
        selector: TSS_SELECTOR,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 0x37;
    sregs.idt.base = IDT;
    sregs.idt.limit = 0xfff;
    // PE, MP, ET, NE, WP, PG.
    sregs.cr0 = 0x8001_0033;
    sregs.cr3 = PML4;
    // DE, PAE, OSFXSR, OSXMMEXCPT.
    sregs.cr4 = 0x628;
    // SCE, LME, LMA.
    sregs.efer = 0x501;
}

/// What the next MSR exit is answered.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct MsrReply {
    pub(super) value: u64,
    /// The guest gets #GP.
    pub(super) fault: bool,
}

/// A guest of one probe.
#[derive(Debug)]
pub(super) struct Guest<'b> {
    pub(super) tiny: TinyVm,
    alarm: &'b Alarm,
    left: Duration,
    pub(super) msr_reply: MsrReply,
    code: Code,
}

impl Guest<'_> {
    /// Address of the code's mark.
    pub(super) fn mark(&self) -> u64 {
        CODE + self.code.mark()
    }

    /// Runs until it stops for a reason of its own, or has used up its time: processor time, so
    /// that a loaded host does not look like a hang, with an end in real time too.
    pub(super) fn run(&mut self) -> Stop {
        let (start, used) = (Instant::now(), thread_time());
        let spent = || (thread_time().saturating_sub(used)).max(start.elapsed() / LOAD_MAX);
        self.alarm.arm(self.left.max(Duration::from_micros(1)));
        let stop = loop {
            match self.run_once() {
                Stop::Error { errno: libc::EINTR } if spent() >= self.left => break Stop::Hung,
                Stop::Error {
                    errno: libc::EINTR | libc::EAGAIN,
                } => {}
                stop => break stop,
            }
        };
        self.alarm.disarm();
        self.left = self.left.saturating_sub(spent());
        self.refine(stop)
    }

    /// Runs for `time` at most, and says whether it still ran then.
    pub(super) fn run_for(&mut self, time: Duration) -> Stop {
        self.left = time;
        self.run()
    }

    /// One KVM_RUN and nothing else: to be timed, by code that cannot hang.
    pub(super) fn run_raw(&mut self) -> Stop {
        self.run_once()
    }

    fn run_once(&mut self) -> Stop {
        match self.tiny.vcpu.run() {
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
                ioctls::internal_error(self.tiny.vcpu.get_kvm_run()).map_or(stop, |error| {
                    Stop::Internal {
                        suberror: error.suberror,
                        instruction: name_instruction(error.instruction_bytes()),
                    }
                })
            }
            stop => stop,
        }
    }

    fn trap(&self) -> Option<Trap> {
        let regs = self.tiny.vcpu.get_regs().ok()?;
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
    pub(super) fn set_trap_rflags(&self, trap: Trap, rflags: u64) -> Result<(), Refused> {
        self.tiny
            .write(trap.frame + 16, &rflags.to_le_bytes())
            .named("guest memory")
    }

    /// Lets the pending exit take effect without running any more guest code.
    pub(super) fn complete(&mut self) -> Stop {
        self.tiny.vcpu.set_kvm_immediate_exit(1);
        let stop = self.run_once();
        self.tiny.vcpu.set_kvm_immediate_exit(0);
        self.refine(stop)
    }

    /// General registers.
    pub(super) fn regs(&self) -> Result<kvm_regs, Refused> {
        self.tiny.vcpu.get_regs().named("KVM_GET_REGS")
    }

    /// Changes general registers.
    pub(super) fn edit_regs(&self, edit: impl FnOnce(&mut kvm_regs)) -> Result<(), Refused> {
        let mut regs = self.regs()?;
        edit(&mut regs);
        self.tiny.vcpu.set_regs(&regs).named("KVM_SET_REGS")
    }

    /// Changes system registers.
    pub(super) fn edit_sregs(&self, edit: impl FnOnce(&mut kvm_sregs)) -> Result<(), Refused> {
        let mut sregs = self.tiny.vcpu.get_sregs().named("KVM_GET_SREGS")?;
        edit(&mut sregs);
        self.tiny.vcpu.set_sregs(&sregs).named("KVM_SET_SREGS")
    }

    /// System registers.
    pub(super) fn sregs(&self) -> Result<kvm_sregs, Refused> {
        self.tiny.vcpu.get_sregs().named("KVM_GET_SREGS")
    }

    /// KVM_SET_MSRS with one MSR.
    pub(super) fn set_msr(&self, index: u32, data: u64) -> Result<(), Refused> {
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[entry])
            .map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))
            .named("KVM_SET_MSRS")?;
        match self.tiny.vcpu.set_msrs(&msrs).named("KVM_SET_MSRS")? {
            1 => Ok(()),
            _ => {
                Err(io::Error::other(format!("does not take MSR {index:#x}"))).named("KVM_SET_MSRS")
            }
        }
    }

    /// DR6 as the guest sees it.
    pub(super) fn dr6(&self) -> Result<u64, Refused> {
        Ok(self
            .tiny
            .vcpu
            .get_debug_regs()
            .named("KVM_GET_DEBUGREGS")?
            .dr6)
    }

    /// KVM_SET_GUEST_DEBUG with these control bits, DR0 and DR7.
    pub(super) fn debug(&self, control: u32, dr0: u64, dr7: u64) -> Result<(), Refused> {
        let mut debug = kvm_guest_debug {
            control,
            ..Default::default()
        };
        debug.arch.debugreg[0] = dr0;
        debug.arch.debugreg[7] = dr7;
        self.tiny
            .vcpu
            .set_guest_debug(&debug)
            .named("KVM_SET_GUEST_DEBUG")
    }
}

/// The mnemonic of the first instruction in `bytes`; empty when there is none.
fn name_instruction(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return String::new();
    }
    let instruction = Decoder::new(64, bytes, DecoderOptions::NONE).decode();
    if instruction.is_invalid() {
        return format!("bytes {bytes:02x?}");
    }
    format!("{:?}", instruction.mnemonic()).to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_fit_their_places() {
        assert!(handler().bytes().len() <= 16);
        assert!(handler_with_error().bytes().len() <= 16);
    }

    #[test]
    fn instruction_bytes_are_named() {
        assert_eq!(name_instruction(&[0xcc, 0x90]), "INT3");
        assert_eq!(name_instruction(&[]), "");
    }
}
