//! RCPPS and RSQRTPS, to the bit.

use crate::core::{Core, Op};
use crate::fault::Fault;
use crate::ops::{self, Done};
use crate::softvec::estimate::{reciprocal, reciprocal_root};
use crate::thunk;
use iced_x86::{Instruction, Mnemonic as M};

pub(super) fn run(c: &mut Core, o: &Op, i: &Instruction) -> Done {
    thunk::check_state(c, i.encoding(), true, false)?;
    let lanes = if matches!(i.mnemonic(), M::Rcpps | M::Rsqrtps) {
        4
    } else {
        1
    };
    let source = read(c, o, i, lanes)?;
    let function = match i.mnemonic() {
        M::Rcpps | M::Rcpss => reciprocal,
        _ => reciprocal_root,
    };
    let target = &mut c.vec.zmm[i.op0_register().number() & 31];
    for (element, from) in target
        .chunks_exact_mut(4)
        .zip(source.chunks_exact(4))
        .take(lanes)
    {
        let v = from.try_into().map_or(0, u32::from_le_bytes);
        element.copy_from_slice(&function(v).to_le_bytes());
    }
    Ok(())
}

fn read(c: &mut Core, o: &Op, i: &Instruction, lanes: usize) -> Result<[u8; 16], Fault> {
    let mut bytes = [0; 16];
    if !o.is_mem() {
        bytes.copy_from_slice(&c.vec.zmm[i.op1_register().number() & 31][..16]);
        return Ok(bytes);
    }
    let lin = ops::src(c, o, 4 * lanes)?;
    if lanes == 4 && lin & 15 != 0 {
        return Err(Fault::GP);
    }
    c.read_bytes(lin, &mut bytes[..4 * lanes])?;
    Ok(bytes)
}
