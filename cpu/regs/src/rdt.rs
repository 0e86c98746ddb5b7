//! Resource Director Technology. SDM Vol. 3B, "Intel Resource Director Technology (Intel RDT)
//! Monitoring Features" and "Allocation Features".

/// Highest RMID (parameter `MAX_RMID`): CPUID.0FH.0:EBX and CPUID.0FH.1:ECX.
pub const MAX_RMID: u32 = 143;
/// Bytes of one unit of IA32_QM_CTR (parameter `RMID_UPSCALE`): CPUID.0FH.1:EBX.
pub const UPSCALE: u32 = 73_728;
/// Bits of an L3 capacity mask (parameter `L3_CBM_LEN`).
pub const L3_MASK_BITS: u32 = 11;
/// Classes of service with an L3 mask (parameter `L3_COS`).
pub const L3_COS: u32 = 16;
/// Mask of the L3 ways that other hardware units use as well.
pub const L3_SHARED_WAYS: u32 = 0x600;
/// Bits of an L2 capacity mask (parameter `L2_CBM_LEN`).
pub const L2_MASK_BITS: u32 = 8;
/// Classes of service with an L2 mask (parameter `L2_COS`).
pub const L2_COS: u32 = 8;
/// Classes of service with a delay value (parameter `MBA_COS`).
pub const MBA_COS: u32 = 8;
/// Highest delay value (parameter `MBA_MAX`), in percent.
pub const MBA_MAX: u32 = 90;
/// Step of the linear delay values.
pub const MBA_STEP: u32 = 100 - MBA_MAX;
/// The 24 bits of a bandwidth counter: CPUID.0FH.1:EAX\[7:0\] is 0.
pub const BANDWIDTH_MASK: u64 = (1 << 24) - 1;
/// In IA32_L3_QOS_CFG and IA32_L2_QOS_CFG: code and data have separate masks.
pub const CDP_ENABLE: u64 = 1;

/// Event IDs of IA32_QM_EVTSEL. SDM Vol. 3B, "Event Code to Monitor".
pub mod event {
    /// L3 occupancy.
    pub const OCCUPANCY: u8 = 1;
    /// L3 total external bandwidth.
    pub const TOTAL: u8 = 2;
    /// L3 local external bandwidth.
    pub const LOCAL: u8 = 3;
}

/// IA32_QM_EVTSEL: the event and RMID that IA32_QM_CTR shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct QmEventSelect(pub u64);

impl QmEventSelect {
    /// The writable bits.
    pub const WRITABLE: u64 = 0x3ff << 32 | 0xff;

    /// A selection of `event` for `rmid`, 0 to 1023.
    pub const fn new(event: u8, rmid: u32) -> Self {
        debug_assert!(rmid < 1024, "an RMID has ten bits");
        Self((rmid as u64 & 0x3ff) << 32 | event as u64)
    }

    /// The event ID.
    pub const fn event(self) -> u8 {
        self.0.to_le_bytes()[0]
    }

    /// The RMID.
    pub const fn rmid(self) -> u32 {
        (self.0 >> 32 & 0x3ff) as u32
    }
}

/// Flags of IA32_QM_CTR; the data are in bits 61:0.
pub mod counter {
    /// No data at this time.
    pub const UNAVAILABLE: u64 = 1 << 62;
    /// The event or the RMID does not exist.
    pub const ERROR: u64 = 1 << 63;
}

/// IA32_PQR_ASSOC: the RMID and class of service of a logical processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Association(pub u64);

impl Association {
    /// The writable bits.
    pub const WRITABLE: u64 = 0xffff_ffff_0000_03ff;

    /// Monitoring as `rmid`, 0 to 1023, with class of service `cos`.
    pub const fn new(rmid: u32, cos: u32) -> Self {
        debug_assert!(rmid < 1024, "an RMID has ten bits");
        Self((cos as u64) << 32 | rmid as u64 & 0x3ff)
    }

    /// The RMID.
    pub const fn rmid(self) -> u32 {
        (self.0 & 0x3ff) as u32
    }

    /// The class of service.
    pub const fn cos(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The capacity mask of all `bits` ways, 1 to 63.
pub const fn full_mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// Whether `value` is a legal mask of `bits` ways: one run of ones, not empty.
///
/// Rules CAT-04 to CAT-06.
pub const fn is_capacity_mask(value: u64, bits: u32) -> bool {
    let lowest = value & value.wrapping_neg();
    value != 0 && value >> bits == 0 && (value + lowest) & value == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules CAT-04, CAT-05 and CAT-06.
    #[test]
    fn capacity_masks_are_single_runs_within_the_length() {
        for good in [1, 0x400, 0x600, 0x7ff, 0x3f8] {
            assert!(is_capacity_mask(good, 11), "{good:#x}");
        }
        for bad in [0, 0x505, 0x801, 0x800, 0xfff, u64::MAX, 1 << 63, 0b1011] {
            assert!(!is_capacity_mask(bad, 11), "{bad:#x}");
        }
        assert!(is_capacity_mask(0xff, 8) && !is_capacity_mask(0x100, 8));
    }

    #[test]
    fn rdt_register_fields_match_the_manual() {
        assert_eq!(QmEventSelect::new(2, 0x8f).0, 0x8f_0000_0002);
        assert_eq!(QmEventSelect(0x3ff_0000_00ff).rmid(), 0x3ff);
        assert_eq!(QmEventSelect(0x8f_0000_0003).event(), event::LOCAL);
        assert_eq!(Association::new(5, 15).0, 0xf_0000_0005);
        let assoc = Association(0xf_0000_008f);
        assert_eq!((assoc.rmid(), assoc.cos()), (0x8f, 15));
    }
}
