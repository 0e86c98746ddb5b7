//! Breakpoints: the host's by KVM_SET_GUEST_DEBUG, the guest's own by MOV DR, and DR7.GD.

use hindsight_regs::dr::Dr6;
use hindsight_regs::vector::Vector;
use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_USE_HW_BP, KVM_GUESTDBG_USE_SW_BP};

use crate::probe::context::{ProbeContext, RefusedCall};
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::code::code;
use crate::probe::guest::*;

const HARDWARE: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
const SOFTWARE: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP;
// DR7 for breakpoint 0: L0, bit 10, which is always 1, and R/W0, LEN0.
const EXECUTE: u64 = 0x401;
const WRITE_4: u64 = 0x000d_0401;
const IO_1: u64 = 0x0002_0401;
const GENERAL_DETECT: u64 = 0x2400;
const DR6_BD: u64 = Dr6::BD.bits();
const DR6_B0: u64 = Dr6::B0.bits();

code! {
    fn target @ 7 { "nop", "nop", "7:", "nop", "nop", "out 0xd1, al" }
    fn writes @ 7 { "nop", "mov [r9], eax", "7:", "nop", "nop", "out 0xd1, al" }
    fn port_write @ 7 { "nop", "out 0xe9, al", "7:", "nop", "nop", "out 0xd1, al" }
    fn host_int3 @ 7 { "nop", "7:", "int3", "out 0xd1, al" }
    fn own_execute_cpl0 @ 7 {
        "lea rax, [rip + 7f]", "mov dr0, rax", "mov eax, 0x401", "mov dr7, rax",
        "nop", "7:", "nop", "out 0xd1, al",
    }
    fn own_execute_cpl3 @ 7 {
        "lea rax, [rip + 7f]", "mov dr0, rax", "mov eax, 0x401", "mov dr7, rax",
        crate::probe::guest::code::to_cpl3!(), "2:", "nop", "7:", "nop", "out 0xd1, al",
    }
    fn own_data_cpl0 @ 7 {
        "mov dr0, r9", "mov eax, 0xd0401", "mov dr7, rax",
        "nop", "mov [r9], eax", "7:", "nop", "out 0xd1, al",
    }
    fn own_data_cpl3 @ 7 {
        "mov dr0, r9", "mov eax, 0xd0401", "mov dr7, rax",
        crate::probe::guest::code::to_cpl3!(),
        "2:", "nop", "mov [r9], eax", "7:", "nop", "out 0xd1, al",
    }
    fn own_and_disabled @ 7 {
        "mov dr0, r9", "mov dr2, r9", "mov eax, 0xd0d0401", "mov dr7, rax",
        "nop", "mov [r9], eax", "7:", "nop", "out 0xd1, al",
    }
    fn deferred_to_int3 {
        "mov word ptr [r9], 0x1b", "mov dr0, r9", "mov eax, 0xf0401", "mov dr7, rax",
        crate::probe::guest::code::to_cpl3!(),
        "2:", "mov ss, word ptr [r9]", "int3", "out 0xd1, al",
    }
    fn own_io_cpl0 @ 7 {
        "mov eax, 0xe9", "mov dr0, rax", "mov eax, 0x20401", "mov dr7, rax",
        "nop", "out 0xe9, al", "7:", "nop", "out 0xd1, al",
    }
    fn own_io_cpl3 @ 7 {
        "mov eax, 0xe9", "mov dr0, rax", "mov eax, 0x20401", "mov dr7, rax",
        crate::probe::guest::code::to_cpl3!(),
        "2:", "nop", "out 0xe9, al", "7:", "nop", "out 0xd1, al",
    }
    fn general_detect @ 7 {
        "mov eax, 0x2400", "mov dr7, rax", "7:", "mov rax, dr0", "out 0xd1, al",
    }
    fn reads_dr @ 7 { "nop", "7:", "mov rax, dr0", "out 0xd1, al" }
}

