//! Writing a register to a vCPU's state: only values that a processor can have.

use hindsight_cpu::control::{self, ControlMasks};
use hindsight_cpu::state::{CpuState, Segment, canonical, seg};
use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::rflags::Rflags;
use thiserror::Error;

use super::location::RegisterLocation;
use super::xsave;
use crate::modes;

/// Why a register cannot be written.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegisterError {
    /// No processor can be in such a state.
    #[error("the processor cannot have this value in this register")]
    Impossible,
    /// The register is an MSR that the state does not hold: [`crate::DebugTarget::write_msr`] writes
    /// it.
    #[error("the register is an MSR outside the vCPU's state")]
    Msr,
}

fn require(possible: bool) -> Result<(), RegisterError> {
    if possible {
        Ok(())
    } else {
        Err(RegisterError::Impossible)
    }
}

/// Loads a selector as real-address mode does. In protected mode only the selector changes: a
/// debugger writes base, limit and access rights itself.
fn load_selector(state: &mut CpuState, i: usize, selector: u16) -> Result<(), RegisterError> {
    let real = state.cr0 & Cr0::PE.bits() == 0;
    let segment = segment_mut(state, i)?;
    if segment.selector != selector {
        segment.selector = selector;
        if real {
            segment.base = u64::from(selector) << 4;
        }
    }
    Ok(())
}

fn set_control(
    state: &mut CpuState,
    controls: &ControlMasks,
    number: u8,
    value: u64,
) -> Result<(), RegisterError> {
    let paging = state.cr0 & Cr0::PG.bits() != 0;
    match number {
        0 => {
            // EFER.LMA follows CR0.PG; a debugger that switched one without the other would leave
            // an impossible state.
            let switched = (value ^ state.cr0) & Cr0::PG.bits() != 0;
            require(control::accepts_cr0(value) && !switched)?;
            state.cr0 = (value & Cr0::all().bits()) | Cr0::ET.bits();
        }
        2 => state.cr2 = value,
        3 => {
            require(control::accepts_cr3(state, controls.physical, value))?;
            state.cr3 = value & controls.physical;
        }
        4 => {
            let switched = (value ^ state.cr4) & Cr4::PAE.bits() != 0;
            // This processor has every bit that is set already.
            let controls = ControlMasks {
                cr4: controls.cr4 | state.cr4,
                ..*controls
            };
            require(controls.accepts_cr4(state, value) && !(paging && switched))?;
            state.cr4 = value;
        }
        _ => {
            require(control::accepts_cr8(value))?;
            state.cr8 = value;
        }
    }
    Ok(())
}

fn set_efer(
    state: &mut CpuState,
    controls: &ControlMasks,
    value: u64,
) -> Result<(), RegisterError> {
    let switched = (value ^ state.efer) & Efer::LMA.bits() != 0;
    let controls = ControlMasks {
        efer: controls.efer | state.efer,
        ..*controls
    };
    require(controls.accepts_efer(state, value) && !switched)?;
    state.efer = value;
    Ok(())
}

/// Sets a linear address that the processor requires to be canonical.
fn set_address(register: &mut u64, value: u64) -> Result<(), RegisterError> {
    require(canonical(value))?;
    *register = value;
    Ok(())
}

fn segment_mut(state: &mut CpuState, i: usize) -> Result<&mut Segment, RegisterError> {
    state.seg.get_mut(i).ok_or(RegisterError::Impossible)
}

fn set_xsave(
    state: &mut CpuState,
    (component, offset): (u32, usize),
    value: &[u8],
) -> Result<(), RegisterError> {
    // The upper half of MXCSR is reserved.
    let reserved = offset == xsave::MXCSR_OFFSET && value.iter().skip(2).any(|&byte| byte != 0);
    require(!reserved)?;
    xsave::write(state, component, offset, value);
    Ok(())
}

