//! Executes vector instructions in software: AVX, AVX2, FMA, F16C, and AVX-512 F, CD, BW, DQ, VL,
//! IFMA, VBMI, VBMI2, VNNI, BITALG and VPOPCNTDQ, VAES, VPCLMULQDQ and GFNI.
//!
//! Also those of SSE3 to SSE4.2, AES, PCLMULQDQ, GFNI and SHA on XMM registers, and BMI1, BMI2 and
//! CRC32.
//!
//! A [`SoftInstruction`] takes the part of a thunk's machine code: it reads and writes the registers
//! and the buffer of [`Vectors`](crate::thunk::vectors::Vectors), under the MXCSR of the thunk, with
//! all exceptions masked. The thunk checks the state, accesses memory, and raises exceptions. Thus
//! it makes no difference to a guest whether the host executes an instruction.
//!
//! Elements that the write mask disables are not computed, so that they raise no flags.

mod aes;
mod arithmetic;
mod change;
mod compare;
mod convert;
mod element;
pub(crate) mod estimate;
mod float;
mod floating;
mod format;
mod galois;
mod general;
mod instruction;
mod integer;
mod legacy;
mod moves;
mod opmask;
mod permute;
mod run;
mod sha;
mod special;
mod strings;

pub(crate) use instruction::SoftInstruction;
