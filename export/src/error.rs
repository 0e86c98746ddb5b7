//! Why an export fails.

use std::io;

use hindsight_trace::TraceError;
use thiserror::Error;

/// Why a trace cannot be exported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The trace cannot be read.
    #[error("the trace cannot be read")]
    Trace(#[from] TraceError),
    /// The output cannot be written.
    #[error("the output cannot be written")]
    Output(#[from] io::Error),
    /// The trace lacks branches.
    #[error(
        "this format needs all branches: trace with --events branches, without --cpl and --range"
    )]
    NotContiguous,
    /// There is no image.
    #[error("this format needs the guest's ELF image with its symbols: use --symbols")]
    NoImage,
    /// The image has no usable debug information.
    #[error(
        "the image has no debug information that can be read: build it with debug = true or -g"
    )]
    NoLines(#[source] gimli::Error),
    /// The image is not ELF, or is damaged.
    #[error("the image cannot be read")]
    Image(#[from] object::Error),
}
