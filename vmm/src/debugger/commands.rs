//! Monitor commands about the machine: devices, exits, statistics, interrupts.

use std::fmt::Write as _;

use hindsight_devices::i8042::keys::chord;
use hindsight_gdb::monitor::{no_arguments, parse_number};
use hindsight_gdb::target::{CommandError, CommandHelp, MachineCommands};

use super::irq_text::{ioapic_text, lapic_text};
use super::target::MachineTarget;
use crate::screen::TextScreen;
use crate::vcpu::run_control::Outcome;
use crate::vcpu::stats::RunReport;

const fn help(name: &'static str, arguments: &'static str, help: &'static str) -> CommandHelp {
    CommandHelp {
        name,
        arguments,
        help,
    }
}

const COMMANDS: &[CommandHelp] = &[
    help("lapic", "", "show the vCPU's local APIC"),
    help("ioapic", "", "show the I/O APIC"),
    help(
        "exits",
        "",
        "count how often each vCPU left its guest, by reason",
    ),
    help(
        "stats",
        "",
        "show speed, caches, frequent instructions and exits, as --stats does",
    ),
    help("screen", "", "show the text on the guest's screen"),
    help(
        "screendump",
        "",
        "write a picture of the screen to the file of --display FILE.png",
    ),
    help(
        "sendkey",
        "KEYS...",
        "press keys one after the other, such as h i ret ctrl-alt-delete",
    ),
    help(
        "trace",
        "start [EVENTS]|stop|status",
        "trace to the file of --trace-out, for `hindsight export` (folded: a profile, lcov: coverage)",
    ),
    help("inject", "nmi|irq LINE|smi", "raise an interrupt"),
    help("reset", "", "end the machine with the status of a reset"),
];

impl MachineCommands for MachineTarget {
    fn list(&self) -> &'static [CommandHelp] {
        COMMANDS
    }

    fn run(&mut self, name: &str, vcpu: usize, arguments: &[&str]) -> Result<String, CommandError> {
        if name == "inject" {
            let injected = self.inject(vcpu, arguments)?;
            self.request(vcpu, |vcpu| vcpu.device_changed())?;
            return Ok(injected);
        }
        if name == "trace" {
            return self.trace(arguments);
        }
        if name == "sendkey" {
            return self.sendkey(arguments);
        }
        no_arguments(arguments)?;
        match name {
            "lapic" => {
                let state = self.board.buses.irq.save();
                let lapic = state.lapics.get(vcpu);
                Ok(lapic.map_or_else(String::new, |lapic| lapic_text(vcpu, lapic)))
            }
            "ioapic" => Ok(ioapic_text(&self.board.buses.irq.save().ioapic)),
            "exits" => self.exits(),
            "screen" => TextScreen::of(&self.board)
                .map(|screen| screen.to_string())
                .map_err(|error| CommandError::Failed(error.to_string())),
            "screendump" => self.screendump(),
            "stats" => self.stats(),
            "reset" => {
                self.board.run.finish(Outcome::Reset);
                Ok("the machine ends with the status of a reset".to_owned())
            }
            _ => Err(CommandError::Usage),
        }
    }
}

impl MachineTarget {
    fn exits(&self) -> Result<String, CommandError> {
        let mut text = String::new();
        for cpu in 0..self.board.run.vcpus.cpus() {
            let (exits, retired) =
                self.request(cpu, |vcpu| (vcpu.model().exits, vcpu.retired()))?;
            let _ = write!(text, "cpu {cpu}: {exits}");
            if let Some(retired) = retired {
                let _ = write!(text, "; {retired} instructions");
            }
            text.push('\n');
        }
        Ok(text)
    }

    fn stats(&self) -> Result<String, CommandError> {
        let cpus = 0..self.board.run.vcpus.cpus();
        let vcpus: Result<Vec<_>, _> = cpus
            .map(|cpu| self.request(cpu, |vcpu| vcpu.stats()))
            .collect();
        let switches = self.board.run.engine.stats();
        let host_time = self.started.elapsed();
        Ok(RunReport::new(vcpus?, switches, host_time).to_string())
    }

    fn sendkey(&self, names: &[&str]) -> Result<String, CommandError> {
        let failed = |error: String| CommandError::Failed(error);
        if names.is_empty() {
            return Err(CommandError::Usage);
        }
        let codes = |name: &&str| {
            chord(name).ok_or_else(|| failed(format!("there is no key {name}: try a, ret or f1")))
        };
        let all: Vec<Vec<u8>> = names.iter().map(codes).collect::<Result<_, _>>()?;
        let sendkey = self.sendkey.as_ref().ok_or_else(|| {
            failed(
                "there is no keyboard: it needs --display, and --record-input in a deterministic run"
                    .to_owned(),
            )
        })?;
        for (name, codes) in names.iter().zip(all) {
            if sendkey(&codes) != codes.len() {
                return Err(failed(format!(
                    "the guest takes no key now: {name} and what follows are lost"
                )));
            }
        }
        Ok("the keys are pressed".to_owned())
    }

    fn screendump(&mut self) -> Result<String, CommandError> {
        let failed = |error: String| CommandError::Failed(error);
        let screendump = self.screendump.as_mut();
        let screendump = screendump
            .ok_or_else(|| failed("the run has no file for pictures: --display FILE.png".into()))?;
        screendump().map_err(|error| failed(format!("{error:#}")))?;
        Ok("the picture is written".to_owned())
    }

    fn inject(&self, vcpu: usize, arguments: &[&str]) -> Result<String, CommandError> {
        let irq = &self.board.buses.irq;
        match arguments {
            ["nmi"] => {
                irq.inject_nmi(vcpu);
                Ok(format!("an NMI is pending for cpu {vcpu}"))
            }
            ["irq", line] => {
                let line = u32::try_from(parse_number(line)?).ok();
                let line = line.filter(|&line| line < 24).ok_or_else(|| {
                    CommandError::Failed("there are interrupt lines 0 to 23".to_owned())
                })?;
                irq.set_irq(line, true);
                irq.set_irq(line, false);
                Ok(format!("interrupt line {line} was raised and lowered"))
            }
            ["smi"] if self.board.package.has_smm => {
                irq.inject_smi(vcpu);
                Ok(format!("an SMI is pending for cpu {vcpu}"))
            }
            ["smi"] => Err(CommandError::Failed(
                "this machine has no system-management mode: it needs --cpu +smm".to_owned(),
            )),
            _ => Err(CommandError::Usage),
        }
    }
}
