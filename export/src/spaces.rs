//! The code that each process of a Linux guest maps, over time.
//!
//! The log of a trace is untrusted: its ranges are bounded in number, and code that it does not name
//! has no name.

use std::collections::HashMap;

use hindsight_trace::{LinuxTask, ProcessEvent, ProcessRecord};

use crate::elf::{CodeSegment, ElfCode};
use crate::symbols::{Function, FunctionTable};

/// Maximum number of ranges of all spaces together.
const RANGES_MAX: usize = 4 << 20;
/// Maximum number of functions of all files together.
const FUNCTIONS_MAX: usize = 8 << 20;

/// A space: the code that a process maps for some time. `NONE` has the kernel's code only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SpaceId(Option<u32>);

impl SpaceId {
    /// The kernel's code only.
    pub(crate) const NONE: Self = Self(None);
}

/// A part of a file that is mapped.
#[derive(Clone, Copy, Debug)]
struct MappedRange {
    start: u64,
    end: u64,
    /// Offset of the first byte in the file.
    offset: u64,
    /// The file, if its functions are known.
    file: Option<u32>,
}

/// The functions of a file: their numbers in the table of functions begin with `first`.
#[derive(Debug)]
struct FileFunctions {
    segments: Vec<CodeSegment>,
    /// Address at which the function is linked, and its size.
    functions: Vec<(u64, u64)>,
    first: u32,
}

impl FileFunctions {
    /// The function at an offset of the file, and how far the offset is behind its start.
    fn find(&self, offset: u64) -> Option<(u32, u64)> {
        let contains = |s: &&CodeSegment| offset.wrapping_sub(s.offset) < s.size;
        let segment = self.segments.iter().find(contains)?;
        let address = segment.address.checked_add(offset - segment.offset)?;
        let after = self
            .functions
            .partition_point(|&(start, _)| start <= address);
        let index = after.checked_sub(1)?;
        let (start, size) = self.functions[index];
        let found = address - start < size.max(1);
        found.then_some(())?;
        let number = self.first.checked_add(u32::try_from(index).ok()?)?;
        Some((number, address - start))
    }
}

/// The spaces of all processes, and the functions of the files in them.
#[derive(Debug, Default)]
pub(crate) struct AddressSpaces {
    spaces: Vec<Vec<MappedRange>>,
    files: Vec<FileFunctions>,
    /// For each process the clock at which a space begins.
    timelines: HashMap<u32, Vec<(u64, SpaceId)>>,
    /// The function that stands for a task's name.
    names: HashMap<String, u32>,
}

impl AddressSpaces {
    /// The space of a process, and the clock at which its next one begins.
    pub(crate) fn at(&self, tgid: u32, ticks: u64) -> (SpaceId, u64) {
        let Some(timeline) = self.timelines.get(&tgid) else {
            return (SpaceId::NONE, u64::MAX);
        };
        let after = timeline.partition_point(|&(since, _)| since <= ticks);
        let space = after
            .checked_sub(1)
            .map_or(SpaceId::NONE, |n| timeline[n].1);
        let until = timeline.get(after).map_or(u64::MAX, |&(since, _)| since);
        (space, until)
    }

    /// The number of the function at an address of a space.
    pub(crate) fn find(&self, space: SpaceId, address: u64) -> Option<u32> {
        self.find_start(space, address).map(|(number, _)| number)
    }

    /// The number of the function at an address of a space, and the address of its start.
    pub(crate) fn find_start(&self, space: SpaceId, address: u64) -> Option<(u32, u64)> {
        let ranges = self.spaces.get(usize::try_from(space.0?).ok()?)?;
        let after = ranges.partition_point(|range| range.start <= address);
        let range = ranges.get(after.checked_sub(1)?)?;
        if address >= range.end {
            return None;
        }
        let file = self.files.get(usize::try_from(range.file?).ok()?)?;
        let offset = (address - range.start).checked_add(range.offset)?;
        let (number, behind) = file.find(offset)?;
        Some((number, address.checked_sub(behind)?))
    }

