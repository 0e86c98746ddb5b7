//! Runtime for guest programs that assert the behaviour of the processor they run on.
//!
//! A payload is a static ELF image that boots by PVH, owns the whole machine and runs *cases*:
//! short functions that name the rules they assert. It reports on the serial line and ends by a
//! write to the exit port. `docs/guide/payloads.md` explains how to write one.
//!
//! ```ignore
//! #![no_std]
//! #![no_main]
//! use hindsight_guest::prelude::*;
//!
//! payload!("sums");
//!
//! case! {
//!     name: "two_and_two", cpl: [0, 3], rules: [], needs: [],
//!     about: "arithmetic works at every level",
//!     fn body(ctx) {
//!         let mut sum = 0;
//!         let fault = ctx.run(|| sum = 2 + 2);
//!         check!(fault.is_none(), "no exception");
//!         check_eq!(sum, 4, "sum");
//!     }
//! }
//! ```
//!
//! # What is safe here
//!
//! There is no other program to protect: a payload may write any MSR, port or page table, and the
//! worst that can happen is a triple fault. Functions that execute a single instruction are
//! therefore safe and have the instruction's name; the caller is responsible for what it does to
//! the machine. `unsafe` is for what Rust itself requires: raw memory, inline assembly, `static
//! mut`.
//!
//! # Instructions that the runtime avoids
//!
//! Some hosts emulate ring 0 incompletely. Between entry and exit the runtime itself uses no INT n,
//! no RDTSCP, no SSE, no SWAPGS and no fence; a case that uses one of them names it in its needs.

#![no_std]

pub mod apic;
pub mod boot;
pub mod case;
pub mod catch;
pub mod check;
pub mod cpu;
pub mod entry;
pub mod exception;
pub mod exit;
pub mod gdt;
pub mod info;
pub mod insn;
pub mod ioapic;
pub mod legacy;
pub mod msr;
pub mod paging;
pub mod panic;
pub mod pic;
pub mod port;
pub mod prelude;
pub mod report;
pub mod run;
pub mod serial;
pub mod show;
pub mod smp;
pub mod trap;
pub mod vectors;

pub use hindsight_regs as regs;
