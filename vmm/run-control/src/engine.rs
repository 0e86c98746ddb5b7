//! The two engines.

use std::fmt;

/// What executes guest code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// KVM.
    Kvm,
    /// The interpreter.
    Interp,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Interp => "interp",
        })
    }
}
