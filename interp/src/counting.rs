//! Retired instructions by ring, and how far the performance counters let the processor run.
//!
//! Counting instructions costs nothing: the budget of a slice is cut so that it ends where the
//! platform wants to look at the counters. The instruction that a PEBS record is about is executed
//! in a slice of its own, or is the branch noted last.

#![expect(
    clippy::cast_possible_truncation,
    reason = "the clock of branches is cut to 32 bits"
)]

use crate::core::{Core, Fault};
use hindsight_cpu::pmu::pebs::{self, Sample};
use hindsight_cpu::pmu::{Counting, Ring};
use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess};
use std::collections::HashMap;

/// The longest instruction in bytes.
const LONGEST: usize = 15;
/// Instructions whose accesses are remembered.
const KNOWN: usize = 4096;

/// Whether an instruction reads and writes memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// It reads.
    pub load: bool,
    /// It writes.
    pub store: bool,
}

/// What is kept for the performance counters.
pub(crate) struct Counters {
    /// Instructions retired at CPL 1 to 3 before the current slice.
    user: u64,
    /// Where the slice runs.
    ring: Ring,
    /// RIP at the start of the slice.
    start: u64,
    /// RIP of the instruction that retired last, if it was a slice of its own.
    last: Option<u64>,
    wants: Counting,
    /// Accesses of instructions, by their bytes and code size.
    known: HashMap<(u128, u8), Accesses>,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self {
            user: 0,
            ring: Ring::Os,
            start: 0,
            last: None,
            wants: Counting::NONE,
            known: HashMap::new(),
        }
    }

    /// Instructions retired at CPL 1 to 3, with `used` ones of the current slice.
    pub(crate) fn user(&self, used: u64) -> u64 {
        match self.ring {
            Ring::Os => self.user,
            Ring::User => self.user.wrapping_add(used),
        }
    }

    /// Sets the count of instructions retired at CPL 1 to 3, in a state that comes from outside.
    pub(crate) fn set_user(&mut self, user: u64) {
        self.user = user;
        self.ring = Ring::Os;
        self.last = None;
    }

    /// Where the current slice runs.
    pub(crate) fn ring(&self) -> Ring {
        self.ring
    }

    /// Accesses are told one by one.
    pub(crate) fn tells_accesses(&self) -> bool {
        self.wants.accesses.is_some()
    }
}

impl Core {
    /// Starts a slice of at most `most` instructions, where `rest` may still follow, and of no more
    /// than the counters allow.
    pub(crate) fn begin_slice(&mut self, rest: i64, most: i64) {
        let counters = &mut self.counters;
        counters.ring = Ring::of(self.cpl);
        counters.start = self.rip;
        let mut left = counters.wants.instructions.left(counters.ring);
        if counters.wants.record.is_some() {
            left = 1;
        } else if counters.wants.last_alone && left != u64::MAX && left > 1 {
            left -= 1;
        }
        let rest = rest.min(i64::try_from(left).unwrap_or(i64::MAX)).max(1);
        self.begin(rest.min(most));
        self.beyond = rest - self.slice;
    }

    /// Ends a slice: counts what it retired, and says how many cycles it took.
    pub(crate) fn account(&mut self) -> i64 {
        let used = self.slice - self.budget;
        let extra = std::mem::take(&mut self.extra);
        let retired = (used - extra).max(0).cast_unsigned();
        self.extra_base = self.extra_base.wrapping_add_signed(extra);
        self.retired_base = self.retired_base.wrapping_add(retired);
        let counters = &mut self.counters;
        counters.user = counters.user(retired);
        if retired != 0 {
            counters.last = (retired == 1).then_some(counters.start);
            counters.wants.instructions.spend(counters.ring, retired);
        }
        self.begin(0);
        used
    }

    /// Asks the platform how far the counters let the processor run.
    pub(crate) fn recount(&mut self) {
        let wants = self.platform().counting();
        if wants.accesses.is_some() && !self.counters.tells_accesses() {
            self.leave = true;
        }
        self.counters.wants = wants;
    }

