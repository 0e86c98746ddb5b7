//! The performance monitor, for the payloads that are about it.

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::regs::apic::{LVT_MASKED, ApicRegister};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::{EventSelect, pebs};
use hindsight_guest::trap::{self, Frame};
use hindsight_guest::{apic, insn, msr};

/// EN, USR and OS of an event selection.
pub const ON: u64 = EventSelect::ENABLE | EventSelect::USR | EventSelect::OS;
/// EN and OS.
pub const OS: u64 = EventSelect::ENABLE | EventSelect::OS;
/// EN and USR.
pub const USR: u64 = EventSelect::ENABLE | EventSelect::USR;
/// The request for an interrupt.
pub const INT: u64 = EventSelect::INT;
/// The largest value of a counter.
pub const MAX: u64 = (1 << 48) - 1;
/// Instructions that [`counted!`](crate::counted) counts beside those of its text: the WRMSR that
/// starts, and three before the WRMSR that stops.
pub const OVERHEAD: u64 = 4;
/// The vector of the interrupt, when it is not an NMI.
pub const VECTOR: u8 = 0x71;
/// Delivery mode NMI of an LVT entry.
pub const LVT_NMI: u32 = 0b100 << 8;

/// CPUID.0AH shows version 4 of architectural performance monitoring.
pub fn present() -> bool {
    insn::cpuid(0, 0).eax >= 0xa && insn::cpuid(0xa, 0).eax & 0xff >= 4
}

/// IA32_PERF_CAPABILITIES shows PEBS with records of format 3.
pub fn has_pebs() -> bool {
    present() && msr::read_safe(reg::IA32_PERF_CAPABILITIES).is_ok_and(|v| v >> 8 & 0xf == 3)
}

/// Ends the case as skipped where there is no performance monitor.
#[macro_export]
macro_rules! need_pmu {
    ($ctx:expr) => {
        if !$crate::pmu::present() {
            hindsight_guest::skip!($ctx, "CPUID.0AH shows no performance monitor of version 4");
        }
        $crate::pmu::reset();
    };
}

/// Ends the case as skipped where there is no PEBS.
#[macro_export]
macro_rules! need_pebs {
    ($ctx:expr) => {
        if !$crate::pmu::has_pebs() {
            hindsight_guest::skip!($ctx, "IA32_PERF_CAPABILITIES shows no PEBS of format 3");
        }
        $crate::pmu::reset();
    };
}

/// Runs assembly text at CPL 0 with the counters in `global` on: see [`OVERHEAD`].
#[macro_export]
macro_rules! counted {
    ($global:expr, $($text:literal),* $(; $($operands:tt)*)?) => {{
        let global: u64 = $global;
        // SAFETY: the payload owns the machine; the text keeps to the registers it names.
        unsafe {
            core::arch::asm!(
                "wrmsr",
                $($text,)*
                "mov ecx, 0x38f",
                "xor eax, eax",
                "xor edx, edx",
                "wrmsr",
                inout("ecx") 0x38f_u32 => _,
                inout("rax") global => _,
                inout("rdx") global >> 32 => _,
                $($($operands)*)?
            );
        }
    }};
}

/// Everything off and 0; IA32_PERF_GLOBAL_CTRL is 0 as well.
pub fn reset() {
    msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0);
    if has_pebs() {
        msr::write(reg::IA32_PEBS_ENABLE, 0);
    }
    msr::write(reg::IA32_FIXED_CTR_CTRL, 0);
    for n in 0..4 {
        msr::write(reg::IA32_PERFEVTSEL0 + n, 0);
        msr::write(reg::IA32_A_PMC0 + n, 0);
    }
    for n in 0..3 {
        msr::write(reg::IA32_FIXED_CTR0 + n, 0);
    }
    msr::write(reg::IA32_DEBUGCTL, 0);
    msr::write(
        reg::IA32_PERF_GLOBAL_STATUS_RESET,
        hindsight_guest::regs::pmu::global::RESETTABLE,
    );
}

/// Programs a counter: its event, and the bits of the selection.
pub fn select(counter: u32, event: u8, umask: u8, bits: u64) {
    let select = EventSelect::new(event, umask, bits);
    msr::write(reg::IA32_PERFEVTSEL0 + counter, select.0);
}

/// Sets a general-purpose counter, at full width.
pub fn set(counter: u32, value: u64) {
    msr::write(reg::IA32_A_PMC0 + counter, value & MAX);
}

/// Sets a counter so that it overflows after `events`.
pub fn preset(counter: u32, events: u64) {
    set(counter, events.wrapping_neg());
}

/// A general-purpose counter.
pub fn get(counter: u32) -> u64 {
    msr::read(reg::IA32_PMC0 + counter)
}

/// A fixed counter.
pub fn fixed(counter: u32) -> u64 {
    msr::read(reg::IA32_FIXED_CTR0 + counter)
}

/// IA32_PERF_GLOBAL_STATUS.
pub fn status() -> u64 {
    msr::read(reg::IA32_PERF_GLOBAL_STATUS)
}

/// Starts the counters in `global`, and no others.
pub fn start(global: u64) {
    msr::write(reg::IA32_PERF_GLOBAL_CTRL, global);
}

/// Stops all counters.
pub fn stop() {
    start(0);
}

