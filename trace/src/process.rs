//! What a Linux guest runs: its kernel, processes and mapped files.

use serde::{Deserialize, Serialize};

/// Bytes of the name of a task, with the zero that ends it.
const NAME_LEN: usize = 16;

/// A thread of a Linux guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LinuxTask {
    /// The thread's number; 0 for the idle threads.
    pub pid: u32,
    /// The number of its process.
    pub tgid: u32,
    /// The thread's name, filled up with zeros.
    pub comm: [u8; NAME_LEN],
}

impl LinuxTask {
    /// The thread's name. The guest chooses it; bytes that are not printable ASCII become `?`.
    pub fn name(&self) -> String {
        let name = self.comm.iter().take_while(|&&byte| byte != 0);
        let printable = name.map(|&byte| match byte {
            0x20..=0x7e => char::from(byte),
            _ => '?',
        });
        printable.collect()
    }
}

/// A function of the kernel, of a module or of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedFunction(
    /// Bytes from the base to the function.
    pub u64,
    /// The function's size in bytes; 0 if it is not known.
    pub u64,
    /// The function's name.
    pub String,
);

/// A file that a process maps as code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedMapping {
    /// The process.
    pub tgid: u32,
    /// Linear address of the first byte.
    pub start: u64,
    /// Number of bytes.
    pub len: u64,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Path of the file in the guest; `[anon]` for memory without a file.
    pub path: String,
    /// The file's build ID, in hexadecimal; empty if it is not known.
    pub build_id: String,
}

/// An event of the guest's kernel that a trace needs to name what runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessEvent {
    /// The kernel was found in guest memory.
    Kernel {
        /// The linear address to which its functions are relative.
        base: u64,
        /// The kernel's functions.
        functions: Vec<LoggedFunction>,
    },
    /// The kernel loaded a module.
    Module {
        /// The module's name.
        name: String,
        /// Linear address of its code.
        start: u64,
        /// Bytes of its code.
        len: u64,
        /// Its functions, relative to `start`.
        functions: Vec<LoggedFunction>,
    },
    /// A task has this name from now on.
    Name {
        /// The thread.
        pid: u32,
        /// Its process.
        tgid: u32,
        /// The name.
        name: String,
    },
    /// A process or a thread began.
    Fork {
        /// The process that began it.
        parent: u32,
        /// Its process; the same as `parent` for a thread.
        tgid: u32,
        /// Its own number.
        pid: u32,
    },
    /// A process begins to execute another program: its mappings end.
    Exec {
        /// The process.
        tgid: u32,
        /// Its new name.
        name: String,
    },
    /// A process mapped a file.
    Map(LoggedMapping),
    /// Functions of a file, where the guest had its symbols in memory.
    File {
        /// Path of the file in the guest.
        path: String,
        /// The file's build ID, in hexadecimal; empty if it is not known.
        build_id: String,
        /// Its functions, by the addresses at which the file is linked.
        functions: Vec<LoggedFunction>,
        /// Its segments of code: address, offset in the file, and size.
        segments: Vec<(u64, u64, u64)>,
    },
    /// The log is full: later events are not in it.
    Truncated {},
}

/// An event of the kernel with its position in the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// The vCPU.
    pub cpu: u32,
    /// Instructions that this vCPU had retired.
    pub at: u64,
    /// The machine's clock, in ticks of the TSC's frequency.
    pub ticks: u64,
    /// The event.
    pub event: ProcessEvent,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_task_is_printable() {
        let mut task = LinuxTask::default();
        task.comm[..6].copy_from_slice(b"a\x1bb\xff c");
        assert_eq!(task.name(), "a?b? c");
        task.comm = [b'x'; 16];
        assert_eq!(task.name().len(), 16);
    }
}
