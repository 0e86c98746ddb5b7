//! Snapshots with changed numbers: each is refused, or makes a machine that runs.

use std::sync::OnceLock;

use hindsight_vmm::boot::{EntryMode, LoadRequest};
use hindsight_vmm::state::Snapshot;
use serde_json::{Value, json};

use crate::guest::machine;

/// The processor of the machine.
const CPU: &str = "portable-v1";
/// A guest of 64-bit code: it counts in memory, and writes to a port.
const IMAGE: [u8; 12] = [
    0xff, 0x04, 0x25, 0x00, 0x00, 0x18, 0x00, // inc dword [0x180000]
    0xe6, 0x80, // out 0x80, al
    0xeb, 0xf5, // jmp to the start
    0x90,
];

fn request() -> LoadRequest<'static> {
    LoadRequest {
        image: &IMAGE,
        mode: Some(EntryMode::Long),
        ..LoadRequest::default()
    }
}

/// A snapshot of the machine after some instructions.
fn base() -> &'static Value {
    static BASE: OnceLock<Value> = OnceLock::new();
    BASE.get_or_init(|| {
        let mut machine = machine(CPU, 2, &request());
        let _ = machine.run_to(1000);
        let snapshot = machine.save().expect("it can be saved");
        serde_json::to_value(&snapshot).expect("it has a JSON form")
    })
}

/// Calls `change` for every number and flag of `value`, but not for the contents of memory.
fn leaves<'a>(value: &'a mut Value, found: &mut Vec<&'a mut Value>) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| leaves(value, found)),
        Value::Object(fields) => {
            for (name, value) in fields.iter_mut() {
                if name != "memory" {
                    leaves(value, found);
                }
            }
        }
        Value::Number(_) | Value::Bool(_) => found.push(value),
        Value::Null | Value::String(_) => {}
    }
}

/// Replaces numbers of the snapshot, restores it, and runs what it is.
pub fn check(changes: &[(u16, u64)]) {
    let mut value = base().clone();
    let mut found = Vec::new();
    leaves(&mut value, &mut found);
    for &(index, number) in changes.iter().take(8) {
        let count = found.len();
        let leaf = &mut found[usize::from(index) % count];
        **leaf = match **leaf {
            Value::Bool(_) => json!(number & 1 != 0),
            _ => json!(number),
        };
    }
    let Ok(snapshot) = serde_json::from_value::<Snapshot>(value) else {
        return;
    };
    let mut machine = machine(CPU, 2, &request());
    if machine.restore(&snapshot).is_ok() {
        let now = machine.icount();
        let _ = machine.run_to(now.saturating_add(2000));
        drop(machine.take_outcome());
    }
}
