//! Commands that show tables in the guest's memory: pages and descriptors.

use std::fmt::{self, Write as _};

use hindsight_cpu::state::{CpuState, canonical};
use hindsight_regs::cr::{Cr0, Cr4, Efer};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::gdb::debugger::Debugger;
use crate::gdb::monitor::{Answer, MonitorError, none, number, usage};
use crate::gdb::stop::EXCEPTIONS;
use crate::memory::page_walk;

/// Most lines that a command prints.
const LINES: usize = 1000;

fn entry(memory: &GuestMemoryMmap, at: u64, bytes: usize) -> Option<u64> {
    let mut raw = [0; 8];
    memory
        .read_slice(&mut raw[..bytes], GuestAddress(at))
        .ok()?;
    Some(u64::from_le_bytes(raw))
}

/// The rights in an entry, in a few letters; `nx`: bit 63 forbids execution.
fn rights(entry: u64, nx: bool) -> String {
    let execute = !nx || entry >> 63 == 0;
    let letters = [(1, 'W'), (2, 'U'), (5, 'A'), (6, 'D'), (7, 'S'), (8, 'G')];
    let letter = |on: bool, letter| if on { letter } else { '-' };
    let letters = letters.map(|(bit, name)| letter(entry >> bit & 1 != 0, name));
    letters.into_iter().chain([letter(execute, 'X')]).collect()
}

/// The levels of a walk: name, shift, bytes of an entry, address of the table.
fn levels(state: &CpuState) -> (Vec<(&'static str, u32)>, usize, u64) {
    let long = state.is_long_mode();
    let pae = state.cr4 & Cr4::PAE.bits() != 0;
    match (long, pae) {
        (true, _) => (
            vec![("PML4E", 39), ("PDPTE", 30), ("PDE", 21), ("PTE", 12)],
            8,
            state.cr3 & 0x000f_ffff_ffff_f000,
        ),
        (false, true) => (
            vec![("PDPTE", 30), ("PDE", 21), ("PTE", 12)],
            8,
            state.cr3 & 0xffff_ffe0,
        ),
        (false, false) => (vec![("PDE", 22), ("PTE", 12)], 4, state.cr3 & 0xffff_f000),
    }
}

pub(super) fn pt(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    let [address] = arguments else {
        return Err(usage());
    };
    let linear = number(address)?;
    let memory = debugger.board().ram.map.clone();
    let cpu = debugger.current;
    let state = debugger.state(cpu)?;
    if !state.has_paging() {
        return Ok(format!(
            "paging is off: {linear:#x} is {:#x}",
            linear & 0xffff_ffff
        ));
    }
    let long = state.is_long_mode();
    if long && !canonical(linear) {
        return Err(MonitorError::Bad(format!(
            "{linear:#x} is not canonical: using it raises #GP or #SS"
        )));
    }
    let linear = if long { linear } else { linear & 0xffff_ffff };
    let (levels, size, mut table) = levels(state);
    let index_mask = if size == 8 { 0x1ff } else { 0x3ff };
    let nx = size == 8 && state.efer & Efer::NXE.bits() != 0;
    let mut text = format!("CR3 {:#x}\n", state.cr3);
    for (name, shift) in levels {
        let at = table + (linear >> shift & index_mask) * size as u64;
        let Some(entry) = entry(&memory, at, size) else {
            let _ = writeln!(text, "{name} at {at:#x}: not memory");
            return Ok(text);
        };
        let _ = writeln!(text, "{name} at {at:#x}: {entry:#x} {}", rights(entry, nx));
        if entry & 1 == 0 {
            text.push_str("not present\n");
            return Ok(text);
        }
        if name == "PTE" || (name != "PML4E" && entry & 1 << 7 != 0) {
            break;
        }
        table = entry & 0x000f_ffff_ffff_f000;
    }
    match page_walk::linear_to_physical(&memory, state, linear) {
        Some(physical) => {
            let _ = writeln!(text, "{linear:#x} is {physical:#x}");
        }
        None => text.push_str("not mapped\n"),
    }
    Ok(text)
}

/// Ranges of linear addresses that are mapped without a gap, by asking page by page through the
/// upper levels.
fn ranges(memory: &GuestMemoryMmap, state: &CpuState) -> Vec<(u64, u64, u64)> {
    let (levels, size, table) = levels(state);
    let mut found: Vec<(u64, u64, u64)> = Vec::new();
    let mut stack = vec![(table, 0_usize, 0_u64)];
    while let Some((table, level, base)) = stack.pop() {
        let Some((_, shift)) = levels.get(level).copied() else {
            continue;
        };
        let count = match (size, shift) {
            (4, _) => 1024,
            (_, 30) if levels.len() == 3 => 4,
            _ => 512,
        };
        let mut below = Vec::new();
        for index in 0..count {
            let Some(entry) = entry(memory, table + index * size as u64, size) else {
                break;
            };
            if entry & 1 == 0 {
                continue;
            }
            let linear = base | index << shift;
            let last = level + 1 == levels.len();
            let large = !last && entry & 1 << 7 != 0 && shift < 39;
            if last || large {
                push_range(&mut found, linear, 1 << shift, entry & 6);
            } else {
                below.push((entry & 0x000f_ffff_ffff_f000, level + 1, linear));
            }
        }
        stack.extend(below.into_iter().rev());
        if found.len() > LINES {
            break;
        }
    }
    found.sort_unstable();
    found
}

fn push_range(found: &mut Vec<(u64, u64, u64)>, linear: u64, len: u64, rights: u64) {
    if let Some((start, size, same)) = found.last_mut()
        && start.wrapping_add(*size) == linear
        && *same == rights
    {
        *size = size.saturating_add(len);
        return;
    }
    found.push((linear, len, rights));
}

pub(super) fn tlb(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let memory = debugger.board().ram.map.clone();
    let cpu = debugger.current;
    let state = debugger.state(cpu)?;
    if !state.has_paging() {
        return Ok("paging is off".to_owned());
    }
    let long = state.is_long_mode();
    let mut text = String::new();
    let all = ranges(&memory, state);
    for (linear, len, rights) in all.iter().take(LINES) {
        let linear = if long {
            (linear << 16)
                .cast_signed()
                .wrapping_shr(16)
                .cast_unsigned()
        } else {
            *linear
        };
        let end = linear.wrapping_add(*len);
        let write = if rights & 2 != 0 { 'W' } else { '-' };
        let user = if rights & 4 != 0 { 'U' } else { '-' };
        let _ = writeln!(text, "{linear:016x}-{end:016x} {len:#x} {write}{user}");
    }
    if all.len() > LINES {
        text.push_str("and more\n");
    }
    Ok(text)
}

pub(super) fn mem(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let mut text = String::new();
    for region in debugger.board().ram.map.iter() {
        let start = region.start_addr().0;
        let _ = writeln!(text, "{start:#x}-{:#x} RAM", start + region.len());
    }
    Ok(text)
}

/// A descriptor of the GDT.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    low: u64,
    /// The upper half, where the table has it.
    high: Option<u64>,
}

