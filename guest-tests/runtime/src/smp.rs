//! Application processors: how to start them and give them work.
//!
//! Their APIC IDs must be 0 to n - 1. A started CPU halts with interrupts enabled until [`run`]
//! gives it work.

use core::arch::global_asm;
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use hindsight_regs::apic::ICR_ASSERT;
use hindsight_regs::cr::Cr0;
use hindsight_regs::msr::IA32_EFER;

use crate::gdt::{self, KERNEL_CODE32, MAX_CPUS};
use crate::{apic, boot, cpu, info, insn, port};

/// Number of the page below 1 MiB to which the start-up code is copied; nothing else uses it.
const START_PAGE: u8 = 0x08;

global_asm!(
    ".pushsection .rodata.hindsight.ap, \"a\"",
    ".global hindsight_ap_begin, hindsight_ap_end, hindsight_ap_stack",
    ".code16",
    "hindsight_ap_begin:",
    "cli",
    "xorw %ax, %ax",
    "movw %ax, %ds",
    "lgdtl 0x8000 + (2f - hindsight_ap_begin)",
    "movl ${pe}, %eax",
    "movl %eax, %cr0",
    "ljmpl ${code32}, $hindsight_ap32",
    ".balign 8",
    "2:",
    ".word {gdt_limit}",
    ".long hindsight_gdt",
    "hindsight_ap_end:",
    ".popsection",
    ".pushsection .text.hindsight.ap, \"ax\"",
    ".code32",
    "hindsight_ap32:",
    "movl $0x10, %eax",
    "movl %eax, %ds",
    "movl %eax, %ss",
    "movl ${cr4}, %eax",
    "movl %eax, %cr4",
    "movl $hindsight_pml4, %eax",
    "movl %eax, %cr3",
    "movl ${ia32_efer}, %ecx",
    "xorl %edx, %edx",
    "movl ${efer}, %eax",
    "wrmsr",
    "movl ${cr0}, %eax",
    "movl %eax, %cr0",
    "movl hindsight_ap_stack, %esp",
    "pushl $8",
    "pushl $hindsight_ap64",
    "lretl",
    ".code64",
    "hindsight_ap64:",
    "xorl %eax, %eax",
    "movl %eax, %ds",
    "movl %eax, %es",
    "movl %eax, %fs",
    "movl %eax, %gs",
    "movq hindsight_ap_stack(%rip), %rsp",
    "xorl %ebp, %ebp",
    "call hindsight_ap_main",
    "ud2",
    ".popsection",
    ".pushsection .data.hindsight.ap, \"aw\"",
    ".balign 8",
    "hindsight_ap_stack:",
    ".quad 0",
    ".popsection",
    code32 = const KERNEL_CODE32,
    gdt_limit = const gdt::LIMIT,
    pe = const Cr0::PE.bits(),
    cr0 = const boot::CR0,
    cr4 = const boot::CR4,
    efer = const boot::EFER,
    ia32_efer = const IA32_EFER,
    options(att_syntax),
);

unsafe extern "C" {
    static hindsight_ap_begin: u8;
    static hindsight_ap_end: u8;
    static mut hindsight_ap_stack: u64;
}

const FW_CFG_SELECTOR: u16 = 0x510;
const FW_CFG_DATA: u16 = 0x511;
const FW_CFG_SIGNATURE: u16 = 0x00;
const FW_CFG_CPU_COUNT: u16 = 0x05;

/// CPUs that run: the bootstrap processor, and those that reached `hindsight_ap_main`.
static STARTED: AtomicUsize = AtomicUsize::new(1);
/// Number of the CPU that is being started.
static STARTING: AtomicUsize = AtomicUsize::new(0);
/// How many times a CPU reached `hindsight_ap_main`.
static ARRIVALS: AtomicUsize = AtomicUsize::new(0);
static COUNT: AtomicU32 = AtomicU32::new(0);
/// The function that each CPU is to run; 0 while it is idle.
static WORK: [AtomicUsize; MAX_CPUS] = [const { AtomicUsize::new(0) }; MAX_CPUS];

/// Work for a CPU, called with its number.
pub type CpuWork = fn(usize);

/// How many CPUs the machine has: by the option `cpus=`, else by fw_cfg, else 1.
pub fn count() -> u32 {
    if COUNT.load(Ordering::Relaxed) == 0 {
        let found = info::option("cpus")
            .and_then(|n| n.parse().ok())
            .unwrap_or_else(fw_cfg_count);
        COUNT.store(found, Ordering::Relaxed);
    }
    COUNT.load(Ordering::Relaxed)
}

