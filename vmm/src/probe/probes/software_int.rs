//! INT3, INT1, INT n, SYSCALL, IRETQ, and the delivery of faults.

use hindsight_regs::msr::{IA32_LSTAR, IA32_STAR};
use hindsight_regs::vector::Vector;

use crate::probe::context::{ProbeContext, RefusedCall};
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::code::code;
use crate::probe::guest::*;

code! {
    fn int3 @ 7 { "int3", "7:", "out 0xd1, al" }
    // The assembler has no name for INT1.
    fn int1 @ 7 { ".byte 0xf1", "7:", "out 0xd1, al" }
    fn intn @ 7 { "int 0x40", "7:", "out 0xd1, al" }
    fn syscall @ 7 { "syscall", "7:", "out 0xd1, al" }
    fn iretq { crate::probe::guest::code::to_cpl3!(), "2:", "out 0xd1, al" }
    // R9 holds the expected stack pointer.
    fn iretd @ 7 {
        "sub rsp, 0x40", "lea r9, [rsp + 0x30]",
        "lea rax, [rip + 7f]", "mov [rsp], eax", "mov eax, cs", "mov [rsp + 4], eax",
        "mov dword ptr [rsp + 8], 2", "mov [rsp + 12], r9d", "mov eax, ss", "mov [rsp + 16], eax",
        "iretd", "7:", "out 0xd1, al",
    }
    fn undefined { "ud2" }
    fn divide { "xor ecx, ecx", "div ecx" }
    fn page_fault { "mov rax, 0x40000000", "mov [rax], rax" }
    fn general_protection { "mov eax, 0x48", "mov ds, eax" }
}

/// The probes of this module.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new(
        "int3-cpl0",
        "INT3 at CPL0 reaches the guest's handler",
        |c| trap_after(c, StartLevel::Kernel, int3(), 3),
    ),
    Probe::new(
        "int1-cpl0",
        "INT1 at CPL0 reaches the guest's handler",
        |c| trap_after(c, StartLevel::Kernel, int1(), 1),
    ),
    Probe::new(
        "intn-cpl0",
        "INT n at CPL0 reaches the guest's handler",
        |c| trap_after(c, StartLevel::Kernel, intn(), 0x40),
    ),
    Probe::new(
        "int3-cpl3",
        "INT3 at CPL3 reaches the guest's handler",
        |c| trap_after(c, StartLevel::User, int3(), 3),
    ),
    Probe::new(
        "intn-cpl3",
        "INT n at CPL3 reaches the guest's handler",
        |c| trap_after(c, StartLevel::User, intn(), 0x40),
    ),
    Probe::new(
        "syscall-cpl3",
        "SYSCALL enters CPL0 with the architectural CS, SS, RCX and R11",
        syscall_cpl3,
    ),
    Probe::new("iretq-cpl3", "IRETQ goes from CPL0 to CPL3", iretq_cpl3),
    Probe::new(
        "iretd-cpl0",
        "32-bit IRET in 64-bit mode pops SS and the stack pointer",
        iretd_cpl0,
    ),
    Probe::new(
        "exceptions",
        "#UD, #DE, #GP and #PF reach the guest's handler",
        exceptions,
    ),
];

fn trap_after(
    context: &ProbeContext,
    level: StartLevel,
    code: GuestCode,
    vector: u64,
) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(level, code)?;
    let (cs, _) = level.selectors();
    Ok(match guest.run() {
        GuestStop::Trap(t)
            if t.vector == vector && t.rip == guest.mark() && t.cs == u64::from(cs) =>
        {
            match guest.run() {
                GuestStop::Done => Finding::works("delivered; IRETQ returns"),
                stop => Finding::broken(format!("delivered; then {stop}")),
            }
        }
        GuestStop::Trap(t) if t.vector == vector => Finding::broken(format!(
            "delivered with CS:RIP {:#x}:{:#x}, not {cs:#x}:{:#x}",
            t.cs,
            t.rip,
            guest.mark()
        )),
        stop => Finding::broken(stop),
    })
}

