//! The options of `hindsight trace`.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use hindsight_export::FunctionTable;
use hindsight_trace::{End, Passage, ProcessFilter, Selection, Window};

use crate::cli::config::ConfigArgs;

/// The kinds of events that are traced by default.
const EVENTS: &str = "branches,exceptions,interrupts,msr,io,mode,processes";

/// Run a guest, and write what its processors do to a trace file.
#[derive(Debug, Args)]
#[command(after_help = "\
The guest runs in the interpreter, which sees every event. The trace is what `hindsight export` reads.
A run that is killed leaves a readable file, which lacks at most its last second.

--after, --for, --from and --until select a part of the run for each vCPU by itself. When that part is
over, the run ends; with --keep-running it continues without a trace.

Exit status: that of `hindsight run`; 6 if the trace could not be written.

Examples:
  hindsight trace -o boot.trace vmlinuz --initrd initrd.gz --deterministic
  hindsight trace -o t --from main --until exception kernel.elf
  hindsight trace -o t --events msr,io --cpl 0 kernel.elf
  hindsight trace -o t --last 10M kernel.elf
  hindsight trace -o t --process sort --cpl 3 vmlinuz --initrd initrd.gz")]
pub struct TraceArgs {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    #[command(flatten)]
    pub(super) options: TraceOptions,
}

/// Options of a trace: its file, and the selection of its records.
#[derive(Debug, Args)]
#[command(next_help_heading = "Trace")]
pub struct TraceOptions {
    /// File for the trace
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(super) output: PathBuf,
    /// Events to trace: branches, calls, exceptions, interrupts, msr, io, mode (control registers and
    /// HLT), processes (of a Linux guest) and accesses (loads and stores; slow)
    #[arg(long, value_name = "KINDS", default_value = EVENTS)]
    events: String,
    /// Trace code at these privilege levels only, such as 0 or 1,2,3
    #[arg(long, value_name = "LEVELS", value_delimiter = ',')]
    cpl: Vec<u8>,
    /// Trace code in this function or these addresses only; may be repeated
    #[arg(long, value_name = "SYMBOL|A-B")]
    range: Vec<String>,
    /// Trace processes of a Linux guest with this name or number only; may be repeated
    #[arg(long, value_name = "NAME|PID")]
    process: Vec<String>,
    /// Begin when this function or address is executed, for the N-th time
    #[arg(long, value_name = "SYMBOL|ADDRESS[:N]")]
    from: Option<String>,
    /// End when this function or address is executed for the N-th time, or at the first exception
    #[arg(long, value_name = "SYMBOL|ADDRESS[:N]|exception")]
    until: Option<String>,
    /// Begin after N instructions of the run; N may have a suffix k, M or G (decimal)
    #[arg(long, value_name = "N", value_parser = count)]
    after: Option<u64>,
    /// End after N instructions of the trace
    #[arg(long = "for", value_name = "N", value_parser = count)]
    length: Option<u64>,
    /// Keep the last N events only, and write them when the run ends
    #[arg(long, value_name = "N", value_parser = count)]
    pub(super) last: Option<u64>,
    /// Continue the run after the selected part of it
    #[arg(long)]
    pub(super) keep_running: bool,
}

/// Parses a count with a decimal suffix.
pub(in crate::cli) fn count(text: &str) -> Result<u64, String> {
    let suffixes = [('k', 1_000), ('M', 1_000_000), ('G', 1_000_000_000)];
    let (digits, scale) = suffixes
        .iter()
        .find_map(|&(suffix, scale)| Some((text.strip_suffix(suffix)?, scale)))
        .unwrap_or((text, 1));
    let number = digits.parse::<u64>().ok();
    number
        .and_then(|number| number.checked_mul(scale))
        .ok_or_else(|| {
            "not a count (decimal, with a suffix k, M or G for thousands, millions or billions)"
                .to_owned()
        })
}

impl TraceOptions {
    /// A trace in `output` of the processes with these names or numbers, or of everything.
    pub(in crate::cli) fn of_processes(output: PathBuf, process: Vec<String>) -> Self {
        Self {
            output,
            events: EVENTS.to_owned(),
            cpl: Vec::new(),
            range: Vec::new(),
            process,
            from: None,
            until: None,
            after: None,
            length: None,
            last: None,
            keep_running: false,
        }
    }

