//! Runs code between two WRMSRs to IA32_DEBUGCTL, with exception handlers in assembly.
//!
//! With architectural LBR the MSR can be IA32_LBR_CTL ([`set_control`]).
//!
//! Nothing but the code and the handlers branches while branches are recorded.

use core::arch::global_asm;
use core::cell::UnsafeCell;

use hindsight_guest::catch::catch;
use hindsight_guest::check_eq;
use hindsight_guest::gdt::{USER_CODE, USER_DATA};
use hindsight_guest::regs::msr::IA32_DEBUGCTL;
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::vectors::{restore_gate, set_gate};
use hindsight_guest::{insn, msr};

use crate::branch::{BranchSequence, FAR, IND_JMP, LBR, TR, TakenBranch};

/// Vector of the INT that ends a sequence; allowed at CPL 3.
pub const STOP_VECTOR: u8 = 0x81;
/// Vector whose handler returns at once; allowed at CPL 3.
pub const RETURN_VECTOR: u8 = 0x82;
/// Vector of hardware interrupts. Its handler records the saved RIP, sends EOI and returns.
pub const IRQ_VECTOR: u8 = 0xe0;

// The handlers:
// recorder_return returns. recorder_skip returns 2 bytes further, behind a UD2.
// recorder_resume, and recorder_resume_code for exceptions with an error code, return to R15 with
// RSP = R14.
// recorder_irq and recorder_nmi count the event and record the saved RIP.
// recorder_debug also records IA32_DEBUGCTL and DR6, and returns with TF clear and RF set.
global_asm!(
    ".pushsection .text.recorder, \"ax\"",
    // extern "C" fn(code, debugctl, flags of CPL 3, stack of CPL 3 or 0 for CPL 0)
    ".global recorder_enter, recorder_iretq, recorder_jump, recorder_stop",
    "recorder_enter:",
    "push rbp",
    "push rbx",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "pushfq",
    "mov [rip + recorder_rsp], rsp",
    "mov r12, rdi",
    "mov rax, rsi",
    "mov r13, rcx",
    "test rcx, rcx",
    "jz 2f",
    "push {user_data}",
    "push rcx",
    "push rdx",
    "push {user_code}",
    "push rdi",
    "xor edx, edx",
    "mov ecx, [rip + recorder_msr]",
    "wrmsr",
    "recorder_iretq:",
    "iretq",
    "2:",
    "xor edx, edx",
    "mov ecx, [rip + recorder_msr]",
    "wrmsr",
    "recorder_jump:",
    "jmp r12",
    "recorder_stop:",
    "mov ecx, [rip + recorder_msr]",
    "xor eax, eax",
    "xor edx, edx",
    "wrmsr",
    "mov rsp, [rip + recorder_rsp]",
    "popfq",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "pop rbp",
    "cld",
    "ret",
    ".global recorder_return, recorder_skip, recorder_skip_return",
    "recorder_skip:",
    "add qword ptr [rsp], 2",
    "recorder_skip_return:",
    "iretq",
    "recorder_return:",
    "iretq",
    ".global recorder_resume, recorder_resume_code, recorder_resume_return",
    "recorder_resume_code:",
    "add rsp, 8",
    "recorder_resume:",
    "mov [rsp], r15",
    "mov [rsp + 24], r14",
    "recorder_resume_return:",
    "iretq",
    ".global recorder_irq, recorder_irq_return, recorder_nmi, recorder_nmi_return",
    "recorder_irq:",
    "push rax",
    "mov rax, [rsp + 8]",
    "mov [rip + recorder_irq_rip], rax",
    "mov eax, 0xfee000b0",
    "mov dword ptr [rax], 0",
    "inc qword ptr [rip + recorder_irqs]",
    "pop rax",
    "recorder_irq_return:",
    "iretq",
    "recorder_nmi:",
    "push rax",
    "mov rax, [rsp + 8]",
    "mov [rip + recorder_irq_rip], rax",
    "inc qword ptr [rip + recorder_irqs]",
    "pop rax",
    "recorder_nmi_return:",
    "iretq",
    ".global recorder_debug, recorder_debug_return",
    "recorder_debug:",
    "push rax",
    "push rcx",
    "push rdx",
    "mov ecx, [rip + recorder_msr]",
    "rdmsr",
    "shl rdx, 32",
    "or rax, rdx",
    "mov [rip + recorder_debug_msr], rax",
    "mov rax, dr6",
    "mov [rip + recorder_debug_dr6], rax",
    "mov rax, [rsp + 24]",
    "mov [rip + recorder_debug_rip], rax",
    "inc qword ptr [rip + recorder_debugs]",
    "and qword ptr [rsp + 40], -257",
    "or qword ptr [rsp + 40], 0x10000",
    "pop rdx",
    "pop rcx",
    "pop rax",
    "recorder_debug_return:",
    "iretq",
    ".popsection",
    ".pushsection .data.recorder, \"aw\"",
    ".balign 8",
    ".global recorder_events",
    "recorder_rsp: .quad 0",
    ".global recorder_msr",
    "recorder_msr: .quad {debugctl}",
    "recorder_events:",
    "recorder_irqs: .quad 0",
    "recorder_irq_rip: .quad 0",
    "recorder_debugs: .quad 0",
    "recorder_debug_rip: .quad 0",
    "recorder_debug_msr: .quad 0",
    "recorder_debug_dr6: .quad 0",
    ".popsection",
    debugctl = const IA32_DEBUGCTL,
    user_data = const USER_DATA,
    user_code = const USER_CODE,
);

