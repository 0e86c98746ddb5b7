//! Runtime for guest programs that assert the behaviour of the processor they run on.
//!
//! A payload is a static ELF image that boots by PVH, owns the whole machine and runs *cases*: short
//! functions that name the rules they assert. It reports on the serial line and ends through the
//! exit port. `docs/payloads.md` walks through one.
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
//!         check_eq!(sum, 4, "the sum");
//!     }
//! }
//! ```
//!
//! # What is safe here
//!
//! There is no other program to protect: a payload may write any MSR, port or page table, and can
//! always end in a triple fault. Wrappers of single instructions are therefore safe functions, named
//! after the instruction; their effect on the machine is the caller's business. `unsafe` remains
//! where Rust itself needs it: raw memory, inline assembly, `static mut`.
//!
//! # What the common path avoids
//!
//! Some hosts emulate ring 0 with holes. Between entry and exit the runtime itself uses no INT n, no
//! RDTSCP, no SSE, no SWAPGS and no fence; a case that uses one of them says so in its needs.

#![no_std]

pub mod apic;
pub mod boot;
pub mod case;
pub mod catch;
pub mod check;
pub mod cpu;
pub mod exit;
pub mod info;
pub mod insn;
pub mod ioapic;
pub mod legacy;
pub mod msr;
pub mod paging;
pub mod panic;
pub mod pic;
pub mod port;
pub mod run;
pub mod serial;
pub mod show;
pub mod smp;
pub mod trap;
pub mod vectors;

pub use hindsight_regs as regs;

/// What nearly every payload uses.
pub mod prelude {
    pub use crate::case::Ctx;
    pub use crate::catch::{Exception, catch, user};
    pub use crate::{
        case, check, check_eq, entry, need_feature, payload, require, require_eq, require_some,
        skip,
    };
}
