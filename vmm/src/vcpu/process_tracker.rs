//! Reads what a Linux guest runs, at the calls of the kernel that report it to `perf`.
//!
//! The kernel is searched for when a vCPU sets its entry of system calls, early in the boot. Then
//! the vCPUs stop at a few of its functions. The guest's memory is untrusted, and so is every name.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use hindsight_cpu::state::{CpuState, gpr};
use hindsight_cpu::stops::{MsrStops, StopConditions};
use hindsight_export::{ElfCode, Function};
use hindsight_gdb::kernel::{KernelSymbol, KernelTask, LinuxKernel, ModuleFunction};
use hindsight_gdb::memory::LinearMemory;
use hindsight_regs::msr as regs;
use hindsight_trace::{Event, LinuxTask, LoggedFunction, LoggedMapping, ProcessEvent};
use vm_memory::GuestMemoryMmap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::kernel_search::{KERNEL_HALF, SEARCHES_MAX, SearchedMemory};
use crate::memory::MachineMemory;
use crate::sync::lock;

/// Bytes from the start of a file that show whether it has changed.
const FILE_START: u64 = 4096;
/// How many files are read, and held in memory. A file that has changed is read again.
const FILES_MAX: usize = 4096;
/// Maximum number of functions of all files.
const FUNCTIONS_MAX: usize = 2 << 20;
/// Maximum number of bytes of the names of these functions.
const NAME_BYTES_MAX: usize = 128 << 20;
/// Maximum number of names of tasks.
const NAMES_MAX: usize = 1 << 20;

/// A function of the kernel whose calls report what runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hook {
    /// `__switch_to(prev, next)`: the vCPU switches to a task.
    Switch,
    /// `perf_event_comm(task, exec)`: a task has a new name, perhaps of a new program.
    Name,
    /// `perf_event_mmap(vma)`: a process maps memory.
    Map,
    /// `perf_event_fork(task)`: a task begins.
    Fork,
    /// `do_init_module(module)`: a module is loaded.
    Module,
}

/// The functions that are hooked.
const HOOKS: [(&str, Hook); 4] = [
    ("__switch_to", Hook::Switch),
    ("perf_event_comm", Hook::Name),
    ("perf_event_mmap", Hook::Map),
    ("perf_event_fork", Hook::Fork),
];

/// A function that not every kernel has.
const MODULE_HOOK: (&str, Hook) = ("do_init_module", Hook::Module);

/// What a vCPU traces after a stop.
#[derive(Debug, Default)]
pub(crate) struct TrackedEvents {
    /// Records of the process log.
    pub(crate) log: Vec<ProcessEvent>,
    /// The task that runs from here on.
    pub(crate) task: Option<Event>,
    /// The stop conditions of the vCPU change.
    pub(crate) found: bool,
}

/// The identity and the path of a file.
type TrackedFileKey = (u64, String);

/// The files that were read.
#[derive(Debug, Default)]
struct TrackedFiles {
    /// The hash of the start and the size of each file, and its build ID.
    files: HashMap<TrackedFileKey, (Option<u64>, String)>,
    reads: usize,
}

impl TrackedFiles {
    /// The build ID of a file, if it was read and has not changed since.
    fn build_id(&self, key: &TrackedFileKey, version: Option<u64>) -> Option<&str> {
        let (known, build_id) = self.files.get(key)?;
        // The start of a file may have left the page cache.
        let is_same = version.is_none() || *known == version;
        is_same.then_some(build_id)
    }

    fn contains(&self, key: &TrackedFileKey) -> bool {
        self.files.contains_key(key)
    }

    /// Whether another file may be read.
    const fn count_read(&mut self) -> bool {
        self.reads += 1;
        self.reads <= FILES_MAX
    }

    fn insert(&mut self, key: TrackedFileKey, version: Option<u64>, build_id: String) {
        if self.files.len() < FILES_MAX || self.files.contains_key(&key) {
            self.files.insert(key, (version, build_id));
        }
    }
}

