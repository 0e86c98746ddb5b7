//! A vCPU's state is moved to KVM, to the interpreter, and back.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::RefCell;
use std::sync::Arc;

use hindsight_cpu::cpuid::{self, CpuModel, CpuidTable};
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::state::{CpuState, PendingException, Segment, seg};
use hindsight_vmm::kvm::vcpu::KvmVcpuFd;
use hindsight_vmm::kvm::vm::KvmVm;
use hindsight_vmm::kvm::{self, KvmDevice};
use hindsight_vmm::memory;
use proptest::prelude::*;
use vm_memory::GuestAddress;

fn segment(selector: u16, access: u16) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        access,
        unusable: false,
    }
}

/// The state of a vCPU in 64-bit mode at CPL 0, with all general registers zero.
fn long_mode() -> CpuState {
    let mut state = CpuState::reset();
    state.cr0 = 0x8000_0033;
    state.cr3 = 0x1000;
    state.cr4 = 0x620;
    state.efer = 0xd01;
    state.seg = [segment(0x18, 0xc093); 6];
    state.seg[seg::CS] = segment(0x10, 0xa09b);
    state.tr = Segment {
        base: 0x3000,
        limit: 0x67,
        ..segment(0x28, 0x8b)
    };
    state.ldtr = Segment {
        base: 0x4000,
        limit: 0xff,
        ..segment(0x30, 0x82)
    };
    state
}

fn canonical() -> impl Strategy<Value = u64> {
    any::<i64>().prop_map(|value| (value >> 17).cast_unsigned())
}

prop_compose! {
    fn registers()(
        gpr in any::<[u64; 16]>(),
        rip in canonical(),
        flags in any::<u64>(),
        bases in [canonical(), canonical()],
        cr2 in any::<u64>(),
        dr in [canonical(), canonical(), canonical(), canonical()],
        dr6 in 0..16_u64,
        msrs in [canonical(), canonical(), canonical(), canonical(), canonical(), canonical()],
        selectors in any::<(u32, u16)>(),
    ) -> CpuState {
        let mut state = long_mode();
        (state.gpr, state.rip, state.cr2, state.dr) = (gpr, rip, cr2, dr);
        // Arithmetic flags, TF, IF, DF, IOPL, NT, RF, AC, ID.
        state.rflags = flags & 0x25_7fd5 | 2;
        state.seg[seg::FS].base = bases[0];
        state.seg[seg::GS].base = bases[1];
        state.dr6 = 0xffff_0ff0 | dr6;
        let m = &mut state.msrs;
        [m.lstar, m.cstar, m.kernel_gs_base, m.sysenter_esp, m.sysenter_eip, m.star] = msrs;
        m.sysenter_cs = selectors.1.into();
        m.pat = 0x0007_0406_0007_0400 | u64::from(selectors.0 & 1);
        state
    }
}

prop_compose! {
    /// The bytes of an XSAVE area: x87, SSE, and the upper halves of YMM.
    fn xsave_areas()(
        mut area in prop::collection::vec(any::<u8>(), 0x340),
        avx in any::<bool>(),
    ) -> Vec<u8> {
        // FCW, FSW, FTW (abridged), opcode, FIP, FDP as FNINIT leaves them.
        area[..24].fill(0);
        area[..2].copy_from_slice(&0x37f_u16.to_le_bytes());
        area[24..28].copy_from_slice(&0x9f80_u32.to_le_bytes());
        area[28..160].fill(0);
        area[416..576].fill(0);
        area[512] = if avx { 0b111 } else { 0b011 };
        if !avx {
            area[576..].fill(0);
        }
        area
    }
}

prop_compose! {
    fn states()(
        mut state in registers(),
        area in xsave_areas(),
        nmi in any::<(bool, bool)>(),
        interrupt in prop::option::of(32..=255_u8),
        fault in any::<bool>(),
    ) -> CpuState {
        state.xsave.0[..area.len()].copy_from_slice(&area);
        state.events.nmi_pending = nmi.0;
        state.events.nmi_blocked = nmi.1;
        if fault {
            state.events.exception = Some(PendingException {
                vector: 13,
                error_code: Some(0x18),
                payload: None,
            });
        } else {
            state.events.interrupt = interrupt;
        }
        state
    }
}

/// A vCPU in KVM; `None` on a host without KVM.
fn kvm_vcpu() -> Option<KvmVcpuFd> {
    if !kvm::open_device().is_ok_and(|kvm| kvm.create_vm().is_ok()) {
        eprintln!("skipped: /dev/kvm cannot be used here");
        return None;
    }
    let kvm = KvmDevice::open().unwrap();
    let memory = memory::allocate(&[(GuestAddress(0), 1 << 20)], false).unwrap();
    let vm = KvmVm::new(&kvm, &memory).unwrap();
    let config = cpuid::CpuidConfig::new(CpuModel::SkylakeServer, Facilities::KVM, 1_000_000_000);
    let table = CpuidTable::new(&config, |leaf, sub| kvm.supported_cpuid(leaf, sub));
    let vcpu = KvmVcpuFd::new(&vm, 0).unwrap();
    vcpu.set_cpuid(0, &table).unwrap();
    Some(vcpu)
}

fn interp_vcpu() -> hindsight_interp::Vcpu {
    let memory = memory::allocate(&[(GuestAddress(0), 1 << 20)], false).unwrap();
    let memory = memory::interp_memory(&memory).unwrap();
    // The vCPU never runs, so it never accesses the memory.
    hindsight_interp::Vcpu::new(Arc::new(memory))
}

/// Replaces what KVM is known not to keep by what is in `original`.
fn comparable(mut state: CpuState, original: &CpuState) -> CpuState {
    // The vCPU model holds IA32_FMASK.
    state.msrs.fmask = original.msrs.fmask;
    // XSTATE_BV may differ for a component in its initial state.
    state.xsave.0[512..576].copy_from_slice(&original.xsave.0[512..576]);
    // MXCSR_MASK depends on the processor.
    state.xsave.0[28..32].copy_from_slice(&original.xsave.0[28..32]);
    state
}

#[test]
fn state_survives_kvm_and_the_interpreter() {
    let Some(kvm) = kvm_vcpu() else { return };
    let engines = RefCell::new((kvm, interp_vcpu()));
    let avx = std::arch::is_x86_feature_detected!("avx");
    let config = ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(mut state in states())| {
        if !avx {
            state.xsave.0[512] &= 0b011;
            state.xsave.0[576..].fill(0);
        }
        let mut engines = engines.borrow_mut();
        let (kvm, interp) = &mut *engines;
        kvm.load(&state, 0xfee0_0900).unwrap();
        let mut from_kvm = CpuState::reset();
        kvm.store(&mut from_kvm).unwrap();
        prop_assert_eq!(&comparable(from_kvm.clone(), &state), &state, "in KVM");
        prop_assert_eq!(&from_kvm.xsave.0[..24], &state.xsave.0[..24]);
        interp.load(&from_kvm);
        let mut from_interp = CpuState::reset();
        interp.store(&mut from_interp);
        let loaded = comparable(from_interp.clone(), &state);
        prop_assert!(loaded.xsave == state.xsave, "vector registers in the interpreter");
        prop_assert_eq!(&loaded, &state, "in the interpreter");
        kvm.load(&from_interp, 0xfee0_0900).unwrap();
        kvm.store(&mut from_kvm).unwrap();
        prop_assert_eq!(&comparable(from_kvm.clone(), &state), &state, "back in KVM");
    });
}
