//! The host's side: executes one instruction on a whole register state, and survives its faults.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::Result;
use super::common::host_cpuid;
use super::generate::{Case, DATA, PAGES};
use hindsight_cpu::state::CpuState;
use std::cell::UnsafeCell;

/// What the thunk works on; the offsets stand in the assembly.
#[repr(C, align(64))]
struct Context {
    xsave: [u8; 4096],
    gpr: [u64; 16],
    flags: u64,
    host_rsp: u64,
    target: u64,
    fault: u64,
    cr2: u64,
}

struct Shared(UnsafeCell<Context>);
// SAFETY: only the one test thread uses it.
unsafe impl Sync for Shared {}

static CONTEXT: Shared = Shared(UnsafeCell::new(Context {
    xsave: [0; 4096],
    gpr: [0; 16],
    flags: 0,
    host_rsp: 0,
    target: 0,
    fault: 0,
    cr2: 0,
}));

std::arch::global_asm!(
    ".global hs_enter, hs_resume",
    "hs_enter:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov [rip + {c} + 4096 + 17*8], rsp",
    "mov eax, 0xe7",
    "xor edx, edx",
    "xrstor64 [rip + {c}]",
    "push qword ptr [rip + {c} + 4096 + 16*8]",
    "popfq",
    "mov rax, [rip + {c} + 4096]",
    "mov rcx, [rip + {c} + 4096 + 8]",
    "mov rdx, [rip + {c} + 4096 + 16]",
    "mov rbx, [rip + {c} + 4096 + 24]",
    "mov rsp, [rip + {c} + 4096 + 32]",
    "mov rbp, [rip + {c} + 4096 + 40]",
    "mov rsi, [rip + {c} + 4096 + 48]",
    "mov rdi, [rip + {c} + 4096 + 56]",
    "mov r8, [rip + {c} + 4096 + 64]",
    "mov r9, [rip + {c} + 4096 + 72]",
    "mov r10, [rip + {c} + 4096 + 80]",
    "mov r11, [rip + {c} + 4096 + 88]",
    "mov r12, [rip + {c} + 4096 + 96]",
    "mov r13, [rip + {c} + 4096 + 104]",
    "mov r14, [rip + {c} + 4096 + 112]",
    "mov r15, [rip + {c} + 4096 + 120]",
    "jmp qword ptr [rip + {c} + 4096 + 18*8]",
    "hs_resume:",
    "mov [rip + {c} + 4096], rax",
    "mov [rip + {c} + 4096 + 8], rcx",
    "mov [rip + {c} + 4096 + 16], rdx",
    "mov [rip + {c} + 4096 + 24], rbx",
    "mov [rip + {c} + 4096 + 32], rsp",
    "mov [rip + {c} + 4096 + 40], rbp",
    "mov [rip + {c} + 4096 + 48], rsi",
    "mov [rip + {c} + 4096 + 56], rdi",
    "mov [rip + {c} + 4096 + 64], r8",
    "mov [rip + {c} + 4096 + 72], r9",
    "mov [rip + {c} + 4096 + 80], r10",
    "mov [rip + {c} + 4096 + 88], r11",
    "mov [rip + {c} + 4096 + 96], r12",
    "mov [rip + {c} + 4096 + 104], r13",
    "mov [rip + {c} + 4096 + 112], r14",
    "mov [rip + {c} + 4096 + 120], r15",
    "mov rsp, [rip + {c} + 4096 + 17*8]",
    "pushfq",
    "pop qword ptr [rip + {c} + 4096 + 16*8]",
    "mov eax, 0xe7",
    "xor edx, edx",
    "xsave64 [rip + {c}]",
    "vzeroupper",
    "fninit",
    "mov dword ptr [rsp - 64], 0x1f80",
    "ldmxcsr [rsp - 64]",
    "cld",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    c = sym CONTEXT,
);

unsafe extern "C" {
    fn hs_enter();
    fn hs_resume();
}

extern "C" fn on_fault(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a ucontext; the thunk runs on this thread.
    unsafe {
        let uc = &mut *context.cast::<libc::ucontext_t>();
        let regs = &mut uc.uc_mcontext.gregs;
        let c = &mut *CONTEXT.0.get();
        c.fault = regs[libc::REG_TRAPNO as usize] as u64 + 1;
        c.cr2 = regs[libc::REG_CR2 as usize] as u64;
        // Back to 64-bit code, whatever ran.
        let cs = regs[libc::REG_CSGSFS as usize];
        regs[libc::REG_CSGSFS as usize] = (cs & !0xffff) | 0x33;
        regs[libc::REG_RIP as usize] = (hs_resume as *const ()).addr() as i64;
    }
}

