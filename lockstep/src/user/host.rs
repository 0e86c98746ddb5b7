//! The host's side: runs a batch on this processor, in this process, and recovers from its
//! exceptions.

#![expect(
    unsafe_code,
    reason = "generated code is entered, and its exceptions are signals"
)]

use crate::host_cpu::has_avx;
use crate::layout::*;
use crate::mapping::{Mapping, memory_file};
use crate::user::batch::{Batch, BatchId, normalize_faults};
use anyhow::Result;
use std::os::fd::AsRawFd;
use std::sync::Once;

std::arch::global_asm!(
    // extern "C" fn(cells, code). All else comes from the batch's own code.
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
    // Flags first, because the batch may have set AC and DF.
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

/// Signals of the exceptions that a batch may raise.
const SIGNALS: [libc::c_int; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
];

/// Records the exception and continues behind the instruction.
///
/// A signal that no batch raised gets its default action.
///
/// # Safety
/// Only the kernel calls it, as the handler of one of [`SIGNALS`], on the signal stack of a
/// [`HostRunner`].
unsafe extern "C" fn on_fault(signal: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: it loads flags that Rust code may run with. AC may still be set, and no access before
    // this is misaligned.
    unsafe { std::arch::asm!("push 0x202", "popfq") };
    // The stack lies at a fixed distance of the region, so an address on it leads to the region.
    let region = (&raw const context).addr() & !(REGION_ALIGN as usize - 1) & !SIGNAL_STACK;
    let cell = |at: usize| std::ptr::with_exposed_provenance_mut::<u8>(region + at);
    // SAFETY: `HostRunner` mapped the stack on which this runs, and with it the cells, which are
    // aligned and which only this thread uses. It stores `RUNNING` before it enters a batch. The
    // kernel passes a valid ucontext.
    unsafe {
        if cell(RUNNING as usize).cast::<u32>().read() == 0 {
            libc::signal(signal, libc::SIG_DFL);
            return;
        }
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

/// Installs the signal handler, once in a process.
fn handle_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: zeros are a valid sigaction. The handler keeps its contract: SA_ONSTACK puts it
        // on the signal stack of the thread that faults, and only threads with a `HostRunner` have
        // one and run code that faults.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = (on_fault as *const ()).addr();
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            for signal in SIGNALS {
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
        }
    });
}

/// This host's processor with one region.
///
/// The signal stack belongs to a thread, so only the thread that made a runner can use it: its
/// mappings are neither `Send` nor `Sync`.
#[derive(Debug)]
pub(super) struct HostRunner {
    base: u32,
    /// All of the region, writable.
    view: Mapping,
    /// The region at its linear addresses, and the signal stack.
    _parts: Vec<Mapping>,
    /// The signal stack that the thread had before.
    previous: libc::stack_t,
    /// The batch that is in the region.
    installed: Option<BatchId>,
}

impl HostRunner {
    /// Maps the region: one at a time in a process.
    ///
    /// # Errors
    /// If memory cannot be mapped at the region's addresses.
    pub(super) fn new() -> Result<Self> {
        let base = REGION_BASE;
        let file = memory_file(GUEST_LEN as usize)?;
        let (r, w, x) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
        let view = Mapping::new(0, GUEST_LEN as usize, r | w, Some((file.as_raw_fd(), 0)))?;
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
            parts.push(Mapping::new(
                (base + at) as usize,
                len as usize,
                prot,
                file,
            )?);
        }
        let stack = Mapping::new(
            base as usize + SIGNAL_STACK,
            SIGNAL_STACK_LEN as usize,
            r | w,
            None,
        )?;
        let mut previous = libc::stack_t {
            ss_sp: std::ptr::null_mut(),
            ss_flags: libc::SS_DISABLE,
            ss_size: 0,
        };
        // SAFETY: the stack stays mapped until `drop` has set the previous one again.
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
            installed: None,
        })
    }

    /// Linear address of the region.
    pub(super) fn base(&self) -> u32 {
        self.base
    }

    /// The region's memory.
    pub(super) fn region(&self) -> &[u8] {
        // SAFETY: the view is readable. Only `run` lets a batch write the region, and it borrows
        // the runner mutably.
        unsafe { self.view.bytes() }
    }

    fn region_mut(&mut self) -> &mut [u8] {
        // SAFETY: the view is readable and writable. No batch runs now, as for `region`.
        unsafe { self.view.bytes_mut() }
    }

    /// Puts a batch into the region; its data is filled in before each run.
    pub(super) fn install(&mut self, batch: &Batch) {
        assert_eq!(
            batch.base, self.base,
            "the batch is linked for another region"
        );
        batch.install(self.region_mut());
        self.installed = Some(batch.id());
    }

    /// Fills parameters and data of the installed batch for the run with this number.
    pub(super) fn fill(&mut self, batch: &Batch, run: u64) {
        assert_eq!(
            self.installed,
            Some(batch.id()),
            "another batch is installed"
        );
        batch.fill(run, self.region_mut());
    }

    /// Clears the parts of the region that are not compared.
    pub(super) fn clear_ignored(&mut self, batch: &Batch) {
        let region = self.region_mut();
        for &(at, len) in &batch.ignored {
            region[at as usize..][..len as usize].fill(0);
        }
    }

    /// Runs the batch that is installed.
    pub(super) fn run(&mut self) {
        assert!(self.installed.is_some(), "no batch is installed");
        let resume = if has_avx() {
            (hs_lockstep_resume_avx as *const ()).addr()
        } else {
            (hs_lockstep_resume as *const ()).addr()
        };
        self.put(RESUME, resume as u64);
        self.put(RUNNING, 1);
        let cells = std::ptr::with_exposed_provenance_mut((self.base + CELLS) as usize);
        // SAFETY: `install` and `fill` put one `Batch` there, and nothing else writes code, POST or
        // cells. The type promises that the code accesses only the region or faults, and ends by a
        // jump to RESUME with the stack pointer from SAVED_RSP; the code at RESUME restores what
        // the calling convention requires. Faults lead to the handler, which continues in the
        // batch's code.
        unsafe { hs_lockstep_enter(cells, (self.base + CODE) as usize) };
        self.put(RUNNING, 0);
        normalize_faults(self.region_mut());
    }

    fn put(&mut self, at: u32, value: u64) {
        let at = at as usize;
        self.region_mut()[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

impl Drop for HostRunner {
    fn drop(&mut self) {
        // SAFETY: the previous stack is the thread's again, and the region's stack is no longer
        // used.
        unsafe { libc::sigaltstack(&raw const self.previous, std::ptr::null_mut()) };
    }
}
