//! Branch traces in gdb's format: what `record btrace bts` reads.
//!
//! A trace is a list of blocks, the newest first. A block is a run of instructions without a taken
//! branch: the address of its first instruction and that of its last one.

use std::fmt::Write as _;

use crate::target::RecordedBranches;

/// Bytes of a BTS record, the unit in which the client counts the size of a trace.
pub const BTS_RECORD_BYTES: usize = 24;

/// A run of instructions without a taken branch: the addresses of the first and of the last one.
///
/// A first address of 0 is unknown: the client continues the last block that it has.
pub type BranchBlock = (u64, u64);

/// How much of a vCPU's trace the client has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TracePosition {
    /// [`RecordedBranches::total`] at the last read.
    pub total: u64,
    /// [`RecordedBranches::left_out`] at the last read.
    pub left_out: u64,
    /// The linear address of the next instruction at the last read; `None` before the first one.
    pub pc: Option<u64>,
}

/// Which part of a trace the client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceAnnex {
    /// All blocks that are kept.
    All,
    /// All blocks that are kept, or none if the vCPU has not run since the last read.
    New,
    /// The blocks since the last read.
    Delta,
}

impl TraceAnnex {
    /// Parses gdb's name of an annex.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "all" => Some(Self::All),
            "new" => Some(Self::New),
            "delta" => Some(Self::Delta),
            _ => None,
        }
    }
}

/// The blocks of a part of a trace, the oldest first, for a vCPU whose next instruction is at `pc`.
///
/// `None`: more branches were taken since the last read than are kept.
pub fn blocks(
    recorded: &RecordedBranches,
    pc: u64,
    annex: TraceAnnex,
    last: Option<TracePosition>,
) -> Option<Vec<BranchBlock>> {
    let current = TracePosition {
        total: recorded.total,
        left_out: recorded.left_out,
        pc: Some(pc),
    };
    let pc = recorded.end.unwrap_or(pc);
    match annex {
        TraceAnnex::New if last == Some(current) => Some(Vec::new()),
        TraceAnnex::All | TraceAnnex::New => Some(all_blocks(recorded, pc)),
        TraceAnnex::Delta => {
            let last = last.unwrap_or_default();
            // What the client has may have been left out since.
            let same = last.left_out == recorded.left_out;
            same.then(|| new_blocks(recorded, pc, last.total))?
        }
    }
}

fn all_blocks(recorded: &RecordedBranches, pc: u64) -> Vec<BranchBlock> {
    let remaining = recorded.total.saturating_sub(recorded.left_out);
    let complete = remaining == recorded.branches.len() as u64;
    let first = complete.then_some(recorded.start);
    let begins = first
        .into_iter()
        .chain(recorded.branches.iter().map(|b| b.1));
    // Where the oldest branch is not the first one, the block that it ends has no known beginning.
    let from = recorded.branches.iter().map(|b| b.0);
    let ends = from.skip(usize::from(!complete)).chain([pc]);
    begins.zip(ends).collect()
}

fn new_blocks(recorded: &RecordedBranches, pc: u64, read: u64) -> Option<Vec<BranchBlock>> {
    let count = usize::try_from(recorded.total.checked_sub(read)?).ok()?;
    let from = recorded.branches.len().checked_sub(count)?;
    let branches = recorded.branches.get(from..)?;
    let begins = [0].into_iter().chain(branches.iter().map(|b| b.1));
    let ends = branches.iter().map(|b| b.0).chain([pc]);
    Some(begins.zip(ends).collect())
}

/// The document that answers `qXfer:btrace:read`, from blocks with the oldest first.
pub fn trace_xml(blocks: &[BranchBlock]) -> String {
    let mut text = "<!DOCTYPE btrace SYSTEM \"btrace.dtd\">\n<btrace version=\"1.0\">\n".to_owned();
    for (begin, end) in blocks.iter().rev() {
        let _ = writeln!(text, "<block begin=\"{begin:#x}\" end=\"{end:#x}\"/>");
    }
    text.push_str("</btrace>\n");
    text
}

/// The document that answers `qXfer:btrace-conf:read`, for a recording of at most `limit` branches;
/// `None`: nothing is recorded.
pub fn configuration_xml(limit: Option<usize>) -> String {
    let inner = match limit {
        Some(limit) => format!("<bts size=\"{:#x}\"/>\n", limit * BTS_RECORD_BYTES),
        None => String::new(),
    };
    format!(
        "<!DOCTYPE btrace-conf SYSTEM \"btrace-conf.dtd\">\n<btrace-conf \
         version=\"1.0\">\n{inner}</btrace-conf>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(total: u64) -> RecordedBranches {
        RecordedBranches {
            branches: vec![(0x10, 0x20), (0x28, 0x40)],
            total,
            start: 0x8,
            ..RecordedBranches::default()
        }
    }

    fn at(total: u64) -> Option<TracePosition> {
        Some(TracePosition {
            total,
            left_out: 0,
            pc: Some(0x44),
        })
    }

    #[test]
    fn complete_trace_begins_at_the_start_address() {
        assert_eq!(
            all_blocks(&recorded(2), 0x44),
            [(0x8, 0x10), (0x20, 0x28), (0x40, 0x44)]
        );
        let empty = RecordedBranches {
            start: 8,
            ..RecordedBranches::default()
        };
        assert_eq!(all_blocks(&empty, 8), [(8, 8)]);
    }

    #[test]
    fn trace_that_lost_branches_begins_after_its_oldest_branch() {
        assert_eq!(all_blocks(&recorded(9), 0x44), [(0x20, 0x28), (0x40, 0x44)]);
    }

    #[test]
    fn trace_with_left_out_repetitions_is_read_as_a_whole() {
        let recorded = RecordedBranches {
            left_out: 7,
            end: Some(0x40),
            ..recorded(9)
        };
        let expected = [(0x8, 0x10), (0x20, 0x28), (0x40, 0x40)];
        assert_eq!(all_blocks(&recorded, 0x40), expected);
        assert_eq!(blocks(&recorded, 0x999, TraceAnnex::Delta, at(8)), None);
        let all = blocks(&recorded, 0x999, TraceAnnex::All, None).unwrap();
        assert_eq!(
            all, expected,
            "the recording ended before the current instruction"
        );
    }

    #[test]
    fn new_trace_is_empty_when_the_vcpu_has_not_run() {
        let new = |last| blocks(&recorded(9), 0x44, TraceAnnex::New, last).unwrap();
        assert_eq!(new(at(9)), []);
        assert_eq!(new(at(8)).len(), 2);
        assert_eq!(new(None).len(), 2);
    }

    #[test]
    fn delta_begins_with_a_block_that_the_client_continues() {
        let delta = |read| blocks(&recorded(9), 0x44, TraceAnnex::Delta, at(read));
        let found = delta(8).unwrap();
        assert_eq!(found, [(0, 0x28), (0x40, 0x44)]);
        assert_eq!(delta(9).unwrap(), [(0, 0x44)]);
        assert_eq!(delta(6), None, "three branches are new, two are kept");
        let text = trace_xml(&found);
        assert!(text.find("0x40").unwrap() < text.find("0x28").unwrap());
    }
}
