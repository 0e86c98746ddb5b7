//! The result of joining reports.

/// A joined report.
#[derive(Debug, Default)]
pub(super) struct MergedReport {
    /// The contents of the file.
    pub(super) text: String,
    /// Lines for the user.
    pub(super) remarks: Vec<String>,
    /// No shard is missing and no case failed.
    pub(super) passed: bool,
}
