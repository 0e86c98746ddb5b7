//! The memory operand of a thunk: fetched into the buffer before, written from it after.

use super::codegen::Thunk;
use crate::core::{ACV, Core, Fault, GP0};
use crate::op::Op;
use crate::ops::Done;
use iced_x86::{EncodingKind, Instruction, MemorySize, Mnemonic as M, Register};

/// Where the result goes.
#[derive(Debug)]
pub(super) struct Place {
    lin: u64,
    size: usize,
    write: bool,
    /// One bit for each element that is accessed, and the size of an element.
    mask: Option<(u64, usize)>,
}

/// The operand must be aligned to its size.
fn aligned(i: &Instruction, size: usize) -> bool {
    match i.mnemonic() {
        M::Movups
        | M::Movupd
        | M::Movdqu
        | M::Lddqu
        | M::Pcmpestri
        | M::Pcmpestrm
        | M::Pcmpistri
        | M::Pcmpistrm => false,
        M::Movaps
        | M::Movapd
        | M::Movdqa
        | M::Movntdq
        | M::Movntdqa
        | M::Movntps
        | M::Movntpd
        | M::Vmovaps
        | M::Vmovapd
        | M::Vmovdqa
        | M::Vmovdqa32
        | M::Vmovdqa64
        | M::Vmovntdq
        | M::Vmovntdqa
        | M::Vmovntps
        | M::Vmovntpd => true,
        _ => size == 16 && i.encoding() == EncodingKind::Legacy,
    }
}

/// The elements that a masked access touches.
fn mask(c: &Core, i: &Instruction, size: usize) -> Option<(u64, usize)> {
    let element = i.memory_size().element_size().max(1);
    let from_vector = |r: Register| {
        let reg = &c.vec.zmm[r.number() & 31];
        let tops = reg[..size]
            .chunks(element)
            .map(|e| e.last().is_some_and(|b| b & 0x80 != 0));
        tops.enumerate()
            .fold(0, |m, (n, on)| m | u64::from(on) << n)
    };
    match i.mnemonic() {
        M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq => {
            // The mask is the second operand, for loads and for stores.
            Some((from_vector(i.op1_register()), element))
        }
        _ if i.has_op_mask() => {
            let k = c.vec.k[i.op_mask().number() & 7];
            if i.is_broadcast() || i.memory_size() == MemorySize::Unknown {
                None
            } else {
                Some((k, element))
            }
        }
        _ => None,
    }
}

/// Checks the operand and fetches it.
pub(super) fn prepare(
    c: &mut Core,
    o: &Op,
    i: &Instruction,
    t: &Thunk,
) -> Result<Option<Place>, Fault> {
    let Some(m) = t.memory else { return Ok(None) };
    let lin = c.linear(o.seg, c.offset(o), m.size as u64, m.write)?;
    if aligned(i, m.size) && lin & (m.size as u64 - 1) != 0 {
        return Err(GP0);
    }
    if c.set == crate::tlb::Set::Never as usize && m.size < 16 && lin & (m.size as u64 - 1) != 0 {
        return Err(Fault::Code(ACV, 0));
    }
    let mask = mask(c, i, m.size);
    c.vec.buffer.fill(0);
    let place = Place {
        lin,
        size: m.size,
        write: m.write,
        mask,
    };
    let mut bytes = [0; 64];
    if m.read {
        for (at, len) in place.parts() {
            c.read_bytes(lin.wrapping_add(at as u64), &mut bytes[at..at + len])?;
        }
        c.vec.buffer = bytes;
    }
    if m.write {
        for (at, len) in place.parts() {
            c.probe_write(lin.wrapping_add(at as u64), len)?;
        }
    }
    Ok(Some(place))
}

/// Writes the result.
pub(super) fn finish(c: &mut Core, place: &Place) -> Done {
    if place.write {
        let bytes = c.vec.buffer;
        for (at, len) in place.parts() {
            c.write_bytes(place.lin.wrapping_add(at as u64), &bytes[at..at + len])?;
        }
    }
    Ok(())
}

impl Place {
    /// The parts that are accessed: offset and length.
    fn parts(&self) -> Vec<(usize, usize)> {
        match self.mask {
            None => vec![(0, self.size)],
            Some((mask, element)) => (0..self.size / element)
                .filter(|n| mask >> n & 1 != 0)
                .map(|n| (n * element, element))
                .collect(),
        }
    }
}
