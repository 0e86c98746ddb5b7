//! The MSR filter: which MSR accesses KVM completes by itself, from the one table in `cpu`.
//!
//! Every access exits, except those to rows marked [`KvmRole::Passthrough`]. KVM never filters the
//! x2APIC range; without an in-kernel APIC those accesses exit as invalid.

use hindsight_cpu::msr::table::TABLE;
use hindsight_cpu::msr::{KvmRole, MsrSpec};
use kvm_ioctls::{MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd};

use crate::kvm::{KvmError, ioctl};

/// Maximum number of MSRs in one range of the filter: a bitmap of 32 bytes.
const RANGE: u32 = 256;

/// One range of the filter. A set bit lets KVM complete the access.
#[derive(Debug, PartialEq, Eq)]
struct BitmapRange {
    base: u32,
    bitmap: Vec<u8>,
}

/// Groups the passthrough rows into ranges.
fn ranges<'a>(rows: impl Iterator<Item = &'a MsrSpec>) -> Vec<BitmapRange> {
    let mut ranges: Vec<BitmapRange> = Vec::new();
    let indices = rows
        .filter(|spec| matches!(spec.kvm, KvmRole::Passthrough(_)))
        .flat_map(MsrSpec::indices);
    for index in indices {
        let fits = ranges.last().is_some_and(|r| index - r.base < RANGE);
        if !fits {
            ranges.push(BitmapRange {
                base: index,
                bitmap: vec![0; RANGE as usize / 8],
            });
        }
        if let Some(range) = ranges.last_mut() {
            let bit = index - range.base;
            range.bitmap[bit as usize / 8] |= 1 << (bit % 8);
        }
    }
    ranges
}

/// Installs the filter. It applies to vCPUs that run afterwards.
pub(super) fn install(vm: &VmFd) -> Result<(), KvmError> {
    let ranges = ranges(TABLE.iter());
    let ranges: Vec<_> = ranges
        .iter()
        .map(|range| MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: range.base,
            msr_count: RANGE,
            bitmap: &range.bitmap,
        })
        .collect();
    vm.set_msr_filter(MsrFilterDefaultAction::DENY, &ranges)
        .map_err(ioctl("KVM_X86_SET_MSR_FILTER"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_passes_exactly_the_passthrough_rows() {
        let ranges = ranges(TABLE.iter());
        assert!(ranges.len() <= 16, "KVM_MSR_FILTER_MAX_RANGES");
        let passes = |index: u32| {
            ranges.iter().any(|r| {
                index
                    .checked_sub(r.base)
                    .filter(|bit| *bit < RANGE)
                    .is_some_and(|bit| r.bitmap[bit as usize / 8] & 1 << (bit % 8) != 0)
            })
        };
        for spec in TABLE {
            let expected = matches!(spec.kvm, KvmRole::Passthrough(_));
            assert_eq!(passes(spec.index), expected, "{}", spec.name);
        }
        assert!(!passes(0x40) && !passes(0xc000_0081 - 2));
    }
}
