//! Exits by MSRs, RDPMC, ports, MMIO, HLT and CPUID, and how they are completed.

use hindsight_regs::apic::ApicRegister;
use hindsight_regs::msr::IA32_DEBUGCTL;
use hindsight_regs::vector::Vector;
use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, KVM_SYNC_X86_REGS, kvm_enable_cap};
use kvm_ioctls::{Cap, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, SyncReg};

use crate::kvm::ioctls;
use crate::probe::context::{NameCall, ProbeContext, RefusedCall};
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::code::{GuestCode, code};
use crate::probe::guest::{DATA, GuestStop, MMIO, ProbeGuest, StartLevel};

const X2APIC_VERSION: u32 = ApicRegister::VERSION.x2apic_msr();
/// KVM_MSR_EXIT_REASON_INVAL, _UNKNOWN and _FILTER.
const MSR_EXITS: u64 = 0b111;

code! {
    fn reads_and_writes_msr {
        "mov ecx, 0x1d9", "rdmsr", "out 0xd1, al",
        "mov eax, 0x1", "xor edx, edx", "wrmsr", "out 0xd1, al", "rdmsr", "out 0xd1, al",
    }
    fn reads_x2apic { "mov ecx, 0x803", "rdmsr", "out 0xd1, al" }
    fn reads_pmc { "xor ecx, ecx", "rdpmc", "out 0xd1, al" }
    fn halts @ 7 { "hlt", "7:", "out 0xd1, al" }
    fn ports {
        "mov eax, 0x44332211", "out 0xe9, al", "out 0xe9, ax", "out 0xe9, eax",
        "xor eax, eax", "in al, 0xe9", "in eax, 0xe9",
        "cld", "mov rsi, r9", "mov dx, 0xe9", "mov ecx, 3", "rep outsb", "out 0xd1, al",
    }
    fn memory {
        "mov ebx, 0x100000", "mov dword ptr [rbx], 0x44332211", "xor eax, eax",
        "mov eax, [rbx + 8]", "out 0xd1, al",
    }
    fn reads_cpuid { "mov eax, 0x40000000", "cpuid", "out 0xd1, al" }
    fn reads_port @ 7 { "xor eax, eax", "in al, 0xe9", "7:", "out 0xd1, al" }
    fn leaves { "mov eax, 0x5a", "out 0xd1, al" }
    fn writes_port { "nop", "out 0xd1, al" }
}

/// The probes of this module.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new(
        "msr-exit",
        "filtered RDMSR and WRMSR exit, and can succeed or fault",
        msr_exit,
    ),
    Probe::new(
        "x2apic-exit",
        "x2APIC MSRs exit without an in-kernel APIC",
        x2apic_exit,
    ),
    Probe::new("rdpmc", "RDPMC 0 at CPL0", rdpmc),
    Probe::new(
        "hlt-exit",
        "HLT exits, and the guest continues after it",
        hlt_exit,
    ),
    Probe::new("io-exit", "IN and OUT of each size, and REP OUTS", io_exit),
    Probe::new(
        "iopl-cpl3",
        "RFLAGS.IOPL = 3 alone allows OUT at CPL3",
        iopl,
    ),
    Probe::new(
        "mmio-exit",
        "loads and stores outside of memory exit",
        mmio_exit,
    ),
    Probe::new(
        "cpuid",
        "CPUID returns what KVM_SET_CPUID2 has set, at CPL0 and CPL3",
        cpuid,
    ),
    Probe::new(
        "complete-exit",
        "immediate_exit completes a pending IN, and runs no instruction",
        complete,
    ),
    Probe::new(
        "sync-regs",
        "KVM_CAP_SYNC_REGS returns the registers",
        sync_regs,
    ),
    Probe::new(
        "sync-pending-in",
        "dirty sync regs with an IN pending keep its data",
        sync_pending_in,
    ),
    Probe::new("prefault", "KVM_PRE_FAULT_MEMORY", prefault),
];

/// A guest at CPL0 whose accesses to MSR `index` exit, and those to unknown and invalid MSRs.
pub(super) fn filtered<'b>(
    context: &'b ProbeContext,
    code: GuestCode,
    index: u32,
) -> Result<ProbeGuest<'b>, RefusedCall> {
    let exits = kvm_enable_cap {
        cap: KVM_CAP_X86_USER_SPACE_MSR,
        args: [MSR_EXITS, 0, 0, 0],
        ..Default::default()
    };
    let range = MsrFilterRange {
        flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
        base: index,
        msr_count: 1,
        bitmap: &[0],
    };
    context.guest_in(StartLevel::Kernel, code, |vm| {
        vm.enable_cap(&exits)?;
        vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[range])
    })
}