fn fw_cfg_count() -> u32 {
    port::outw(FW_CFG_SELECTOR, FW_CFG_SIGNATURE);
    if [0; 4].map(|_| port::inb(FW_CFG_DATA)) != *b"QEMU" {
        return 1;
    }
    port::outw(FW_CFG_SELECTOR, FW_CFG_CPU_COUNT);
    u32::from(u16::from_le_bytes([0; 2].map(|_| port::inb(FW_CFG_DATA))))
}

/// Starts CPUs until `cpus` of them run, this one included; returns false if one does not start.
pub fn start(cpus: usize) -> bool {
    apic::enable();
    while STARTED.load(Ordering::Acquire) < cpus {
        if !start_next() {
            return false;
        }
    }
    true
}

fn start_next() -> bool {
    init_and_start(STARTED.load(Ordering::Acquire))
}

/// Resets CPU `index` by INIT and starts it again; returns false if it does not start.
///
/// The CPU was started before and is idle.
pub fn restart(index: usize) -> bool {
    init_and_start(index)
}

fn init_and_start(index: usize) -> bool {
    let Ok(id) = u32::try_from(index) else {
        return false;
    };
    let before = ARRIVALS.load(Ordering::Acquire);
    STARTING.store(index, Ordering::Release);
    copy_start_code(index);
    apic::send_init(id);
    // This takes up to some seconds, because on a busy host the vCPU's thread may have to wait.
    for _ in 0..2000 {
        short_delay();
        apic::send_startup(id, START_PAGE);
        for _ in 0..20 {
            short_delay();
            if ARRIVALS.load(Ordering::Acquire) != before {
                return true;
            }
        }
    }
    false
}

/// Copies the real-mode code below 1 MiB, and sets the stack that CPU `index` starts on.
fn copy_start_code(index: usize) {
    // SAFETY: the page is RAM that nothing uses, since `run::init` has copied the command line. The
    // CPU that will use the area does not run yet, and `area` checks the index.
    unsafe {
        let begin = &raw const hindsight_ap_begin;
        let length = (&raw const hindsight_ap_end).offset_from_unsigned(begin);
        ptr::copy_nonoverlapping(begin, (usize::from(START_PAGE) << 12) as *mut u8, length);
        (&raw mut hindsight_ap_stack).write_volatile((*cpu::area(index)).main_stack.top());
    }
}

fn short_delay() {
    for _ in 0..500 {
        insn::pause();
    }
}

#[unsafe(no_mangle)]
extern "C" fn hindsight_ap_main() -> ! {
    let index = STARTING.load(Ordering::Acquire);
    cpu::init(index);
    apic::enable();
    STARTED.fetch_max(index + 1, Ordering::AcqRel);
    ARRIVALS.fetch_add(1, Ordering::AcqRel);
    loop {
        insn::cli();
        let work = WORK[index].load(Ordering::Acquire);
        if work == 0 {
            insn::sti_hlt();
            continue;
        }
        // SAFETY: only `run` stores a value other than 0, and it stores a function of this type.
        let work = unsafe { core::mem::transmute::<usize, CpuWork>(work) };
        work(index);
        WORK[index].store(0, Ordering::Release);
    }
}

/// Gives `work` to CPU `index`, which was started and is idle, and does not wait for it.
///
/// The work begins with interrupts disabled.
pub fn run(index: usize, work: CpuWork) {
    WORK[index].store(work as usize, Ordering::Release);
    apic::send(
        u32::try_from(index).unwrap_or(0),
        ICR_ASSERT | u32::from(apic::WAKE_VECTOR),
    );
}

/// Whether CPU `index` has finished its work.
pub fn is_idle(index: usize) -> bool {
    WORK[index].load(Ordering::Acquire) == 0
}

/// Waits until CPU `index` has finished its work.
pub fn wait(index: usize) {
    while !is_idle(index) {
        insn::pause();
    }
}

/// Gives `work` to the started CPUs 1 to `cpus` - 1 and waits until all have finished.
pub fn run_all(cpus: usize, work: CpuWork) {
    (1..cpus).for_each(|index| run(index, work));
    (1..cpus).for_each(wait);
}
