//! The register file: general registers, RIP, RFLAGS, and the parts of addresses.

#![expect(
    clippy::cast_possible_truncation,
    reason = "registers are cut to the operand width"
)]

use crate::flags::{ARITHMETIC, LazyFlags};
use crate::width::Width;
use hindsight_cpu::state::seg;
use hindsight_regs::rflags::Rflags;

/// A register operand of an operation, or a part of the address of its memory operand.
///
/// The values are those that operations store: 0 to 15 for the general registers in the order of
/// their encoding, then the slots of [`Registers`] that hold no register, then AH, CH, DH and BH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[rustfmt::skip]
pub(crate) enum Reg {
    Rax, Rcx, Rdx, Rbx, Rsp, Rbp, Rsi, Rdi,
    R8, R9, R10, R11, R12, R13, R14, R15,
    /// Always zero: no base or no index.
    Zero,
    /// RIP of the first instruction of the current block.
    BlockRip,
    /// The effective base of ES in the current mode: zero in 64-bit mode.
    EsBase, CsBase, SsBase, DsBase, FsBase, GsBase,
    Ah = Reg::HIGH, Ch, Dh, Bh,
}

/// Slots of [`Registers`]: as many as [`Reg`] has values, so that no index is out of bounds.
const SLOT_COUNT: usize = Reg::Bh as usize + 1;

impl Reg {
    /// Bit in the values of AH, CH, DH and BH; the other bits number their register.
    const HIGH: u8 = 0x20;

    const GENERAL: [Self; 16] = [
        Self::Rax,
        Self::Rcx,
        Self::Rdx,
        Self::Rbx,
        Self::Rsp,
        Self::Rbp,
        Self::Rsi,
        Self::Rdi,
        Self::R8,
        Self::R9,
        Self::R10,
        Self::R11,
        Self::R12,
        Self::R13,
        Self::R14,
        Self::R15,
    ];

    const SEGMENT_BASES: [Self; 6] = [
        Self::EsBase,
        Self::CsBase,
        Self::SsBase,
        Self::DsBase,
        Self::FsBase,
        Self::GsBase,
    ];

    /// Returns the general register with this number, modulo 16.
    ///
    /// Operands that are segment, control, debug and other registers are stored as the general
    /// register of the same number.
    pub(crate) const fn general(number: u8) -> Self {
        Self::GENERAL[(number & 15) as usize]
    }

    /// AH, CH, DH or BH: the second byte of general register `number`, 0 to 3.
    pub(crate) const fn high_byte(number: u8) -> Self {
        match number & 3 {
            0 => Self::Ah,
            1 => Self::Ch,
            2 => Self::Dh,
            _ => Self::Bh,
        }
    }

    /// The base of a segment, 0 to 5.
    pub(crate) const fn segment_base(seg: usize) -> Self {
        Self::SEGMENT_BASES[seg % 6]
    }

    /// Returns the argument of [`Reg::segment_base`], the segment 0 to 5.
    pub(crate) fn segment(self) -> usize {
        debug_assert!((Self::EsBase as u8..=Self::GsBase as u8).contains(&(self as u8)));
        (self as usize).wrapping_sub(Self::EsBase as usize) % 6
    }

    /// Returns the argument of [`Reg::general`], the register's number.
    pub(crate) const fn number(self) -> u8 {
        self as u8 & 15
    }

    /// Whether it is AH, CH, DH or BH.
    pub(crate) const fn is_high_byte(self) -> bool {
        self as u8 & Self::HIGH != 0
    }
}

/// The registers that operations work on.
///
/// While the guest runs, they take precedence over those in
/// [`CpuState`](hindsight_cpu::state::CpuState).
///
/// Invariants: the slot [`Reg::Zero`] is 0; [`Registers::system`] has no arithmetic flag and has
/// bit 1.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Registers {
    values: [u64; SLOT_COUNT],
    /// The arithmetic flags of RFLAGS.
    pub(crate) flags: LazyFlags,
    /// RIP between blocks; within a block, [`Reg::BlockRip`] determines it.
    pub(crate) rip: u64,
    /// RFLAGS without the arithmetic flags.
    system: Rflags,
}