fn syscall_cpl3(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::User, syscall())?;
    let selectors = (u64::from(KERNEL_CS) << 32) | (u64::from(KERNEL_SS) << 48);
    guest.set_msr(IA32_STAR, selectors)?;
    guest.set_msr(IA32_LSTAR, guest.mark())?;
    let stop = guest.run();
    if stop != GuestStop::Done {
        return Ok(Finding::broken(stop));
    }
    let regs = guest.regs()?;
    let sregs = guest.sregs()?;
    let mut wrong = Vec::new();
    if sregs.cs.selector != KERNEL_CS {
        wrong.push(format!("CS {:#x}", sregs.cs.selector));
    }
    if sregs.ss.selector != KERNEL_SS {
        wrong.push(format!("SS {:#x}", sregs.ss.selector));
    }
    if regs.rcx != guest.mark() {
        wrong.push(format!("RCX {:#x}", regs.rcx));
    }
    if regs.r11 & 0x3000 != 0x3000 {
        wrong.push(format!("R11 {:#x}", regs.r11));
    }
    if wrong.is_empty() {
        return Ok(Finding::works("CS, SS, RCX and R11 are right"));
    }
    Ok(Finding::broken(format!("wrong: {}", wrong.join(", "))))
}

fn iretq_cpl3(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, iretq())?;
    let stop = guest.run();
    let sregs = guest.sregs()?;
    let rsp = guest.regs()?.rsp;
    Ok(match stop {
        GuestStop::Done if sregs.cs.selector == USER_CS && sregs.ss.selector == USER_SS => {
            if rsp == USER_STACK {
                Finding::works("CS, SS and RSP are right")
            } else {
                Finding::broken(format!("RSP is {rsp:#x}"))
            }
        }
        GuestStop::Done => Finding::broken(format!(
            "CS {:#x}, SS {:#x}",
            sregs.cs.selector, sregs.ss.selector
        )),
        stop => Finding::broken(stop),
    })
}

fn iretd_cpl0(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, iretd())?;
    let stop = guest.run();
    let regs = guest.regs()?;
    let off = regs.rsp.wrapping_sub(regs.r9).cast_signed();
    Ok(match stop {
        GuestStop::Done if off == 0 => Finding::works("RSP is right"),
        GuestStop::Done => Finding::broken(format!("RSP {off:+} bytes from where it belongs")),
        stop => Finding::broken(stop),
    })
}

fn exceptions(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    // Name, code, vector, error code at CPL0 and CPL3.
    let rows = [
        ("#UD", undefined(), Vector::UD, [0, 0]),
        ("#DE", divide(), Vector::DE, [0, 0]),
        ("#PF", page_fault(), Vector::PF, [2, 6]),
        ("#GP", general_protection(), Vector::GP, [0x48, 0x48]),
    ];
    let mut wrong = Vec::new();
    for (name, code, vector, errors) in rows {
        for (level, error) in [StartLevel::Kernel, StartLevel::User]
            .into_iter()
            .zip(errors)
        {
            let mut guest = context.guest(level, code)?;
            match guest.run() {
                GuestStop::Trap(t) if t.is(vector) && t.error == error => {
                    let cr2 = guest.sregs()?.cr2;
                    if vector == Vector::PF && cr2 != UNMAPPED {
                        wrong.push(format!("{name} at {level}: CR2 {cr2:#x}"));
                    }
                }
                GuestStop::Trap(t) if t.is(vector) => {
                    wrong.push(format!("{name} at {level}: error code {:#x}", t.error));
                }
                stop => wrong.push(format!("{name} at {level}: {stop}")),
            }
        }
    }
    if wrong.is_empty() {
        return Ok(Finding::works(
            "at CPL0 and CPL3, error codes and CR2 right",
        ));
    }
    Ok(Finding::broken(wrong.join("; ")))
}