unsafe extern "C" {
    fn recorder_enter(code: u64, debugctl: u64, flags: u64, stack: u64);
    fn recorder_iretq();
    fn recorder_jump();
    fn recorder_stop();
    fn recorder_return();
    fn recorder_skip();
    fn recorder_resume();
    fn recorder_resume_code();
    fn recorder_irq();
    fn recorder_nmi();
    fn recorder_debug();
    static mut recorder_events: RunEvents;
    static mut recorder_msr: u32;
}

/// Sets the MSR that begins and ends recording: IA32_DEBUGCTL, or IA32_LBR_CTL.
pub fn set_control(index: u32) {
    // SAFETY: one run at a time uses it, and none does now.
    unsafe { recorder_msr = index }
}

/// The MSR that begins and ends recording.
fn control() -> u32 {
    // SAFETY: it has only values that `set_control` wrote.
    unsafe { recorder_msr }
}

/// What the handlers recorded in the last run.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RunEvents {
    /// Hardware interrupts and NMIs.
    pub irqs: u64,
    /// The RIP that the last of them saved.
    pub irq_rip: u64,
    /// #DBs.
    pub debugs: u64,
    /// The RIP that the last #DB saved.
    pub debug_rip: u64,
    /// IA32_DEBUGCTL at the start of the handler of the last #DB.
    pub debugctl: u64,
    /// DR6 in the handler of the last #DB.
    pub dr6: u64,
}

#[repr(C, align(16))]
struct UserStack(UnsafeCell<[u8; 4096]>);

// SAFETY: one run at a time uses it, as its stack.
unsafe impl Sync for UserStack {}

static USER_STACK: UserStack = UserStack(UnsafeCell::new([0; 4096]));

/// An exception that ended a run because it has no handler.
#[derive(Clone, Copy, Debug)]
pub struct UnhandledException {
    /// Vector and error code.
    pub code: (u8, u64),
    /// Saved RIP; 0 if the WRMSR to IA32_DEBUGCTL raised the exception.
    pub rip: u64,
}

/// One run of code with known branches.
#[derive(Clone, Copy, Debug)]
pub struct BranchRun {
    /// Address of the first instruction.
    pub code: u64,
    /// IA32_DEBUGCTL during the run.
    pub debugctl: u64,
    /// CPL, 0 or 3.
    pub level: u8,
    /// RFLAGS at the start of a run at CPL 3; bit 1 is added.
    pub flags: u64,
    /// Handlers that replace the usual ones, by vector.
    pub handlers: &'static [(u8, AsmHandler)],
}

impl BranchRun {
    /// A run of `sequence`, at CPL 3 with interrupts disabled and IOPL 3.
    pub fn new(level: u8, sequence: &BranchSequence, debugctl: u64) -> Self {
        Self {
            code: sequence.code(),
            debugctl,
            level,
            flags: IOPL_3,
            handlers: &[],
        }
    }
}