fn msr_exit(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    const ANSWER: u64 = 0x12_3456_789a;
    let mut guest = filtered(context, reads_and_writes_msr(), IA32_DEBUGCTL)?;
    guest.msr_reply.value = ANSWER;
    let stop = guest.run();
    if stop
        != (GuestStop::Rdmsr {
            index: IA32_DEBUGCTL,
        })
    {
        return Ok(Finding::broken(format!("RDMSR: {stop}")));
    }
    let stop = guest.run();
    let regs = guest.regs()?;
    if stop != GuestStop::Done || (regs.rdx << 32) | regs.rax != ANSWER {
        return Ok(Finding::broken(format!(
            "RDMSR exits, but its answer is lost: {stop}"
        )));
    }
    let stop = guest.run();
    if stop
        != (GuestStop::Wrmsr {
            index: IA32_DEBUGCTL,
            value: 1,
        })
    {
        return Ok(Finding::broken(format!("WRMSR: {stop}")));
    }
    let stop = guest.run();
    if stop != GuestStop::Done {
        return Ok(Finding::broken(format!("after WRMSR: {stop}")));
    }
    guest.msr_reply.fault = true;
    guest.run();
    Ok(match guest.run() {
        GuestStop::Trap(t) if t.is(Vector::GP) => Finding::works("both exit; answered or #GP"),
        stop => Finding::broken(format!("a refused RDMSR gives no #GP: {stop}")),
    })
}

fn x2apic_exit(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = filtered(context, reads_x2apic(), IA32_DEBUGCTL)?;
    Ok(match guest.run() {
        GuestStop::Rdmsr {
            index: X2APIC_VERSION,
        } => Finding::works("exits as invalid"),
        GuestStop::Done => Finding::broken("answered by KVM"),
        stop => Finding::broken(stop),
    })
}

fn rdpmc(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, reads_pmc())?;
    Ok(match guest.run() {
        GuestStop::Trap(t) if t.is(Vector::GP) => Finding::absent("#GP in the guest, no exit"),
        GuestStop::Done => {
            let regs = guest.regs()?;
            Finding::differs(format!("value {:#x}, no exit", (regs.rdx << 32) | regs.rax))
        }
        stop => Finding::broken(stop),
    })
}

fn hlt_exit(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, halts())?;
    let stop = guest.run();
    if stop != GuestStop::Halt {
        return Ok(Finding::broken(stop));
    }
    let rip = guest.regs()?.rip;
    Ok(match guest.run() {
        GuestStop::Done if rip == guest.mark() => Finding::works("exits, RIP behind it"),
        GuestStop::Done => Finding::differs(format!("exits, RIP {rip:#x}")),
        stop => Finding::broken(format!("exits; then {stop}")),
    })
}

fn io_exit(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, ports())?;
    guest.vm.write(DATA, b"abc").named("guest memory")?;
    let mut written = Vec::new();
    let mut read = Vec::new();
    let end = loop {
        match guest.run() {
            GuestStop::Out { port: 0xe9, data } if written.len() < 64 => written.extend(data),
            GuestStop::In { port: 0xe9, size } if read.len() < 64 => read.push(size),
            end => break end,
        }
    };
    let expected = [0x11, 0x11, 0x22, 0x11, 0x22, 0x33, 0x44, b'a', b'b', b'c'];
    if end != GuestStop::Done {
        return Ok(Finding::broken(end));
    }
    // RCX is 0 after REP; RAX holds the bytes that IN read.
    let regs = guest.regs()?;
    if written != expected {
        return Ok(Finding::broken(format!("OUT gives {written:02x?}")));
    }
    if read != [1, 4] || regs.rax != 0x5a5a_5a5a || regs.rcx != 0 {
        return Ok(Finding::broken(format!(
            "IN sizes {read:?}, EAX {:#x}",
            regs.rax
        )));
    }
    Ok(Finding::works("IN, OUT, REP OUTS"))
}

fn iopl(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::User, writes_port())?;
    // No I/O map within the limit: only IOPL can allow the access.
    guest.edit_sregs(|sregs| sregs.tr.limit = 0x67)?;
    Ok(match guest.run() {
        GuestStop::Done => Finding::works("allowed"),
        GuestStop::Trap(t) if t.is(Vector::GP) => {
            Finding::broken("ignored: #GP without an I/O map")
        }
        stop => Finding::broken(stop),
    })
}

fn mmio_exit(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, memory())?;
    let store = guest.run();
    let expected = GuestStop::MmioWrite {
        address: MMIO,
        data: vec![0x11, 0x22, 0x33, 0x44],
    };
    if store != expected {
        return Ok(Finding::broken(format!("store: {store}")));
    }
    let load = guest.run();
    if load
        != (GuestStop::MmioRead {
            address: MMIO + 8,
            size: 4,
        })
    {
        return Ok(Finding::broken(format!("load: {load}")));
    }
    let stop = guest.run();
    let rax = guest.regs()?.rax;
    Ok(if stop == GuestStop::Done && rax == 0x5a5a_5a5a {
        Finding::works("loads and stores exit")
    } else {
        Finding::broken(format!("load gives {rax:#x}; {stop}"))
    })
}

