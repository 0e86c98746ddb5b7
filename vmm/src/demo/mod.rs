//! `hindsight demo`: runs a built-in guest and draws what it did.
//!
//! [`crate::cli`] parses the arguments, [`guest`] runs the payload `demo` in this process with a
//! [recorder](crate::vcpu::recorder), [`log`] reads the guest's log from its memory, [`symbols`]
//! names addresses, [`story`] puts guest and monitor on one time line, and [`draw`] draws it as
//! lines of text. The guest's time stamps cost no exit, so that measuring does not change what is
//! measured.
//!
//! Each [`story::SampleProfile`] comes from one source of addresses: the guest's timer, and its
//! branch trace. Another source becomes another profile, and is drawn in the same way.

pub mod draw;
pub mod explain;
pub mod guest;
pub mod log;
pub mod story;
pub mod symbols;
