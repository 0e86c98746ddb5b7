//! System-management mode: the state that an SMI saves and loads, and that RSM restores.
//!
//! SDM Vol. 3C, "SMRAM State Save Map and Intel 64 Architecture", "SMM Handler Execution
//! Environment" and "Exiting From SMM". The hidden parts of segment registers are in fields that
//! the manual's map reserves.

use hindsight_regs::cr::Cr0;
use hindsight_regs::dr::Dr7;
use hindsight_regs::rflags::Rflags;

use crate::state::{Activity, CpuState, DescriptorTable, Segment, StateError, seg};

/// SMBASE after RESET.
pub const BASE_RESET: u32 = 0x3_0000;
/// Offset of the save area from SMBASE.
pub const AREA_OFFSET: u64 = 0xfc00;
/// Bytes of the save area.
pub const AREA_LEN: usize = 0x400;
/// Offset of the handler's entry point from SMBASE.
const ENTRY: u64 = 0x8000;
/// SMM revision identifier: SMBASE relocation, no I/O instruction restart.
const REVISION: u32 = 0x2_0100;
/// Offset in the manual's map at which the save area begins.
const MAP: usize = 0x7c00;
/// The bits of CR0 that an SMI clears.
const CR0_CLEARED: u64 = Cr0::PE.union(Cr0::EM).union(Cr0::TS).union(Cr0::PG).bits();

/// System-management mode of one processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Smm {
    /// The processor is in system-management mode.
    pub active: bool,
    /// SMBASE, a guest-physical address.
    pub base: u32,
}

impl Default for Smm {
    fn default() -> Self {
        Self {
            active: false,
            base: BASE_RESET,
        }
    }
}

impl Smm {
    /// Guest-physical address of the save area.
    pub fn area(&self) -> u64 {
        u64::from(self.base) + AREA_OFFSET
    }
}

/// Offsets in the manual's map.
///
/// SDM Vol. 3C, table "SMRAM State Save Map for Intel 64 Architecture".
mod at {
    pub(super) const CR0: usize = 0x7ff8;
    pub(super) const CR3: usize = 0x7ff0;
    pub(super) const RFLAGS: usize = 0x7fe8;
    pub(super) const EFER: usize = 0x7fe0;
    pub(super) const RIP: usize = 0x7fd8;
    pub(super) const DR6: usize = 0x7fd0;
    pub(super) const DR7: usize = 0x7fc8;
    pub(super) const TR: usize = 0x7fc4;
    pub(super) const LDTR: usize = 0x7fc0;
    /// ES, CS, SS, DS, FS and GS in the order of their numbers.
    pub(super) const SELECTORS: [usize; 6] = [0x7fa8, 0x7fac, 0x7fb0, 0x7fb4, 0x7fb8, 0x7fbc];
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI and RDI; R8 to R15.
    pub(super) const GENERAL: [usize; 16] = [
        0x7f5c, 0x7f64, 0x7f6c, 0x7f74, 0x7f7c, 0x7f84, 0x7f8c, 0x7f94, 0x7f54, 0x7f4c, 0x7f44,
        0x7f3c, 0x7f34, 0x7f2c, 0x7f24, 0x7f1c,
    ];
    /// Bit 0: the processor was halted, and RSM halts it again.
    pub(super) const HALT_RESTART: usize = 0x7f02;
    pub(super) const REVISION: usize = 0x7efc;
    pub(super) const BASE: usize = 0x7ef8;
    pub(super) const IDT_LIMIT: usize = 0x7e98;
    pub(super) const IDT_LOW: usize = 0x7e94;
    pub(super) const GDT_LIMIT: usize = 0x7e90;
    pub(super) const GDT_LOW: usize = 0x7e8c;
    pub(super) const CR4: usize = 0x7e40;
    pub(super) const IDT_HIGH: usize = 0x7dd8;
    pub(super) const GDT_HIGH: usize = 0x7dd0;
    /// Reserved by the manual: hidden parts of ES, CS, SS, DS, FS, GS, LDTR and TR, 16 bytes each.
    pub(super) const HIDDEN: usize = 0x7d00;
    /// Reserved by the manual: bit 0 is set if NMIs were blocked.
    pub(super) const BLOCKED: usize = 0x7d80;
}

/// The save area as bytes of guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveArea(pub [u8; AREA_LEN]);

impl Default for SaveArea {
    fn default() -> Self {
        Self([0; AREA_LEN])
    }
}

