//! Events from outside: injected exceptions, NMI, SMI, interrupts and the interrupt window.

use hindsight_regs::dr::Dr6;
use kvm_bindings::{
    KVM_CAP_EXCEPTION_PAYLOAD, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_INJECT_BP, KVM_GUESTDBG_INJECT_DB,
    KVM_VCPUEVENT_VALID_PAYLOAD, kvm_enable_cap, kvm_msi,
};
use vmm_sys_util::eventfd::EventFd;

use crate::kvm::ioctls;
use crate::probe::code::code;
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::*;

/// DR6.BS.
const DR6_BS: u64 = Dr6::BS.bits();
const INTERRUPT: u8 = 0x50;

code! {
    fn runs @ 7 { "7:", "nop", "nop", "out 0xd1, al" }
    fn opens_window_cpl0 { "xor eax, eax", "sti", "2:", "inc rax", "jmp 2b" }
    // STI needs IOPL, which not every KVM gives: IRETQ brings IF.
    fn opens_window_cpl3 {
        "push 0x1b", "push r8", "push 0x3202", "push 0x23", "lea rax, [rip + 2f]", "push rax",
        "mov eax, 0", "iretq", "2:", "inc rax", "jmp 2b",
    }
}

/// The rows of this file.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new(
        "inject-db",
        "KVM_GUESTDBG_INJECT_DB gives the guest #DB",
        |b| by_guest_debug(b, KVM_GUESTDBG_INJECT_DB, 1),
    ),
    Probe::new(
        "inject-bp",
        "KVM_GUESTDBG_INJECT_BP gives the guest #BP",
        |b| by_guest_debug(b, KVM_GUESTDBG_INJECT_BP, 3),
    ),
    Probe::new(
        "events-db",
        "#DB by KVM_SET_VCPU_EVENTS, with a DR6 payload",
        |b| by_events(b, 1, None, Some(DR6_BS)),
    ),
    Probe::new(
        "events-pf",
        "#PF by KVM_SET_VCPU_EVENTS, with error code and CR2",
        |b| by_events(b, 14, Some(6), Some(UNMAPPED)),
    ),
    Probe::new(
        "events-gp",
        "#GP by KVM_SET_VCPU_EVENTS, with error code",
        |b| by_events(b, 13, Some(0x48), None),
    ),
    Probe::new(
        "nmi",
        "KVM_NMI without an in-kernel interrupt controller",
        |b| {
            let mut guest = b.guest(Level::Kernel, runs())?;
            guest.tiny.vcpu.nmi().named("KVM_NMI")?;
            Ok(arrives(&mut guest, 2))
        },
    ),
    Probe::new(
        "interrupt",
        "KVM_INTERRUPT without an in-kernel interrupt controller",
        |b| {
            let mut guest = b.guest(Level::Kernel, runs())?;
            guest.edit_regs(|regs| regs.rflags |= IF)?;
            ioctls::interrupt(&guest.tiny.vcpu, INTERRUPT).named("KVM_INTERRUPT")?;
            Ok(arrives(&mut guest, u64::from(INTERRUPT)))
        },
    ),
    Probe::new(
        "irq-window-cpl0",
        "the interrupt window exits after STI at CPL0",
        |b| window(b, opens_window_cpl0()),
    ),
    Probe::new(
        "irq-window-cpl3",
        "the interrupt window exits when IF is set at CPL3",
        |b| window(b, opens_window_cpl3()),
    ),
    Probe::new(
        "irqchip",
        "in-kernel interrupt controller: irqfd and KVM_SIGNAL_MSI",
        irqchip,
    ),
    Probe::new("smi", "KVM_SMI runs the guest's SMM handler", smi),
];

fn arrives(guest: &mut Guest<'_>, vector: u64) -> Finding {
    match guest.run() {
        Stop::Trap(t) if t.vector == vector && t.rip == guest.mark() => Finding::works("delivered"),
        Stop::Trap(t) if t.vector == vector => Finding::differs("delivered, but late"),
        Stop::Done => Finding::broken("lost"),
        stop => Finding::broken(stop),
    }
}

fn by_guest_debug(bench: &Bench, inject: u32, vector: u64) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, runs())?;
    guest.debug(KVM_GUESTDBG_ENABLE | inject, 0, 0)?;
    Ok(arrives(&mut guest, vector))
}

