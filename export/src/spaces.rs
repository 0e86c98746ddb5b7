//! The code that each process of a Linux guest maps, over time.
//!
//! The log of a trace is untrusted: its ranges are bounded in number, and code that it does not name
//! has no name.

mod builder;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

pub use builder::HostFiles;
use hindsight_trace::LinuxTask;

use crate::elf::CodeSegment;
use crate::symbols::FunctionTable;

/// A space: the code that a process maps for some time. `NONE` has the kernel's code only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SpaceId(Option<u32>);

impl SpaceId {
    /// The kernel's code only.
    pub(crate) const NONE: Self = Self(None);

    fn index(self) -> Option<usize> {
        self.0.and_then(|number| usize::try_from(number).ok())
    }
}

/// A part of a file that is mapped.
#[derive(Clone, Copy, Debug)]
struct MappedRange {
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
    list: FunctionList,
}

/// Functions of a file, of which the first has the number `first`.
#[derive(Clone, Debug)]
struct FunctionList {
    /// Address at which the function is linked, and its size.
    functions: Arc<[(u64, u64)]>,
    first: u32,
}

impl FileFunctions {
    /// The function at an offset of the file, and how far the offset is behind its start.
    fn find(&self, offset: u64) -> Option<(u32, u64)> {
        let contains = |s: &&CodeSegment| offset.wrapping_sub(s.offset) < s.size;
        let segment = self.segments.iter().find(contains)?;
        let address = segment.address.checked_add(offset - segment.offset)?;
        let FunctionList { functions, first } = &self.list;
        let after = functions.partition_point(|&(start, _)| start <= address);
        let index = after.checked_sub(1)?;
        let (start, size) = functions[index];
        let found = address - start < size.max(1);
        found.then_some(())?;
        let number = first.checked_add(u32::try_from(index).ok()?)?;
        Some((number, address - start))
    }
}

/// The ranges of a space, by their start. They do not overlap.
type Space = BTreeMap<u64, MappedRange>;

/// The spaces of all processes, and the functions of the files in them.
#[derive(Debug, Default)]
pub(crate) struct AddressSpaces {
    spaces: Vec<Space>,
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
        let ranges = self.spaces.get(space.index()?)?;
        let (start, range) = ranges.range(..=address).next_back()?;
        if address >= range.end {
            return None;
        }
        let file = self.files.get(usize::try_from(range.file?).ok()?)?;
        let offset = (address - start).checked_add(range.offset)?;
        let (number, behind) = file.find(offset)?;
        Some((number, address.checked_sub(behind)?))
    }

    /// The number of the function that stands for a task's name.
    pub(crate) fn name(&self, task: &LinuxTask) -> Option<u32> {
        self.names.get(&task.name()).copied()
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
