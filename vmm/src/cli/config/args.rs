//! Merges the options of the command line with those of a configuration file, which they override.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches, ValueHint};
use toml::{Table, Value};

use super::file::{self, FileError};
use super::options::RunConfig;
use super::schema;

/// `--config FILE`, and all options of [`RunConfig`].
#[derive(Clone, Debug)]
pub struct ConfigArgs {
    file: Option<PathBuf>,
    /// The arguments of the command line and the environment, without defaults.
    given: ArgMatches,
}

impl ConfigArgs {
    /// The configuration: defaults, then the file, then what was given on the command line.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or is not a configuration.
    pub fn load(&self) -> Result<RunConfig, FileError> {
        let file = self.file.as_deref().map(file::read).transpose()?;
        Ok(self.apply_to(file.unwrap_or_default()))
    }

    /// Overrides options of `config` by those that were given, but not by those of their file.
    pub fn apply_to(&self, mut config: RunConfig) -> RunConfig {
        let updated = config.update_from_arg_matches(&self.given);
        updated.expect("clap parsed the same options before");
        config
    }

    /// Whether a file was named.
    pub const fn has_file(&self) -> bool {
        self.file.is_some()
    }
}

impl FromArgMatches for ConfigArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        Ok(Self {
            file: matches.get_one("config").cloned(),
            given: matches.clone(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for ConfigArgs {
    fn augment_args(command: Command) -> Command {
        let config = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .value_hint(ValueHint::FilePath)
            .value_parser(clap::value_parser!(PathBuf))
            .help(
                "TOML file with options; those on the command line override it (--FLAG=false \
                 switches a flag off)",
            );
        let defaults = schema::defaults();
        let options = schema::declared().into_iter();
        command
            .arg(config)
            .args(options.map(|arg| layered(arg, &defaults)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Makes an option fit to override a file.
///
/// Only an option that was given may have a value, so its default is no more than a part of its
/// help. A flag accepts `=false`, to switch off what the file switches on.
fn layered(arg: Arg, defaults: &Table) -> Arg {
    let default = defaults
        .get(&schema::table(&arg))
        .and_then(|table| table.get(schema::key(&arg)))
        .and_then(displayed_default);
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let arg = match default {
        Some(default) => arg.help(format!("{help} [default: {default}]")),
        None => arg,
    };
    if arg.is_positional() {
        arg.help_heading(None)
    } else if schema::is_flag(&arg) {
        arg.action(ArgAction::Set)
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
            .value_name("BOOL")
            .hide_possible_values(true)
    } else {
        arg
    }
}

/// A default as the help shows it; nothing for an empty one and for flags.
fn displayed_default(default: &Value) -> Option<String> {
    match default {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        _ => None,
    }
}
