//! What is printed when a run has ended.

use std::error::Error;
use std::io::{self, Write};
use std::time::Duration;

use tracing::Level;

use crate::cli::Status;
use crate::cli::logging::Logging;
use crate::output::OutputError;
use crate::vcpu::board::Board;
use crate::vcpu::crash::FinalState;
use crate::vcpu::run_control::{HaltText, Outcome, RunError};
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

/// An error and its sources in one line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let chain = anyhow::Chain::new(error).map(ToString::to_string);
    chain.collect::<Vec<_>>().join(": ")
}

fn timeout(states: &[FinalState]) -> String {
    let mut text = "the time limit passed".to_owned();
    for state in states {
        text.push('\n');
        text.push_str(state.to_string().trim_end());
    }
    text
}

/// Reports how the run ended, unless the guest or the user requested that end. Output that was lost,
/// even after that end, takes precedence.
pub(super) fn report(outcome: &Outcome, lost: Option<OutputError>, logging: &Logging) -> Status {
    let Some(lost) = lost else {
        return report_outcome(outcome, logging);
    };
    if !is_output_failure(outcome) {
        report_outcome(outcome, logging);
    }
    logging.report(Level::ERROR, &chain(&lost));
    Status::Usage
}

/// Whether the run ended because of its output.
fn is_output_failure(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed(error) if matches!(**error, RunError::Output(_)))
}

fn report_outcome(outcome: &Outcome, logging: &Logging) -> Status {
    match outcome {
        Outcome::Exit(code) => Status::Guest(*code),
        Outcome::PowerOff | Outcome::Quit => Status::Success,
        &Outcome::Halted { cpu, rip } => {
            logging.report(Level::INFO, &HaltText { cpu, rip }.to_string());
            Status::Success
        }
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
            logging.report(Level::ERROR, &chain(&**error));
            match **error {
                RunError::InputLog(_) => Status::Usage,
                _ => Status::Internal,
            }
        }
    }
}