    /// At a boundary: has the counters looked at where they are due, and stores a PEBS record.
    pub(crate) fn look_at_counters(&mut self) {
        // Before the branches are told, and gone.
        let last = self.counters.last.or_else(|| self.branch_just_now());
        self.tell_if_due();
        if self.counters.wants.is_due() {
            self.tell_branches();
            self.platform().count();
            self.reobserve();
        }
        if let (Some(due), Some(eventing_rip)) = (self.counters.wants.record, last) {
            self.store_sample(&due, eventing_rip);
        }
    }

    /// RIP of the branch noted last, if nothing retired after it.
    fn branch_just_now(&self) -> Option<u64> {
        let branch = self.rec.last()?;
        let now = self.retired_base as u32;
        (branch.at == now && branch.class.is_instruction()).then_some(branch.from)
    }

    fn store_sample(&mut self, due: &pebs::Due, eventing_rip: u64) {
        let mut gpr = [0; 16];
        gpr.copy_from_slice(&self.regs[..16]);
        let sample = Sample {
            rflags: self.rflags(),
            rip: self.rip,
            gpr,
            long: self.code == 8,
            eventing_rip,
            tsc: self.platform().tsc(),
        };
        let stored = pebs::store(self, due, &sample);
        self.platform().pebs_stored(&stored);
        self.reobserve();
    }

    /// What the instruction at RIP does to memory, if that is told.
    pub(crate) fn watched_accesses(&mut self) -> Option<Accesses> {
        if self.counters.tells_accesses() {
            self.accesses().ok()
        } else {
            None
        }
    }

    /// What the instruction at RIP, which was decoded without a fault, does to memory.
    fn accesses(&mut self) -> Result<Accesses, Fault> {
        let mut bytes = [0; 16];
        let lin = self.code_lin(self.rip);
        let first = LONGEST.min(Self::page_rest(lin));
        let gpa = self.translate_code(lin)?;
        self.read_phys(gpa, &mut bytes[..first]);
        if first < LONGEST {
            let next = lin.wrapping_add(first as u64) & self.ip_mask;
            // An instruction that ends in its page needs nothing of the next one.
            if let Ok(gpa) = self.translate_code(next) {
                self.read_phys(gpa, &mut bytes[first..LONGEST]);
            }
        }
        self.leave = false;
        let key = (u128::from_le_bytes(bytes), self.code);
        if let Some(known) = self.counters.known.get(&key) {
            return Ok(*known);
        }
        let found = decode_accesses(&bytes[..LONGEST], self.code);
        if self.counters.known.len() >= KNOWN {
            self.counters.known.clear();
        }
        self.counters.known.insert(key, found);
        Ok(found)
    }

    /// An instruction with these accesses retired.
    pub(crate) fn tell_accesses(&mut self, ring: Ring, accesses: Accesses) {
        if !accesses.load && !accesses.store {
            return;
        }
        if let Some(quota) = &mut self.counters.wants.accesses {
            quota.spend(ring, 1);
        }
        self.platform().accessed(ring, accesses);
    }
}

fn decode_accesses(bytes: &[u8], code: u8) -> Accesses {
    let mut decoder = Decoder::new(u32::from(code) * 8, bytes, DecoderOptions::NONE);
    let insn = decoder.decode();
    let mut found = Accesses::default();
    for memory in InstructionInfoFactory::new().info(&insn).used_memory() {
        match memory.access() {
            OpAccess::Read | OpAccess::CondRead => found.load = true,
            OpAccess::Write | OpAccess::CondWrite => found.store = true,
            OpAccess::ReadWrite | OpAccess::ReadCondWrite => {
                found.load = true;
                found.store = true;
            }
            OpAccess::None | OpAccess::NoMemAccess => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_follow_the_operands() {
        for (bytes, load, store) in [
            (&[0x48, 0x8b, 0x00][..], true, false),
            (&[0x48, 0x89, 0x00], false, true),
            (&[0x48, 0x01, 0x00], true, true),
            (&[0x48, 0x8d, 0x00], false, false),
            (&[0x50], false, true),
            (&[0x58], true, false),
            (&[0xc3], true, false),
            (&[0xe8, 0, 0, 0, 0], false, true),
            (&[0xf3, 0xa4], true, true),
            (&[0x0f, 0x1f, 0x00], false, false),
            (&[0x0f, 0x18, 0x08], false, false),
            (&[0x90], false, false),
        ] {
            assert_eq!(
                decode_accesses(bytes, 8),
                Accesses { load, store },
                "{bytes:x?}"
            );
        }
    }
}