/// A kernel, and what was read of it.
#[derive(Debug)]
struct TrackedKernel {
    kernel: LinuxKernel,
    hooks: Vec<(u64, Hook)>,
    files: TrackedFiles,
    /// Functions of files and modules that are in the log, and the bytes of their names.
    functions: usize,
    name_bytes: usize,
    /// The names of tasks that are in the log.
    names: HashSet<LinuxTask>,
}

#[derive(Debug, Default)]
struct Tracked {
    searches: u32,
    kernel: Option<TrackedKernel>,
}

/// Reads what a Linux guest runs; shared by its vCPUs.
#[derive(Debug)]
pub struct ProcessTracker {
    memory: MachineMemory,
    /// The trace is of some processes only.
    is_required: bool,
    tracked: Mutex<Tracked>,
}

impl ProcessTracker {
    /// A tracker of the guest in this memory. `is_required`: the trace is of some processes only.
    pub fn new(map: &GuestMemoryMmap, is_required: bool) -> Self {
        Self {
            memory: MachineMemory::new(map.clone()),
            is_required,
            tracked: Mutex::default(),
        }
    }

    /// What a vCPU must stop for, besides its own conditions.
    pub(crate) fn stops(&self) -> StopConditions {
        let mut stops = StopConditions::default();
        stops.msrs = MsrStops::Only(vec![regs::IA32_LSTAR]);
        if let Some(tracked) = &lock(&self.tracked).kernel {
            stops.execute = tracked.hooks.iter().map(|&(at, _)| at).collect();
        }
        stops
    }

    /// The vCPU has set the entry of system calls: looks for the kernel, if it is not known.
    pub(crate) fn entry_set(&self, state: &CpuState) -> TrackedEvents {
        let entry = state.msrs.lstar;
        let mut tracked = lock(&self.tracked);
        let mut events = TrackedEvents::default();
        if entry < KERNEL_HALF {
            return events;
        }
        events.found = true;
        if tracked.kernel.is_none() && tracked.searches < SEARCHES_MAX {
            tracked.searches += 1;
            tracked.kernel = self.find(state, entry);
            match &tracked.kernel {
                Some(kernel) => events.log.push(kernel_event(kernel.kernel.symbols())),
                None if self.is_required => {
                    tracing::warn!(
                        "no Linux kernel with symbols and BTF: --process selects nothing"
                    );
                }
                None => {
                    tracing::info!("no Linux kernel with symbols and BTF: processes have no names");
                }
            }
        }
        events
    }

    fn find(&self, state: &CpuState, entry: u64) -> Option<TrackedKernel> {
        let searched = SearchedMemory::near_entry(&self.memory, state, entry)?;
        let linear = LinearMemory {
            memory: &searched,
            state,
        };
        let kernel = LinuxKernel::find(&linear, &|| false)?;
        let address = |&(name, hook): &(&str, Hook)| Some((kernel.address(name)?, hook));
        let mut hooks: Vec<_> = HOOKS.iter().filter_map(address).collect();
        let is_complete = hooks.len() == HOOKS.len();
        hooks.extend(address(&MODULE_HOOK));
        is_complete.then_some(TrackedKernel {
            kernel,
            hooks,
            files: TrackedFiles::default(),
            functions: 0,
            name_bytes: 0,
            names: HashSet::new(),
        })
    }

