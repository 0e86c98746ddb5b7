//! The vector and x87 registers, laid out for the thunks.

use hindsight_cpu::state::XsaveArea;
use std::mem::offset_of;

/// XCR0 bit of the x87 state; the following constants are the other components.
pub(crate) const X87: u64 = 1;
pub(crate) const SSE: u64 = 2;
pub(crate) const AVX: u64 = 4;
pub(crate) const OPMASK: u64 = 1 << 5;
pub(crate) const ZMM_HI: u64 = 1 << 6;
pub(crate) const HI16: u64 = 1 << 7;
pub(crate) const PKRU: u64 = 1 << 9;

/// The vector registers that an instruction accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VectorBank {
    /// The 32 registers of 64-bit mode.
    All,
    /// The 8 registers of all other modes.
    FirstEight,
}

impl VectorBank {
    /// Returns the number of registers that are encodable without EVEX.
    pub(crate) fn low(self) -> usize {
        match self {
            Self::All => 16,
            Self::FirstEight => 8,
        }
    }

    /// Returns a component's size in bytes; `None` if it does not depend on the bank.
    pub(crate) fn bytes_of(self, component: u64) -> Option<usize> {
        match component {
            AVX => Some(16 * self.low()),
            ZMM_HI => Some(32 * self.low()),
            HI16 if self == Self::FirstEight => Some(0),
            _ => None,
        }
    }
}

/// The vector and x87 registers, and the buffers that thunks use.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct Vectors {
    pub(crate) zmm: [[u8; 64]; 32],
    pub(crate) k: [u64; 8],
    /// The x87 state as FXSAVE64 stores it; the SSE part is unused.
    pub(crate) fx: [u8; 512],
    /// The header that XSAVE adds to `fx`.
    fx_header: [u8; 64],
    /// Holds the memory operand.
    pub(crate) buffer: [u8; 64],
    pub(crate) gpr: [u64; 16],
    pub(crate) flags: u64,
    pub(crate) run_mxcsr: u32,
    pub(crate) mxcsr: u32,
    pub(crate) pkru: u32,
    /// The host's MXCSR, which a thunk restores at its end.
    pub(super) saved_mxcsr: u32,
    saved: [[u8; 64]; 4],
    saved_k: [u64; 8],
    saved_fx: [u8; 160],
}

impl Default for Vectors {
    fn default() -> Self {
        let mut v = Self {
            zmm: [[0; 64]; 32],
            k: [0; 8],
            fx: [0; 512],
            fx_header: [0; 64],
            buffer: [0; 64],
            gpr: [0; 16],
            flags: 0,
            run_mxcsr: 0x1f80,
            mxcsr: 0x1f80,
            pkru: 0,
            saved_mxcsr: 0x1f80,
            saved: [[0; 64]; 4],
            saved_k: [0; 8],
            saved_fx: [0; 160],
        };
        v.init_x87();
        v
    }
}

fn word(bytes: &[u8], at: usize) -> u16 {
    bytes
        .get(at..at + 2)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u16::from_le_bytes)
}

fn put(bytes: &mut [u8], at: usize, v: &[u8]) {
    if let Some(target) = bytes.get_mut(at..at + v.len()) {
        target.copy_from_slice(v);
    }
}

impl Vectors {
    /// Returns the address of the vector registers, which the opmask registers follow.
    pub(crate) fn address(this: *mut Self) -> usize {
        const { assert!(offset_of!(Self, zmm) == 0 && offset_of!(Self, k) == 32 * 64) };
        this.expose_provenance()
    }

    /// Returns the address of the x87 state, with a header as XSAVE stores it.
    pub(crate) fn x87_address(this: *mut Self) -> usize {
        const {
            assert!(offset_of!(Self, fx) % 64 == 0);
            assert!(offset_of!(Self, fx_header) == offset_of!(Self, fx) + 512);
        };
        this.expose_provenance() + offset_of!(Self, fx)
    }

    /// Initializes the x87 as FNINIT does. All registers are empty.
    pub(crate) fn init_x87(&mut self) {
        self.fx = [0; 512];
        put(&mut self.fx, 0, &0x37f_u16.to_le_bytes());
        put(&mut self.fx, 24, &0x1f80_u32.to_le_bytes());
    }

    pub(crate) fn fcw(&self) -> u16 {
        word(&self.fx, 0)
    }

    pub(crate) fn fsw(&self) -> u16 {
        word(&self.fx, 2)
    }

    pub(crate) fn set_fcw(&mut self, v: u16) {
        put(&mut self.fx, 0, &(v & 0x1f7f | 0x40).to_le_bytes());
        self.update_summary();
    }

    pub(crate) fn set_fsw(&mut self, v: u16) {
        put(&mut self.fx, 2, &v.to_le_bytes());
        self.update_summary();
    }

