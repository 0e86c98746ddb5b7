//! Commands that show descriptor tables. SDM Vol. 3A, "Segment Descriptors" and "IDT Descriptors".

use std::fmt::{self, Write as _};

use hindsight_regs::cr::Cr0;
use hindsight_regs::vector::Vector;

use super::arguments::no_arguments;
use super::command::CommandReply;
use crate::debugger::Debugger;
use crate::modes;

/// Maximum number of lines that a command prints.
const LINES_MAX: usize = 1000;

/// A descriptor of the GDT.
#[derive(Clone, Copy, Debug)]
struct GdtDescriptor {
    low: u64,
    /// The upper half, where the descriptor has one.
    high: Option<u64>,
}

impl GdtDescriptor {
    fn is_system(self) -> bool {
        self.low >> 44 & 1 == 0
    }

    fn kind(self) -> u64 {
        self.low >> 40 & 0xf
    }

    /// Whether it takes 16 bytes. SDM Vol. 3A, "Segment Descriptor Tables in IA-32e Mode".
    fn is_wide(self, ia32e: bool) -> bool {
        ia32e && self.is_system() && matches!(self.kind(), 2 | 9 | 0xb | 0xc)
    }

    fn gate(self) -> String {
        let kind = match self.kind() {
            5 => "task gate",
            0xc => "call gate",
            _ => "16-bit call gate",
        };
        let selector = self.low >> 16 & 0xffff;
        let mut offset = (self.low & 0xffff) | (self.low >> 48) << 16;
        match self.kind() {
            5 => return format!("{kind} to {selector:04x}"),
            4 => offset &= 0xffff,
            _ => offset |= self.high.unwrap_or(0) << 32,
        }
        format!("{kind} to {selector:04x}:{offset:#x}")
    }

    fn segment(self) -> String {
        let raw = self.low;
        let base = (raw >> 16 & 0xff_ffff) | (raw >> 56) << 24 | self.high.unwrap_or(0) << 32;
        let limit = (raw & 0xffff) | (raw >> 32 & 0xf_0000);
        let limit = if raw >> 55 & 1 != 0 {
            limit << 12 | 0xfff
        } else {
            limit
        };
        let kind = match (self.is_system(), raw >> 43 & 1) {
            (false, 1) if raw >> 53 & 1 != 0 => "64-bit code",
            (false, 1) if raw >> 54 & 1 != 0 => "32-bit code",
            (false, 1) => "16-bit code",
            (false, _) => "data",
            _ => match self.kind() {
                2 => "LDT",
                1 | 3 => "16-bit TSS",
                9 | 0xb => "TSS",
                _ => "system",
            },
        };
        format!("{kind}, base {base:#x}, limit {limit:#x}")
    }
}

impl fmt::Display for GdtDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.kind() {
            4 | 5 | 0xc if self.is_system() => self.gate(),
            _ => self.segment(),
        };
        write!(f, "{text}, DPL {}", self.low >> 45 & 3)?;
        if self.low >> 47 & 1 == 0 {
            f.write_str(", not present")?;
        }
        Ok(())
    }
}

/// The descriptors of a table with their offsets, without null descriptors; `read` reads 8 bytes of
/// the table.
fn descriptors(
    limit: u16,
    ia32e: bool,
    read: impl Fn(u64) -> Option<u64>,
) -> Vec<(u64, GdtDescriptor)> {
    let mut found = Vec::new();
    let mut offsets = (0..=u64::from(limit)).step_by(8);
    while let Some(offset) = offsets.next() {
        let Some(low) = read(offset) else {
            break;
        };
        let mut descriptor = GdtDescriptor { low, high: None };
        if descriptor.is_wide(ia32e) {
            let high = offsets.next().and_then(&read);
            descriptor.high = high.map(|high| high & 0xffff_ffff);
        }
        if low != 0 {
            found.push((offset, descriptor));
        }
    }
    found
}

pub(super) fn gdt(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let linear = debugger.linear_memory(debugger.selected)?;
    let table = linear.state.gdtr;
    let mut text = format!("GDT at {:#x}, limit {:#x}\n", table.base, table.limit);
    let found = descriptors(table.limit, modes::is_ia32e(linear.state), |offset| {
        let raw = linear.read(table.base.wrapping_add(offset), 8);
        raw.try_into().ok().map(u64::from_le_bytes)
    });
    for (selector, descriptor) in found.iter().take(LINES_MAX) {
        let _ = writeln!(text, "{selector:04x}: {:016x} {descriptor}", descriptor.low);
    }
    if found.len() > LINES_MAX {
        text.push_str("and more\n");
    }
    Ok(text)
}

