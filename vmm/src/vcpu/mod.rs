//! A virtual processor: its thread, its two ways of running, and the path from an exit to a model.
//!
//! Read [`exit`] (why it stopped), [`dispatch`] (the one match), [`models`] (the MSR path), then
//! [`native`] (the loop round KVM_RUN), [`observed`] (the loop round the interpreter), [`switch`]
//! (how a machine goes from one to the other), `watch` (a native guest's debug registers) and
//! [`control`] (pause, resume, stop, kick). [`attend`] is what a debugger asks of a paused processor,
//! `slots` what of it KVM can do. [`record`] keeps what happened, for those who ask for it, and
//! [`stats`] counts it.

pub mod attend;
pub mod control;
pub mod determined;
pub mod dispatch;
pub mod events;
pub mod exit;
mod guard;
pub mod history;
pub mod mode;
pub mod models;
pub mod native;
pub mod observed;
pub mod record;
pub mod report;
pub(crate) mod slots;
pub mod stats;
pub mod switch;
mod watch;