    /// Changes TOP. The physical registers keep their contents, so every ST(i) changes.
    pub(crate) fn set_top(&mut self, top: u16) {
        let old = usize::from(self.fsw() >> 11 & 7);
        let new = usize::from(top & 7);
        let regs = &mut self.fx[32..160];
        regs.rotate_left(16 * ((new + 8 - old) % 8));
        let fsw = (self.fsw() & !0x3800) | (top & 7) << 11;
        put(&mut self.fx, 2, &fsw.to_le_bytes());
    }

    /// The MMX register `n`, which is a physical x87 register.
    pub(crate) fn mmx(&self, n: usize) -> &[u8] {
        let top = usize::from(self.fsw() >> 11 & 7);
        let at = 32 + 16 * ((n + 8 - top) % 8);
        &self.fx[at..at + 8]
    }

    /// Sets TOP to 0 and marks all registers as valid, as every MMX instruction does.
    pub(crate) fn enter_mmx(&mut self) {
        self.set_top(0);
        self.fx[4] = 0xff;
    }

    /// Returns ST(n).
    pub(crate) fn st(&self, n: usize) -> &[u8] {
        &self.fx[32 + 16 * (n & 7)..][..10]
    }

    fn tag(&self, n: usize) -> u8 {
        1 << ((usize::from(self.fsw() >> 11) + n) & 7)
    }

    /// Whether ST(n) is empty.
    pub(crate) fn empty(&self, n: usize) -> bool {
        self.fx[4] & self.tag(n) == 0
    }

    /// Writes ST(n).
    pub(crate) fn put_st(&mut self, n: usize, v: [u8; 10]) {
        put(&mut self.fx, 32 + 16 * (n & 7), &v);
        self.fx[4] |= self.tag(n);
    }

    /// Marks ST(0) as empty and increments TOP.
    pub(crate) fn pop_st(&mut self) {
        self.fx[4] &= !self.tag(0);
        self.set_top((self.fsw() >> 11) + 1);
    }

    /// Pushes a value onto the x87 register stack.
    pub(crate) fn push_st(&mut self, v: [u8; 10]) {
        self.set_top((self.fsw() >> 11).wrapping_sub(1));
        self.put_st(0, v);
    }

    /// Returns FOP: the low 11 bits of the last instruction's opcode.
    pub(crate) fn fop(&self) -> u16 {
        word(&self.fx, 6) & 0x7ff
    }

    /// Sets FIP, the x87 instruction pointer.
    pub(crate) fn set_fip(&mut self, rip: u64) {
        put(&mut self.fx, 8, &rip.to_le_bytes());
    }

    /// Records opcode and operand of an instruction that raised an unmasked exception.
    ///
    /// No other instruction changes them (CPUID.7.EBX\[6\]). SDM Vol. 1, "x87 FPU Instruction and
    /// Data (Operand) Pointers".
    pub(crate) fn record_exception(&mut self, fop: u16, operand: u64) {
        put(&mut self.fx, 6, &fop.to_le_bytes());
        put(&mut self.fx, 16, &operand.to_le_bytes());
    }

    /// Sets ES and B if an unmasked exception is flagged, else clears them.
    fn update_summary(&mut self) {
        let pending = self.fsw() & !self.fcw() & 0x3f != 0;
        let v = (self.fsw() & !0x8080) | if pending { 0x8080 } else { 0 };
        put(&mut self.fx, 2, &v.to_le_bytes());
    }

    pub(crate) fn x87_pending(&self) -> bool {
        self.fsw() & 0x80 != 0
    }

    /// Clears pending x87 errors, and returns their flags as in the status word.
    ///
    /// Returns 0 if none is pending.
    pub(crate) fn take_x87_errors(&mut self) -> u16 {
        if !self.x87_pending() {
            return 0;
        }
        let fsw = self.fsw();
        self.set_fsw(fsw & !0x3f);
        fsw & 0x3f
    }

    /// Adds flags from [`Vectors::take_x87_errors`] to those of the last instruction.
    pub(crate) fn add_x87_errors(&mut self, errors: u16) {
        if errors != 0 {
            self.set_fsw(self.fsw() | errors);
        }
    }

    /// Returns the x87 opcode and pointers, which running a thunk overwrites.
    pub(super) fn x87_pointers(&self) -> [u8; 18] {
        let mut pointers = [0; 18];
        pointers.copy_from_slice(&self.fx[6..24]);
        pointers
    }

    /// Restores what [`Vectors::x87_pointers`] returned.
    pub(super) fn set_x87_pointers(&mut self, pointers: &[u8; 18]) {
        put(&mut self.fx, 6, pointers);
    }

    /// Returns the pending unmasked exceptions, as bits of the status word.
    pub(super) fn x87_unmasked(&self) -> u16 {
        self.fsw() & !self.fcw() & 0x3f
    }

