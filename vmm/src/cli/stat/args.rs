//! The options of `hindsight stat`.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use hindsight_export::FunctionTable;

use crate::cli::config::ConfigArgs;
use crate::vcpu::run_counter::{CountOptions, FunctionRegion, NAMES};

/// Count exactly what a guest does, and compare it with an earlier run.
#[derive(Debug, Args)]
#[command(after_help = "\
The run is deterministic, so that the counts are the same every time and on every host. A region has
the counts of all executions of a function, with what it calls, or of what the guest does between
two writes to a port. Cache levels and mispredictions, with --caches, are those of the models.

Exit status:
  0      the guest ran to its end; with --baseline, nothing increased too much
  1      a count is above --max-increase
  2      nothing ran: bad options, a bad image, or something that the host lacks
  4, 6   the guest crashed, the monitor failed
  124    --timeout passed

Examples:
  hindsight stat kernel.elf
  hindsight stat --region parse --region main::render -o now.json kernel.elf
  hindsight stat --baseline base.json --max-increase 0.5% kernel.elf")]
pub struct StatArgs {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    #[command(flatten)]
    pub(super) options: StatOptions,
}

/// Options of `hindsight stat`: the counts and their comparison.
#[derive(Debug, Args)]
#[command(next_help_heading = "Statistics")]
pub struct StatOptions {
    /// Write the counts to FILE, as JSON
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(super) output: Option<PathBuf>,
    /// Count executions of this function as a region of their own; may be repeated
    #[arg(long, value_name = "SYMBOL|ADDRESS")]
    region: Vec<String>,
    /// Port to which the guest writes the number of a region that begins, or 0 for its end
    #[arg(long, value_name = "PORT", value_parser = port)]
    region_port: Option<u16>,
    /// Count loads, stores, cache accesses and mispredictions too: several times slower
    #[arg(long)]
    pub(super) caches: bool,
    /// Show the N functions with the most instructions
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(super) functions: usize,
    /// Show the N processes of a Linux guest with the most instructions
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(super) processes: usize,
    /// Compare with the counts that --output wrote to FILE
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(super) baseline: Option<PathBuf>,
    /// Fail if a compared count is more than this above the baseline, such as 0.5% or 1000
    #[arg(
        long,
        value_name = "LIMIT",
        default_value = "0%",
        requires = "baseline"
    )]
    pub(super) max_increase: String,
    /// Counts to compare, in the whole run and in each region
    #[arg(
        long,
        value_name = "COUNTS",
        value_delimiter = ',',
        default_value = "instructions"
    )]
    pub(super) compare: Vec<String>,
    /// Run as `hindsight run` does, with the host's time: the counts then differ from run to run
    #[arg(long)]
    pub(super) live: bool,
}

/// Parses a port number.
fn port(text: &str) -> Result<u16, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u16::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    parsed.ok_or_else(|| "not a port number (decimal, or hexadecimal with 0x)".to_owned())
}

impl StatOptions {
    /// The counts to make, for a guest with these functions.
    pub(super) fn counting(&self, functions: &FunctionTable) -> anyhow::Result<CountOptions> {
        let regions = self.region.iter().map(|name| {
            let (address, _) = functions.locate(name).context("--region")?;
            Ok(FunctionRegion {
                name: name.clone(),
                address,
            })
        });
        Ok(CountOptions {
            models: self.caches,
            functions: regions.collect::<anyhow::Result<_>>()?,
            region_port: self.region_port,
        })
    }

    /// Checks the names of `--compare` before the run.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        for name in &self.compare {
            if !NAMES.contains(&name.as_str()) {
                bail!("--compare {name}: the counts are {}", NAMES.join(", "));
            }
        }
        Ok(())
    }
}
