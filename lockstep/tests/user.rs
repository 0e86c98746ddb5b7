//! Every class of user-mode instructions: the interpreter against the host's processor, also with
//! vector instructions in software, and translated code against the interpreter.
//!
//! `LOCKSTEP_CASES=n` sets the number of cases of each class, `LOCKSTEP_SEED=s` the seed. The
//! program `lockstep` replays a mismatch.

use hindsight_lockstep::progress::ProgressFile;
use hindsight_lockstep::user::class::ALL_CLASSES;
use hindsight_lockstep::user::reference::TierComparison;
use hindsight_lockstep::user::run::{UserOptions, run};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    text.strip_prefix("0x")
        .map_or_else(|| text.parse().ok(), |h| u64::from_str_radix(h, 16).ok())
}

fn compare_all(comparison: TierComparison) {
    let options = UserOptions {
        cases: number("LOCKSTEP_CASES").unwrap_or(20_000),
        time: None,
        seed: number("LOCKSTEP_SEED").unwrap_or(0x5eed),
        jobs: 1,
        path: None,
        comparison,
    };
    let mut progress = ProgressFile::default();
    run(&ALL_CLASSES, &options, &mut progress).expect("memory is there");
    assert!(!progress.classes.is_empty());
    for (class, record) in &progress.classes {
        assert!(record.cases >= options.cases, "{class}");
        assert_eq!(record.mismatched, 0, "{class}: {:?}", record.mismatches);
    }
    let translated: u64 = progress.classes.values().map(|c| c.translated).sum();
    assert_eq!(translated != 0, comparison == TierComparison::Translated);
}

#[test]
fn interpreter_matches_host_processor_in_every_class() {
    compare_all(TierComparison::Host);
}

#[test]
fn software_matches_host_processor_in_every_class() {
    compare_all(TierComparison::Software);
}

#[test]
fn translated_code_matches_interpreter_in_every_class() {
    compare_all(TierComparison::Translated);
}
