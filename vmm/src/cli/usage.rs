//! Errors of the command line, in one line.

use clap::error::{ContextKind, ContextValue};

use super::foreign_options::own_option;

/// What is wrong with the arguments, in one line; `None` for help and version.
pub fn one_line(error: &clap::Error) -> Option<String> {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ")?;
    let mut parts = text.split("\n\n").map(|part| {
        let words: Vec<_> = part.split_whitespace().collect();
        words.join(" ")
    });
    let problem = parts.next()?;
    let mut hint = String::new();
    if let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg)
        && let Some(own) = own_option(option)
    {
        return Some(format!("{problem}; {own}"));
    }
    for part in parts {
        if let Some(tip) = part.strip_prefix("tip: ") {
            hint.push_str("; ");
            hint.push_str(tip);
        } else if let Some(usage) = part.strip_prefix("Usage: ") {
            hint.push_str("; usage: ");
            hint.push_str(usage);
        }
    }
    Some(format!("{problem}{hint}"))
}
