//! The speed of guest code, and the cost of exits and calls.

use std::time::{Duration, Instant};

use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP};
use kvm_ioctls::SyncReg;

use crate::host_clock::thread_cpu_time;
use crate::probe::context::{NameCall, ProbeContext, RefusedCall};
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::code::code;
use crate::probe::guest::{GuestStop, IF, ProbeGuest, StartLevel};
use crate::probe::probes::exits::filtered;

/// Duration of each loop that is measured.
const RUN: Duration = Duration::from_millis(20);
/// How often an exit or an ioctl is timed.
const ROUNDS: u32 = 200;

code! {
    fn counts { "xor eax, eax", "2:", "inc rax", "jmp 2b" }
    fn writes_for_ever { "2:", "out 0xd1, al", "jmp 2b" }
    fn reads_msr_for_ever { "mov ecx, 0x1d9", "2:", "rdmsr", "jmp 2b" }
    fn jumps_for_ever { "2:", "jmp 2b" }
}

/// The probes of this module.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new("speed-cpl0", "instructions a second at CPL0", |c| {
        speed(c, StartLevel::Kernel)
    }),
    Probe::new("speed-cpl3", "instructions a second at CPL3", |c| {
        speed(c, StartLevel::User)
    }),
    Probe::new("cost-pio-cpl0", "one OUT exit at CPL0", |c| {
        exits(c.guest(StartLevel::Kernel, writes_for_ever())?)
    }),
    Probe::new("cost-pio-cpl3", "one OUT exit at CPL3", |c| {
        exits(c.guest(StartLevel::User, writes_for_ever())?)
    }),
    Probe::new(
        "cost-pio-sync",
        "one OUT exit at CPL0 with all sync regs",
        |c| {
            let mut guest = c.guest(StartLevel::Kernel, writes_for_ever())?;
            guest.vm.sync_at_exit(SyncReg::Register);
            guest.vm.sync_at_exit(SyncReg::SystemRegister);
            guest.vm.sync_at_exit(SyncReg::VcpuEvents);
            exits(guest)
        },
    ),
    Probe::new("cost-msr", "one filtered RDMSR exit", |c| {
        exits(filtered(c, reads_msr_for_ever(), 0x1d9)?)
    }),
    Probe::new("cost-step", "one single-step at CPL0", |c| {
        let guest = c.guest(StartLevel::Kernel, jumps_for_ever())?;
        guest.debug(KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP, 0, 0)?;
        exits(guest)
    }),
    Probe::new("cost-ioctl", "one KVM_GET_REGS", |c| {
        let guest = c.guest(StartLevel::Kernel, counts())?;
        let start = Instant::now();
        for _ in 0..ROUNDS {
            guest.regs()?;
        }
        Ok(each(start, ROUNDS))
    }),
    Probe::new("cost-create", "creating one VM with a vCPU", |c| {
        const VMS: u32 = 4;
        let mut created = Vec::new();
        let start = Instant::now();
        for _ in 0..VMS {
            let vm = c.kvm.create_vm().named("KVM_CREATE_VM")?;
            created.push((vm.create_vcpu(0).named("KVM_CREATE_VCPU")?, vm));
        }
        Ok(each(start, VMS))
    }),
];

fn speed(context: &ProbeContext, level: StartLevel) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(level, counts())?;
    // Under Bochs' emulated VMX, the host's timer does not interrupt a guest that loops with IF
    // clear.
    guest.edit_regs(|regs| regs.rflags |= IF)?;
    let start = thread_cpu_time();
    let stop = guest.run_for(RUN);
    let elapsed = thread_cpu_time().saturating_sub(start);
    if stop != GuestStop::Hung {
        return Ok(Finding::broken(stop));
    }
    // Each round has two instructions.
    let instructions = guest.regs()?.rax.saturating_mul(2);
    let micros = u64::try_from(elapsed.as_micros())
        .unwrap_or(u64::MAX)
        .max(1);
    Ok(Finding::works(format!(
        "{} instructions/s",
        rate(instructions.saturating_mul(1_000_000) / micros)
    )))
}

/// A rate in millions, with two decimals below 10 million.
fn rate(per_second: u64) -> String {
    let (millions, rest) = (per_second / 1_000_000, per_second % 1_000_000 / 10_000);
    if millions >= 10 {
        format!("{millions} M")
    } else {
        format!("{millions}.{rest:02} M")
    }
}

/// Measures the time of one exit.
fn exits(mut guest: ProbeGuest<'_>) -> Result<Finding, RefusedCall> {
    let start = Instant::now();
    let mut done = 0;
    for _ in 0..ROUNDS {
        match guest.run_raw() {
            GuestStop::Out { .. } | GuestStop::Rdmsr { .. } | GuestStop::Debug { .. } => done += 1,
            GuestStop::Error { errno: libc::EINTR } => {}
            stop => return Ok(Finding::broken(stop)),
        }
        if start.elapsed() > RUN * 2 {
            break;
        }
    }
    Ok(each(start, done))
}

/// The time of one round.
fn each(start: Instant, rounds: u32) -> Finding {
    let time = start.elapsed() / rounds.max(1);
    let tenths = time.as_nanos() / 100;
    Finding::works(format!("{}.{} us", tenths / 10, tenths % 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_printed_in_millions() {
        assert_eq!(rate(512_345), "0.51 M");
        assert_eq!(rate(2_034_000_000), "2034 M");
    }
}
