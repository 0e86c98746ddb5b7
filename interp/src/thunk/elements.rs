//! Executes gathers, scatters and byte-masked stores, element by element.
//!
//! Only the elements that are accessed can fault or trigger a watchpoint. A fault leaves the
//! accesses to the elements before it in effect.
//!
//! SDM Vol. 2, "VSIB Memory Addressing", "VPGATHERDD", "VPSCATTERDD", "MASKMOVDQU".

use super::check_state;
use crate::core::{Core, Op, truncate};
use crate::fault::Fault;
use crate::ops::Done;
use crate::registers::Reg;
use iced_x86::{EncodingKind, Instruction, Mnemonic as M, Register};

/// Executes an instruction whose support is [`super::Support::Elements`].
pub(crate) fn run(c: &mut Core, o: &Op) -> Done {
    let i = c.code.insns[o.insn as usize];
    match i.mnemonic() {
        M::Maskmovq => masked_mmx(c, o, &i),
        M::Maskmovdqu | M::Vmaskmovdqu => masked_xmm(c, o, &i),
        _ => {
            check_state(c, i.encoding(), true, false)?;
            let shape = Shape::of(&i)?;
            if shape.store {
                scatter(c, o, &shape)
            } else {
                gather(c, o, &shape)
            }
        }
    }
}

/// The registers and sizes of a gather or scatter.
#[derive(Debug)]
struct Shape {
    /// Number of the vector register that is loaded or stored.
    data: usize,
    index: usize,
    /// Number of the mask: an opmask register or, with VEX, a vector register.
    mask: usize,
    vex: bool,
    store: bool,
    element: usize,
    index_size: usize,
    scale: u32,
    count: usize,
}

impl Shape {
    /// Returns the shape of an instruction; #UD if registers that must differ do not.
    fn of(i: &Instruction) -> Result<Self, Fault> {
        let vex = i.encoding() == EncodingKind::VEX;
        let store = !i.op0_register().is_vector_register();
        let data = if store {
            i.op1_register()
        } else {
            i.op0_register()
        };
        let index = i.memory_index();
        let element = i
            .memory_size()
            .element_size()
            .max(i.memory_size().size())
            .clamp(4, 8);
        let index_size = index_size(i.mnemonic());
        let mask = if vex { i.op2_register() } else { i.op_mask() };
        let shape = Self {
            data: data.number() & 31,
            index: index.number() & 31,
            mask: mask.number() & 31,
            vex,
            store,
            element,
            index_size,
            scale: i.memory_index_scale(),
            count: (data.size() / element).min(index.size() / index_size),
        };
        let same = shape.data == shape.index;
        let bad = if vex {
            same || shape.mask == shape.index || shape.mask == shape.data
        } else {
            mask == Register::None || mask == Register::K0 || (same && !store)
        };
        if bad { Err(Fault::UD) } else { Ok(shape) }
    }

    fn is_enabled(&self, c: &Core, n: usize) -> bool {
        if self.vex {
            c.vec.zmm[self.mask][(n + 1) * self.element - 1] & 0x80 != 0
        } else {
            c.vec.k[self.mask & 7] >> n & 1 != 0
        }
    }

    /// Clears the mask of element `n` after the element was accessed.
    fn done(&self, c: &mut Core, n: usize) {
        if self.vex {
            c.vec.zmm[self.mask][n * self.element..(n + 1) * self.element].fill(0);
        } else {
            c.vec.k[self.mask & 7] &= !(1 << n);
        }
    }

    fn linear(&self, c: &Core, o: &Op, n: usize) -> Result<u64, Fault> {
        let at = n * self.index_size;
        let raw = &c.vec.zmm[self.index][at..at + self.index_size];
        let index = match *raw {
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            _ => raw.try_into().map_or(0, i64::from_le_bytes),
        };
        let offset = c
            .regs
            .get(o.base)
            .wrapping_add(index.cast_unsigned().wrapping_mul(self.scale.into()))
            .wrapping_add(o.disp);
        c.linear(
            o.segment(),
            truncate(offset, o.address_size),
            self.element as u64,
            self.store,
        )
    }
}

