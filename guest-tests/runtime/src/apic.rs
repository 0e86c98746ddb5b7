//! The local APIC of the running CPU, in xAPIC or x2APIC mode.

use hindsight_regs::apic::{
    ApicBase, ApicRegister, DEFAULT_BASE, ICR_ASSERT, ICR_INIT, ICR_PENDING, ICR_STARTUP,
    LVT_MASKED, SVR_ENABLE,
};
use hindsight_regs::msr::IA32_APIC_BASE;

use crate::{cpu, insn, msr};

/// Vector that wakes an idle CPU; the runtime handles it itself.
pub const WAKE_VECTOR: u8 = 0xf0;
/// Vector of spurious interrupts, which [`enable`] sets.
pub const SPURIOUS_VECTOR: u8 = 0xff;

fn mapped(register: ApicRegister) -> *mut u32 {
    (DEFAULT_BASE + u64::from(register.0)) as *mut u32
}

/// Reads a register.
pub fn read(register: ApicRegister) -> u32 {
    if cpu::current().x2apic {
        (msr::read(register.x2apic_msr()) & 0xffff_ffff) as u32
    } else {
        // SAFETY: the page is mapped and holds only device registers, so no Rust object is
        // accessed.
        unsafe { mapped(register).read_volatile() }
    }
}

/// Writes a register.
pub fn write(register: ApicRegister, value: u32) {
    if cpu::current().x2apic {
        msr::write(register.x2apic_msr(), u64::from(value));
    } else {
        // SAFETY: as for `read`.
        unsafe { mapped(register).write_volatile(value) };
    }
}

/// Enables the APIC in SVR and sets TPR to accept all priorities.
pub fn enable() {
    write(ApicRegister::SVR, SVR_ENABLE | u32::from(SPURIOUS_VECTOR));
    write(ApicRegister::TPR, 0);
}

/// Masks and stops the timer, and disables the APIC in SVR.
pub fn disable() {
    write(ApicRegister::LVT_TIMER, LVT_MASKED);
    write(ApicRegister::TIMER_INITIAL, 0);
    write(ApicRegister::SVR, u32::from(SPURIOUS_VECTOR));
}

/// Sends EOI for the interrupt in service.
pub fn eoi() {
    write(ApicRegister::EOI, 0);
}

/// The APIC ID.
pub fn id() -> u32 {
    let id = read(ApicRegister::ID);
    if cpu::current().x2apic { id } else { id >> 24 }
}

/// Switches this CPU to x2APIC mode.
pub fn enter_x2apic() {
    let base = msr::read(IA32_APIC_BASE);
    msr::write(
        IA32_APIC_BASE,
        base | (ApicBase::EN | ApicBase::EXTD).bits(),
    );
    cpu::current().x2apic = true;
}

/// Switches this CPU back to xAPIC mode; it disables the APIC for that, which resets it.
pub fn leave_x2apic() {
    let base = msr::read(IA32_APIC_BASE) & !(ApicBase::EN | ApicBase::EXTD).bits();
    msr::write(IA32_APIC_BASE, base);
    cpu::current().x2apic = false;
    msr::write(IA32_APIC_BASE, base | ApicBase::EN.bits());
}

/// Sends an interprocessor interrupt to the APIC ID or logical address `destination`.
pub fn send(destination: u32, command: u32) {
    if cpu::current().x2apic {
        let value = u64::from(destination) << 32 | u64::from(command);
        msr::write(ApicRegister::ICR.x2apic_msr(), value);
        return;
    }
    write(ApicRegister::ICR_HIGH, destination << 24);
    write(ApicRegister::ICR, command);
    while read(ApicRegister::ICR) & ICR_PENDING != 0 {
        insn::pause();
    }
}

/// Sends INIT.
pub fn send_init(destination: u32) {
    send(destination, ICR_INIT | ICR_ASSERT);
}

/// Sends a start-up IPI with the number of a page below 1 MiB.
pub fn send_startup(destination: u32, page: u8) {
    send(destination, ICR_STARTUP | ICR_ASSERT | u32::from(page));
}

/// Whether `vector` is set in the eight registers from `first` on: ISR, TMR or IRR.
pub fn has_vector(first: ApicRegister, vector: u8) -> bool {
    let register = ApicRegister(first.0 + u16::from(vector / 32) * 16);
    read(register) & (1 << (vector % 32)) != 0
}