    /// The number of the function that stands for a task's name.
    pub(crate) fn name(&self, task: &LinuxTask) -> Option<u32> {
        self.names.get(&task.name()).copied()
    }
}

/// The files of the guest that the host has: by path and build ID.
pub type HostFiles<'a> = &'a mut dyn FnMut(&str, &str) -> Option<ElfCode>;

/// Makes the spaces of a log.
struct SpacesBuilder<'a, 'b> {
    spaces: AddressSpaces,
    functions: &'a mut Vec<Function>,
    host: HostFiles<'b>,
    /// Symbols that the guest had in memory, by path and build ID.
    logged: HashMap<(String, String), ElfCode>,
    files: HashMap<(String, String), u32>,
    ranges: usize,
}

impl FunctionTable {
    /// Adds the functions of a Linux kernel and of the processes that a trace's log names. `host`
    /// returns the code of a file of the guest that the host has.
    ///
    /// The kernel's functions replace those of the image, which is linked for other addresses.
    #[must_use]
    pub fn with_processes(self, log: &[ProcessRecord], host: HostFiles<'_>) -> Self {
        let Some(kernel) = kernel_functions(log) else {
            return self;
        };
        let mut table = Self::new(kernel);
        let mut functions = Vec::new();
        let mut builder = SpacesBuilder {
            spaces: AddressSpaces::default(),
            functions: &mut functions,
            host,
            logged: HashMap::new(),
            files: HashMap::new(),
            ranges: 0,
        };
        let first = table.len();
        for record in log {
            builder.add(record, first);
        }
        let spaces = builder.spaces;
        table.add_unordered(functions, spaces);
        table
    }
}

/// The functions of the kernel and its modules; `None` if the log has no kernel.
fn kernel_functions(log: &[ProcessRecord]) -> Option<Vec<Function>> {
    let mut functions = Vec::new();
    for record in log {
        let (base, own, module) = match &record.event {
            ProcessEvent::Kernel { base, functions } => (*base, functions, None),
            ProcessEvent::Module {
                name,
                start,
                functions,
                ..
            } => (*start, functions, Some(name)),
            _ => continue,
        };
        if functions.len() + own.len() > FUNCTIONS_MAX {
            break;
        }
        functions.extend(own.iter().map(|function| Function {
            address: base.wrapping_add(function.0),
            size: function.1,
            name: match module {
                Some(module) => format!("{} [{module}]", function.2),
                None => function.2.clone(),
            },
        }));
    }
    (!functions.is_empty()).then_some(functions)
}

impl SpacesBuilder<'_, '_> {
    fn add(&mut self, record: &ProcessRecord, first: usize) {
        match &record.event {
            ProcessEvent::Kernel { .. } | ProcessEvent::Module { .. } => {}
            ProcessEvent::Name { name, .. } => self.add_name(name, first),
            ProcessEvent::Fork { parent, tgid, .. } if parent != tgid => {
                let (space, _) = self.spaces.at(*parent, u64::MAX);
                self.begin(*tgid, record.ticks, space);
            }
            ProcessEvent::Fork { .. } => {}
            ProcessEvent::Exec { tgid, name } => {
                self.add_name(name, first);
                self.begin(*tgid, record.ticks, SpaceId::NONE);
            }
            ProcessEvent::File {
                path,
                build_id,
                functions,
                segments,
            } => {
                let segment = |&(address, offset, size): &(u64, u64, u64)| CodeSegment {
                    address,
                    offset,
                    size,
                };
                let function = |f: &hindsight_trace::LoggedFunction| Function {
                    address: f.0,
                    size: f.1,
                    name: f.2.clone(),
                };
                let code = ElfCode {
                    build_id: build_id.clone(),
                    segments: segments.iter().map(segment).collect(),
                    functions: functions.iter().map(function).collect(),
                };
                self.logged.insert((path.clone(), build_id.clone()), code);
            }
            ProcessEvent::Map(map) => {
                let file = self.file(&map.path, &map.build_id, first);
                let range = MappedRange {
                    start: map.start,
                    end: map.start.saturating_add(map.len),
                    offset: map.offset,
                    file,
                };
                self.map(map.tgid, record.ticks, range);
            }
        }
    }

