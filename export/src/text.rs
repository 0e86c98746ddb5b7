//! One line of text for each record.

use std::collections::HashMap;
use std::io::Write;

use hindsight_trace::{BranchEvent, DeviceAccess, Event, Record};

use crate::error::ExportError;
use crate::input::RecordStream;
use crate::spaces::{RunningTask, SpaceId};
use crate::symbols::FunctionTable;

/// Writes the records: vCPU, count of instructions, event.
pub(crate) fn write(
    records: RecordStream<'_>,
    functions: &FunctionTable,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    let mut vcpus = HashMap::<u32, RunningTask>::new();
    for record in records.flatten() {
        let Record {
            cpu,
            at,
            ticks,
            event,
        } = record;
        let running = vcpus.entry(cpu).or_default();
        running.advance(ticks, functions);
        if let Event::Task(task) = event {
            running.switch(task, ticks, functions);
        }
        if matches!(event, Event::Time { .. }) {
            continue;
        }
        write!(out, "{cpu} {at} ")?;
        write_event(&event, (running.space, functions), out)?;
    }
    Ok(())
}

fn write_event(
    event: &Event,
    functions: (SpaceId, &FunctionTable),
    out: &mut dyn Write,
) -> std::io::Result<()> {
    match *event {
        Event::Branch(ref branch) => write_branch(branch, functions, out),
        Event::Delivery {
            vector,
            error_code,
            address,
        } => {
            write!(out, "vector {vector:#x}")?;
            if let Some(code) = error_code {
                write!(out, " error {code:#x}")?;
            }
            match address {
                Some(address) => writeln!(out, " address {address:#x}"),
                None => writeln!(out),
            }
        }
        Event::MsrRead {
            index,
            value: Some(value),
        } => writeln!(out, "rdmsr {index:#x} = {value:#x}"),
        Event::MsrRead { index, value: None } => writeln!(out, "rdmsr {index:#x} faults"),
        Event::MsrWrite {
            index,
            value,
            accepted,
        } => {
            let end = if accepted { "" } else { " faults" };
            writeln!(out, "wrmsr {index:#x} = {value:#x}{end}")
        }
        Event::Device(access) => {
            let DeviceAccess {
                address,
                size,
                value,
                ..
            } = access;
            let name = match (access.port, access.write) {
                (true, false) => "in",
                (true, true) => "out",
                (false, false) => "mmio read",
                (false, true) => "mmio write",
            };
            writeln!(out, "{name} {address:#x} {size} = {value:#x}")
        }
        Event::ControlRegister { number, value } => writeln!(out, "cr{number} = {value:#x}"),
        Event::Halt => writeln!(out, "hlt"),
        Event::Access {
            address,
            size,
            store,
        } => {
            let kind = if store { "store" } else { "load" };
            writeln!(out, "{kind} {address:#x} {size}")
        }
        Event::Task(Some(task)) => {
            writeln!(out, "task {} {} {}", task.pid, task.tgid, task.name())
        }
        Event::Task(None) => writeln!(out, "task unknown"),
        Event::Time { .. } => Ok(()),
    }
}

fn write_branch(
    branch: &BranchEvent,
    (space, functions): (SpaceId, &FunctionTable),
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let &BranchEvent {
        from,
        to,
        class,
        cpl,
        to_cpl,
        mispredicted,
    } = branch;
    let name = |at| functions.name_address_in(space, at);
    write!(out, "{} {from:#x} {to:#x} cpl {cpl}", class.short_name())?;
    if cpl != to_cpl {
        write!(out, "->{to_cpl}")?;
    }
    let missed = if mispredicted { " mispredicted" } else { "" };
    writeln!(out, "{missed} {} -> {}", name(from), name(to))
}