/// Where code for compatibility mode goes.
const LOW: u64 = 0x5000_0000;

/// The host's processor.
pub struct Native {
    code: *mut u8,
    /// Code for compatibility mode, below 4 GiB.
    low: *mut u8,
    data: *mut u8,
}

fn map(at: u64, len: usize, prot: i32) -> *mut u8 {
    // SAFETY: a fresh mapping; with an address, one that the test keeps for itself.
    let p = unsafe {
        let fixed = if at == 0 {
            0
        } else {
            libc::MAP_FIXED_NOREPLACE
        };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
        libc::mmap(
            std::ptr::with_exposed_provenance_mut(at as usize),
            len,
            prot,
            flags,
            -1,
            0,
        )
    };
    assert_ne!(p, libc::MAP_FAILED);
    p.cast()
}

impl Native {
    pub fn new() -> Self {
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let data = map(DATA, PAGES * 0x1000, rw);
        let code = map(0, 0x1000, rw | libc::PROT_EXEC);
        let low = map(LOW, 0x1000, rw | libc::PROT_EXEC);
        let stack = map(0, 0x10000, rw);
        // SAFETY: the handler is async-signal-safe: it only edits the context.
        unsafe {
            let ss = libc::stack_t {
                ss_sp: stack.cast(),
                ss_flags: 0,
                ss_size: 0x10000,
            };
            assert_eq!(libc::sigaltstack(&raw const ss, std::ptr::null_mut()), 0);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = (on_fault as *const ()).addr();
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            for signal in [
                libc::SIGSEGV,
                libc::SIGBUS,
                libc::SIGFPE,
                libc::SIGILL,
                libc::SIGTRAP,
            ] {
                assert_eq!(
                    libc::sigaction(signal, &raw const action, std::ptr::null_mut()),
                    0
                );
            }
        }
        Self { code, low, data }
    }

    /// The code to jump to, and where it goes.
    fn code(&self, case: &Case) -> (Vec<u8>, *mut u8) {
        let resume = ((hs_resume as *const ()).addr() as u64).to_le_bytes();
        if case.bits == 64 {
            let mut code = case.bytes.clone();
            code.extend([0xff, 0x25, 0, 0, 0, 0]);
            code.extend(resume);
            return (code, self.code);
        }
        // At 0: mov ds, [at 32]; mov es, [at 32]; jmp far [at 24]. At 18: jmp [at 40]. At 64 the
        // instruction, then a far jump to 18.
        let mut code = vec![0x8e, 0x1d, 26, 0, 0, 0, 0x8e, 0x05, 20, 0, 0, 0];
        code.extend([0xff, 0x2d, 6, 0, 0, 0]);
        code.extend([0xff, 0x25, 16, 0, 0, 0]);
        code.extend((LOW as u32 + 64).to_le_bytes());
        code.extend([0x23, 0, 0, 0]);
        code.extend([0x2b, 0, 0, 0, 0, 0, 0, 0]);
        code.extend(resume);
        code.resize(64, 0);
        code.extend(&case.bytes);
        code.push(0xea);
        code.extend((LOW as u32 + 18).to_le_bytes());
        code.extend([0x33, 0]);
        (code, self.low)
    }

    pub fn run(&mut self, case: &Case) -> Result {
        let (code, at) = self.code(case);
        // SAFETY: the mappings are ours; the instruction only reaches the data page or faults, as
        // the generator made sure of; faults lead to `hs_resume`.
        unsafe {
            std::ptr::copy_nonoverlapping(code.as_ptr(), at, code.len());
            std::ptr::copy_nonoverlapping(case.memory.as_ptr(), self.data, case.memory.len());
            let c = &mut *CONTEXT.0.get();
            c.gpr = case.gpr;
            c.flags = case.flags;
            c.target = at.addr() as u64;
            c.fault = 0;
            to_host(case, &mut c.xsave);
            hs_enter();
            let c = &*CONTEXT.0.get();
            let mut result = from_host(&c.xsave);
            result.gpr = c.gpr;
            result.flags = c.flags;
            result.memory = vec![0; case.memory.len()];
            std::ptr::copy_nonoverlapping(self.data, result.memory.as_mut_ptr(), case.memory.len());
            if c.fault != 0 {
                let vector = (c.fault - 1) as u8;
                let memory = std::mem::take(&mut result.memory);
                result = result_of(case);
                result.memory = memory;
                result.fault = Some((vector, if vector == 14 { c.cr2 } else { 0 }));
            }
            result
        }
    }
}

