//! Reads a configuration from a TOML file, which is untrusted input.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use super::nearest::nearest;
use super::options::RunConfig;
use super::paths::resolving_against;
use super::schema::{self, OptionInfo};
use crate::cli::read::read_text;

/// The version of the format that this program reads and writes.
pub const VERSION: i64 = 1;

/// The largest file that is read, in bytes.
const FILE_MAX: u64 = 256 << 10;

/// The longest piece of the file that a message quotes, in characters.
const QUOTE_MAX: usize = 300;

/// Why a file cannot be used as a configuration.
#[derive(Debug, Error)]
pub enum FileError {
    /// The file cannot be read, or is too large.
    #[error("--config")]
    Read(#[source] anyhow::Error),
    /// The file has no version.
    #[error("{path}: no version: begin the file with `version = {VERSION}`", path = .0.display())]
    NoVersion(PathBuf),
    /// The file has another version.
    #[error(
        "{path}: version {version} is unknown; hindsight {program} reads version {VERSION}",
        path = path.display(),
        program = env!("CARGO_PKG_VERSION")
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The file's version, as it is written.
        version: String,
    },
    /// A part of it is wrong.
    #[error("{}:{line}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The key, and what is wrong with it.
        problem: Problem,
    },
}

/// What is wrong with a part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The file is not TOML.
    Syntax(String),
    /// No option has this key.
    UnknownKey {
        /// The key, with its table.
        key: String,
        /// What was probably meant, with its table.
        suggestion: Option<String>,
    },
    /// The value does not fit the key.
    Value {
        /// The key, with its table.
        key: String,
        /// What is wrong with the value.
        message: String,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax(message) => write!(f, "not TOML: {message}"),
            Self::Value { key, message } => write!(f, "{key}: {message}"),
            Self::UnknownKey { key, suggestion } => {
                write!(f, "{key}: unknown key; ")?;
                match suggestion {
                    Some(name) => write!(f, "did you mean {name}?"),
                    None => f.write_str("`hindsight run --dump-config` lists all keys"),
                }
            }
        }
    }
}

/// Reads the configuration in the file at `path`. Relative paths in it refer to its folder.
///
/// # Errors
///
/// When the file cannot be read, or is not a configuration of this version.
pub fn read(path: &Path) -> Result<RunConfig, FileError> {
    let text = read_text("configuration", path, FILE_MAX).map_err(FileError::Read)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    resolving_against(folder, || parse(&text, path))
}

/// Parses the text of a configuration, whose relative paths stay as they are.
///
/// # Errors
///
/// When it is not a configuration of this version.
pub fn parse_text(text: &str) -> Result<RunConfig, FileError> {
    parse(text, Path::new("-"))
}

/// Parses the text of the file at `path`.
fn parse(text: &str, path: &Path) -> Result<RunConfig, FileError> {
    let content = |at: usize, problem| FileError::Content {
        path: path.to_owned(),
        line: line_of(text, at),
        problem,
    };
    let mut document = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        content(at, Problem::Syntax(quoted(error.message())))
    })?;
    check_version(document.get_mut().remove("version"), path)?;
    let deserializer = Deserializer::from(document);
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let at = error.inner().span().map_or(0, |span| span.start);
        content(at, problem(&error))
    })
}

fn check_version(version: Option<Spanned<DeValue<'_>>>, path: &Path) -> Result<(), FileError> {
    let Some(version) = version else {
        return Err(FileError::NoVersion(path.to_owned()));
    };
    match i64::deserialize(toml::de::ValueDeserializer::from(version.clone())) {
        Ok(VERSION) => Ok(()),
        Ok(other) => Err(other.to_string()),
        Err(_) => Err(format!("({})", version.get_ref().type_str())),
    }
    .map_err(|version| FileError::Version {
        path: path.to_owned(),
        version,
    })
}

/// What is wrong, from the message of serde and the path to the key.
fn problem(error: &serde_path_to_error::Error<toml::de::Error>) -> Problem {
    let path = error.path().to_string();
    let message = error.inner().message();
    let (table, key) = path.split_once('.').unwrap_or(("", &path));
    if message.starts_with("unknown field") {
        return Problem::UnknownKey {
            key: named(table, key),
            suggestion: suggestion(table, key),
        };
    }
    Problem::Value {
        key: named(table, key),
        message: plain_types(&quoted(message)),
    }
}

/// Replaces Rust's names of types, with which serde ends its messages, by those of TOML.
fn plain_types(message: &str) -> String {
    const NAMES: [(&str, &str); 4] = [
        ("expected usize", "expected a number, at least 0"),
        ("expected a boolean", "expected true or false"),
        (
            "expected a sequence",
            "expected a list, as in [\"a\", \"b\"]",
        ),
        ("expected path string", "expected a path, as a string"),
    ];
    if let Some((start, _)) = message.split_once("expected struct ") {
        return format!("{start}expected a table");
    }
    let name = NAMES.iter().find_map(|&(rust, toml)| {
        let start = message.strip_suffix(rust)?;
        Some(format!("{start}{toml}"))
    });
    name.unwrap_or_else(|| message.to_owned())
}

/// A key with its table, as messages name it.
fn named(table: &str, key: &str) -> String {
    let key = quoted(key);
    if table.is_empty() {
        key
    } else {
        format!("[{}] {key}", quoted(table))
    }
}

/// The key, or for a name outside of all tables the table, that is most similar to an unknown one.
///
/// A key of the same name in another table comes first.
fn suggestion(table: &str, key: &str) -> Option<String> {
    let options = schema::options();
    let found = |option: &OptionInfo| named(&option.table, &option.key);
    if let Some(option) = options.iter().find(|option| option.key == key) {
        return Some(found(option));
    }
    if table.is_empty() {
        let tables = options.iter().map(|option| option.table.as_str());
        if let Some(name) = nearest(key, tables) {
            return Some(format!("[{name}]"));
        }
    }
    let same_table = options.iter().filter(|option| option.table == table);
    let name = nearest(key, same_table.map(|option| option.key.as_str()))
        .or_else(|| nearest(key, options.iter().map(|option| option.key.as_str())))?;
    options.iter().find(|option| option.key == name).map(found)
}

/// A piece of the file, fit for a message of one line.
fn quoted(text: &str) -> String {
    let one_line = |c: char| if c.is_control() { ' ' } else { c };
    let mut line: String = text.chars().map(one_line).take(QUOTE_MAX).collect();
    if text.chars().nth(QUOTE_MAX).is_some() {
        line.push_str("...");
    }
    line
}

/// The line of the byte at offset `at`, from 1.
fn line_of(text: &str, at: usize) -> usize {
    let before = text.as_bytes().get(..at).unwrap_or(text.as_bytes());
    before.iter().filter(|&&byte| byte == b'\n').count() + 1
}
