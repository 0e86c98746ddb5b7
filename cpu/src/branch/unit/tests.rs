use super::*;
use crate::branch::BranchClass;
use proptest::prelude::*;

fn unit() -> BranchUnit {
    BranchUnit::new(Facilities::all())
}

fn recording() -> BranchUnit {
    let mut unit = unit();
    assert!(unit.write(regs::IA32_DEBUGCTL, DebugCtl::LBR.bits()));
    unit
}

fn branch(class: BranchClass, n: u32) -> Branch {
    Branch {
        from: 0x1000 + u64::from(n),
        to: 0x2000 + u64::from(n),
        at: n,
        class,
        cpl: 0,
        to_cpl: 0,
        mispredicted: false,
    }
}

fn jumps(range: std::ops::Range<u32>) -> Vec<Branch> {
    range.map(|n| branch(BranchClass::DirectJump, n)).collect()
}

/// LBR-04 to LBR-06.
#[test]
fn first_record_goes_to_entry_1_and_the_33rd_over_it() {
    let mut unit = recording();
    unit.record(&jumps(1..2));
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_TOS), 1);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_0_FROM_IP + 1), 0x1001);
    unit.record(&jumps(2..34));
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_TOS), 1);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_0_TO_IP + 1), 0x2021);
}

/// The flags of MSR_LBR_INFO in and round a transaction.
#[test]
fn records_of_a_transaction_and_of_its_abort_have_their_flags() {
    let mut unit = recording();
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

/// LSEL-02, LSEL-03: each bit drops its class and no other.
#[test]
fn each_filter_bit_drops_its_class_only() {
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
        let mut unit = recording();
        assert!(unit.write(regs::MSR_LBR_SELECT, bit.bits()));
        for (class, own) in classes {
            let before = unit.read(regs::MSR_LASTBRANCH_TOS);
            unit.record(&[branch(class, 1)]);
            let recorded = unit.read(regs::MSR_LASTBRANCH_TOS) != before;
            assert_eq!(recorded, own != bit, "{class:?} with {bit:?}");
        }
    }
}

/// LSEL-11, LSEL-12, LSEL-15, LSEL-17.
#[test]
fn call_stack_mode_pops_what_returned() {
    use BranchClass as C;
    let mut unit = recording();
    let quiet = LbrSelect::JCC
        | LbrSelect::NEAR_IND_JMP
        | LbrSelect::NEAR_REL_JMP
        | LbrSelect::FAR_BRANCH
        | LbrSelect::EN_CALLSTACK;
    assert!(unit.write(regs::MSR_LBR_SELECT, quiet.bits()));
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

/// LER-01, LER-02: the branch before the event, then the event on top of the stack.
#[test]
fn exception_puts_the_branch_before_it_into_ler() {
    let mut unit = recording();
    unit.record(&[
        branch(BranchClass::DirectJump, 1),
        branch(BranchClass::Exception, 2),
    ]);
    assert_eq!(unit.read(regs::MSR_LER_FROM_LIP), 0x1001);
    assert_eq!(unit.read(regs::MSR_LASTBRANCH_0_FROM_IP + 2), 0x1002);
}

/// DCTL-06, DB-23: and nothing else of IA32_DEBUGCTL.
#[test]
fn debug_exception_clears_lbr_and_btf_only() {
    let mut unit = unit();
    assert!(unit.write(regs::IA32_DEBUGCTL, 0x7fc3));
    unit.debug_exception();
    assert_eq!(unit.read(regs::IA32_DEBUGCTL), 0x7fc0);
}

/// LBR-26, DS-03, LER-06.
#[test]
fn addresses_must_be_canonical() {
    let mut unit = unit();
    for index in [
        regs::MSR_LASTBRANCH_0_FROM_IP,
        regs::MSR_LASTBRANCH_0_TO_IP + 31,
        regs::IA32_DS_AREA,
        regs::MSR_LER_TO_LIP,
    ] {
        assert!(!unit.write(index, 1 << 47), "{index:#x}");
        assert!(unit.write(index, 0xffff_8000_0000_0000), "{index:#x}");
        assert_eq!(unit.read(index), 0xffff_8000_0000_0000);
    }
}

#[test]
fn impossible_saved_state_is_refused_and_changes_nothing() {
    let mut unit = recording();
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
    // Long runs without an event are a way of their own.
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
    /// One batch or many make no difference, nor does saving and restoring in between.
    #[test]
    fn batches_and_restores_change_nothing(
        run in prop::collection::vec(any_branch(), 0..200),
        cuts in prop::collection::vec(0..200_usize, 0..5),
        select in prop_oneof![Just(0), 0..0x400_u64],
    ) {
        let mut whole = recording();
        prop_assert!(whole.write(regs::MSR_LBR_SELECT, select));
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
