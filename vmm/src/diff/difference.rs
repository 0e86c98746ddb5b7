//! Values that differ between two machines, by name.

use hindsight_cpu::state::CpuState;
use serde_json::Value;

use crate::state::{PAGE, Snapshot};

/// How many differences a [`Divergence`](super::Divergence) lists at most.
pub(super) const MAX_LISTED: usize = 40;

/// A value that differs between two machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The path in the machine's state, as `cpu.0.gpr.rax`, or `memory` and an address.
    pub name: String,
    /// The value in each machine.
    pub values: [String; 2],
}

/// The first [`MAX_LISTED`] values that differ.
#[derive(Debug, Default)]
pub(super) struct DifferenceList {
    pub differences: Vec<Difference>,
    /// There are more differences than are listed.
    pub truncated: bool,
}

const GPR_NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];
const SEGMENT_NAMES: [&str; 6] = ["es", "cs", "ss", "ds", "fs", "gs"];

impl DifferenceList {
    /// Compares all of two snapshots but memory.
    pub fn of_snapshots(a: &Snapshot, b: &Snapshot) -> Self {
        let mut list = Self::default();
        list.compare(String::new(), &snapshot_tree(a), &snapshot_tree(b));
        list
    }

    /// Compares two states of a vCPU.
    pub fn of_states(a: &CpuState, b: &CpuState) -> Self {
        let tree = |state: &CpuState| serde_json::to_value(state).unwrap_or_default();
        let mut list = Self::default();
        list.compare(String::new(), &tree(a), &tree(b));
        list
    }

    /// Adds the 8-byte words of memory that differ.
    pub fn add_memory(&mut self, a: &Snapshot, b: &Snapshot) {
        const ZEROS: [u8; PAGE] = [0; PAGE];
        for gpa in a.memory.differing(&b.memory) {
            let page_a = a.memory.get(gpa).unwrap_or(&ZEROS);
            let page_b = b.memory.get(gpa).unwrap_or(&ZEROS);
            let words = page_a.chunks(8).zip(page_b.chunks(8));
            for ((word_a, word_b), address) in words.zip((gpa..).step_by(8)) {
                if word_a != word_b {
                    self.push(memory_difference(address, word_a, word_b));
                }
            }
        }
    }

    fn push(&mut self, difference: Difference) {
        if self.differences.len() < MAX_LISTED {
            self.differences.push(difference);
        } else {
            self.truncated = true;
        }
    }

    /// Compares two trees leaf by leaf; `path` is the name of their roots.
    fn compare(&mut self, path: String, a: &Value, b: &Value) {
        let child_path = |name: &str| {
            if path.is_empty() {
                name.to_owned()
            } else {
                format!("{path}.{name}")
            }
        };
        match (a, b) {
            _ if a == b => {}
            (Value::Object(map_a), Value::Object(map_b)) => {
                let only_in_b = map_b.keys().filter(|&name| !map_a.contains_key(name));
                for name in map_a.keys().chain(only_in_b) {
                    let [a, b] = [map_a, map_b].map(|map| map.get(name).unwrap_or(&Value::Null));
                    self.compare(child_path(name), a, b);
                }
            }
            (Value::Array(list_a), Value::Array(list_b)) => {
                for index in 0..list_a.len().max(list_b.len()) {
                    let [a, b] =
                        [list_a, list_b].map(|list| list.get(index).unwrap_or(&Value::Null));
                    self.compare(child_path(&element_name(&path, index)), a, b);
                }
            }
            _ => self.push(Difference {
                name: path,
                values: [a, b].map(leaf_text),
            }),
        }
    }
}

/// The state that a snapshot holds, except for memory, as a tree.
fn snapshot_tree(snapshot: &Snapshot) -> Value {
    let or_null = |value: Result<Value, serde_json::Error>| value.unwrap_or(Value::Null);
    let vcpus = snapshot.vcpus.iter().enumerate().map(|(id, vcpu)| {
        let vcpu = or_null(serde_json::to_value(vcpu));
        (id.to_string(), vcpu)
    });
    let mut tree = serde_json::Map::new();
    tree.insert("cpu".to_owned(), Value::Object(vcpus.collect()));
    let mut insert = |name: &str, part| tree.insert(name.to_owned(), or_null(part));
    insert("interrupts", serde_json::to_value(&snapshot.interrupts));
    insert("devices", serde_json::to_value(&snapshot.devices));
    insert("ticks", serde_json::to_value(snapshot.ticks));
    insert("schedule", serde_json::to_value(snapshot.schedule));
    Value::Object(tree)
}

/// The name of an element of the array at `path`: the register's, or the index.
fn element_name(path: &str, index: usize) -> String {
    let names: &[&str] = match path.rsplit('.').next() {
        Some("gpr") => &GPR_NAMES,
        Some("seg") => &SEGMENT_NAMES,
        _ => &[],
    };
    names
        .get(index)
        .map_or_else(|| index.to_string(), |&name| name.to_owned())
}

fn leaf_text(value: &Value) -> String {
    match value.as_u64() {
        Some(number) => format!("{number:#x}"),
        None if value.is_null() => "-".to_owned(),
        None => value.to_string(),
    }
}

/// A difference between bytes of memory at `address`.
pub(super) fn memory_difference(address: u64, a: &[u8], b: &[u8]) -> Difference {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Difference {
        name: format!("memory {address:#x}"),
        values: [hex(a), hex(b)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_named_in_the_path() {
        let a = CpuState::reset();
        let mut b = a.clone();
        b.gpr[15] ^= 1 << 40;
        let list = DifferenceList::of_states(&a, &b);
        let expected = Difference {
            name: "gpr.r15".to_owned(),
            values: ["0x0".to_owned(), "0x10000000000".to_owned()],
        };
        assert_eq!(list.differences, [expected]);
        assert!(!list.truncated);
    }

    #[test]
    fn list_is_truncated_at_its_limit() {
        let a = Value::from_iter(0..MAX_LISTED + 1);
        let mut list = DifferenceList::default();
        list.compare("list".to_owned(), &a, &Value::Array(Vec::new()));
        assert_eq!(list.differences.len(), MAX_LISTED);
        assert!(list.truncated);
        assert_eq!(list.differences[1].name, "list.1");
        assert_eq!(list.differences[1].values, ["0x1", "-"]);
    }
}
