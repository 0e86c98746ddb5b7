//! Floating-point arithmetic, element by element.

use super::element::{get, put};
use super::float::{Env, IE, Rounding};
use super::format::FloatFormat;
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// A function of two numbers.
type Binary = fn(&mut Env, FloatFormat, u64, u64) -> u64;

fn binary(r: &mut Run<'_>, f: Binary) {
    let (a, b) = (r.source(1), r.source(2));
    let format = r.format();
    let size = format.size();
    r.each_float(|r, n| f(&mut r.env, format, get(&a, size, n), get(&b, size, n)));
}

fn root(r: &mut Run<'_>) {
    let a = r.source(if r.is_scalar() { 2 } else { 1 });
    let format = r.format();
    r.each_float(|r, n| r.env.sqrt(format, get(&a, format.size(), n)));
}

/// Which of two numbers MINPS and MAXPS return: the second unless the first is really beyond it.
fn select(env: &mut Env, f: FloatFormat, a: u64, b: u64, max: bool) -> u64 {
    let (a, b) = (env.flush(f, a), env.flush(f, b));
    if f.is_nan(a) || f.is_nan(b) {
        env.flags |= IE;
        return b;
    }
    env.check_denormals(f, &[a, b]);
    let first = match f.order(a, b) {
        std::cmp::Ordering::Less => !max,
        std::cmp::Ordering::Greater => max,
        std::cmp::Ordering::Equal => false,
    };
    if first { a } else { b }
}

impl FloatFormat {
    /// Compares two numbers that are not NaNs.
    pub(super) fn order(self, a: u64, b: u64) -> std::cmp::Ordering {
        let key = |v: u64| {
            let magnitude = (v & !self.sign()).cast_signed();
            if self.is_negative(v) {
                -magnitude
            } else {
                magnitude
            }
        };
        key(a).cmp(&key(b))
    }
}

/// The roles of the operands of a fused multiplication and addition.
#[derive(Clone, Copy)]
enum OperandOrder {
    /// First operand times third, plus second.
    F132,
    /// Second operand times first, plus third.
    F213,
    /// Second operand times third, plus first.
    F231,
}

/// What is added to the product.
#[derive(Clone, Copy)]
enum Addend {
    Add,
    Subtract,
    /// Subtracted in even elements, added in odd ones.
    AddOdd,
    /// Added in even elements, subtracted in odd ones.
    SubtractOdd,
}

fn fused(r: &mut Run<'_>, order: OperandOrder, negated: bool, addend: Addend) {
    let (x, y, z) = (r.target(), r.source(1), r.source(2));
    let format = r.format();
    let size = format.size();
    let compute = |r: &mut Run<'_>, n: usize| {
        let [x, y, z] = [x, y, z].map(|v| get(&v, size, n));
        let (a, b, c) = match order {
            OperandOrder::F132 => (x, z, y),
            OperandOrder::F213 => (y, x, z),
            OperandOrder::F231 => (y, z, x),
        };
        let subtracts = match addend {
            Addend::Add => false,
            Addend::Subtract => true,
            Addend::AddOdd => n.is_multiple_of(2),
            Addend::SubtractOdd => n % 2 == 1,
        };
        let negate = |v, on: bool| {
            if on && !format.is_nan(v) {
                v ^ format.sign()
            } else {
                v
            }
        };
        r.env
            .fma(format, negate(a, negated), b, negate(c, subtracts))
    };
    if r.is_scalar() {
        let mut out = x;
        let v = match (r.is_enabled(0), r.i.zeroing_masking()) {
            (true, _) => compute(r, 0),
            (false, true) => 0,
            (false, false) => get(&out, size, 0),
        };
        put(&mut out, size, 0, v);
        r.set_vector(16, out);
    } else {
        r.each_float(compute);
    }
}

/// VADDSUBPS and VADDSUBPD.
fn alternate(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    let format = r.format();
    let size = format.size();
    r.each_float(|r, n| {
        let f = if n % 2 == 0 { Env::sub } else { Env::add };
        f(&mut r.env, format, get(&a, size, n), get(&b, size, n))
    });
}

/// VHADDPS and its like.
fn horizontal(r: &mut Run<'_>, f: Binary) {
    let (a, b) = (r.source(1), r.source(2));
    let format = r.format();
    let size = format.size();
    let half = 8 / size;
    r.each_float(|r, n| {
        let (lane, n) = (n / (2 * half), n % (2 * half));
        let from = if n < half { &a } else { &b };
        let first = lane * 2 * half + n % half * 2;
        f(
            &mut r.env,
            format,
            get(from, size, first),
            get(from, size, first + 1),
        )
    });
}

/// VDPPS and VDPPD: sums of products in each 16-byte lane.
fn dot(r: &mut Run<'_>) {
    let (a, b, imm) = (r.source(1), r.source(2), r.imm());
    let format = r.format();
    let size = format.size();
    let count = 16 / size;
    let mut out = [0; 64];
    for lane in 0..r.length() / 16 {
        let mut products = [0; 4];
        for n in (0..count).filter(|n| imm >> (4 + n) & 1 != 0) {
            let at = lane * count + n;
            products[n] = r.env.mul(format, get(&a, size, at), get(&b, size, at));
        }
        let mut sum = r.env.add(format, products[0], products[1]);
        if count == 4 {
            let high = r.env.add(format, products[2], products[3]);
            sum = r.env.add(format, sum, high);
        }
        for n in (0..count).filter(|n| imm >> n & 1 != 0) {
            put(&mut out, size, lane * count + n, sum);
        }
    }
    r.set_vector(r.length(), out);
}

