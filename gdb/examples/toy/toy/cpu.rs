//! The toy's processor: 64-bit code, five instructions.

use hindsight_cpu::state::{CpuState, gpr, seg};
use hindsight_regs::rflags::Rflags;

pub const RAM_BYTES: usize = 2 << 20;
pub const ENTRY: u64 = 0x10_0000;

/// Counts to 1000, stores each number at 0x102000, and halts.
const PROGRAM: &[u8] = &[
    0x48, 0xff, 0xc0, // inc %rax
    0x48, 0x89, 0x04, 0x25, 0x00, 0x20, 0x10, 0x00, // mov %rax,0x102000
    0x48, 0x3d, 0xe8, 0x03, 0x00, 0x00, // cmp $1000,%rax
    0x75, 0xed, // jne to the first instruction
    0xf4, // hlt
];

/// The effect of an instruction that the debugger may stop for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    None,
    /// The instruction wrote 8 bytes at this address.
    Store(u64),
    /// The instruction jumped from the first address to the second one.
    Branch(u64, u64),
    /// HLT: the run ends before it.
    Halt,
    /// The bytes are none of the five instructions.
    Illegal,
}

#[derive(Clone)]
pub struct ToyCpu {
    pub state: CpuState,
    pub ram: Vec<u8>,
    pub icount: u64,
}

impl ToyCpu {
    pub fn new() -> Self {
        let mut ram = vec![0; RAM_BYTES];
        let entry = usize::try_from(ENTRY).expect("it is below 2 MiB");
        ram[entry..entry + PROGRAM.len()].copy_from_slice(PROGRAM);
        // Two page tables map the first GiB to itself, by one large page.
        ram[0x1000..0x1008].copy_from_slice(&0x2003_u64.to_le_bytes());
        ram[0x2000..0x2008].copy_from_slice(&0x83_u64.to_le_bytes());
        let mut state = CpuState {
            rip: ENTRY,
            cr0: 0x8000_0011,
            cr3: 0x1000,
            cr4: 0x20,
            efer: 0x500,
            ..CpuState::reset()
        };
        state.seg[seg::CS].base = 0;
        // The L bit.
        state.seg[seg::CS].access |= 1 << 13;
        Self {
            state,
            ram,
            icount: 0,
        }
    }

    /// Executes one instruction, unless that is [`Effect::Halt`] or [`Effect::Illegal`].
    pub fn step(&mut self) -> Effect {
        let rip = self.state.rip;
        let at = usize::try_from(rip).unwrap_or(RAM_BYTES);
        let code = self.ram.get(at..).unwrap_or(&[]);
        let (len, effect) = match *code {
            [0x48, 0xff, 0xc0, ..] => {
                let rax = &mut self.state.gpr[gpr::RAX];
                *rax = rax.wrapping_add(1);
                (3, Effect::None)
            }
            [0x48, 0x89, 0x04, 0x25, a, b, c, d, ..] => {
                let to = u64::from(u32::from_le_bytes([a, b, c, d]));
                let start = usize::try_from(to).unwrap_or(RAM_BYTES);
                let Some(bytes) = self.ram.get_mut(start..start + 8) else {
                    return Effect::Illegal;
                };
                bytes.copy_from_slice(&self.state.gpr[gpr::RAX].to_le_bytes());
                (8, Effect::Store(to))
            }
            [0x48, 0x3d, a, b, c, d, ..] => {
                let equal = self.state.gpr[gpr::RAX] == u64::from(u32::from_le_bytes([a, b, c, d]));
                self.state.rflags &= !Rflags::ZF.bits();
                if equal {
                    self.state.rflags |= Rflags::ZF.bits();
                }
                (6, Effect::None)
            }
            [0x75, offset, ..] if self.state.rflags & Rflags::ZF.bits() == 0 => {
                let to = (rip + 2).wrapping_add_signed(i64::from(offset.cast_signed()));
                self.state.rip = to;
                self.icount += 1;
                return Effect::Branch(rip, to);
            }
            [0x75, _, ..] => (2, Effect::None),
            [0xf4, ..] => return Effect::Halt,
            _ => return Effect::Illegal,
        };
        self.state.rip = rip.wrapping_add(len);
        self.icount += 1;
        effect
    }
}