impl Descriptor {
    fn is_system(self) -> bool {
        self.low >> 44 & 1 == 0
    }

    fn kind(self) -> u64 {
        self.low >> 40 & 0xf
    }

    /// In IA-32e mode it takes 16 bytes. SDM Vol. 3A, "Segment Descriptor Tables in IA-32e Mode".
    fn is_wide(self, long: bool) -> bool {
        long && self.is_system() && matches!(self.kind(), 2 | 9 | 0xb | 0xc)
    }

    fn gate(self) -> String {
        let kind = match self.kind() {
            5 => "task gate",
            0xc => "call gate",
            _ => "16-bit call gate",
        };
        let mut offset = (self.low & 0xffff) | (self.low >> 48) << 16;
        match self.kind() {
            5 => return format!("{kind} to {:04x}", self.low >> 16 & 0xffff),
            4 => offset &= 0xffff,
            _ => offset |= self.high.unwrap_or(0) << 32,
        }
        format!("{kind} to {:04x}:{offset:#x}", self.low >> 16 & 0xffff)
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

impl fmt::Display for Descriptor {
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

/// Descriptors with their offsets in the table, but for null descriptors; `entry` reads the table.
fn descriptors(
    limit: u16,
    long: bool,
    entry: impl Fn(u64) -> Option<u64>,
) -> Vec<(u64, Descriptor)> {
    let mut found = Vec::new();
    let mut offsets = (0..=u64::from(limit)).step_by(8);
    while let Some(offset) = offsets.next() {
        let Some(low) = entry(offset) else {
            break;
        };
        let mut descriptor = Descriptor { low, high: None };
        if descriptor.is_wide(long) {
            let high = offsets.next().and_then(&entry);
            descriptor.high = high.map(|high| high & 0xffff_ffff);
        }
        if low != 0 {
            found.push((offset, descriptor));
        }
    }
    found
}

pub(super) fn gdt(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let memory = debugger.board().ram.map.clone();
    let cpu = debugger.current;
    let state = debugger.state(cpu)?;
    let mut text = format!(
        "GDT at {:#x}, limit {:#x}\n",
        state.gdtr.base, state.gdtr.limit
    );
    let table = state.gdtr;
    let found = descriptors(table.limit, state.is_long_mode(), |offset| {
        let at = table.base.wrapping_add(offset);
        let raw = page_walk::read_linear(&memory, state, at, 8);
        raw.try_into().ok().map(u64::from_le_bytes)
    });
    for (selector, descriptor) in found.iter().take(LINES) {
        let _ = writeln!(text, "{selector:04x}: {:016x} {descriptor}", descriptor.low);
    }
    if found.len() > LINES {
        text.push_str("and more\n");
    }
    Ok(text)
}

pub(super) fn idt(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let memory = debugger.board().ram.map.clone();
    let cpu = debugger.current;
    let state = debugger.state(cpu)?;
    let base = state.idtr.base;
    let mut text = format!("IDT at {base:#x}, limit {:#x}\n", state.idtr.limit);
    let (real, long) = (state.cr0 & Cr0::PE.bits() == 0, state.is_long_mode());
    let size = match (real, long) {
        (true, _) => 4,
        (_, true) => 16,
        _ => 8,
    };
    let count = (u64::from(state.idtr.limit) + 1) / size;
    for vector in 0..count.min(256) {
        let len = usize::try_from(size).unwrap_or(4);
        let raw = page_walk::read_linear(&memory, state, base.wrapping_add(vector * size), len);
        if raw.len() < len {
            break;
        }
        let mut wide = [0; 16];
        wide[..len].copy_from_slice(&raw);
        let raw = u128::from_le_bytes(wide);
        let name = usize::try_from(vector).ok().and_then(|v| EXCEPTIONS.get(v));
        let name = name.copied().unwrap_or("");
        let low = u64::try_from(raw & u128::from(u64::MAX)).unwrap_or(0);
        if real {
            let _ = writeln!(
                text,
                "{vector:02x} {:04x}:{:04x} {name}",
                low >> 16,
                low & 0xffff
            );
        } else if low >> 47 & 1 != 0 {
            let high = u64::try_from(raw >> 64).unwrap_or(0) & 0xffff_ffff;
            let offset = (low & 0xffff) | (low >> 48) << 16 | high << 32;
            let _ = writeln!(
                text,
                "{vector:02x} {:04x}:{offset:#x} type {:x}, DPL {}, IST {} {name}",
                low >> 16 & 0xffff,
                low >> 40 & 0xf,
                low >> 45 & 3,
                if long { low >> 32 & 7 } else { 0 },
            );
        }
    }
    Ok(text)
}

pub(super) fn disas(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter};
    let cpu = debugger.current;
    let state = debugger.state(cpu)?.clone();
    let (at, count) = match arguments {
        [] => (None, 10),
        [at] => (Some(number(at)?), 10),
        [at, count] => (Some(number(at)?), number(count)?),
        _ => return Err(usage()),
    };
    let at = at.unwrap_or_else(|| crate::gdb::registers::linear_pc(&state, state.rip));
    let count = usize::try_from(count).unwrap_or(LINES).min(LINES);
    let code = debugger.read_memory(cpu, at, count * 15);
    let code = code.map_err(|_| MonitorError::Bad(format!("{at:#x} is not mapped to memory")))?;
    let cs = state.seg[1];
    let bits = match (state.is_long_mode() && cs.long(), cs.default_big()) {
        (true, _) => 64,
        (_, true) => 32,
        _ => 16,
    };
    let mut decoder = Decoder::with_ip(bits, &code, at, DecoderOptions::NONE);
    let mut text = String::new();
    for instruction in decoder.iter().take(count) {
        let mut line = String::new();
        GasFormatter::new().format(&instruction, &mut line);
        let _ = writeln!(text, "{:#x}: {line}", instruction.ip());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_descriptors_take_16_bytes_in_long_mode() {
        let table = [
            0,
            0x00af_9b00_0000_ffff,
            0x0000_8900_3000_0067,
            0xffff_fe00,
            0x0012_ec00_0010_3456,
            0xffff_8000,
            0x0000_8200_0000_ffff,
        ];
        let list = |long| -> Vec<String> {
            let entry = |at: u64| table.get(usize::try_from(at / 8).unwrap()).copied();
            let found = descriptors(u16::MAX, long, entry);
            let line = |(at, descriptor): &(u64, Descriptor)| format!("{at:x} {descriptor}");
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
    fn pages_are_executable_unless_bit_63_counts_and_is_set() {
        assert_eq!(rights(0x8000_0000_0000_0063, true), "W-AD---");
        assert_eq!(rights(0x8000_0000_0000_0063, false), "W-AD--X");
        assert_eq!(rights(0x65, true), "-UAD--X");
    }
}
