//! Register numbers and bits of the local APIC. SDM Vol. 3A, "Advanced Programmable Interrupt
//! Controller (APIC)": table "Local APIC Register Address Map" and "x2APIC Register Address Space".
//!
//! A register's number is its MMIO offset divided by 16, and its MSR less 800H.

/// Local APIC ID.
pub const ID: u16 = 0x02;
/// Version.
pub const VERSION: u16 = 0x03;
/// Task priority.
pub const TPR: u16 = 0x08;
/// Arbitration priority; xAPIC only.
pub const APR: u16 = 0x09;
/// Processor priority.
pub const PPR: u16 = 0x0a;
/// End of interrupt.
pub const EOI: u16 = 0x0b;
/// Remote read; xAPIC only.
pub const RRD: u16 = 0x0c;
/// Logical destination.
pub const LDR: u16 = 0x0d;
/// Destination format; xAPIC only.
pub const DFR: u16 = 0x0e;
/// Spurious-interrupt vector.
pub const SVR: u16 = 0x0f;
/// First of eight in-service registers.
pub const ISR: u16 = 0x10;
/// First of eight trigger-mode registers.
pub const TMR: u16 = 0x18;
/// First of eight interrupt-request registers.
pub const IRR: u16 = 0x20;
/// Error status.
pub const ESR: u16 = 0x28;
/// Interrupt command, bits 31:0 (all 64 bits in x2APIC mode).
pub const ICR_LOW: u16 = 0x30;
/// Interrupt command, bits 63:32; xAPIC only.
pub const ICR_HIGH: u16 = 0x31;
/// LVT timer.
pub const LVT_TIMER: u16 = 0x32;
/// LVT thermal; the four after it are performance counter, LINT0, LINT1 and error.
pub const LVT_THERMAL: u16 = 0x33;
/// LVT error: the last of the six.
pub const LVT_ERROR: u16 = 0x37;
/// Timer's initial count.
pub const INITIAL_COUNT: u16 = 0x38;
/// Timer's current count.
pub const CURRENT_COUNT: u16 = 0x39;
/// Timer's divide configuration.
pub const DIVIDE: u16 = 0x3e;
/// Self IPI; x2APIC only.
pub const SELF_IPI: u16 = 0x3f;

/// Indices into the local vector table.
pub mod lvt {
    /// Timer.
    pub const TIMER: usize = 0;
    /// Performance counter.
    pub const PERF: usize = 2;
    /// LINT0 pin; LINT1 is the next.
    pub const LINT0: usize = 3;
    /// LINT1 pin.
    pub const LINT1: usize = 4;
    /// Error.
    pub const ERROR: usize = 5;

    /// The entry is masked.
    pub const MASKED: u32 = 1 << 16;
    /// Level-triggered; LINT pins only.
    pub const LEVEL: u32 = 1 << 15;
    /// Remote IRR, read-only; LINT pins only.
    pub const REMOTE_IRR: u32 = 1 << 14;
    /// Delivery status, read-only; always 0 here, as delivery takes no time.
    pub const DELIVERY_STATUS: u32 = 1 << 12;
    /// Timer mode, bit 18: TSC-deadline. Reserved without `CPUID.1:ECX[24]`.
    pub const TIMER_DEADLINE: u32 = 1 << 18;

    /// What software may write, by index.
    pub const WRITABLE: [u32; 6] = [0x7_00ff, 0x1_07ff, 0x1_07ff, 0x1_a7ff, 0x1_a7ff, 0x1_00ff];
}

/// Version 14H, six LVT entries, EOI-broadcast suppression.
pub const VERSION_VALUE: u32 = 0x14 | (5 << 16) | (1 << 24);

/// SVR: APIC software enable.
pub const SVR_ENABLE: u32 = 1 << 8;
/// SVR: an EOI is not broadcast to the I/O APICs.
pub const SVR_NO_EOI_BROADCAST: u32 = 1 << 12;
/// SVR: what software may write. Bit 9 (focus checking) has no effect, but old software sets it.
pub const SVR_WRITABLE: u32 = 0x13ff;

/// ESR: an IPI with vector 0 to 15 was to be sent.
pub const ESR_SEND_ILLEGAL_VECTOR: u32 = 1 << 5;
/// ESR: an interrupt with vector 0 to 15 was received.
pub const ESR_RECEIVE_ILLEGAL_VECTOR: u32 = 1 << 6;
/// ESR: an access to a register that does not exist.
pub const ESR_ILLEGAL_REGISTER: u32 = 1 << 7;

/// ICR bits 31:0 that software may write.
pub const ICR_WRITABLE: u32 = 0x000c_cfff;

/// IA32_APIC_BASE: this is the bootstrap processor.
pub const BASE_BSP: u64 = 1 << 8;
/// IA32_APIC_BASE: x2APIC mode.
pub const BASE_X2APIC: u64 = 1 << 10;
/// IA32_APIC_BASE: global enable.
pub const BASE_ENABLE: u64 = 1 << 11;
/// IA32_APIC_BASE: address after RESET.
pub const BASE_ADDRESS: u64 = 0xfee0_0000;
