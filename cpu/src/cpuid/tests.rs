use hindsight_regs::cpuid::Feature;

use super::build::{
    EBX7_PORTABLE, ECX_EXT_SKYLAKE, ECX1_DS, ECX1_PORTABLE, ECX7_PORTABLE, EDX_EXT_SKYLAKE,
    EDX1_SKYLAKE,
};
use super::*;

fn config(facilities: Facilities) -> CpuidConfig {
    CpuidConfig {
        model: CpuModel::SkylakeServer,
        facilities,
        cpus: 2,
        tsc_hz: 2_599_998_123,
    }
}

fn table(facilities: Facilities) -> CpuidTable {
    CpuidTable::new(&config(facilities), |leaf, subleaf| match (leaf, subleaf) {
        (0xd, 0) => [0x2e7, 0, 0, 0],
        (0xd, 2) => [256, 576, 0, 0],
        (0xd, 9) => [8, 2688, 0, 0],
        _ => [u32::MAX; 4],
    })
}

#[test]
fn leaf_1_of_skylake_server_hides_debug_and_monitoring_under_kvm() {
    let t = table(Facilities::KVM);
    let [eax, ebx, ecx, edx] = t.query(1, 0, 1, 0, 0);
    assert_eq!(eax, 0x0005_0654);
    assert_eq!(ebx >> 24, 1, "the APIC id");
    assert_eq!(
        ecx & (1 << 21 | 1 << 24 | 1 << 31),
        1 << 21 | 1 << 24 | 1 << 31
    );
    assert_eq!(
        ecx & (1 << 2 | 1 << 3 | 1 << 4 | 1 << 11 | 1 << 15),
        0,
        "hidden"
    );
    assert_eq!(
        edx & (1 << 2 | 1 << 4 | 1 << 5 | 1 << 9),
        1 << 2 | 1 << 4 | 1 << 5 | 1 << 9
    );
    assert_eq!(edx & 1 << 21, 0, "no DS");
}

#[test]
fn ds_bits_follow_bts_and_pebs() {
    let pmu = Facilities::PMU;
    for (facilities, present) in [
        (pmu, false),
        (Facilities::BTS, true),
        (pmu | Facilities::PEBS, true),
        (pmu | Facilities::PEBS | Facilities::BTS, true),
    ] {
        let [_, _, ecx, edx] = table(facilities).query(1, 0, 0, 0, 0);
        assert_eq!(edx & Feature::DS.mask() != 0, present, "{facilities:?}");
        assert_eq!(ecx & ECX1_DS == ECX1_DS, present, "{facilities:?}");
    }
}

#[test]
fn portable_model_is_the_same_on_every_host_that_has_its_features() {
    let config = CpuidConfig {
        model: CpuModel::PortableV1,
        ..config(Facilities::KVM)
    };
    let rich = CpuidTable::new(&config, |leaf, _| match leaf {
        0x8000_0008 => [48 << 8 | 46, 0, 0, 0],
        _ => [u32::MAX; 4],
    });
    let poor = CpuidTable::new(&config, |leaf, subleaf| match (leaf, subleaf) {
        (1, _) => [0, 0, ECX1_PORTABLE, EDX1_SKYLAKE],
        (7, 0) => [0, EBX7_PORTABLE, ECX7_PORTABLE, 0],
        (0x8000_0001, _) => [0, 0, ECX_EXT_SKYLAKE, EDX_EXT_SKYLAKE],
        (0x8000_0008, _) => [48 << 8 | 46, 0, 0, 0],
        _ => [0; 4],
    });
    assert_eq!(rich, poor);
    let [.., ecx, edx] = rich.query(1, 0, 0, 0, 0);
    assert_eq!(ecx & (1 << 26 | 1 << 28 | 1), 0, "no XSAVE, AVX, SSE3");
    assert_eq!(edx & 1 << 26, 1 << 26, "SSE2");
    assert_eq!(rich.query(0xd, 0, 0, 0, 0)[0], 0, "no XCR0");
}

#[test]
fn second_portable_model_has_avx_512_and_its_state() {
    let config = CpuidConfig {
        model: CpuModel::PortableV2,
        ..config(Facilities::KVM)
    };
    let t = CpuidTable::new(&config, |leaf, subleaf| match (leaf, subleaf) {
        (0xd, 0) => [0x2e7, 576, 2696, 0],
        (0xd, 2) => [256, 576, 0, 0],
        (0xd, 5) => [64, 1088, 0, 0],
        (0xd, 6) => [512, 1152, 0, 0],
        (0xd, 7) => [1024, 1664, 0, 0],
        (0xd, 9) => [8, 2688, 0, 0],
        (0x8000_0008, _) => [48 << 8 | 46, 0, 0, 0],
        _ => [u32::MAX; 4],
    });
    let [_, ebx, ..] = t.query(7, 0, 0, 0, 0);
    let avx512 = 1 << 16 | 1 << 17 | 1 << 28 | 1 << 30 | 1 << 31;
    assert_eq!(ebx & avx512, avx512, "F, DQ, CD, BW, VL");
    assert_eq!(t.query(0xd, 0, 0, 0, 0xe7), [0x2e7, 2688, 2696, 0]);
    assert_eq!(t.query(0xd, 1, 0, 0, 0xe7)[..2], [0b111, 2432], "compacted");
    assert_eq!(t.query(0xd, 1, 0, 0, 0x2e7)[1], 2440, "compacted");
    assert_eq!(t.query(0xd, 9, 0, 0, 0), [8, 2688, 0, 0]);
}