    fn begin(&mut self, tgid: u32, ticks: u64, space: SpaceId) {
        let timeline = self.spaces.timelines.entry(tgid).or_default();
        timeline.push((ticks, space));
    }

    fn add_name(&mut self, name: &str, first: usize) {
        if self.spaces.names.contains_key(name) || self.functions.len() >= FUNCTIONS_MAX {
            return;
        }
        if let Ok(index) = u32::try_from(first + self.functions.len()) {
            self.spaces.names.insert(name.to_owned(), index);
            self.functions.push(Function {
                address: 0,
                size: 0,
                name: name.to_owned(),
            });
        }
    }

    /// The number of a file, whose functions are added at its first use.
    fn file(&mut self, path: &str, build_id: &str, first: usize) -> Option<u32> {
        let key = (path.to_owned(), build_id.to_owned());
        if let Some(&file) = self.files.get(&key) {
            return Some(file);
        }
        let host = (self.host)(path, build_id).filter(|code| !code.functions.is_empty());
        let code = host.or_else(|| self.logged.remove(&key))?;
        let number = u32::try_from(self.spaces.files.len()).ok()?;
        let mut functions = FunctionTable::new(code.functions).into_functions();
        if self.functions.len() + functions.len() > FUNCTIONS_MAX {
            return None;
        }
        self.spaces.files.push(FileFunctions {
            segments: code.segments,
            functions: functions.iter().map(|f| (f.address, f.size)).collect(),
            first: u32::try_from(first + self.functions.len()).ok()?,
        });
        self.functions.append(&mut functions);
        self.files.insert(key, number);
        Some(number)
    }

    /// Maps a range, in a new space if it replaces another range or the space is another process's
    /// too.
    fn map(&mut self, tgid: u32, ticks: u64, range: MappedRange) {
        let (old, _) = self.spaces.at(tgid, u64::MAX);
        let ranges = old
            .0
            .and_then(|n| self.spaces.spaces.get(usize::try_from(n).ok()?));
        let ranges = ranges.map_or(&[][..], Vec::as_slice);
        let overlaps = |r: &MappedRange| r.start < range.end && range.start < r.end;
        let is_shared = old == SpaceId::NONE
            || self.spaces.timelines.iter().any(|(&other, timeline)| {
                other != tgid && timeline.last().is_some_and(|&(_, space)| space == old)
            });
        let must_copy = is_shared || ranges.iter().any(overlaps);
        let mut new: Vec<_> = ranges.iter().filter(|r| !overlaps(r)).copied().collect();
        new.push(range);
        new.sort_by_key(|range| range.start);
        let added = if must_copy { new.len() } else { 1 };
        if self.ranges + added > RANGES_MAX {
            self.begin(tgid, ticks, SpaceId::NONE);
            return;
        }
        self.ranges += added;
        match old.0.and_then(|n| usize::try_from(n).ok()) {
            Some(index) if !must_copy => self.spaces.spaces[index] = new,
            _ => {
                let number = u32::try_from(self.spaces.spaces.len()).ok();
                self.spaces.spaces.push(new);
                self.begin(tgid, ticks, SpaceId(number));
            }
        }
    }
}

/// The task that a vCPU runs, and its space.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunningTask {
    pub(crate) task: Option<LinuxTask>,
    pub(crate) space: SpaceId,
    until: u64,
}

impl RunningTask {
    /// Follows the clock, or a switch to `task`.
    pub(crate) fn switch(
        &mut self,
        task: Option<LinuxTask>,
        ticks: u64,
        functions: &FunctionTable,
    ) {
        self.task = task;
        (self.space, self.until) = match task {
            Some(task) => functions.spaces().at(task.tgid, ticks),
            None => (SpaceId::NONE, u64::MAX),
        };
    }

