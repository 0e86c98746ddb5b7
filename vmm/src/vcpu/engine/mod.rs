//! Which engine runs the guest: the policy, and changing it while the machine runs.

pub mod policy;
mod switch;

pub use policy::Engine;
pub use switch::{EngineSwitch, ForcedSwitch, SwitchStats};
