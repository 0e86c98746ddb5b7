//! The control instructions of the x87, and those that store and load its environment.
//! SDM Vol. 1, "x87 FPU Control Instructions".

#![expect(clippy::cast_possible_truncation, reason = "fields of the areas")]
use super::{Done, general, load, store};
use crate::core::{Core, Handler, Op};
use crate::fault::Fault;
use crate::registers::Reg;
use hindsight_regs::cr::Cr0;
use iced_x86::{Code, Instruction, Mnemonic as M};

pub(crate) fn handler(i: &Instruction) -> Option<Handler> {
    Some(match i.mnemonic() {
        M::Fninit => general!(fninit),
        M::Fnclex => general!(fnclex),
        M::Fldcw => general!(fldcw),
        M::Fnstcw => general!(fnstcw),
        M::Fnstsw => general!(fnstsw),
        M::Emms => general!(emms),
        M::Fnstenv => match i.code() {
            Code::Fnstenv_m14byte => general!(fnstenv::<2, false>),
            _ => general!(fnstenv::<4, false>),
        },
        M::Fnsave => match i.code() {
            Code::Fnsave_m94byte => general!(fnstenv::<2, true>),
            _ => general!(fnstenv::<4, true>),
        },
        M::Fldenv => match i.code() {
            Code::Fldenv_m14byte => general!(fldenv::<2, false>),
            _ => general!(fldenv::<4, false>),
        },
        M::Frstor => match i.code() {
            Code::Frstor_m94byte => general!(fldenv::<2, true>),
            _ => general!(fldenv::<4, true>),
        },
        _ => return None,
    })
}

fn x87_check(c: &Core) -> Done {
    if c.cr0(Cr0::EM | Cr0::TS) {
        Err(Fault::NM)
    } else {
        Ok(())
    }
}

fn fninit(c: &mut Core, _: &Op) -> Done {
    x87_check(c)?;
    c.vec.set_top(0);
    let registers = c.vec.fx;
    c.vec.init_x87();
    // The registers keep their contents; only their tags become empty.
    c.vec.fx[32..160].copy_from_slice(&registers[32..160]);
    c.update_ferr();
    Ok(())
}

fn fnclex(c: &mut Core, _: &Op) -> Done {
    x87_check(c)?;
    let v = c.vec.fsw() & !0x80ff;
    c.vec.set_fsw(v);
    c.update_ferr();
    Ok(())
}

fn fldcw(c: &mut Core, o: &Op) -> Done {
    x87_check(c)?;
    c.check_x87_pending()?;
    let v: u16 = load(c, o)?;
    c.vec.set_fcw(v);
    c.update_ferr();
    Ok(())
}

fn fnstcw(c: &mut Core, o: &Op) -> Done {
    x87_check(c)?;
    let v = c.vec.fcw();
    store(c, o, v)
}

fn fnstsw(c: &mut Core, o: &Op) -> Done {
    x87_check(c)?;
    let v = c.vec.fsw();
    if o.is_mem() {
        return store(c, o, v);
    }
    c.regs.write(Reg::Rax, v);
    Ok(())
}

fn emms(c: &mut Core, _: &Op) -> Done {
    if c.cr0(Cr0::EM) {
        return Err(Fault::UD);
    }
    if c.cr0(Cr0::TS) {
        return Err(Fault::NM);
    }
    c.check_x87_pending()?;
    c.vec.set_top(0);
    c.vec.fx[4] = 0;
    Ok(())
}

/// The full tag word from the abridged one and the registers.
fn tags(c: &Core) -> u16 {
    let (fx, top) = (&c.vec.fx, usize::from(c.vec.fsw() >> 11 & 7));
    let mut word = 0;
    for physical in 0..8 {
        let tag = if fx[4] >> physical & 1 == 0 {
            3
        } else {
            let at = 32 + 16 * ((physical + 8 - top) % 8);
            let reg = &fx[at..at + 10];
            let exponent = u16::from_le_bytes([reg[8], reg[9]]) & 0x7fff;
            let zero = reg[..8].iter().all(|&b| b == 0);
            match exponent {
                0 if zero => 1,
                0 | 0x7fff => 2,
                _ if reg[7] & 0x80 == 0 => 2,
                _ => 0,
            }
        };
        word |= tag << (2 * physical);
    }
    word
}

