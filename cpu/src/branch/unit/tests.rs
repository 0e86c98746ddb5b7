use super::*;
use crate::branch::BranchClass;
use crate::model::CpuModel;
use proptest::prelude::*;

fn unit() -> BranchUnit {
    BranchUnit::new(Facilities::all(), CpuModel::SkylakeServer)
}

fn enabled_unit() -> BranchUnit {
    let mut unit = unit();
    unit.write(regs::IA32_DEBUGCTL, DebugCtl::LBR.bits())
        .unwrap();
    unit
}

fn branch(class: BranchClass, n: u32) -> Branch {
    let n64 = u64::from(n);
    Branch {
        at: n,
        ..Branch::new(class, 0x1000 + n64, 0x2000 + n64)
    }
}

fn jumps(range: std::ops::Range<u32>) -> Vec<Branch> {
    range.map(|n| branch(BranchClass::DirectJump, n)).collect()
}

/// Rules LBR-04 to LBR-06.
#[test]
fn first_record_goes_to_entry_1_and_the_33rd_overwrites_it() {
    let mut unit = enabled_unit();
    unit.record(&jumps(1..2));
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_TOS), 1);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_0_FROM_IP + 1), 0x1001);
    unit.record(&jumps(2..34));
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_TOS), 1);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_0_TO_IP + 1), 0x2021);
}

/// MSR_LBR_INFO of records before, in and after a transaction.
#[test]
fn lbr_info_flags_transactions_and_aborts() {
    let mut unit = enabled_unit();
    unit.record(&jumps(1..2));
    unit.set_in_transaction(true);
    unit.record(&[
        branch(BranchClass::Return, 2),
        branch(BranchClass::Abort, 3),
    ]);
    unit.set_in_transaction(false);
    unit.record(&jumps(4..5));
    let (inside, abort) = (LbrInfo::IN_TSX.bits(), LbrInfo::TSX_ABORT.bits());
    let flags = (1..5).map(|n| unit.read(regs::MSR_LBR_INFO_0 + n) & LbrInfo::all().bits());
    assert!(flags.eq([0, inside, inside | abort, 0]));
}

/// Rules LSEL-02 and LSEL-03.
#[test]
fn filter_bit_drops_only_its_class() {
    use BranchClass as C;
    let classes = [
        (C::Conditional, LbrSelect::JCC),
        (C::DirectJump, LbrSelect::NEAR_REL_JMP),
        (C::IndirectJump, LbrSelect::NEAR_IND_JMP),
        (C::DirectCall, LbrSelect::NEAR_REL_CALL),
        (C::IndirectCall, LbrSelect::NEAR_IND_CALL),
        (C::Return, LbrSelect::NEAR_RET),
        (C::Far, LbrSelect::FAR_BRANCH),
        (C::Interrupt, LbrSelect::FAR_BRANCH),
        (C::Abort, LbrSelect::FAR_BRANCH),
    ];
    for (_, bit) in classes {
        let mut unit = enabled_unit();
        unit.write(regs::MSR_LBR_SELECT, bit.bits()).unwrap();
        for (class, own) in classes {
            let before = unit.read(regs::MSR_LASTBRANCH_TOS);
            unit.record(&[branch(class, 1)]);
            let recorded = unit.read(regs::MSR_LASTBRANCH_TOS) != before;
            assert_eq!(recorded, own != bit, "{class:?} with {bit:?}");
        }
    }
}

/// Rules LSEL-11, LSEL-12, LSEL-15 and LSEL-17.
#[test]
fn call_stack_mode_pops_the_call_of_a_return() {
    use BranchClass as C;
    let mut unit = enabled_unit();
    let calls_only = LbrSelect::JCC
        | LbrSelect::NEAR_IND_JMP
        | LbrSelect::NEAR_REL_JMP
        | LbrSelect::FAR_BRANCH
        | LbrSelect::EN_CALLSTACK;
    unit.write(regs::MSR_LBR_SELECT, calls_only.bits()).unwrap();
    let run = [
        branch(C::DirectCall, 1),
        branch(C::CallNext, 9),
        branch(C::IndirectCall, 2),
        branch(C::Return, 3),
        branch(C::DirectCall, 4),
    ];
    unit.record(&run);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_TOS), 2);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_0_FROM_IP + 2), 0x1004);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_0_FROM_IP + 1), 0x1001);
}