/// Writes a register from little-endian bytes.
///
/// # Errors
///
/// When the processor cannot have the value, or the register is an MSR that the state does not hold.
pub fn write_register(
    state: &mut CpuState,
    controls: &ControlMasks,
    location: RegisterLocation,
    bytes: &[u8],
) -> Result<(), RegisterError> {
    let mut wide = [0; 8];
    let len = bytes.len().min(8);
    wide[..len].copy_from_slice(&bytes[..len]);
    let value = u64::from_le_bytes(wide);
    let low16 = u16::from_le_bytes([wide[0], wide[1]]);
    let low32 = u32::from_le_bytes([wide[0], wide[1], wide[2], wide[3]]);
    match location {
        RegisterLocation::Msr(_) => return Err(RegisterError::Msr),
        RegisterLocation::Xsave {
            component,
            offset,
            len,
        } => {
            let value = bytes.get(..len).ok_or(RegisterError::Impossible)?;
            set_xsave(state, (component, offset), value)?;
        }
        RegisterLocation::FpuTags => {
            xsave::write(state, xsave::X87, 4, &[xsave::abridged_tags(low16)]);
        }
        RegisterLocation::Gpr(i) => {
            *state.gpr.get_mut(i).ok_or(RegisterError::Impossible)? = value;
        }
        RegisterLocation::LinearPc if modes::is_64bit(state) => set_address(&mut state.rip, value)?,
        RegisterLocation::LinearPc => {
            state.rip = value.wrapping_sub(state.seg[seg::CS].base) & 0xffff_ffff;
        }
        RegisterLocation::Rip => state.rip = value,
        RegisterLocation::Flags => {
            let value = (value & Rflags::all().bits()) | Rflags::FIXED.bits();
            require(control::accepts_rflags(state, value))?;
            state.rflags = value;
        }
        RegisterLocation::Selector(i) => load_selector(state, i, low16)?,
        RegisterLocation::SegmentBase(i) => set_address(&mut segment_mut(state, i)?.base, value)?,
        RegisterLocation::SegmentLimit(i) => segment_mut(state, i)?.limit = low32,
        RegisterLocation::SegmentAccess(i) => segment_mut(state, i)?.access = low16 & 0xf0ff,
        RegisterLocation::Control(number) => set_control(state, controls, number, value)?,
        RegisterLocation::Efer => set_efer(state, controls, value)?,
        RegisterLocation::Xcr0 => return Err(RegisterError::Impossible),
        RegisterLocation::GdtrBase => set_address(&mut state.gdtr.base, value)?,
        RegisterLocation::GdtrLimit => state.gdtr.limit = low16,
        RegisterLocation::IdtrBase => set_address(&mut state.idtr.base, value)?,
        RegisterLocation::IdtrLimit => state.idtr.limit = low16,
        RegisterLocation::LdtrSelector => state.ldtr.selector = low16,
        RegisterLocation::LdtrBase => set_address(&mut state.ldtr.base, value)?,
        RegisterLocation::TrSelector => state.tr.selector = low16,
        RegisterLocation::TrBase => set_address(&mut state.tr.base, value)?,
        RegisterLocation::Debug(6) => state.dr6 = (value & 0xe00f) | 0xffff_0ff0,
        RegisterLocation::Debug(7) => state.dr7 = (value & 0xffff_23ff) | 0x400,
        RegisterLocation::Debug(i) => {
            let register = state.dr.get_mut(usize::from(i));
            *register.ok_or(RegisterError::Impossible)? = value;
        }
        RegisterLocation::KernelGsBase => set_address(&mut state.msrs.kernel_gs_base, value)?,
        RegisterLocation::RestartedSystemCall => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::code_model::CodeModel;
    use super::super::info::AvailableRegisters;
    use super::super::layout::RegisterLayout;
    use super::super::read::read_register;
    use super::*;

    /// A value that the register takes in any mode; `None` where that depends on the mode.
    fn valid_value(location: RegisterLocation, bytes: usize) -> Option<Vec<u8>> {
        Some(match location {
            RegisterLocation::Control(_)
            | RegisterLocation::Efer
            | RegisterLocation::Xcr0
            | RegisterLocation::RestartedSystemCall
            | RegisterLocation::Debug(_) => return None,
            RegisterLocation::Flags => vec![0x46, 0, 0, 0],
            RegisterLocation::Xsave {
                offset: xsave::MXCSR_OFFSET,
                ..
            } => vec![0x80, 0x1f, 0, 0],
            RegisterLocation::SegmentAccess(_) => vec![0x9b, 0xa0],
            RegisterLocation::FpuTags => vec![0xff, 0xff, 0, 0],
            RegisterLocation::Xsave {
                component: xsave::X87 | xsave::SSE,
                len,
                ..
            } => {
                let mut value = vec![1; len];
                value.resize(bytes, 0);
                value
            }
            RegisterLocation::Selector(_) => vec![1, 1, 0, 0],
            RegisterLocation::SegmentBase(_)
            | RegisterLocation::GdtrBase
            | RegisterLocation::IdtrBase
            | RegisterLocation::LdtrBase
            | RegisterLocation::TrBase
            | RegisterLocation::KernelGsBase => vec![1, 1, 1, 1, 1, 1, 0, 0],
            _ => vec![1; bytes],
        })
    }

    #[test]
    fn register_reads_back_what_was_written() {
        let available = AvailableRegisters {
            xcr0: 0x2e7,
            msrs: Vec::new(),
        };
        let layout = RegisterLayout::new(CodeModel::Code64, &available);
        for register in layout.all() {
            let mut state = CpuState::reset();
            state.seg[seg::CS].base = 0;
            let location = register.location;
            let Some(value) = valid_value(location, register.bytes()) else {
                continue;
            };
            write_register(&mut state, &ControlMasks::WIDEST, location, &value).unwrap();
            let mut read = read_register(&state, location, register.bytes()).unwrap();
            if location == RegisterLocation::LinearPc {
                read.resize(4, 0);
                assert_eq!(read, [1; 4], "32 bits outside of 64-bit mode");
            } else {
                assert_eq!(read, value, "{}", register.name);
            }
        }
    }

    #[test]
    fn program_counter_is_linear_in_real_mode() {
        let mut state = CpuState::reset();
        let pc = read_register(&state, RegisterLocation::LinearPc, 8).unwrap();
        assert_eq!(pc, 0xffff_fff0_u64.to_le_bytes());
        let write = |state: &mut CpuState, location, value: u64| {
            write_register(state, &ControlMasks::WIDEST, location, &value.to_le_bytes()).unwrap();
        };
        write(&mut state, RegisterLocation::Selector(seg::CS), 0x7c0);
        assert_eq!(state.seg[seg::CS].base, 0x7c00);
        write(&mut state, RegisterLocation::LinearPc, 0x7c10);
        assert_eq!(state.rip, 0x10);
    }

    #[test]
    fn write_that_switches_paging_is_refused() {
        let mut state = CpuState::reset();
        let on = 0x8000_0011_u64.to_le_bytes();
        let cr0 = RegisterLocation::Control(0);
        assert!(write_register(&mut state, &ControlMasks::WIDEST, cr0, &on).is_err());
        assert_eq!(state, CpuState::reset());
    }

    #[test]
    fn values_that_mov_and_wrmsr_refuse_are_refused() {
        let controls = ControlMasks::from_cpuid(|leaf, _| match leaf {
            0x8000_0001 => [0, 0, 0, 1 << 11 | 1 << 20 | 1 << 29],
            _ => [0; 4],
        });
        let mut long = CpuState {
            cr0: 0x8000_0011,
            cr3: 0x1000,
            cr4: 0x20,
            efer: 0x500,
            ..CpuState::reset()
        };
        long.seg[seg::CS].access |= 1 << 13;
        for (location, value, taken) in [
            (RegisterLocation::Control(0), 0x8000_0019_u64, true),
            (RegisterLocation::Control(0), 0x8000_0010, false),
            (RegisterLocation::Control(0), 0xa000_0011, false),
            (RegisterLocation::Control(3), 0x3000, true),
            (RegisterLocation::Control(3), u64::MAX, false),
            (RegisterLocation::Control(4), 0x220, true),
            (RegisterLocation::Control(4), 0xffff_ffff, false),
            (RegisterLocation::Control(4), 0x200, false),
            (RegisterLocation::Control(8), 16, false),
            (RegisterLocation::Efer, 0xd01, true),
            (RegisterLocation::Efer, 0x100, false),
            (RegisterLocation::Efer, 0x400, false),
            (RegisterLocation::Efer, 0x1500, false),
            (RegisterLocation::Flags, 0x202, true),
            (RegisterLocation::Flags, 0x2_0002, false),
            (RegisterLocation::LinearPc, 1 << 47, false),
            (RegisterLocation::SegmentBase(5), 1 << 47, false),
            (RegisterLocation::GdtrBase, 1 << 63, false),
        ] {
            let mut state = long.clone();
            let written = write_register(&mut state, &controls, location, &value.to_le_bytes());
            assert_eq!(written.is_ok(), taken, "{location:?} {value:#x}");
            assert_eq!(state != long, taken, "{location:?} {value:#x}");
        }
    }
}
