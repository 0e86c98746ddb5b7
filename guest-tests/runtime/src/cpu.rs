//! What each virtual processor has of its own: stacks, TSS, and the state of exception capture.
//!
//! GS points to it, at CPL 0 and 3 alike, so no SWAPGS is needed.

use core::arch::asm;
use core::cell::UnsafeCell;
use core::ptr;

use hindsight_regs::msr::IA32_GS_BASE;

use crate::boot::FIRST_TSS;
use crate::catch::{Exception, Slot};
use crate::msr;
use crate::trap::Log;

/// The most processors a payload can use.
pub const MAX_CPUS: usize = 64;

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
    /// Beyond the limit: no I/O bitmap.
    io_map: u16,
}

#[repr(C, align(16))]
pub(crate) struct Stack<const N: usize>(UnsafeCell<[u8; N]>);

impl<const N: usize> Stack<N> {
    pub(crate) fn top(&self) -> u64 {
        self.0.get() as u64 + N as u64
    }
}

/// One processor's own memory.
#[repr(C)]
pub struct Cpu {
    /// Its own address, read through GS.
    this: *mut Cpu,
    /// 0 for the bootstrap processor, then in order of starting.
    pub index: usize,
    /// Whether its APIC is in x2APIC mode.
    pub(crate) x2apic: bool,
    /// The innermost catch, or null.
    pub(crate) slot: *mut Slot,
    /// The exception caught last.
    pub exception: Exception,
    /// Vectors whose exceptions are logged and resumed, one bit each.
    pub(crate) logged: u32,
    pub(crate) log: Log,
    tss: Tss,
    ist: [Stack<IST_BYTES>; 4],
    entry_stack: Stack<STACK_BYTES>,
    pub(crate) main_stack: Stack<STACK_BYTES>,
    user_stack: Stack<STACK_BYTES>,
}

impl core::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Cpu")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

#[repr(transparent)]
struct Cpus(UnsafeCell<[Cpu; MAX_CPUS]>);

// SAFETY: each processor uses its own element only; `smp` reads another's stack address before that
// processor starts.
unsafe impl Sync for Cpus {}

// SAFETY: all zeros is a valid value of every field: null pointers, numbers and byte arrays. The section
// is the linker script's last, behind what [`crate::run`] touches.
#[unsafe(link_section = ".bss..cpus")]
static CPUS: Cpus = unsafe { core::mem::zeroed() };

unsafe extern "C" {
    static mut hindsight_gdt: [u64; 8 + 2 * MAX_CPUS];
    static hindsight_gdt_pointer: [u8; 10];
    static hindsight_idt_pointer: [u8; 10];
}

/// The memory of processor `index`, which is below [`MAX_CPUS`].
pub(crate) fn area(index: usize) -> *mut Cpu {
    assert!(index < MAX_CPUS, "no such processor");
    // SAFETY: the index is inside the array.
    unsafe { CPUS.0.get().cast::<Cpu>().add(index) }
}

/// The processor that runs this.
pub fn current() -> &'static mut Cpu {
    let this: *mut Cpu;
    // SAFETY: `init` made GS point to the area, whose first field is its own address. The reference
    // is to memory that no other processor uses; callers keep it for a few lines only.
    unsafe {
        asm!("mov {}, gs:[0]", out(reg) this, options(readonly, nostack, preserves_flags));
        &mut *this
    }
}

/// Sets up the first processor for interrupts, in an image that does not leave that to [`run`](crate::run::run).
pub fn init_first() {
    init(0);
}

/// Gives the running processor the memory of number `index`: GS base, TSS with its stacks, IDT.
pub(crate) fn init(index: usize) {
    let this = area(index);
    // SAFETY: the area belongs to this processor, which is starting; the descriptor slot too.
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

        let base = tss as u64;
        let low = u64::from(TSS_LIMIT)
            | (base & 0xff_ffff) << 16
            | 0x89 << 40
            | (base >> 24 & 0xff) << 56;
        let gdt = (&raw mut hindsight_gdt).cast::<u64>();
        ptr::write_volatile(gdt.add(8 + 2 * index), low);
        ptr::write_volatile(gdt.add(9 + 2 * index), base >> 32);

        asm!("lgdt [{}]", in(reg) &raw const hindsight_gdt_pointer, options(nostack));
        asm!("lidt [{}]", in(reg) &raw const hindsight_idt_pointer, options(nostack));
        #[expect(clippy::cast_possible_truncation, reason = "index is below MAX_CPUS")]
        let selector = FIRST_TSS + 16 * index as u16;
        asm!("ltr {:x}", in(reg) selector, options(nostack));
    }
    msr::write(IA32_GS_BASE, this as u64);
}

const TSS_LIMIT: u16 = 0x67;

/// Top of the CPL 3 stack of the running processor.
pub(crate) fn user_stack_top() -> u64 {
    current().user_stack.top()
}

/// Sets RSP0, the stack that events from CPL 3 arrive on, and returns the old value.
pub fn set_rsp0(rsp: u64) -> u64 {
    let tss = &raw mut current().tss;
    // SAFETY: the TSS is this processor's own; the fields are accessed unaligned.
    unsafe {
        let place = (&raw mut (*tss).rsp).cast::<u64>();
        let old = place.read_unaligned();
        place.write_unaligned(rsp);
        old
    }
}