impl SaveArea {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        debug_assert!(at >= MAP, "the offset is in the save area");
        self.0[at - MAP..][..bytes.len()].copy_from_slice(bytes);
    }

    fn put_low(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes()[..4]);
    }

    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at - MAP..][..N]);
        bytes
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.get(at))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.get(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.get(at))
    }

    fn put_hidden(&mut self, n: usize, segment: &Segment) {
        let at = at::HIDDEN + 16 * n;
        self.put(at, &segment.base.to_le_bytes());
        self.put(at + 8, &segment.limit.to_le_bytes());
        self.put(at + 12, &segment.access.to_le_bytes());
        self.put(at + 14, &[u8::from(segment.unusable)]);
    }

    fn segment(&self, n: usize, selector: usize) -> Segment {
        let at = at::HIDDEN + 16 * n;
        let [unusable] = self.get(at + 14);
        Segment {
            selector: self.u16(selector),
            base: self.u64(at),
            limit: self.u32(at + 8),
            access: self.u16(at + 12),
            unusable: unusable & 1 != 0,
        }
    }

    /// The state that an SMI saves.
    fn of(state: &CpuState) -> Self {
        let mut area = Self::default();
        let whole = [
            (at::CR0, state.cr0),
            (at::CR3, state.cr3),
            (at::RFLAGS, state.rflags),
            (at::EFER, state.efer),
            (at::RIP, state.rip),
            (at::DR6, state.dr6),
            (at::DR7, state.dr7),
            (at::CR4, state.cr4),
        ];
        let general = at::GENERAL.into_iter().zip(state.gpr);
        for (at, value) in whole.into_iter().chain(general) {
            area.put(at, &value.to_le_bytes());
        }
        for (n, (segment, selector)) in state.seg.iter().zip(at::SELECTORS).enumerate() {
            area.put(selector, &u32::from(segment.selector).to_le_bytes());
            area.put_hidden(n, segment);
        }
        for (n, segment, at) in [(6, &state.ldtr, at::LDTR), (7, &state.tr, at::TR)] {
            area.put(at, &u32::from(segment.selector).to_le_bytes());
            area.put_hidden(n, segment);
        }
        for (table, low, high, limit) in [
            (&state.idtr, at::IDT_LOW, at::IDT_HIGH, at::IDT_LIMIT),
            (&state.gdtr, at::GDT_LOW, at::GDT_HIGH, at::GDT_LIMIT),
        ] {
            area.put_low(low, table.base);
            area.put_low(high, table.base >> 32);
            area.put(limit, &u32::from(table.limit).to_le_bytes());
        }
        let halted = state.activity == Activity::Halted;
        area.put(at::HALT_RESTART, &u16::from(halted).to_le_bytes());
        area.put(at::REVISION, &REVISION.to_le_bytes());
        area.put(at::BASE, &state.smm.base.to_le_bytes());
        area.put(at::BLOCKED, &[u8::from(state.events.nmi_blocked)]);
        area
    }

    fn table(&self, low: usize, high: usize, limit: usize) -> DescriptorTable {
        DescriptorTable {
            base: u64::from(self.u32(high)) << 32 | u64::from(self.u32(low)),
            limit: self.u16(limit),
        }
    }
}

impl CpuState {
    /// Enters system-management mode: loads the state in which the handler starts.
    ///
    /// Returns the save area, which the caller writes to [`Smm::area`].
    pub fn enter_smm(&mut self) -> SaveArea {
        debug_assert!(!self.smm.active, "SMIs are blocked in SMM");
        let area = SaveArea::of(self);
        let flat = Segment {
            selector: 0,
            base: 0,
            limit: u32::MAX,
            access: 0x8093,
            unusable: false,
        };
        self.seg = [flat; 6];
        let base = self.smm.base;
        self.seg[seg::CS] = Segment {
            selector: (base >> 4 & 0xffff) as u16,
            base: base.into(),
            access: 0x809b,
            ..flat
        };
        self.rip = ENTRY;
        self.rflags = Rflags::FIXED.bits();
        self.cr0 &= !CR0_CLEARED;
        self.cr4 = 0;
        self.efer = 0;
        self.dr7 = Dr7::RESET.0;
        self.events.nmi_blocked = true;
        self.activity = Activity::Running;
        self.smm.active = true;
        area
    }