/// The probes of this module, except those in [`LAST`].
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new(
        "hostbp-exec-cpl0",
        "KVM_GUESTDBG_USE_HW_BP, execute, at CPL0",
        |c| host_execute(c, StartLevel::Kernel),
    ),
    Probe::new(
        "hostbp-exec-cpl3",
        "KVM_GUESTDBG_USE_HW_BP, execute, at CPL3",
        |c| host_execute(c, StartLevel::User),
    ),
    Probe::new(
        "hostbp-data",
        "KVM_GUESTDBG_USE_HW_BP, data write, at CPL0 and CPL3",
        |c| both_levels(|level| host_trap(c, level, writes(), DATA, WRITE_4)),
    ),
    Probe::new(
        "hostbp-io",
        "KVM_GUESTDBG_USE_HW_BP, I/O port, at CPL0 and CPL3",
        |c| both_levels(|level| host_trap(c, level, port_write(), 0xe9, IO_1)),
    ),
    Probe::new(
        "gd-host",
        "DR7.GD of the debugger exits on the guest's MOV DR",
        general_detect_host,
    ),
    Probe::new(
        "host-int3-cpl0",
        "KVM_GUESTDBG_USE_SW_BP exits on INT3 at CPL0",
        |c| host_software(c, StartLevel::Kernel),
    ),
    Probe::new(
        "host-int3-cpl3",
        "KVM_GUESTDBG_USE_SW_BP exits on INT3 at CPL3",
        |c| host_software(c, StartLevel::User),
    ),
    Probe::new(
        "guestbp-exec-cpl0",
        "the guest's own execution breakpoint at CPL0",
        |c| Ok(into_finding(own(c, own_execute_cpl0())?)),
    ),
    Probe::new(
        "guestbp-exec-cpl3",
        "the guest's own execution breakpoint at CPL3",
        |c| Ok(into_finding(own(c, own_execute_cpl3())?)),
    ),
    Probe::new(
        "guestbp-io",
        "the guest's own I/O breakpoint at CPL0 and CPL3",
        |c| {
            both_levels(|level| match level {
                StartLevel::Kernel => own(c, own_io_cpl0()),
                StartLevel::User => own(c, own_io_cpl3()),
            })
        },
    ),
    Probe::new("gd", "DR7.GD gives #DB with DR6.BD on MOV DR", |c| {
        disarmed(c, general_detect(), general_detect_guest)
    }),
    Probe::new(
        "gd-rf",
        "the #DB of DR7.GD pushes RF = 1, like every fault except an instruction breakpoint",
        |c| disarmed(c, general_detect(), general_detect_rf),
    ),
];

/// Probes that must run last, because they have crashed hypervisors.
pub(in crate::probe) const LAST: &[Probe] = &[
    Probe::new(
        "guestbp-data",
        "the guest's own data breakpoint at CPL0 and CPL3",
        |c| {
            both_levels(|level| match level {
                StartLevel::Kernel => own(c, own_data_cpl0()),
                StartLevel::User => own(c, own_data_cpl3()),
            })
        },
    ),
    Probe::new(
        "guestbp-disabled",
        "DR6 omits a data breakpoint that matches but is disabled",
        |c| disarmed(c, own_and_disabled(), disabled),
    ),
    Probe::new(
        "shadow-int3-cpl3",
        "a data breakpoint that MOV SS delays traps at the handler of INT3 at CPL3",
        |c| disarmed(c, deferred_to_int3(), deferred),
    ),
];

/// Whether a facility works, and the detail of the finding.
type Measured = (bool, String);

fn into_finding((works, detail): Measured) -> Finding {
    if works {
        Finding::works(detail)
    } else {
        Finding::broken(detail)
    }
}