    /// Follows the clock.
    pub(crate) fn advance(&mut self, ticks: u64, functions: &FunctionTable) {
        if self.task.is_some() && ticks >= self.until {
            self.switch(self.task, ticks, functions);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_trace::{LoggedFunction, LoggedMapping};

    fn record(ticks: u64, event: ProcessEvent) -> ProcessRecord {
        ProcessRecord {
            cpu: 0,
            at: ticks,
            ticks,
            event,
        }
    }

    fn map(tgid: u32, start: u64, path: &str) -> ProcessEvent {
        ProcessEvent::Map(LoggedMapping {
            tgid,
            start,
            len: 0x1000,
            offset: 0x1000,
            path: path.to_owned(),
            build_id: String::new(),
        })
    }

    fn file(path: &str, function: &str) -> ProcessEvent {
        ProcessEvent::File {
            path: path.to_owned(),
            build_id: String::new(),
            functions: vec![LoggedFunction(0x40_1010, 0x20, function.to_owned())],
            segments: vec![(0x40_1000, 0x1000, 0x1000)],
        }
    }

    /// A table of two programs, each with one function 10H bytes into its code.
    fn table(events: Vec<(u64, ProcessEvent)>) -> FunctionTable {
        let kernel = ProcessEvent::Kernel {
            base: 0xffff_ffff_8100_0000,
            functions: vec![LoggedFunction(0x10, 0, "schedule".to_owned())],
        };
        let files = [file("/bin/a", "a_main"), file("/bin/b", "b_main")];
        let log = std::iter::once(kernel).chain(files);
        let mut log: Vec<_> = log.map(|event| record(0, event)).collect();
        log.extend(
            events
                .into_iter()
                .map(|(ticks, event)| record(ticks, event)),
        );
        FunctionTable::default().with_processes(&log, &mut |_, _| None)
    }

    fn name(table: &FunctionTable, tgid: u32, ticks: u64, address: u64) -> String {
        let (space, _) = table.spaces().at(tgid, ticks);
        table.name_address_in(space, address)
    }

    #[test]
    fn address_is_named_by_the_program_that_the_process_executes() {
        let exec = |tgid| ProcessEvent::Exec {
            tgid,
            name: "x".to_owned(),
        };
        let fork = ProcessEvent::Fork {
            parent: 1,
            tgid: 2,
            pid: 2,
        };
        let table = table(vec![
            (1, exec(1)),
            (2, map(1, 0x5000, "/bin/a")),
            (10, fork),
            (20, exec(2)),
            (21, map(2, 0x5000, "/bin/b")),
        ]);
        assert_eq!(name(&table, 1, 5, 0x5014), "a_main+0x4");
        assert_eq!(name(&table, 2, 15, 0x5010), "a_main");
        assert_eq!(name(&table, 2, 20, 0x5010), "0x5010");
        assert_eq!(name(&table, 2, 30, 0x5010), "b_main");
        assert_eq!(name(&table, 1, 30, 0x5010), "a_main");
        assert_eq!(name(&table, 3, 30, 0x5010), "0x5010");
        assert_eq!(name(&table, 1, 30, 0x5030), "0x5030");
        assert_eq!(name(&table, 9, 0, 0xffff_ffff_8100_0010), "schedule");
    }

    #[test]
    fn mapping_over_another_one_replaces_it_from_then_on() {
        let table = table(vec![
            (2, map(1, 0x5000, "/bin/a")),
            (9, map(1, 0x5000, "/bin/unknown")),
            (12, map(1, 0x5000, "/bin/b")),
        ]);
        assert_eq!(name(&table, 1, 5, 0x5010), "a_main");
        assert_eq!(name(&table, 1, 10, 0x5010), "0x5010");
        assert_eq!(name(&table, 1, 12, 0x5010), "b_main");
    }
}
