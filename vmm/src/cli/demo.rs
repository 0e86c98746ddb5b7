//! The command `hindsight demo`.

use std::env;
use std::io::{self, BufWriter, IsTerminal, Write};

use super::Status;
use super::config::EngineArg;
use super::logging::Logging;
use crate::demo::draw::{self, Fact, TerminalStyle};
use crate::demo::guest::{self, DemoError};
use crate::demo::story::{Story, nanoseconds};
use crate::machine::start;
use crate::probe::report::HostInfo;
use crate::vcpu::engine::Engine;
use crate::vcpu::engine::policy::Preference;

/// Columns of the drawing, where neither a terminal nor $COLUMNS has a number.
const WIDTH: usize = 80;
/// The least and the most columns of the drawing.
const WIDTHS: (usize, usize) = (40, 120);

/// Run a built-in guest and draw what it did.
///
/// The guest computes, takes exceptions and accesses MSRs.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The width of the drawing is that of the terminal, or $COLUMNS. NO_COLOR switches colours off.

Exit status: 0 the guest ran to its end, 2 nothing ran, 4 the guest failed, 6 the monitor failed.

Examples:
  hindsight demo
  hindsight demo --engine interp --plain > demo.txt")]
pub struct DemoArgs {
    /// Use ASCII only, and no colours
    #[arg(long)]
    plain: bool,
    /// Engine that executes the guest: KVM, the interpreter, or the better one for this host
    #[arg(long, value_enum, default_value_t)]
    engine: EngineArg,
}

/// Runs the command.
///
/// # Errors
///
/// When KVM cannot be used, or standard output cannot be written.
pub fn run(args: &DemoArgs) -> anyhow::Result<Status> {
    Logging::start_from_environment()?;
    // The demo shows one engine: the machine never changes it.
    let start::StartDecision { decision, host, .. } =
        start::decide(args.engine.into(), Preference::default())?;
    let run = match guest::run(decision.engine, host.as_ref()) {
        Ok(run) => run,
        Err(error @ DemoError::Machine(_)) => {
            let _ = writeln!(io::stderr(), "hindsight: {:#}", anyhow::Error::from(error));
            return Ok(Status::Internal);
        }
        Err(error) => return Err(error.into()),
    };
    let status = if run.problem.is_some() {
        Status::GuestCrash
    } else {
        Status::Success
    };
    let host = host_facts(&HostInfo::here());
    let image_len = run.image_len;
    let story = Story::of(run);
    let facts: Vec<Fact> = host
        .into_iter()
        .chain(guest_facts(&story, image_len, decision.engine))
        .collect();
    match print(&draw_lines(&story, &facts, args.plain)) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(status),
    }
}

fn draw_lines(story: &Story, facts: &[Fact], plain: bool) -> Vec<String> {
    let style = terminal_style(plain);
    let lines = draw::draw(story, facts, style);
    lines.iter().map(|l| l.render(style).to_string()).collect()
}

fn print(lines: &[String]) -> io::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    for line in lines {
        writeln!(out, "{line}")?;
    }
    out.flush()
}

/// Returns what standard output can display.
fn terminal_style(plain: bool) -> TerminalStyle {
    let stdout = io::stdout();
    let terminal = stdout.is_terminal();
    let set = |name: &str| env::var_os(name).is_some_and(|value| !value.is_empty());
    let dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
    let columns = env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    let of_terminal = || {
        let size = rustix::termios::tcgetwinsize(&stdout).ok();
        size.map(|size| usize::from(size.ws_col))
            .filter(|columns| terminal && *columns > 0)
    };
    let width: usize = columns.or_else(of_terminal).unwrap_or(WIDTH);
    TerminalStyle {
        colour: terminal && !plain && !dumb && !set("NO_COLOR"),
        unicode: terminal && !plain && !dumb && is_utf8(|name| env::var(name).ok()),
        width: width.clamp(WIDTHS.0, WIDTHS.1),
    }
}

/// Whether the locale's character set is UTF-8, as POSIX finds it.
fn is_utf8(variable: impl Fn(&str) -> Option<String>) -> bool {
    ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .filter_map(variable)
        .find(|value| !value.is_empty())
        .is_some_and(|value| {
            let value = value.to_ascii_lowercase();
            value.contains("utf-8") || value.contains("utf8")
        })
}

fn printable(text: &str) -> String {
    let words: Vec<_> = text.split_ascii_whitespace().collect();
    words
        .join(" ")
        .chars()
        .filter(|c| c.is_ascii_graphic() || *c == ' ')
        .collect()
}

fn host_facts(host: &HostInfo) -> Vec<Fact> {
    let model = host.cpu_model.replace("(R)", "").replace("(TM)", "");
    vec![
        ("host", printable(&model)),
        ("kernel", printable(&host.kernel)),
        ("KVM", printable(&host.modules.join(", "))),
    ]
}

fn guest_facts(story: &Story, image_len: usize, engine: Engine) -> Vec<Fact> {
    let engine = match engine {
        Engine::Kvm => "KVM",
        Engine::Interp => "the interpreter",
    };
    let mut facts = vec![
        ("runs by", engine.to_owned()),
        ("machine", "skylake-server".to_owned()),
        ("memory", format!("{} MiB", guest::MEMORY >> 20)),
        (
            "guest",
            format!("ELF by PVH, {} KiB", image_len.div_ceil(1024)),
        ),
        ("ran", draw::time(nanoseconds(story.end, story.hz))),
    ];
    if let Some(picture) = &story.picture {
        let samples = match picture.samples {
            1 => "1 sample a pixel".to_owned(),
            samples => format!("{samples} samples a pixel"),
        };
        facts.push(("picture", samples));
    }
    for (name, value) in &story.results {
        let name = match name.split_once(',') {
            Some((short, _)) => short,
            None => name,
        };
        let fact = ("found", format!("{value} {name}"));
        if !facts.contains(&fact) {
            facts.push(fact);
        }
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_locale_variable_that_is_set_decides() {
        let with = |pairs: &'static [(&str, &str)]| {
            is_utf8(|name| {
                let pair = pairs.iter().find(|pair| pair.0 == name);
                pair.map(|pair| pair.1.to_owned())
            })
        };
        assert!(with(&[("LANG", "C.UTF-8")]));
        assert!(with(&[("LC_ALL", ""), ("LC_CTYPE", "en_US.utf8")]));
        assert!(!with(&[("LC_ALL", "C"), ("LANG", "C.UTF-8")]));
        assert!(!with(&[]));
    }

    #[test]
    fn host_facts_are_printable() {
        let host = HostInfo {
            cpu_model: "Intel(R)  Xeon(R)\x1b[1m CPU".to_owned(),
            ..HostInfo::default()
        };
        assert_eq!(host_facts(&host)[0].1, "Intel Xeon[1m CPU");
    }

    #[test]
    fn equal_results_of_both_rings_are_one_fact() {
        let story = Story {
            results: vec![
                ("primes, ring 0".to_owned(), 95),
                ("primes, ring 3".to_owned(), 95),
            ],
            ..Story::default()
        };
        let facts = guest_facts(&story, 1, Engine::Kvm);
        assert_eq!(facts.iter().filter(|fact| fact.0 == "found").count(), 1);
    }
}
