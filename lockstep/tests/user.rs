//! Every class of user-mode instructions against the host's processor.
//!
//! `LOCKSTEP_CASES=n` sets the number of cases of each class, `LOCKSTEP_SEED=s` the seed. The
//! program `lockstep` replays a mismatch.

use hindsight_lockstep::progress::ProgressFile;
use hindsight_lockstep::user::class::ALL_CLASSES;
use hindsight_lockstep::user::run::{UserOptions, run};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    text.strip_prefix("0x")
        .map_or_else(|| text.parse().ok(), |h| u64::from_str_radix(h, 16).ok())
}

#[test]
fn interpreter_matches_host_processor_in_every_class() {
    let options = UserOptions {
        cases: number("LOCKSTEP_CASES").unwrap_or(20_000),
        time: None,
        seed: number("LOCKSTEP_SEED").unwrap_or(0x5eed),
        jobs: 1,
        path: None,
    };
    let mut progress = ProgressFile::default();
    run(&ALL_CLASSES, &options, &mut progress).unwrap();
    assert!(!progress.classes.is_empty());
    for (class, record) in &progress.classes {
        assert!(record.cases >= options.cases, "{class}");
        assert_eq!(record.mismatched, 0, "{class}: {:?}", record.mismatches);
    }
}
