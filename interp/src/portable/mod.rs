//! Computes instructions in software whose results differ between hosts.
//!
//! These are the estimates of SSE and the transcendental functions of the x87. Their results are
//! the same on every host:
//!
//! - RCPPS, RCPSS, RSQRTPS, RSQRTSS: the exact value rounded to 12 fraction bits, to nearest even.
//!   The relative error is below 2^-13, where the manual allows 1.5 * 2^-12.
//! - F2XM1, FYL2X, FYL2XP1, FPATAN, FPTAN, FSIN, FCOS, FSINCOS: the exact value rounded as the
//!   control word says. Arguments are reduced by the exact π.
//!
//! SDM Vol. 1, "Transcendental Instructions", "x87 FPU Floating-Point Exception Handling".

mod estimate;
mod extended;
mod handlers;
mod stack;
pub(crate) mod transcendental;

pub(crate) use handlers::handler;