    /// Saves the vector registers in `written`, the opmask registers, and with `mmx` the MMX state.
    pub(super) fn backup(&mut self, written: &[u8], mmx: bool) {
        for (saved, &reg) in self.saved.iter_mut().zip(written) {
            *saved = self.zmm[usize::from(reg & 31)];
        }
        self.saved_k = self.k;
        if mmx {
            self.saved_fx.copy_from_slice(&self.fx[..160]);
        }
    }

    /// Restores what [`Vectors::backup`] saved.
    pub(super) fn restore(&mut self, written: &[u8], mmx: bool) {
        for (saved, &reg) in self.saved.iter().zip(written) {
            self.zmm[usize::from(reg & 31)] = *saved;
        }
        self.k = self.saved_k;
        if mmx {
            self.restore_mmx();
        }
    }

    /// Restores the registers that an MMX instruction changed before it raised #XM.
    ///
    /// The change to MMX state stays: TOP is 0, so ST(i) is MMi.
    fn restore_mmx(&mut self) {
        if self.fsw() & 0x3800 != 0 {
            return;
        }
        let top = usize::from(word(&self.saved_fx, 2) >> 11 & 7);
        self.fx[32..160].copy_from_slice(&self.saved_fx[32..160]);
        self.fx[32..160].rotate_right(16 * top);
    }

    /// Executes VZEROUPPER, or VZEROALL if `all`, on the first `count` registers.
    pub(crate) fn zero_upper(&mut self, all: bool, count: usize) {
        for reg in self.zmm.iter_mut().take(count) {
            reg[if all { 0 } else { 16 }..].fill(0);
        }
    }

    /// Whether a ZMM register that VEX instructions name has bits above its YMM register.
    pub(crate) fn has_upper_halves(&self) -> bool {
        self.zmm[..16].iter().any(|r| r[32..] != [0; 32])
    }

    /// Returns the components that are not in their initial state.
    ///
    /// Of the vector registers, only those of `bank` count.
    pub(crate) fn in_use(&self, bank: VectorBank) -> u64 {
        let low = &self.zmm[..bank.low()];
        let mut fresh = [0; 160];
        put(&mut fresh, 0, &0x37f_u16.to_le_bytes());
        let mut x87 = [0; 160];
        x87[..24].copy_from_slice(&self.fx[..24]);
        x87[32..].copy_from_slice(&self.fx[32..160]);
        let any = |regs: &[[u8; 64]], range: std::ops::Range<usize>| {
            regs.iter()
                .any(|r| r[range.clone()].iter().any(|&b| b != 0))
        };
        let mut mask = 0;
        let mut add = |on: bool, bit: u64| mask |= if on { bit } else { 0 };
        add(x87 != fresh, X87);
        add(any(low, 0..16) || self.mxcsr != 0x1f80, SSE);
        add(any(low, 16..32), AVX);
        add(self.k != [0; 8], OPMASK);
        add(any(low, 32..64), ZMM_HI);
        add(bank == VectorBank::All && any(&self.zmm[16..], 0..64), HI16);
        add(self.pkru != 0, PKRU);
        mask
    }

    /// Loads one component from its bytes in an XSAVE area.
    pub(crate) fn read_component(&mut self, bit: u64, bytes: &[u8]) {
        let spread = |regs: &mut [[u8; 64]], at: usize, len: usize| {
            for (reg, part) in regs.iter_mut().zip(bytes.chunks_exact(len)) {
                reg[at..at + len].copy_from_slice(part);
            }
        };
        match bit {
            AVX => spread(&mut self.zmm[..16], 16, 16),
            ZMM_HI => spread(&mut self.zmm[..16], 32, 32),
            HI16 => spread(&mut self.zmm[16..], 0, 64),
            OPMASK => {
                for (k, part) in self.k.iter_mut().zip(bytes.chunks_exact(8)) {
                    *k = part.try_into().map_or(0, u64::from_le_bytes);
                }
            }
            PKRU => {
                self.pkru = bytes
                    .get(..4)
                    .and_then(|b| b.try_into().ok())
                    .map_or(0, u32::from_le_bytes);
            }
            _ => {}
        }
    }

    /// Stores one component to its bytes in an XSAVE area.
    pub(crate) fn write_component(&self, bit: u64, bytes: &mut [u8]) {
        let gather = |regs: &[[u8; 64]], at: usize, len: usize, bytes: &mut [u8]| {
            for (reg, part) in regs.iter().zip(bytes.chunks_exact_mut(len)) {
                part.copy_from_slice(&reg[at..at + len]);
            }
        };
        match bit {
            AVX => gather(&self.zmm[..16], 16, 16, bytes),
            ZMM_HI => gather(&self.zmm[..16], 32, 32, bytes),
            HI16 => gather(&self.zmm[16..], 0, 64, bytes),
            OPMASK => {
                for (k, part) in self.k.iter().zip(bytes.chunks_exact_mut(8)) {
                    part.copy_from_slice(&k.to_le_bytes());
                }
            }
            PKRU => put(bytes, 0, &self.pkru.to_le_bytes()),
            _ => {}
        }
    }