impl Registers {
    pub(crate) fn new() -> Self {
        Self {
            values: [0; SLOT_COUNT],
            flags: LazyFlags::default(),
            rip: 0,
            system: Rflags::FIXED,
        }
    }

    /// The general registers, in the order of their encoding.
    pub(crate) fn general(&self) -> &[u64; 16] {
        let (general, _) = self.values.split_first_chunk().expect("there are 36 slots");
        general
    }

    /// Returns the general registers for writing.
    pub(crate) fn general_mut(&mut self) -> &mut [u64; 16] {
        let (general, _) = self
            .values
            .split_first_chunk_mut()
            .expect("there are 36 slots");
        general
    }

    /// The address of the general registers, valid for as long as `this` is.
    pub(crate) fn general_address(this: *mut Self) -> *mut u64 {
        this.wrapping_byte_add(std::mem::offset_of!(Self, values))
            .cast()
    }

    /// All 64 bits of a register or slot; not for AH, CH, DH and BH.
    #[inline(always)]
    pub(crate) fn get(&self, reg: Reg) -> u64 {
        debug_assert!(!reg.is_high_byte());
        debug_assert!(reg != Reg::Zero || self.values[Reg::Zero as usize] == 0);
        self.values[reg as usize]
    }

    /// Sets all 64 bits of a register or slot; not for AH, CH, DH and BH.
    #[inline(always)]
    pub(crate) fn set(&mut self, reg: Reg, v: u64) {
        debug_assert!(!reg.is_high_byte() && reg != Reg::Zero);
        self.values[reg as usize] = v;
    }

    /// A register operand of width `T`.
    #[inline(always)]
    pub(crate) fn read<T: Width>(&self, reg: Reg) -> T {
        if T::HIGH_BYTES {
            let number = reg as u8;
            let slot = self.values[usize::from(number & !Reg::HIGH & 0x1f)];
            T::from_u64(slot >> (u32::from(number & Reg::HIGH) >> 2))
        } else {
            T::from_u64(self.get(reg))
        }
    }

    /// Writes a register operand of width `T`. A 32-bit write clears the upper half; narrower ones
    /// keep the rest.
    #[inline(always)]
    pub(crate) fn write<T: Width>(&mut self, reg: Reg, v: T) {
        if T::HIGH_BYTES && reg.is_high_byte() {
            let slot = &mut self.values[usize::from(reg as u8 & !Reg::HIGH & 0x1f)];
            *slot = (*slot & !0xff00) | v.zext() << 8;
        } else {
            debug_assert!(!reg.is_high_byte() && reg != Reg::Zero);
            let slot = &mut self.values[reg as usize];
            *slot = v.merge(*slot);
        }
    }

    /// A register operand of `size` bytes, zero-extended.
    pub(crate) fn read_sized(&self, reg: Reg, size: u8) -> u64 {
        match size {
            1 => self.read::<u8>(reg).zext(),
            2 => self.read::<u16>(reg).zext(),
            4 => self.read::<u32>(reg).zext(),
            _ => self.get(reg),
        }
    }

    /// Writes a register operand of `size` bytes.
    pub(crate) fn write_sized(&mut self, reg: Reg, size: u8, v: u64) {
        match size {
            1 => self.write(reg, v as u8),
            2 => self.write(reg, v as u16),
            4 => self.write(reg, v as u32),
            _ => self.set(reg, v),
        }
    }

    /// Returns the effective base of CS in the current mode: zero in 64-bit mode.
    pub(crate) fn cs_base(&self) -> u64 {
        self.get(Reg::segment_base(seg::CS))
    }

    /// EDX:EAX.
    pub(crate) fn edx_eax(&self) -> u64 {
        self.get(Reg::Rdx) << 32 | (self.get(Reg::Rax) & 0xffff_ffff)
    }

    /// Sets EDX:EAX; the upper halves of RDX and RAX become zero.
    pub(crate) fn set_edx_eax(&mut self, v: u64) {
        self.set(Reg::Rax, v & 0xffff_ffff);
        self.set(Reg::Rdx, v >> 32);
    }

