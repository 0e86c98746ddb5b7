//! The XSAVE area, in the standard format that [`CpuState`] has. SDM Vol. 1, "XSAVE-Supported
//! Features and State-Component Bitmaps".

use std::ops::Range;

use hindsight_cpu::state::{CpuState, XSAVE_LEN, XsaveArea};

/// State components, as bits of XCR0.
pub(super) const X87: u32 = 0;
pub(super) const SSE: u32 = 1;
pub(super) const AVX: u32 = 2;
pub(super) const OPMASK: u32 = 5;
pub(super) const ZMM_HIGH: u32 = 6;
pub(super) const HIGH_ZMM: u32 = 7;
pub(super) const PKRU: u32 = 9;

/// Offsets of the first register of each component.
pub(super) const XMM_OFFSET: usize = 160;
pub(super) const YMM_HIGH_OFFSET: usize = 576;
pub(super) const OPMASK_OFFSET: usize = 1088;
pub(super) const ZMM_HIGH_OFFSET: usize = 1152;
pub(super) const HIGH_ZMM_OFFSET: usize = 1664;
pub(super) const PKRU_OFFSET: usize = 2688;
/// The offset of MXCSR, which is not part of a component's initial state.
pub(super) const MXCSR_OFFSET: usize = 24;
/// The offset of ST0; each of the eight registers has 16 bytes.
pub(super) const ST_OFFSET: usize = 32;

/// XSTATE_BV in the header: the components that are not in their initial state.
const XSTATE_BV: Range<usize> = 512..520;

/// FCW after FNINIT.
const FCW_INITIAL: u16 = 0x37f;

fn xstate_bv(state: &CpuState) -> u64 {
    let bytes = state.xsave.0.get(XSTATE_BV);
    bytes
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

/// The ranges of a component; one that is not needed is empty.
fn ranges(component: u32) -> [Range<usize>; 2] {
    let only = match component {
        X87 => return [0..MXCSR_OFFSET, ST_OFFSET..XMM_OFFSET],
        SSE => XMM_OFFSET..416,
        AVX => YMM_HIGH_OFFSET..832,
        OPMASK => OPMASK_OFFSET..ZMM_HIGH_OFFSET,
        ZMM_HIGH => ZMM_HIGH_OFFSET..HIGH_ZMM_OFFSET,
        HIGH_ZMM => HIGH_ZMM_OFFSET..PKRU_OFFSET,
        PKRU => PKRU_OFFSET..XSAVE_LEN,
        _ => 0..0,
    };
    [only, 0..0]
}

/// Reads bytes of a component: their initial values if the component is in its initial state.
pub(super) fn read(state: &CpuState, component: u32, offset: usize, len: usize) -> Vec<u8> {
    let in_use = xstate_bv(state) >> component & 1 != 0;
    if in_use || offset == MXCSR_OFFSET {
        let bytes = state.xsave.0.get(offset..offset + len);
        return bytes.unwrap_or(&[]).to_vec();
    }
    let mut initial = vec![0; len];
    if (component, offset) == (X87, 0)
        && let Some(low) = initial.get_mut(..2)
    {
        low.copy_from_slice(&FCW_INITIAL.to_le_bytes());
    }
    initial
}

/// Writes bytes of a component.
///
/// A component whose XSTATE_BV bit is 0 has its initial values, which are stored first.
pub(super) fn write(state: &mut CpuState, component: u32, offset: usize, value: &[u8]) {
    let bv = xstate_bv(state);
    let area = &mut state.xsave.0;
    if bv >> component & 1 == 0 {
        let initial = XsaveArea::default().0;
        for range in ranges(component) {
            area[range.clone()].copy_from_slice(&initial[range.clone()]);
        }
        area[XSTATE_BV].copy_from_slice(&(bv | 1 << component).to_le_bytes());
    }
    if let Some(bytes) = area.get_mut(offset..offset + value.len()) {
        bytes.copy_from_slice(value);
    }
}

/// The full tag word from the abridged one. SDM Vol. 1, "x87 FPU Tag Word".
pub(super) fn full_tags(state: &CpuState) -> u16 {
    let valid = read(state, X87, 4, 1).first().copied().unwrap_or(0);
    let status = read(state, X87, 2, 2);
    let top = status.get(1).map_or(0, |high| usize::from(high >> 3 & 7));
    let mut tags = 0;
    for physical in 0..8 {
        let tag = if valid >> physical & 1 == 0 {
            3
        } else {
            let stack = (physical + 8 - top) % 8;
            tag_of(&read(state, X87, ST_OFFSET + 16 * stack, 10))
        };
        tags |= tag << (2 * physical);
    }
    tags
}

/// The tag of a register that is not empty: 0 valid, 1 zero, 2 special.
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

/// The abridged tag word from the full one: a bit for each register that is not empty.
pub(super) fn abridged_tags(full: u16) -> u8 {
    let in_use = (0..8).filter(|i| full >> (2 * i) & 3 != 3);
    in_use.map(|i| 1 << i).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_tags_follow_from_contents_and_top_of_stack() {
        let mut state = CpuState::reset();
        assert_eq!(full_tags(&state), 0xffff, "all are empty after RESET");
        // TOP is 6: ST0 is physical register 6. It holds 1.0, ST1 holds zero.
        write(&mut state, X87, 2, &0x3000_u16.to_le_bytes());
        write(&mut state, X87, 4, &[0xc0]);
        let mut one = [0; 10];
        one[7] = 0x80;
        one[8..].copy_from_slice(&0x3fff_u16.to_le_bytes());
        write(&mut state, X87, 32, &one);
        write(&mut state, X87, 48, &[0; 10]);
        assert_eq!(full_tags(&state), 0x4fff);
        assert_eq!(abridged_tags(0x4fff), 0xc0);
    }

    #[test]
    fn first_write_of_a_component_gives_the_rest_of_it_initial_values() {
        let mut state = CpuState::reset();
        state.xsave.0[XMM_OFFSET + 16] = 0x55;
        assert_eq!(read(&state, SSE, XMM_OFFSET + 16, 1), [0], "not in use");
        write(&mut state, SSE, XMM_OFFSET, &[1]);
        assert_eq!(read(&state, SSE, XMM_OFFSET, 2), [1, 0]);
        assert_eq!(read(&state, SSE, XMM_OFFSET + 16, 1), [0]);
    }
}
