//! The options as data, for the help, for dumped files and for messages.

use clap::{Arg, ArgAction, Args, Command};
use toml::Table;

use super::options::RunConfig;

/// One option.
#[derive(Clone, Debug)]
pub struct OptionInfo {
    /// The option's table in the file.
    pub table: String,
    /// The option's key in the table, which is its name on the command line.
    pub key: String,
    /// The help text, in one line.
    pub help: String,
    /// The words that it accepts, or a placeholder for its value.
    pub value: String,
    /// Whether the option's value is a list.
    pub is_list: bool,
    /// Whether its value is true or false.
    pub is_flag: bool,
}

/// The options as they are declared, without defaults, in the order of the help.
pub(super) fn declared() -> Vec<Arg> {
    let command = RunConfig::augment_args_for_update(Command::new("options"));
    command.get_arguments().cloned().collect()
}

/// The defaults that do not depend on other options, by table and key.
pub(super) fn defaults() -> Table {
    Table::try_from(RunConfig::default()).expect("defaults hold no path, and so can be written")
}

/// The key of `arg` in the file.
pub(super) fn key(arg: &Arg) -> String {
    arg.get_id().as_str().replace('_', "-")
}

/// The table of `arg` in the file.
pub(super) fn table(arg: &Arg) -> String {
    arg.get_help_heading()
        .unwrap_or_default()
        .to_ascii_lowercase()
}

/// Whether `arg` is a flag: written without a value on the command line.
pub(super) fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// All options, in the order of the help and of the file.
pub fn options() -> Vec<OptionInfo> {
    declared().iter().map(info).collect()
}

fn info(arg: &Arg) -> OptionInfo {
    let words: Vec<_> = arg
        .get_possible_values()
        .iter()
        .map(|value| value.get_name().to_owned())
        .collect();
    let names = arg.get_value_names().unwrap_or_default();
    let placeholder = names.first().map(ToString::to_string);
    OptionInfo {
        table: table(arg),
        key: key(arg),
        help: arg.get_help().map(ToString::to_string).unwrap_or_default(),
        value: if words.is_empty() {
            placeholder.unwrap_or_default()
        } else {
            words.join("|")
        },
        is_list: matches!(arg.get_action(), ArgAction::Append),
        is_flag: is_flag(arg),
    }
}
