//! Makes the spaces of processes from the log of a trace.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use hindsight_trace::{LoggedFunction, ProcessEvent, ProcessRecord};

use super::{AddressSpaces, FileFunctions, FunctionList, MappedRange, SpaceId};
use crate::elf::{CodeSegment, ElfCode};
use crate::symbols::{Function, FunctionTable, make_printable};

/// Maximum number of ranges of all spaces together.
const RANGES_MAX: usize = 4 << 20;
/// Maximum number of ranges of one space: what Linux permits a process by default.
pub(super) const SPACE_RANGES_MAX: usize = 65_530;
const PAGE: u64 = 4096;
/// Maximum number of functions of all files together.
const FUNCTIONS_MAX: usize = 8 << 20;

/// The files of the guest that the host has: by path and build ID.
pub type HostFiles<'a> = &'a mut dyn FnMut(&str, &str) -> Option<Rc<ElfCode>>;

/// The path of a file and its build ID.
type FileKey = (String, String);

/// Makes the spaces of a log.
struct SpacesBuilder<'a, 'b> {
    spaces: AddressSpaces,
    functions: &'a mut Vec<Function>,
    host: HostFiles<'b>,
    /// Code that the guest had in memory.
    logged: HashMap<FileKey, ElfCode>,
    /// The numbers of files; `None` for those without functions.
    files: HashMap<FileKey, Option<u32>>,
    /// The functions of files that the host has. The code is held so that no other one gets its
    /// address.
    host_lists: HashMap<*const ElfCode, (Rc<ElfCode>, FunctionList)>,
    /// For each space the number of processes whose newest one it is.
    users: Vec<u32>,
    ranges: usize,
    /// The log is not complete from here on: what is mapped is not known.
    is_over: bool,
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
            host_lists: HashMap::new(),
            users: Vec::new(),
            ranges: 0,
            is_over: false,
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
        // No function follows the last one of the kernel, or of a module, which may have no size.
        let last = own
            .iter()
            .map(|function| base.wrapping_add(function.0))
            .max();
        let size = |address: u64, size| match size {
            0 if Some(address) == last => PAGE - address % PAGE,
            size => size,
        };
        functions.extend(own.iter().map(|function| Function {
            address: base.wrapping_add(function.0),
            size: size(base.wrapping_add(function.0), function.1),
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
        if self.is_over {
            return;
        }
        match &record.event {
            ProcessEvent::Kernel { .. } | ProcessEvent::Module { .. } => {}
            ProcessEvent::Truncated {} => {
                self.is_over = true;
                let processes: Vec<_> = self.spaces.timelines.keys().copied().collect();
                for tgid in processes {
                    self.begin(tgid, record.ticks, SpaceId::NONE);
                }
            }
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
                let function = |f: &LoggedFunction| Function {
                    address: f.0,
                    size: f.1,
                    name: f.2.clone(),
                };
                let code = ElfCode {
                    build_id: build_id.clone(),
                    segments: segments.iter().map(segment).collect(),
                    functions: functions.iter().map(function).collect(),
                };
                let key = (path.clone(), build_id.clone());
                // Mappings from here on are of a file that may have changed.
                self.files.remove(&key);
                self.logged.insert(key, code);
            }
            ProcessEvent::Map(map) => {
                let file = self.file(&map.path, &map.build_id, first);
                let range = MappedRange {
                    end: map.start.saturating_add(map.len),
                    offset: map.offset,
                    file,
                };
                self.map(map.tgid, record.ticks, map.start, range);
            }
        }
    }

    fn begin(&mut self, tgid: u32, ticks: u64, space: SpaceId) {
        let timeline = self.spaces.timelines.entry(tgid).or_default();
        let old = timeline.last().map_or(SpaceId::NONE, |&(_, space)| space);
        timeline.push((ticks, space));
        if let Some(index) = old.index() {
            self.users[index] -= 1;
        }
        if let Some(index) = space.index() {
            self.users[index] += 1;
        }
    }

    fn add_name(&mut self, name: &str, first: usize) {
        if self.spaces.names.contains_key(name) || self.functions.len() >= FUNCTIONS_MAX {
            return;
        }
        if let Ok(index) = u32::try_from(first + self.functions.len()) {
            self.spaces.names.insert(name.to_owned(), index);
            let mut printable = name.to_owned();
            make_printable(&mut printable);
            self.functions.push(Function {
                address: 0,
                size: 0,
                name: printable,
            });
        }
    }

    /// The number of a file, whose functions are added at its first use.
    fn file(&mut self, path: &str, build_id: &str, first: usize) -> Option<u32> {
        let key = (path.to_owned(), build_id.to_owned());
        if let Some(&file) = self.files.get(&key) {
            return file;
        }
        let file = self.new_file(&key, first);
        self.files.insert(key, file);
        file
    }

    /// The number of a file that is mapped for the first time.
    fn new_file(&mut self, key: &FileKey, first: usize) -> Option<u32> {
        let logged = self.logged.remove(key);
        let host = (self.host)(&key.0, &key.1).filter(|code| !code.functions.is_empty());
        let (mut segments, functions) =
            logged.map_or_else(Default::default, |code| (code.segments, code.functions));
        let list = match host {
            Some(code) => {
                // A file of debug information has the functions, but its segments are empty.
                if segments.is_empty() {
                    segments.clone_from(&code.segments);
                }
                self.host_list(code, first)?
            }
            None => self.add_functions(functions, first)?,
        };
        let number = u32::try_from(self.spaces.files.len()).ok()?;
        self.spaces.files.push(FileFunctions { segments, list });
        Some(number)
    }

    /// The functions of a file of the host, which are added at its first use.
    fn host_list(&mut self, code: Rc<ElfCode>, first: usize) -> Option<FunctionList> {
        let key = Rc::as_ptr(&code);
        if let Some((_, list)) = self.host_lists.get(&key) {
            return Some(list.clone());
        }
        let list = self.add_functions(code.functions.clone(), first)?;
        self.host_lists.insert(key, (code, list.clone()));
        Some(list)
    }

    fn add_functions(&mut self, functions: Vec<Function>, first: usize) -> Option<FunctionList> {
        let mut functions = FunctionTable::new(functions).into_functions();
        if functions.is_empty() || self.functions.len() + functions.len() > FUNCTIONS_MAX {
            return None;
        }
        let list = FunctionList {
            functions: functions.iter().map(|f| (f.address, f.size)).collect(),
            first: u32::try_from(first + self.functions.len()).ok()?,
        };
        self.functions.append(&mut functions);
        Some(list)
    }

    /// Maps a range, in a new space if it replaces another range or the space is another process's
    /// too.
    fn map(&mut self, tgid: u32, ticks: u64, start: u64, range: MappedRange) {
        if start >= range.end {
            return;
        }
        let (old, _) = self.spaces.at(tgid, u64::MAX);
        let own = old.index().filter(|&index| self.users[index] == 1);
        let ranges = old.index().and_then(|index| self.spaces.spaces.get(index));
        let before = ranges.and_then(|ranges| ranges.range(..range.end).next_back());
        let overlaps = before.is_some_and(|(_, before)| before.end > start);
        let count = ranges.map_or(0, BTreeMap::len);
        if count >= SPACE_RANGES_MAX && !overlaps {
            return;
        }
        let must_copy = own.is_none() || overlaps;
        let added = if must_copy { count + 1 } else { 1 };
        if self.ranges + added > RANGES_MAX {
            self.begin(tgid, ticks, SpaceId::NONE);
            return;
        }
        self.ranges += added;
        match own {
            Some(index) if !must_copy => {
                self.spaces.spaces[index].insert(start, range);
            }
            _ => {
                let mut new = ranges.cloned().unwrap_or_default();
                new.retain(|&at, other| at >= range.end || other.end <= start);
                new.insert(start, range);
                let number = u32::try_from(self.spaces.spaces.len()).ok();
                self.spaces.spaces.push(new);
                self.users.push(0);
                self.begin(tgid, ticks, SpaceId(number));
            }
        }
    }
}
