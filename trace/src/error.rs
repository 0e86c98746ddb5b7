//! What can be wrong with a trace file.

use std::io;

use thiserror::Error;

/// Why a trace file cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The host failed to read or write the file.
    #[error("the trace file cannot be accessed")]
    Io(#[from] io::Error),
    /// The file does not begin like a trace.
    #[error("not a trace file of hindsight")]
    Magic,
    /// The file was written by a newer program.
    #[error("trace format {found} is newer than this program, which reads up to {supported}")]
    Version {
        /// The version of the file.
        found: u32,
        /// The newest version that this program reads.
        supported: u32,
    },
    /// The header is damaged, so that nothing else can be interpreted.
    #[error("the header of the trace file is damaged: {0}")]
    Header(&'static str),
    /// The header is intact, but does not describe a trace.
    #[error("the header of the trace file is not a description of a trace")]
    Description(#[source] serde_json::Error),
    /// A block is damaged.
    #[error("the block at offset {offset:#x} of the trace file is damaged: {problem}")]
    Block {
        /// Where the block begins in the file.
        offset: u64,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The thread that writes the file could not be started.
    #[error("the thread that writes the trace cannot be started")]
    Thread(#[source] io::Error),
}
