//! Every class of user-mode instructions against the host's processor.
//!
//! `LOCKSTEP_CASES=n` sets the number of cases of each class, `LOCKSTEP_SEED=s` the seed. The
//! program `lockstep` replays a mismatch.

use hindsight_lockstep::class::ALL;
use hindsight_lockstep::run::{Plan, run};
use hindsight_lockstep::state::State;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    text.strip_prefix("0x")
        .map_or_else(|| text.parse().ok(), |h| u64::from_str_radix(h, 16).ok())
}

#[test]
fn instructions_do_what_the_host_does() {
    let plan = Plan {
        cases: number("LOCKSTEP_CASES").unwrap_or(20_000),
        time: None,
        seed: number("LOCKSTEP_SEED").unwrap_or(0x5eed),
        jobs: 1,
        state: None,
    };
    let mut state = State::default();
    run(&ALL, &plan, &mut state).unwrap();
    assert!(!state.classes.is_empty());
    for (class, record) in &state.classes {
        assert!(record.cases >= plan.cases, "{class}");
        assert_eq!(record.mismatched, 0, "{class}: {:?}", record.mismatches);
    }
}