fn both_levels(
    measure: impl Fn(StartLevel) -> Result<Measured, RefusedCall>,
) -> Result<Finding, RefusedCall> {
    let (kernel, user) = (measure(StartLevel::Kernel)?, measure(StartLevel::User)?);
    let works = kernel.0 && user.0;
    if kernel.1 == user.1 {
        return Ok(into_finding((works, kernel.1)));
    }
    Ok(into_finding((
        works,
        format!("CPL0: {}; CPL3: {}", kernel.1, user.1),
    )))
}

fn host_execute(context: &ProbeContext, level: StartLevel) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(level, target())?;
    guest.debug(HARDWARE, guest.mark(), EXECUTE)?;
    match guest.run() {
        GuestStop::Debug { rip, dr6, .. } if rip == guest.mark() => {
            if dr6 & DR6_B0 == 0 {
                return Ok(Finding::differs(format!("exit, but DR6 is {dr6:#x}")));
            }
        }
        GuestStop::Done => return Ok(Finding::broken("nothing")),
        stop => return Ok(Finding::broken(stop)),
    }
    guest.edit_regs(|regs| regs.rflags |= RF)?;
    Ok(match guest.run() {
        GuestStop::Done => Finding::works("exit; RF passes it"),
        GuestStop::Debug { rip, .. } if rip == guest.mark() => {
            guest.debug(0, 0, 0)?;
            match guest.run() {
                GuestStop::Done => {
                    Finding::differs("exit; RF ignored: the same stop for ever, disable to pass")
                }
                stop => Finding::broken(format!("exit; RF ignored; when disabled, {stop}")),
            }
        }
        stop => Finding::broken(format!("exit; then {stop}")),
    })
}

fn host_trap(
    context: &ProbeContext,
    level: StartLevel,
    code: GuestCode,
    dr0: u64,
    dr7: u64,
) -> Result<Measured, RefusedCall> {
    let mut guest = context.guest(level, code)?;
    guest.debug(HARDWARE, dr0, dr7)?;
    let mut stop = guest.run();
    while matches!(stop, GuestStop::Out { .. }) {
        stop = guest.run();
    }
    Ok(match stop {
        GuestStop::Debug { rip, .. } if rip == guest.mark() => {
            (true, "exit after the access".to_owned())
        }
        GuestStop::Debug { rip, .. } => {
            let off = rip.wrapping_sub(guest.mark()).cast_signed();
            (false, format!("exit {off:+} bytes from where it belongs"))
        }
        GuestStop::Done => (false, "nothing".to_owned()),
        stop => (false, stop.to_string()),
    })
}

fn general_detect_host(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, reads_dr())?;
    guest.debug(HARDWARE, 0, GENERAL_DETECT)?;
    Ok(match guest.run() {
        GuestStop::Debug { rip, dr6, .. } if rip == guest.mark() && dr6 & DR6_BD != 0 => {
            Finding::works("exit before MOV DR, DR6.BD")
        }
        GuestStop::Debug { dr6, .. } => Finding::differs(format!("exit with DR6 {dr6:#x}")),
        GuestStop::Done => Finding::broken("nothing"),
        stop => Finding::broken(stop),
    })
}

fn host_software(context: &ProbeContext, level: StartLevel) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(level, host_int3())?;
    guest.debug(SOFTWARE, 0, 0)?;
    Ok(match guest.run() {
        GuestStop::Debug { rip, vector: 3, .. } if rip == guest.mark() => {
            Finding::works("exit, RIP on the INT3")
        }
        GuestStop::Debug { rip, vector, .. } => {
            let off = rip.wrapping_sub(guest.mark()).cast_signed();
            Finding::differs(format!(
                "exit with vector {vector}, {off:+} bytes from the INT3"
            ))
        }
        stop => Finding::broken(stop),
    })
}

/// Runs code that arms a breakpoint of its own, and disarms it afterwards.
fn own(context: &ProbeContext, code: GuestCode) -> Result<Measured, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, code)?;
    let measured = own_trap(&mut guest);
    guest.disarm()?;
    measured
}

