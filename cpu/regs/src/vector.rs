//! Exception vectors. SDM Vol. 3A, "Exception and Interrupt Vectors".

use core::fmt;

/// An interrupt or exception vector, 0 to 255. The constants name the architectural exceptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Vector(pub u8);

impl Vector {
    /// Divide error.
    pub const DE: Self = Self(0);
    /// Debug exception.
    pub const DB: Self = Self(1);
    /// Non-maskable interrupt.
    pub const NMI: Self = Self(2);
    /// Breakpoint, by INT3.
    pub const BP: Self = Self(3);
    /// Overflow, by INTO.
    pub const OF: Self = Self(4);
    /// BOUND range exceeded.
    pub const BR: Self = Self(5);
    /// Invalid opcode.
    pub const UD: Self = Self(6);
    /// Device not available.
    pub const NM: Self = Self(7);
    /// Double fault.
    pub const DF: Self = Self(8);
    /// Invalid TSS.
    pub const TS: Self = Self(10);
    /// Segment not present.
    pub const NP: Self = Self(11);
    /// Stack-segment fault.
    pub const SS: Self = Self(12);
    /// General protection.
    pub const GP: Self = Self(13);
    /// Page fault.
    pub const PF: Self = Self(14);
    /// x87 floating-point error.
    pub const MF: Self = Self(16);
    /// Alignment check.
    pub const AC: Self = Self(17);
    /// Machine check.
    pub const MC: Self = Self(18);
    /// SIMD floating-point exception.
    pub const XM: Self = Self(19);
    /// Virtualization exception.
    pub const VE: Self = Self(20);
    /// Control-protection exception.
    pub const CP: Self = Self(21);

    /// Whether delivery of this exception pushes an error code.
    pub const fn has_error_code(self) -> bool {
        matches!(self.0, 8 | 10..=14 | 17 | 21)
    }

    /// The mnemonic of an architectural exception, without the `#`.
    pub const fn mnemonic(self) -> Option<&'static str> {
        Some(match self {
            Self::DE => "DE",
            Self::DB => "DB",
            Self::NMI => "NMI",
            Self::BP => "BP",
            Self::OF => "OF",
            Self::BR => "BR",
            Self::UD => "UD",
            Self::NM => "NM",
            Self::DF => "DF",
            Self::TS => "TS",
            Self::NP => "NP",
            Self::SS => "SS",
            Self::GP => "GP",
            Self::PF => "PF",
            Self::MF => "MF",
            Self::AC => "AC",
            Self::MC => "MC",
            Self::XM => "XM",
            Self::VE => "VE",
            Self::CP => "CP",
            _ => return None,
        })
    }
}

impl fmt::Display for Vector {
    /// `#GP` for an architectural exception, `NMI`, else the number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mnemonic() {
            // An interrupt, whose mnemonic the manual writes without the sign.
            Some(name) if *self == Self::NMI => f.write_str(name),
            Some(name) => write!(f, "#{name}"),
            None => write!(f, "vector {}", self.0),
        }
    }
}

/// The access raises a general-protection exception with error code 0.
///
/// It is the architectural result of the guest's access, not a failure of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpFault;

impl fmt::Display for GpFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("#GP(0)")
    }
}

impl core::error::Error for GpFault {}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::string::ToString;

    /// SDM Vol. 3A, table "Protected-Mode Exceptions and Interrupts".
    #[test]
    fn vectors_and_error_codes_match_the_manual() {
        let with_code = [8, 10, 11, 12, 13, 14, 17, 21];
        for n in 0..=255 {
            let expected = with_code.contains(&n);
            assert_eq!(Vector(n).has_error_code(), expected, "{n}");
        }
        assert_eq!(Vector::GP.0, 0x0d);
        assert_eq!(Vector::XM.0, 0x13);
    }

    #[test]
    fn vector_prints_as_the_manual_writes_it() {
        assert_eq!(Vector::PF.to_string(), "#PF");
        assert_eq!(Vector::NMI.to_string(), "NMI");
        assert_eq!(Vector(0x20).to_string(), "vector 32");
    }
}
