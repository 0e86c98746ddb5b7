//! The table of commands, and running one of them.

use std::fmt::Write as _;

use super::command::{CommandReply, MonitorCommand, failed};
use super::{
    branches, descriptors, disassembly, kaslr, machine, paging, registers, settings, stops,
};
use crate::debugger::Debugger;
use crate::target::{CommandError, CommandHelp};

const COMMANDS: &[MonitorCommand] = &[
    MonitorCommand::new(
        "help",
        "[COMMAND]",
        "list the commands, or explain one",
        help,
    ),
    MonitorCommand::new(
        "regs",
        "[system|msr|lbr|pmu]",
        "show the vCPU's registers, or those of a group",
        registers::regs,
    ),
    MonitorCommand::new(
        "msr",
        "INDEX|NAME [VALUE]",
        "read or write an MSR, as RDMSR and WRMSR do",
        registers::msr,
    ),
    MonitorCommand::new(
        "pt",
        "ADDRESS",
        "walk the page tables to an address",
        paging::pt,
    ),
    MonitorCommand::new("tlb", "", "list what the page tables map", paging::tlb),
    MonitorCommand::new("mem", "", "list the machine's RAM", machine::mem),
    MonitorCommand::new("gdt", "", "list the segment descriptors", descriptors::gdt),
    MonitorCommand::new("idt", "", "list the interrupt gates", descriptors::idt),
    MonitorCommand::new("lbr", "", "show the last branch records", branches::lbr),
    MonitorCommand::new("bts", "", "show the branch trace store", branches::bts),
    MonitorCommand::new("pmu", "", "show the performance counters", registers::pmu),
    MonitorCommand::new("tsc", "", "show the time-stamp counter", registers::tsc),
    MonitorCommand::new(
        "disas",
        "[ADDRESS [COUNT]]",
        "disassemble code of the vCPU's mode",
        disassembly::disas,
    ),
    MonitorCommand::new(
        "mode",
        "x86_64|i386|i8086",
        "show the registers of this kind of code",
        settings::mode,
    ),
    MonitorCommand::new(
        "phys",
        "on|off",
        "read and write memory by guest-physical address",
        settings::phys,
    ),
    MonitorCommand::new(
        "step-irq",
        "on|off",
        "let steps enter the handlers of interrupts",
        settings::step_irq,
    ),
    MonitorCommand::new(
        "catch",
        "[exception [#PF..]|msr [INDEX..]|cr N..|off]",
        "stop at exceptions, and at writes to MSRs and control registers",
        stops::catch,
    ),
    MonitorCommand::new(
        "watch-io",
        "[PORT[-PORT] [r|w|rw]|off]",
        "stop at accesses to I/O ports",
        stops::watch_io,
    ),
    MonitorCommand::new(
        "kaslr",
        "",
        "find the Linux kernel, and print the command that loads its symbols",
        kaslr::kaslr,
    ),
    MonitorCommand::new(
        "goto",
        "[N]",
        "go to instruction N of a deterministic run, or print the current one",
        machine::goto,
    ),
    MonitorCommand::new("quit", "", "end the machine", machine::quit),
];

/// Runs a command line, and returns the text for the user.
pub(crate) fn run(debugger: &mut Debugger, line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (name, arguments) = words.split_first().unwrap_or((&"help", &[]));
    let own = COMMANDS.iter().find(|command| command.help.name == *name);
    let (help, reply) = match own {
        Some(command) => (command.help, (command.run)(debugger, arguments)),
        None => match run_of_machine(debugger, name, arguments) {
            Some(found) => found,
            None => return format!("{name}: no such command; `monitor help` lists them\n"),
        },
    };
    match reply {
        Ok(text) if text.is_empty() || text.ends_with('\n') => text,
        Ok(text) => text + "\n",
        Err(CommandError::Usage) => format!("usage: monitor {}\n", help.usage()),
        Err(error) => format!("{name}: {error}\n"),
    }
}

/// Runs a command of the machine; `None` if it has no such command.
fn run_of_machine(
    debugger: &mut Debugger,
    name: &str,
    arguments: &[&str],
) -> Option<(CommandHelp, CommandReply)> {
    let vcpu = debugger.selected;
    let commands = debugger.target().commands()?;
    let help = commands.list().iter().find(|help| help.name == name)?;
    Some((*help, commands.run(name, vcpu, arguments)))
}

/// All commands: those of the server, then those of the machine.
fn all(debugger: &mut Debugger) -> Vec<CommandHelp> {
    let own = COMMANDS.iter().map(|command| command.help);
    let machine = debugger.target().commands();
    let machine = machine.map_or(&[][..], |commands| commands.list());
    own.chain(machine.iter().copied()).collect()
}

fn help(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let all = all(debugger);
    match arguments {
        [] => {
            let mut text = String::new();
            for command in all {
                let _ = writeln!(text, "{:44} {}", command.usage(), command.help);
            }
            Ok(text)
        }
        [name] => {
            let found = all.iter().find(|command| command.name == *name);
            let found = found
                .ok_or_else(|| failed(format!("no command {name}; `monitor help` lists them")))?;
            Ok(format!("monitor {}: {}", found.usage(), found.help))
        }
        _ => Err(CommandError::Usage),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_unique_name_and_a_line_of_help() {
        let mut names: Vec<_> = COMMANDS.iter().map(|command| command.help.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), COMMANDS.len());
        for MonitorCommand { help, .. } in COMMANDS {
            let text = help.help;
            assert!(!text.is_empty() && !text.contains('\n'), "{}", help.name);
        }
    }
}
