//! Checks of the tree: documentation, names, imports, unsafe code, sizes, rules and commits.

pub mod book;
pub mod commits;
mod graph;
pub mod house;
pub mod names;
mod picture;
pub mod size;
mod source;
pub mod spec;

use std::fs;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::process::root;

/// The allow lists of the checks: xtask/checks.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    names: NameSettings,
    size: SizeSettings,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NameSettings {
    /// Words that no identifier contains.
    parts: Vec<String>,
    /// Identifiers that contain one of these texts are refused, whatever their words.
    texts: Vec<String>,
    /// Words that no identifier consists of alone.
    whole: Vec<String>,
    /// Names that no module has.
    modules: Vec<String>,
    /// Exceptions: identifiers that are allowed.
    #[serde(default)]
    allow: Vec<Allowed>,
    /// Types that may be defined more than once.
    #[serde(default)]
    duplicates: Vec<Allowed>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SizeSettings {
    /// The longest file, in lines without its tests.
    file_lines: usize,
    /// The longest function, in lines, unless it is one flat match.
    function_lines: usize,
    /// Functions and files that may be longer.
    #[serde(default)]
    allow: Vec<Allowed>,
}

/// An exception, which states its reason.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Allowed {
    /// The identifier, a word of identifiers, or the path of a file.
    name: String,
    /// The file or folder that it is limited to; everywhere if it is missing.
    path: Option<String>,
    reason: String,
}

impl Allowed {
    fn covers(&self, name: &str, path: &str) -> bool {
        self.name == name
            && self
                .path
                .as_deref()
                .is_none_or(|prefix| path.starts_with(prefix))
    }
}

fn settings() -> Result<Settings> {
    let path = root().join("xtask/checks.toml");
    let text = fs::read_to_string(&path)?;
    let settings: Settings =
        toml::from_str(&text).with_context(|| format!("{} is wrong", path.display()))?;
    let lists = [
        &settings.names.allow,
        &settings.names.duplicates,
        &settings.size.allow,
    ];
    for allowed in lists.into_iter().flatten() {
        if allowed.reason.trim().is_empty() {
            bail!("{}: '{}' has no reason", path.display(), allowed.name);
        }
    }
    Ok(settings)
}

/// Prints the findings of a check, and fails if there are any.
fn conclude(check: &str, findings: &[String]) -> Result<()> {
    for finding in findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("{check}: {} findings", findings.len());
    }
    println!("{check}: nothing found");
    Ok(())
}
