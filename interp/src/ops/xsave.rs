//! FXSAVE, the XSAVE family, and MXCSR.
//! SDM Vol. 1, "Managing State Using the XSAVE Feature Set".
//!
//! Outside of 64-bit mode these instructions neither store, load nor initialize registers 8 to 31.

#![expect(clippy::cast_possible_truncation, reason = "fields of the areas")]
use super::lbr_state::{LBR, LbrState};
use super::{Done, general, load, store};
use crate::core::{Core, Handler, Op};
use crate::fault::Fault;
use crate::registers::Reg;
use crate::thunk::vectors::{SSE, VectorBank, X87};
use hindsight_regs::cr::{Cr0, Cr4};
use iced_x86::{Instruction, Mnemonic as M};

/// XCOMP_BV: the area is in the compacted format.
const COMPACTED: u64 = 1 << 63;
/// The components whose save and restore include MXCSR.
const WITH_MXCSR: u64 = 6;
const MXCSR_RESET: u32 = 0x1f80;
const MXCSR_MASK: u32 = 0xffff;
/// The alignment of an XSAVE area.
const LINE: usize = 64;
/// Bytes of the legacy region and the header.
const HEADER_END: usize = 576;

pub(crate) fn handler(i: &Instruction) -> Option<Handler> {
    Some(match i.mnemonic() {
        M::Fxsave => general!(fxsave::<false>),
        M::Fxsave64 => general!(fxsave::<true>),
        M::Fxrstor => general!(fxrstor::<false>),
        M::Fxrstor64 => general!(fxrstor::<true>),
        M::Xsave => general!(xsave::<{ Save::PLAIN }, false>),
        M::Xsave64 => general!(xsave::<{ Save::PLAIN }, true>),
        M::Xsaveopt => general!(xsave::<{ Save::OPTIMIZED }, false>),
        M::Xsaveopt64 => general!(xsave::<{ Save::OPTIMIZED }, true>),
        M::Xsavec => general!(xsave::<{ Save::COMPACTED }, false>),
        M::Xsavec64 => general!(xsave::<{ Save::COMPACTED }, true>),
        M::Xsaves => general!(xsave::<{ Save::SUPERVISOR }, false>),
        M::Xsaves64 => general!(xsave::<{ Save::SUPERVISOR }, true>),
        M::Xrstor => general!(xrstor::<false, false>),
        M::Xrstor64 => general!(xrstor::<true, false>),
        M::Xrstors => general!(xrstor::<false, true>),
        M::Xrstors64 => general!(xrstor::<true, true>),
        M::Ldmxcsr | M::Vldmxcsr => general!(ldmxcsr),
        M::Stmxcsr | M::Vstmxcsr => general!(stmxcsr),
        _ => return None,
    })
}

/// Values of `KIND`: the instructions of the XSAVE family that save.
struct Save;

impl Save {
    /// XSAVE: components in their initial state are written too.
    const PLAIN: u8 = 0;
    /// XSAVEOPT.
    const OPTIMIZED: u8 = 1;
    /// XSAVEC.
    const COMPACTED: u8 = 2;
    /// XSAVES.
    const SUPERVISOR: u8 = 3;
}

/// A state component in an XSAVE area.
#[derive(Clone, Copy)]
struct Component {
    /// Its bit in XCR0.
    bit: u64,
    offset: u64,
    /// Bytes of the registers that the mode has.
    len: usize,
}

/// Without REX.W the upper halves of FIP and FDP hold selectors, which read as 0.
fn clear_selectors(area: &mut [u8], wide: bool) {
    if !wide {
        area[12..16].fill(0);
        area[20..24].fill(0);
    }
}

fn fx_check(c: &Core) -> Done {
    if c.cr0(Cr0::EM | Cr0::TS) {
        Err(Fault::NM)
    } else {
        Ok(())
    }
}

fn check_alignment(lin: u64, alignment: u64) -> Done {
    if lin & (alignment - 1) == 0 {
        Ok(())
    } else {
        Err(Fault::GP)
    }
}

