//! The kinds of code that a client can disassemble: 64, 32 and 16 bits.

use std::fmt;

/// The kind of code whose registers the client shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CodeModel {
    /// 64-bit code.
    #[default]
    Code64,
    /// 32-bit code.
    Code32,
    /// 16-bit code.
    Code16,
}

impl CodeModel {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Code64, Self::Code32, Self::Code16];

    /// The model with this name, or with this width in bits; `None` if there is no such model.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "x86_64" | "x86-64" | "64" => Some(Self::Code64),
            "i386" | "32" => Some(Self::Code32),
            "i8086" | "16" => Some(Self::Code16),
            _ => None,
        }
    }
}

impl fmt::Display for CodeModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Code64 => "x86_64",
            Self::Code32 => "i386",
            Self::Code16 => "i8086",
        })
    }
}
