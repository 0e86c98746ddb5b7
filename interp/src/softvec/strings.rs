//! Comparisons of strings: VPCMPESTRI, VPCMPESTRM, VPCMPISTRI and VPCMPISTRM.
//!
//! SDM Vol. 1, "Comparison and Manipulation of Strings with SSE4.2".

use super::element::{VectorBytes, get, put};
use super::run::{Run, SoftHandler};
use hindsight_regs::rflags::Rflags;
use iced_x86::Mnemonic as M;

/// The immediate: types, comparison, polarity and output.
#[derive(Clone, Copy)]
struct Control(u8);

impl Control {
    fn size(self) -> usize {
        if self.0 & 1 == 0 { 1 } else { 2 }
    }
    fn count(self) -> usize {
        16 / self.size()
    }
    fn element(self, v: &VectorBytes, n: usize) -> i64 {
        let bits = get(v, self.size(), n).cast_signed();
        let unused = 64 - 8 * self.size();
        if self.0 & 2 == 0 {
            bits
        } else {
            bits << unused >> unused
        }
    }
    /// Returns the length of a string that ends before its first zero.
    fn implicit_length(self, v: &VectorBytes) -> usize {
        let zero = (0..self.count()).find(|&n| self.element(v, n) == 0);
        zero.unwrap_or(self.count())
    }
}

/// The two strings: elements, and how many of them are valid.
struct Strings {
    control: Control,
    a: (VectorBytes, usize),
    b: (VectorBytes, usize),
}

impl Strings {
    /// Whether the comparison holds for element `j` of the second string.
    fn holds(&self, j: usize) -> bool {
        let count = self.control.count();
        let a = |n: usize| (n < self.a.1).then(|| self.control.element(&self.a.0, n));
        let b = |n: usize| (n < self.b.1).then(|| self.control.element(&self.b.0, n));
        match self.control.0 >> 2 & 3 {
            0 => b(j).is_some() && (0..count).any(|n| a(n) == b(j)),
            1 => (0..count).step_by(2).any(|n| {
                let (low, high, v) = (a(n), a(n + 1), b(j));
                v.is_some() && low.is_some() && high.is_some() && low <= v && v <= high
            }),
            2 => a(j) == b(j),
            _ => (0..count - j).all(|n| a(n).is_none() || a(n) == b(j + n)),
        }
    }

    /// Returns a bit for each element of the second string.
    fn result(&self) -> u64 {
        let count = self.control.count();
        let bits = (0..count).filter(|&j| self.holds(j));
        let bits = bits.fold(0_u64, |all, j| all | 1 << j);
        let all = (1 << count) - 1;
        match self.control.0 >> 4 & 3 {
            1 => bits ^ all,
            3 => bits ^ ((1 << self.b.1) - 1),
            _ => bits,
        }
    }
}

/// Returns the magnitude of a length register, at most `count`.
fn explicit_length(v: u64, wide: bool, count: usize) -> usize {
    let magnitude = if wide {
        v.cast_signed().unsigned_abs()
    } else {
        ((v << 32).cast_signed() >> 32).unsigned_abs()
    };
    usize::try_from(magnitude).unwrap_or(count).min(count)
}

fn run(r: &mut Run<'_>, explicit: Option<bool>, to_mask: bool) {
    let control = Control(r.imm());
    let (a, b) = (r.source(0), r.source(1));
    let count = control.count();
    let (length_a, length_b) = match explicit {
        Some(wide) => (
            explicit_length(r.v.gpr[0], wide, count),
            explicit_length(r.v.gpr[2], wide, count),
        ),
        None => (control.implicit_length(&a), control.implicit_length(&b)),
    };
    let strings = Strings {
        control,
        a: (a, length_a),
        b: (b, length_b),
    };
    let bits = strings.result();
    r.set_flags(length_b < count, false, bits != 0);
    let mut flags = Rflags::from_bits_retain(r.v.flags);
    flags.set(Rflags::SF, length_a < count);
    flags.set(Rflags::OF, bits & 1 != 0);
    r.v.flags = flags.bits();
    let last = control.0 & 0x40 != 0;
    if to_mask {
        let mut out = [0; 64];
        if last {
            for n in (0..count).filter(|n| bits >> n & 1 != 0) {
                put(&mut out, control.size(), n, u64::MAX);
            }
        } else {
            put(&mut out, 8, 0, bits);
        }
        r.set_first(out);
        return;
    }
    let index = match (bits, last) {
        (0, _) => count as u64,
        (_, false) => bits.trailing_zeros().into(),
        (_, true) => (63 - bits.leading_zeros()).into(),
    };
    r.v.gpr[1] = index;
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vpcmpestri => |r| run(r, Some(false), false),
        M::Vpcmpestri64 => |r| run(r, Some(true), false),
        M::Vpcmpestrm => |r| run(r, Some(false), true),
        M::Vpcmpestrm64 => |r| run(r, Some(true), true),
        M::Vpcmpistri => |r| run(r, None, false),
        M::Vpcmpistrm => |r| run(r, None, true),
        _ => return None,
    })
}