    /// RFLAGS, with the arithmetic flags computed.
    pub(crate) fn rflags(&self) -> Rflags {
        self.system | self.flags.rflags()
    }

    /// Sets RFLAGS; reserved bits are ignored.
    ///
    /// The caller must update all state that depends on its system flags.
    pub(crate) fn set_rflags(&mut self, v: Rflags) {
        self.flags = LazyFlags::explicit(v);
        self.system = (v & !ARITHMETIC) | Rflags::FIXED;
        debug_assert!(self.system.contains(Rflags::FIXED));
    }

    /// RFLAGS without the arithmetic flags.
    pub(crate) fn system_flags(&self) -> Rflags {
        self.system
    }

    /// Whether any of these flags is set; they must be system flags.
    #[inline(always)]
    pub(crate) fn flag(&self, flags: Rflags) -> bool {
        debug_assert!(!flags.intersects(ARITHMETIC));
        self.system.intersects(flags)
    }

    /// Sets or clears system flags.
    ///
    /// The caller must update all state that depends on them.
    pub(crate) fn set_flag(&mut self, flags: Rflags, on: bool) {
        debug_assert!(!flags.intersects(ARITHMETIC | Rflags::FIXED));
        self.system.set(flags, on);
    }

    /// RFLAGS.IOPL.
    pub(crate) fn iopl(&self) -> u8 {
        (self.system.bits() >> 12 & 3) as u8
    }

    /// Whether the processor is in virtual-8086 mode.
    pub(crate) fn v86(&self) -> bool {
        self.flag(Rflags::VM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::width::Low;

    #[test]
    fn general_registers_and_high_bytes_map_to_their_values() {
        let mut regs = Registers::new();
        for n in 0..16 {
            regs.set(Reg::general(n), u64::from(n) * 0x1111_1111_1111_1111);
            assert_eq!(Reg::general(n).number(), n);
        }
        assert_eq!(regs.general()[3], 0x3333_3333_3333_3333);
        for n in 0..4 {
            let high = Reg::high_byte(n);
            assert!(high.is_high_byte());
            regs.write(high, 0xa0_u8 + n);
            assert_eq!(regs.read::<u8>(high), 0xa0 + n);
            let low = regs.read::<u8>(Reg::general(n));
            assert_eq!(low, n * 0x11, "the low byte keeps its value");
            assert_eq!(regs.read::<Low>(Reg::general(n)), Low::from_u64(low.into()));
        }
        assert_eq!(regs.general()[1], 0x1111_1111_1111_a111);
    }

    #[test]
    fn narrow_writes_keep_the_rest_and_32_bit_writes_clear_the_upper_half() {
        let mut regs = Registers::new();
        regs.set(Reg::R9, u64::MAX);
        regs.write_sized(Reg::R9, 1, 0x12);
        assert_eq!(regs.get(Reg::R9), 0xffff_ffff_ffff_ff12);
        regs.write_sized(Reg::R9, 2, 0x3456);
        assert_eq!(regs.get(Reg::R9), 0xffff_ffff_ffff_3456);
        regs.write_sized(Reg::R9, 4, 0x789a_bcde);
        assert_eq!(regs.get(Reg::R9), 0x789a_bcde);
        assert_eq!(regs.read_sized(Reg::R9, 2), 0xbcde);
    }

    #[test]
    fn rflags_keeps_its_fixed_bit_and_drops_reserved_ones() {
        let mut regs = Registers::new();
        regs.set_rflags(Rflags::from_bits_retain(u64::MAX));
        assert_eq!(regs.rflags(), Rflags::all());
        assert_eq!((regs.iopl(), regs.v86()), (3, true));
        regs.set_rflags(Rflags::empty());
        assert_eq!(regs.rflags(), Rflags::FIXED);
        regs.set_flag(Rflags::TF | Rflags::IF, true);
        assert!(regs.flag(Rflags::TF) && !regs.flag(Rflags::DF));
    }
}
