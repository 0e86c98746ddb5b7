//! The rules of spec/: their text, their list, and the places that cite them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, bail};
use xshell::cmd;

use super::book::is_heading;
use super::conclude;
use crate::process::{root, shell};

/// The page that settles doubtful rules.
const DECISIONS: &str = "docs/reports/spec-decisions.md";

/// A rule of spec/rules.tsv.
struct Rule {
    class: String,
    line: usize,
}

/// Fails when a rule lacks its text or its line in the list, or when a cited rule does not exist.
pub fn run() -> Result<()> {
    let rules = read_rules(&fs::read_to_string(root().join("spec/rules.tsv"))?)?;
    let pages = read_pages()?;
    let mut findings = compare(&rules, &pages);
    findings.extend(unknown_citations(&rules)?);
    findings.extend(unlinked_decisions(&rules, &pages)?);
    conclude("spec", &findings)
}

fn read_rules(text: &str) -> Result<BTreeMap<String, Rule>> {
    let mut rules = BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut fields = line.split('\t');
        let name = fields.next().unwrap_or_default();
        let class = fields
            .next()
            .with_context(|| format!("spec/rules.tsv:{}: no class", number + 1))?;
        let rule = Rule {
            class: class.to_owned(),
            line: number + 1,
        };
        if rules.insert(name.to_owned(), rule).is_some() {
            bail!("spec/rules.tsv:{}: {name} is listed twice", number + 1);
        }
    }
    Ok(rules)
}

/// The pages of spec/, by their names.
fn read_pages() -> Result<BTreeMap<String, String>> {
    let mut pages = BTreeMap::new();
    for entry in fs::read_dir(root().join("spec"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "md") {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            pages.insert(name, fs::read_to_string(&path)?);
        }
    }
    Ok(pages)
}

/// The sections of a page whose headings are rules: name, line, text.
fn sections(page: &str) -> Vec<(String, usize, String)> {
    let mut found: Vec<(String, usize, String)> = Vec::new();
    let mut open = false;
    for (number, line) in page.lines().enumerate() {
        if let Some(heading) = line.strip_prefix("### ").filter(|heading| is_rule(heading)) {
            found.push((heading.to_owned(), number + 1, String::new()));
            open = true;
        } else if is_heading(line) {
            open = false;
        } else if let Some(last) = found.last_mut().filter(|_| open) {
            last.2 += line;
            last.2.push('\n');
        }
    }
    found
}

/// Whether a text has the form of an identifier: `TF-09`.
fn is_rule(text: &str) -> bool {
    text.split_once('-').is_some_and(|(prefix, number)| {
        prefix.starts_with(|c: char| c.is_ascii_uppercase())
            && prefix
                .chars()
                .all(|c| c.is_ascii_uppercase() || c.is_ascii_digit())
            && number.len() == 2
            && number.chars().all(|c| c.is_ascii_digit())
    })
}

/// The rules of the list against the texts of the pages.
fn compare(rules: &BTreeMap<String, Rule>, pages: &BTreeMap<String, String>) -> Vec<String> {
    let mut findings = Vec::new();
    let mut texts: BTreeMap<String, String> = BTreeMap::new();
    for (page, text) in pages {
        for (name, line, text) in sections(text) {
            let location = format!("spec/{page}:{line}");
            if let Some(first) = texts.insert(name.clone(), location.clone()) {
                findings.push(format!("{location}: {name} has a text at {first} already"));
            }
            let Some(rule) = rules.get(&name) else {
                findings.push(format!("{location}: {name} is not in spec/rules.tsv"));
                continue;
            };
            let class = text
                .trim()
                .strip_prefix("Class ")
                .and_then(|rest| rest.split('.').next());
            if class != Some(rule.class.as_str()) {
                findings.push(format!(
                    "{location}: {name} is of class {} in spec/rules.tsv",
                    rule.class
                ));
            }
            if text.trim().len() < "Class A. It does.".len() {
                findings.push(format!("{location}: {name} has no text"));
            }
        }
    }
    for (name, rule) in rules {
        if !texts.contains_key(name) {
            findings.push(format!(
                "spec/rules.tsv:{}: {name} has no text in spec/",
                rule.line
            ));
        }
    }
    findings
}

