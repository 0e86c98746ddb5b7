//! Reports of shards, which other machines have made.

use hindsight_vmm::cli::merge::merge;

/// Joins the reports in `text`, which are separated by NUL. The order of files must not change the
/// result.
pub fn check(text: &str) {
    let named = |(number, text): (usize, &str)| (number.to_string(), text.to_owned());
    let mut files: Vec<_> = text.split('\0').enumerate().map(named).collect();
    let joined = |files: &[_]| merge(files).map(|all| (all.text, all.passed)).ok();
    let merged = joined(&files);
    files.reverse();
    assert_eq!(merged, joined(&files), "the order of files");
}
