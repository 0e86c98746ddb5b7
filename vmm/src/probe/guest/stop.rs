//! Why a guest stopped, and its description in findings.

use std::fmt;
use std::io;
use std::time::Duration;

use hindsight_regs::vector::Vector;
use iced_x86::{Decoder, DecoderOptions};

/// CPU time that one guest may use in all. A probe that hangs costs no more.
pub(super) const BUDGET: Duration = Duration::from_millis(50);

/// An exception or interrupt, with the frame that the guest's handler got.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trap {
    pub(crate) vector: u64,
    pub(crate) error: u64,
    pub(crate) rip: u64,
    pub(crate) cs: u64,
    pub(crate) rflags: u64,
    pub(crate) ss: u64,
    /// Address of the frame's RIP.
    pub(crate) frame: u64,
}

impl Trap {
    /// Whether this is the exception `vector`.
    pub(crate) fn is(&self, vector: Vector) -> bool {
        self.vector == u64::from(vector.0)
    }
}

/// Why a guest stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GuestStop {
    /// The guest wrote to `PORT_DONE`.
    Done,
    /// The guest's handler reported an exception or interrupt.
    Trap(Trap),
    /// KVM_EXIT_DEBUG.
    Debug {
        rip: u64,
        vector: u32,
        dr6: u64,
    },
    /// OUT to another port.
    Out {
        port: u16,
        data: Vec<u8>,
    },
    /// IN; the guest reads bytes of 0x5a.
    In {
        port: u16,
        size: usize,
    },
    MmioRead {
        address: u64,
        size: usize,
    },
    MmioWrite {
        address: u64,
        data: Vec<u8>,
    },
    Rdmsr {
        index: u32,
    },
    Wrmsr {
        index: u32,
        value: u64,
    },
    Halt,
    InterruptWindow,
    /// KVM_EXIT_INTERNAL_ERROR, with the instruction if KVM reported it.
    Internal {
        suberror: u32,
        instruction: String,
    },
    Shutdown,
    FailEntry {
        reason: u64,
    },
    /// KVM_RUN failed.
    Error {
        errno: i32,
    },
    /// The guest has used up its budget.
    Hung,
    /// Any other exit, as kvm-ioctls prints it.
    Unexpected(String),
}

/// The name of an exception as in the manual, or the vector's number.
fn vector_name(vector: u64) -> String {
    let vector = u8::try_from(vector).map_or(Vector(u8::MAX), Vector);
    match vector {
        Vector::NMI => "NMI".to_owned(),
        vector if vector <= Vector::PF && vector.mnemonic().is_some() => vector.to_string(),
        Vector(number) => format!("vector {number:#x}"),
    }
}

impl fmt::Display for GuestStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("the guest runs on"),
            Self::Trap(trap) => write!(f, "guest gets {}", vector_name(trap.vector)),
            Self::Debug { vector, dr6, .. } => {
                write!(f, "debug exit (vector {vector}, DR6 {dr6:#x})")
            }
            Self::Out { port, .. } => write!(f, "OUT exit, port {port:#x}"),
            Self::In { port, .. } => write!(f, "IN exit, port {port:#x}"),
            Self::MmioRead { address, .. } => write!(f, "MMIO read exit, {address:#x}"),
            Self::MmioWrite { address, .. } => write!(f, "MMIO write exit, {address:#x}"),
            Self::Rdmsr { index } => write!(f, "RDMSR exit, {index:#x}"),
            Self::Wrmsr { index, .. } => write!(f, "WRMSR exit, {index:#x}"),
            Self::Halt => f.write_str("HLT exit"),
            Self::InterruptWindow => f.write_str("interrupt-window exit"),
            Self::Internal {
                suberror: 1,
                instruction,
            } if !instruction.is_empty() => {
                write!(f, "internal error (cannot emulate {instruction})")
            }
            Self::Internal { suberror: 1, .. } => f.write_str("internal error (cannot emulate)"),
            Self::Internal { suberror, .. } => write!(f, "internal error (suberror {suberror})"),
            Self::Shutdown => f.write_str("triple fault"),
            Self::FailEntry { reason } => write!(f, "entry fails (reason {reason:#x})"),
            Self::Error { errno } => {
                write!(f, "KVM_RUN fails: {}", io::Error::from_raw_os_error(*errno))
            }
            Self::Hung => write!(f, "hangs (over {} ms)", BUDGET.as_millis()),
            Self::Unexpected(exit) => write!(f, "unexpected exit {exit}"),
        }
    }
}

/// The mnemonic of the first instruction in `bytes`; empty when there is none.
pub(crate) fn name_instruction(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return String::new();
    }
    let instruction = Decoder::new(64, bytes, DecoderOptions::NONE).decode();
    if instruction.is_invalid() {
        return format!("bytes {bytes:02x?}");
    }
    format!("{:?}", instruction.mnemonic()).to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_bytes_are_named_by_their_mnemonic() {
        assert_eq!(name_instruction(&[0xcc, 0x90]), "INT3");
        assert_eq!(name_instruction(&[]), "");
    }

    #[test]
    fn internal_error_names_the_instruction() {
        let stop = GuestStop::Internal {
            suberror: 1,
            instruction: "INT3".to_owned(),
        };
        assert_eq!(stop.to_string(), "internal error (cannot emulate INT3)");
    }

    #[test]
    fn trap_is_named_as_in_the_manual() {
        let stop = |vector| {
            GuestStop::Trap(Trap {
                vector,
                ..Trap::default()
            })
            .to_string()
        };
        assert_eq!(stop(1), "guest gets #DB");
        assert_eq!(stop(0x40), "guest gets vector 0x40");
    }
}
