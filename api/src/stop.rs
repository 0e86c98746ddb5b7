//! Why a machine stopped.

use std::fmt;

/// Why a machine stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// It reached the instruction count to which it was to run.
    Count,
    /// A processor is about to execute the instruction at an address.
    Reached {
        /// The processor.
        cpu: usize,
        /// The linear address.
        address: u64,
    },
    /// A processor accessed memory that is watched.
    Accessed {
        /// The processor.
        cpu: usize,
        /// The first byte of the access, a linear address.
        address: u64,
        /// It is a write.
        write: bool,
    },
    /// A processor raised an exception that was asked for.
    Exception {
        /// The processor.
        cpu: usize,
        /// The vector.
        vector: u8,
        /// The error code, if the exception has one.
        error_code: Option<u32>,
    },
    /// The guest printed the text that was asked for.
    Printed,
    /// The predicate is true.
    Predicate,
    /// All processors are halted, and nothing wakes them. Input may: see
    /// [`Machine::send`](crate::Machine::send).
    Asleep,
    /// The guest ended the run with this code.
    Exit(u32),
    /// The guest powered the machine off.
    PowerOff,
    /// The guest reset the machine.
    Reset,
    /// The recorded input of `replay-input` ends the run.
    EndOfInput,
    /// The guest cannot continue: why, in a sentence.
    Crash(String),
    /// The monitor cannot continue: why, in a sentence.
    Failed(String),
    /// The trace has as many bytes as it may have. It has everything up to here.
    TraceFull,
    /// [`Machine::stop_handle`](crate::Machine::stop_handle) or the poll function stopped it.
    Interrupted,
}

impl Stop {
    /// Whether no instruction follows: the run is over, unless the machine goes back.
    pub const fn is_end(&self) -> bool {
        matches!(
            self,
            Self::Exit(_)
                | Self::PowerOff
                | Self::Reset
                | Self::EndOfInput
                | Self::Crash(_)
                | Self::Failed(_)
        )
    }

    /// The reason in one word.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Reached { .. } => "reached",
            Self::Accessed { .. } => "accessed",
            Self::Exception { .. } => "exception",
            Self::Printed => "printed",
            Self::Predicate => "predicate",
            Self::Asleep => "asleep",
            Self::Exit(_) => "exit",
            Self::PowerOff => "power-off",
            Self::Reset => "reset",
            Self::EndOfInput => "end-of-input",
            Self::Crash(_) => "crash",
            Self::Failed(_) => "failed",
            Self::TraceFull => "trace-full",
            Self::Interrupted => "interrupted",
        }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reached { cpu, address } => write!(f, "cpu {cpu} reached {address:#x}"),
            Self::Accessed {
                cpu,
                address,
                write,
            } => {
                let verb = if *write { "wrote" } else { "read" };
                write!(f, "cpu {cpu} {verb} {address:#x}")
            }
            Self::Exception { cpu, vector, .. } => {
                write!(f, "cpu {cpu} raised exception {vector}")
            }
            Self::Exit(code) => write!(f, "the guest ended the run with exit code {code}"),
            Self::Crash(text) | Self::Failed(text) => f.write_str(text),
            Self::Count => f.write_str("the instruction count is reached"),
            Self::Printed => f.write_str("the guest printed the text"),
            Self::Predicate => f.write_str("the predicate is true"),
            Self::Asleep => f.write_str("all processors are halted, and nothing wakes them"),
            Self::PowerOff => f.write_str("the guest powered the machine off"),
            Self::Reset => f.write_str("the guest reset the machine"),
            Self::EndOfInput => f.write_str("the recorded input ends the run"),
            Self::TraceFull => f.write_str("the trace is full: stop it, and start another one"),
            Self::Interrupted => f.write_str("the run was interrupted"),
        }
    }
}