/// FNSTENV and FNSAVE (`ALL`) in the format of 16- or 32-bit fields (`W`). SDM Vol. 1, "Saving the
/// x87 FPU's State with FSTENV/FNSTENV and FSAVE/FNSAVE". The selectors read as 0.
fn fnstenv<const W: usize, const ALL: bool>(c: &mut Core, o: &Op) -> Done {
    x87_check(c)?;
    let fx = c.vec.fx;
    let fip = u32::from_le_bytes([fx[8], fx[9], fx[10], fx[11]]);
    let fdp = u32::from_le_bytes([fx[16], fx[17], fx[18], fx[19]]);
    let fop = u32::from(c.vec.fop());
    let pointers = if c.mode.protected() {
        [fip, fop << 16, fdp, 0xffff_0000]
    } else {
        let high = |p: u32| (p >> 16) << 12;
        let low = |p: u32| p & 0xffff | 0xffff_0000;
        [low(fip), high(fip) | fop, low(fdp), high(fdp)]
    };
    let [fip, fcs, fdp, fds] = pointers;
    let fields = [
        u32::from(c.vec.fcw()) | 0xffff_0000,
        u32::from(c.vec.fsw()) | 0xffff_0000,
        u32::from(tags(c)) | 0xffff_0000,
        fip,
        fcs,
        fdp,
        fds,
    ];
    let mut data: Vec<u8> = fields
        .iter()
        .flat_map(|f| f.to_le_bytes()[..W].to_vec())
        .collect();
    if ALL {
        for n in 0..8 {
            data.extend_from_slice(&fx[32 + 16 * n..42 + 16 * n]);
        }
    }
    let lin = super::dst(c, o, data.len())?;
    c.check_alignment(lin, W)?;
    c.write_bytes(lin, &data)?;
    if ALL {
        return fninit(c, o);
    }
    let masked = c.vec.fcw() | 0x3f;
    c.vec.set_fcw(masked);
    c.update_ferr();
    Ok(())
}

fn fldenv<const W: usize, const ALL: bool>(c: &mut Core, o: &Op) -> Done {
    x87_check(c)?;
    c.check_x87_pending()?;
    let len = 7 * W + if ALL { 80 } else { 0 };
    let lin = super::src(c, o, len)?;
    c.check_alignment(lin, W)?;
    let mut data = vec![0; len];
    c.read_bytes(lin, &mut data)?;
    let word = |n: usize| u16::from_le_bytes([data[n * W], data[n * W + 1]]);
    let (fcw, fsw, tags) = (word(0), word(1), word(2));
    let mut abridged = 0;
    for n in 0..8 {
        if tags >> (2 * n) & 3 != 3 {
            abridged |= 1 << n;
        }
    }
    c.vec.fx[4] = abridged;
    let field = |n: usize| {
        let mut bytes = [0; 4];
        bytes[..W].copy_from_slice(&data[n * W..n * W + W]);
        u32::from_le_bytes(bytes)
    };
    let (fop, fip, fdp) = if c.mode.protected() {
        let fop = if W == 4 { (field(4) >> 16) as u16 } else { 0 };
        (fop, field(3), field(5))
    } else {
        let whole = |low: u32, high: u32| low & 0xffff | (high >> 12 & 0xffff) << 16;
        (
            field(4) as u16,
            whole(field(3), field(4)),
            whole(field(5), field(6)),
        )
    };
    c.vec.record_exception(fop & 0x7ff, fdp.into());
    c.vec.set_fip(fip.into());
    if ALL {
        for n in 0..8 {
            let from = 7 * W + 10 * n;
            c.vec.fx[32 + 16 * n..42 + 16 * n].copy_from_slice(&data[from..from + 10]);
        }
    }
    if !ALL {
        c.vec.set_top(fsw >> 11);
    }
    c.vec.set_fsw(fsw);
    c.vec.set_fcw(fcw);
    c.update_ferr();
    Ok(())
}
