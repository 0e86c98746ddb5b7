//! Architectural LBR as the state component of XSAVES and XRSTORS.
//! SDM Vol. 1, "Architectural LBR State"; Vol. 3B, "Last Branch Records".
//!
//! The model has the registers; this moves them as MSRs.

use super::Done;
use crate::core::Core;
use crate::fault::Fault;
use hindsight_regs::branch::{LBR_DEPTH, LbrCtl, xsave};
use hindsight_regs::msr;

/// The component's bit in IA32_XSS.
pub(super) const LBR: u64 = 1 << xsave::COMPONENT;
/// 8-byte words of the component.
const WORDS: usize = xsave::BYTES as usize / 8;

/// The registers before the entries, in the order of the component.
const REGISTERS: [u32; 5] = [
    msr::IA32_LBR_CTL,
    msr::IA32_LBR_DEPTH,
    msr::MSR_LER_FROM_LIP,
    msr::MSR_LER_TO_LIP,
    msr::IA32_LER_INFO,
];
/// The registers of the newest entry, in the order of the component.
const ENTRY: [u32; 3] = [
    msr::IA32_LBR_0_FROM_IP,
    msr::IA32_LBR_0_TO_IP,
    msr::IA32_LBR_0_INFO,
];
const _: () = assert!(WORDS == REGISTERS.len() + ENTRY.len() * LBR_DEPTH);

/// The component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LbrState([u64; WORDS]);

/// Extends bit 47 of an address: XRSTORS faults for none.
fn extend(address: u64) -> u64 {
    ((address << 16).cast_signed() >> 16).cast_unsigned()
}

impl LbrState {
    /// The initial configuration: IA32_LBR_DEPTH, which it leaves as it is, and zeros.
    fn initial(depth: u64) -> Self {
        let mut words = [0; WORDS];
        words[1] = depth;
        Self(words)
    }

    /// Reads the component from memory.
    ///
    /// # Errors
    ///
    /// #GP(0) for a reserved bit of IA32_LBR_CTL.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, Fault> {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        if words[0] & !LbrCtl::all().bits() == 0 {
            Ok(Self(words))
        } else {
            Err(Fault::GP)
        }
    }

    /// The component in memory, without the entries beyond IA32_LBR_DEPTH.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let words = REGISTERS.len() + ENTRY.len() * self.depth();
        self.0[..words]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    }

    /// Whether it is in its initial configuration.
    pub(super) fn is_initial(&self) -> bool {
        *self == Self::initial(self.0[1])
    }

    fn depth(&self) -> usize {
        usize::try_from(self.0[1]).map_or(LBR_DEPTH, |depth| depth.min(LBR_DEPTH))
    }
}

impl Core {
    /// Returns IA32_XSS; 0 if the processor lacks it.
    pub(super) fn xss(&mut self) -> u64 {
        self.read_msr(msr::IA32_XSS).unwrap_or(0)
    }

    /// Reads architectural LBR.
    pub(super) fn lbr_state(&mut self) -> Result<LbrState, Fault> {
        let mut state = LbrState([0; WORDS]);
        for (word, index) in state.0.iter_mut().zip(REGISTERS) {
            *word = self.read_msr(index)?;
        }
        let depth = state.depth();
        let entries = state.0[REGISTERS.len()..].chunks_exact_mut(ENTRY.len());
        for (number, entry) in (0..).zip(entries.take(depth)) {
            for (word, first) in entry.iter_mut().zip(ENTRY) {
                *word = self.read_msr(first + number)?;
            }
        }
        Ok(state)
    }

    /// Loads architectural LBR, or initializes it without `state`.
    ///
    /// IA32_LBR_DEPTH stays. If `state` has another, all entries are cleared.
    pub(super) fn set_lbr_state(&mut self, state: Option<LbrState>) -> Done {
        let depth = self.read_msr(msr::IA32_LBR_DEPTH)?;
        let LbrState(words) = state.unwrap_or_else(|| LbrState::initial(depth));
        self.write_msr(msr::IA32_LBR_CTL, 0)?;
        self.write_msr(msr::IA32_LBR_DEPTH, depth)?;
        self.write_msr(msr::MSR_LER_FROM_LIP, extend(words[2]))?;
        self.write_msr(msr::MSR_LER_TO_LIP, extend(words[3]))?;
        self.write_msr(msr::IA32_LER_INFO, words[4])?;
        if words[1] == depth {
            let entries = words[REGISTERS.len()..].chunks_exact(ENTRY.len());
            let present = LbrState::initial(depth).depth();
            for (number, entry) in (0..).zip(entries.take(present)) {
                self.write_msr(ENTRY[0] + number, extend(entry[0]))?;
                self.write_msr(ENTRY[1] + number, extend(entry[1]))?;
                self.write_msr(ENTRY[2] + number, entry[2])?;
            }
        }
        self.write_msr(msr::IA32_LBR_CTL, words[0])?;
        self.exit.requested = true;
        Ok(())
    }
}