fn fxsave<const WIDE: bool>(c: &mut Core, o: &Op) -> Done {
    fx_check(c)?;
    let lin = super::dst(c, o, 512)?;
    check_alignment(lin, 16)?;
    let mut area = [0; 416];
    c.vec.write_x87(&mut area);
    clear_selectors(&mut area, WIDE);
    area[24..28].copy_from_slice(&c.vec.mxcsr.to_le_bytes());
    area[28..32].copy_from_slice(&MXCSR_MASK.to_le_bytes());
    let sse = c.cr4(Cr4::OSFXSR);
    let bank = c.bank();
    if sse {
        c.vec.write_xmm(&mut area, bank);
    }
    let len = if sse { 160 + 16 * bank.low() } else { 160 };
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
    fx_check(c)?;
    let lin = super::src(c, o, 512)?;
    check_alignment(lin, 16)?;
    let mut area = [0; 512];
    c.read_bytes(lin, &mut area)?;
    let mxcsr = read_mxcsr(&area);
    if c.cr4(Cr4::OSFXSR) {
        c.vec.mxcsr = mxcsr?;
        let bank = c.bank();
        c.vec.read_xmm(&area, bank);
    }
    clear_selectors(&mut area, WIDE);
    c.vec.read_x87(&area);
    c.update_ferr();
    Ok(())
}

impl Core {
    /// Returns the vector registers that state instructions access in this mode.
    fn bank(&self) -> VectorBank {
        if self.mode.is_64bit() {
            VectorBank::All
        } else {
            VectorBank::FirstEight
        }
    }

    /// Returns the components of XCR0 that are not in their initial state.
    pub(crate) fn xinuse(&self) -> u64 {
        self.state.xcr0 & self.vec.in_use(self.bank())
    }

    /// Returns offset, size and alignment of a component in the standard format.
    fn component(&mut self, n: u32) -> (usize, usize, bool) {
        let v = self.platform().cpuid(0xd, n);
        let size = (v[0] as usize).min(0x1000);
        ((v[1] as usize).min(0x4000), size, v[2] & 2 != 0)
    }