    /// The selection of records. Symbols are looked up in `functions`.
    pub(super) fn selection(&self, functions: &FunctionTable) -> anyhow::Result<Selection> {
        let passage = |text: &str| passage(text, functions);
        let until = match self.until.as_deref() {
            Some("exception") => Some(End::Exception),
            Some(text) => Some(End::Passage(passage(text).context("--until")?)),
            None => None,
        };
        let from = self.from.as_deref().map(passage).transpose();
        let ranges = self.range.iter().map(|text| range(text, functions));
        Ok(Selection {
            kinds: self.events.parse().context("--events")?,
            cpls: self.levels()?,
            ranges: ranges.collect::<anyhow::Result<_>>().context("--range")?,
            processes: self.process.iter().map(|text| process(text)).collect(),
            window: Window {
                from: from.context("--from")?,
                until,
                after: self.after.unwrap_or(0),
                length: self.length,
            },
        })
    }

    fn levels(&self) -> anyhow::Result<u8> {
        let mut mask = 0;
        for &level in &self.cpl {
            if level > 3 {
                bail!("--cpl {level}: privilege levels are 0 to 3");
            }
            mask |= 1 << level;
        }
        Ok(if mask == 0 { 0xf } else { mask })
    }

    /// The options that limit the trace to a part of the run, as text for its header.
    pub(super) fn description(&self) -> String {
        let mut words = Vec::new();
        let mut add = |name: &str, value: Option<String>| {
            words.extend(value.map(|value| format!("--{name} {value}")));
        };
        let levels: Vec<_> = self.cpl.iter().map(u8::to_string).collect();
        add("cpl", (!levels.is_empty()).then(|| levels.join(",")));
        for range in &self.range {
            add("range", Some(range.clone()));
        }
        for process in &self.process {
            add("process", Some(process.clone()));
        }
        add("from", self.from.clone());
        add("until", self.until.clone());
        add("after", self.after.map(|n| n.to_string()));
        add("for", self.length.map(|n| n.to_string()));
        add("last", self.last.map(|n| n.to_string()));
        words.join(" ")
    }
}

/// Parses `SYMBOL[:N]`. A path of Rust has colons too, but no number after them.
fn passage(text: &str, functions: &FunctionTable) -> anyhow::Result<Passage> {
    let (location, nth) = match text.rsplit_once(':') {
        Some((location, digits))
            if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) =>
        {
            (location, digits.parse()?)
        }
        _ => (text, 1),
    };
    if nth == 0 {
        bail!("{text:?}: passages are counted from 1");
    }
    let (address, _) = functions.locate(location)?;
    Ok(Passage { address, nth })
}

/// Parses the name or the number of a process.
fn process(text: &str) -> ProcessFilter {
    match text.parse() {
        Ok(pid) => ProcessFilter::Pid(pid),
        // Linux keeps the first 15 bytes.
        Err(_) => ProcessFilter::Name(text.chars().take(15).collect()),
    }
}

/// Parses a function, or two addresses with a hyphen between them.
fn range(text: &str, functions: &FunctionTable) -> anyhow::Result<(u64, u64)> {
    let Some((first, last)) = text
        .split_once('-')
        .filter(|(first, _)| first.starts_with("0x"))
    else {
        return Ok(functions.locate(text)?);
    };
    let ((first, _), (_, last)) = (functions.locate(first)?, functions.locate(last)?);
    if last < first {
        bail!("{text:?} is an empty range");
    }
    Ok((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_export::Function;

    fn functions() -> FunctionTable {
        FunctionTable::new(vec![Function {
            address: 0x1000,
            size: 0x20,
            name: "kernel::main".to_owned(),
        }])
    }

    #[test]
    fn passage_is_a_location_with_an_optional_number() {
        let parse = |text| passage(text, &functions());
        let nth = |nth| Passage {
            address: 0x1000,
            nth,
        };
        assert_eq!(parse("kernel::main").unwrap(), nth(1));
        assert_eq!(parse("main:3").unwrap(), nth(3));
        assert_eq!(parse("0x1000:2").unwrap(), nth(2));
        assert!(parse("main:0").is_err());
        assert!(parse("other").is_err());
    }

    #[test]
    fn range_is_a_function_or_two_addresses() {
        let parse = |text| range(text, &functions());
        assert_eq!(parse("main").unwrap(), (0x1000, 0x101f));
        assert_eq!(parse("0x10-0x1f").unwrap(), (0x10, 0x1f));
        assert!(parse("0x20-0x10").is_err());
    }

    #[test]
    fn count_may_have_a_decimal_suffix() {
        assert_eq!(count("12k"), Ok(12_000));
        assert_eq!(count("3G"), Ok(3_000_000_000));
        assert_eq!(count("7"), Ok(7));
        assert!(count("1.5M").is_err() && count("").is_err() && count("99999999999G").is_err());
    }
}