#[test]
fn pmu_and_rdt_leaves_without_their_facilities_are_zero() {
    let t = table(Facilities::KVM);
    for leaf in [0xa, 0xf, 0x10, 0x14] {
        assert_eq!(t.query(leaf, 0, 0, 0, 0), [0; 4], "{leaf:#x}");
    }
    assert_eq!(
        t.query(7, 0, 0, 0, 0)[1] & (1 << 12 | 1 << 15 | 1 << 25 | 1 << 11),
        0
    );
}

/// Rules CPU-05, CPU-11 to CPU-16, CPU-22 and L2C-01.
#[test]
fn rdt_leaves_match_the_processor() {
    let t = table(Facilities::INTERP_DEFAULT);
    assert_eq!(
        t.query(7, 0, 0, 0, 0)[1] & (1 << 12 | 1 << 15),
        1 << 12 | 1 << 15
    );
    assert_eq!(t.query(0xf, 0, 0, 0, 0), [0, 143, 0, 2]);
    assert_eq!(t.query(0xf, 1, 0, 0, 0), [0, 73_728, 143, 7]);
    assert_eq!(t.query(0x10, 0, 0, 0, 0), [0, 0xa, 0, 0]);
    assert_eq!(t.query(0x10, 1, 0, 0, 0), [0xa, 0x600, 4, 0xf]);
    assert_eq!(t.query(0x10, 2, 0, 0, 0), [0; 4]);
    assert_eq!(t.query(0x10, 3, 0, 0, 0), [0x59, 0, 4, 7]);
    assert_eq!(t.query(0x10, 4, 0, 0, 0), [0; 4]);
    let t = table(Facilities::INTERP_DEFAULT | Facilities::L2CAT);
    assert_eq!(t.query(0x10, 0, 0, 0, 0), [0, 0xe, 0, 0]);
    assert_eq!(t.query(0x10, 2, 0, 0, 0), [7, 0, 4, 7]);
}

#[test]
fn rdt_leaves_follow_single_facilities() {
    let t = table(Facilities::MBM | Facilities::L3CAT);
    assert_eq!(t.query(0xf, 1, 0, 0, 0)[3], 0b110);
    assert_eq!(t.query(0x10, 0, 0, 0, 0)[1], 1 << 1);
    assert_eq!(t.query(0x10, 1, 0, 0, 0)[2], 0, "no CDP");
    let t = table(Facilities::CMT);
    assert_eq!(t.query(7, 0, 0, 0, 0)[1] & (1 << 12 | 1 << 15), 1 << 12);
    assert_eq!(t.query(0x10, 0, 0, 0, 0), [0; 4]);
}

/// Rules CPU-08 to CPU-10.
#[test]
fn pmu_leaf_matches_the_processor() {
    let t = table(Facilities::KVM | Facilities::PMU);
    assert_eq!(t.query(0xa, 0, 0, 0, 0), [0x0730_0404, 0, 0, 0x603]);
    assert_ne!(
        t.query(1, 0, 0, 0, 0)[2] & Feature::PDCM.mask(),
        0,
        "full-width writes"
    );
    let t = table(Facilities::PMU | Facilities::PMU8);
    assert_eq!(t.query(0xa, 0, 0, 0, 0)[0], 0x0730_0804);
}

#[test]
fn osxsave_follows_cr4() {
    let t = table(Facilities::KVM);
    assert_eq!(t.query(1, 0, 0, 0, 0)[2] & 1 << 27, 0);
    assert_ne!(t.query(1, 0, 0, 1 << 18, 0)[2] & 1 << 27, 0);
}

#[test]
fn leaf_beyond_the_highest_returns_the_highest_basic_leaf() {
    let t = table(Facilities::KVM);
    assert_eq!(t.query(0x17, 0, 0, 0, 0), t.query(0x16, 0, 0, 0, 0));
    assert_eq!(t.query(0x8000_0009, 0, 0, 0, 0), t.query(0x16, 0, 0, 0, 0));
    assert_eq!(
        t.query(3, 0, 0, 0, 0),
        [0; 4],
        "inside the range but undefined"
    );
}

#[test]
fn feature_that_the_engine_lacks_is_hidden() {
    let t = CpuidTable::new(&config(Facilities::KVM), |_, _| [0; 4]);
    assert_eq!(t.query(1, 0, 0, 0, 0)[2] & Feature::XSAVE.mask(), 0);
    assert_eq!(t.query(0xd, 0, 0, 0, 7), [0, 576, 0, 0]);
}

#[test]
fn xsave_size_follows_xcr0() {
    let t = table(Facilities::KVM);
    assert_eq!(t.query(0xd, 0, 0, 0, 3)[1], 576);
    assert_eq!(t.query(0xd, 0, 0, 0, 7)[1], 832);
    assert_eq!(t.query(0xd, 0, 0, 0, 0x207)[1], 2696);
}

#[test]
fn l3_size_is_a_multiple_of_the_monitoring_unit() {
    let [_, ebx, ecx, _] = table(Facilities::KVM).query(4, 3, 0, 0, 0);
    let bytes = ((ebx >> 22) + 1) * ((ebx & 0xfff) + 1) * (ecx + 1);
    assert_eq!(bytes, 73_728 * 352);
    assert_eq!((ebx >> 22) + 1, 11);
}
