use super::*;
use crate::branch::BranchClass;
use crate::model::CpuModel;
use hindsight_regs::branch::{LbrInfo, arch_info};
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

/// Architectural LBR with this value of IA32_LBR_CTL.
fn architectural(control: LbrCtl) -> BranchUnit {
    let mut unit = BranchUnit::new(Facilities::all(), CpuModel::SapphireRapids);
    unit.write(regs::IA32_LBR_CTL, control.bits()).unwrap();
    unit
}

fn sources(unit: &BranchUnit) -> Vec<u64> {
    let numbers = (0..32).take_while(|n| unit.has(regs::IA32_LBR_0_FROM_IP + n));
    numbers
        .map(|n| unit.read(regs::IA32_LBR_0_FROM_IP + n))
        .collect()
}

/// Rules GEN-28 and GEN-29.
#[test]
fn architectural_entry_0_is_the_newest_and_depth_limits_them() {
    for depth in [8, 16, 32] {
        let mut unit = architectural(LbrCtl::PASS | LbrCtl::ENABLE);
        unit.record(&jumps(1..2));
        unit.write(regs::IA32_LBR_DEPTH, depth).unwrap();
        assert!(sources(&unit).into_iter().eq((0..depth).map(|_| 0)));
        // One by one, and in a batch that overwrites the stack.
        unit.record(&jumps(1..3));
        assert_eq!(sources(&unit)[..3], [0x1002, 0x1001, 0]);
        unit.record(&jumps(3..100));
        let expected = (0..depth).map(|age| 0x1000 + 99 - age);
        assert!(sources(&unit).into_iter().eq(expected));
        let info = (10 << 56 | arch_info::CYC_CNT_VALID) & !(8 << 56) | 1;
        assert_eq!(unit.read(regs::IA32_LBR_0_INFO), info);
        let saved = unit.save();
        let mut other = architectural(LbrCtl::empty());
        other.restore(&saved).unwrap();
        assert_eq!((other.save(), sources(&other)), (saved, sources(&unit)));
    }
    let mut unit = architectural(LbrCtl::empty());
    for depth in [0, 4, 24, 33, 64, 1 << 40] {
        assert_eq!(unit.write(regs::IA32_LBR_DEPTH, depth), Err(GpFault));
    }
    assert_eq!(unit.read(regs::IA32_LBR_DEPTH), 32);
}

/// Rule GEN-30.
#[test]
fn architectural_filter_records_only_what_it_selects() {
    use BranchClass as C;
    let classes = [
        (C::Conditional, LbrCtl::JCC, 0),
        (C::DirectJump, LbrCtl::NEAR_REL_JMP, 2),
        (C::IndirectJump, LbrCtl::NEAR_IND_JMP, 1),
        (C::DirectCall, LbrCtl::NEAR_REL_CALL, 4),
        (C::IndirectCall, LbrCtl::NEAR_IND_CALL, 3),
        (C::Return, LbrCtl::NEAR_RET, 5),
        (C::Far, LbrCtl::OTHER_BRANCH, 8),
        (C::Exception, LbrCtl::OTHER_BRANCH, 8),
    ];
    for (_, bit, _) in classes {
        let mut unit = architectural(LbrCtl::ENABLE | LbrCtl::OS | bit);
        for (class, own, kind) in classes {
            unit.write(regs::IA32_LBR_DEPTH, 8).unwrap();
            unit.record(&[branch(class, 1)]);
            let expected = if own == bit { 0x1001 } else { 0 };
            assert_eq!(sources(&unit)[0], expected, "{class:?} with {bit:?}");
            if own == bit {
                let info = unit.read(regs::IA32_LBR_0_INFO);
                assert_eq!(info >> 56, 1 << 4 | kind, "{class:?}");
            }
        }
    }
}

/// Rule GEN-31.
#[test]
fn source_at_a_level_that_is_not_recorded_is_hidden() {
    let all = LbrCtl::PASS | LbrCtl::ENABLE;
    let syscall = Branch {
        cpl: 3,
        ..branch(BranchClass::Far, 1)
    };
    let sysret = Branch {
        to_cpl: 3,
        ..branch(BranchClass::Far, 2)
    };
    for (control, expected) in [
        (all, [0x1002, 0x1001]),
        (all - LbrCtl::OS, [u64::MAX, 0]),
        (all - LbrCtl::USR, [u64::MAX, 0]),
        (all - LbrCtl::USR - LbrCtl::OS, [0, 0]),
    ] {
        let mut unit = architectural(control);
        unit.record(&[syscall, sysret]);
        assert_eq!(sources(&unit)[..2], expected, "{control:?}");
        let saved = unit.save();
        assert!(architectural(all).restore(&saved).is_ok());
    }
}

/// Rule GEN-30.
#[test]
fn architectural_call_stack_moves_entries_up_at_a_return() {
    use BranchClass as C;
    let calls = LbrCtl::NEAR_REL_CALL | LbrCtl::NEAR_IND_CALL | LbrCtl::NEAR_RET;
    let mut unit = architectural(LbrCtl::ENABLE | LbrCtl::OS | LbrCtl::CALL_STACK | calls);
    unit.write(regs::IA32_LBR_DEPTH, 8).unwrap();
    let nine: Vec<_> = (1..10).map(|n| branch(C::DirectCall, n)).collect();
    unit.record(&nine);
    unit.record(&[branch(C::CallNext, 10), branch(C::Return, 11)]);
    let expected = [0x1008, 0x1007, 0x1006, 0x1005, 0x1004, 0x1003, 0x1002, 0];
    assert_eq!(sources(&unit), expected);
}

/// Rule GEN-32.
#[test]
fn architectural_lbr_ignores_debugctl_and_stops_at_events() {
    let mut unit = architectural(LbrCtl::PASS);
    let both = DebugCtl::LBR | DebugCtl::BTF;
    unit.write(regs::IA32_DEBUGCTL, both.bits()).unwrap();
    assert_eq!(unit.read(regs::IA32_DEBUGCTL), DebugCtl::BTF.bits());
    assert!(!unit.records() && !unit.observe().branches);
    for stop in [BranchUnit::debug_exception, BranchUnit::init] {
        unit.write(regs::IA32_LBR_CTL, LbrCtl::all().bits())
            .unwrap();
        assert!(unit.records() && unit.observe().debug_exceptions);
        stop(&mut unit);
        let left = LbrCtl::all() - LbrCtl::ENABLE;
        assert_eq!(unit.read(regs::IA32_LBR_CTL), left.bits());
        assert!(!unit.records());
    }
}

/// Rule GEN-33.
#[test]
fn last_event_record_has_the_flags_of_its_branch() {
    let mut unit = architectural(LbrCtl::PASS | LbrCtl::ENABLE);
    // The batch is longer than the stack, and the event is behind what the fast path skips.
    let mut batch = jumps(1..60);
    batch.insert(20, branch(BranchClass::Exception, 90));
    batch.insert(27, branch(BranchClass::Interrupt, 91));
    unit.record(&batch);
    let ler = [regs::MSR_LER_FROM_LIP, regs::MSR_LER_TO_LIP].map(|index| unit.read(index));
    assert_eq!(ler, [0x101a, 0x201a]);
    let info = 2 << 56 | arch_info::CYC_CNT_VALID | 1;
    assert_eq!(unit.read(regs::IA32_LER_INFO), info);
}
