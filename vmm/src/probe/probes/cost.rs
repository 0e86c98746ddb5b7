//! Speed and costs.

use std::time::{Duration, Instant};

use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP};
use kvm_ioctls::SyncReg;

use crate::host_clock::thread_cpu_time;
use crate::probe::code::code;
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::{Bench, Guest, IF, Level, Named, Refused, Stop};
use crate::probe::probes::exits::filtered;

/// How long a loop runs to be measured.
const RUN: Duration = Duration::from_millis(20);
/// How often an exit or an ioctl is timed.
const ROUNDS: u32 = 200;

code! {
    fn counts { "xor eax, eax", "2:", "inc rax", "jmp 2b" }
    fn writes_for_ever { "2:", "out 0xd1, al", "jmp 2b" }
    fn reads_msr_for_ever { "mov ecx, 0x1d9", "2:", "rdmsr", "jmp 2b" }
    fn jumps_for_ever { "2:", "jmp 2b" }
}

/// The rows of this file.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new("speed-cpl0", "instructions a second at CPL0", |b| {
        speed(b, Level::Kernel)
    }),
    Probe::new("speed-cpl3", "instructions a second at CPL3", |b| {
        speed(b, Level::User)
    }),
    Probe::new("cost-pio-cpl0", "one OUT exit at CPL0", |b| {
        exits(b.guest(Level::Kernel, writes_for_ever())?)
    }),
    Probe::new("cost-pio-cpl3", "one OUT exit at CPL3", |b| {
        exits(b.guest(Level::User, writes_for_ever())?)
    }),
    Probe::new(
        "cost-pio-sync",
        "one OUT exit at CPL0 with all sync regs",
        |b| {
            let mut guest = b.guest(Level::Kernel, writes_for_ever())?;
            guest.tiny.sync_at_exit(SyncReg::Register);
            guest.tiny.sync_at_exit(SyncReg::SystemRegister);
            guest.tiny.sync_at_exit(SyncReg::VcpuEvents);
            exits(guest)
        },
    ),
    Probe::new("cost-msr", "one filtered RDMSR exit", |b| {
        exits(filtered(b, reads_msr_for_ever(), 0x1d9)?)
    }),
    Probe::new("cost-step", "one single-step at CPL0", |b| {
        let guest = b.guest(Level::Kernel, jumps_for_ever())?;
        guest.debug(KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP, 0, 0)?;
        exits(guest)
    }),
    Probe::new("cost-ioctl", "one KVM_GET_REGS", |b| {
        let guest = b.guest(Level::Kernel, counts())?;
        let start = Instant::now();
        for _ in 0..ROUNDS {
            guest.regs()?;
        }
        Ok(each(start, ROUNDS))
    }),
    Probe::new("cost-create", "making one VM with a vCPU", |b| {
        const VMS: u32 = 4;
        let mut made = Vec::new();
        let start = Instant::now();
        for _ in 0..VMS {
            let vm = b.kvm.create_vm().named("KVM_CREATE_VM")?;
            made.push((vm.create_vcpu(0).named("KVM_CREATE_VCPU")?, vm));
        }
        Ok(each(start, VMS))
    }),
];

fn speed(bench: &Bench, level: Level) -> Result<Finding, Refused> {
    let mut guest = bench.guest(level, counts())?;
    // Bochs' emulated VMX keeps the host's timer from a guest that loops with IF clear.
    guest.edit_regs(|regs| regs.rflags |= IF)?;
    let start = thread_cpu_time();
    let stop = guest.run_for(RUN);
    let elapsed = thread_cpu_time().saturating_sub(start);
    if stop != Stop::Hung {
        return Ok(Finding::broken(stop));
    }
    // Two instructions a round.
    let instructions = guest.regs()?.rax.saturating_mul(2);
    let micros = u64::try_from(elapsed.as_micros())
        .unwrap_or(u64::MAX)
        .max(1);
    Ok(Finding::works(format!(
        "{} instructions/s",
        rate(instructions.saturating_mul(1_000_000) / micros)
    )))
}

/// A rate in millions, with as many digits as say something.
fn rate(per_second: u64) -> String {
    let (millions, rest) = (per_second / 1_000_000, per_second % 1_000_000 / 10_000);
    if millions >= 10 {
        format!("{millions} M")
    } else {
        format!("{millions}.{rest:02} M")
    }
}

fn exits(mut guest: Guest<'_>) -> Result<Finding, Refused> {
    let start = Instant::now();
    let mut done = 0;
    for _ in 0..ROUNDS {
        match guest.run_raw() {
            Stop::Out { .. } | Stop::Rdmsr { .. } | Stop::Debug { .. } => done += 1,
            Stop::Error { errno: libc::EINTR } => {}
            stop => return Ok(Finding::broken(stop)),
        }
        if start.elapsed() > RUN * 2 {
            break;
        }
    }
    Ok(each(start, done))
}

fn each(start: Instant, rounds: u32) -> Finding {
    let time = start.elapsed() / rounds.max(1);
    let tenths = time.as_nanos() / 100;
    Finding::works(format!("{}.{} us", tenths / 10, tenths % 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_in_millions() {
        assert_eq!(rate(512_345), "0.51 M");
        assert_eq!(rate(2_034_000_000), "2034 M");
    }
}
