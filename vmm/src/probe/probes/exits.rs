//! Exits: MSRs, RDPMC, ports, MMIO, HLT, CPUID; and how state is read and completed.

use hindsight_regs::apic::ApicRegister;
use hindsight_regs::msr::IA32_DEBUGCTL;
use hindsight_regs::vector::Vector;
use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, KVM_SYNC_X86_REGS, kvm_enable_cap};
use kvm_ioctls::{Cap, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, SyncReg};

use crate::kvm::ioctls;
use crate::probe::code::{Code, code};
use crate::probe::finding::{Finding, Probe};
use crate::probe::guest::{Bench, Guest, Level, MMIO, Named, Refused, Stop};

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

/// The rows of this file.
pub(in crate::probe) const PROBES: &[Probe] = &[
    Probe::new(
        "msr-exit",
        "filtered RDMSR and WRMSR exit, and can be answered or refused",
        msr_exit,
    ),
    Probe::new(
        "x2apic-exit",
        "x2APIC MSRs exit when no APIC is in the kernel",
        x2apic_exit,
    ),
    Probe::new("rdpmc", "RDPMC 0 at CPL0", rdpmc),
    Probe::new(
        "hlt-exit",
        "HLT exits, and the guest runs on behind it",
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
        "loads and stores where there is no memory exit",
        mmio_exit,
    ),
    Probe::new(
        "cpuid",
        "CPUID shows what KVM_SET_CPUID2 says, at CPL0 and CPL3",
        cpuid,
    ),
    Probe::new(
        "complete-exit",
        "immediate_exit completes a pending IN, and runs nothing",
        complete,
    ),
    Probe::new(
        "sync-regs",
        "KVM_CAP_SYNC_REGS carries the registers",
        sync_regs,
    ),
    Probe::new(
        "sync-pending-in",
        "dirty sync regs with an IN pending keep its data",
        sync_pending_in,
    ),
    Probe::new("prefault", "KVM_PRE_FAULT_MEMORY", prefault),
];

/// A guest at CPL0 whose accesses to one MSR exit; so do unknown and invalid ones.
pub(super) fn filtered<'b>(bench: &'b Bench, code: Code, index: u32) -> Result<Guest<'b>, Refused> {
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
    bench.guest_in(Level::Kernel, code, |vm| {
        vm.enable_cap(&exits)?;
        vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[range])
    })
}

fn msr_exit(bench: &Bench) -> Result<Finding, Refused> {
    const ANSWER: u64 = 0x12_3456_789a;
    let mut guest = filtered(bench, reads_and_writes_msr(), IA32_DEBUGCTL)?;
    guest.msr_reply.value = ANSWER;
    let stop = guest.run();
    if stop
        != (Stop::Rdmsr {
            index: IA32_DEBUGCTL,
        })
    {
        return Ok(Finding::broken(format!("RDMSR: {stop}")));
    }
    let stop = guest.run();
    let regs = guest.regs()?;
    if stop != Stop::Done || (regs.rdx << 32) | regs.rax != ANSWER {
        return Ok(Finding::broken(format!(
            "RDMSR exits, but its answer is lost: {stop}"
        )));
    }
    let stop = guest.run();
    if stop
        != (Stop::Wrmsr {
            index: IA32_DEBUGCTL,
            value: 1,
        })
    {
        return Ok(Finding::broken(format!("WRMSR: {stop}")));
    }
    let stop = guest.run();
    if stop != Stop::Done {
        return Ok(Finding::broken(format!("after WRMSR: {stop}")));
    }
    guest.msr_reply.fault = true;
    guest.run();
    Ok(match guest.run() {
        Stop::Trap(t) if t.is(Vector::GP) => Finding::works("both exit; answered or #GP"),
        stop => Finding::broken(format!("a refused RDMSR gives no #GP: {stop}")),
    })
}

fn x2apic_exit(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = filtered(bench, reads_x2apic(), IA32_DEBUGCTL)?;
    Ok(match guest.run() {
        Stop::Rdmsr {
            index: X2APIC_VERSION,
        } => Finding::works("exits as invalid"),
        Stop::Done => Finding::broken("answered by KVM"),
        stop => Finding::broken(stop),
    })
}

fn rdpmc(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, reads_pmc())?;
    Ok(match guest.run() {
        Stop::Trap(t) if t.is(Vector::GP) => Finding::absent("#GP in the guest, no exit"),
        Stop::Done => {
            let regs = guest.regs()?;
            Finding::differs(format!("value {:#x}, no exit", (regs.rdx << 32) | regs.rax))
        }
        stop => Finding::broken(stop),
    })
}

fn hlt_exit(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, halts())?;
    let stop = guest.run();
    if stop != Stop::Halt {
        return Ok(Finding::broken(stop));
    }
    let rip = guest.regs()?.rip;
    Ok(match guest.run() {
        Stop::Done if rip == guest.mark() => Finding::works("exits, RIP behind it"),
        Stop::Done => Finding::differs(format!("exits, RIP {rip:#x}")),
        stop => Finding::broken(format!("exits; then {stop}")),
    })
}

