//! Why a guest stopped, in words.

use std::fmt;
use std::io;

use hindsight_regs::vector::Vector;
use iced_x86::{Decoder, DecoderOptions};

use crate::probe::guest::BUDGET;

/// An exception or interrupt as the guest's handler found it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trap {
    pub(crate) vector: u64,
    pub(crate) error: u64,
    pub(crate) rip: u64,
    pub(crate) cs: u64,
    pub(crate) rflags: u64,
    pub(crate) ss: u64,
    /// Where the frame is: the address of its RIP.
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
pub(crate) enum Stop {
    /// It wrote to `PORT_DONE`.
    Done,
    /// Its handler reports an exception or interrupt.
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
    /// IN; answered with bytes of 0x5a.
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
    /// KVM_EXIT_INTERNAL_ERROR, with the instruction where KVM gave it.
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
    /// The budget is used up.
    Hung,
    /// Any other exit, named as kvm-ioctls does.
    Strange(String),
}

fn exception_name(vector: u64) -> String {
    match u8::try_from(vector).map(Vector) {
        Ok(vector) if vector.mnemonic().is_some() => vector.to_string(),
        _ => format!("vector {vector:#x}"),
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("the guest runs on"),
            Self::Trap(trap) => write!(f, "guest gets {}", exception_name(trap.vector)),
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
            Self::Strange(exit) => write!(f, "unexpected exit {exit}"),
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
    fn instruction_bytes_are_named() {
        assert_eq!(name_instruction(&[0xcc, 0x90]), "INT3");
        assert_eq!(name_instruction(&[]), "");
    }

    #[test]
    fn internal_error_names_the_instruction() {
        let stop = Stop::Internal {
            suberror: 1,
            instruction: "INT3".to_owned(),
        };
        assert_eq!(stop.to_string(), "internal error (cannot emulate INT3)");
    }

    #[test]
    fn trap_is_named_as_the_manual_does() {
        let stop = |vector| {
            Stop::Trap(Trap {
                vector,
                ..Trap::default()
            })
            .to_string()
        };
        assert_eq!(stop(1), "guest gets #DB");
        assert_eq!(stop(0x40), "guest gets vector 0x40");
    }
}
