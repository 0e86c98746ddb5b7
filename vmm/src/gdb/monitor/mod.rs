//! The commands behind gdb's `monitor`.
//!
//! Each is a row of [`COMMANDS`]: its name, its arguments, what it does, and the function. An error
//! is one line.

mod branches;
mod irq;
mod machine;
mod settings;
mod state;
mod stops;
mod tables;

use std::fmt::Write as _;

use thiserror::Error;

use crate::gdb::debugger::{DebugError, Debugger};

/// Why a command did nothing.
#[derive(Debug, Error)]
enum MonitorError {
    /// The arguments are not those of the command.
    #[error("usage: {0}")]
    Usage(String),
    /// An argument is no number.
    #[error("{0} is not a number (decimal, or hexadecimal with 0x)")]
    NotANumber(String),
    /// Something else is wrong with it.
    #[error("{0}")]
    Bad(String),
    /// The machine did not do it.
    #[error(transparent)]
    Debug(#[from] DebugError),
}

type Answer = Result<String, MonitorError>;

/// A command.
struct Command {
    name: &'static str,
    arguments: &'static str,
    help: &'static str,
    run: fn(&mut Debugger, &[&str]) -> Answer,
}

impl Command {
    fn usage(&self) -> String {
        match self.arguments {
            "" => self.name.to_owned(),
            arguments => format!("{} {arguments}", self.name),
        }
    }
}

const fn command(
    name: &'static str,
    arguments: &'static str,
    help: &'static str,
    run: fn(&mut Debugger, &[&str]) -> Answer,
) -> Command {
    Command {
        name,
        arguments,
        help,
        run,
    }
}

const COMMANDS: &[Command] = &[
    command("help", "[COMMAND]", "what there is", help),
    command(
        "regs",
        "[system|msr|lbr|pmu]",
        "the processor's whole state, or its registers of a group",
        state::regs,
    ),
    command(
        "msr",
        "INDEX|NAME [VALUE]",
        "read or write an MSR, as RDMSR and WRMSR do",
        state::msr,
    ),
    command("pt", "ADDRESS", "walk the page tables", tables::pt),
    command("tlb", "", "what the page tables map", tables::tlb),
    command("mem", "", "the machine's memory", tables::mem),
    command("gdt", "", "the segment descriptors", tables::gdt),
    command("idt", "", "the interrupt gates", tables::idt),
    command("lapic", "", "the processor's local APIC", irq::lapic),
    command("ioapic", "", "the I/O APIC", irq::ioapic),
    command("lbr", "", "the last branch records", branches::lbr),
    command("bts", "", "the branch trace store", branches::bts),
    command("pmu", "", "the performance counters", machine::pmu),
    command("tsc", "", "the time-stamp counter", machine::tsc),
    command(
        "exits",
        "",
        "how often each processor left its guest, and why",
        machine::exits,
    ),
    command(
        "stats",
        "",
        "speed, caches, frequent instructions and exits, as --stats",
        machine::stats,
    ),
    command(
        "disas",
        "[ADDRESS [COUNT]]",
        "instructions, in the processor's mode",
        tables::disas,
    ),
    command(
        "mode",
        "x86_64|i386|i8086",
        "registers as code of this kind has them",
        settings::mode,
    ),
    command(
        "phys",
        "on|off",
        "addresses that gdb reads and writes are physical",
        settings::phys,
    ),
    command(
        "step-irq",
        "on|off",
        "stepping enters handlers of interrupts",
        settings::step_irq,
    ),
    command(
        "catch",
        "[exception [#PF..]|msr [INDEX..]|cr N..|off]",
        "stop at exceptions and writes to MSRs and control registers",
        stops::catch,
    ),
    command(
        "watch-io",
        "[PORT[-PORT] [r|w|rw]|off]",
        "stop at accesses to ports",
        stops::watch_io,
    ),
    command(
        "inject",
        "nmi|irq LINE|smi",
        "raise an interrupt",
        machine::inject,
    ),
    command(
        "kaslr",
        "",
        "where Linux put its kernel, for `symbol-file`",
        machine::kaslr,
    ),
    command(
        "goto",
        "[N]",
        "go to instruction N of a deterministic run, or say where it is",
        machine::goto,
    ),
    command(
        "reset",
        "",
        "end the machine as one that was reset",
        machine::reset,
    ),
    command("quit", "", "end the machine", machine::quit),
];

/// Runs a command line and gives what the user reads.
pub(super) fn run(debugger: &mut Debugger, line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let Some((name, arguments)) = words.split_first() else {
        return run(debugger, "help");
    };
    let mut matching = COMMANDS.iter().filter(|command| command.name == *name);
    let Some(command) = matching.next() else {
        return format!("{name}: no such command; `monitor help` lists them\n");
    };
    match (command.run)(debugger, arguments) {
        Ok(text) if text.is_empty() || text.ends_with('\n') => text,
        Ok(text) => text + "\n",
        Err(MonitorError::Usage(_)) => format!("usage: monitor {}\n", command.usage()),
        Err(error) => format!("{name}: {error}\n"),
    }
}

/// A command without arguments.
fn none(arguments: &[&str]) -> Result<(), MonitorError> {
    if arguments.is_empty() {
        Ok(())
    } else {
        Err(usage())
    }
}

fn usage() -> MonitorError {
    MonitorError::Usage(String::new())
}

fn help(_: &mut Debugger, arguments: &[&str]) -> Answer {
    if let [name] = arguments {
        let found = COMMANDS.iter().find(|command| command.name == *name);
        let found = found.ok_or_else(|| MonitorError::Bad(format!("{name}: no such command")))?;
        return Ok(format!("monitor {}: {}", found.usage(), found.help));
    }
    let mut text = String::new();
    for command in COMMANDS {
        let _ = writeln!(text, "{:44} {}", command.usage(), command.help);
    }
    Ok(text)
}

/// A number in decimal, or in hexadecimal with 0x.
fn number(text: &str) -> Result<u64, MonitorError> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| MonitorError::NotANumber(text.to_owned()))
}

/// `on` or `off`.
fn switch(arguments: &[&str]) -> Result<Option<bool>, MonitorError> {
    match arguments {
        [] => Ok(None),
        ["on"] => Ok(Some(true)),
        ["off"] => Ok(Some(false)),
        _ => Err(usage()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_command_has_help() {
        let mut names: Vec<_> = COMMANDS.iter().map(|command| command.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), COMMANDS.len());
        assert!(COMMANDS.iter().all(|command| !command.help.is_empty()));
    }
}
