//! What of a processor works on this host, in one engine or in two that take turns.

use hindsight_cpu::cpuid::CpuidRegs;
use hindsight_cpu::facility::Facilities;

use crate::kvm;
use crate::probe;
use crate::vcpu::engine::Engine;

/// The facilities that work in `engine` on this host. With `changes`, the machine moves into the
/// interpreter for those that KVM lacks.
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
    // Without an in-kernel APIC, some KVMs swallow writes of the deadline.
    if matches!(probe::unmet("tsc-deadline-exit"), Ok(None)) {
        all
    } else {
        all.difference(Facilities::TSC_DEADLINE)
    }
}

/// CPUID of what KVM and the interpreter both execute: a guest that moves between them must not
/// notice. The layout of an XSAVE area is the host's, because XSAVE runs natively; the interpreter
/// follows it.
pub(super) fn executed_by_both(host: &kvm::Host, leaf: u32, subleaf: u32) -> CpuidRegs {
    let native = host.supported_cpuid(leaf, subleaf);
    let interpreted = hindsight_interp::supported_cpuid(leaf, subleaf);
    intersection(leaf, subleaf, native, interpreted)
}

fn intersection(leaf: u32, subleaf: u32, native: CpuidRegs, interpreted: CpuidRegs) -> CpuidRegs {
    let mut both = native;
    match (leaf, subleaf) {
        (1, _) => {
            both[2] &= interpreted[2];
            both[3] &= interpreted[3];
        }
        (7, _) | (0x8000_0001, _) | (0xd, 1) => {
            for (native, interpreted) in both.iter_mut().zip(interpreted) {
                *native &= interpreted;
            }
        }
        (0xd, 0) => both[0] &= interpreted[0],
        // A component that the interpreter lacks has no length there.
        (0xd, _) if interpreted[0] == 0 => both = [0; 4],
        (0x8000_0008, _) => {
            let (a, b) = (both[0], interpreted[0]);
            both[0] = (a & 0xff).min(b & 0xff) | (a & 0xff00).min(b & 0xff00);
        }
        _ => {}
    }
    both
}