/// The identifiers in the text that have a prefix of the rules.
fn citations<'a>(text: &'a str, prefixes: &BTreeSet<&str>) -> Vec<&'a str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let tokens = text.split(|c: char| !is_part(c));
    tokens
        .filter(|token| is_rule(token) && prefixes.contains(&token[..token.len() - 3]))
        .collect()
}

/// Rules that are cited somewhere in the repository, and do not exist.
fn unknown_citations(rules: &BTreeMap<String, Rule>) -> Result<Vec<String>> {
    let prefixes: BTreeSet<&str> = rules.keys().map(|name| &name[..name.len() - 3]).collect();
    let shell = shell()?;
    let files = cmd!(shell, "git ls-files --cached --others --exclude-standard")
        .quiet()
        .read()?;
    let mut findings = Vec::new();
    for name in files.lines() {
        // The tests of the page use rules that do not exist, and so do those of this check and the
        // worked examples.
        let invents = name.ends_with("check/spec.rs") || name == "CONTRIBUTING.md";
        if invents || name.starts_with("ci/judges/tests/") {
            continue;
        }
        let Ok(text) = fs::read_to_string(root().join(name)) else {
            continue;
        };
        for (number, line) in text.lines().enumerate() {
            for rule in citations(line, &prefixes) {
                if !rules.contains_key(rule) {
                    findings.push(format!("{name}:{}: there is no rule {rule}", number + 1));
                }
            }
        }
    }
    Ok(findings)
}

/// Rules that [`DECISIONS`] settles, and whose text does not link to it.
fn unlinked_decisions(
    rules: &BTreeMap<String, Rule>,
    pages: &BTreeMap<String, String>,
) -> Result<Vec<String>> {
    let prefixes: BTreeSet<&str> = rules.keys().map(|name| &name[..name.len() - 3]).collect();
    let page = fs::read_to_string(root().join(DECISIONS))?;
    let mut settled = BTreeSet::new();
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let first = line.split('|').nth(1).unwrap_or_default();
        settled.extend(citations(first, &prefixes).into_iter().map(String::from));
    }
    let mut findings = Vec::new();
    for (page, text) in pages {
        for (name, line, text) in sections(text) {
            if settled.contains(&name) && !text.contains("spec-decisions.md") {
                findings.push(format!(
                    "spec/{page}:{line}: {name} does not link to its decision in {DECISIONS}"
                ));
            }
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(text: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("page.md".to_owned(), text.to_owned())])
    }

    #[test]
    fn complete_rule_has_no_finding() {
        let rules = read_rules("# comment\nTF-01\tA\tsteps\n").unwrap();
        let page = "# Page\n\n### TF-01\n\nClass A. It steps once.\n\n## Next\n";
        assert_eq!(compare(&rules, &pages(page)), Vec::<String>::new());
    }

    #[test]
    fn rule_without_text_and_text_without_rule_are_found() {
        let rules = read_rules("TF-01\tA\tsteps\n").unwrap();
        let found = compare(&rules, &pages("### TF-02\n\nClass A. It steps once.\n"));
        assert_eq!(
            found,
            [
                "spec/page.md:1: TF-02 is not in spec/rules.tsv",
                "spec/rules.tsv:1: TF-01 has no text in spec/"
            ]
        );
    }

    #[test]
    fn line_that_begins_with_an_exception_is_text() {
        let found = sections("### TF-01\n\nClass A. It raises\n#PF and more.\n# Next\nother\n");
        assert_eq!(found[0].2, "\nClass A. It raises\n#PF and more.\n");
    }

    #[test]
    fn other_class_is_found() {
        let rules = read_rules("TF-01\tM\tsteps\n").unwrap();
        let found = compare(&rules, &pages("### TF-01\n\nClass A. It steps once.\n"));
        assert_eq!(
            found,
            ["spec/page.md:1: TF-01 is of class M in spec/rules.tsv"]
        );
    }

    #[test]
    fn citation_needs_a_known_prefix_and_two_digits() {
        let prefixes = BTreeSet::from(["TF", "D6"]);
        let text = "TF-01, (D6-02) XX-01 TF-001 TF-1 UTF-16 \"TF-03\"";
        assert_eq!(citations(text, &prefixes), ["TF-01", "D6-02", "TF-03"]);
    }
}