/// A handler in assembly, which ends with IRETQ or is [`STOP`].
pub type AsmHandler = unsafe extern "C" fn();

/// The handler that ends a run.
pub const STOP: AsmHandler = recorder_stop;
/// The handler that returns at once.
pub const RETURN: AsmHandler = recorder_return;

fn address(f: AsmHandler) -> u64 {
    f as *const () as u64
}

/// The branch that begins a run at `level`.
pub fn entry(level: u8, code: u64) -> TakenBranch {
    if level == 3 {
        TakenBranch::new(address(recorder_iretq), code, FAR).from_0()
    } else {
        TakenBranch::new(address(recorder_jump), code, IND_JMP)
    }
}

/// The branch that ends a run.
pub fn exit(stop: u64) -> TakenBranch {
    TakenBranch::new(stop, address(recorder_stop), FAR).into_0()
}

/// Vectors, with the DPL of their gates and their handlers.
const GATES: [(u8, u8, AsmHandler); 12] = [
    (STOP_VECTOR, 3, recorder_stop),
    (RETURN_VECTOR, 3, recorder_return),
    (IRQ_VECTOR, 0, recorder_irq),
    (0, 0, recorder_resume),
    (1, 0, recorder_debug),
    (2, 0, recorder_nmi),
    (3, 3, recorder_return),
    (4, 3, recorder_return),
    (6, 0, recorder_skip),
    (12, 0, recorder_resume_code),
    (13, 0, recorder_resume_code),
    (14, 0, recorder_resume_code),
];

/// Runs the code; returns what the handlers recorded, or the exception that has no handler.
///
/// Interrupts are disabled at the start, unless the flags of a run at CPL 3 enable them.
/// IA32_DEBUGCTL is 0 afterwards.
pub fn run(run: BranchRun) -> Result<RunEvents, UnhandledException> {
    // An invalid value must fault here and not in the assembly. LBR and TR are left out, because
    // they would record branches at once.
    if let Err(code) = msr::write_safe(control(), run.debugctl & !(LBR | TR)) {
        return Err(UnhandledException { code, rip: 0 });
    }
    // SAFETY: only the handlers of a run access it otherwise, and none runs now.
    unsafe { (&raw mut recorder_events).write_volatile(RunEvents::default()) };
    let stack = if run.level == 3 {
        USER_STACK.0.get() as u64 + 4096
    } else {
        0
    };
    let old = GATES.map(|(vector, dpl, handler)| {
        let other = run.handlers.iter().find(|(other, _)| *other == vector);
        let handler = other.map_or(handler, |&(_, handler)| handler);
        set_gate(vector, address(handler), dpl)
    });
    let fault = catch(|| {
        // SAFETY: the code ends with INT 81H, whose handler restores the stack and the registers
        // that the C calling convention names.
        unsafe { recorder_enter(run.code, run.debugctl, run.flags | 2, stack) };
    });
    insn::cli();
    for ((vector, ..), old) in GATES.into_iter().zip(old) {
        restore_gate(vector, old);
    }
    match fault {
        Some(exception) => {
            msr::write(control(), 0);
            Err(UnhandledException {
                code: exception.code(),
                rip: exception.rip,
            })
        }
        // SAFETY: the run is over, so no handler writes it.
        None => Ok(unsafe { (&raw const recorder_events).read_volatile() }),
    }
}

/// IOPL 3, with which STI and CLI work at CPL 3.
pub const IOPL_3: u64 = Rflags::IOPL.bits();

/// Runs `sequence` with this IA32_DEBUGCTL. An exception without a handler is a failed check.
pub fn run_sequence(level: u8, sequence: &BranchSequence, debugctl: u64) -> Option<RunEvents> {
    run_checked(BranchRun::new(level, sequence, debugctl))
}

/// Like [`run_sequence`], for any run.
pub fn run_checked(branch_run: BranchRun) -> Option<RunEvents> {
    match run(branch_run) {
        Ok(events) => Some(events),
        Err(exception) => {
            let found = Some((exception.code, exception.rip));
            check_eq!(
                found,
                None,
                "an exception ended the run: vector, error, RIP"
            );
            None
        }
    }
}
