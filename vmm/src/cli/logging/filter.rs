//! `--log`: which messages are logged.

use std::fmt;
use std::str::FromStr;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::trace;

/// A level or a filter in the syntax of [`EnvFilter`]; the default is `warn`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter(String);

impl LogFilter {
    /// The environment variable that sets the filter where the command line does not.
    pub const VARIABLE: &'static str = "HINDSIGHT_LOG";

    /// The filter of [`LogFilter::VARIABLE`], or the default.
    ///
    /// # Errors
    ///
    /// When the variable is no filter.
    pub fn from_environment() -> Result<Self, String> {
        match std::env::var(Self::VARIABLE) {
            Ok(text) => {
                let parsed = text.parse();
                parsed.map_err(|error| format!("{} {text:?}: {error}", Self::VARIABLE))
            }
            Err(_) => Ok(Self::default()),
        }
    }

    /// The filter for a subscriber.
    pub(super) fn to_env_filter(&self) -> EnvFilter {
        EnvFilter::new(&self.0)
    }
}

impl Default for LogFilter {
    fn default() -> Self {
        Self("warn".to_owned())
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for LogFilter {
    type Err = String;

    /// An empty text is the default.
    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "off, error, warn, info, debug, trace, or a filter such as \
                                warn,msr=debug";
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        for directive in text.split(',') {
            // EnvFilter takes any other word for a target: a misspelled level would log nothing.
            let is_word = !directive.contains(['=', '[']);
            let is_target = trace::is_target(directive) || directive.starts_with("hindsight");
            let is_level = !directive.is_empty() && directive.parse::<LevelFilter>().is_ok();
            if is_word && !is_target && !is_level {
                return Err(format!(
                    "{directive:?} is neither a level nor a target: use {EXPECTED}"
                ));
            }
        }
        match EnvFilter::builder().parse(text) {
            Ok(_) => Ok(Self(text.to_owned())),
            Err(error) => Err(format!("{error}: use {EXPECTED}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_filters_are_accepted() {
        for text in [
            "off",
            "error",
            "WARN",
            "info",
            "debug",
            "trace",
            "warn,msr=debug",
            "hindsight_vmm::console=trace",
            "hindsight_vmm,info",
            "exit",
        ] {
            assert_eq!(text.parse(), Ok(LogFilter(text.to_owned())), "{text}");
        }
        assert_eq!("".parse(), Ok(LogFilter::default()));
    }

    #[test]
    fn misspelled_levels_are_refused_in_one_line() {
        for text in [
            "wran",
            "warn,msr=loud",
            "info,debg",
            "x[",
            ",",
            "=",
            "a=b=c",
        ] {
            let error = text.parse::<LogFilter>().unwrap_err();
            assert!(
                !error.contains('\n') && error.contains("use off, error"),
                "{error}"
            );
        }
    }
}
