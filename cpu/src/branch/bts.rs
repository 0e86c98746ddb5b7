//! Branch trace store: records in the guest's own memory.
//!
//! SDM Vol. 3B, "BTS and DS Save Area" and "Writing the DS Interrupt Service Routine". The 64-bit
//! format is used in every mode (rule DS-02). Every field of the DS management area is read when it
//! is used (rule DS-10).

use hindsight_regs::branch::bts as field;

use super::BtsConfig;

/// Bytes of a record: from, to, flags.
pub const RECORD: u64 = field::RECORD as u64;

/// Guest memory as the DS mechanism accesses it.
///
/// Addresses are linear, and translated by the current page tables with supervisor rights; SMAP and
/// protection keys do not apply, and no access raises an exception.
pub trait DsMemory {
    /// Reads eight bytes; `None` if the access would fault.
    fn read(&mut self, linear: u64) -> Option<u64>;
    /// Whether a write of eight bytes would not fault.
    fn writable(&mut self, linear: u64) -> bool;
    /// Writes all words one after another, or nothing. Returns `false` if the access would fault.
    fn write(&mut self, linear: u64, words: &[u64]) -> bool;
}

/// The outcome of [`store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum BtsOutcome {
    /// The record was stored.
    Stored,
    /// The record was stored, and the buffer is at its threshold: a PMI is requested.
    AtThreshold,
    /// The buffer is full, or an access would fault (rules BTS-09, DS-06).
    Dropped,
}

/// Decides which records need no more than an append.
///
/// Such a record fits, the index does not wrap after it, and it requests no PMI.
#[derive(Clone, Copy, Debug, Default)]
pub struct BtsFastPath {
    /// Bytes that must be free after the record.
    free_after: u64,
    /// All ones if no record requests a PMI; otherwise 0.
    no_pmi: u64,
}

impl BtsFastPath {
    /// The fast path for this value of [`BtsConfig::interrupt`].
    pub const fn new(interrupt: bool) -> Self {
        if interrupt {
            Self {
                free_after: 0,
                no_pmi: 0,
            }
        } else {
            // The circular buffer wraps as soon as no further record fits.
            Self {
                free_after: RECORD,
                no_pmi: u64::MAX,
            }
        }
    }

    /// The index after a record at `index`; `None` if the record needs [`store`].
    ///
    /// `index` must be below 2^64 - 48. The other fields are read only if they are needed.
    #[inline(always)]
    pub fn next_index(
        self,
        index: u64,
        maximum: impl FnOnce() -> u64,
        threshold: impl FnOnce() -> u64,
    ) -> Option<u64> {
        let end = index.wrapping_add(RECORD);
        let fits = end.wrapping_add(self.free_after) <= maximum();
        let appends = fits && end < (threshold() | self.no_pmi);
        appends.then_some(end)
    }

    /// The lowest index from which on records need [`store`], for these values of the fields.
    pub fn end(self, maximum: u64, threshold: u64) -> u64 {
        let fits = maximum
            .checked_sub(RECORD + self.free_after)
            .map_or(0, |last| last.saturating_add(1));
        fits.min((threshold | self.no_pmi).saturating_sub(RECORD))
    }
}

/// Stores one record; `from` and `to` are linear addresses.
///
/// The caller has checked [`BtsConfig::stores`].
#[inline]
pub fn store(memory: &mut impl DsMemory, config: &BtsConfig, from: u64, to: u64) -> BtsOutcome {
    try_store(memory, config, from, to).unwrap_or(BtsOutcome::Dropped)
}

