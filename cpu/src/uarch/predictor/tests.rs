use proptest::prelude::*;

use super::*;
use BranchClass as Class;

fn conditional(from: u64, taken: bool) -> Branch {
    let class = if taken {
        Class::Conditional
    } else {
        Class::NotTaken
    };
    Branch::new(class, from, from + 20)
}

/// Resolves one branch. Returns whether it is mispredicted.
fn resolve(predictor: &mut Predictor, branch: Branch) -> bool {
    let mut branches = [branch];
    predictor.resolve(&mut branches);
    branches[0].mispredicted
}

/// Number of mispredictions among these branches.
fn missed(predictor: &mut Predictor, branches: impl IntoIterator<Item = Branch>) -> usize {
    let mut branches: Vec<Branch> = branches.into_iter().collect();
    predictor.resolve(&mut branches);
    branches.iter().filter(|branch| branch.mispredicted).count()
}

#[test]
fn predictor_is_cold_until_its_first_branch() {
    let mut predictor = Predictor::default();
    assert!(predictor.is_cold());
    resolve(&mut predictor, conditional(0x1000, true));
    assert!(!predictor.is_cold());
}

#[test]
fn loop_with_a_short_period_is_learnt() {
    let mut predictor = Predictor::default();
    // A loop of eight iterations, 1000 times: taken seven times, then not. The history holds one
    // loop.
    let loops = (0..8000).map(|n| conditional(0x40_1000, n % 8 != 7));
    let first = missed(&mut predictor, loops.clone());
    assert!(first > 0 && first < 50, "{first}");
    assert_eq!(missed(&mut predictor, loops), 0);
}

#[test]
fn random_branch_is_not_learnt() {
    let mut predictor = Predictor::default();
    let mut x = 1_u32;
    let coin = (0..10_000).map(|_| {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        conditional(0x40_1000, x >> 31 != 0)
    });
    let missed = missed(&mut predictor, coin);
    assert!((3000..7000).contains(&missed), "{missed}");
}

#[test]
fn returns_are_predicted_by_the_last_sixteen_calls() {
    let mut predictor = Predictor::default();
    let calls = |n: u64| (0..n).map(|i| Branch::new(Class::DirectCall, 0x1000 + i * 64, 0x9000));
    let returns =
        |n: u64| (0..n).map(move |i| Branch::new(Class::Return, 0x9010, 0x1005 + (n - 1 - i) * 64));
    assert_eq!(missed(&mut predictor, calls(16).chain(returns(16))), 0);
    // The return stack has sixteen entries.
    assert_eq!(missed(&mut predictor, calls(20).chain(returns(20))), 4);
    // A return that was never called, and one that goes elsewhere.
    assert_eq!(missed(&mut predictor, returns(1)), 1);
    let elsewhere = [
        Branch::new(Class::IndirectCall, 0x1000, 0x9000),
        Branch::new(Class::Return, 0x9010, 0x1000),
    ];
    assert_eq!(missed(&mut predictor, elsewhere), 2);
}

#[test]
fn indirect_jump_is_predicted_to_its_last_target() {
    let mut predictor = Predictor::default();
    let to = |to| Branch::new(Class::IndirectJump, 0x1000, to);
    let jumps = [to(0x2000), to(0x2000), to(0x3000), to(0x3000), to(0x2000)];
    let missed = jumps.map(|jump| resolve(&mut predictor, jump));
    assert_eq!(missed, [true, false, true, false, true]);
}

#[test]
fn direct_and_far_branches_are_never_mispredicted() {
    let mut predictor = Predictor::default();
    for class in [
        Class::DirectJump,
        Class::DirectCall,
        Class::CallNext,
        Class::Far,
        Class::SoftwareInterrupt,
        Class::Exception,
        Class::Debug,
        Class::Interrupt,
    ] {
        assert!(
            !resolve(&mut predictor, Branch::new(class, 0x1000, 0x2000)),
            "{class:?}"
        );
    }
}

fn any_branch() -> impl Strategy<Value = Branch> {
    let class = prop::sample::select(vec![
        Class::Conditional,
        Class::NotTaken,
        Class::IndirectJump,
        Class::IndirectCall,
        Class::DirectCall,
        Class::Return,
        Class::Far,
    ]);
    (0_u64..64, 0_u64..64, class).prop_map(|(from, to, class)| Branch::new(class, from * 7, to * 7))
}

proptest! {
    #[test]
    fn restored_predictor_continues_like_the_original(
        branches in prop::collection::vec(any_branch(), 0..200),
        at in 0_usize..200,
    ) {
        let (mut one, mut two) = (Predictor::default(), Predictor::default());
        for (i, &branch) in branches.iter().enumerate() {
            if i == at {
                let mut restored = Predictor::default();
                prop_assert_eq!(restored.restore(&two.save()), Ok(()));
                two = restored;
            }
            prop_assert_eq!(resolve(&mut one, branch), resolve(&mut two, branch));
        }
        prop_assert_eq!(one.save(), two.save());
    }
}

#[test]
fn restore_rejects_invalid_states_and_changes_nothing() {
    let mut predictor = Predictor::default();
    resolve(&mut predictor, conditional(0x1000, true));
    let good = predictor.save();
    for change in [
        (|s: &mut PredictorState| s.counters[5] = 4) as fn(&mut PredictorState),
        |s| s.counters.truncate(5),
        |s| s.targets.clear(),
        |s| s.top = RETURN_STACK_DEPTH,
        |s| s.history = 1 << HISTORY,
    ] {
        let mut state = good.clone();
        change(&mut state);
        assert!(predictor.restore(&state).is_err());
        assert_eq!(predictor.save(), good);
    }
}
