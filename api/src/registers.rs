//! The registers of a virtual processor, by name.

use std::fmt;

use hindsight_cpu::register_dump::RegisterDump;
use hindsight_cpu::state::{CpuState, Segment};

/// The names of the registers that [`RegisterFile::get`] reads.
pub const REGISTER_NAMES: [&str; 45] = [
    "rax",
    "rcx",
    "rdx",
    "rbx",
    "rsp",
    "rbp",
    "rsi",
    "rdi",
    "r8",
    "r9",
    "r10",
    "r11",
    "r12",
    "r13",
    "r14",
    "r15",
    "rip",
    "rflags",
    "es",
    "cs",
    "ss",
    "ds",
    "fs",
    "gs",
    "fs_base",
    "gs_base",
    "cr0",
    "cr2",
    "cr3",
    "cr4",
    "cr8",
    "efer",
    "xcr0",
    "dr0",
    "dr1",
    "dr2",
    "dr3",
    "dr6",
    "dr7",
    "gdt",
    "idt",
    "cpl",
    "lstar",
    "star",
    "kernel_gs_base",
];

/// The registers of a virtual processor at one instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisterFile(pub(crate) CpuState);

/// Where a register is.
enum RegisterPlace<'a> {
    Number(&'a mut u64),
    Selector(&'a mut Segment),
    ReadOnly(u64),
}

impl RegisterFile {
    /// The value of a register, by a name of [`REGISTER_NAMES`]. A segment register is its selector.
    pub fn get(&self, name: &str) -> Option<u64> {
        let mut state = self.0.clone();
        Some(match register_place(&mut state, name)? {
            RegisterPlace::Number(value) => *value,
            RegisterPlace::Selector(segment) => segment.selector.into(),
            RegisterPlace::ReadOnly(value) => value,
        })
    }

    /// Sets a register; `false` if there is none with this name that can be set: selectors, table
    /// registers and CPL cannot.
    pub(crate) fn set(&mut self, name: &str, value: u64) -> bool {
        match register_place(&mut self.0, name) {
            Some(RegisterPlace::Number(register)) => *register = value,
            _ => return false,
        }
        true
    }

    /// All names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        REGISTER_NAMES
            .iter()
            .filter_map(|name| Some((*name, self.get(name)?)))
    }

    /// RIP.
    pub const fn rip(&self) -> u64 {
        self.0.rip
    }

    /// RSP.
    pub const fn rsp(&self) -> u64 {
        self.0.gpr[hindsight_cpu::state::gpr::RSP]
    }

    /// The whole architectural state.
    pub const fn state(&self) -> &CpuState {
        &self.0
    }
}

impl fmt::Display for RegisterFile {
    /// Writes general, segment and control registers, as a block of lines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        RegisterDump(&self.0).fmt(f)
    }
}

fn register_place<'a>(state: &'a mut CpuState, name: &str) -> Option<RegisterPlace<'a>> {
    let index = REGISTER_NAMES.iter().position(|own| *own == name)?;
    match index {
        0..16 => return state.gpr.get_mut(index).map(RegisterPlace::Number),
        18..24 => return state.seg.get_mut(index - 18).map(RegisterPlace::Selector),
        _ => {}
    }
    Some(match name {
        "rip" => RegisterPlace::Number(&mut state.rip),
        "rflags" => RegisterPlace::Number(&mut state.rflags),
        "fs_base" => RegisterPlace::Number(&mut state.seg[hindsight_cpu::state::seg::FS].base),
        "gs_base" => RegisterPlace::Number(&mut state.seg[hindsight_cpu::state::seg::GS].base),
        "cr0" => RegisterPlace::Number(&mut state.cr0),
        "cr2" => RegisterPlace::Number(&mut state.cr2),
        "cr3" => RegisterPlace::Number(&mut state.cr3),
        "cr4" => RegisterPlace::Number(&mut state.cr4),
        "cr8" => RegisterPlace::ReadOnly(state.cr8),
        "efer" => RegisterPlace::Number(&mut state.efer),
        "xcr0" => RegisterPlace::Number(&mut state.xcr0),
        "dr0" => RegisterPlace::Number(&mut state.dr[0]),
        "dr1" => RegisterPlace::Number(&mut state.dr[1]),
        "dr2" => RegisterPlace::Number(&mut state.dr[2]),
        "dr3" => RegisterPlace::Number(&mut state.dr[3]),
        "dr6" => RegisterPlace::Number(&mut state.dr6),
        "dr7" => RegisterPlace::Number(&mut state.dr7),
        "gdt" => RegisterPlace::ReadOnly(state.gdtr.base),
        "idt" => RegisterPlace::ReadOnly(state.idtr.base),
        "cpl" => RegisterPlace::ReadOnly(state.cpl().into()),
        "lstar" => RegisterPlace::Number(&mut state.msrs.lstar),
        "star" => RegisterPlace::Number(&mut state.msrs.star),
        "kernel_gs_base" => RegisterPlace::Number(&mut state.msrs.kernel_gs_base),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_value() {
        let registers = RegisterFile(CpuState::reset());
        assert_eq!(registers.iter().count(), REGISTER_NAMES.len());
        assert_eq!(registers.get("rip"), Some(registers.rip()));
        assert_eq!(registers.get("cs"), Some(0xf000));
        assert_eq!(registers.get("eax"), None);
    }

    #[test]
    fn each_register_is_set_by_its_own_name() {
        for name in REGISTER_NAMES {
            let mut registers = RegisterFile(CpuState::reset());
            if registers.set(name, 0x1234_5678) {
                let changed: Vec<_> = registers
                    .iter()
                    .filter(|(_, v)| *v == 0x1234_5678)
                    .collect();
                assert_eq!(changed, [(name, 0x1234_5678)]);
            }
        }
        let mut registers = RegisterFile(CpuState::reset());
        assert!(registers.set("r15", 1) && !registers.set("cpl", 1) && !registers.set("cs", 8));
    }
}