#[test]
fn branches_that_newer_ones_overwrite_can_be_skipped() {
    let mut whole = enabled_unit();
    let newest = whole.observe().newest;
    assert_eq!(newest, 33);
    let mut parts = whole.clone();
    whole.record(&jumps(1..100));
    parts.record(&jumps(1..3));
    parts.skip(64);
    parts.record(&jumps(67..100));
    assert_eq!(whole, parts);
    assert_ne!(
        parts.read(regs::MSR_LBR_INFO_0),
        0,
        "CYC_CNT of the oldest entry"
    );
    let select = LbrSelect::JCC.bits();
    whole.write(regs::MSR_LBR_SELECT, select).unwrap();
    assert_eq!(whole.observe().newest, 0, "older branches may stay");
}

/// Rules LER-01 and LER-02.
#[test]
fn exception_copies_the_previous_branch_to_ler() {
    let mut unit = enabled_unit();
    unit.record(&[
        branch(BranchClass::DirectJump, 1),
        branch(BranchClass::Exception, 2),
    ]);
    assert_eq!(unit.read(regs::MSR_LER_FROM_LIP), 0x1001);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_0_FROM_IP + 2), 0x1002);
}

/// Rules DCTL-06 and DB-23.
#[test]
fn debug_exception_clears_lbr_and_btf_only() {
    let mut unit = unit();
    unit.write(regs::IA32_DEBUGCTL, 0x7fc3).unwrap();
    unit.debug_exception();
    assert_eq!(unit.read(regs::IA32_DEBUGCTL), 0x7fc0);
}

/// Rules LBR-26, DS-03 and LER-06.
#[test]
fn write_of_a_non_canonical_address_faults() {
    let mut unit = unit();
    for index in [
        regs::MSR_LASTBRANCH_0_FROM_IP,
        regs::MSR_LASTBRANCH_0_TO_IP + 31,
        regs::IA32_DS_AREA,
        regs::MSR_LER_TO_LIP,
    ] {
        assert_eq!(unit.write(index, 1 << 47), Err(GpFault), "{index:#x}");
        assert_eq!(
            unit.write(index, 0xffff_8000_0000_0000),
            Ok(()),
            "{index:#x}"
        );
        assert_eq!(unit.read(index), 0xffff_8000_0000_0000);
    }
}

#[test]
fn restore_rejects_invalid_values_and_changes_nothing() {
    let mut unit = enabled_unit();
    let before = unit.clone();
    for spoil in [
        (|s: &mut BranchState| s.tos = 32) as fn(&mut _),
        |s| s.debugctl = 4,
        |s| s.entries[3][0] = 1 << 60,
        |s| s.select = 1 << 10,
    ] {
        let mut state = unit.save();
        spoil(&mut state);
        assert!(unit.restore(&state).is_err());
        assert_eq!(unit, before);
    }
}

fn any_branch() -> impl Strategy<Value = Branch> {
    use BranchClass as C;
    let plain = vec![
        C::Conditional,
        C::DirectJump,
        C::DirectCall,
        C::CallNext,
        C::Return,
        C::NotTaken,
    ];
    // Long runs without an event take the fast path.
    let class = prop_oneof![
        50 => prop::sample::select(plain),
        1 => prop::sample::select(vec![C::Exception, C::Debug, C::Interrupt]),
    ];
    (class, 0..1000_u32, 0..2_u8, any::<bool>()).prop_map(|(class, n, cpl, mispredicted)| Branch {
        to_cpl: cpl * 3,
        mispredicted,
        ..branch(class, n)
    })
}

proptest! {
    /// Batch boundaries make no difference, nor does a restore between two batches.
    #[test]
    fn batches_and_restores_do_not_change_the_records(
        run in prop::collection::vec(any_branch(), 0..200),
        cuts in prop::collection::vec(0..200_usize, 0..5),
        select in prop_oneof![Just(0), 0..0x400_u64],
    ) {
        let mut whole = enabled_unit();
        prop_assert_eq!(whole.write(regs::MSR_LBR_SELECT, select), Ok(()));
        let mut parts = whole.clone();
        whole.record(&run);
        let mut rest = &run[..];
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            parts.record(now);
            let mut fresh = unit();
            fresh.restore(&parts.save()).unwrap();
            parts = fresh;
            rest = later;
        }
        for b in rest {
            parts.record(&[*b]);
        }
        prop_assert_eq!(whole, parts);
    }
}
