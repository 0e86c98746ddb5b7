//! Snapshots with changed numbers: each is refused, or makes a machine that runs.

use std::cell::RefCell;

use hindsight_vmm::boot::{EntryMode, LoadRequest};
use hindsight_vmm::deterministic::DeterministicMachine;
use hindsight_vmm::state::{Pages, Snapshot};
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

/// What all inputs begin with.
struct Base {
    /// A snapshot in JSON, without the contents of memory, which would take most of the time.
    value: Value,
    memory: Pages,
    /// The machine that every snapshot is restored into.
    machine: RefCell<DeterministicMachine>,
}

thread_local! {
    /// A snapshot of the machine after some instructions.
    static BASE: Base = {
        let mut machine = machine(CPU, 2, &request());
        let _ = machine.run_to(1000);
        let mut snapshot = machine.save().expect("it can be saved");
        let memory = std::mem::take(&mut snapshot.memory);
        let value = serde_json::to_value(&snapshot).expect("it has a JSON form");
        let machine = RefCell::new(machine);
        Base { value, memory, machine }
    };
}

/// Finds every number and flag of `value`.
fn leaves<'a>(value: &'a mut Value, found: &mut Vec<&'a mut Value>) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| leaves(value, found)),
        Value::Object(fields) => {
            fields.values_mut().for_each(|value| leaves(value, found));
        }
        Value::Number(_) | Value::Bool(_) => found.push(value),
        Value::Null | Value::String(_) => {}
    }
}

/// Replaces numbers of the snapshot, restores it, and runs what it is.
pub fn check(changes: &[(u16, u64)]) {
    BASE.with(|base| base.check(changes));
}

impl Base {
    fn check(&self, changes: &[(u16, u64)]) {
        let mut value = self.value.clone();
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
        let Ok(mut snapshot) = serde_json::from_value::<Snapshot>(value) else {
            return;
        };
        snapshot.memory = self.memory.clone();
        let mut machine = self.machine.borrow_mut();
        if machine.restore(&snapshot).is_ok() {
            let now = machine.icount();
            let _ = machine.run_to(now.saturating_add(2000));
            drop(machine.take_outcome());
        }
    }
}