/// The form of the entries of an interrupt descriptor table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GateForm {
    /// Real-address mode: segment and offset.
    Real,
    /// Protected mode.
    Protected,
    /// IA-32e mode.
    Ia32e,
}

impl GateForm {
    const fn bytes(self) -> usize {
        match self {
            Self::Real => 4,
            Self::Protected => 8,
            Self::Ia32e => 16,
        }
    }

    /// An entry as text; `None` if it is not present.
    fn describe(self, raw: &[u8]) -> Option<String> {
        let mut wide = [0; 16];
        wide.get_mut(..raw.len())?.copy_from_slice(raw);
        let [low, high] = [0, 8].map(|at| {
            let half = wide[at..at + 8].try_into();
            half.map_or(0, u64::from_le_bytes)
        });
        if self == Self::Real {
            return Some(format!("{:04x}:{:04x}", low >> 16, low & 0xffff));
        }
        if low >> 47 & 1 == 0 {
            return None;
        }
        let offset = (low & 0xffff) | (low >> 48) << 16 | (high & 0xffff_ffff) << 32;
        let (selector, kind, dpl) = (low >> 16 & 0xffff, low >> 40 & 0xf, low >> 45 & 3);
        let ist = if self == Self::Ia32e {
            low >> 32 & 7
        } else {
            0
        };
        Some(format!(
            "{selector:04x}:{offset:#x} type {kind:x}, DPL {dpl}, IST {ist}"
        ))
    }
}

pub(super) fn idt(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let linear = debugger.linear_memory(debugger.selected)?;
    let state = linear.state;
    let table = state.idtr;
    let mut text = format!("IDT at {:#x}, limit {:#x}\n", table.base, table.limit);
    let real = state.cr0 & Cr0::PE.bits() == 0;
    let form = match (real, modes::is_ia32e(state)) {
        (true, _) => GateForm::Real,
        (_, true) => GateForm::Ia32e,
        _ => GateForm::Protected,
    };
    let len = form.bytes();
    let count = (usize::from(table.limit) + 1) / len;
    for (vector, number) in (0..=u8::MAX).zip(0..count) {
        let raw = linear.read(table.base.wrapping_add((number * len) as u64), len);
        if raw.len() < len {
            break;
        }
        if let Some(gate) = form.describe(&raw) {
            let vector = Vector(vector);
            let name = match vector.mnemonic() {
                Some(_) => format!(" {vector}"),
                None => String::new(),
            };
            let _ = writeln!(text, "{:02x} {gate}{name}", vector.0);
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_descriptors_take_16_bytes_in_ia32e_mode() {
        let table = [
            0,
            0x00af_9b00_0000_ffff,
            0x0000_8900_3000_0067,
            0xffff_fe00,
            0x0012_ec00_0010_3456,
            0xffff_8000,
            0x0000_8200_0000_ffff,
        ];
        let list = |ia32e| -> Vec<String> {
            let read = |at: u64| table.get(usize::try_from(at / 8).unwrap()).copied();
            let found = descriptors(u16::MAX, ia32e, read);
            let line = |(at, descriptor): &(u64, GdtDescriptor)| format!("{at:x} {descriptor}");
            found.iter().map(line).collect()
        };
        assert_eq!(
            list(true),
            [
                "8 64-bit code, base 0x0, limit 0xffffffff, DPL 0",
                "10 TSS, base 0xfffffe0000003000, limit 0x67, DPL 0",
                "20 call gate to 0010:0xffff800000123456, DPL 3",
                "30 LDT, base 0x0, limit 0xffff, DPL 0",
            ]
        );
        let narrow = list(false);
        assert_eq!(narrow.len(), 6);
        assert_eq!(narrow[1], "10 TSS, base 0x3000, limit 0x67, DPL 0");
        assert_eq!(narrow[3], "20 call gate to 0010:0x123456, DPL 3");
    }

    #[test]
    fn gates_are_described_in_the_form_of_the_mode() {
        let real = GateForm::Real.describe(&[0x34, 0x12, 0x00, 0xf0]);
        assert_eq!(real.unwrap(), "f000:1234");
        let raw = [
            0x34, 0x12, 0x10, 0, 2, 0x8e, 0x56, 0x34, 0, 0x80, 0xff, 0xff, 0, 0, 0, 0,
        ];
        let wide = GateForm::Ia32e.describe(&raw).unwrap();
        assert_eq!(wide, "0010:0xffff800034561234 type e, DPL 0, IST 2");
        let narrow = GateForm::Protected.describe(&raw[..8]).unwrap();
        assert_eq!(narrow, "0010:0x34561234 type e, DPL 0, IST 0");
        assert_eq!(GateForm::Ia32e.describe(&[0; 16]), None);
    }
}
