//! Writes a configuration as a TOML file that explains itself.

use std::fmt::Write;

use toml::{Table, Value};

use super::file::VERSION;
use super::options::RunConfig;
use super::schema::{self, OptionInfo};

/// Columns of the file's comments.
const WIDTH: usize = 100;

/// Writes `config` as a file with which `--config` makes the same run.
///
/// It contains every option with its help; one without a value is a comment. Paths are absolute.
///
/// # Errors
///
/// When a path is not UTF-8, as TOML requires.
pub fn dump(config: &RunConfig) -> Result<String, toml::ser::Error> {
    let values = Table::try_from(config)?;
    let mut text = format!(
        "# Options of `hindsight run`, for --config. A line that begins with # has no effect.\n\
         # Relative paths refer to the folder of this file.\n\
         version = {VERSION}\n"
    );
    let mut table = String::new();
    for option in schema::options() {
        if option.table != table {
            table.clone_from(&option.table);
            push(&mut text, &format!("\n[{table}]\n"));
        }
        for line in wrapped(&option.help, WIDTH - 2) {
            push(&mut text, &format!("# {line}\n"));
        }
        let value = values.get(&table).and_then(|keys| keys.get(&option.key));
        push(&mut text, &assignment(&option, value));
    }
    Ok(text)
}

fn push(text: &mut String, line: &str) {
    text.write_str(line)
        .expect("writing to a String cannot fail");
}

fn assignment(option: &OptionInfo, value: Option<&Value>) -> String {
    let OptionInfo { key, value: of, .. } = option;
    match value {
        Some(value) => format!("{key} = {value}\n"),
        None => format!("# {key} = \"{of}\"\n"),
    }
}

/// Breaks `text` into lines of at most `width` columns, at its spaces.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