    /// Returns the bytes that XSAVE, or XSAVEC if `compact`, needs for components.
    pub(crate) fn xsave_size(&mut self, mask: u64, compact: bool) -> u32 {
        let mut size = HEADER_END;
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

    /// Returns the components in `mask` after the first two.
    ///
    /// They are in the compacted format of `layout`, or in the standard format.
    fn layout(&mut self, mask: u64, layout: Option<u64>) -> Vec<Component> {
        let bank = self.bank();
        let mut at = HEADER_END;
        let mut list = Vec::new();
        for n in 2..32 {
            let bit = 1_u64 << n;
            let included = layout.is_none_or(|l| l & bit != 0);
            if !included || (mask & bit == 0 && layout.is_none()) {
                continue;
            }
            let (offset, size, align) = self.component(n);
            let here = match layout {
                Some(_) if align => (at + 63_usize) & !63,
                Some(_) => at,
                None => offset,
            };
            at = here + size;
            let len = bank.bytes_of(bit).unwrap_or(size).min(size);
            if mask & bit != 0 && len != 0 {
                list.push(Component {
                    bit,
                    offset: here as u64,
                    len,
                });
            }
        }
        list
    }

    /// Checks whether the control registers allow an instruction of the XSAVE family.
    fn xsave_check(&self, supervisor: bool) -> Done {
        if !self.cr4(Cr4::OSXSAVE) {
            return Err(Fault::UD);
        }
        if self.cr0(Cr0::TS) {
            return Err(Fault::NM);
        }
        if supervisor && self.mode.cpl() != 0 {
            return Err(Fault::GP);
        }
        Ok(())
    }

    /// Returns the components that the instruction can access, of those in EDX:EAX, and all.
    fn rfbm(&mut self, supervisor: bool) -> (u64, u64) {
        let v = (self.regs.get(Reg::Rdx) << 32) | (self.regs.get(Reg::Rax) & 0xffff_ffff);
        let enabled = self.state.xcr0 | if supervisor { self.xss() } else { 0 };
        (v & enabled, enabled)
    }

    /// Reads the area from `lin` in pieces of at most a page.
    fn read_area(&mut self, lin: u64, area: &mut [u8]) -> Done {
        for (at, part) in (0_u64..).step_by(512).zip(area.chunks_mut(512)) {
            self.read_bytes(lin.wrapping_add(at), part)?;
        }
        Ok(())
    }

    /// Writes to the area from `lin` in pieces of at most a page.
    fn write_area(&mut self, lin: u64, data: &[u8]) -> Done {
        for (at, part) in (0_u64..).step_by(512).zip(data.chunks(512)) {
            self.write_bytes(lin.wrapping_add(at), part)?;
        }
        Ok(())
    }

    /// Writes the legacy region of an XSAVE area: the components in `saved`, and MXCSR.
    fn write_legacy(&mut self, lin: u64, saved: u64, mxcsr: bool, wide: bool) -> Done {
        let bank = self.bank();
        let mut area = [0; 416];
        self.vec.write_x87(&mut area);
        clear_selectors(&mut area, wide);
        self.vec.write_xmm(&mut area, bank);
        if saved & X87 != 0 {
            self.write_bytes(lin, &area[..24])?;
            self.write_bytes(lin.wrapping_add(32), &area[32..160])?;
        }
        if mxcsr {
            let mut data = [0; 8];
            data[..4].copy_from_slice(&self.vec.mxcsr.to_le_bytes());
            data[4..].copy_from_slice(&MXCSR_MASK.to_le_bytes());
            self.write_bytes(lin.wrapping_add(24), &data)?;
        }
        if saved & SSE != 0 {
            let end = 160 + 16 * bank.low();
            self.write_bytes(lin.wrapping_add(160), &area[160..end])?;
        }
        Ok(())
    }
}

/// XSAVE, XSAVEOPT, XSAVEC and XSAVES, as [`Save`] has them.
fn xsave<const KIND: u8, const WIDE: bool>(c: &mut Core, o: &Op) -> Done {
    c.xsave_check(KIND == Save::SUPERVISOR)?;
    let lin = super::dst(c, o, 1)?;
    check_alignment(lin, LINE as u64)?;
    // The area may wrap round behind its first bytes: these fault first.
    c.probe_write(lin, LINE)?;
    let (mask, _) = c.rfbm(KIND == Save::SUPERVISOR);
    let mut used = c.xinuse() & mask;
    let mut lbr = Vec::new();
    if mask & LBR != 0 {
        let state = c.lbr_state()?;
        if !state.is_initial() {
            used |= LBR;
            lbr = state.bytes();
        }
    }
    let compacted = KIND >= Save::COMPACTED;
    let saved = if KIND == Save::PLAIN { mask } else { used };
    let parts = c.layout(saved, compacted.then_some(mask));
    let ends = parts.iter().map(|p| p.offset + p.len as u64);
    let end = ends.fold(HEADER_END as u64, u64::max);
    super::dst(c, o, end as usize)?;
    // All pages must be writable before anything is written.
    for at in (0..end).step_by(0x1000).chain([end - 1]) {
        c.probe_write(lin.wrapping_add(at), 1)?;
    }
    let mxcsr = if compacted {
        saved & SSE != 0
    } else {
        mask & WITH_MXCSR != 0
    };
    c.write_legacy(lin, saved, mxcsr, WIDE)?;
    for part in parts {
        let mut data = vec![0; part.len];
        if part.bit == LBR {
            data = std::mem::take(&mut lbr);
        } else {
            c.vec.write_component(part.bit, &mut data);
        }
        c.write_area(lin.wrapping_add(part.offset), &data)?;
    }
    let header = lin.wrapping_add(512);
    if compacted {
        c.write(header, used)?;
        return c.write(lin.wrapping_add(520), COMPACTED | mask);
    }
    let present: u64 = c.read(header)?;
    c.write(header, (present & !mask) | used)
}

/// The header of an XSAVE area that passed the checks of XRSTOR.
struct Header {
    /// XSTATE_BV.
    present: u64,
    /// The components of a compacted area.
    compacted: Option<u64>,
}

impl Core {
    /// Checks the header in the first bytes of an area. `supervisor`: for XRSTORS.
    ///
    /// `enabled` are the components that the instruction can access.
    fn check_header(
        &mut self,
        area: &[u8],
        supervisor: bool,
        enabled: u64,
    ) -> Result<Header, Fault> {
        let field = |at: usize| area[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        let (present, compact) = (field(512), field(520));
        let compacted = compact & COMPACTED != 0;
        let reserved = if compacted {
            area[528..HEADER_END].iter().any(|&b| b != 0)
        } else {
            compact != 0 || field(528) != 0
        };
        let known = if compacted {
            compact & !COMPACTED
        } else {
            enabled
        };
        // CPUID.(0DH,1):EAX[1]: XSAVEC and the compacted form of XRSTOR.
        let refused = compacted && self.platform().cpuid(0xd, 1)[0] & 2 == 0;
        if reserved
            || refused
            || (supervisor && !compacted)
            || present & !known != 0
            || known & !enabled != 0
        {
            return Err(Fault::GP);
        }
        Ok(Header {
            present,
            compacted: compacted.then_some(known),
        })
    }
}

/// XRSTOR and XRSTORS.
fn xrstor<const WIDE: bool, const SUPERVISOR: bool>(c: &mut Core, o: &Op) -> Done {
    c.xsave_check(SUPERVISOR)?;
    let lin = super::src(c, o, 1)?;
    check_alignment(lin, LINE as u64)?;
    let (mask, enabled) = c.rfbm(SUPERVISOR);
    let mut area = vec![0; HEADER_END];
    // The area may wrap round behind its first bytes: these fault first.
    c.read_area(lin, &mut area[..LINE])?;
    super::src(c, o, HEADER_END)?;
    c.read_area(lin.wrapping_add(LINE as u64), &mut area[LINE..])?;
    let Header { present, compacted } = c.check_header(&area, SUPERVISOR, enabled)?;
    let loaded = mask & present;
    let loads_mxcsr = match compacted {
        Some(_) => loaded & SSE != 0,
        None => mask & WITH_MXCSR != 0,
    };
    let mxcsr = if loads_mxcsr {
        read_mxcsr(&area)?
    } else if compacted.is_some() && mask & SSE != 0 {
        MXCSR_RESET
    } else {
        c.vec.mxcsr
    };
    let mut data = Vec::new();
    let mut lbr = None;
    for part in c.layout(loaded, compacted) {
        super::src(c, o, part.offset as usize + part.len)?;
        let mut bytes = vec![0; part.len];
        c.read_area(lin.wrapping_add(part.offset), &mut bytes)?;
        if part.bit == LBR {
            lbr = Some(LbrState::from_bytes(&bytes)?);
        } else {
            data.push((part.bit, bytes));
        }
    }
    if mask & LBR != 0 {
        c.set_lbr_state(lbr)?;
    }
    let bank = c.bank();
    let pkru = c.vec.pkru;
    for bit in (0..32)
        .map(|n| 1 << n)
        .filter(|bit| mask & !present & bit != 0)
    {
        c.vec.init_component(bit, bank);
    }
    c.vec.mxcsr = mxcsr;
    if loaded & X87 != 0 {
        clear_selectors(&mut area, WIDE);
        c.vec.read_x87(&area);
    }
    if loaded & SSE != 0 {
        c.vec.read_xmm(&area, bank);
    }
    for (bit, bytes) in data {
        c.vec.read_component(bit, &bytes);
    }
    c.update_ferr();
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
