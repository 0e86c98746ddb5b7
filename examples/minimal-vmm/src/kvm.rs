//! The guest under KVM, until it arms a facility.

#![expect(unsafe_code, reason = "hands guest memory to KVM")]

use std::error::Error;

use hindsight_cpu::state::{CpuState, Segment, gpr, seg};
use hindsight_interp::{Bus, InterruptController, Memory, ModelPlatform, MsrHandler};
use kvm_bindings::{kvm_enable_cap, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{
    Cap, Kvm, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit,
    VcpuFd, VmFd,
};

/// Runs a guest in `state` under KVM until it arms a facility, and stores its state there.
///
/// Returns how many accesses to MSRs exited until then.
pub fn run<B: Bus, I: InterruptController>(
    memory: &Memory,
    platform: &mut ModelPlatform<B, I>,
    state: &mut CpuState,
) -> Result<u32, Box<dyn Error>> {
    let vm = Kvm::new()?.create_vm()?;
    // Three pages that KVM on some Intel hosts needs for itself. Other hosts lack the call.
    let _ = vm.set_tss_address(0xfffb_d000);
    for (slot, region) in (0..).zip(memory.regions()) {
        let slot = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.gpa,
            memory_size: region.len,
            userspace_addr: region.host.expose_provenance() as u64,
        };
        // SAFETY: `memory` outlives `vm` and the vCPU, which are dropped with this function, and
        // all accesses to it are atomic.
        unsafe { vm.set_user_memory_region(slot) }?;
    }
    filter_msrs(&vm)?;
    let mut vcpu = vm.create_vcpu(0)?;
    load(&vcpu, state)?;
    let mut accesses = 0;
    while platform.armed().is_empty() {
        match vcpu.run()? {
            VcpuExit::X86Rdmsr(exit) => {
                let value = platform.rdmsr(exit.index);
                *exit.data = value.unwrap_or(0);
                *exit.error = value.is_err().into();
            }
            VcpuExit::X86Wrmsr(exit) => {
                *exit.error = platform.wrmsr(exit.index, exit.data).is_err().into();
            }
            exit => return Err(format!("the guest left KVM: {exit:?}").into()),
        }
        accesses += 1;
    }
    // KVM completes the WRMSR when it is entered again, and then returns at once.
    vcpu.set_kvm_immediate_exit(1);
    let _ = vcpu.run();
    store(&vcpu, state)?;
    Ok(accesses)
}

/// Makes all accesses to MSRs exit, except those to IA32_EFER and the MSRs of SYSCALL.
fn filter_msrs(vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
    let reasons = MsrExitReason::Unknown | MsrExitReason::Inval | MsrExitReason::Filter;
    vm.enable_cap(&kvm_enable_cap {
        cap: Cap::X86UserSpaceMsr as u32,
        args: [reasons.bits().into(), 0, 0, 0],
        ..Default::default()
    })?;
    let range = MsrFilterRange {
        flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
        base: hindsight_regs::msr::IA32_EFER,
        msr_count: 8,
        bitmap: &[0b0001_1111],
    };
    vm.set_msr_filter(MsrFilterDefaultAction::DENY, &[range])
}

/// Loads the state of a guest that is to start in 64-bit mode.
///
/// Of the segments only CS matters: 64-bit mode ignores the data segments, which stay as after RESET.
fn load(vcpu: &VcpuFd, state: &CpuState) -> Result<(), kvm_ioctls::Error> {
    let mut s = vcpu.get_sregs()?;
    let cs = state.seg[seg::CS];
    (s.cs.selector, s.cs.base, s.cs.l) = (cs.selector, cs.base, cs.long().into());
    (s.cr0, s.cr3, s.cr4, s.efer) = (state.cr0, state.cr3, state.cr4, state.efer);
    vcpu.set_sregs(&s)?;
    vcpu.set_regs(&kvm_regs {
        rip: state.rip,
        rsp: state.gpr[gpr::RSP],
        rflags: state.rflags,
        ..Default::default()
    })
}

/// Stores what this guest uses of the state: general, segment and control registers.
fn store(vcpu: &VcpuFd, state: &mut CpuState) -> Result<(), kvm_ioctls::Error> {
    let r = vcpu.get_regs()?;
    state.gpr = [
        r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11, r.r12,
        r.r13, r.r14, r.r15,
    ];
    (state.rip, state.rflags) = (r.rip, r.rflags);
    let s = vcpu.get_sregs()?;
    state.seg = [s.es, s.cs, s.ss, s.ds, s.fs, s.gs].map(segment);
    (state.tr, state.ldtr) = (segment(s.tr), segment(s.ldt));
    (state.cr0, state.cr2, state.cr3, state.cr4) = (s.cr0, s.cr2, s.cr3, s.cr4);
    state.efer = s.efer;
    Ok(())
}

fn segment(s: kvm_segment) -> Segment {
    let low = s.type_ | s.s << 4 | s.dpl << 5 | s.present << 7;
    let high = s.avl << 4 | s.l << 5 | s.db << 6 | s.g << 7;
    Segment {
        selector: s.selector,
        base: s.base,
        limit: s.limit,
        access: u16::from_le_bytes([low, high]),
        unusable: s.unusable != 0,
    }
}
