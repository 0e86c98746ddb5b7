//! Starts the log and the trace of this process.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;
use tracing::Level;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;
use tracing_subscriber::util::SubscriberInitExt;

use super::filter::LogFilter;
use super::format::{LogLine, TraceLine};
use super::lazy_file::LazyFile;
use super::trace::TraceSpec;
use crate::output::RunOutputs;

/// What is logged and traced, and where to.
#[derive(Clone, Debug, Default)]
pub struct LogSettings {
    /// Which messages are logged.
    pub filter: LogFilter,
    /// The file of the log; `None` is standard error.
    pub file: Option<PathBuf>,
    /// Which events are traced; `None` is none.
    pub trace: Option<TraceSpec>,
    /// The outputs of the run, to which the files and the trace belong.
    pub outputs: RunOutputs,
}

/// The log and trace of this process, after they were started.
#[derive(Debug)]
pub struct Logging {
    log_file: Option<LazyFile>,
    trace_file: Option<LazyFile>,
}

type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;

impl Logging {
    /// Starts the log and the trace; a process does so once. Files are created when the first line
    /// is written, or by [`Logging::open_files`].
    pub fn start(settings: &LogSettings) -> Self {
        let lazy = |option: &str, path: PathBuf| {
            let output = settings
                .outputs
                .output(format!("{option} {}", path.display()));
            LazyFile::new(path, output)
        };
        let log_file = settings.file.clone();
        let log_file = log_file.map(|path| lazy("--log-file", path));
        let trace_file = settings.trace.as_ref().and_then(|trace| trace.file.clone());
        let trace_file = trace_file.map(|path| lazy("--trace", path));
        let layers = layers(settings, log_file.clone(), trace_file.clone());
        // A second start in one process leaves the first one as it is.
        let _ = tracing_subscriber::registry().with(layers).try_init();
        Self {
            log_file,
            trace_file,
        }
    }

    /// As [`Logging::start`], with what the environment sets.
    ///
    /// # Errors
    ///
    /// When the environment variable is no filter.
    pub fn start_from_environment() -> anyhow::Result<Self> {
        let filter = LogFilter::from_environment().map_err(anyhow::Error::msg)?;
        Ok(Self::start(&LogSettings {
            filter,
            ..LogSettings::default()
        }))
    }

    /// Creates the files.
    ///
    /// # Errors
    ///
    /// When one cannot be written.
    pub fn open_files(&self) -> anyhow::Result<()> {
        for (option, file) in [
            ("--log-file", &self.log_file),
            ("--trace", &self.trace_file),
        ] {
            if let Some(file) = file {
                let path = file.path().display();
                file.open()
                    .with_context(|| format!("{option}: {path} cannot be written"))?;
            }
        }
        Ok(())
    }

    /// Logs why the command fails, if the log is a file: standard error gets it as the last line.
    pub fn log_failure(&self, error: &anyhow::Error) {
        if self.log_file.is_some() {
            tracing::error!("{error:#}");
        }
    }

    /// Reports `text` to the user on standard error, and if the log is a file there at `level` too.
    pub fn report(&self, level: Level, text: &str) {
        let _ = writeln!(io::stderr(), "hindsight: {text}");
        if self.log_file.is_none() {
            return;
        }
        match level {
            Level::ERROR => tracing::error!("{text}"),
            Level::WARN => tracing::warn!("{text}"),
            _ => tracing::info!("{text}"),
        }
    }
}

/// Returns the layers of the log and, if there is one, of the trace.
///
/// An event that no layer records costs one comparison.
fn layers(
    settings: &LogSettings,
    log_file: Option<LazyFile>,
    trace_file: Option<LazyFile>,
) -> Vec<BoxedLayer> {
    let mut layers = vec![log_layer(&settings.filter, log_file)];
    if let Some(trace) = &settings.trace {
        layers.push(trace_layer(trace, trace_file, &settings.outputs));
    }
    layers
}

fn log_layer(filter: &LogFilter, file: Option<LazyFile>) -> BoxedLayer {
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        // The subscriber reports lost lines by a macro that panics when standard error is closed.
        .log_internal_errors(false);
    let filter = filter.to_env_filter();
    match file {
        // With time, level and target, for tools.
        Some(file) => layer.with_writer(file).with_filter(filter).boxed(),
        None => layer
            .event_format(LogLine)
            .with_writer(io::stderr)
            .with_filter(filter)
            .boxed(),
    }
}

fn trace_layer(trace: &TraceSpec, file: Option<LazyFile>, outputs: &RunOutputs) -> BoxedLayer {
    let layer = tracing_subscriber::fmt::layer()
        .event_format(TraceLine)
        .with_ansi(false)
        .log_internal_errors(false);
    let filter = trace.targets();
    match file {
        Some(file) => layer.with_writer(file).with_filter(filter).boxed(),
        None => {
            let output = outputs.output("--trace on standard error");
            let stderr = move || output.clone().writer(io::stderr());
            layer.with_writer(stderr).with_filter(filter).boxed()
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing::Subscriber;
    use tracing_subscriber::filter::LevelFilter;

    use super::*;

    fn most_verbose(settings: &LogSettings) -> Option<LevelFilter> {
        let subscriber = tracing_subscriber::registry().with(layers(settings, None, None));
        subscriber.max_level_hint()
    }

    #[test]
    fn events_of_the_run_loop_are_off_unless_requested() {
        let default = LogSettings::default();
        assert_eq!(most_verbose(&default), Some(LevelFilter::WARN));
        let trace = LogSettings {
            trace: Some("exit".parse().unwrap()),
            ..LogSettings::default()
        };
        assert_eq!(most_verbose(&trace), Some(LevelFilter::TRACE));
        let log = LogSettings {
            filter: "debug".parse().unwrap(),
            ..LogSettings::default()
        };
        assert_eq!(most_verbose(&log), Some(LevelFilter::DEBUG));
    }
}
