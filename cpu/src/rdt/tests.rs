use std::sync::Arc;

use hindsight_regs::msr as regs;
use hindsight_regs::rdt::{self, Association, QmEventSelect, counter, event};
use proptest::prelude::*;

use super::*;

fn pair() -> (Rdt, Rdt) {
    let package = Arc::new(Package::default());
    let all = Facilities::all();
    (Rdt::new(all, package.clone()), Rdt::new(all, package))
}

const MASK: u32 = regs::IA32_L3_QOS_MASK_0;
const DELAY: u32 = regs::IA32_L2_QOS_EXT_BW_THRTL_0;

/// Rules RDT-04, CAT-03, CAT-08 and MBA-06.
#[test]
fn masks_and_delays_are_the_packages() {
    let (mut a, b) = pair();
    assert_eq!((b.read(MASK + 15), b.read(DELAY)), (0x7ff, 0));
    assert!(a.write(MASK + 15, 0x70) && a.write(DELAY + 7, 12));
    assert_eq!((b.read(MASK + 15), b.read(DELAY + 7)), (0x70, 12));
}

/// Rules RDT-05 to RDT-07.
#[test]
fn association_is_within_the_enumerated_numbers() {
    let (mut a, b) = pair();
    assert!(a.write(regs::IA32_PQR_ASSOC, Association::new(143, 15).0));
    assert!(!a.write(regs::IA32_PQR_ASSOC, Association::new(144, 0).0));
    assert!(!a.write(regs::IA32_PQR_ASSOC, Association::new(0, 16).0));
    assert_eq!(a.read(regs::IA32_PQR_ASSOC), 15 << 32 | 143);
    assert_eq!(b.read(regs::IA32_PQR_ASSOC), 0, "the other processor's own");
    let only = |facilities| Rdt::new(facilities, Arc::default());
    let mut mba = only(Facilities::MBA);
    assert!(mba.write(regs::IA32_PQR_ASSOC, Association::new(0, 7).0));
    assert!(!mba.write(regs::IA32_PQR_ASSOC, Association::new(0, 8).0));
    assert!(!mba.write(regs::IA32_PQR_ASSOC, Association::new(1, 0).0));
}

/// Rules CMT-03, CMT-05 and CMT-09.
#[test]
fn counter_says_whether_there_are_data() {
    let (mut a, _) = pair();
    assert_eq!(
        a.read(regs::IA32_QM_CTR),
        counter::ERROR,
        "no event selected"
    );
    for event in [4, 0xff] {
        assert!(a.write(regs::IA32_QM_EVTSEL, QmEventSelect::new(event, 0).0));
        assert_eq!(a.read(regs::IA32_QM_CTR), counter::ERROR);
    }
    for event in [event::OCCUPANCY, event::TOTAL, event::LOCAL] {
        assert!(a.write(regs::IA32_QM_EVTSEL, QmEventSelect::new(event, 1).0));
        assert_eq!(a.read(regs::IA32_QM_CTR), counter::UNAVAILABLE);
        a.package().set_warm(true);
        assert_eq!(a.read(regs::IA32_QM_CTR), 0);
        a.package().set_warm(false);
    }
}

/// Rules CMT-07, CMT-11 and MBM-01.
#[test]
fn tallies_are_shown_in_units() {
    let (mut a, _) = pair();
    let package = a.package().clone();
    package.set_warm(true);
    let unit = u64::from(rdt::UPSCALE) / 64;
    package.moved(3, unit * ((1 << 24) + 5));
    let mut show = |event, rmid, lines| {
        assert!(a.write(regs::IA32_QM_EVTSEL, QmEventSelect::new(event, rmid).0));
        assert_eq!(a.monitored(), (event == event::OCCUPANCY).then_some(rmid));
        a.set_occupied(lines);
        a.read(regs::IA32_QM_CTR)
    };
    assert_eq!(show(event::OCCUPANCY, 3, unit), 1);
    assert_eq!(show(event::OCCUPANCY, 4, unit + 1), 2, "begun");
    assert_eq!(show(event::OCCUPANCY, 5, 0), 0);
    assert_eq!((show(event::TOTAL, 3, 9), show(event::LOCAL, 3, 9)), (5, 5));
}

/// Rules CDP-03 and CDP-07, MBA-05 and MBA-08.
#[test]
fn class_follows_the_association() {
    let (mut a, _) = pair();
    assert!(a.write(MASK + 2, 0x3) && a.write(MASK + 4, 0x1c) && a.write(MASK + 5, 0x600));
    assert!(a.write(DELAY + 2, 47));
    assert!(a.write(regs::IA32_PQR_ASSOC, Association::new(9, 2).0));
    let class = a.class();
    assert_eq!((class.rmid, class.l3_data, class.l3_code), (9, 3, 3));
    assert_eq!((class.l2_data, class.delay), (0xff, 40));
    assert!(a.write(regs::IA32_L3_QOS_CFG, 1));
    assert_eq!((a.class().l3_data, a.class().l3_code), (0x1c, 0x600));
    assert!(a.write(regs::IA32_PQR_ASSOC, Association::new(9, 8).0));
    let class = a.class();
    assert_eq!(
        (class.l3_data, class.l3_code, class.delay),
        (0x7ff, 0x7ff, 0)
    );
}

#[test]
fn armed_from_the_first_use_until_all_is_set_back() {
    let (mut a, mut b) = pair();
    assert!(!a.is_armed());
    assert!(a.write(regs::IA32_PQR_ASSOC, 1));
    assert!(a.is_armed() && b.is_armed());
    // A context switch to a task of no group ends nothing.
    assert!(a.write(regs::IA32_PQR_ASSOC, 0));
    assert!(a.is_armed());
    assert!(b.write(MASK, 0xf) && b.write(MASK, 0x7ff));
    assert!(!a.is_armed() && !b.is_armed());
    assert!(b.write(DELAY, 10) && a.is_armed());
}

/// Rule L2C-06: the masks are a core's own; that one has some matters to all, who share the L3.
#[test]
fn masks_of_one_core_arm_its_package() {
    let (mut a, mut b) = pair();
    assert!(a.write(regs::IA32_L2_QOS_MASK_0 + 1, 0xf));
    assert_eq!(b.read(regs::IA32_L2_QOS_MASK_0 + 1), 0xff);
    assert!(a.is_armed() && b.is_armed());
    assert!(b.write(regs::IA32_L2_QOS_MASK_0, 1) && a.write(regs::IA32_L2_QOS_MASK_0 + 1, 0xff));
    assert!(a.is_armed());
    drop(b);
    assert!(!a.is_armed());
}

#[test]
fn dropped_processor_is_not_associated_any_more() {
    let (mut a, mut b) = pair();
    assert!(a.write(regs::IA32_PQR_ASSOC, 1));
    drop(a);
    assert!(b.write(MASK, 0x7ff));
    assert!(!b.is_armed());
}

proptest! {
    #[test]
    fn saved_state_is_what_writes_left(
        writes in proptest::collection::vec((0xc80_u32..0xd58, any::<u64>(), 0_u32..64), 0..60)
    ) {
        let (mut a, _) = pair();
        for (index, value, shift) in writes {
            let before = a.save();
            if !a.write(index, value >> shift & QmEventSelect::WRITABLE) {
                prop_assert_eq!(a.save(), before);
            }
        }
        let (mut b, _) = pair();
        b.restore(&a.save()).unwrap();
        prop_assert_eq!(b.save(), a.save());
    }
}

#[test]
fn impossible_state_is_refused() {
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