/// What the interrupt found: how many, the last one's RIP, status and two readings of counter 0.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static RIP: AtomicU64 = AtomicU64::new(0);
static STATUS: AtomicU64 = AtomicU64::new(0);
static READINGS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
static LVT: AtomicU64 = AtomicU64::new(0);

fn on_pmi(frame: &mut Frame) {
    READINGS[0].store(get(0), Ordering::Release);
    READINGS[1].store(get(0), Ordering::Release);
    TAKEN.fetch_add(1, Ordering::AcqRel);
    RIP.store(frame.rip, Ordering::Release);
    STATUS.store(status(), Ordering::Release);
    LVT.store(apic::read(ApicRegister::LVT_PMC).into(), Ordering::Release);
    if frame.vector != 2 {
        apic::eoi();
    }
}

/// What the handler of the interrupt saw.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Interrupts taken.
    pub taken: u64,
    /// RIP that the last one interrupted.
    pub rip: u64,
    /// IA32_PERF_GLOBAL_STATUS in its handler.
    pub status: u64,
    /// Counter 0, read twice there.
    pub readings: [u64; 2],
    /// The LVT entry there.
    pub lvt: u64,
}

/// What was seen since [`listen`].
pub fn seen() -> Seen {
    Seen {
        taken: TAKEN.load(Ordering::Acquire),
        rip: RIP.load(Ordering::Acquire),
        status: STATUS.load(Ordering::Acquire),
        readings: [
            READINGS[0].load(Ordering::Acquire),
            READINGS[1].load(Ordering::Acquire),
        ],
        lvt: LVT.load(Ordering::Acquire),
    }
}

/// Unmasks the LVT entry: an interrupt with [`VECTOR`], or an NMI.
pub fn listen(nmi: bool) {
    TAKEN.store(0, Ordering::Release);
    trap::set_handler(VECTOR, on_pmi);
    trap::set_handler(2, on_pmi);
    apic::enable();
    let entry = if nmi { LVT_NMI } else { u32::from(VECTOR) };
    apic::write(ApicRegister::LVT_PMC, entry);
}

/// Masks the LVT entry, and takes no more interrupts.
pub fn deafen() {
    stop();
    insn::cli();
    apic::write(ApicRegister::LVT_PMC, LVT_MASKED);
    apic::disable();
}

/// Records in the PEBS buffer of [`Area`], of 200 bytes.
pub const RECORDS: usize = 16;

/// A DS buffer management area with its PEBS buffer.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Area {
    management: [u64; 512],
    buffer: [u64; 512],
}

static mut AREA: Area = Area {
    management: [0; 512],
    buffer: [0; 512],
};

/// The DS area of the payload.
#[derive(Clone, Copy, Debug)]
pub struct Ds(*mut Area);

impl Ds {
    /// Sets up room for `records`, a threshold at record `threshold`, and reset values; all of the
    /// buffer reads A5H bytes. The area is in IA32_DS_AREA.
    pub fn new(records: usize, threshold: usize, reset: [u64; 4]) -> Self {
        let ds = Self(&raw mut AREA);
        // SAFETY: one processor uses the area, through this pointer only.
        unsafe { (*ds.0).buffer = [0xa5a5_a5a5_a5a5_a5a5; 512] };
        let base = ds.base();
        let end = |records: usize| base + (records * pebs::RECORD) as u64;
        ds.put(pebs::BASE, base);
        ds.put(pebs::INDEX, base);
        ds.put(pebs::MAXIMUM, end(records));
        ds.put(pebs::THRESHOLD, end(threshold));
        for (n, value) in (0..).zip(reset) {
            ds.put(pebs::RESET + 8 * n, value);
        }
        msr::write(reg::IA32_DS_AREA, ds.address());
        ds
    }

    /// Linear address of the management area.
    pub fn address(self) -> u64 {
        self.0 as u64
    }

    /// Linear address of the buffer.
    pub fn base(self) -> u64 {
        self.address() + 4096
    }

    /// Changes a field of the management area.
    pub fn put(self, offset: u64, value: u64) {
        // SAFETY: the offsets are inside the page of the area.
        unsafe { ((self.address() + offset) as *mut u64).write_volatile(value) };
    }

    /// A field of the management area.
    pub fn field(self, offset: u64) -> u64 {
        // SAFETY: the offsets are inside the page of the area.
        unsafe { ((self.address() + offset) as *const u64).read_volatile() }
    }

    /// Records stored, from the index.
    pub fn count(self) -> u64 {
        (self.field(pebs::INDEX) - self.base()) / pebs::RECORD as u64
    }

    /// A field of a record.
    pub fn record(self, index: usize, offset: usize) -> u64 {
        let at = self.base() + (index * pebs::RECORD + offset) as u64;
        // SAFETY: the buffer is one page, and records below `RECORDS` end in it.
        unsafe { (at as *const u64).read_volatile() }
    }

    /// Whether the buffer is untouched from record `index` on.
    pub fn is_clean_from(self, index: usize) -> bool {
        (index * pebs::RECORD / 8..512).all(|n| {
            let at = self.base() + 8 * n as u64;
            // SAFETY: inside the buffer.
            unsafe { (at as *const u64).read_volatile() == 0xa5a5_a5a5_a5a5_a5a5 }
        })
    }
}
