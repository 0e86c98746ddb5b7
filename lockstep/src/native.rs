//! The host's side: runs a batch on this processor, in this process, and survives its faults.

#![expect(unsafe_code, reason = "generated code is entered, faults are signals")]

use crate::batch::Batch;
use crate::layout::*;
use crate::map::{Map, memory_file};
use anyhow::Result;
use std::os::fd::AsRawFd;
use std::sync::Once;

std::arch::global_asm!(
    // RDI: the cells. Everything else comes from the batch's own code.
    ".global hs_lockstep_enter, hs_lockstep_resume, hs_lockstep_resume_avx",
    "hs_lockstep_enter:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "sub rsp, 8",
    "mov [rdi + 8], rsp",
    "jmp rsi",
    "hs_lockstep_resume_avx:",
    "vzeroupper",
    "hs_lockstep_resume:",
    // Flags first: alignment checks and the direction may be on.
    "push 0x202",
    "popfq",
    "fninit",
    "mov dword ptr [rsp], 0x1f80",
    "ldmxcsr [rsp]",
    "add rsp, 8",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
);

unsafe extern "C" {
    fn hs_lockstep_enter(cells: *mut u8, code: usize);
    fn hs_lockstep_resume();
    fn hs_lockstep_resume_avx();
}

/// Notes the exception and goes on behind the instruction.
extern "C" fn on_fault(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: alignment checks may still be on, and what follows must not care.
    unsafe { std::arch::asm!("push 0x202", "popfq") };
    let here = (&raw const context).addr();
    let region = here & !(STRIDE as usize - 1);
    let cell = |at: usize| std::ptr::with_exposed_provenance_mut::<u8>(region + at);
    // SAFETY: the kernel gives a ucontext. Only batches fault on a signal stack, which lies in
    // their region; its cells are mapped and aligned.
    unsafe {
        let uc = &mut *context.cast::<libc::ucontext_t>();
        let regs = &mut uc.uc_mcontext.gregs;
        let slot = cell(CURRENT as usize).cast::<u32>().read() as usize % SLOTS;
        let vector = regs[libc::REG_TRAPNO as usize].cast_unsigned();
        let cr2 = if vector == 14 {
            regs[libc::REG_CR2 as usize]
        } else {
            0
        };
        let record = cell(FAULTS as usize + slot * FAULT_LEN as usize).cast::<u64>();
        record
            .write((vector + 1) & 0xffff_ffff | regs[libc::REG_ERR as usize].cast_unsigned() << 32);
        record.add(1).write(cr2.cast_unsigned());
        record
            .add(2)
            .write(regs[libc::REG_RIP as usize].cast_unsigned());
        let post = cell(POST as usize + slot * 4).cast::<u32>().read();
        regs[libc::REG_RIP as usize] = i64::from(post);
    }
}

fn handle_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only reads and writes its context and the region.
        unsafe {
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
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
        }
    });
}

/// The host's processor with one region. Only the thread that made it may run it.
#[derive(Debug)]
pub struct Native {
    base: u32,
    /// All of the region, writable.
    view: Map,
    /// The region as the code sees it.
    _parts: Vec<Map>,
    previous: libc::stack_t,
}

impl Native {
    /// Maps the region: one at a time in a process.
    ///
    /// # Errors
    /// When memory cannot be mapped where it must be.
    pub fn new() -> Result<Self> {
        let base = FIRST;
        let file = memory_file(GUEST_LEN as usize)?;
        let (r, w, x) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
        let view = Map::new(0, GUEST_LEN as usize, r | w, Some((file.as_raw_fd(), 0)))?;
        let mut parts = Vec::new();
        for (at, len, prot) in [
            (DATA, DATA_LEN, r | w),
            (READ_ONLY, 0x1000, r),
            (PARAMS, PARAMS_LEN, r | w),
            (LOG, LOG_LEN, r | w),
            (CODE, CODE_LEN, r | x),
            (CELLS, 0x1000, r | w),
        ] {
            let file = Some((file.as_raw_fd(), at as usize));
            parts.push(Map::new((base + at) as usize, len as usize, prot, file)?);
        }
        let stack = Map::new(
            (base + SIGNAL_STACK) as usize,
            SIGNAL_STACK_LEN as usize,
            r | w,
            None,
        )?;
        let mut previous = libc::stack_t {
            ss_sp: std::ptr::null_mut(),
            ss_flags: libc::SS_DISABLE,
            ss_size: 0,
        };
        // SAFETY: the stack stays mapped until `drop` takes it away again.
        unsafe {
            let own = libc::stack_t {
                ss_sp: stack.pointer().cast(),
                ss_flags: 0,
                ss_size: SIGNAL_STACK_LEN as usize,
            };
            libc::sigaltstack(&raw const own, &raw mut previous);
        }
        parts.push(stack);
        handle_signals();
        Ok(Self {
            base,
            view,
            _parts: parts,
            previous,
        })
    }

    /// Linear address of the region.
    pub fn base(&self) -> u32 {
        self.base
    }

    /// The region's memory.
    pub fn region(&mut self) -> &mut [u8] {
        self.view.bytes()
    }

    /// Runs the batch that is in the region.
    pub fn run(&mut self, _: &Batch) {
        let resume = if std::arch::is_x86_feature_detected!("avx") {
            (hs_lockstep_resume_avx as *const ()).addr()
        } else {
            (hs_lockstep_resume as *const ()).addr()
        };
        let at = CELLS as usize;
        self.region()[at..at + 8].copy_from_slice(&(resume as u64).to_le_bytes());
        let cells = std::ptr::with_exposed_provenance_mut((self.base + CELLS) as usize);
        // SAFETY: the code was built by `build`: it reaches only the region or faults, faults
        // lead back into it, and it ends at `hs_lockstep_resume` with the stack pointer saved in
        // the cells; that restores what the calling convention asks for.
        unsafe { hs_lockstep_enter(cells, (self.base + CODE) as usize) };
        normalize(self.region());
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        // SAFETY: what was in use before.
        unsafe { libc::sigaltstack(&raw const self.previous, std::ptr::null_mut()) };
    }
}

/// Linux sets the protection bit for faults in the kernel's half, mapped or not.
pub(crate) fn normalize(region: &mut [u8]) {
    let at = FAULTS as usize;
    for record in region[at..][..SLOTS * FAULT_LEN as usize].chunks_exact_mut(FAULT_LEN as usize) {
        let mut cr2 = [0; 8];
        cr2.copy_from_slice(&record[8..16]);
        if record[0] == 15 && u64::from_le_bytes(cr2) >= 0x7fff_ffff_f000 {
            record[4] |= 1;
        }
    }
}

/// Whether user code may write the base of GS.
pub fn gs_base() -> bool {
    // SAFETY: it only reads the auxiliary vector.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & 2 != 0 }
}
