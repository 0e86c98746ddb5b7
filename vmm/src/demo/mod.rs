//! `hindsight demo`: runs a built-in guest and draws what it did.
//!
//! The way of a demo: [`crate::cli`] parses the arguments, [`guest`] runs the payload `demo` in this
//! process with a [recorder](crate::vcpu::recorder) on it, [`log`] reads what the guest kept in its own
//! memory, [`symbols`] names addresses, [`story`] puts guest and monitor on one time line, and
//! [`draw`] makes lines of it. The guest's time stamps cost no exit, so that what is drawn is not the
//! drawing.
//!
//! Profiles are [`story::Profile`]s: the one there is comes from the guest's timer; another source
//! of addresses (its branch records, say) becomes another profile and is drawn the same way.

pub mod draw;
pub mod explain;
pub mod guest;
pub mod log;
pub mod story;
pub mod symbols;
