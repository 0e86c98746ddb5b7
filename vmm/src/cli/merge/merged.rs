//! The result of joining reports.

/// A joined report.
#[derive(Debug, Default)]
pub struct MergedReport {
    /// The contents of the file.
    pub text: String,
    /// Lines for the user.
    pub remarks: Vec<String>,
    /// No shard is missing and no case failed.
    pub passed: bool,
}
