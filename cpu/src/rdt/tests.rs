use std::sync::Arc;

use hindsight_regs::msr as regs;
use hindsight_regs::rdt::{self, Association, QmEventSelect, event};
use hindsight_regs::vector::GpFault;
use proptest::prelude::*;

use super::*;

fn pair() -> (Rdt, Rdt) {
    let package = Arc::new(RdtPackage::default());
    let all = Facilities::all();
    (Rdt::new(all, package.clone()), Rdt::new(all, package))
}

const MASK: u32 = regs::IA32_L3_QOS_MASK_0;
const DELAY: u32 = regs::IA32_L2_QOS_EXT_BW_THRTL_0;

/// Rules RDT-04, CAT-03, CAT-08 and MBA-06.
#[test]
fn masks_and_delays_are_shared_by_the_package() {
    let (mut a, b) = pair();
    assert_eq!((b.read(MASK + 15), b.read(DELAY)), (0x7ff, 0));
    a.write(MASK + 15, 0x70).unwrap();
    a.write(DELAY + 7, 12).unwrap();
    assert_eq!((b.read(MASK + 15), b.read(DELAY + 7)), (0x70, 12));
}

/// Rules RDT-05 to RDT-07.
#[test]
fn association_beyond_the_enumerated_numbers_faults() {
    let (mut a, b) = pair();
    a.write(regs::IA32_PQR_ASSOC, Association::new(143, 15).0)
        .unwrap();
    assert_eq!(
        a.write(regs::IA32_PQR_ASSOC, Association::new(144, 0).0),
        Err(GpFault)
    );
    assert_eq!(
        a.write(regs::IA32_PQR_ASSOC, Association::new(0, 16).0),
        Err(GpFault)
    );
    assert_eq!(a.read(regs::IA32_PQR_ASSOC), 15 << 32 | 143);
    assert_eq!(
        b.read(regs::IA32_PQR_ASSOC),
        0,
        "each processor has its own"
    );
    let only = |facilities| Rdt::new(facilities, Arc::default());
    let mut mba = only(Facilities::MBA);
    mba.write(regs::IA32_PQR_ASSOC, Association::new(0, 7).0)
        .unwrap();
    assert_eq!(
        mba.write(regs::IA32_PQR_ASSOC, Association::new(0, 8).0),
        Err(GpFault)
    );
    assert_eq!(
        mba.write(regs::IA32_PQR_ASSOC, Association::new(1, 0).0),
        Err(GpFault)
    );
}

/// Rules CMT-03, CMT-05 and CMT-09.
#[test]
fn qm_ctr_flags_errors_and_missing_data() {
    let (mut a, _) = pair();
    assert_eq!(
        a.read(regs::IA32_QM_CTR),
        rdt::counter::ERROR,
        "no event selected"
    );
    for event in [4, 0xff] {
        a.write(regs::IA32_QM_EVTSEL, QmEventSelect::new(event, 0).0)
            .unwrap();
        assert_eq!(a.read(regs::IA32_QM_CTR), rdt::counter::ERROR);
    }
    for event in [event::OCCUPANCY, event::TOTAL, event::LOCAL] {
        a.write(regs::IA32_QM_EVTSEL, QmEventSelect::new(event, 1).0)
            .unwrap();
        assert_eq!(a.read(regs::IA32_QM_CTR), rdt::counter::UNAVAILABLE);
        a.package().set_tracked(true);
        assert_eq!(a.read(regs::IA32_QM_CTR), 0);
        a.package().set_tracked(false);
    }
}

/// Rules CMT-07, CMT-11 and MBM-01.
#[test]
fn qm_ctr_counts_in_upscaled_units() {
    let (mut a, _) = pair();
    let package = a.package().clone();
    package.set_tracked(true);
    let unit = u64::from(rdt::UPSCALE) / 64;
    package.add_traffic(3, unit * ((1 << 24) + 5));
    let mut counter = |event, rmid, lines| {
        a.write(regs::IA32_QM_EVTSEL, QmEventSelect::new(event, rmid).0)
            .unwrap();
        assert_eq!(
            a.monitored_rmid(),
            (event == event::OCCUPANCY).then_some(rmid)
        );
        a.set_occupied_lines(lines);
        a.read(regs::IA32_QM_CTR)
    };
    assert_eq!(counter(event::OCCUPANCY, 3, unit), 1);
    assert_eq!(counter(event::OCCUPANCY, 4, unit + 1), 2, "rounded up");
    assert_eq!(counter(event::OCCUPANCY, 5, 0), 0);
    assert_eq!(
        (counter(event::TOTAL, 3, 9), counter(event::LOCAL, 3, 9)),
        (5, 5)
    );
}

