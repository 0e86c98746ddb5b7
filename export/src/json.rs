//! A JSON object for each record, one a line.

use std::collections::HashMap;
use std::io::{self, Write};

use hindsight_trace::{BranchEvent, Event};
use serde_json::{Map, Value, json};

use crate::error::ExportError;
use crate::input::RecordStream;
use crate::spaces::{RunningTask, SpaceId};
use crate::symbols::FunctionTable;

/// Writes the records. Addresses are strings in hexadecimal, since JSON's numbers lose digits.
pub(crate) fn write(
    records: RecordStream<'_>,
    functions: &FunctionTable,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    let mut vcpus = HashMap::<u32, RunningTask>::new();
    for record in records.flatten() {
        let running = vcpus.entry(record.cpu).or_default();
        running.advance(record.ticks, functions);
        if let Event::Task(task) = record.event {
            running.switch(task, record.ticks, functions);
        }
        if matches!(record.event, Event::Time { .. }) {
            continue;
        }
        let mut object = event(&record.event, (running.space, functions));
        object.insert("cpu".to_owned(), record.cpu.into());
        object.insert("at".to_owned(), record.at.into());
        object.insert("ticks".to_owned(), record.ticks.into());
        serde_json::to_writer(&mut *out, &object).map_err(io::Error::from)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

fn hex(value: u64) -> String {
    format!("{value:#x}")
}

fn event(event: &Event, functions: (SpaceId, &FunctionTable)) -> Map<String, Value> {
    let value = match *event {
        Event::Branch(ref taken) => branch(taken, functions),
        Event::Delivery {
            vector,
            error_code,
            address,
        } => json!({
            "event": "delivery",
            "vector": vector,
            "error_code": error_code,
            "address": address.map(hex),
        }),
        Event::MsrRead { index, value } => json!({
            "event": "rdmsr",
            "index": hex(index.into()),
            "value": value.map(hex),
        }),
        Event::MsrWrite {
            index,
            value,
            accepted,
        } => json!({
            "event": "wrmsr",
            "index": hex(index.into()),
            "value": hex(value),
            "accepted": accepted,
        }),
        Event::Device(access) => json!({
            "event": match (access.port, access.write) {
                (true, false) => "in",
                (true, true) => "out",
                (false, false) => "mmio_read",
                (false, true) => "mmio_write",
            },
            "address": hex(access.address),
            "size": access.size,
            "value": hex(access.value),
        }),
        Event::ControlRegister { number, value } => {
            json!({"event": "control_register", "number": number, "value": hex(value)})
        }
        Event::Halt => json!({"event": "hlt"}),
        Event::Access {
            address,
            size,
            store,
        } => {
            json!({"event": if store { "store" } else { "load" }, "address": hex(address), "size": size})
        }
        Event::Task(Some(task)) => {
            json!({"event": "task", "pid": task.pid, "tgid": task.tgid, "name": task.name()})
        }
        Event::Task(None) => json!({"event": "task", "pid": null, "tgid": null, "name": null}),
        Event::Time { .. } => Value::Null,
    };
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}

fn branch(branch: &BranchEvent, (space, functions): (SpaceId, &FunctionTable)) -> Value {
    let symbol = |at| {
        let index = functions.index_in(space, at)?;
        functions.get(index).map(|function| &function.name)
    };
    json!({
        "event": "branch",
        "class": branch.class.short_name(),
        "from": hex(branch.from),
        "to": hex(branch.to),
        "from_symbol": symbol(branch.from),
        "to_symbol": symbol(branch.to),
        "cpl": branch.cpl,
        "to_cpl": branch.to_cpl,
        "mispredicted": branch.mispredicted,
    })
}
