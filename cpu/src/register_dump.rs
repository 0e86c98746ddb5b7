//! The registers of a vCPU as text, for reports.

use std::fmt;

use crate::state::CpuState;

/// Prints general, segment and control registers, as a block of lines.
#[derive(Debug)]
pub struct RegisterDump<'a>(pub &'a CpuState);

const GPR_NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];
const SEGMENT_NAMES: [&str; 6] = ["es", "cs", "ss", "ds", "fs", "gs"];

impl fmt::Display for RegisterDump<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0;
        for (row, names) in s.gpr.chunks(4).zip(GPR_NAMES.chunks(4)) {
            for (value, name) in row.iter().zip(names) {
                write!(f, "  {name:>3}={value:016x}")?;
            }
            writeln!(f)?;
        }
        writeln!(
            f,
            "  rip={:016x}  rflags={:08x}  cpl={}",
            s.rip,
            s.rflags,
            s.cpl()
        )?;
        for (segment, name) in s.seg.iter().zip(SEGMENT_NAMES) {
            writeln!(
                f,
                "  {name} ={:04x} base={:016x} limit={:08x} access={:04x}",
                segment.selector, segment.base, segment.limit, segment.access
            )?;
        }
        writeln!(
            f,
            "  cr0={:08x} cr2={:016x} cr3={:016x} cr4={:08x}",
            s.cr0, s.cr2, s.cr3, s.cr4
        )?;
        writeln!(
            f,
            "  efer={:04x} gdt={:016x}/{:04x} idt={:016x}/{:04x}",
            s.efer, s.gdtr.base, s.gdtr.limit, s.idtr.base, s.idtr.limit
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dump_shows_every_group_of_registers() {
        let text = RegisterDump(&CpuState::reset()).to_string();
        for part in [
            "rax=0",
            "rip=000000000000fff0",
            "cs =f000",
            "cr0=60000010",
            "efer=0000",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