fn io_exit(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, ports())?;
    guest
        .tiny
        .write(super::super::guest::DATA, b"abc")
        .named("guest memory")?;
    let mut written = Vec::new();
    let mut read = Vec::new();
    let end = loop {
        match guest.run() {
            Stop::Out { port: 0xe9, data } if written.len() < 64 => written.extend(data),
            Stop::In { port: 0xe9, size } if read.len() < 64 => read.push(size),
            end => break end,
        }
    };
    let expected = [0x11, 0x11, 0x22, 0x11, 0x22, 0x33, 0x44, b'a', b'b', b'c'];
    if end != Stop::Done {
        return Ok(Finding::broken(end));
    }
    // RCX is 0 behind REP; RAX holds what IN read.
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

fn iopl(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::User, writes_port())?;
    // No I/O map within the limit: only IOPL can allow the access.
    guest.edit_sregs(|sregs| sregs.tr.limit = 0x67)?;
    Ok(match guest.run() {
        Stop::Done => Finding::works("allowed"),
        Stop::Trap(t) if t.is(Vector::GP) => Finding::broken("ignored: #GP without an I/O map"),
        stop => Finding::broken(stop),
    })
}

fn mmio_exit(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, memory())?;
    let store = guest.run();
    let expected = Stop::MmioWrite {
        address: MMIO,
        data: vec![0x11, 0x22, 0x33, 0x44],
    };
    if store != expected {
        return Ok(Finding::broken(format!("store: {store}")));
    }
    let load = guest.run();
    if load
        != (Stop::MmioRead {
            address: MMIO + 8,
            size: 4,
        })
    {
        return Ok(Finding::broken(format!("load: {load}")));
    }
    let stop = guest.run();
    let rax = guest.regs()?.rax;
    Ok(if stop == Stop::Done && rax == 0x5a5a_5a5a {
        Finding::works("loads and stores exit")
    } else {
        Finding::broken(format!("load gives {rax:#x}; {stop}"))
    })
}

fn cpuid(bench: &Bench) -> Result<Finding, Refused> {
    const LEAF: u32 = 0x4000_0000;
    const MARKER: u32 = 0x6869_6e64;
    let mut entries = bench.cpuid.as_slice().to_vec();
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
    for level in [Level::Kernel, Level::User] {
        let mut guest = bench.guest(level, reads_cpuid())?;
        guest.tiny.vcpu.set_cpuid2(&cpuid).named("KVM_SET_CPUID2")?;
        let stop = guest.run();
        let rbx = guest.regs()?.rbx;
        if stop != Stop::Done {
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

fn complete(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, reads_port())?;
    let stop = guest.run();
    if stop
        != (Stop::In {
            port: 0xe9,
            size: 1,
        })
    {
        return Ok(Finding::broken(stop));
    }
    let stop = guest.complete();
    if stop != (Stop::Error { errno: libc::EINTR }) {
        return Ok(Finding::broken(format!("not EINTR but: {stop}")));
    }
    let regs = guest.regs()?;
    Ok(if regs.rip == guest.mark() && regs.rax == 0x5a {
        Finding::works("EINTR, with RIP behind the IN and its data in AL")
    } else {
        Finding::broken(format!("RIP {:#x}, RAX {:#x}", regs.rip, regs.rax))
    })
}

fn sync_regs(bench: &Bench) -> Result<Finding, Refused> {
    let offered = bench.kvm.check_extension_int(Cap::SyncRegs);
    if offered <= 0 {
        return Ok(Finding::absent("not offered"));
    }
    let mut guest = bench.guest(Level::Kernel, leaves())?;
    guest.tiny.vcpu.set_sync_valid_reg(SyncReg::Register);
    guest.tiny.vcpu.set_sync_valid_reg(SyncReg::SystemRegister);
    guest.tiny.vcpu.set_sync_valid_reg(SyncReg::VcpuEvents);
    let stop = guest.run();
    if stop != Stop::Done {
        return Ok(Finding::broken(stop));
    }
    let synced = guest.tiny.vcpu.sync_regs();
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

fn sync_pending_in(bench: &Bench) -> Result<Finding, Refused> {
    let mut guest = bench.guest(Level::Kernel, reads_port())?;
    guest.tiny.vcpu.set_sync_valid_reg(SyncReg::Register);
    let stop = guest.run();
    if stop
        != (Stop::In {
            port: 0xe9,
            size: 1,
        })
    {
        return Ok(Finding::broken(stop));
    }
    let run = guest.tiny.vcpu.get_kvm_run();
    run.kvm_dirty_regs |= u64::from(KVM_SYNC_X86_REGS);
    let stop = guest.run();
    let rax = guest.regs()?.rax;
    Ok(match stop {
        Stop::Done if rax == 0x5a => Finding::works("merged"),
        Stop::Done => Finding::broken("the port's data is lost"),
        stop => Finding::broken(stop),
    })
}

fn prefault(bench: &Bench) -> Result<Finding, Refused> {
    let guest = bench.guest(Level::Kernel, leaves())?;
    Ok(
        match ioctls::pre_fault_memory(&guest.tiny.vcpu, 0, 0x1000) {
            Ok(0) => Finding::works("works"),
            Ok(left) => Finding::differs(format!("leaves {left:#x} bytes")),
            Err(error) => Finding::absent(format!("KVM refuses: {error}")),
        },
    )
}
