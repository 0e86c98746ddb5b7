//! The performance monitoring unit: counters, its interrupt (PMI), and PEBS.

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::exception::TrapFrame;
use hindsight_guest::regs::apic::{ApicRegister, LVT_MASKED};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::{EventSelect, pebs};
use hindsight_guest::trap;
use hindsight_guest::{apic, insn, msr};

/// EN, USR and OS of IA32_PERFEVTSELx.
pub const ON: u64 = EventSelect::ENABLE | EventSelect::USR | EventSelect::OS;
/// EN and OS.
pub const OS: u64 = EventSelect::ENABLE | EventSelect::OS;
/// EN and USR.
pub const USR: u64 = EventSelect::ENABLE | EventSelect::USR;
/// INT: an overflow requests an interrupt.
pub const INT: u64 = EventSelect::INT;
/// The largest value of a counter.
pub const MAX: u64 = (1 << 48) - 1;
/// Instructions that [`counted!`](crate::counted) counts in addition to those of its text.
///
/// They are the WRMSR that starts the counters and three before the WRMSR that stops them.
pub const OVERHEAD: u64 = 4;
/// The vector of the PMI, unless it is an NMI.
pub const VECTOR: u8 = 0x71;
/// Delivery mode NMI of an LVT entry.
pub const LVT_NMI: u32 = 0b100 << 8;

/// Whether CPUID.0AH reports version 4 of architectural performance monitoring.
pub fn present() -> bool {
    insn::cpuid(0, 0).eax >= 0xa && insn::cpuid(0xa, 0).eax & 0xff >= 4
}

/// Whether IA32_PERF_CAPABILITIES reports PEBS with records of format 3.
pub fn has_pebs() -> bool {
    present() && msr::read_safe(reg::IA32_PERF_CAPABILITIES).is_ok_and(|v| v >> 8 & 0xf == 3)
}

/// Ends the case as skipped without the PMU, else resets the PMU.
#[macro_export]
macro_rules! need_pmu {
    ($ctx:expr) => {
        if !$crate::pmu::present() {
            hindsight_guest::skip!($ctx, "CPUID.0AH reports no PMU of version 4");
        }
        $crate::pmu::reset();
    };
}

/// Ends the case as skipped without PEBS, else resets the PMU.
#[macro_export]
macro_rules! need_pebs {
    ($ctx:expr) => {
        if !$crate::pmu::has_pebs() {
            hindsight_guest::skip!($ctx, "IA32_PERF_CAPABILITIES reports no PEBS of format 3");
        }
        $crate::pmu::reset();
    };
}

