//! The time-stamp counter: its offset, IA32_TIME_STAMP_COUNTER, CR4.TSD, TSC_AUX, RDTSCP, and the deadline MSR.

use hindsight_regs::cr::Cr4;
use hindsight_regs::msr::{IA32_TIME_STAMP_COUNTER, IA32_TSC_AUX, IA32_TSC_DEADLINE};
use hindsight_regs::vector::Vector;

use crate::host_clock::read_tsc;
use crate::kvm::ioctls;
use crate::probe::context::{NameCall, ProbeContext, RefusedCall};
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::code::code;
use crate::probe::guest::*;
use crate::probe::probes::exits::filtered;

/// A TSC offset far larger than the ticks that a probe takes.
const JUMP: u64 = 1 << 44;
/// More ticks than a probe takes: closer TSC values are equal.
const NEAR: u64 = 1 << 40;

code! {
    fn reads_tsc { "2:", "rdtsc", "shl rdx, 32", "or rax, rdx", "out 0xd1, al", "jmp 2b" }
    fn reads_tsc_and_aux { "rdtscp", "out 0xd1, al" }
    fn writes_deadline @ 7 {
        "mov ecx, 0x6e0", "mov eax, 0x12345678", "xor edx, edx", "7:", "wrmsr", "out 0xd1, al",
    }
}

/// The probes of this module.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new(
        "tsc-offset",
        "the vCPU attribute TSC_OFFSET moves RDTSC",
        tsc_offset,
    ),
    Probe::new("tsc-msr", "IA32_TSC by KVM_SET_MSRS moves RDTSC", tsc_msr),
    Probe::new("tsd-cpl3", "CR4.TSD makes RDTSC fault at CPL3", tsd),
    Probe::new(
        "tsc-aux",
        "RDTSCP at CPL3 returns the guest's TSC_AUX",
        tsc_aux,
    ),
    Probe::new("rdtscp-cpl0", "RDTSCP at CPL0", |c| {
        let mut guest = c.guest(StartLevel::Kernel, reads_tsc_and_aux())?;
        Ok(match guest.run() {
            GuestStop::Done => Finding::works("runs"),
            stop => Finding::broken(stop),
        })
    }),
    Probe::new(
        "tsc-deadline-exit",
        "WRMSR IA32_TSC_DEADLINE exits without an in-kernel APIC",
        deadline,
    ),
];

/// The TSC that the guest reads, or why it stopped instead.
fn rdtsc(guest: &mut ProbeGuest<'_>) -> Result<Result<u64, GuestStop>, RefusedCall> {
    match guest.run() {
        GuestStop::Done => Ok(Ok(guest.regs()?.rax)),
        stop => Ok(Err(stop)),
    }
}

fn tsc_offset(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, reads_tsc())?;
    if !ioctls::has_tsc_offset(guest.vm.vcpu()) {
        return Ok(Finding::absent("no such attribute"));
    }
    let before = match rdtsc(&mut guest)? {
        Ok(tsc) => tsc,
        Err(stop) => return Ok(Finding::broken(stop)),
    };
    let offset = ioctls::tsc_offset(guest.vm.vcpu()).named("KVM_GET_DEVICE_ATTR")?;
    ioctls::set_tsc_offset(guest.vm.vcpu(), offset.wrapping_add(JUMP))
        .named("KVM_SET_DEVICE_ATTR")?;
    let host = read_tsc();
    Ok(match rdtsc(&mut guest)? {
        Ok(tsc) if tsc.wrapping_sub(before).wrapping_sub(JUMP) < NEAR => {
            Finding::works("moves RDTSC")
        }
        Ok(tsc) if tsc.wrapping_sub(host) < NEAR => {
            Finding::broken("accepted and ignored: RDTSC is the host's")
        }
        Ok(_) => Finding::broken("accepted and ignored"),
        Err(stop) => Finding::broken(stop),
    })
}

fn tsc_msr(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, reads_tsc())?;
    guest.set_msr(IA32_TIME_STAMP_COUNTER, JUMP)?;
    let host = read_tsc();
    Ok(match rdtsc(&mut guest)? {
        Ok(tsc) if tsc.wrapping_sub(JUMP) < NEAR => Finding::works("moves RDTSC"),
        Ok(tsc) if tsc.wrapping_sub(host) < NEAR => {
            Finding::broken("accepted and ignored: RDTSC is the host's")
        }
        Ok(tsc) => Finding::broken(format!("accepted; RDTSC gives {tsc:#x}")),
        Err(stop) => Finding::broken(stop),
    })
}

fn tsd(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::User, reads_tsc())?;
    guest.edit_sregs(|sregs| sregs.cr4 |= Cr4::TSD.bits())?;
    Ok(match guest.run() {
        GuestStop::Trap(t) if t.is(Vector::GP) && t.rip == CODE => Finding::works("#GP"),
        GuestStop::Done => Finding::broken("ignored: RDTSC runs"),
        stop => Finding::broken(stop),
    })
}

fn tsc_aux(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    const MARKER: u64 = 0x1234_5678;
    let mut guest = context.guest(StartLevel::User, reads_tsc_and_aux())?;
    let taken = guest.set_msr(IA32_TSC_AUX, MARKER).is_ok();
    Ok(match guest.run() {
        GuestStop::Done => match (guest.regs()?.rcx, taken) {
            (MARKER, _) => Finding::works("the guest's"),
            (other, true) => Finding::broken(format!("ignored: the host's ({other:#x})")),
            (other, false) => Finding::broken(format!("MSR refused; the host's ({other:#x})")),
        },
        GuestStop::Trap(t) if t.is(Vector::UD) => Finding::absent("guest gets #UD"),
        stop => Finding::broken(stop),
    })
}

fn deadline(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    const TSC_DEADLINE: u32 = 1 << 24;
    let mut guest = filtered(context, writes_deadline(), IA32_TSC_DEADLINE)?;
    // KVM does not report the bit without its own APIC. A VMM with an APIC of its own sets it.
    let mut cpuid = context.cpuid.clone();
    for entry in cpuid
        .as_mut_slice()
        .iter_mut()
        .filter(|entry| entry.function == 1)
    {
        entry.ecx |= TSC_DEADLINE;
    }
    guest.vm.vcpu().set_cpuid2(&cpuid).named("KVM_SET_CPUID2")?;
    Ok(match guest.run() {
        GuestStop::Wrmsr {
            index: IA32_TSC_DEADLINE,
            value: 0x1234_5678,
        } => match guest.run() {
            GuestStop::Done => Finding::works("exits"),
            stop => Finding::broken(format!("exits; then {stop}")),
        },
        GuestStop::Done => Finding::broken("swallowed: no exit"),
        stop => Finding::broken(stop),
    })
}