fn index_size(m: M) -> usize {
    match m {
        M::Vpgatherdd
        | M::Vpgatherdq
        | M::Vgatherdps
        | M::Vgatherdpd
        | M::Vpscatterdd
        | M::Vpscatterdq
        | M::Vscatterdps
        | M::Vscatterdpd => 4,
        _ => 8,
    }
}

fn gather(c: &mut Core, o: &Op, shape: &Shape) -> Done {
    for n in 0..shape.count {
        if !shape.is_enabled(c, n) {
            continue;
        }
        let lin = shape.linear(c, o, n)?;
        let at = n * shape.element;
        if shape.element == 4 {
            let v: u32 = c.read(lin)?;
            c.vec.zmm[shape.data][at..at + 4].copy_from_slice(&v.to_le_bytes());
        } else {
            let v: u64 = c.read(lin)?;
            c.vec.zmm[shape.data][at..at + 8].copy_from_slice(&v.to_le_bytes());
        }
        shape.done(c, n);
    }
    c.vec.zmm[shape.data][shape.count * shape.element..].fill(0);
    finish(c, shape);
    Ok(())
}

fn scatter(c: &mut Core, o: &Op, shape: &Shape) -> Done {
    for n in 0..shape.count {
        if !shape.is_enabled(c, n) {
            continue;
        }
        let lin = shape.linear(c, o, n)?;
        let at = n * shape.element;
        let bytes = &c.vec.zmm[shape.data][at..at + shape.element];
        match *bytes {
            [a, b, x, y] => c.write(lin, u32::from_le_bytes([a, b, x, y]))?,
            _ => {
                let v = bytes.try_into().map_or(0, u64::from_le_bytes);
                c.write(lin, v)?;
            }
        }
        shape.done(c, n);
    }
    finish(c, shape);
    Ok(())
}

/// Clears the whole mask at the end of the instruction.
fn finish(c: &mut Core, shape: &Shape) {
    if shape.vex {
        c.vec.zmm[shape.mask].fill(0);
    } else {
        c.vec.k[shape.mask & 7] = 0;
    }
}

fn masked_xmm(c: &mut Core, o: &Op, i: &Instruction) -> Done {
    check_state(c, i.encoding(), true, false)?;
    let low = |r: Register| {
        let mut v = [0; 16];
        v.copy_from_slice(&c.vec.zmm[r.number() & 31][..16]);
        v
    };
    let (data, mask) = (low(i.op1_register()), low(i.op2_register()));
    store_masked(c, o, &data, &mask)
}

fn masked_mmx(c: &mut Core, o: &Op, i: &Instruction) -> Done {
    check_state(c, i.encoding(), false, true)?;
    let low = |r: Register| {
        let mut v = [0; 8];
        v.copy_from_slice(c.vec.mmx(r.number()));
        v
    };
    let (data, mask) = (low(i.op1_register()), low(i.op2_register()));
    store_masked(c, o, &data, &mask)?;
    c.vec.enter_mmx();
    Ok(())
}

/// Stores the bytes whose mask byte has bit 7 set, at DS:rDI.
///
/// If one of them would fault, none is stored.
fn store_masked(c: &mut Core, o: &Op, data: &[u8], mask: &[u8]) -> Done {
    let base = truncate(c.regs.get(Reg::Rdi), o.address_size);
    let mut runs = Vec::new();
    let mut at = 0;
    for part in mask.chunk_by(|a, b| (a ^ b) & 0x80 == 0) {
        if part[0] & 0x80 != 0 {
            let offset = truncate(base.wrapping_add(at as u64), o.address_size);
            let lin = c.linear(o.segment(), offset, part.len() as u64, true)?;
            c.probe_write(lin, part.len())?;
            runs.push((lin, at..at + part.len()));
        }
        at += part.len();
    }
    for (lin, range) in runs {
        c.write_bytes(lin, &data[range])?;
    }
    Ok(())
}
