//! Reading and writing single registers.

use hindsight_cpu::control::{self, ControlMasks};
use hindsight_cpu::state::{CpuState, Segment, XSAVE_LEN, canonical};
use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::rflags::Rflags;
use thiserror::Error;

use crate::gdb::registers::Place;

/// XSTATE_BV in the header of the XSAVE area: components that are not in their initial state.
const XSTATE_BV: usize = 512;

/// Why a register cannot be written.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(in crate::gdb) enum RegisterError {
    /// Not a state that a processor can be in.
    #[error("the processor cannot have this value")]
    Impossible,
    /// It belongs to a model, which the caller asks.
    #[error("an MSR")]
    Msr,
}

fn xstate_bv(state: &CpuState) -> u64 {
    let bytes = state.xsave.0.get(XSTATE_BV..XSTATE_BV + 8);
    bytes
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

/// Bytes of the XSAVE area, or what they are initially if the component is not kept.
fn read_xsave(state: &CpuState, component: u32, at: usize, len: usize) -> Vec<u8> {
    let kept = xstate_bv(state) >> component & 1 != 0;
    // MXCSR is not part of the components' initial states.
    if kept || at == 24 {
        return state.xsave.0.get(at..at + len).unwrap_or(&[]).to_vec();
    }
    let mut initial = vec![0; len];
    if (component, at) == (0, 0)
        && let Some(low) = initial.get_mut(..2)
    {
        low.copy_from_slice(&0x37f_u16.to_le_bytes());
    }
    initial
}

fn write_xsave(state: &mut CpuState, component: u32, at: usize, value: &[u8]) {
    let bv = xstate_bv(state);
    let initial = CpuState::reset().xsave.0;
    let area = &mut state.xsave.0;
    if bv >> component & 1 == 0 {
        // The rest of the component becomes what it counted as.
        let whole = match component {
            0 => Some((0, 24)),
            1 => Some((160, 416)),
            2 => Some((576, 832)),
            5 => Some((1088, 1152)),
            6 => Some((1152, 1664)),
            7 => Some((1664, 2688)),
            9 => Some((2688, XSAVE_LEN)),
            _ => None,
        };
        for (from, to) in whole
            .into_iter()
            .chain((component == 0).then_some((32, 160)))
        {
            if let (Some(to), Some(from)) = (area.get_mut(from..to), initial.get(from..to)) {
                to.copy_from_slice(from);
            }
        }
        area[XSTATE_BV..XSTATE_BV + 8].copy_from_slice(&(bv | 1 << component).to_le_bytes());
    }
    if let Some(place) = area.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

/// The full tag word from the abridged one: SDM Vol. 1, "x87 FPU Tag Word".
fn full_tags(state: &CpuState) -> u16 {
    let valid = read_xsave(state, 0, 4, 1).first().copied().unwrap_or(0);
    let status = read_xsave(state, 0, 2, 2);
    let top = status.get(1).map_or(0, |high| usize::from(high >> 3 & 7));
    let mut tags = 0;
    for physical in 0..8 {
        let tag = if valid >> physical & 1 == 0 {
            3
        } else {
            let stack = (physical + 8 - top) % 8;
            tag_of(&read_xsave(state, 0, 32 + 16 * stack, 10))
        };
        tags |= tag << (2 * physical);
    }
    tags
}

/// 0 valid, 1 zero, 2 special.
fn tag_of(value: &[u8]) -> u16 {
    let exponent = match value {
        [.., low, high] => u16::from_le_bytes([*low, *high]) & 0x7fff,
        _ => 0,
    };
    let mantissa = value
        .get(..8)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes);
    match (exponent, mantissa) {
        (0, 0) => 1,
        (0 | 0x7fff, _) => 2,
        _ if mantissa >> 63 == 0 => 2,
        _ => 0,
    }
}

fn is_long(state: &CpuState) -> bool {
    state.is_long_mode() && state.seg[1].long()
}

/// The linear address of an instruction pointer.
pub(in crate::gdb) fn linear_pc(state: &CpuState, ip: u64) -> u64 {
    if is_long(state) {
        ip
    } else {
        code_base(state).wrapping_add(ip) & 0xffff_ffff
    }
}

/// The base of CS, as it counts.
pub(in crate::gdb) fn code_base(state: &CpuState) -> u64 {
    if is_long(state) { 0 } else { state.seg[1].base }
}

/// The value of a register as little-endian bytes, as many as it has; `None` for an MSR, which its
/// model has.
pub(in crate::gdb) fn read(state: &CpuState, place: Place, bytes: usize) -> Option<Vec<u8>> {
    let segment = |i: usize| state.seg.get(i).copied().unwrap_or_default();
    let value: u64 = match place {
        Place::Msr(_) => return None,
        Place::Xsave(component, at, len) => {
            let mut value = read_xsave(state, component, at, len);
            value.resize(bytes, 0);
            return Some(value);
        }
        Place::FpuTags => full_tags(state).into(),
        Place::General(i) => state.gpr.get(i).copied().unwrap_or(0),
        Place::Pc => linear_pc(state, state.rip),
        Place::Ip => state.rip,
        Place::Flags => state.rflags,
        Place::Selector(i) => segment(i).selector.into(),
        Place::SegmentBase(i) => segment(i).base,
        Place::SegmentLimit(i) => segment(i).limit.into(),
        Place::SegmentAccess(i) => segment(i).access.into(),
        Place::Control(0) => state.cr0,
        Place::Control(2) => state.cr2,
        Place::Control(3) => state.cr3,
        Place::Control(4) => state.cr4,
        Place::Control(_) => state.cr8,
        Place::Efer => state.efer,
        Place::Xcr0 => state.xcr0,
        Place::GdtrBase => state.gdtr.base,
        Place::GdtrLimit => state.gdtr.limit.into(),
        Place::IdtrBase => state.idtr.base,
        Place::IdtrLimit => state.idtr.limit.into(),
        Place::LdtrSelector => state.ldtr.selector.into(),
        Place::LdtrBase => state.ldtr.base,
        Place::TrSelector => state.tr.selector.into(),
        Place::TrBase => state.tr.base,
        Place::Debug(6) => state.dr6,
        Place::Debug(7) => state.dr7,
        Place::Debug(i) => state.dr.get(usize::from(i)).copied().unwrap_or(0),
        Place::KernelGsBase => state.msrs.kernel_gs_base,
    };
    let mut value = value.to_le_bytes().to_vec();
    value.resize(bytes, 0);
    Some(value)
}

/// Loads a selector as real-address mode does: in protected mode a debugger writes the parts.
fn load_selector(state: &mut CpuState, i: usize, selector: u16) {
    let real = state.cr0 & Cr0::PE.bits() == 0;
    let Some(segment) = state.seg.get_mut(i) else {
        return;
    };
    if segment.selector == selector {
        return;
    }
    *segment = Segment {
        selector,
        base: if real {
            u64::from(selector) << 4
        } else {
            segment.base
        },
        ..*segment
    };
}

fn require(possible: bool) -> Result<(), RegisterError> {
    if possible {
        Ok(())
    } else {
        Err(RegisterError::Impossible)
    }
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
            // EFER.LMA follows CR0.PG in a way that a debugger must not get wrong.
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
            // What is set already, this processor has.
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

/// A linear address that the processor keeps.
fn set_address(place: &mut u64, value: u64) -> Result<(), RegisterError> {
    require(canonical(value))?;
    *place = value;
    Ok(())
}

/// Writes a register from little-endian bytes.
///
/// # Errors
///
/// When the processor cannot have the value, or the register is an MSR.
pub(in crate::gdb) fn write(
    state: &mut CpuState,
    controls: &ControlMasks,
    place: Place,
    bytes: &[u8],
) -> Result<(), RegisterError> {
    let mut wide = [0; 8];
    let len = bytes.len().min(8);
    wide[..len].copy_from_slice(&bytes[..len]);
    let value = u64::from_le_bytes(wide);
    let low16 = u16::from_le_bytes([wide[0], wide[1]]);
    let low32 = u32::from_le_bytes([wide[0], wide[1], wide[2], wide[3]]);
    match place {
        Place::Msr(_) => return Err(RegisterError::Msr),
        Place::Xsave(component, at, len) => {
            let value = bytes.get(..len).ok_or(RegisterError::Impossible)?;
            if at == 24 && low32 & !0xffff != 0 {
                // MXCSR with reserved bits.
                return Err(RegisterError::Impossible);
            }
            write_xsave(state, component, at, value);
        }
        Place::FpuTags => {
            let valid = (0..8).filter(|i| low16 >> (2 * i) & 3 != 3);
            let abridged: u8 = valid.map(|i| 1 << i).sum();
            write_xsave(state, 0, 4, &[abridged]);
        }
        Place::General(i) => {
            if let Some(register) = state.gpr.get_mut(i) {
                *register = value;
            }
        }
        Place::Pc if is_long(state) => set_address(&mut state.rip, value)?,
        Place::Pc => state.rip = value.wrapping_sub(state.seg[1].base) & 0xffff_ffff,
        Place::Ip => state.rip = value,
        Place::Flags => {
            let value = (value & Rflags::all().bits()) | Rflags::FIXED.bits();
            require(control::accepts_rflags(state, value))?;
            state.rflags = value;
        }
        Place::Selector(i) => load_selector(state, i, low16),
        Place::SegmentBase(i) => set_address(&mut segment_mut(state, i)?.base, value)?,
        Place::SegmentLimit(i) => segment_mut(state, i)?.limit = low32,
        Place::SegmentAccess(i) => segment_mut(state, i)?.access = low16 & 0xf0ff,
        Place::Control(number) => set_control(state, controls, number, value)?,
        Place::Efer => {
            let switched = (value ^ state.efer) & Efer::LMA.bits() != 0;
            let controls = ControlMasks {
                efer: controls.efer | state.efer,
                ..*controls
            };
            require(controls.accepts_efer(state, value) && !switched)?;
            state.efer = value;
        }
        Place::Xcr0 => return Err(RegisterError::Impossible),
        Place::GdtrBase => set_address(&mut state.gdtr.base, value)?,
        Place::GdtrLimit => state.gdtr.limit = low16,
        Place::IdtrBase => set_address(&mut state.idtr.base, value)?,
        Place::IdtrLimit => state.idtr.limit = low16,
        Place::LdtrSelector => state.ldtr.selector = low16,
        Place::LdtrBase => set_address(&mut state.ldtr.base, value)?,
        Place::TrSelector => state.tr.selector = low16,
        Place::TrBase => set_address(&mut state.tr.base, value)?,
        Place::Debug(6) => state.dr6 = (value & 0xe00f) | 0xffff_0ff0,
        Place::Debug(7) => state.dr7 = (value & 0xffff_23ff) | 0x400,
        Place::Debug(i) => {
            if let Some(register) = state.dr.get_mut(usize::from(i)) {
                *register = value;
            }
        }
        Place::KernelGsBase => set_address(&mut state.msrs.kernel_gs_base, value)?,
    }
    Ok(())
}

fn segment_mut(state: &mut CpuState, i: usize) -> Result<&mut Segment, RegisterError> {
    state.seg.get_mut(i).ok_or(RegisterError::Impossible)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gdb::registers::{Available, Layout, Mode};

    #[test]
    fn what_is_written_is_read_back() {
        let available = Available {
            xcr0: 0x2e7,
            msrs: Vec::new(),
        };
        let layout = Layout::new(Mode::X8664, &available);
        for register in layout.all() {
            let mut state = CpuState::reset();
            state.seg[1].base = 0;
            let value: Vec<u8> = match register.place {
                Place::Flags => vec![0x46, 0, 0, 0],
                Place::Control(_) | Place::Efer | Place::Xcr0 | Place::Debug(_) => continue,
                Place::Xsave(_, 24, _) => vec![0x80, 0x1f, 0, 0],
                Place::SegmentAccess(_) => vec![0x9b, 0xa0],
                Place::FpuTags => vec![0xff, 0xff, 0, 0],
                Place::Xsave(0, _, len) | Place::Xsave(1, _, len) => {
                    let mut value = vec![1; len];
                    value.resize(register.bytes(), 0);
                    value
                }
                Place::Selector(_) => vec![1, 1, 0, 0],
                Place::SegmentBase(_)
                | Place::GdtrBase
                | Place::IdtrBase
                | Place::LdtrBase
                | Place::TrBase
                | Place::KernelGsBase => vec![1, 1, 1, 1, 1, 1, 0, 0],
                _ => vec![1; register.bytes()],
            };
            let place = register.place;
            write(&mut state, &ControlMasks::WIDEST, place, &value).unwrap();
            let mut read = read(&state, place, register.bytes()).unwrap();
            if place == Place::Pc {
                read.resize(4, 0);
                assert_eq!(read, [1; 4], "32 bits outside of 64-bit mode");
            } else {
                assert_eq!(read, value, "{}", register.name);
            }
        }
    }

    #[test]
    fn tags_say_which_registers_hold_what() {
        let mut state = CpuState::reset();
        assert_eq!(full_tags(&state), 0xffff, "all are empty after RESET");
        // TOP is 6: ST0 is physical register 6. It holds 1.0, ST1 holds zero.
        write_xsave(&mut state, 0, 2, &0x3000_u16.to_le_bytes());
        write_xsave(&mut state, 0, 4, &[0xc0]);
        let mut one = [0; 10];
        one[7] = 0x80;
        one[8..].copy_from_slice(&0x3fff_u16.to_le_bytes());
        write_xsave(&mut state, 0, 32, &one);
        write_xsave(&mut state, 0, 48, &[0; 10]);
        assert_eq!(full_tags(&state), 0x4fff);
    }

    #[test]
    fn program_counter_is_linear_in_real_mode() {
        let mut state = CpuState::reset();
        let pc = read(&state, Place::Pc, 8).unwrap();
        assert_eq!(pc, 0xffff_fff0_u64.to_le_bytes());
        let selector = [0xc0, 0x07, 0, 0];
        write(
            &mut state,
            &ControlMasks::WIDEST,
            Place::Selector(1),
            &selector,
        )
        .unwrap();
        assert_eq!(state.seg[1].base, 0x7c00);
        let pc = 0x7c10_u64.to_le_bytes();
        write(&mut state, &ControlMasks::WIDEST, Place::Pc, &pc).unwrap();
        assert_eq!(state.rip, 0x10);
    }

    #[test]
    fn paging_cannot_be_switched_by_hand() {
        let mut state = CpuState::reset();
        let on = 0x8000_0011_u64.to_le_bytes();
        assert!(write(&mut state, &ControlMasks::WIDEST, Place::Control(0), &on).is_err());
        assert_eq!(state, CpuState::reset());
    }

    #[test]
    fn what_the_processor_refuses_is_refused() {
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
        long.seg[1].access |= 1 << 13;
        for (place, value, taken) in [
            (Place::Control(0), 0x8000_0019_u64, true),
            (Place::Control(0), 0x8000_0010, false),
            (Place::Control(0), 0xa000_0011, false),
            (Place::Control(3), 0x3000, true),
            (Place::Control(3), u64::MAX, false),
            (Place::Control(4), 0x220, true),
            (Place::Control(4), 0xffff_ffff, false),
            (Place::Control(4), 0x200, false),
            (Place::Control(8), 16, false),
            (Place::Efer, 0xd01, true),
            (Place::Efer, 0x100, false),
            (Place::Efer, 0x400, false),
            (Place::Efer, 0x1500, false),
            (Place::Flags, 0x202, true),
            (Place::Flags, 0x2_0002, false),
            (Place::Pc, 1 << 47, false),
            (Place::SegmentBase(5), 1 << 47, false),
            (Place::GdtrBase, 1 << 63, false),
        ] {
            let mut state = long.clone();
            let written = write(&mut state, &controls, place, &value.to_le_bytes());
            assert_eq!(written.is_ok(), taken, "{place:?} {value:#x}");
            assert_eq!(state != long, taken, "{place:?} {value:#x}");
        }
    }
}