    /// The vCPU is at the instruction at `at`; `None` if that is no function of the tracker.
    pub(crate) fn reached(&self, at: u64, state: &CpuState) -> Option<TrackedEvents> {
        let mut tracked = lock(&self.tracked);
        let tracked = tracked.kernel.as_mut()?;
        let &(_, hook) = tracked.hooks.iter().find(|(address, _)| *address == at)?;
        let linear = LinearMemory {
            memory: &self.memory,
            state,
        };
        let (first, second) = (state.gpr[gpr::RDI], state.gpr[gpr::RSI]);
        let mut events = TrackedEvents::default();
        match hook {
            Hook::Switch => {
                let task = tracked.kernel.task(&linear, second);
                events.log.extend(task.and_then(|task| tracked.name(task)));
                events.task = Some(switch(task));
            }
            Hook::Name => {
                let task = tracked.kernel.task(&linear, first)?;
                // The name of another thread is known when that runs next.
                events.log.extend(tracked.name(task));
                let is_current = tracked.kernel.current(&linear) == Some(first);
                if is_current {
                    events.task = Some(switch(Some(task)));
                }
                if second & 0xff != 0 {
                    events.log.push(ProcessEvent::Exec {
                        tgid: task.tgid,
                        name: logged(task).name(),
                    });
                }
            }
            Hook::Map => events.log = tracked.map(&linear, first).unwrap_or_default(),
            Hook::Module => events.log.extend(tracked.module(&linear, first)),
            Hook::Fork => events.log.extend(tracked.fork(&linear, first)),
        }
        Some(events)
    }
}

/// The task as a record of the trace has it.
const fn logged(task: KernelTask) -> LinuxTask {
    LinuxTask {
        pid: task.pid,
        tgid: task.tgid,
        comm: task.comm,
    }
}

fn switch(task: Option<KernelTask>) -> Event {
    Event::Task(task.map(logged))
}

impl TrackedKernel {
    /// The event of a name that is new.
    fn name(&mut self, task: KernelTask) -> Option<ProcessEvent> {
        let task = logged(task);
        if self.names.len() >= NAMES_MAX || !self.names.insert(task) {
            return None;
        }
        Some(ProcessEvent::Name {
            pid: task.pid,
            tgid: task.tgid,
            name: task.name(),
        })
    }

    /// A module that is loaded, with its functions.
    fn module(&mut self, linear: &LinearMemory<'_>, at: u64) -> Option<ProcessEvent> {
        let module = self.kernel.module(linear, at)?;
        self.count(module.functions.iter().map(|f| f.name.len()))?;
        let functions = module.functions.into_iter();
        let relative = |f: ModuleFunction| {
            LoggedFunction(f.address.wrapping_sub(module.start), f.size, f.name)
        };
        Some(ProcessEvent::Module {
            name: module.name,
            start: module.start,
            len: module.len,
            functions: functions.map(relative).collect(),
        })
    }

    fn fork(&self, linear: &LinearMemory<'_>, at: u64) -> Option<ProcessEvent> {
        let task = self.kernel.task(linear, at)?;
        let parent = if task.pid == task.tgid {
            self.kernel.parent(linear, at)?.tgid
        } else {
            task.tgid
        };
        Some(ProcessEvent::Fork {
            parent,
            tgid: task.tgid,
            pid: task.pid,
        })
    }

    /// The process that runs maps memory: its file is read at the first time.
    fn map(&mut self, linear: &LinearMemory<'_>, vma: u64) -> Option<Vec<ProcessEvent>> {
        let mapping = self.kernel.code_mapping(linear, vma)?;
        let current = self.kernel.current(linear)?;
        let task = self.kernel.task(linear, current)?;
        let mut logged = LoggedMapping {
            tgid: task.tgid,
            start: mapping.start,
            len: mapping.len,
            offset: mapping.offset,
            path: "[anon]".to_owned(),
            build_id: String::new(),
        };
        let mut events = Vec::new();
        if let Some(file) = mapping.file {
            logged.path = self.kernel.path(linear, file)?;
            let key = (
                self.kernel.file_identity(linear, file)?,
                logged.path.clone(),
            );
            let start = self.kernel.file_start(linear, file, FILE_START);
            let start = start.filter(|(bytes, _)| !bytes.is_empty());
            let version = start.map(|(bytes, size)| xxh3_64_with_seed(&bytes, size));
            if let Some(build_id) = self.files.build_id(&key, version) {
                build_id.clone_into(&mut logged.build_id);
            } else {
                let is_new = !self.files.contains(&key);
                let code = if self.files.count_read() {
                    self.kernel.file_contents(linear, file)
                } else {
                    None
                };
                let code = code.and_then(|bytes| ElfCode::of(&bytes));
                let code = code.unwrap_or_default();
                logged.build_id.clone_from(&code.build_id);
                self.files.insert(key, version, code.build_id.clone());
                events.extend(self.file_event(&logged.path, code, is_new));
            }
        }
        events.push(ProcessEvent::Map(logged));
        Some(events)
    }