/// Components beyond the legacy region, where this host has them and where Intel has them:
/// register, first byte of it, bytes, host offset, Intel offset.
fn places() -> Vec<(usize, usize, usize, usize, usize)> {
    let mut list = Vec::new();
    for i in 0..16 {
        list.push((i, 0, 16, 160 + 16 * i, 160 + 16 * i));
    }
    let supported = host_cpuid(0xd, 0)[0];
    for (component, first, at, len, intel) in [
        (2, 0, 16, 16, 576),
        (6, 0, 32, 32, 1152),
        (7, 16, 0, 64, 1664),
    ] {
        if supported >> component & 1 == 0 {
            continue;
        }
        let offset = host_cpuid(0xd, component)[1] as usize;
        for i in 0..16 {
            list.push((first + i, at, len, offset + len * i, intel + len * i));
        }
    }
    list
}

fn opmask_place() -> usize {
    host_cpuid(0xd, 5)[1] as usize
}

fn has_opmask() -> bool {
    host_cpuid(0xd, 0)[0] >> 5 & 1 != 0
}

fn fill(case: &Case, area: &mut [u8], intel: bool) {
    area.fill(0);
    area[..160].copy_from_slice(&case.x87);
    area[24..28].copy_from_slice(&case.mxcsr.to_le_bytes());
    area[28..32].fill(0);
    let present = u64::from(host_cpuid(0xd, 0)[0]) & 0xe7;
    area[512..520].copy_from_slice(&present.to_le_bytes());
    for (reg, at, len, host, other) in places() {
        let to = if intel { other } else { host };
        area[to..to + len].copy_from_slice(&case.vectors[reg * 64 + at..][..len]);
    }
    if has_opmask() {
        let to = if intel { 1088 } else { opmask_place() };
        for (i, k) in case.opmasks.iter().enumerate() {
            area[to + 8 * i..][..8].copy_from_slice(&k.to_le_bytes());
        }
    }
}

fn to_host(case: &Case, area: &mut [u8]) {
    fill(case, area, false);
}

pub fn to_state(case: &Case, area: &mut [u8]) {
    fill(case, area, true);
}

fn collect(area: &[u8], intel: bool) -> Result {
    let present = u64::from_le_bytes(area[512..520].try_into().unwrap());
    let mut vectors = vec![0; 33 * 64];
    for (reg, at, len, host, other) in places() {
        let from = if intel { other } else { host };
        let component = match (at, reg) {
            (_, 16..) => 7,
            (0, _) => 1,
            (16, _) => 2,
            _ => 6,
        };
        if present >> component & 1 != 0 {
            vectors[reg * 64 + at..][..len].copy_from_slice(&area[from..from + len]);
        }
    }
    if has_opmask() && present >> 5 & 1 != 0 {
        let from = if intel { 1088 } else { opmask_place() };
        vectors[32 * 64..].copy_from_slice(&area[from..from + 64]);
    }
    let mut x87 = area[..160].to_vec();
    x87[5..32].fill(0);
    if present & 1 == 0 {
        x87.fill(0);
        x87[..2].copy_from_slice(&0x37f_u16.to_le_bytes());
    }
    for reg in x87[32..].chunks_mut(16) {
        reg[10..].fill(0);
    }
    let mxcsr = u32::from_le_bytes(area[24..28].try_into().unwrap());
    Result {
        fault: None,
        gpr: [0; 16],
        flags: 0,
        vectors,
        mxcsr,
        x87,
        memory: Vec::new(),
    }
}

fn from_host(area: &[u8]) -> Result {
    collect(area, false)
}

pub fn from_state(st: &CpuState) -> Result {
    let mut r = collect(&st.xsave.0, true);
    r.gpr = st.gpr;
    r.flags = st.rflags;
    r
}

/// The state before: what a fault leaves.
pub fn result_of(_: &Case) -> Result {
    Result {
        fault: None,
        gpr: [0; 16],
        flags: 0,
        vectors: Vec::new(),
        mxcsr: 0,
        x87: Vec::new(),
        memory: Vec::new(),
    }
}
