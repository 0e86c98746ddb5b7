//! Adaptive PEBS records, and PEBS of all counters.

use hindsight_regs::pmu::pebs::DataConfig;

use super::super::pebs::PebsData;
use super::*;

fn rig() -> Rig {
    let mut rig = Rig::new();
    rig.pmu = Pmu::new(PmuConfig {
        counters: 8,
        model: CpuModel::IcelakeServer,
        ..rig.pmu.config
    });
    rig
}

fn sample() -> PebsSample {
    PebsSample {
        rflags: u64::MAX,
        rip: 0x5001,
        gpr: std::array::from_fn(|n| 0xff00_0000_0000 + n as u64),
        long: true,
        eventing_rip: 0x5000,
        tsc: 77,
        transaction: 88,
        xmm: std::array::from_fn(|n| [0x100 + n as u64, 0x200 + n as u64]),
        lbr: std::array::from_fn(|n| [0x300, 0x400, 0x500].map(|field| field + n as u64)),
    }
}

#[test]
fn groups_follow_each_other_in_the_order_of_the_manual() {
    let data = PebsData {
        address: 11,
        source: 22,
        latency: 33,
    };
    let record = sample().adaptive_record(DataConfig(0x0100_000f), 1 << 32 | 1, Some(data));
    let bytes = 32 + 32 + 144 + 256 + 48;
    assert_eq!(record.len(), bytes / 8);
    assert_eq!(record[0], 0x0100_000f | (bytes as u64) << 48);
    assert_eq!(record[1..8], [0x5000, 1 << 32 | 1, 77, 11, 22, 33, 88]);
    assert_eq!(record[8..10], [0x3f_7fd7, 0x5001]);
    // RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15: the order of the encodings.
    assert!((0..16).all(|n| record[10 + n] == sample().gpr[n]));
    assert_eq!(record[26..28], [0x100, 0x200]);
    assert_eq!(record[56..58], [0x10f, 0x20f]);
    assert_eq!(record[58..], [0x300, 0x400, 0x500, 0x301, 0x401, 0x501]);
}

#[test]
fn basic_record_has_no_groups_and_format_0() {
    let record = sample().adaptive_record(DataConfig(0), 2, None);
    assert_eq!(record, [32 << 48, 0x5000, 2, 77]);
}

#[test]
fn entries_beyond_the_stack_are_0() {
    let record = sample().adaptive_record(DataConfig(0xff00_0008), 1, None);
    assert_eq!(record.len(), 4 + 256 * 3);
    assert_eq!(record[4 + 31 * 3..4 + 32 * 3], [0x31f, 0x41f, 0x51f]);
    assert!(record[4 + 32 * 3..].iter().all(|&word| word == 0));
}

#[test]
fn registers_outside_of_64_bit_mode_have_32_bits() {
    let mut sample = sample();
    sample.long = false;
    let record = sample.adaptive_record(DataConfig(DataConfig::GPRS), 1, None);
    assert_eq!(record[6..14], [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(record[14..], [0; 8]);
}

#[test]
fn every_counter_takes_records_and_its_own_reset_value() {
    for (bit, register) in [(4, PMC + 4), (7, PMC + 7), (32, FIXED), (35, FIXED + 3)] {
        let mut rig = rig();
        let mut ds = Ds::new(0, 4);
        for n in 0..12 {
            ds.put(AREA + 0x40 + 8 * n, 1000 + n);
        }
        let index = if bit < 32 { bit } else { bit - 24 };
        rig.pmu.write(regs::IA32_FIXED_CTR_CTRL, 0x3333);
        if bit < 32 {
            // Not precise.
            rig.select(bit, 0x3c, 0, ON);
        }
        rig.pmu.write(regs::IA32_PERF_GLOBAL_CTRL, 1 << bit);
        rig.pmu.write(regs::IA32_PEBS_ENABLE, 1 << bit);
        rig.pmu.write(register, MAX);
        assert!(rig.pmu.limits().last_alone, "{bit}");
        rig.totals.add(Cycle, Ring::Os, 1);
        assert!(!rig.instructions(1), "{bit}");
        assert_eq!(rig.pmu.due(), 1 << bit);
        let saved = rig.pmu.save();
        let mut other = self::rig();
        other.pmu.restore(&saved).unwrap();
        assert_eq!(other.pmu.save(), saved);
        assert!(!rig.store(&mut ds, 0xabc));
        assert_eq!(ds.index(), BASE + 32, "{bit}");
        assert_eq!(ds.get(BASE + 0x10), 1 << bit);
        assert_eq!(rig.pmu.read(register), 1000 + u64::from(index));
        assert_eq!(rig.pmu.read(STATUS), 0);
    }
}

#[test]
fn counter_with_its_adaptive_bit_makes_the_record_adaptive() {
    for (selects, bytes) in [([0, 0], 32), ([1 << 34, 0], 176), ([0, 1 << 34], 176)] {
        let mut rig = rig();
        let mut ds = Ds::new(0, 4);
        rig.pmu.write(regs::MSR_PEBS_DATA_CFG, 2);
        for (n, select) in (0..).zip(selects) {
            rig.select(n, 0x3c, 0, ON | select);
            rig.pmu.write(PMC + n, MAX);
        }
        rig.pmu.write(regs::IA32_PEBS_ENABLE, 3);
        let _ = rig.report(Cycle, Ring::Os, 1);
        let _ = rig.store(&mut ds, 0xabc);
        assert_eq!(ds.index() - BASE, bytes, "{selects:?}");
        assert_eq!(ds.get(BASE + 0x10), 3);
    }
}

#[test]
fn distributed_instructions_are_not_in_a_general_counter() {
    let mut rig = rig();
    rig.select(1, 0xc0, 1, ON);
    let _ = rig.instructions(5);
    assert_eq!(rig.pmu.read(PMC + 1), 0);
}