    /// Counts functions with names of these lengths; `None` if they are too many for the log.
    fn count(&mut self, names: impl ExactSizeIterator<Item = usize>) -> Option<()> {
        let functions = self.functions + names.len();
        let name_bytes = self.name_bytes + names.sum::<usize>();
        if functions > FUNCTIONS_MAX || name_bytes > NAME_BYTES_MAX {
            return None;
        }
        (self.functions, self.name_bytes) = (functions, name_bytes);
        Some(())
    }

    /// The event of a file that is new or has changed. One that has changed has an event also
    /// without code, so that it does not have its old functions.
    fn file_event(&mut self, path: &str, code: ElfCode, is_new: bool) -> Option<ProcessEvent> {
        let counted = self.count(code.functions.iter().map(|f| f.name.len()));
        let has_code = !code.segments.is_empty() && counted.is_some();
        if !has_code && is_new {
            return None;
        }
        let code = if has_code {
            code
        } else {
            ElfCode {
                build_id: code.build_id,
                ..ElfCode::default()
            }
        };
        let function = |f: Function| LoggedFunction(f.address, f.size, f.name);
        let segments = code.segments.iter();
        Some(ProcessEvent::File {
            path: path.to_owned(),
            build_id: code.build_id,
            functions: code.functions.into_iter().map(function).collect(),
            segments: segments.map(|s| (s.address, s.offset, s.size)).collect(),
        })
    }
}

/// The kernel's functions, by address.
fn kernel_event(symbols: &[KernelSymbol]) -> ProcessEvent {
    let is_code = |symbol: &&KernelSymbol| matches!(symbol.kind, b't' | b'T' | b'w' | b'W');
    let is_kernel = |symbol: &&KernelSymbol| symbol.address >= KERNEL_HALF;
    let code = symbols.iter().filter(is_code).filter(is_kernel);
    let base = code.clone().map(|symbol| symbol.address).min().unwrap_or(0);
    let functions = code.map(|symbol| {
        let name = String::from_utf8_lossy(&symbol.name).into_owned();
        LoggedFunction(symbol.address - base, 0, name)
    });
    ProcessEvent::Kernel {
        base,
        functions: functions.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_changes_is_read_again() {
        let mut files = TrackedFiles::default();
        let key = (1, "/bin/a".to_owned());
        assert_eq!(files.build_id(&key, Some(5)), None);
        assert!(files.count_read());
        files.insert(key.clone(), Some(5), "old".to_owned());
        assert_eq!(files.build_id(&key, Some(5)), Some("old"));
        assert_eq!(files.build_id(&key, None), Some("old"));
        assert_eq!(files.build_id(&key, Some(6)), None);
        files.insert(key.clone(), Some(6), "new".to_owned());
        assert_eq!(files.build_id(&key, Some(6)), Some("new"));
    }

    #[test]
    fn files_that_change_all_the_time_are_read_a_bounded_number_of_times() {
        let mut files = TrackedFiles::default();
        let reads = (0..2 * FILES_MAX).filter(|_| files.count_read()).count();
        assert_eq!(reads, FILES_MAX);
        for n in 0..2 * FILES_MAX as u64 {
            files.insert((n, "/bin/a".to_owned()), None, String::new());
        }
        assert_eq!(files.files.len(), FILES_MAX);
    }
}
