//! Memory of each CPU: stacks, TSS, and the state of exception capture.
//!
//! The GS base points to it at CPL 0 and at CPL 3, so SWAPGS is never needed.

use core::arch::asm;
use core::cell::UnsafeCell;

use hindsight_regs::msr::IA32_GS_BASE;

use crate::exception::{CaughtException, ExceptionLog};
use crate::gdt::{self, MAX_CPUS};
use crate::insn;

const IST_BYTES: usize = 4096;
const STACK_BYTES: usize = 16384;

/// 64-bit task-state segment. SDM Vol. 3A, "Task Management in 64-bit Mode".
#[repr(C, packed(4))]
#[derive(Debug)]
pub(crate) struct Tss {
    _reserved0: u32,
    rsp: [u64; 3],
    _reserved1: u64,
    ist: [u64; 7],
    _reserved2: [u16; 5],
    /// Beyond the limit: there is no I/O bitmap.
    io_map: u16,
}

#[repr(C, align(16))]
pub(crate) struct Stack<const N: usize>(UnsafeCell<[u8; N]>);

impl<const N: usize> Stack<N> {
    pub(crate) fn top(&self) -> u64 {
        self.0.get() as u64 + N as u64
    }
}

/// The state to return to when an exception is caught. Frames of nested catches form a list.
#[derive(Debug)]
pub(crate) struct CatchFrame {
    /// The stack pointer of `hindsight_enter_kernel` or `hindsight_enter_user`, which set it.
    pub(crate) rsp: u64,
    /// IF and bit 1 of the RFLAGS to return with.
    pub(crate) rflags: u64,
    /// The frame of the enclosing catch, or null.
    pub(crate) outer: *mut CatchFrame,
}

/// Memory of one CPU.
#[repr(C)]
pub struct CpuArea {
    /// The address of this area, which code reads through GS.
    this: *mut CpuArea,
    /// 0 for the bootstrap processor, then in order of starting.
    pub index: usize,
    /// Whether the local APIC is in x2APIC mode.
    pub(crate) x2apic: bool,
    /// The innermost catch, or null.
    pub(crate) catch_frame: *mut CatchFrame,
    /// The exception that was caught last.
    pub exception: CaughtException,
    /// Vectors whose exceptions are logged and resumed, one bit each.
    pub(crate) logged: u32,
    pub(crate) log: ExceptionLog,
    tss: Tss,
    ist: [Stack<IST_BYTES>; 4],
    entry_stack: Stack<STACK_BYTES>,
    pub(crate) main_stack: Stack<STACK_BYTES>,
    user_stack: Stack<STACK_BYTES>,
}

impl core::fmt::Debug for CpuArea {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CpuArea")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

#[repr(transparent)]
struct CpuAreas(UnsafeCell<[CpuArea; MAX_CPUS]>);

// SAFETY: each CPU uses only its own element; `smp` reads the stack address of another one before
// that CPU starts.
unsafe impl Sync for CpuAreas {}

// SAFETY: all zeros is a valid value of every field: null pointers, numbers and byte arrays. The
// linker script puts the section last, behind what `run` touches.
#[unsafe(link_section = ".bss..cpus")]
static AREAS: CpuAreas = unsafe { core::mem::zeroed() };

unsafe extern "C" {
    static hindsight_gdt_pointer: [u8; 10];
    static hindsight_idt_pointer: [u8; 10];
}

/// The memory of CPU `index`, which is below [`MAX_CPUS`].
pub(crate) fn area(index: usize) -> *mut CpuArea {
    assert!(index < MAX_CPUS, "no such CPU");
    // SAFETY: the index is inside the array.
    unsafe { AREAS.0.get().cast::<CpuArea>().add(index) }
}

/// The memory of the CPU that executes this.
pub fn current() -> &'static mut CpuArea {
    let this: *mut CpuArea;
    // SAFETY: `init` made GS point to the area, whose first field is its own address. No other CPU
    // uses the area, and callers keep the reference only between calls that may take another one.
    unsafe {
        asm!("mov {}, gs:[0]", out(reg) this, options(readonly, nostack, preserves_flags));
        &mut *this
    }
}

/// Sets up the bootstrap processor for exceptions, in a payload that does not use the case runner.
pub fn init_first() {
    init(0);
}

/// Loads GS base, TSS and IDT of CPU `index` on the CPU that runs.
pub(crate) fn init(index: usize) {
    let this = area(index);
    // SAFETY: no other CPU has this number, so area and TSS descriptor belong to the CPU that runs
    // here, and `area` has checked the index. The pointers of GDT and IDT are the assembler's.
    unsafe {
        (*this).this = this;
        (*this).index = index;
        let tss = &raw mut (*this).tss;
        let mut ist = [0; 7];
        for (pointer, stack) in ist.iter_mut().zip(&(*this).ist) {
            *pointer = stack.top();
        }
        (&raw mut (*tss).ist).write_unaligned(ist);
        (&raw mut (*tss).rsp).write_unaligned([(*this).entry_stack.top(), 0, 0]);
        (*tss).io_map = TSS_LIMIT + 1;

        let selector = gdt::set_tss(index, tss as u64, TSS_LIMIT);

        asm!("lgdt [{}]", in(reg) &raw const hindsight_gdt_pointer, options(nostack));
        asm!("lidt [{}]", in(reg) &raw const hindsight_idt_pointer, options(nostack));
        asm!("ltr {:x}", in(reg) selector, options(nostack));
    }
    insn::wrmsr(IA32_GS_BASE, this as u64);
}

const TSS_LIMIT: u16 = 0x67;

/// Top of the CPL 3 stack of the running CPU.
pub(crate) fn user_stack_top() -> u64 {
    current().user_stack.top()
}

/// Sets RSP0, the stack for events from CPL 3, and returns the old value.
pub fn set_rsp0(rsp: u64) -> u64 {
    let tss = &raw mut current().tss;
    // SAFETY: the TSS is this CPU's own; the accesses are unaligned, as the packed layout needs.
    unsafe {
        let rsp0 = (&raw mut (*tss).rsp).cast::<u64>();
        let old = rsp0.read_unaligned();
        rsp0.write_unaligned(rsp);
        old
    }
}
