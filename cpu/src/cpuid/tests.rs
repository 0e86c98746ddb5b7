use hindsight_regs::cpuid::Feature;

use super::build::{CpuidBuilder, ECX1_DS};
use super::*;
use crate::model::ModelDefinition;

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
fn rdpid_needs_the_register_that_it_reads() {
    let text = include_str!("../../models/skylake-server.toml");
    let text = text.replacen("\"umip\"", "\"umip\", \"rdpid\"", 1);
    let model = Box::leak(Box::new(ModelDefinition::from_toml(&text).unwrap()));
    for (facilities, present) in [
        (Facilities::KVM, true),
        (Facilities::KVM.difference(Facilities::RDTSCP), false),
    ] {
        let builder = CpuidBuilder {
            config: &config(facilities),
            model,
            supported: &|_, _| [u32::MAX; 4],
            leaves: Vec::new(),
        };
        let [_, _, ecx, _] = builder.leaf_7();
        assert_eq!(ecx & Feature::RDPID.mask() != 0, present, "{facilities:?}");
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
        // CX16, PCID, MOVBE, POPCNT, RDRAND.
        (1, _) => [0, 0, 0x40c2_2000, 0x0f8b_fbff],
        // FSGSBASE, SMEP, ERMS, INVPCID, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB; UMIP.
        (7, 0) => [0, 0x019c_0681, 1 << 2, 0],
        // LAHF, LZCNT, PREFETCHW; SYSCALL, NX, 1-GiB pages, long mode.
        (0x8000_0001, _) => [0, 0, 0x121, 0x2410_0800],
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

/// Leaf, sub-leaf and registers.
type GoldenRow = (u32, u32, CpuidRegs);

/// All rows of the default model with every facility that the interpreter has.
#[rustfmt::skip]
const SKYLAKE_SERVER: &[GoldenRow] = &[
    (0x0, 0, [0x16, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
    (0x1, 0, [0x5_0654, 0x2_0800, 0xf7f8_b217, 0x1fab_fbff]),
    (0x2, 0, [0x7603_6301, 0xf0_b5ff, 0x0, 0xc3_0000]),
    (0x4, 0, [0x400_0121, 0x1c0_003f, 0x3f, 0x0]),
    (0x4, 1, [0x400_0122, 0x1c0_003f, 0x3f, 0x0]),
    (0x4, 2, [0x400_0143, 0x3c0_003f, 0x3ff, 0x0]),
    (0x4, 3, [0x400_4163, 0x280_003f, 0x8fff, 0x4]),
    (0x4, 4, [0x0, 0x0, 0x0, 0x0]),
    (0x5, 0, [0x0, 0x0, 0x0, 0x0]),
    (0x6, 0, [0x4, 0x0, 0x0, 0x0]),
    (0x7, 0, [0x0, 0xd19f_bffb, 0xc, 0xbc00_0400]),
    (0xa, 0, [0x730_0804, 0x0, 0x0, 0x603]),
    (0xb, 0, [0x0, 0x1, 0x100, 0x0]),
    (0xb, 1, [0x1, 0x2, 0x201, 0x0]),
    (0xb, 2, [0x0, 0x0, 0x2, 0x0]),
    (0xd, 0, [0x2e7, 0x240, 0xa88, 0x0]),
    (0xd, 1, [0x7, 0x0, 0x0, 0x0]),
    (0xd, 2, [0x100, 0x240, 0x0, 0x0]),
    (0xd, 5, [0x40, 0x440, 0x0, 0x0]),
    (0xd, 6, [0x200, 0x480, 0x0, 0x0]),
    (0xd, 7, [0x400, 0x680, 0x0, 0x0]),
    (0xd, 9, [0x8, 0xa80, 0x0, 0x0]),
    (0xf, 0, [0x0, 0x8f, 0x0, 0x2]),
    (0xf, 1, [0x0, 0x1_2000, 0x8f, 0x7]),
    (0x10, 0, [0x0, 0xe, 0x0, 0x0]),
    (0x10, 1, [0xa, 0x600, 0x4, 0xf]),
    (0x10, 2, [0x7, 0x0, 0x4, 0x7]),
    (0x10, 3, [0x59, 0x0, 0x4, 0x7]),
    (0x15, 0, [0x1, 0x68, 0x17d_7840, 0x0]),
    (0x16, 0, [0xa28, 0xa28, 0x64, 0x0]),
    (0x4000_0000, 0, [0x4000_0000, 0x646e_6948, 0x6867_6973, 0x4d4d_5674]),
    (0x8000_0000, 0, [0x8000_0008, 0x0, 0x0, 0x0]),
    (0x8000_0001, 0, [0x0, 0x0, 0x121, 0x2c10_0800]),
    (0x8000_0002, 0, [0x6574_6e49, 0x2952_286c, 0x6f65_5820, 0x2952_286e]),
    (0x8000_0003, 0, [0x6c6f_4720, 0x3136_2064, 0x4320_3034, 0x2820_5550]),
    (0x8000_0004, 0, [0x646e_6948, 0x6867_6973, 0x2974, 0x0]),
    (0x8000_0006, 0, [0x0, 0x0, 0x100_6040, 0x0]),
    (0x8000_0007, 0, [0x0, 0x0, 0x0, 0x100]),
    (0x8000_0008, 0, [0x302e, 0x0, 0x0, 0x0]),
];

/// The rows in which the portable models differ.
#[rustfmt::skip]
const PORTABLE_V1: &[GoldenRow] = &[
    (0x1, 0, [0x5_0654, 0x2_0800, 0xc1e0_a014, 0x1fab_fbff]),
    (0x7, 0, [0x0, 0x19c_9e93, 0x4, 0x2000_0000]),
    (0xd, 0, [0x0, 0x0, 0x0, 0x0]),
    (0x8000_0002, 0, [0x646e_6948, 0x6867_6973, 0x6f70_2074, 0x6261_7472]),
    (0x8000_0003, 0, [0x762d_656c, 0x7270_2031, 0x7365_636f, 0x72_6f73]),
    (0x8000_0004, 0, [0x0, 0x0, 0x0, 0x0]),
];
#[rustfmt::skip]
const PORTABLE_V2: &[GoldenRow] = &[
    (0x8000_0002, 0, [0x646e_6948, 0x6867_6973, 0x6f70_2074, 0x6261_7472]),
    (0x8000_0003, 0, [0x762d_656c, 0x7270_2032, 0x7365_636f, 0x72_6f73]),
    (0x8000_0004, 0, [0x0, 0x0, 0x0, 0x0]),
];

#[test]
fn first_models_are_frozen_to_the_bit() {
    let rows = [
        (CpuModel::SkylakeServer, &[][..]),
        (CpuModel::PortableV1, PORTABLE_V1),
        (CpuModel::PortableV2, PORTABLE_V2),
    ];
    for (model, own) in rows {
        let config = CpuidConfig {
            model,
            ..config(Facilities::INTERP)
        };
        let table = CpuidTable::new(&config, interpreter);
        let found: Vec<_> = table
            .for_cpu(0)
            .map(|l| (l.leaf, l.subleaf.unwrap_or(0), l.regs))
            .collect();
        // portable-v1 has no component of XSAVE.
        let has = |row: &GoldenRow| row.0 != 0xd || row.1 == 0 || model != CpuModel::PortableV1;
        let default = SKYLAKE_SERVER.iter().filter(|row| has(row));
        let expected: Vec<_> = default
            .map(|row| {
                *own.iter()
                    .find(|o| (o.0, o.1) == (row.0, row.1))
                    .unwrap_or(row)
            })
            .collect();
        assert_eq!(found, expected, "{model}");
    }
}

/// What the interpreter executes on a host with SSE3 and SSSE3.
fn interpreter(leaf: u32, subleaf: u32) -> CpuidRegs {
    match (leaf, subleaf) {
        (1, _) => [0, 0, 0x77f8_3203, 0x0f8b_fbff],
        (7, 0) => [0, 0xd19f_27eb, 0x40_000c, 0x9c00_0400],
        (0xd, 0) => [0x2e7, 576, 2696, 0],
        (0xd, 1) => [0b111, 0, 0, 0],
        (0xd, 2) => [256, 576, 0, 0],
        (0xd, 5) => [64, 1088, 0, 0],
        (0xd, 6) => [512, 1152, 0, 0],
        (0xd, 7) => [1024, 1664, 0, 0],
        (0xd, 9) => [8, 2688, 0, 0],
        (0x8000_0001, _) => [0, 0, 0x121, 0x2c10_0800],
        (0x8000_0008, _) => [48 << 8 | 46, 0, 0, 0],
        _ => [0; 4],
    }
}
