//! What is printed when a run has ended.

use std::io::{self, Write};
use std::time::Duration;

use tracing::Level;

use crate::cli::Status;
use crate::cli::logging::Logging;
use crate::vcpu::board::Board;
use crate::vcpu::crash::FinalState;
use crate::vcpu::run_control::Outcome;
use crate::vcpu::stats::RunReport;

/// Prints the figures of `--stats`.
pub(super) fn print_stats(board: &Board, host_time: Duration, outcome: &Outcome) {
    let report = RunReport::new(board.run.stats(), board.run.engine.stats(), host_time).to_string();
    for line in report.lines() {
        let _ = writeln!(io::stderr(), "hindsight: {line}");
    }
    // A run that was ended from outside ended where no other run does: its hash says nothing.
    let from_outside = match outcome {
        Outcome::Timeout(_) | Outcome::Failed(_) => true,
        Outcome::Quit => !board.run.end.by_input(),
        _ => false,
    };
    if let Some(hash) = board.run_hash().filter(|_| !from_outside) {
        let _ = writeln!(io::stderr(), "hindsight: hash {hash:032x}");
    }
}

fn timeout(states: &[FinalState]) -> String {
    let mut text = "the time limit passed".to_owned();
    for state in states {
        text.push('\n');
        text.push_str(state.to_string().trim_end());
    }
    text
}

/// Reports how the run ended, unless the guest or the user requested that end.
pub(super) fn report(outcome: &Outcome, logging: &Logging) -> Status {
    match outcome {
        Outcome::Exit(code) => Status::Guest(*code),
        Outcome::PowerOff | Outcome::Quit => Status::Success,
        Outcome::Reset => {
            logging.report(Level::INFO, "the guest asked for a reset");
            Status::Reset
        }
        Outcome::Timeout(states) => {
            logging.report(Level::WARN, &timeout(states));
            Status::Timeout
        }
        Outcome::Crash(crash) => {
            logging.report(Level::WARN, crash.to_string().trim_end());
            Status::GuestCrash
        }
        Outcome::Failed(error) => {
            let chain = anyhow::Chain::new(&**error).map(ToString::to_string);
            let text = chain.collect::<Vec<_>>().join(": ");
            logging.report(Level::ERROR, &text);
            Status::Internal
        }
    }
}
