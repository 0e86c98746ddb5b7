//! Console backends, and their names on the command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

/// Where console output goes, and where input comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// `stdio`: standard output and input.
    Stdio,
    /// `none`: output is dropped.
    None,
    /// `file:PATH`: a file, created or truncated; no input.
    File(PathBuf),
    /// `unix:PATH`: a listening socket for one client at a time.
    Unix(PathBuf),
}

/// Why the name of a backend is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ParseBackendError {
    /// The text names no backend.
    #[error("unknown console {0:?}: use stdio, none, file:PATH or unix:PATH")]
    Unknown(String),
    /// No path follows the colon.
    #[error("console {0:?} needs a path, as in {0}PATH")]
    NoPath(String),
}

impl FromStr for Backend {
    type Err = ParseBackendError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "stdio" => Ok(Self::Stdio),
            None if text == "none" => Ok(Self::None),
            Some(("file" | "unix", "")) => Err(ParseBackendError::NoPath(text.to_owned())),
            Some(("file", path)) => Ok(Self::File(path.into())),
            Some(("unix", path)) => Ok(Self::Unix(path.into())),
            _ => Err(ParseBackendError::Unknown(text.to_owned())),
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdio => f.write_str("stdio"),
            Self::None => f.write_str("none"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backend_names_print_as_they_parse() {
        for (text, backend) in [
            ("stdio", Backend::Stdio),
            ("none", Backend::None),
            ("file:/tmp/a:b", Backend::File("/tmp/a:b".into())),
            ("unix:s", Backend::Unix("s".into())),
        ] {
            assert_eq!(text.parse(), Ok(backend.clone()), "{text}");
            assert_eq!(backend.to_string(), text);
        }
    }

    #[test]
    fn bad_backend_names_are_refused_in_one_line() {
        for (text, message) in [
            (
                "",
                r#"unknown console "": use stdio, none, file:PATH or unix:PATH"#,
            ),
            (
                "tcp:1",
                r#"unknown console "tcp:1": use stdio, none, file:PATH or unix:PATH"#,
            ),
            (
                "stdio:",
                r#"unknown console "stdio:": use stdio, none, file:PATH or unix:PATH"#,
            ),
            (
                "file",
                r#"unknown console "file": use stdio, none, file:PATH or unix:PATH"#,
            ),
            ("unix:", r#"console "unix:" needs a path, as in unix:PATH"#),
        ] {
            assert_eq!(text.parse::<Backend>().unwrap_err().to_string(), message);
        }
    }
}