    /// Resets one component to its initial state.
    ///
    /// Of the vector registers, only those of `bank` change.
    pub(crate) fn init_component(&mut self, bit: u64, bank: VectorBank) {
        let low = bank.low();
        let clear = |regs: &mut [[u8; 64]], range: std::ops::Range<usize>| {
            for reg in regs {
                reg[range.clone()].fill(0);
            }
        };
        match bit {
            X87 => self.init_x87(),
            SSE => clear(&mut self.zmm[..low], 0..16),
            AVX => clear(&mut self.zmm[..low], 16..32),
            ZMM_HI => clear(&mut self.zmm[..low], 32..64),
            HI16 if bank == VectorBank::All => clear(&mut self.zmm[16..], 0..64),
            OPMASK => self.k = [0; 8],
            PKRU => self.pkru = 0,
            _ => {}
        }
    }

    /// Loads the x87 state from the legacy region.
    pub(crate) fn read_x87(&mut self, area: &[u8]) {
        if let Some(part) = area.get(..24) {
            self.fx[..24].copy_from_slice(part);
        }
        if let Some(part) = area.get(32..160) {
            self.fx[32..160].copy_from_slice(part);
        }
        self.set_fcw(self.fcw());
    }

    pub(crate) fn write_x87(&self, area: &mut [u8]) {
        put(area, 0, &self.fx[..24]);
        put(area, 32, &self.fx[32..160]);
    }

    /// Loads the XMM registers from the legacy region.
    pub(crate) fn read_xmm(&mut self, area: &[u8], bank: VectorBank) {
        for (reg, part) in self
            .zmm
            .iter_mut()
            .take(bank.low())
            .zip(area[160..416].chunks_exact(16))
        {
            reg[..16].copy_from_slice(part);
        }
    }

    pub(crate) fn write_xmm(&self, area: &mut [u8], bank: VectorBank) {
        for (reg, part) in self
            .zmm
            .iter()
            .take(bank.low())
            .zip(area[160..416].chunks_exact_mut(16))
        {
            part.copy_from_slice(&reg[..16]);
        }
    }

    /// Loads all components from an area in the standard format.
    pub(crate) fn load(&mut self, area: &XsaveArea) {
        let a = &area.0;
        *self = Self::default();
        let present = a
            .get(512..520)
            .and_then(|b| b.try_into().ok())
            .map_or(0, u64::from_le_bytes);
        let mxcsr = a
            .get(24..28)
            .and_then(|b| b.try_into().ok())
            .map_or(0x1f80, u32::from_le_bytes);
        self.mxcsr = mxcsr & 0xffff;
        if present & X87 != 0 {
            self.read_x87(a);
        }
        if present & SSE != 0 {
            self.read_xmm(a, VectorBank::All);
        }
        for (bit, at, len) in STANDARD {
            if present & bit != 0 {
                self.read_component(bit, &a[at..at + len]);
            }
        }
    }

    pub(crate) fn store(&self, area: &mut XsaveArea) {
        let a = &mut area.0;
        a.fill(0);
        let present = self.in_use(VectorBank::All);
        self.write_x87(a);
        put(a, 24, &self.mxcsr.to_le_bytes());
        self.write_xmm(a, VectorBank::All);
        put(a, 512, &present.to_le_bytes());
        for (bit, at, len) in STANDARD {
            self.write_component(bit, &mut a[at..at + len]);
        }
    }
}

/// The components after the legacy region, each with its bit, offset and length.
const STANDARD: [(u64, usize, usize); 5] = [
    (AVX, 576, 256),
    (OPMASK, 1088, 64),
    (ZMM_HI, 1152, 512),
    (HI16, 1664, 1024),
    (PKRU, 2688, 8),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_state_survives_store_and_load() {
        let mut v = Vectors::default();
        v.zmm[3] = [7; 64];
        v.zmm[20] = [9; 64];
        v.k[2] = 5;
        v.mxcsr = 0x1fa0;
        v.set_fcw(0x27f);
        let mut area = XsaveArea::default();
        v.store(&mut area);
        let mut w = Vectors::default();
        w.load(&area);
        assert_eq!(
            (w.zmm, w.k, w.mxcsr, w.fcw()),
            (v.zmm, v.k, v.mxcsr, 0x27f | 0x40)
        );
    }

    #[test]
    fn initial_state_is_not_in_use() {
        assert_eq!(Vectors::default().in_use(VectorBank::All), 0);
    }
}
