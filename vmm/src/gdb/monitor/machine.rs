//! Commands that show or act on the whole machine.

use std::fmt::Write as _;

use crate::gdb::debugger::Debugger;
use crate::gdb::monitor::{Answer, MonitorError, none, number, usage};
use crate::gdb::registers::{Place, Register};
use crate::memory::page_walk;
use crate::vcpu::run_control::Outcome;
use crate::vcpu::stats::RunReport;

pub(super) fn quit(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    debugger.kill();
    Ok("the machine ends".to_owned())
}

pub(super) fn reset(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    debugger.board().run.finish(Outcome::Reset);
    Ok("the machine ends as one that was reset".to_owned())
}

pub(super) fn exits(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let mut text = String::new();
    for cpu in 0..debugger.cpus() {
        let (exits, retired) = debugger.ask(cpu, |cpu| (cpu.model().exits, cpu.retired()))?;
        let _ = write!(text, "cpu {cpu}: {exits}");
        if let Some(retired) = retired {
            let _ = write!(text, "; {retired} instructions");
        }
        text.push('\n');
    }
    Ok(text)
}

pub(super) fn stats(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let cpus = 0..debugger.cpus();
    let vcpus: Result<Vec<_>, _> = cpus
        .map(|cpu| debugger.ask(cpu, |cpu| cpu.stats()))
        .collect();
    let host_time = debugger.since.elapsed();
    Ok(RunReport::new(vcpus?, debugger.board().run.engine.stats(), host_time).to_string())
}

/// Shows registers of one kind, those that there are.
fn show(debugger: &mut Debugger, wanted: impl Fn(&Register) -> bool) -> Answer {
    let cpu = debugger.current;
    let registers: Vec<_> = debugger.layout().all().to_vec();
    let mut text = String::new();
    for register in registers {
        if !matches!(register.place, Place::Msr(_)) || !wanted(&register) {
            continue;
        }
        let value = debugger.read_register(cpu, &register)?;
        let value = value.try_into().map_or(0, u64::from_le_bytes);
        let _ = writeln!(text, "{:20} {value:#x}", register.name);
    }
    if text.is_empty() {
        text.push_str("this processor has none\n");
    }
    Ok(text)
}

pub(super) fn pmu(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    show(debugger, |register| register.group() == Some("pmu"))
}

pub(super) fn tsc(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    show(debugger, |register| register.name.starts_with("tsc"))
}

pub(super) fn inject(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    let cpu = debugger.current;
    let irq = debugger.board().buses.irq.clone();
    match arguments {
        ["nmi"] => {
            irq.inject_nmi(cpu);
            Ok(format!("an NMI waits for cpu {cpu}"))
        }
        ["irq", line] => {
            let line = number(line)?;
            let line = u32::try_from(line).ok().filter(|&line| line < 24);
            let line = line.ok_or_else(|| MonitorError::Bad("lines are 0 to 23".to_owned()))?;
            irq.set_irq(line, true);
            irq.set_irq(line, false);
            Ok(format!("line {line} was raised and lowered"))
        }
        ["smi"] if debugger.board().package.has_smm => {
            irq.inject_smi(cpu);
            Ok(format!("an SMI waits for cpu {cpu}"))
        }
        ["smi"] => Err(MonitorError::Bad(
            "this machine has no system-management mode: it needs --cpu +smm".to_owned(),
        )),
        _ => Err(usage()),
    }
}

/// Where a Linux kernel is linked to, and how far it may be moved.
const LINUX_TEXT: u64 = 0xffff_ffff_8100_0000;
const LINUX_FIRST: u64 = 0xffff_ffff_8000_0000;
const LINUX_LAST: u64 = 0xffff_ffff_c000_0000;
const LINUX_STEP: u64 = 0x20_0000;

/// What else has the kernel's symbols.
const OWN: &str = "or, with the symbols that the kernel itself has: symbol-file target:/kernel";

pub(super) fn kaslr(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let memory = debugger.board().ram.map.clone();
    let cpu = debugger.current;
    let state = debugger.state(cpu)?;
    let steps = (LINUX_LAST - LINUX_FIRST) / LINUX_STEP;
    let mut places = (0..steps).map(|step| LINUX_FIRST + step * LINUX_STEP);
    let first = places.find(|&at| page_walk::linear_to_physical(&memory, state, at).is_some());
    let text = first.filter(|_| state.is_long_mode()).ok_or_else(|| {
        MonitorError::Bad("no Linux kernel is mapped: let it boot further".to_owned())
    })?;
    if text < LINUX_TEXT {
        // The mapping may begin below the text; its link address is a multiple of 16 MiB off.
        return Ok(format!(
            "the kernel's mapping begins at {text:#x}: it is not moved\nsymbol-file vmlinux\n{OWN}"
        ));
    }
    let slide = text - LINUX_TEXT;
    Ok(format!(
        "the kernel's text is at {text:#x}\nsymbol-file vmlinux -o {slide:#x}\n{OWN}"
    ))
}

/// gdb does not expect that a command moves the guest.
const FLUSH: &str = "; now type `maintenance flush register-cache`";

pub(super) fn goto(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    if !debugger.goes_back() {
        return Err(MonitorError::Bad(
            "only a run with --deterministic can go back".to_owned(),
        ));
    }
    if let [place] = arguments {
        let place = number(place)?;
        if debugger.go_to(place)? != Some(true) {
            let end = debugger.ask(0, |cpu| cpu.retired())?.unwrap_or(0);
            return Err(MonitorError::Bad(format!(
                "the run does not get to instruction {place}; it is at its end now, instruction \
                 {end}{FLUSH}"
            )));
        }
    } else {
        none(arguments)?;
    }
    let place = debugger.ask(0, |cpu| cpu.retired())?.unwrap_or(0);
    let hint = if arguments.is_empty() { "" } else { FLUSH };
    Ok(format!("at instruction {place}{hint}"))
}
