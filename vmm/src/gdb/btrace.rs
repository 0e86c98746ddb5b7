//! Branch traces in gdb's format: `record btrace bts`.
//!
//! A trace is a list of blocks, the newest first. A block is a run of instructions without a branch:
//! the address of its first instruction and that of its last one.

use std::fmt::Write as _;

use crate::gdb::debugger::{DebugError, Debugger};
use crate::gdb::registers;
use crate::vcpu::branch_history::{BranchHistory, BranchSnapshot};
use crate::vcpu::debug::stop::Unsupported;

/// Branches that are kept unless the client says otherwise.
const LIMIT: usize = 0x1_0000;

/// Bytes of a BTS record, by which the client counts.
const RECORD: usize = 24;

/// What the client did about traces.
#[derive(Clone, Debug, Default)]
pub(super) struct Tracing {
    /// Branches to keep, if the client said so.
    limit: Option<usize>,
    /// Branches that the client has read, for each processor that it traces.
    read: Vec<Option<Read>>,
}

impl Tracing {
    /// Some processor is traced.
    pub(super) fn any(&self) -> bool {
        self.read.iter().any(Option::is_some)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Read {
    total: u64,
    pc: Option<u64>,
}

/// One run of instructions.
type Block = (u64, u64);

/// The blocks of all that is kept, the oldest first.
fn blocks(kept: &BranchSnapshot, pc: u64) -> Vec<Block> {
    let complete = kept.total == kept.branches.len() as u64;
    let first = complete.then_some(kept.start);
    let begins = first.into_iter().chain(kept.branches.iter().map(|b| b.1));
    let from = kept.branches.iter().map(|b| b.0);
    let ends = from.skip(usize::from(!complete)).chain([pc]);
    begins.zip(ends).collect()
}

/// The blocks since the client read last. The first one goes on with what it has: its beginning is
/// not told. `None`: more branches were taken than are kept.
fn delta(kept: &BranchSnapshot, pc: u64, read: u64) -> Option<Vec<Block>> {
    let fresh = usize::try_from(kept.total.checked_sub(read)?).ok()?;
    let from = kept.branches.len().checked_sub(fresh)?;
    let fresh = kept.branches.get(from..)?;
    let begins = [0].into_iter().chain(fresh.iter().map(|b| b.1));
    let ends = fresh.iter().map(|b| b.0).chain([pc]);
    Some(begins.zip(ends).collect())
}

fn xml(blocks: &[Block]) -> String {
    let mut text = "<!DOCTYPE btrace SYSTEM \"btrace.dtd\">\n<btrace version=\"1.0\">\n".to_owned();
    for (begin, end) in blocks.iter().rev() {
        let _ = writeln!(text, "<block begin=\"{begin:#x}\" end=\"{end:#x}\"/>");
    }
    text.push_str("</btrace>\n");
    text
}

impl Debugger {
    /// Records the branches of a processor from now on, unless they are recorded already.
    pub(super) fn start_trace(&mut self, cpu: usize) -> Result<(), DebugError> {
        if self.has_kvm() && !self.board().run.engine.can_change() {
            return Err(DebugError::NeedsInterpreter(Unsupported::Branches));
        }
        let limit = self.tracing.limit.unwrap_or(LIMIT);
        let state = self.state(cpu)?;
        let (start, base) = (state.rip, registers::code_base(state));
        self.ask(cpu, move |cpu| {
            let model = cpu.model();
            if model.history.is_none() {
                model.history = Some(Box::new(BranchHistory::new(limit, start, base)));
            }
        })?;
        self.tracing.read.resize(self.cpus(), None);
        self.tracing.read[cpu] = Some(Read { total: 0, pc: None });
        Ok(())
    }

    /// Ends the recording of a processor's branches, unless it is that of `--record`.
    pub(super) fn stop_trace(&mut self, cpu: usize) -> Result<(), DebugError> {
        if let Some(read) = self.tracing.read.get_mut(cpu) {
            *read = None;
        }
        self.ask(cpu, |cpu| {
            let model = cpu.model();
            if !model.recorded_from_start {
                model.history = None;
            }
        })
    }

    /// How much is to be recorded, in bytes of records.
    pub(super) fn set_trace_size(&mut self, bytes: usize) {
        self.tracing.limit = Some((bytes / RECORD).max(1));
    }

    /// The answer to a read of the recording's configuration.
    pub(super) fn trace_configuration(&mut self, cpu: usize) -> Result<String, DebugError> {
        let limit = self.ask(cpu, |cpu| {
            cpu.model().history.as_ref().map(|history| history.limit())
        })?;
        let inner = match limit {
            Some(limit) => format!("<bts size=\"{:#x}\"/>\n", limit * RECORD),
            None => String::new(),
        };
        Ok(format!(
            "<!DOCTYPE btrace-conf SYSTEM \"btrace-conf.dtd\">\n<btrace-conf \
             version=\"1.0\">\n{inner}</btrace-conf>\n"
        ))
    }

    /// The answer to a read of a trace: `all`, `new` or `delta`; or an error in gdb's words.
    pub(super) fn trace(&mut self, cpu: usize, annex: &str) -> Result<String, String> {
        let pc = match self.state(cpu) {
            Ok(state) => registers::linear_pc(state, state.rip),
            Err(error) => return Err(format!("E.{error}.")),
        };
        let kept = self.ask(cpu, |cpu| {
            cpu.model().history.as_ref().map(|h| h.snapshot())
        });
        let kept = match kept {
            Ok(Some(kept)) => kept,
            Ok(None) => return Err("E.Branch tracing not enabled.".to_owned()),
            Err(error) => return Err(format!("E.{error}.")),
        };
        self.tracing.read.resize(self.cpus(), None);
        let read = self.tracing.read[cpu];
        let found = match annex {
            "all" => blocks(&kept, pc),
            "new" if read.is_some_and(|r| r.total == kept.total && r.pc == Some(pc)) => Vec::new(),
            "new" => blocks(&kept, pc),
            "delta" => delta(&kept, pc, read.map_or(0, |read| read.total))
                .ok_or_else(|| "E.Overflow.".to_owned())?,
            _ => return Err("E.Bad annex.".to_owned()),
        };
        self.tracing.read[cpu] = Some(Read {
            total: kept.total,
            pc: Some(pc),
        });
        Ok(xml(&found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(total: u64) -> BranchSnapshot {
        BranchSnapshot {
            branches: vec![(0x10, 0x20), (0x28, 0x40)],
            total,
            start: 0x8,
        }
    }

    #[test]
    fn complete_trace_begins_where_it_was_started() {
        assert_eq!(
            blocks(&kept(2), 0x44),
            [(0x8, 0x10), (0x20, 0x28), (0x40, 0x44)]
        );
        let none = BranchSnapshot {
            start: 8,
            ..BranchSnapshot::default()
        };
        assert_eq!(blocks(&none, 8), [(8, 8)]);
    }

    #[test]
    fn trace_that_forgot_begins_behind_its_oldest_branch() {
        assert_eq!(blocks(&kept(9), 0x44), [(0x20, 0x28), (0x40, 0x44)]);
    }

    #[test]
    fn delta_leaves_its_beginning_to_the_client() {
        let fresh = delta(&kept(9), 0x44, 8).unwrap();
        assert_eq!(fresh, [(0, 0x28), (0x40, 0x44)]);
        assert_eq!(delta(&kept(9), 0x44, 9).unwrap(), [(0, 0x44)]);
        assert_eq!(delta(&kept(9), 0x44, 6), None, "too much was forgotten");
        let text = xml(&fresh);
        assert!(text.find("0x40").unwrap() < text.find("0x28").unwrap());
    }
}