fn cpuid(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    const LEAF: u32 = 0x4000_0000;
    const MARKER: u32 = 0x6869_6e64;
    let mut entries = context.cpuid.as_slice().to_vec();
    entries.retain(|entry| entry.function != LEAF);
    entries.push(kvm_bindings::kvm_cpuid_entry2 {
        function: LEAF,
        ebx: MARKER,
        ..Default::default()
    });
    let cpuid = kvm_bindings::CpuId::from_entries(&entries)
        .map_err(|_| std::io::Error::from_raw_os_error(libc::E2BIG))
        .named("KVM_SET_CPUID2")?;
    let mut wrong = Vec::new();
    for level in [StartLevel::Kernel, StartLevel::User] {
        let mut guest = context.guest(level, reads_cpuid())?;
        guest.vm.vcpu().set_cpuid2(&cpuid).named("KVM_SET_CPUID2")?;
        let stop = guest.run();
        let rbx = guest.regs()?.rbx;
        if stop != GuestStop::Done {
            wrong.push(format!("{level}: {stop}"));
        } else if rbx != u64::from(MARKER) {
            wrong.push(format!("{level}: EBX {rbx:#x}, not ours"));
        }
    }
    Ok(if wrong.is_empty() {
        Finding::works("ours at CPL0 and CPL3")
    } else {
        Finding::broken(wrong.join("; "))
    })
}

fn complete(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, reads_port())?;
    let stop = guest.run();
    if stop
        != (GuestStop::In {
            port: 0xe9,
            size: 1,
        })
    {
        return Ok(Finding::broken(stop));
    }
    let stop = guest.complete();
    if stop != (GuestStop::Error { errno: libc::EINTR }) {
        return Ok(Finding::broken(format!("not EINTR but: {stop}")));
    }
    let regs = guest.regs()?;
    Ok(if regs.rip == guest.mark() && regs.rax == 0x5a {
        Finding::works("EINTR, with RIP behind the IN and its data in AL")
    } else {
        Finding::broken(format!("RIP {:#x}, RAX {:#x}", regs.rip, regs.rax))
    })
}

fn sync_regs(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let offered = context.kvm.check_extension_int(Cap::SyncRegs);
    if offered <= 0 {
        return Ok(Finding::absent("not offered"));
    }
    let mut guest = context.guest(StartLevel::Kernel, leaves())?;
    guest.vm.sync_at_exit(SyncReg::Register);
    guest.vm.sync_at_exit(SyncReg::SystemRegister);
    guest.vm.sync_at_exit(SyncReg::VcpuEvents);
    let stop = guest.run();
    if stop != GuestStop::Done {
        return Ok(Finding::broken(stop));
    }
    let synced = guest.vm.sync_regs();
    let (regs, sregs) = (guest.regs()?, guest.sregs()?);
    Ok(
        if synced.regs.rax == regs.rax
            && synced.regs.rsp == regs.rsp
            && synced.sregs.cr3 == sregs.cr3
        {
            Finding::works(format!(
                "registers, system registers and events (mask {offered:#x})"
            ))
        } else {
            Finding::broken(format!("RAX {:#x}, not {:#x}", synced.regs.rax, regs.rax))
        },
    )
}

fn sync_pending_in(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let mut guest = context.guest(StartLevel::Kernel, reads_port())?;
    guest.vm.sync_at_exit(SyncReg::Register);
    let stop = guest.run();
    if stop
        != (GuestStop::In {
            port: 0xe9,
            size: 1,
        })
    {
        return Ok(Finding::broken(stop));
    }
    let run = guest.vm.kvm_run();
    run.kvm_dirty_regs |= u64::from(KVM_SYNC_X86_REGS);
    let stop = guest.run();
    let rax = guest.regs()?.rax;
    Ok(match stop {
        GuestStop::Done if rax == 0x5a => Finding::works("merged"),
        GuestStop::Done => Finding::broken("the port's data is lost"),
        stop => Finding::broken(stop),
    })
}

fn prefault(context: &ProbeContext) -> Result<Finding, RefusedCall> {
    let guest = context.guest(StartLevel::Kernel, leaves())?;
    Ok(match ioctls::pre_fault_memory(guest.vm.vcpu(), 0, 0x1000) {
        Ok(0) => Finding::works("works"),
        Ok(left) => Finding::differs(format!("leaves {left:#x} bytes")),
        Err(error) => Finding::absent(format!("KVM refuses: {error}")),
    })
}