/// VROUNDPS and VRNDSCALEPS: the immediate has the rounding, and the number of fraction bits.
fn round(r: &mut Run<'_>, scaled: bool) {
    let a = r.source(if r.is_scalar() { 2 } else { 1 });
    let imm = r.imm();
    let scale = if scaled { imm >> 4 } else { 0 };
    let format = r.format();
    r.each_float(|r, n| {
        let mode = r.env.rounding_of(imm);
        let v = get(&a, format.size(), n);
        r.env
            .round_scaled(format, v, scale.into(), mode, imm & 8 == 0)
    });
}

impl Env {
    /// Returns the rounding that an immediate selects.
    pub(super) fn rounding_of(&self, imm: u8) -> Rounding {
        if imm & 4 != 0 {
            self.rounding
        } else {
            Rounding::from_bits(imm.into())
        }
    }
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    plain(m).or_else(|| fusions(m))
}

fn plain(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vaddps | M::Vaddpd | M::Vaddss | M::Vaddsd => |r| binary(r, Env::add),
        M::Vsubps | M::Vsubpd | M::Vsubss | M::Vsubsd => |r| binary(r, Env::sub),
        M::Vmulps | M::Vmulpd | M::Vmulss | M::Vmulsd => |r| binary(r, Env::mul),
        M::Vdivps | M::Vdivpd | M::Vdivss | M::Vdivsd => |r| binary(r, Env::div),
        M::Vminps | M::Vminpd | M::Vminss | M::Vminsd => {
            |r| binary(r, |env, f, a, b| select(env, f, a, b, false))
        }
        M::Vmaxps | M::Vmaxpd | M::Vmaxss | M::Vmaxsd => {
            |r| binary(r, |env, f, a, b| select(env, f, a, b, true))
        }
        M::Vsqrtps | M::Vsqrtpd | M::Vsqrtss | M::Vsqrtsd => root,
        M::Vaddsubps | M::Vaddsubpd => alternate,
        M::Vhaddps | M::Vhaddpd => |r| horizontal(r, Env::add),
        M::Vhsubps | M::Vhsubpd => |r| horizontal(r, Env::sub),
        M::Vdpps | M::Vdppd => dot,
        M::Vroundps | M::Vroundpd | M::Vroundss | M::Vroundsd => |r| round(r, false),
        M::Vrndscaleps | M::Vrndscalepd | M::Vrndscaless | M::Vrndscalesd => |r| round(r, true),
        _ => return None,
    })
}

/// Instantiates the arms of a fused operation: its mnemonics in the three orders.
macro_rules! fused {
    ($m:expr; $($negated:literal $addend:ident: [$($a:ident)|+] [$($b:ident)|+] [$($c:ident)|+];)*) => {
        match $m {
            $(
                $(M::$a)|+ => Some(|r| fused(r, OperandOrder::F132, $negated, Addend::$addend)),
                $(M::$b)|+ => Some(|r| fused(r, OperandOrder::F213, $negated, Addend::$addend)),
                $(M::$c)|+ => Some(|r| fused(r, OperandOrder::F231, $negated, Addend::$addend)),
            )*
            _ => None,
        }
    };
}

fn fusions(m: M) -> Option<SoftHandler> {
    fused!(m;
        false Add:
            [Vfmadd132ps | Vfmadd132pd | Vfmadd132ss | Vfmadd132sd]
            [Vfmadd213ps | Vfmadd213pd | Vfmadd213ss | Vfmadd213sd]
            [Vfmadd231ps | Vfmadd231pd | Vfmadd231ss | Vfmadd231sd];
        false Subtract:
            [Vfmsub132ps | Vfmsub132pd | Vfmsub132ss | Vfmsub132sd]
            [Vfmsub213ps | Vfmsub213pd | Vfmsub213ss | Vfmsub213sd]
            [Vfmsub231ps | Vfmsub231pd | Vfmsub231ss | Vfmsub231sd];
        true Add:
            [Vfnmadd132ps | Vfnmadd132pd | Vfnmadd132ss | Vfnmadd132sd]
            [Vfnmadd213ps | Vfnmadd213pd | Vfnmadd213ss | Vfnmadd213sd]
            [Vfnmadd231ps | Vfnmadd231pd | Vfnmadd231ss | Vfnmadd231sd];
        true Subtract:
            [Vfnmsub132ps | Vfnmsub132pd | Vfnmsub132ss | Vfnmsub132sd]
            [Vfnmsub213ps | Vfnmsub213pd | Vfnmsub213ss | Vfnmsub213sd]
            [Vfnmsub231ps | Vfnmsub231pd | Vfnmsub231ss | Vfnmsub231sd];
        false AddOdd:
            [Vfmaddsub132ps | Vfmaddsub132pd]
            [Vfmaddsub213ps | Vfmaddsub213pd]
            [Vfmaddsub231ps | Vfmaddsub231pd];
        false SubtractOdd:
            [Vfmsubadd132ps | Vfmsubadd132pd]
            [Vfmsubadd213ps | Vfmsubadd213pd]
            [Vfmsubadd231ps | Vfmsubadd231pd];
    )
}
