//! Checks the documentation: the table of contents of the book, and the links of all pages.
//!
//! `docs/` is a book for mdBook. mdBook builds only the pages that docs/SUMMARY.md names, and
//! copies only files inside of `docs/`: a page that is not listed, or a link that leaves the
//! folder, works in the repository and is broken in the book.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};
use xshell::cmd;

use super::{conclude, source};
use crate::process::{root, shell};

/// The table of contents.
const SUMMARY: &str = "docs/SUMMARY.md";

/// The page of worked examples.
const EXAMPLES: &str = "CONTRIBUTING.md";

/// Fails when the table of contents and the pages differ, when a link of any page leads nowhere,
/// when a merge left a conflict in a page, or when a diff of the worked examples no longer applies.
pub fn run() -> Result<()> {
    let mut pages = BTreeMap::new();
    for path in source::files("md")? {
        let text = fs::read_to_string(root().join(&path))?;
        pages.insert(path, text);
    }
    let summary = pages
        .get(SUMMARY)
        .with_context(|| format!("{SUMMARY} is missing"))?;
    let mut findings = compare_summary(summary, pages.keys().map(String::as_str));
    for (path, text) in &pages {
        findings.extend(broken_links(path, text)?);
        findings.extend(merge_conflicts(path, text));
    }
    let examples = pages.get(EXAMPLES).map_or("", String::as_str);
    findings.extend(stale_examples(examples)?);
    conclude("book", &findings)
}

/// Compares the pages of the book with its table of contents; returns the differences.
fn compare_summary<'a>(summary: &str, pages: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut listed = BTreeSet::new();
    let mut findings = Vec::new();
    for (number, link) in links(summary) {
        if !listed.insert(format!("docs/{link}")) {
            findings.push(format!("{SUMMARY}:{number}: {link} is listed twice"));
        }
    }
    let pages = pages.filter(|path| path.starts_with("docs/") && *path != SUMMARY);
    let missing = pages.filter(|path| !listed.contains(*path));
    findings.extend(missing.map(|path| format!("{path}: {SUMMARY} does not list this page")));
    findings
}

/// Returns the links of a page that lead to no file or heading, or from the book out of it.
fn broken_links(path: &str, text: &str) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    let folder = Path::new(path).parent().unwrap_or(Path::new(""));
    for (number, link) in links(text) {
        let (file, heading) = link.split_once('#').unwrap_or((link, ""));
        let target = match file {
            "" => PathBuf::from(path),
            _ => normalize(&folder.join(file)),
        };
        if path.starts_with("docs/") && !target.starts_with("docs") {
            findings.push(format!(
                "{path}:{number}: the link {link} leaves the book; name the file as code instead"
            ));
        } else if !exists(&target, heading)? {
            findings.push(format!("{path}:{number}: the link {link} leads nowhere"));
        }
    }
    Ok(findings)
}

/// The lines of a page with which git begins or ends a conflict of a merge.
fn merge_conflicts(path: &str, text: &str) -> Vec<String> {
    let lines = text.lines().zip(1..);
    lines
        .filter(|(line, _)| line.starts_with("<<<<<<< ") || line.starts_with(">>>>>>> "))
        .map(|(_, number)| format!("{path}:{number}: a conflict of a merge"))
        .collect()
}

/// The fenced diffs of a page, with the lines at which they begin.
fn diffs(page: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (number, line) in page.lines().enumerate() {
        match &mut open {
            None if line == "```diff" => open = Some((number + 1, String::new())),
            None => {}
            Some(_) if line == "```" => found.extend(open.take()),
            Some((_, text)) => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    found
}

/// The diffs of the worked examples that do not apply to the checkout.
fn stale_examples(page: &str) -> Result<Vec<String>> {
    let shell = shell()?;
    let mut findings = Vec::new();
    for (line, diff) in diffs(page) {
        let apply = cmd!(shell, "git apply --check -").quiet().stdin(diff);
        let output = apply.ignore_status().output()?;
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr);
            let error = error.lines().next().unwrap_or_default();
            findings.push(format!(
                "{EXAMPLES}:{line}: the diff does not apply: {error}; \
                 copy the lines that it changes from the file, as they are now"
            ));
        }
    }
    Ok(findings)
}

