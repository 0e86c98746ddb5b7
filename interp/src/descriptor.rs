//! Segment descriptors and gates. SDM Vol. 3A, "Segment Descriptors" and "Gate Descriptors".

#![expect(
    clippy::cast_possible_truncation,
    reason = "descriptor fields are cut on purpose"
)]

use crate::fault::Fault;
use hindsight_cpu::state::Segment;
use hindsight_regs::vector::Vector;

/// Bits of the access rights: present, and the type.
pub(crate) mod access {
    /// Present.
    pub(crate) const PRESENT: u16 = 1 << 7;
    /// A code or data segment; clear for system segments and gates.
    pub(crate) const S: u16 = 1 << 4;
    /// A code segment.
    pub(crate) const CODE: u16 = 1 << 3;
    /// Code: conforming. Data: expand-down.
    pub(crate) const CONFORMING: u16 = 1 << 2;
    /// Code: readable. Data: writable.
    pub(crate) const READ_WRITE: u16 = 1 << 1;
    /// 64-bit code.
    pub(super) const LONG: u16 = 1 << 13;
    /// Operands and addresses of 32 bits; a stack pointer of 32 bits.
    pub(super) const BIG: u16 = 1 << 14;
    /// The limit counts pages.
    pub(super) const GRANULARITY: u16 = 1 << 15;
}

use access::{BIG, CODE, CONFORMING, GRANULARITY, LONG, PRESENT, READ_WRITE, S};

/// A descriptor as its table holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// The first eight bytes.
    pub(crate) raw: u64,
    /// Its linear address.
    pub(crate) address: u64,
}

impl Descriptor {
    /// The access rights, in the form of [`Segment::access`].
    pub(crate) fn access(self) -> u16 {
        (self.raw >> 40 & 0xf0ff) as u16
    }

    pub(crate) fn base(self) -> u64 {
        (self.raw >> 16 & 0xff_ffff) | (self.raw >> 32 & 0xff00_0000)
    }

    /// The limit in bytes.
    pub(crate) fn limit(self) -> u32 {
        let limit = (self.raw & 0xffff) as u32 | (self.raw >> 32 & 0xf_0000) as u32;
        if self.access() & GRANULARITY != 0 {
            limit << 12 | 0xfff
        } else {
            limit
        }
    }

    pub(crate) fn dpl(self) -> u8 {
        (self.raw >> 45 & 3) as u8
    }

    pub(crate) fn present(self) -> bool {
        self.access() & PRESENT != 0
    }

    /// Whether it is neither a system segment nor a gate.
    pub(crate) fn is_code_or_data(self) -> bool {
        self.access() & S != 0
    }

    pub(crate) fn is_code(self) -> bool {
        self.is_code_or_data() && self.access() & CODE != 0
    }

    pub(crate) fn is_conforming(self) -> bool {
        self.is_code() && self.access() & CONFORMING != 0
    }

    /// Whether it is data or code that can be read.
    pub(crate) fn is_readable(self) -> bool {
        self.is_code_or_data() && self.access() & (CODE | READ_WRITE) != CODE
    }

    /// Whether the descriptor is that of a writable data segment.
    pub(crate) fn is_writable(self) -> bool {
        self.access() & (S | CODE | READ_WRITE) == S | READ_WRITE
    }

    /// The type of a system descriptor, 0 to 15; `None` for code and data.
    pub(crate) fn system_type(self) -> Option<u8> {
        (!self.is_code_or_data()).then_some((self.access() & 15) as u8)
    }

    /// Whether it is 64-bit code.
    pub(crate) fn is_long(self) -> bool {
        self.access() & LONG != 0
    }

    /// Whether its D/B bit is set.
    pub(crate) fn is_big(self) -> bool {
        self.access() & BIG != 0
    }

    /// Target of a gate: selector and the low 32 bits of the offset.
    pub(crate) fn gate_target(self) -> (u16, u64) {
        let offset = (self.raw & 0xffff) | (self.raw >> 32 & 0xffff_0000);
        ((self.raw >> 16) as u16, offset)
    }

    /// Returns the contents of a segment register after a load of this descriptor.
    pub(crate) fn segment(self, selector: u16) -> Segment {
        Segment {
            selector,
            base: self.base(),
            limit: self.limit(),
            access: self.access(),
            unusable: false,
        }
    }
}

/// Returns the error code for a selector.
pub(crate) fn selector_error(selector: u16) -> u32 {
    u32::from(selector & 0xfffc)
}

/// Returns #GP with a selector as its error code.
pub(crate) fn gp(selector: u16) -> Fault {
    Fault::WithCode(Vector::GP, selector_error(selector))
}

/// Returns #NP with a selector as its error code.
pub(crate) fn np(selector: u16) -> Fault {
    Fault::WithCode(Vector::NP, selector_error(selector))
}

/// Returns #SS with a selector as its error code.
pub(crate) fn ss(selector: u16) -> Fault {
    Fault::WithCode(Vector::SS, selector_error(selector))
}

/// Returns #TS with a selector as its error code.
pub(crate) fn ts(selector: u16) -> Fault {
    Fault::WithCode(Vector::TS, selector_error(selector))
}

/// Whether a segment is writable data of 4 GiB that begins at a page boundary. An access that stays
/// within a page stays within such a segment.
pub(crate) const fn is_open_data(s: Segment) -> bool {
    let kind = s.access & (CODE | CONFORMING | READ_WRITE);
    !s.unusable && s.limit == u32::MAX && kind == READ_WRITE && s.base & 0xfff == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_descriptor_are_where_the_manual_puts_them() {
        let d = Descriptor {
            raw: 0x12cf_f345_6789_abcd,
            address: 0,
        };
        assert_eq!((d.base(), d.limit()), (0x1245_6789, 0xfabc_dfff));
        assert_eq!((d.dpl(), d.present(), d.access()), (3, true, 0xc0f3));
        assert!(d.is_writable() && d.is_readable() && d.is_big() && !d.is_long());
        assert_eq!(d.system_type(), None);
    }

    #[test]
    fn gate_names_its_target() {
        let d = Descriptor {
            raw: 0x1234_8e00_0008_5678,
            address: 0,
        };
        assert_eq!(d.gate_target(), (8, 0x1234_5678));
        assert_eq!(d.system_type(), Some(14));
    }

    #[test]
    fn execute_only_code_is_not_readable() {
        let d = |access: u64| Descriptor {
            raw: access << 40,
            address: 0,
        };
        assert!(!d(0x99).is_readable() && d(0x9b).is_readable() && d(0x91).is_readable());
        assert!(!d(0x91).is_writable() && !d(0x9b).is_writable());
    }
}
