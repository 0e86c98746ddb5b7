//! Runs a piece of code between the WRMSR that arms the recording and the one that disarms it.

use core::arch::global_asm;
use core::cell::UnsafeCell;

use hindsight_guest::catch::catch;
use hindsight_guest::check_eq;
use hindsight_guest::gdt::{USER_CODE, USER_DATA};
use hindsight_guest::regs::msr::IA32_DEBUGCTL;
use hindsight_guest::vectors::{restore_gate, set_gate};
use hindsight_guest::{insn, msr};

use super::{BranchSequence, FAR, IND_JMP, LBR, TR, TakenBranch};

/// Vector by which a sequence ends; callable at CPL 3.
pub const STOP_VECTOR: u8 = 0x81;
/// Vector whose handler returns at once; callable at CPL 3.
pub const RETURN_VECTOR: u8 = 0x82;
/// Vector of hardware interrupts; its handler keeps the saved RIP, ends the interrupt, and returns.
pub const IRQ_VECTOR: u8 = 0xe0;

// Handlers, by what they do with the frame:
// recorder_return: nothing. recorder_skip: goes on 2 bytes further, past a UD2.
// recorder_resume, recorder_resume_code (with an error code): go on at R15 with RSP = R14.
// recorder_irq, recorder_nmi: keep the saved RIP, count. recorder_debug: also keeps IA32_DEBUGCTL
// and DR6, goes on with TF clear and RF set.
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
    "mov ecx, {debugctl}",
    "wrmsr",
    "recorder_iretq:",
    "iretq",
    "2:",
    "xor edx, edx",
    "mov ecx, {debugctl}",
    "wrmsr",
    "recorder_jump:",
    "jmp r12",
    "recorder_stop:",
    "mov ecx, {debugctl}",
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
    "mov ecx, {debugctl}",
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
    ".global recorder_seen",
    "recorder_rsp: .quad 0",
    "recorder_seen:",
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
    static mut recorder_seen: RunEvents;
}

/// What the handlers saw in the last run.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RunEvents {
    /// Hardware interrupts and NMIs.
    pub irqs: u64,
    /// RIP that the last of them saved.
    pub irq_rip: u64,
    /// #DBs.
    pub debugs: u64,
    /// RIP that the last of them saved.
    pub debug_rip: u64,
    /// IA32_DEBUGCTL as its handler read it first.
    pub debugctl: u64,
    /// DR6 in its handler.
    pub dr6: u64,
}

#[repr(C, align(16))]
struct UserStack(UnsafeCell<[u8; 4096]>);

// SAFETY: used by one run at a time, by address only.
unsafe impl Sync for UserStack {}

static USER_STACK: UserStack = UserStack(UnsafeCell::new([0; 4096]));

/// The exception that ended a run, because no handler takes it.
#[derive(Clone, Copy, Debug)]
pub struct UnhandledException {
    /// Vector and error code.
    pub code: (u8, u64),
    /// Saved RIP; 0 if IA32_DEBUGCTL refused its value.
    pub rip: u64,
}

/// One run of a piece of code.
#[derive(Clone, Copy, Debug)]
pub struct BranchRun {
    /// Its first instruction.
    pub code: u64,
    /// IA32_DEBUGCTL while it runs.
    pub debugctl: u64,
    /// CPL, 0 or 3.
    pub level: u8,
    /// RFLAGS at the start of a run at CPL 3; bit 1 is added.
    pub flags: u64,
    /// Vectors with handlers of the caller's, in place of the usual ones.
    pub handlers: &'static [(u8, AsmHandler)],
}

impl BranchRun {
    /// A run of `sequence`, at CPL 3 with interrupts off and IOPL 3.
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

/// A handler in assembly, which ends by IRETQ or is [`STOP`].
pub type AsmHandler = unsafe extern "C" fn();

/// The handler that ends a run.
pub const STOP: AsmHandler = recorder_stop;
/// The handler that returns at once.
pub const RETURN: AsmHandler = recorder_return;

fn address(f: AsmHandler) -> u64 {
    f as *const () as u64
}

/// The transfer that begins a run at `level`.
pub fn entry(level: u8, code: u64) -> TakenBranch {
    if level == 3 {
        TakenBranch::new(address(recorder_iretq), code, FAR).from_0()
    } else {
        TakenBranch::new(address(recorder_jump), code, IND_JMP)
    }
}

/// The transfer that ends a run.
pub fn exit(stop: u64) -> TakenBranch {
    TakenBranch::new(stop, address(recorder_stop), FAR).into_0()
}

/// Vector, DPL of its gate, handler.
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

/// Runs the code, and returns what the handlers saw, or the exception that none of them takes.
///
/// Interrupts are off at the start, unless a run at CPL 3 says otherwise. IA32_DEBUGCTL is 0 after.
pub fn run(run: BranchRun) -> Result<RunEvents, UnhandledException> {
    // A value that is refused must fail here, not in the assembly: all but what records at once.
    if let Err(code) = msr::write_safe(IA32_DEBUGCTL, run.debugctl & !(LBR | TR)) {
        return Err(UnhandledException { code, rip: 0 });
    }
    // SAFETY: no run is going on.
    unsafe { (&raw mut recorder_seen).write_volatile(RunEvents::default()) };
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
        // SAFETY: the sequence ends by the stop vector, which restores the stack and the registers.
        unsafe { recorder_enter(run.code, run.debugctl, run.flags | 2, stack) };
    });
    insn::cli();
    for ((vector, ..), old) in GATES.into_iter().zip(old) {
        restore_gate(vector, old);
    }
    match fault {
        Some(exception) => {
            msr::write(IA32_DEBUGCTL, 0);
            Err(UnhandledException {
                code: exception.code(),
                rip: exception.rip,
            })
        }
        // SAFETY: the handlers are done.
        None => Ok(unsafe { (&raw const recorder_seen).read_volatile() }),
    }
}

/// IOPL 3, with which STI and CLI work at CPL 3.
pub const IOPL_3: u64 = 3 << 12;

/// Runs `sequence` with IA32_DEBUGCTL = `debugctl`. An exception that no handler takes is a failed
/// check, and gives `None`.
pub fn run_sequence(level: u8, sequence: &BranchSequence, debugctl: u64) -> Option<RunEvents> {
    run_checked(BranchRun::new(level, sequence, debugctl))
}

/// As [`run_sequence`], for any run.
pub fn run_checked(what: BranchRun) -> Option<RunEvents> {
    match run(what) {
        Ok(seen) => Some(seen),
        Err(stopped) => {
            let found = Some((stopped.code, stopped.rip));
            check_eq!(
                found,
                None,
                "an exception ended the run: vector, error, RIP"
            );
            None
        }
    }
}