/// Whether the file or folder exists and, unless `heading` is empty, has that heading.
fn exists(target: &Path, heading: &str) -> Result<bool> {
    let path = root().join(target);
    if heading.is_empty() || !path.is_file() {
        return Ok(heading.is_empty() && path.exists());
    }
    Ok(anchors(&String::from_utf8_lossy(&fs::read(path)?)).contains(heading))
}

/// Resolves `..` without following symbolic links, as a browser does.
fn normalize(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir if result.file_name().is_some() => {
                result.pop();
            }
            Component::CurDir => {}
            other => result.push(other),
        }
    }
    result
}

/// The relative links of a page outside of code blocks, with their lines.
fn links(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    let lines = page.lines().enumerate().filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    });
    lines.flat_map(|(number, line)| {
        let targets = line.split("](").skip(1);
        let targets = targets.filter_map(|rest| rest.split(')').next());
        let relative = targets.filter(|link| !link.contains("://") && !link.starts_with("mailto:"));
        relative.map(move |link| (number + 1, link))
    })
}

/// The anchors of a page's headings.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| is_heading(line));
    headings
        .map(|line| anchor(line.trim_start_matches('#').trim()))
        .collect()
}

/// Whether a line is a heading; one that begins with `#PF` is none.
pub fn is_heading(line: &str) -> bool {
    line.starts_with('#') && line.trim_start_matches('#').starts_with(' ')
}

/// The anchor of a heading, as GitHub and mdBook make it.
fn anchor(heading: &str) -> String {
    let allowed = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    allowed
        .map(|c| match c {
            ' ' => '-',
            c => c.to_ascii_lowercase(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflict_of_a_merge_is_found() {
        let page = "a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> main\n";
        let expected = [
            "page.md:2: a conflict of a merge",
            "page.md:6: a conflict of a merge",
        ];
        assert_eq!(merge_conflicts("page.md", page), expected);
    }

    #[test]
    fn anchor_drops_punctuation() {
        assert_eq!(anchor("QEMU 7.2, TCG"), "qemu-72-tcg");
        assert_eq!(anchor("3. CPUID"), "3-cpuid");
    }

    #[test]
    fn page_that_the_summary_lacks_is_found() {
        let summary = "# Book\n\n- [A](guide/a.md)\n- [B](guide/a.md)\n";
        let pages = [
            "README.md",
            "docs/SUMMARY.md",
            "docs/guide/a.md",
            "docs/guide/b.md",
        ];
        assert_eq!(
            compare_summary(summary, pages.into_iter()),
            [
                "docs/SUMMARY.md:4: guide/a.md is listed twice",
                "docs/guide/b.md: docs/SUMMARY.md does not list this page"
            ]
        );
    }

    #[test]
    fn link_to_no_file_and_link_out_of_the_book_are_found() {
        let page = "[a](nothing.md) [b](https://example.org)\n```\n[c](code.md)\n```\n[d](../../README.md)\n";
        assert_eq!(
            broken_links("docs/guide/page.md", page).unwrap(),
            [
                "docs/guide/page.md:1: the link nothing.md leads nowhere",
                "docs/guide/page.md:5: the link ../../README.md leaves the book; name the file as code instead"
            ]
        );
    }

    #[test]
    fn diffs_are_the_fenced_blocks_of_that_kind() {
        let page = "text\n```diff\n--- a/x\n+++ b/x\n```\n```\nother\n```\n";
        assert_eq!(diffs(page), [(2, "--- a/x\n+++ b/x\n".to_owned())]);
    }

    #[test]
    fn diff_of_another_text_is_found() {
        let page = "```diff\n--- a/LICENSE-MIT\n+++ b/LICENSE-MIT\n@@ -1,1 +1,1 @@\n-no such line\n+new\n```\n";
        let found = stale_examples(page).unwrap();
        assert!(
            found[0].starts_with("CONTRIBUTING.md:1: the diff does not apply"),
            "{found:?}"
        );
    }

    #[test]
    fn link_to_no_heading_is_found() {
        let found = broken_links(
            "README.md",
            "[a](#licence)\n[b](README.md#no-such-heading)\n",
        );
        assert_eq!(
            found.unwrap(),
            ["README.md:2: the link README.md#no-such-heading leads nowhere"]
        );
    }
}