/// Like [`own`], with another function that measures.
fn disarmed(
    context: &ProbeContext,
    code: GuestCode,
    measure: impl Fn(&mut ProbeGuest<'_>) -> Result<Finding, RefusedCall>,
) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, code)?;
    let finding = measure(&mut guest);
    guest.disarm()?;
    finding
}

fn disabled(guest: &mut ProbeGuest<'_>) -> Result<Finding, RefusedCall> {
    const B3_TO_B0: u64 = Dr6::BREAKPOINTS;
    Ok(match guest.run() {
        GuestStop::Trap(t) if t.is(Vector::DB) && t.rip == guest.mark() => {
            match guest.dr6()? & B3_TO_B0 {
                DR6_B0 => Finding::works("B0 alone"),
                bits => Finding::broken(format!("B3 to B0 are {bits:#06b}")),
            }
        }
        GuestStop::Done => Finding::broken("nothing"),
        stop => Finding::broken(stop),
    })
}

fn deferred(guest: &mut ProbeGuest<'_>) -> Result<Finding, RefusedCall> {
    const BREAKPOINT_HANDLER: u64 = STUBS + 3 * 16;
    Ok(match guest.run() {
        GuestStop::Trap(t) if t.is(Vector::DB) && t.rip == BREAKPOINT_HANDLER => {
            Finding::works("#DB at the first instruction of the handler")
        }
        GuestStop::Trap(t) if t.is(Vector::BP) => Finding::broken("lost: #BP alone"),
        stop => Finding::broken(stop),
    })
}

/// Runs to the breakpoint's #DB, and past it with RF set in the frame.
fn own_trap(guest: &mut ProbeGuest<'_>) -> Result<Measured, RefusedCall> {
    let mut stop = guest.run();
    while matches!(stop, GuestStop::Out { .. }) {
        stop = guest.run();
    }
    Ok(match stop {
        GuestStop::Trap(t) if t.is(Vector::DB) && t.rip == guest.mark() => {
            let dr6 = guest.dr6()?;
            if dr6 & DR6_B0 == 0 {
                return Ok((false, format!("#DB, but DR6 is {dr6:#x}")));
            }
            guest.set_trap_rflags(t, t.rflags | RF)?;
            match guest.run() {
                GuestStop::Done => (true, "#DB, DR6.B0; RF passes it".to_owned()),
                GuestStop::Trap(again) if again.rip == t.rip => {
                    (false, "#DB, DR6.B0; RF ignored".to_owned())
                }
                stop => (false, format!("#DB, DR6.B0; then {stop}")),
            }
        }
        GuestStop::Trap(t) if t.is(Vector::DB) => {
            let off = t.rip.wrapping_sub(guest.mark()).cast_signed();
            (false, format!("#DB {off:+} bytes from where it belongs"))
        }
        GuestStop::Done => (false, "nothing".to_owned()),
        stop => (false, stop.to_string()),
    })
}

fn general_detect_guest(guest: &mut ProbeGuest<'_>) -> Result<Finding, RefusedCall> {
    Ok(match guest.run() {
        GuestStop::Trap(t) if t.is(Vector::DB) && t.rip == guest.mark() => {
            let dr6 = guest.dr6()?;
            if dr6 & DR6_BD != 0 {
                Finding::works("#DB, DR6.BD")
            } else {
                Finding::broken(format!("#DB, but DR6 is {dr6:#x}"))
            }
        }
        GuestStop::Done => Finding::broken("no #DB"),
        stop => Finding::broken(stop),
    })
}

fn general_detect_rf(guest: &mut ProbeGuest<'_>) -> Result<Finding, RefusedCall> {
    Ok(match guest.run() {
        GuestStop::Trap(t) if t.is(Vector::DB) && t.rflags & RF != 0 => Finding::works("RF = 1"),
        GuestStop::Trap(t) if t.is(Vector::DB) => Finding::broken("RF = 0"),
        GuestStop::Done => Finding::broken("no #DB"),
        stop => Finding::broken(stop),
    })
}
