//! Reads a thunk's memory operand into the buffer, and writes it back afterwards.

use super::codegen::{Access, Thunk};
use super::masking;
use crate::core::{Core, Op};
use crate::facts::needs_alignment;
use crate::fault::Fault;
use crate::mmu::TlbSet;
use crate::ops::Done;
use crate::registers::Reg;
use iced_x86::Instruction;
use std::ops::Range;

/// The memory operand of a thunk: its address, and the elements that are accessed.
#[derive(Debug)]
pub(super) struct MemoryOperand {
    seg: usize,
    offset: u64,
    write: bool,
    part: ElementSet,
}

/// The elements of the operand that are accessed.
#[derive(Clone, Copy, Debug)]
struct ElementSet {
    /// A bit mask of elements.
    elements: u64,
    /// Size of an element in bytes.
    element: usize,
}

/// Raises #AC if alignment is checked and an operand of `len` bytes is misaligned.
///
/// SDM Vol. 3A, Table "Alignment Requirements by Data Type": 80-bit values need 8 bytes. Operands
/// of 16 bytes and more raise no #AC: "the alignment check exception (#AC) is generated only for
/// data types that must be aligned on word, doubleword, and quadword boundaries".
///
/// Deviation: AMD family 1AH raises #AC for those too.
fn check_ac(c: &Core, lin: u64, len: usize) -> Done {
    match len {
        2 | 4 | 8 => c.check_alignment(lin, len),
        10 => c.check_alignment(lin, 8),
        _ => Ok(()),
    }
}

/// Checks the operand, and reads it into the buffer.
pub(super) fn prepare(
    c: &mut Core,
    o: &Op,
    i: &Instruction,
    t: &Thunk,
) -> Result<Option<MemoryOperand>, Fault> {
    let Some(m) = t.memory else { return Ok(None) };
    let whole = ElementSet {
        elements: 1,
        element: m.size,
    };
    let part = m.masking.map_or(whole, |masking| ElementSet {
        elements: masking.elements(&c.vec),
        element: masking.element,
    });
    let operand = MemoryOperand {
        seg: o.segment(),
        offset: c.offset(o),
        write: m.write,
        part,
    };
    if needs_alignment(i, m.size) {
        operand.check_alignment(c, &m)?;
    }
    let mut bytes = [0; 64];
    if m.read {
        operand.read(c, &mut bytes)?;
    }
    c.vec.buffer = bytes;
    if m.write {
        let suppresses = m.masking.is_none_or(|masking| masking.suppresses);
        operand.probe_write(c, if suppresses { part } else { whole })?;
    }
    Ok(Some(operand))
}

/// Writes the result from the buffer to memory.
pub(super) fn finish(c: &mut Core, operand: &MemoryOperand) -> Done {
    if !operand.write {
        return Ok(());
    }
    let bytes = c.vec.buffer;
    operand.each(c, operand.part, |c, lin, range| {
        c.write_bytes(lin, &bytes[range])
    })
}

impl ElementSet {
    /// Returns the elements' byte ranges, lowest first, each of at most `most` elements.
    fn ranges(self, most: u32) -> impl Iterator<Item = Range<usize>> {
        let mut left = self.elements;
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let first = left.trailing_zeros();
            let count = (left >> first).trailing_ones().min(most);
            left &= !(masking::low_bits(count as usize) << first);
            let at = first as usize * self.element;
            Some(at..at + count as usize * self.element)
        })
    }
}

impl MemoryOperand {
    fn linear(&self, c: &Core, range: &Range<usize>) -> Result<u64, Fault> {
        let offset = self.offset.wrapping_add(range.start as u64);
        c.linear(self.seg, offset, range.len() as u64, self.write)
    }

    /// Calls `access` with the linear address of each byte range of a part.
    fn each(
        &self,
        c: &mut Core,
        part: ElementSet,
        mut access: impl FnMut(&mut Core, u64, Range<usize>) -> Done,
    ) -> Done {
        // With alignment checking, each element is checked separately.
        let most = if c.mmu.rights() == TlbSet::UserAligned {
            1
        } else {
            u64::BITS
        };
        for range in part.ranges(most) {
            if let Ok(lin) = self.linear(c, &range) {
                access(c, lin, range)?;
                continue;
            }
            // An element before the one that is out of bounds may fault first.
            for at in range.step_by(part.element) {
                let element = at..at + part.element;
                let lin = self.linear(c, &element)?;
                access(c, lin, element)?;
            }
        }
        Ok(())
    }

    /// Raises #GP if the operand is not aligned to its size, whatever the mask is.
    ///
    /// SDM Vol. 2A, Table "Type E1 Class Exception Conditions": fault suppression does not apply to
    /// this fault.
    ///
    /// Deviation: AMD family 1AH raises nothing if the mask selects no element.
    fn check_alignment(&self, c: &Core, m: &Access) -> Done {
        let lin = if m.masking.is_some() {
            c.regs
                .get(Reg::segment_base(self.seg))
                .wrapping_add(self.offset)
        } else {
            self.linear(c, &(0..m.size))?
        };
        if lin & (m.size as u64 - 1) == 0 {
            Ok(())
        } else {
            Err(Fault::GP)
        }
    }

    fn read(&self, c: &mut Core, bytes: &mut [u8; 64]) -> Done {
        self.each(c, self.part, |c, lin, range| {
            check_ac(c, lin, range.len())?;
            c.read_bytes(lin, &mut bytes[range])
        })
    }

    fn probe_write(&self, c: &mut Core, part: ElementSet) -> Done {
        self.each(c, part, |c, lin, range| {
            check_ac(c, lin, range.len())?;
            c.probe_write(lin, range.len())
        })
    }
}
