//! Accesses to the DS save area by the processor itself. SDM Vol. 3B, "BTS and DS Save Area".

use crate::core::Core;
use crate::mmu::{AccessKind, TlbSet};
use crate::seg::canonical;
use hindsight_cpu::branch::bts::DsMemory;

impl Core {
    /// Guest-physical address of a byte in the DS save area; `None` where the access would fault.
    fn ds_address(&mut self, linear: u64, access: AccessKind) -> Option<u64> {
        if (self.lma() && !canonical(linear)) || (!self.lma() && linear >> 32 != 0) {
            return None;
        }
        let set = TlbSet::DebugStore;
        let found = self.translate(linear, access, set).ok()?;
        let page = self.memory.page(found.gpa)?;
        if access == AccessKind::Write && !page.writable {
            return None;
        }
        self.enter_page(linear, found, access, set);
        Some(found.gpa)
    }

    /// The two pieces, as address and length, of eight bytes that may reach into a second page.
    fn ds_pieces(&mut self, linear: u64, access: AccessKind) -> Option<[(u64, usize); 2]> {
        let len: usize = 8;
        let first = len.min(Self::page_rest(linear));
        let low = self.ds_address(linear, access)?;
        let high = if first < len {
            self.ds_address(linear.wrapping_add(first as u64), access)?
        } else {
            0
        };
        Some([(low, first), (high, len - first)])
    }
}

impl DsMemory for Core {
    fn read(&mut self, linear: u64) -> Option<u64> {
        if let Some(value) = self.ds_fast_read(linear) {
            return Some(value);
        }
        let mut bytes = [0; 8];
        let mut done = 0;
        for (gpa, len) in self.ds_pieces(linear, AccessKind::Read)? {
            self.read_phys(gpa, &mut bytes[done..done + len]);
            done += len;
        }
        Some(u64::from_le_bytes(bytes))
    }

    fn writable(&mut self, linear: u64) -> bool {
        self.ds_can_write(linear) || self.ds_pieces(linear, AccessKind::Write).is_some()
    }

    fn write(&mut self, linear: u64, words: &[u64]) -> bool {
        if self.ds_fast_write(linear, words) {
            return true;
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // Nothing is stored if one of the pages faults. A PEBS record may have more than a page.
        let mut pieces = Vec::new();
        let mut rest = bytes.as_slice();
        let mut at = linear;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.len().min(Self::page_rest(at)));
            let Some(gpa) = self.ds_address(at, AccessKind::Write) else {
                return false;
            };
            pieces.push((gpa, piece));
            (at, rest) = (at.wrapping_add(piece.len() as u64), after);
        }
        for (gpa, piece) in pieces {
            self.write_phys(gpa, piece);
        }
        true
    }
}
