//! One run of an instruction: its operands, its mask and its result.

use super::element::{Element, VectorBytes, get, put};
use super::float::{Env, Rounding};
use super::format::{F32, F64, FloatFormat};
use super::legacy::Equivalent;
use crate::thunk::vectors::Vectors;
use hindsight_regs::rflags::Rflags;
use iced_x86::{EncodingKind, Instruction, MemorySize, OpKind, Register, RoundingControl};

const DENORMALS_ARE_ZERO: u32 = 1 << 6;
const FLUSH_TO_ZERO: u32 = 1 << 15;
/// Bytes of an XMM register.
const XMM: usize = 16;

/// Computes an instruction's result.
pub(super) type SoftHandler = fn(&mut Run<'_>);

/// Facts of an instruction that every run needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct InstructionShape {
    /// Bytes of the vectors.
    length: usize,
    /// Size and kind of the memory operand, or of the register in its place.
    memory: MemorySize,
    /// The format that the mnemonic's suffix names.
    format: FloatFormat,
    /// Whether the instruction computes only the lowest element.
    scalar: bool,
    /// Whether bits above the vectors keep their value.
    legacy: bool,
    /// Whether the destination is the first source too, and not an operand of its own.
    destructive: bool,
    /// The embedded rounding, if any.
    rounding: Option<Rounding>,
    /// Whether all exceptions are suppressed.
    sae: bool,
}

fn is_high_byte(r: Register) -> bool {
    matches!(r, Register::AH | Register::CH | Register::DH | Register::BH)
}

impl InstructionShape {
    /// Returns the facts of an instruction.
    pub(super) fn of(i: &Instruction, equivalent: Equivalent) -> Self {
        let code = i.op_code();
        let memory = code.memory_size();
        let registers = (0..i.op_count())
            .filter(|&n| i.op_kind(n) == OpKind::Register)
            .map(|n| i.op_register(n))
            .filter(|r| r.is_vector_register());
        let length = registers.map(Register::size).max();
        let name = format!("{:?}", equivalent.mnemonic);
        let rounding = match i.rounding_control() {
            RoundingControl::None => None,
            RoundingControl::RoundToNearest => Some(Rounding::NearestEven),
            RoundingControl::RoundDown => Some(Rounding::Down),
            RoundingControl::RoundUp => Some(Rounding::Up),
            RoundingControl::RoundTowardZero => Some(Rounding::TowardZero),
        };
        Self {
            length: length.unwrap_or_else(|| memory.size()),
            memory,
            format: if name.ends_with('d') { F64 } else { F32 },
            scalar: name.ends_with("ss") || name.ends_with("sd"),
            legacy: i.encoding() == EncodingKind::Legacy,
            destructive: equivalent.destructive,
            rounding,
            sae: i.suppress_all_exceptions() || rounding.is_some(),
        }
    }
}

/// The state of a run.
pub(super) struct Run<'a> {
    pub(super) env: Env,
    pub(super) v: &'a mut Vectors,
    pub(super) i: &'a Instruction,
    shape: InstructionShape,
}

impl InstructionShape {
    /// Runs an instruction of this shape with the registers and the MXCSR of `vectors`.
    pub(super) fn run(self, i: &Instruction, work: SoftHandler, vectors: &mut Vectors) {
        let mxcsr = vectors.run_mxcsr;
        let mut run = Run {
            env: Env {
                rounding: self
                    .rounding
                    .unwrap_or_else(|| Rounding::from_bits(mxcsr >> 13)),
                denormals_are_zero: mxcsr & DENORMALS_ARE_ZERO != 0,
                flush_to_zero: mxcsr & FLUSH_TO_ZERO != 0,
                flags: 0,
            },
            v: vectors,
            i,
            shape: self,
        };
        work(&mut run);
        let flags = run.env.flags;
        if !self.sae {
            vectors.run_mxcsr |= flags;
        }
    }
}

