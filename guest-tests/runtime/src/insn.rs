//! Single instructions: control and debug registers, MSRs, flags, CPUID, time, halting.

use core::arch::asm;
use core::arch::x86_64::CpuidResult;

use hindsight_regs::cpuid::{CpuidOutput, Feature, LEAF_HYPERVISOR};

macro_rules! move_register {
    ($($read:ident, $write:ident: $name:literal;)*) => {
        $(
            #[doc = concat!("Reads ", $name, ".")]
            pub fn $read() -> u64 {
                let value;
                // SAFETY: reading the register touches no memory.
                unsafe {
                    asm!(concat!("mov {}, ", $name), out(reg) value, options(nomem, nostack, preserves_flags));
                }
                value
            }

            #[doc = concat!("Writes ", $name, ".")]
            pub fn $write(value: u64) {
                // SAFETY: the payload owns the machine. The caller keeps the memory mapped that
                // Rust code uses.
                unsafe {
                    asm!(concat!("mov ", $name, ", {}"), in(reg) value, options(nostack, preserves_flags));
                }
            }
        )*
    };
}

move_register! {
    read_cr0, write_cr0: "cr0";
    read_cr2, write_cr2: "cr2";
    read_cr3, write_cr3: "cr3";
    read_cr4, write_cr4: "cr4";
    read_cr8, write_cr8: "cr8";
    read_dr0, write_dr0: "dr0";
    read_dr1, write_dr1: "dr1";
    read_dr2, write_dr2: "dr2";
    read_dr3, write_dr3: "dr3";
    read_dr6, write_dr6: "dr6";
    read_dr7, write_dr7: "dr7";
}

macro_rules! plain {
    ($($(#[$doc:meta])* $name:ident: $text:literal;)*) => {
        $(
            $(#[$doc])*
            pub fn $name() {
                // SAFETY: the instruction changes no memory and no general register.
                unsafe { asm!($text, options(nostack)) };
            }
        )*
    };
}

plain! {
    /// Clears IF.
    cli: "cli";
    /// Sets IF, after the next instruction.
    sti: "sti";
    /// Halts until an interrupt.
    hlt: "hlt";
    /// Sets IF and halts, with no gap in which an interrupt could be taken before the halt.
    sti_hlt: "sti; hlt";
    /// Raises #UD.
    ud2: "ud2";
    /// Hints that this is a waiting loop.
    pause: "pause";
    /// Writes back and invalidates all caches.
    wbinvd: "wbinvd";
    /// Orders loads and stores.
    mfence: "mfence";
    /// Waits for earlier instructions.
    lfence: "lfence";
}

/// Writes one of DR0 to DR3; `index` is taken modulo 4.
pub fn write_dr(index: u8, address: u64) {
    match index & 3 {
        0 => write_dr0(address),
        1 => write_dr1(address),
        2 => write_dr2(address),
        _ => write_dr3(address),
    }
}

/// Reads RFLAGS.
pub fn rflags() -> u64 {
    let value;
    // SAFETY: the POP removes what the PUSHF pushed.
    unsafe { asm!("pushfq", "pop {}", out(reg) value, options(preserves_flags)) };
    value
}

/// The current privilege level.
pub fn cpl() -> u8 {
    let cs: u16;
    // SAFETY: reading a selector touches no memory.
    unsafe { asm!("mov {:x}, cs", out(reg) cs, options(nomem, nostack, preserves_flags)) };
    (cs & 3) as u8
}

/// Invalidates the cached translations of `address`.
pub fn invlpg(address: u64) {
    // SAFETY: only cached translations change.
    unsafe { asm!("invlpg [{}]", in(reg) address, options(nostack, preserves_flags)) };
}

/// RDMSR. An exception ends the case.
pub fn rdmsr(index: u32) -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: reading an MSR touches no memory.
    unsafe {
        asm!("rdmsr", in("ecx") index, out("rax") low, out("rdx") high, options(nostack, preserves_flags));
    }
    high << 32 | low
}

/// WRMSR. An exception ends the case.
pub fn wrmsr(index: u32, value: u64) {
    // SAFETY: the payload owns the machine. The caller knows what the MSR does.
    unsafe {
        asm!("wrmsr", in("ecx") index, in("rax") value, in("rdx") value >> 32, options(nostack, preserves_flags));
    }
}

/// RDTSC.
pub fn rdtsc() -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: the instruction touches no memory. Without `nomem` it stays in order with accesses.
    unsafe { asm!("rdtsc", out("rax") low, out("rdx") high, options(nostack, preserves_flags)) };
    high << 32 | low
}

/// RDTSCP: the counter and IA32_TSC_AUX.
pub fn rdtscp() -> (u64, u64) {
    let (low, high, aux): (u64, u64, u64);
    // SAFETY: as for RDTSC.
    unsafe {
        asm!("rdtscp", out("rax") low, out("rdx") high, out("rcx") aux, options(nostack, preserves_flags));
    }
    (high << 32 | low, aux)
}

/// CPUID.
pub fn cpuid(leaf: u32, subleaf: u32) -> CpuidResult {
    core::arch::x86_64::__cpuid_count(leaf, subleaf)
}

/// Whether CPUID reports `feature`.
pub fn has(feature: Feature) -> bool {
    if cpuid(feature.leaf & 0x8000_0000, 0).eax < feature.leaf {
        return false;
    }
    let found = cpuid(feature.leaf, feature.subleaf);
    let register = match feature.output {
        CpuidOutput::Eax => found.eax,
        CpuidOutput::Ebx => found.ebx,
        CpuidOutput::Ecx => found.ecx,
        CpuidOutput::Edx => found.edx,
    };
    register & (1 << feature.bit) != 0
}

/// Whether this is QEMU's TCG, which does not implement our test device and some facilities.
pub fn is_qemu_tcg() -> bool {
    has(Feature::HYPERVISOR) && cpuid(LEAF_HYPERVISOR, 0).ebx == u32::from_le_bytes(*b"TCGT")
}
