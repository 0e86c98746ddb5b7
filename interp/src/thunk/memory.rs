//! The memory operand of a thunk: fetched into the buffer before, written from it after.

use super::codegen::Thunk;
use crate::core::{ACV, Core, Fault, GP0, cut};
use crate::op::Op;
use crate::ops::Done;
use iced_x86::{EncodingKind, Instruction, Mnemonic as M};

/// Where the result goes.
#[derive(Debug)]
pub(super) struct Place {
    seg: u8,
    offset: u64,
    asz: u8,
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
        | M::Pcmpistrm
        | M::Pcmpestri64
        | M::Pcmpestrm64 => false,
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

/// A masked instruction that reads its whole operand all the same: the manual's exception classes
/// with "NF", no fault suppression.
fn reads_all(i: &Instruction) -> bool {
    const NO_SUPPRESSION: [&str; 13] = [
        "Vpunpck",
        "Vunpck",
        "Vpack",
        "Vperm",
        "Valign",
        "Vpalign",
        "Vdbpsadbw",
        "Vpshuf",
        "Vshuf",
        "Vinserti",
        "Vinsertf",
        "Vpmultishift",
        "Vpsadbw",
    ];
    let name = format!("{:?}", i.mnemonic());
    // Shifts whose count, not their data, is in memory.
    let count = ["Vpsll", "Vpsrl", "Vpsra"]
        .iter()
        .any(|p| name.starts_with(p))
        && !["lv", "av"].iter().any(|v| name.contains(v))
        && i.op2_kind() == iced_x86::OpKind::Memory;
    count || NO_SUPPRESSION.iter().any(|p| name.starts_with(p))
}

/// The elements that a masked access touches.
fn mask(c: &Core, i: &Instruction, size: usize) -> Option<(u64, usize)> {
    let element = i.memory_size().element_size().max(1);
    let k = c.vec.k[i.op_mask().number() & 7];
    match i.mnemonic() {
        M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq => {
            // The mask is the second operand, for loads and for stores.
            let reg = &c.vec.zmm[i.op1_register().number() & 31];
            let tops = reg[..size]
                .chunks(element)
                .map(|e| e.last().is_some_and(|b| b & 0x80 != 0));
            let bits = tops
                .enumerate()
                .fold(0, |m, (n, on)| m | u64::from(on) << n);
            Some((bits, element))
        }
        _ if !i.has_op_mask() => None,
        M::Vcompressps
        | M::Vcompresspd
        | M::Vpcompressb
        | M::Vpcompressw
        | M::Vpcompressd
        | M::Vpcompressq
        | M::Vexpandps
        | M::Vexpandpd
        | M::Vpexpandb
        | M::Vpexpandw
        | M::Vpexpandd
        | M::Vpexpandq => {
            let all = (1_u64 << (size / element).min(63)) - 1;
            let all = if size / element >= 64 { u64::MAX } else { all };
            let n = (k & all).count_ones();
            Some((if n >= 64 { u64::MAX } else { (1 << n) - 1 }, element))
        }
        _ if i.is_broadcast() => {
            let lanes = i.op0_register().size() / element;
            let any = lanes >= 64 || k & ((1 << lanes) - 1) != 0;
            Some((u64::from(any), size))
        }
        _ => Some((k, element)),
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
    let offset = c.offset(o);
    let mut place = Place {
        seg: o.seg,
        offset,
        asz: o.asz,
        size: m.size,
        write: m.write,
        mask: None,
    };
    c.vec.buffer.fill(0);
    if aligned(i, m.size) {
        let lin = c.linear(o.seg, offset, m.size as u64, m.write)?;
        if lin & (m.size as u64 - 1) != 0 {
            return Err(GP0);
        }
    }
    let mut bytes = [0; 64];
    if m.read && !m.write {
        // Masks may be finer or coarser than the operand's elements: they only count if the whole
        // cannot be read, or meets a breakpoint (OP-09).
        let before = (c.hits, c.stops.hit);
        let whole = place.read(c, &mut bytes);
        if whole.is_err() || (c.hits, c.stops.hit) != before {
            place.mask = mask(c, i, m.size);
            if place.mask.is_none() || reads_all(i) {
                whole?;
            } else {
                (c.hits, c.stops.hit) = before;
                bytes = [0; 64];
                place.read(c, &mut bytes)?;
            }
        }
    } else {
        place.mask = mask(c, i, m.size);
        if m.read {
            place.read(c, &mut bytes)?;
        }
    }
    c.vec.buffer = bytes;
    if m.write {
        for (at, len) in place.parts() {
            let lin = place.linear(c, at, len)?;
            c.probe_write(lin, len)?;
        }
    }
    Ok(Some(place))
}

/// Writes the result.
pub(super) fn finish(c: &mut Core, place: &Place) -> Done {
    if place.write {
        let bytes = c.vec.buffer;
        for (at, len) in place.parts() {
            let lin = place.linear(c, at, len)?;
            c.write_bytes(lin, &bytes[at..at + len])?;
        }
    }
    Ok(())
}

impl Place {
    fn linear(&self, c: &Core, at: usize, len: usize) -> Result<u64, Fault> {
        let offset = cut(self.offset.wrapping_add(at as u64), self.asz);
        c.linear(self.seg, offset, len as u64, self.write)
    }

    fn read(&self, c: &mut Core, bytes: &mut [u8; 64]) -> Done {
        for (at, len) in self.parts() {
            let lin = self.linear(c, at, len)?;
            if c.set == crate::tlb::Set::Never && len < 16 && lin & (len as u64 - 1) != 0 {
                return Err(Fault::Code(ACV, 0));
            }
            c.read_bytes(lin, &mut bytes[at..at + len])?;
        }
        Ok(())
    }

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