/// Rules CDP-03 and CDP-07, MBA-05 and MBA-08.
#[test]
fn service_class_follows_the_association() {
    let (mut a, _) = pair();
    for (mask, ways) in [(2, 0x3), (4, 0x1c), (5, 0x600)] {
        a.write(MASK + mask, ways).unwrap();
    }
    a.write(DELAY + 2, 47).unwrap();
    a.write(regs::IA32_PQR_ASSOC, Association::new(9, 2).0)
        .unwrap();
    let class = a.class();
    assert_eq!((class.rmid, class.l3_data, class.l3_code), (9, 3, 3));
    assert_eq!((class.l2_data, class.delay), (0xff, 40));
    a.write(regs::IA32_L3_QOS_CFG, 1).unwrap();
    assert_eq!((a.class().l3_data, a.class().l3_code), (0x1c, 0x600));
    a.write(regs::IA32_PQR_ASSOC, Association::new(9, 8).0)
        .unwrap();
    let class = a.class();
    assert_eq!(
        (class.l3_data, class.l3_code, class.delay),
        (0x7ff, 0x7ff, 0)
    );
}

#[test]
fn resource_control_is_armed_until_all_masks_are_reset() {
    let (mut a, mut b) = pair();
    assert!(!a.is_armed());
    a.write(regs::IA32_PQR_ASSOC, 1).unwrap();
    assert!(a.is_armed() && b.is_armed());
    // A context switch to a task without a group does not end the use.
    a.write(regs::IA32_PQR_ASSOC, 0).unwrap();
    assert!(a.is_armed());
    b.write(MASK, 0xf).unwrap();
    b.write(MASK, 0x7ff).unwrap();
    assert!(!a.is_armed() && !b.is_armed());
    b.write(DELAY, 10).unwrap();
    assert!(a.is_armed());
}

/// Rule L2C-06: L2 masks belong to a core, but all cores share the L3 and its use.
#[test]
fn l2_mask_of_one_core_arms_its_package() {
    let (mut a, mut b) = pair();
    a.write(regs::IA32_L2_QOS_MASK_0 + 1, 0xf).unwrap();
    assert_eq!(b.read(regs::IA32_L2_QOS_MASK_0 + 1), 0xff);
    assert!(a.is_armed() && b.is_armed());
    b.write(regs::IA32_L2_QOS_MASK_0, 1).unwrap();
    a.write(regs::IA32_L2_QOS_MASK_0 + 1, 0xff).unwrap();
    assert!(a.is_armed());
    drop(b);
    assert!(!a.is_armed());
}

#[test]
fn dropped_processor_gives_up_its_association() {
    let (mut a, mut b) = pair();
    a.write(regs::IA32_PQR_ASSOC, 1).unwrap();
    drop(a);
    b.write(MASK, 0x7ff).unwrap();
    assert!(!b.is_armed());
}

proptest! {
    #[test]
    fn state_after_any_writes_restores_to_itself(
        writes in proptest::collection::vec((0xc80_u32..0xd58, any::<u64>(), 0_u32..64), 0..60)
    ) {
        let (mut a, _) = pair();
        for (index, value, shift) in writes {
            let before = a.save();
            let value = value >> shift & QmEventSelect::WRITABLE;
            if a.write(index, value).is_err() {
                prop_assert_eq!(a.save(), before);
            }
        }
        let (mut b, _) = pair();
        b.restore(&a.save()).unwrap();
        prop_assert_eq!(b.save(), a.save());
    }
}

#[test]
fn restore_rejects_invalid_values_and_changes_nothing() {
    let (mut a, _) = pair();
    let good = a.save();
    let spoil: [fn(&mut RdtState); 5] = [
        |s| s.association = 144,
        |s| s.select = 0x100,
        |s| s.package.l3_masks[3] = 0,
        |s| s.package.delays[0] = 91,
        |s| s.package.traffic.clear(),
    ];
    for spoil in spoil {
        let mut bad = good.clone();
        spoil(&mut bad);
        assert!(a.restore(&bad).is_err());
        assert_eq!(a.save(), good);
    }
}