/// Runs assembly text at CPL 0 with the counters in `global` enabled: see [`OVERHEAD`].
#[macro_export]
macro_rules! counted {
    ($global:expr, $($text:literal),* $(; $($operands:tt)*)?) => {{
        let global: u64 = $global;
        // SAFETY: the payload owns the machine. The text changes only the registers that it names.
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

/// Resets the PMU: all its MSRs and IA32_DEBUGCTL are 0.
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

/// Programs the event selection of a counter.
pub fn select(counter: u32, event: u8, umask: u8, bits: u64) {
    let select = EventSelect::new(event, umask, bits);
    msr::write(reg::IA32_PERFEVTSEL0 + counter, select.0);
}

/// Sets a general-purpose counter with its full width.
pub fn set(counter: u32, value: u64) {
    msr::write(reg::IA32_A_PMC0 + counter, value & MAX);
}

/// Sets a counter so that it overflows after `events`.
pub fn preset(counter: u32, events: u64) {
    set(counter, events.wrapping_neg());
}

/// Reads a general-purpose counter.
pub fn get(counter: u32) -> u64 {
    msr::read(reg::IA32_PMC0 + counter)
}

/// Reads a fixed counter.
pub fn fixed(counter: u32) -> u64 {
    msr::read(reg::IA32_FIXED_CTR0 + counter)
}

/// Reads IA32_PERF_GLOBAL_STATUS.
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

// What the handler of the PMI recorded: see `PmiState`.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static RIP: AtomicU64 = AtomicU64::new(0);
static STATUS: AtomicU64 = AtomicU64::new(0);
static READINGS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
static LVT: AtomicU64 = AtomicU64::new(0);

fn on_pmi(frame: &mut TrapFrame) {
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

/// What the handler of the PMI recorded.
#[derive(Clone, Copy, Debug)]
pub struct PmiState {
    /// Interrupts taken.
    pub taken: u64,
    /// The RIP that the last one saved.
    pub rip: u64,
    /// IA32_PERF_GLOBAL_STATUS in the handler of the last one.
    pub status: u64,
    /// Counter 0, read twice in the handler of the last one.
    pub readings: [u64; 2],
    /// The LVT entry in the handler of the last one.
    pub lvt: u64,
}

/// What the handler of the PMI recorded since [`unmask_pmi`].
pub fn pmi_state() -> PmiState {
    PmiState {
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

/// Unmasks the PMI as an NMI or as an interrupt with [`VECTOR`].
pub fn unmask_pmi(nmi: bool) {
    TAKEN.store(0, Ordering::Release);
    trap::set_handler(VECTOR, on_pmi);
    trap::set_handler(2, on_pmi);
    apic::enable();
    let entry = if nmi { LVT_NMI } else { u32::from(VECTOR) };
    apic::write(ApicRegister::LVT_PMC, entry);
}

/// Stops all counters, disables interrupts and masks the PMI.
pub fn mask_pmi() {
    stop();
    insn::cli();
    apic::write(ApicRegister::LVT_PMC, LVT_MASKED);
    apic::disable();
}

/// Records of 200 bytes that the PEBS buffer can hold.
pub const RECORDS: usize = 16;

/// Pages for the DS management area and the PEBS buffer.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct PebsPages {
    management: [u64; 512],
    buffer: [u64; 512],
}

static mut AREA: PebsPages = PebsPages {
    management: [0; 512],
    buffer: [0; 512],
};

/// The DS management area and the PEBS buffer of the payload.
#[derive(Clone, Copy, Debug)]
pub struct PebsArea(*mut PebsPages);

impl PebsArea {
    /// Prepares a buffer for `records` and writes IA32_DS_AREA.
    ///
    /// The threshold is at record `threshold`, `reset` holds the reset values of the counters, and
    /// all bytes of the buffer are A5H.
    pub fn new(records: usize, threshold: usize, reset: [u64; 4]) -> Self {
        let ds = Self(&raw mut AREA);
        // SAFETY: only one CPU uses the pages, and only through this pointer; PEBS stores no
        // records before the counters start.
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
        // SAFETY: callers pass offsets of fields, which are inside the page of the area.
        unsafe { ((self.address() + offset) as *mut u64).write_volatile(value) };
    }

    /// A field of the management area.
    pub fn field(self, offset: u64) -> u64 {
        // SAFETY: callers pass offsets of fields, which are inside the page of the area.
        unsafe { ((self.address() + offset) as *const u64).read_volatile() }
    }

    /// How many records are stored, by the index.
    pub fn count(self) -> u64 {
        (self.field(pebs::INDEX) - self.base()) / pebs::RECORD as u64
    }

    /// A field of a record.
    pub fn record(self, index: usize, offset: usize) -> u64 {
        let at = self.base() + (index * pebs::RECORD + offset) as u64;
        // SAFETY: the buffer is one page, in which records below `RECORDS` end.
        unsafe { (at as *const u64).read_volatile() }
    }

    /// Whether the buffer is unchanged from record `index` on.
    pub fn is_clean_from(self, index: usize) -> bool {
        (index * pebs::RECORD / 8..512).all(|n| {
            let at = self.base() + 8 * n as u64;
            // SAFETY: the index stays below 512, so the read is inside the buffer.
            unsafe { (at as *const u64).read_volatile() == 0xa5a5_a5a5_a5a5_a5a5 }
        })
    }
}