fn by_events(
    bench: &Bench,
    vector: u8,
    error: Option<u32>,
    payload: Option<u64>,
) -> Result<Finding, Refused> {
    let enable = kvm_enable_cap {
        cap: KVM_CAP_EXCEPTION_PAYLOAD,
        args: [1, 0, 0, 0],
        ..Default::default()
    };
    let mut guest = bench.guest_in(Level::Kernel, runs(), |vm| vm.enable_cap(&enable))?;
    let mut events = guest
        .tiny
        .vcpu
        .get_vcpu_events()
        .named("KVM_GET_VCPU_EVENTS")?;
    events.flags |= KVM_VCPUEVENT_VALID_PAYLOAD;
    events.exception.pending = 1;
    events.exception.nr = vector;
    events.exception.has_error_code = u8::from(error.is_some());
    events.exception.error_code = error.unwrap_or(0);
    events.exception_has_payload = u8::from(payload.is_some());
    events.exception_payload = payload.unwrap_or(0);
    guest
        .tiny
        .vcpu
        .set_vcpu_events(&events)
        .named("KVM_SET_VCPU_EVENTS")?;
    let (trap, rip) = match guest.run() {
        Stop::Trap(t) if t.vector == u64::from(vector) => (t, guest.mark()),
        Stop::Done => return Ok(Finding::broken("lost")),
        stop => return Ok(Finding::broken(stop)),
    };
    let mut wrong = Vec::new();
    if trap.rip != rip {
        wrong.push(format!("RIP {:#x}", trap.rip));
    }
    if error.is_some_and(|error| trap.error != u64::from(error)) {
        wrong.push(format!("error code {:#x}", trap.error));
    }
    match (vector, payload) {
        (1, Some(payload)) if guest.dr6()? & payload == 0 => {
            wrong.push(format!("DR6 {:#x}", guest.dr6()?));
        }
        (14, Some(payload)) if guest.sregs()?.cr2 != payload => {
            wrong.push(format!("CR2 {:#x}", guest.sregs()?.cr2));
        }
        _ => {}
    }
    if wrong.is_empty() {
        return Ok(Finding::works(if payload.is_some() {
            "delivered, with payload"
        } else {
            "delivered"
        }));
    }
    Ok(Finding::broken(format!(
        "delivered, but {}",
        wrong.join(", ")
    )))
}

fn window(bench: &Bench, code: Code) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, code)?;
    guest.tiny.vcpu.get_kvm_run().request_interrupt_window = 1;
    Ok(match guest.run() {
        Stop::InterruptWindow => match guest.regs()?.rax {
            0 | 1 => Finding::works("exits at once"),
            loops => Finding::differs(format!("exits {loops} loops late")),
        },
        Stop::Hung => Finding::broken("no exit"),
        stop => Finding::broken(stop),
    })
}

fn irqchip(bench: &Bench) -> Result<Finding, Refused> {
    let guest = bench.guest_in(Level::Kernel, runs(), kvm_ioctls::VmFd::create_irq_chip)?;
    let event = EventFd::new(0).named("eventfd")?;
    guest.tiny.vm.register_irqfd(&event, 4).named("KVM_IRQFD")?;
    let msi = kvm_msi {
        address_lo: 0xfee0_0000,
        data: u32::from(INTERRUPT),
        ..Default::default()
    };
    let delivered = guest.tiny.vm.signal_msi(msi).named("KVM_SIGNAL_MSI")?;
    // The APIC is still disabled, so the guest may block the message; the call is what counts.
    Ok(Finding::works(if delivered > 0 {
        "accepted, MSI delivered"
    } else {
        "accepted"
    }))
}

fn smi(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, runs())?;
    if let Err(error) = guest.tiny.vcpu.smi() {
        let error = std::io::Error::from(error);
        return Ok(if error.raw_os_error() == Some(libc::ENOTTY) {
            Finding::absent("KVM_SMI: ENOTTY")
        } else {
            Finding::broken(format!("KVM_SMI: {error}"))
        });
    }
    Ok(match guest.run() {
        Stop::Done if guest.tiny.vcpu.get_kvm_run().flags & 1 != 0 => match guest.run() {
            Stop::Done => Finding::works("handler runs in SMM; RSM returns"),
            stop => Finding::broken(format!("handler runs in SMM; then {stop}")),
        },
        Stop::Done => Finding::broken("accepted and lost"),
        stop => Finding::broken(stop),
    })
}