#[inline]
fn try_store(
    memory: &mut impl DsMemory,
    config: &BtsConfig,
    from: u64,
    to: u64,
) -> Option<BtsOutcome> {
    let at = |offset: u64| config.area.wrapping_add(offset);
    let base = memory.read(at(field::BASE))?;
    let mut index = memory.read(at(field::INDEX))?;
    let maximum = memory.read(at(field::MAXIMUM))?;
    let threshold = memory.read(at(field::THRESHOLD))?;
    let fits = |index: u64| index.checked_add(RECORD).is_some_and(|end| end <= maximum);
    if !fits(index) {
        if config.interrupt {
            return None;
        }
        index = base;
        if !fits(index) {
            return None;
        }
    }
    // A record whose index cannot be updated is not stored either (rule DS-06).
    if !memory.writable(at(field::INDEX)) || !memory.write(index, &[from, to, 0]) {
        return None;
    }
    index += RECORD;
    debug_assert!(
        index <= maximum,
        "no byte at or above the maximum is written"
    );
    if !config.interrupt && !fits(index) {
        index = base;
    }
    if !memory.write(at(field::INDEX), &[index]) {
        return None;
    }
    Some(if config.interrupt && index >= threshold {
        BtsOutcome::AtThreshold
    } else {
        BtsOutcome::Stored
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AREA: u64 = 0x1000;
    const BASE: u64 = 0x2000;

    /// Address of the only word that cannot be written.
    const READ_ONLY: u64 = 0x800 + field::INDEX;

    /// Memory from 0; everything above it faults.
    struct Flat(Vec<u8>);

    impl DsMemory for Flat {
        fn read(&mut self, linear: u64) -> Option<u64> {
            let at = usize::try_from(linear).ok()?;
            let bytes = self.0.get(at..at.checked_add(8)?)?;
            Some(u64::from_le_bytes(bytes.try_into().unwrap()))
        }
        fn writable(&mut self, linear: u64) -> bool {
            self.read(linear).is_some() && linear != READ_ONLY
        }
        fn write(&mut self, linear: u64, words: &[u64]) -> bool {
            let at = usize::try_from(linear).unwrap_or(usize::MAX);
            let end = at.saturating_add(words.len() * 8);
            let Some(bytes) = self.0.get_mut(at..end) else {
                return false;
            };
            for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            true
        }
    }

    fn area(index: u64, maximum: u64, threshold: u64) -> Flat {
        let mut memory = Flat(vec![0; 0x3000]);
        assert!(memory.write(AREA, &[BASE, index, maximum, threshold]));
        memory
    }

    const fn config(interrupt: bool) -> BtsConfig {
        BtsConfig {
            area: AREA,
            interrupt,
            off_os: false,
            off_usr: false,
        }
    }

    fn index(memory: &mut Flat) -> u64 {
        memory.read(AREA + field::INDEX).unwrap()
    }

    /// Rules BTS-01, BTS-05 and BTS-06.
    #[test]
    fn circular_buffer_wraps_after_its_last_record() {
        let mut m = area(BASE, BASE + 3 * RECORD, 0);
        for n in 1..=3 {
            assert_eq!(
                store(&mut m, &config(false), n, n + 100),
                BtsOutcome::Stored
            );
        }
        assert_eq!(index(&mut m), BASE);
        assert_eq!(store(&mut m, &config(false), 4, 104), BtsOutcome::Stored);
        assert_eq!(m.read(BASE), Some(4));
        assert_eq!(m.read(BASE + RECORD), Some(2));
        assert_eq!(index(&mut m), BASE + RECORD);
    }

    /// Rules BTS-07 to BTS-09.
    #[test]
    fn interrupting_buffer_requests_a_pmi_and_drops_records_that_do_not_fit() {
        let mut m = area(BASE, BASE + 3 * RECORD, BASE + 2 * RECORD);
        let outcomes: Vec<_> = (0..5).map(|n| store(&mut m, &config(true), n, n)).collect();
        let (stored, full) = (BtsOutcome::Stored, BtsOutcome::AtThreshold);
        assert_eq!(
            outcomes,
            [stored, full, full, BtsOutcome::Dropped, BtsOutcome::Dropped]
        );
        assert_eq!(index(&mut m), BASE + 3 * RECORD);
        assert_eq!(m.read(BASE + 3 * RECORD), Some(0));
    }

    /// Rule DS-06.
    #[test]
    fn buffer_that_would_fault_drops_the_record_and_keeps_the_index() {
        let mut m = area(0x2ff0, 0x9000, 0);
        assert_eq!(store(&mut m, &config(false), 1, 2), BtsOutcome::Dropped);
        assert_eq!(index(&mut m), 0x2ff0);
        let outside = BtsConfig {
            area: 0x2ff8,
            ..config(false)
        };
        assert_eq!(store(&mut m, &outside, 1, 2), BtsOutcome::Dropped);
        let before = m.0.clone();
        assert!(m.write(0x800, &[BASE, BASE, 0x3000, 0]));
        let read_only = BtsConfig {
            area: 0x800,
            ..config(false)
        };
        assert_eq!(store(&mut m, &read_only, 1, 2), BtsOutcome::Dropped);
        assert_eq!(m.0[0x2000..], before[0x2000..]);
    }

    proptest! {
        /// The fast path is taken exactly if [`store`] appends and requests no PMI.
        #[test]
        fn fast_path_agrees_with_store(
            record in 0..40_u64,
            maximum in 0x1f00..0x2400_u64,
            threshold in 0x1f00..0x2400_u64,
            interrupt: bool,
        ) {
            let at = BASE + record * RECORD;
            let mut m = area(at, maximum, threshold);
            let stored = store(&mut m, &config(interrupt), 1, 2);
            let appended = stored == BtsOutcome::Stored && index(&mut m) == at + RECORD;
            let expected = appended.then_some(at + RECORD);
            let next = BtsFastPath::new(interrupt).next_index(at, || maximum, || threshold);
            prop_assert_eq!(next, expected);
            let end = BtsFastPath::new(interrupt).end(maximum, threshold);
            prop_assert_eq!(at < end, next.is_some());
        }

        /// Rules BTS-10, BTS-21 and BTS-22, for any values of the fields.
        #[test]
        fn nothing_at_or_above_the_maximum_is_written(
            fields in prop::array::uniform4(prop_oneof![0x1f00..0x2f00_u64, any::<u64>()]),
            interrupt: bool,
        ) {
            let mut m = Flat(vec![0; 0x3000]);
            prop_assert!(m.write(AREA, &fields));
            let before = m.0.clone();
            let _ = store(&mut m, &config(interrupt), u64::MAX, u64::MAX);
            let maximum = usize::try_from(fields[2]).unwrap_or(usize::MAX);
            let written = (0..before.len()).filter(|&i| m.0[i] != before[i]);
            for i in written {
                let is_index = (0x1008..0x1010).contains(&i);
                prop_assert!(is_index || i < maximum);
            }
        }
    }
}
