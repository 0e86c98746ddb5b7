//! The processor facilities that work on this host, in one engine or in both.

use hindsight_cpu::cpuid::{CpuModel, CpuidRegs};
use hindsight_cpu::facility::Facilities;
use hindsight_regs::branch::xsave as branch_state;
use hindsight_regs::cpuid::Feature;

use crate::kvm;
use crate::memory::layout::Layout;
use crate::probe;
use crate::vcpu::engine::Engine;

/// CPUID leaf with the number of physical address bits in EAX's low byte.
const ADDRESS_SIZES: u32 = 0x8000_0008;
/// CPUID.1:ECX: SSE3 and SSSE3.
const SSE3_AND_SSSE3: u32 = 1 | 1 << 9;
/// The most physical address bits with firmware, unless there is more memory.
const FIRMWARE_ADDRESS_BITS: u32 = 40;

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

/// Whether a portable model lacks none of its features; `ecx` is leaf 1 of the interpreter.
///
/// Models that follow the host are always complete.
pub(super) fn is_complete(model: CpuModel, ecx: u32) -> bool {
    model != CpuModel::PortableV2 || ecx & SSE3_AND_SSSE3 == SSE3_AND_SSSE3
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
        // KVM's XSAVES would save the host's LBR stack, and not the modelled one.
        (0xd, branch_state::COMPONENT) => both = [0; 4],
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

/// The most physical address bits of a processor that starts in firmware; `None` without firmware.
///
/// OVMF maps all physical addresses in pages of 2 MiB. With 46 bits, the tables have 256 MiB.
pub(super) fn firmware_address_bits(layout: &Layout) -> Option<u32> {
    layout.firmware()?;
    let last = layout.high().map_or(0, |high| high.end - 1);
    Some(FIRMWARE_ADDRESS_BITS.max(u64::BITS - last.leading_zeros()))
}

/// The CPUID leaves of `executed`, with at most `max` physical address bits.
pub(super) fn limit_address_bits(
    max: Option<u32>,
    executed: impl Fn(u32, u32) -> CpuidRegs,
) -> impl Fn(u32, u32) -> CpuidRegs {
    move |leaf, subleaf| {
        let mut regs = executed(leaf, subleaf);
        if let (ADDRESS_SIZES, Some(bits)) = (leaf, max) {
            regs[0] = regs[0] & !0xff | bits.min(regs[0] & 0xff);
        }
        regs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The address bits of a machine with firmware on a host with `host` bits.
    fn bits(memory: u64, host: u32) -> u32 {
        let layout = Layout::new(memory).unwrap().with_firmware(0x1_0000);
        let executed = |_, _| [0x3000 | host, 1, 2, 3];
        let limited = limit_address_bits(firmware_address_bits(&layout), executed);
        assert_eq!(limited(1, 0), [0x3000 | host, 1, 2, 3], "another leaf");
        let [eax, rest @ ..] = limited(ADDRESS_SIZES, 0);
        assert_eq!((eax >> 8, rest), (0x30, [1, 2, 3]));
        eax & 0xff
    }

    #[test]
    fn xsaves_of_the_host_does_not_save_the_modelled_lbr_stack() {
        let host = [branch_state::BYTES, 0, 1, 0];
        let both = intersection(0xd, branch_state::COMPONENT, host, host);
        assert_eq!(both, [0; 4]);
        assert_eq!(intersection(0xd, 9, [8, 2688, 0, 0], host), [8, 2688, 0, 0]);
    }

    #[test]
    fn second_portable_model_needs_sse3_and_ssse3() {
        assert!(is_complete(CpuModel::PortableV2, 1 | 1 << 9));
        assert!(!is_complete(CpuModel::PortableV2, 1));
        assert!(is_complete(CpuModel::PortableV1, 0));
    }

    #[test]
    fn firmware_has_40_address_bits_at_most_unless_memory_needs_more() {
        const GIB: u64 = 1 << 30;
        assert_eq!(bits(GIB, 46), 40);
        assert_eq!(bits(GIB, 39), 39, "the host's processor has fewer");
        assert_eq!(bits(1023 * GIB, 46), 40);
        assert_eq!(
            bits(1024 * GIB, 46),
            41,
            "the hole moves a GiB to the 41st bit"
        );
    }
}