impl Run<'_> {
    /// Returns the length of the vectors in bytes.
    pub(super) fn length(&self) -> usize {
        self.shape.length
    }

    /// Returns the format of the floating-point elements.
    pub(super) fn format(&self) -> FloatFormat {
        self.shape.format
    }

    pub(super) fn is_scalar(&self) -> bool {
        self.shape.scalar
    }

    /// Returns the bytes of the whole memory operand, or of the register in its place.
    pub(super) fn memory_length(&self) -> usize {
        self.shape.memory.size()
    }

    pub(super) fn imm(&self) -> u8 {
        self.i.immediate8()
    }

    /// Returns the number of the operand that is operand `n` of the VEX instruction.
    fn index(&self, n: u32) -> u32 {
        if self.shape.destructive && n > 0 {
            n - 1
        } else {
            n
        }
    }

    /// Whether operand `n` is in memory.
    pub(super) fn is_memory(&self, n: u32) -> bool {
        let n = self.index(n);
        self.i.op_kind(n) == OpKind::Memory
    }

    /// Whether operand `n` is a general register.
    pub(super) fn is_general(&self, n: u32) -> bool {
        let n = self.index(n);
        self.i.op_kind(n) == OpKind::Register && self.i.op_register(n).is_gpr()
    }

    /// Whether operand `n` is an opmask register.
    pub(super) fn is_opmask(&self, n: u32) -> bool {
        self.i.op_kind(n) == OpKind::Register && self.i.op_register(n).is_k()
    }

    /// Returns operand `n`: a vector register, or memory with its broadcast.
    pub(super) fn source(&self, n: u32) -> VectorBytes {
        if !self.is_memory(n) {
            return self.v.zmm[self.i.op_register(self.index(n)).number() & 31];
        }
        let mut all = self.v.buffer;
        if self.i.is_broadcast() {
            let size = self.i.memory_size().size();
            for n in 1..64 / size {
                let one = get(&all, size, 0);
                put(&mut all, size, n, one);
            }
        }
        all
    }

    /// Returns the old value of the destination.
    pub(super) fn target(&self) -> VectorBytes {
        self.source(0)
    }

    /// Returns a scalar operand: a general register, or an opmask register, or memory.
    pub(super) fn scalar(&self, n: u32) -> u64 {
        let n = self.index(n);
        let r = self.i.op_register(n);
        match self.i.op_kind(n) {
            OpKind::Memory => get(&self.v.buffer, self.i.memory_size().size().min(8), 0),
            _ if r.is_k() => self.v.k[r.number() & 7],
            _ if r.is_gpr() => {
                let v = self.v.gpr[r.full_register().number() & 15];
                let v = if is_high_byte(r) { v >> 8 } else { v };
                if r.size() == 8 {
                    v
                } else {
                    v & ((1 << (8 * r.size())) - 1)
                }
            }
            _ => get(&self.v.zmm[r.number() & 31], 8, 0),
        }
    }

    /// Sets a scalar destination: a general register, an opmask register, or memory.
    pub(super) fn set_scalar(&mut self, v: u64) {
        let r = self.i.op0_register();
        if self.is_memory(0) {
            put(&mut self.v.buffer, 8, 0, v);
        } else if r.is_k() {
            self.v.k[r.number() & 7] = v;
        } else {
            let v = if r.size() == 8 { v } else { v & 0xffff_ffff };
            self.v.gpr[r.full_register().number() & 15] = v;
        }
    }

    /// Returns the write mask: all ones without one.
    pub(super) fn mask(&self) -> u64 {
        match self.i.op_mask() {
            Register::None | Register::K0 => u64::MAX,
            k => self.v.k[k.number() & 7],
        }
    }

    /// Whether the write mask enables element `n`.
    pub(super) fn is_enabled(&self, n: usize) -> bool {
        self.mask() >> n & 1 != 0
    }

    /// Sets the destination vector; bits above `length` become zero.
    pub(super) fn set_vector(&mut self, length: usize, mut v: VectorBytes) {
        if self.is_memory(0) {
            self.v.buffer = v;
            return;
        }
        let target = &mut self.v.zmm[self.i.op0_register().number() & 31];
        if self.shape.legacy {
            target[..XMM].copy_from_slice(&v[..XMM]);
            return;
        }
        v[length..].fill(0);
        *target = v;
    }

    /// Sets XMM0, an implied destination.
    pub(super) fn set_first(&mut self, v: VectorBytes) {
        let length = if self.shape.legacy { XMM } else { 64 };
        self.v.zmm[0][..length].copy_from_slice(&v[..length]);
    }

    /// Sets the destination to `v` under the write mask, with elements of `size` bytes.
    pub(super) fn set_masked(&mut self, size: usize, length: usize, mut v: VectorBytes) {
        if self.i.has_op_mask() {
            let mask = self.mask();
            let old = if self.i.zeroing_masking() {
                [0; 64]
            } else {
                self.target()
            };
            for n in (0..length / size).filter(|n| mask >> n & 1 == 0) {
                put(&mut v, size, n, get(&old, size, n));
            }
        }
        self.set_vector(length, v);
    }

    /// Sets each element of the destination that the mask enables.
    pub(super) fn each<T: Element>(&mut self, mut f: impl FnMut(&mut Self, usize) -> T) {
        let length = self.length();
        let mut out = [0; 64];
        for n in 0..length / T::SIZE {
            if self.is_enabled(n) {
                f(self, n).put(&mut out, n);
            }
        }
        self.set_masked(T::SIZE, length, out);
    }

    /// Sets each element of `size` bytes that the mask enables.
    pub(super) fn each_bits(&mut self, size: usize, mut f: impl FnMut(&mut Self, usize) -> u64) {
        let length = self.length();
        let mut out = [0; 64];
        for n in 0..length / size {
            if self.is_enabled(n) {
                let v = f(self, n);
                put(&mut out, size, n, v);
            }
        }
        self.set_masked(size, length, out);
    }

    /// Sets each element to a function of one source.
    pub(super) fn map<T: Element>(&mut self, f: fn(T) -> T) {
        let a = self.source(1);
        self.each(|_, n| f(T::get(&a, n)));
    }

    /// Sets each element to a function of two sources.
    pub(super) fn zip<T: Element>(&mut self, f: fn(T, T) -> T) {
        let (a, b) = (self.source(1), self.source(2));
        self.each(|_, n| f(T::get(&a, n), T::get(&b, n)));
    }

    /// Sets the destination opmask register, or vector of all-ones elements, to a comparison.
    pub(super) fn set_comparison(
        &mut self,
        size: usize,
        mut f: impl FnMut(&mut Self, usize) -> bool,
    ) {
        let count = if self.is_scalar() && self.is_opmask(0) {
            1
        } else {
            self.length() / size
        };
        let mut bits = 0;
        for n in 0..count {
            if self.is_enabled(n) && f(self, n) {
                bits |= 1 << n;
            }
        }
        if self.is_opmask(0) {
            self.set_scalar(bits);
            return;
        }
        let mut out = [0; 64];
        for n in (0..count).filter(|n| bits >> n & 1 != 0) {
            put(&mut out, size, n, u64::MAX);
        }
        self.set_vector(self.length(), out);
    }

    /// Sets the lowest element under the write mask; the rest of XMM is the first source's.
    pub(super) fn set_low(&mut self, size: usize, v: u64) {
        let mut out = self.source(1);
        let v = if self.is_enabled(0) {
            v
        } else if self.i.zeroing_masking() {
            0
        } else {
            get(&self.target(), size, 0)
        };
        put(&mut out, size, 0, v);
        self.set_vector(XMM, out);
    }

    /// Sets the elements to floating-point results, or the lowest one if the name says so.
    pub(super) fn each_float(&mut self, mut f: impl FnMut(&mut Self, usize) -> u64) {
        let size = self.format().size();
        if self.is_scalar() {
            let v = if self.is_enabled(0) { f(self, 0) } else { 0 };
            self.set_low(size, v);
            return;
        }
        let length = self.length();
        let mut out = [0; 64];
        for n in 0..length / size {
            if self.is_enabled(n) {
                let v = f(self, n);
                put(&mut out, size, n, v);
            }
        }
        self.set_masked(size, length, out);
    }

    /// Sets ZF, PF and CF, and clears OF, AF and SF.
    pub(super) fn set_flags(&mut self, zero: bool, parity: bool, carry: bool) {
        let all = Rflags::ZF | Rflags::PF | Rflags::CF | Rflags::OF | Rflags::AF | Rflags::SF;
        let mut flags = Rflags::from_bits_retain(self.v.flags).difference(all);
        flags.set(Rflags::ZF, zero);
        flags.set(Rflags::PF, parity);
        flags.set(Rflags::CF, carry);
        self.v.flags = flags.bits();
    }
}
