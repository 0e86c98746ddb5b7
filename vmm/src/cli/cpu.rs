//! `hindsight cpu`: lists, shows and compares the processor models of `--cpu`.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use anyhow::bail;
use clap::{Args, Subcommand};
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::model::{CpuModel, ModelDefinition};

use super::Status;
use super::config::nearest;

/// Column of the values in `show` and `diff`.
const KEY_WIDTH: usize = 20;

/// List, show and compare the processor models of --cpu.
#[derive(Debug, Args)]
#[command(
    disable_help_subcommand = true,
    after_help = "\
Examples:
  hindsight cpu list
  hindsight cpu show skylake-server
  hindsight cpu diff skylake-server portable-v1
  hindsight run kernel.elf --cpu skylake-server,-pebs"
)]
pub struct CpuArgs {
    #[command(subcommand)]
    command: CpuCommand,
}

#[derive(Debug, Subcommand)]
enum CpuCommand {
    /// List the models, one a line
    #[command(after_help = "Examples:\n  hindsight cpu list")]
    List,
    /// Show what the processors of a model have
    #[command(after_help = "Examples:\n  hindsight cpu show skylake-server")]
    Show {
        /// The model
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Show in what two models differ: - for the first one, + for the second one
    #[command(after_help = "Examples:\n  hindsight cpu diff skylake-server portable-v1")]
    Diff {
        /// The first model
        #[arg(value_name = "A")]
        a: String,
        /// The second model
        #[arg(value_name = "B")]
        b: String,
    },
}

/// Prints what the subcommand asks for.
///
/// # Errors
///
/// When a model does not exist, or standard output cannot be written.
pub fn run(args: &CpuArgs) -> anyhow::Result<Status> {
    let text = match &args.command {
        CpuCommand::List => list(),
        CpuCommand::Show { name } => show(parse(name)?),
        CpuCommand::Diff { a, b } => diff(parse(a)?, parse(b)?),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(Status::Success)
}

fn parse(name: &str) -> anyhow::Result<CpuModel> {
    if let Some(model) = CpuModel::from_name(name) {
        return Ok(model);
    }
    let quoted: String = name.chars().take(40).flat_map(char::escape_debug).collect();
    match nearest(name, CpuModel::all().map(CpuModel::name)) {
        Some(near) => bail!("no processor model `{quoted}`: did you mean `{near}`?"),
        None => bail!("no processor model `{quoted}`: `hindsight cpu list` lists all"),
    }
}

fn list() -> String {
    let mut text = String::new();
    for model in CpuModel::all() {
        let definition = model.definition();
        let summary = match model {
            CpuModel::Host => "the host's processor, with the facilities of skylake-server",
            _ => &definition.summary,
        };
        let _ = writeln!(text, "{:15} {:9} {summary}", model.name(), identity(model));
    }
    text
}

/// Family, model and stepping, as tables of the manual write them.
fn identity(model: CpuModel) -> String {
    if model == CpuModel::Host {
        return "-".to_owned();
    }
    let (family, model, stepping) = model.definition().identity();
    format!("{family:02X}_{model:02X}H/{stepping}")
}

/// The properties of a model that have one value each.
fn properties(model: CpuModel) -> Vec<(&'static str, String)> {
    let definition = model.definition();
    let ModelDefinition { lbr, perfmon, .. } = definition;
    let has = |on: bool| if on { "yes" } else { "no" }.to_owned();
    let all = definition.facilities;
    let capabilities = definition.perf_capabilities(all).unwrap_or(0);
    vec![
        ("signature", identity(model)),
        ("brand", definition.brand.clone()),
        ("highest CPUID leaf", format!("{:#x}", definition.max_leaf)),
        ("reference clock", format!("{} Hz", definition.reference_hz)),
        ("PERF_CAPABILITIES", format!("{capabilities:#x}")),
        ("LBR format", lbr.format.to_string()),
        ("LBR entries", lbr.depth.to_string()),
        ("LBR call stack", has(lbr.call_stack)),
        ("LBR TSX flags", has(lbr.tsx_flags)),
        ("LBR filter", has(lbr.select)),
        ("PEBS format", definition.pebs.format.to_string()),
        ("PEBS counters", definition.pebs.counters.to_string()),
        ("perfmon version", perfmon.version.to_string()),
        ("counters", definition.gp_counters(all).to_string()),
        ("fixed counters", perfmon.fixed_counters.to_string()),
        ("counter bits", perfmon.counter_bits.to_string()),
        ("full-width writes", has(perfmon.full_width_writes)),
    ]
}

/// The properties of a model that are sets of names.
fn sets(model: CpuModel) -> [(&'static str, Vec<String>); 4] {
    let definition = model.definition();
    let words = |text: String| text.split(' ').map(str::to_owned).collect();
    let facilities = |set: Facilities| set.names().into_iter().map(str::to_owned).collect();
    let events = definition.events.iter().map(|row| {
        let (event, umask) = row.select;
        format!("{event:02x}/{umask:02x}={}", row.name)
    });
    [
        ("features", words(definition.features.to_string())),
        ("facilities", facilities(definition.facilities)),
        ("options", facilities(definition.options)),
        ("events", events.collect()),
    ]
}

fn show(model: CpuModel) -> String {
    let mut text = format!("{}\n", model.name());
    for (key, value) in properties(model) {
        let _ = writeln!(text, "  {key:KEY_WIDTH$} {value}");
    }
    for (key, names) in sets(model) {
        push_names(&mut text, "  ", key, &names);
    }
    text
}

/// Adds lines with as many of `names` as fit a terminal.
fn push_names(text: &mut String, margin: &str, key: &str, names: &[String]) {
    const WIDTH: usize = 100;
    let mut line = format!("{margin}{key:KEY_WIDTH$}");
    for name in names {
        if line.len() + 1 + name.len() > WIDTH {
            let _ = writeln!(text, "{line}");
            line = format!("{margin}{:KEY_WIDTH$}", "");
        }
        line.push(' ');
        line.push_str(name);
    }
    let _ = writeln!(text, "{line}");
}

fn diff(a: CpuModel, b: CpuModel) -> String {
    let mut text = String::new();
    for ((key, old), (_, new)) in properties(a).into_iter().zip(properties(b)) {
        if old != new {
            let _ = writeln!(text, "- {key:KEY_WIDTH$} {old}\n+ {key:KEY_WIDTH$} {new}");
        }
    }
    for ((key, old), (_, new)) in sets(a).into_iter().zip(sets(b)) {
        for (margin, from, others) in [("- ", &old, &new), ("+ ", &new, &old)] {
            let only = from.iter().filter(|name| !others.contains(name));
            let only: Vec<_> = only.cloned().collect();
            if !only.is_empty() {
                push_names(&mut text, margin, key, &only);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_a_line_for_every_model() {
        let text = list();
        assert_eq!(text.lines().count(), CpuModel::all().count());
        let first = text.lines().next().unwrap();
        assert!(first.starts_with("skylake-server  06_55H/4 "), "{first}");
    }

    #[test]
    fn show_names_formats_and_features_within_a_terminal() {
        let text = show(CpuModel::SkylakeServer);
        for part in [
            "  LBR entries          32\n",
            " avx512vl ",
            "c4/02=BR_INST_RETIRED",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    }

    #[test]
    fn diff_has_only_what_differs() {
        assert_eq!(diff(CpuModel::SkylakeServer, CpuModel::SkylakeServer), "");
        let text = diff(CpuModel::SkylakeServer, CpuModel::PortableV1);
        assert!(text.contains("\n- features             sse3 "), "{text}");
        assert!(!text.contains("LBR"), "{text}");
    }

    #[test]
    fn unknown_model_is_refused_with_the_nearest_name() {
        let error = |name| parse(name).unwrap_err().to_string();
        let expected = "no processor model `skylake-servr`: did you mean `skylake-server`?";
        assert_eq!(error("skylake-servr"), expected);
        let expected = "no processor model `q\\n`: `hindsight cpu list` lists all";
        assert_eq!(error("q\n"), expected);
    }
}
