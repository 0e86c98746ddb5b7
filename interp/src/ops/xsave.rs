//! FXSAVE, the XSAVE family, MXCSR, and the control instructions of the x87.
//! SDM Vol. 1, "Managing State Using the XSAVE Feature Set".

#![expect(clippy::cast_possible_truncation, reason = "fields of the areas")]
use super::{Done, general, load, store};
use crate::core::{Core, Handler, Op};
use crate::fault::Fault;
use crate::registers::Reg;
use hindsight_regs::cr::{Cr0, Cr4};
use iced_x86::{Code, Instruction, Mnemonic as M};

const X87: u64 = 1;
const SSE: u64 = 2;
const COMPACT: u64 = 1 << 63;
const MXCSR_MASK: u32 = 0xffff;

pub(crate) fn handler(i: &Instruction) -> Option<Handler> {
    Some(match i.mnemonic() {
        M::Fxsave => general!(fxsave::<false>),
        M::Fxsave64 => general!(fxsave::<true>),
        M::Fxrstor => general!(fxrstor::<false>),
        M::Fxrstor64 => general!(fxrstor::<true>),
        M::Xsave | M::Xsave64 | M::Xsaveopt | M::Xsaveopt64 => general!(xsave::<false>),
        M::Xsavec | M::Xsavec64 => general!(xsave::<true>),
        M::Xsaves | M::Xsaves64 => general!(xsaves),
        M::Xrstor | M::Xrstor64 => general!(xrstor),
        M::Xrstors | M::Xrstors64 => general!(xrstors),
        M::Ldmxcsr | M::Vldmxcsr => general!(ldmxcsr),
        M::Stmxcsr | M::Vstmxcsr => general!(stmxcsr),
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

fn xmm_count(c: &Core) -> usize {
    if c.mode.is_64bit() { 16 } else { 8 }
}

fn fx_check(c: &Core, lin: u64) -> Done {
    if c.cr0(Cr0::EM | Cr0::TS) {
        return Err(Fault::NM);
    }
    if lin & 15 != 0 {
        Err(Fault::GP)
    } else {
        Ok(())
    }
}

fn fxsave<const WIDE: bool>(c: &mut Core, o: &Op) -> Done {
    let lin = super::dst(c, o, 512)?;
    fx_check(c, lin)?;
    let mut area = [0; 416];
    c.vec.write_x87(&mut area);
    if !WIDE {
        // Without REX.W the upper halves of FIP and FDP hold selectors, which read as 0.
        area[12..16].fill(0);
        area[20..24].fill(0);
    }
    area[24..28].copy_from_slice(&c.vec.mxcsr.to_le_bytes());
    area[28..32].copy_from_slice(&MXCSR_MASK.to_le_bytes());
    let sse = c.cr4(Cr4::OSFXSR);
    let count = xmm_count(c);
    if sse {
        c.vec.write_xmm(&mut area, count);
    }
    let len = if sse { 160 + 16 * count } else { 160 };
    c.write_bytes(lin, &area[..len])
}

fn read_mxcsr(area: &[u8]) -> Result<u32, Fault> {
    let v = area
        .get(24..28)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u32::from_le_bytes);
    if v & !MXCSR_MASK != 0 {
        Err(Fault::GP)
    } else {
        Ok(v)
    }
}

fn fxrstor<const WIDE: bool>(c: &mut Core, o: &Op) -> Done {
    let lin = super::src(c, o, 512)?;
    fx_check(c, lin)?;
    let mut area = [0; 512];
    c.read_bytes(lin, &mut area)?;
    let sse = c.cr4(Cr4::OSFXSR);
    let mxcsr = read_mxcsr(&area);
    if sse {
        c.vec.mxcsr = mxcsr?;
        let count = xmm_count(c);
        c.vec.read_xmm(&area, count);
    }
    if !WIDE {
        area[12..16].fill(0);
        area[20..24].fill(0);
    }
    c.vec.read_x87(&area);
    Ok(())
}

impl Core {
    /// Offset, size and alignment of a component in the standard format.
    fn component(&mut self, n: u32) -> (usize, usize, bool) {
        let v = self.platform().cpuid(0xd, n);
        let size = (v[0] as usize).min(0x1000);
        ((v[1] as usize).min(0x4000), size, v[2] & 2 != 0)
    }

    /// Bytes that XSAVE (or, `compact`, XSAVEC) needs for these components.
    pub(crate) fn xsave_size(&mut self, mask: u64, compact: bool) -> u32 {
        let mut size = 576;
        for n in 2..32 {
            if mask >> n & 1 != 0 {
                let (offset, len, align) = self.component(n);
                size = if compact {
                    let from = if align { (size + 63_usize) & !63 } else { size };
                    from + len
                } else {
                    size.max(offset + len)
                };
            }
        }
        size as u32
    }

    /// Offset and length of the components in `mask`, in the compacted format of `layout` or in
    /// the standard one.
    fn layout(&mut self, mask: u64, layout: Option<u64>) -> Vec<(u64, usize, usize)> {
        let mut at = 576;
        let mut list = Vec::new();
        for n in 2..32 {
            let bit = 1_u64 << n;
            let included = layout.is_none_or(|l| l & bit != 0);
            if !included || (mask & bit == 0 && layout.is_none()) {
                continue;
            }
            let (offset, len, align) = self.component(n);
            let here = match layout {
                Some(_) if align => (at + 63_usize) & !63,
                Some(_) => at,
                None => offset,
            };
            at = here + len;
            if mask & bit != 0 {
                list.push((bit, here, len));
            }
        }
        list
    }

    fn xsave_check(&mut self, lin: u64) -> Done {
        if !self.cr4(Cr4::OSXSAVE) {
            return Err(Fault::UD);
        }
        if self.cr0(Cr0::TS) {
            return Err(Fault::NM);
        }
        if lin & 63 != 0 {
            Err(Fault::GP)
        } else {
            Ok(())
        }
    }

    fn rfbm(&self) -> u64 {
        let v = (self.regs.get(Reg::Rdx) << 32) | (self.regs.get(Reg::Rax) & 0xffff_ffff);
        v & self.state.xcr0
    }

    /// Reads the area from `lin` in pieces of a page.
    fn read_area(&mut self, lin: u64, area: &mut [u8]) -> Done {
        for (at, part) in (0_u64..).step_by(512).zip(area.chunks_mut(512)) {
            self.read_bytes(lin.wrapping_add(at), part)?;
        }
        Ok(())
    }
}

fn xsaves(c: &mut Core, o: &Op) -> Done {
    if c.mode.cpl() != 0 {
        return Err(Fault::GP);
    }
    xsave::<true>(c, o)
}

fn xsave<const COMPACTED: bool>(c: &mut Core, o: &Op) -> Done {
    let lin = super::dst(c, o, 576)?;
    c.xsave_check(lin)?;
    let mask = c.rfbm();
    let used = c.vec.in_use();
    let parts = c.layout(mask, COMPACTED.then_some(mask));
    let end = parts
        .iter()
        .map(|p| p.1 + p.2)
        .max()
        .unwrap_or(576)
        .max(576);
    // All pages must be writable before anything is written.
    for at in (0..end as u64).step_by(0x1000).chain([end as u64 - 1]) {
        c.probe_write(lin.wrapping_add(at), 1)?;
    }
    let mut legacy = [0; 416];
    c.vec.write_x87(&mut legacy);
    let count = xmm_count(c);
    c.vec.write_xmm(&mut legacy, count);
    let saved = if COMPACTED { used & mask } else { mask };
    if saved & X87 != 0 {
        c.write_bytes(lin, &legacy[..24])?;
        c.write_bytes(lin.wrapping_add(32), &legacy[32..160])?;
    }
    if mask & 6 != 0 && (saved & SSE != 0 || !COMPACTED) {
        let mut data = [0; 8];
        data[..4].copy_from_slice(&c.vec.mxcsr.to_le_bytes());
        data[4..].copy_from_slice(&MXCSR_MASK.to_le_bytes());
        c.write_bytes(lin.wrapping_add(24), &data)?;
    }
    if saved & SSE != 0 {
        c.write_bytes(lin.wrapping_add(160), &legacy[160..160 + 16 * count])?;
    }
    for (bit, offset, len) in parts {
        if saved & bit != 0 {
            let mut data = vec![0; len];
            c.vec.write_component(bit, &mut data);
            for (at, part) in (0_u64..).step_by(512).zip(data.chunks(512)) {
                c.write_bytes(lin.wrapping_add(offset as u64 + at), part)?;
            }
        }
    }
    let mut header: u64 = c.read(lin.wrapping_add(512))?;
    header = if COMPACTED {
        used & mask
    } else {
        (header & !mask) | (used & mask)
    };
    c.write(lin.wrapping_add(512), header)?;
    if COMPACTED {
        c.write(lin.wrapping_add(520), COMPACT | mask)?;
    }
    Ok(())
}

fn xrstors(c: &mut Core, o: &Op) -> Done {
    if c.mode.cpl() != 0 {
        return Err(Fault::GP);
    }
    xrstor(c, o)
}

fn xrstor(c: &mut Core, o: &Op) -> Done {
    let lin = super::src(c, o, 576)?;
    c.xsave_check(lin)?;
    let mask = c.rfbm();
    let mut area = vec![0; 576];
    c.read_area(lin, &mut area)?;
    let field = |at: usize| area[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
    let (present, compact) = (field(512), field(520));
    let compacted = compact & COMPACT != 0;
    let reserved = if compacted {
        area[528..576].iter().any(|&b| b != 0)
    } else {
        compact != 0 || area[528..536].iter().any(|&b| b != 0)
    };
    let known = if compacted {
        compact & !COMPACT
    } else {
        c.state.xcr0
    };
    if reserved || present & !known != 0 || (compacted && known & !c.state.xcr0 != 0) {
        return Err(Fault::GP);
    }
    let loads_mxcsr = if compacted {
        mask & present & SSE != 0
    } else {
        mask & 6 != 0
    };
    let mxcsr = if loads_mxcsr {
        read_mxcsr(&area)?
    } else {
        c.vec.mxcsr
    };
    let parts = c.layout(mask & present, compacted.then_some(known));
    let mut data = Vec::new();
    for (bit, offset, len) in parts {
        let mut bytes = vec![0; len];
        c.read_area(lin.wrapping_add(offset as u64), &mut bytes)?;
        data.push((bit, bytes));
    }
    let count = xmm_count(c);
    let pkru = c.vec.pkru;
    for n in 0..32 {
        let bit = 1 << n;
        if mask & bit != 0 && present & bit == 0 {
            c.vec.init_component(bit);
        }
    }
    c.vec.mxcsr = if compacted && mask & SSE != 0 && present & SSE == 0 {
        0x1f80
    } else {
        mxcsr
    };
    if mask & present & X87 != 0 {
        c.vec.read_x87(&area);
    }
    if mask & present & SSE != 0 {
        c.vec.read_xmm(&area, count);
    }
    for (bit, bytes) in data {
        c.vec.read_component(bit, &bytes);
    }
    if c.vec.pkru != pkru {
        // Rights are checked when the TLB is filled.
        c.flush_tlb();
        c.exit.requested = true;
    }
    Ok(())
}

fn sse_check(c: &Core) -> Done {
    if c.cr0(Cr0::EM) || !c.cr4(Cr4::OSFXSR) {
        return Err(Fault::UD);
    }
    if c.cr0(Cr0::TS) {
        Err(Fault::NM)
    } else {
        Ok(())
    }
}

fn ldmxcsr(c: &mut Core, o: &Op) -> Done {
    sse_check(c)?;
    let v: u32 = load(c, o)?;
    if v & !MXCSR_MASK != 0 {
        return Err(Fault::GP);
    }
    c.vec.mxcsr = v;
    Ok(())
}

fn stmxcsr(c: &mut Core, o: &Op) -> Done {
    sse_check(c)?;
    let v = c.vec.mxcsr;
    store(c, o, v)
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
    Ok(())
}

fn fnclex(c: &mut Core, _: &Op) -> Done {
    x87_check(c)?;
    let v = c.vec.fsw() & !0x80ff;
    c.vec.set_fsw(v);
    Ok(())
}

fn fldcw(c: &mut Core, o: &Op) -> Done {
    x87_check(c)?;
    c.check_x87_pending()?;
    let v: u16 = load(c, o)?;
    c.vec.set_fcw(v);
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
    Ok(())
}