    /// Leaves system-management mode by RSM: restores the state in `area`.
    ///
    /// # Errors
    ///
    /// The area holds an invalid state: the processor must shut down. Nothing has changed.
    pub fn leave_smm(&mut self, area: &SaveArea) -> Result<(), StateError> {
        let mut new = self.clone();
        new.cr0 = area.u64(at::CR0);
        new.cr3 = area.u64(at::CR3);
        new.cr4 = area.u64(at::CR4);
        new.efer = area.u64(at::EFER);
        new.rflags = area.u64(at::RFLAGS) | Rflags::FIXED.bits();
        new.rip = area.u64(at::RIP);
        new.dr6 = area.u64(at::DR6);
        new.dr7 = area.u64(at::DR7);
        for (register, at) in new.gpr.iter_mut().zip(at::GENERAL) {
            *register = area.u64(at);
        }
        for (n, selector) in at::SELECTORS.into_iter().enumerate() {
            new.seg[n] = area.segment(n, selector);
        }
        new.ldtr = area.segment(6, at::LDTR);
        new.tr = area.segment(7, at::TR);
        new.idtr = area.table(at::IDT_LOW, at::IDT_HIGH, at::IDT_LIMIT);
        new.gdtr = area.table(at::GDT_LOW, at::GDT_HIGH, at::GDT_LIMIT);
        let [blocked] = area.get(at::BLOCKED);
        new.events.nmi_blocked = blocked & 1 != 0;
        if area.u16(at::HALT_RESTART) & 1 != 0 {
            new.activity = Activity::Halted;
        }
        new.smm = Smm {
            active: false,
            base: area.u32(at::BASE),
        };
        new.check()?;
        *self = new;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> CpuState {
        let mut state = CpuState::reset();
        state.gpr = std::array::from_fn(|n| 0x1111_2222_3333_0000 + n as u64);
        state.gdtr.base = 0xffff_8000_1234_5678;
        state.seg[seg::FS].base = 0x7fff_1234_5678;
        state.rflags = 0x246;
        state.dr7 = 0x401;
        state.activity = Activity::Halted;
        state
    }

    /// Rules SMF-09, RST-03 to RST-05.
    #[test]
    fn smi_starts_the_handler_and_rsm_restores_the_state() {
        let before = state();
        let mut state = before.clone();
        let area = state.enter_smm();
        assert_eq!((state.rip, state.rflags, state.dr7), (0x8000, 2, 0x400));
        assert_eq!((state.cr4, state.efer, state.cr0 & 1), (0, 0, 0));
        let cs = state.seg[seg::CS];
        assert_eq!((cs.selector, cs.base), (0x3000, 0x3_0000));
        assert!(state.smm.active && state.events.nmi_blocked);
        state.gpr = [0; 16];
        state.leave_smm(&area).unwrap();
        assert_eq!(state, before);
    }

    #[test]
    fn handler_relocates_smbase_and_cancels_the_halt() {
        let mut state = state();
        let mut area = state.enter_smm();
        area.put(at::BASE, &0xa_0000_u32.to_le_bytes());
        area.put(at::HALT_RESTART, &[0]);
        state.leave_smm(&area).unwrap();
        assert_eq!(
            state.smm,
            Smm {
                active: false,
                base: 0xa_0000
            }
        );
        assert_eq!(state.activity, Activity::Running);
    }

    #[test]
    fn rsm_of_an_invalid_area_fails_and_changes_nothing() {
        let mut state = state();
        let area = state.enter_smm();
        let inside = state.clone();
        for (at, value) in [
            (at::CR0, 1 << 31),
            (at::CR4, u64::MAX),
            (at::EFER, 2),
            (at::DR7, 1 << 40),
        ] {
            let mut bad = area.clone();
            bad.put(at, &value.to_le_bytes());
            assert!(state.leave_smm(&bad).is_err(), "{at:#x}");
            assert_eq!(state, inside);
        }
    }

    proptest! {
        #[test]
        fn rsm_of_any_area_gives_a_valid_state_or_fails(
            bytes in prop::collection::vec(any::<u8>(), AREA_LEN),
        ) {
            let mut state = state();
            let mut area = state.enter_smm();
            // A few bytes only, so that some areas are possible.
            let some = bytes.into_iter().enumerate().filter(|&(n, b)| b as usize % 64 == n % 64);
            for (n, byte) in some {
                area.0[n] = byte;
            }
            if state.leave_smm(&area).is_ok() {
                prop_assert_eq!(state.check(), Ok(()));
            }
        }
    }
}
