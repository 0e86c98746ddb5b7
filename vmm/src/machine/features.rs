//! The processor facilities that work on this host, in one engine or in both.

use hindsight_cpu::cpuid::CpuidRegs;
use hindsight_cpu::facility::Facilities;
use hindsight_regs::cpuid::Feature;

use crate::kvm;
use crate::probe;
use crate::vcpu::engine::Engine;

/// The facilities that work in `engine` on this host.
///
/// With `changes`, the machine moves into the interpreter for those that KVM lacks.
pub(super) fn available(engine: Engine, changes: bool) -> Facilities {
    if engine == Engine::Interp {
        return Facilities::INTERP;
    }
    let all = if changes {
        Facilities::INTERP_DEFAULT
            .union(Facilities::L2CAT)
            .union(Facilities::PMU8)
    } else {
        Facilities::KVM
    };
    // Without an in-kernel APIC, some KVMs drop writes to IA32_TSC_DEADLINE.
    if matches!(probe::unmet("tsc-deadline-exit"), Ok(None)) {
        all
    } else {
        all.difference(Facilities::TSC_DEADLINE)
    }
}

/// Returns a CPUID leaf with the features that KVM executes.
///
/// The controls of speculation are left out: their MSRs would have to be written on the host's
/// processor at every entry to the guest's kernel.
pub(super) fn executed_by_kvm(host: &kvm::KvmDevice, leaf: u32, subleaf: u32) -> CpuidRegs {
    let mut regs = host.supported_cpuid(leaf, subleaf);
    if (leaf, subleaf) == (7, 0) {
        regs[3] &= Feature::MD_CLEAR.mask();
    }
    regs
}

/// Returns a CPUID leaf with the features that both KVM and the interpreter execute.
///
/// A guest that moves between the engines must not see a difference. The layout of the XSAVE area
/// is the host's, because XSAVE executes on the host's processor under KVM; the interpreter follows
/// it.
pub(super) fn executed_by_both(host: &kvm::KvmDevice, leaf: u32, subleaf: u32) -> CpuidRegs {
    let kvm = executed_by_kvm(host, leaf, subleaf);
    let interp = hindsight_interp::supported_cpuid(leaf, subleaf);
    intersection(leaf, subleaf, kvm, interp)
}

fn intersection(leaf: u32, subleaf: u32, kvm: CpuidRegs, interp: CpuidRegs) -> CpuidRegs {
    let mut both = kvm;
    match (leaf, subleaf) {
        (1, _) => {
            both[2] &= interp[2];
            both[3] &= interp[3];
        }
        (7, _) | (0x8000_0001, _) | (0xd, 1) => {
            for (both, interp) in both.iter_mut().zip(interp) {
                *both &= interp;
            }
        }
        (0xd, 0) => both[0] &= interp[0],
        // The interpreter reports length 0 for a component that it lacks.
        (0xd, _) if interp[0] == 0 => both = [0; 4],
        (0x8000_0008, _) => {
            let (a, b) = (both[0], interp[0]);
            both[0] = (a & 0xff).min(b & 0xff) | (a & 0xff00).min(b & 0xff00);
        }
        _ => {}
    }
    both
}
