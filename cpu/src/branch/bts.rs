//! Branch trace store: records in the guest's own memory. SDM Vol. 3B, "BTS and DS Save Area" and
//! "Writing the DS Interrupt Service Routine".
//!
//! The 64-bit format in every mode (rule DS-02). Every field is read when it is used (rule DS-10).

use super::Store;

/// Bytes of a record: from, to, flags.
pub const RECORD: u64 = 24;

/// Offsets in the DS management area.
mod field {
    pub(super) const BASE: u64 = 0x00;
    pub(super) const INDEX: u64 = 0x08;
    pub(super) const MAXIMUM: u64 = 0x10;
    pub(super) const THRESHOLD: u64 = 0x18;
}

/// Guest memory as the DS mechanism reaches it: linear addresses through the current page tables
/// with supervisor rights; SMAP and protection keys do not count, and nothing raises an exception.
pub trait DsMemory {
    /// Eight bytes; `None` where an access would fault.
    fn read(&mut self, linear: u64) -> Option<u64>;
    /// Whether eight bytes could be written.
    fn writable(&mut self, linear: u64) -> bool;
    /// Writes all words one after another, or nothing: `false` where an access would fault.
    fn write(&mut self, linear: u64, words: &[u64]) -> bool;
}

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// It was stored.
    Quietly,
    /// It was stored, and the buffer is at its threshold: a PMI is due.
    AtThreshold,
    /// There was no room, or an access would have faulted (rules BTS-09, DS-06).
    Dropped,
}

/// Which records are stored with nothing else to do: they fit, the index does not wrap, and no PMI is due.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet {
    /// What must be free after the record.
    room: u64,
    /// All ones where no PMI is ever due.
    never: u64,
}

impl Quiet {
    /// With [`Store::interrupt`] as it is.
    pub const fn new(interrupt: bool) -> Self {
        if interrupt {
            Self { room: 0, never: 0 }
        } else {
            Self {
                room: RECORD,
                never: u64::MAX,
            }
        }
    }

    /// The index after such a record. Right for an index below 2^64 - 48. The fields of the DS management area are
    /// read when they are asked for.
    #[inline(always)]
    pub fn end(
        self,
        index: u64,
        maximum: impl FnOnce() -> u64,
        threshold: impl FnOnce() -> u64,
    ) -> Option<u64> {
        let end = index.wrapping_add(RECORD);
        let quiet = end.wrapping_add(self.room) <= maximum() && end < (threshold() | self.never);
        quiet.then_some(end)
    }
}

/// Stores one record; addresses are linear. Whether the privilege level wants it
/// ([`Store::wants`]) was asked before.
#[inline]
pub fn store(memory: &mut impl DsMemory, how: &Store, from: u64, to: u64) -> Stored {
    try_store(memory, how, from, to).unwrap_or(Stored::Dropped)
}

#[inline]
fn try_store(memory: &mut impl DsMemory, how: &Store, from: u64, to: u64) -> Option<Stored> {
    let at = |offset: u64| how.area.wrapping_add(offset);
    let base = memory.read(at(field::BASE))?;
    let mut index = memory.read(at(field::INDEX))?;
    let maximum = memory.read(at(field::MAXIMUM))?;
    let threshold = memory.read(at(field::THRESHOLD))?;
    let fits = |index: u64| index.checked_add(RECORD).is_some_and(|end| end <= maximum);
    if !fits(index) {
        if how.interrupt {
            return None;
        }
        index = base;
        if !fits(index) {
            return None;
        }
    }
    // A record that cannot be counted is not stored either (rule DS-06).
    if !memory.writable(at(field::INDEX)) || !memory.write(index, &[from, to, 0]) {
        return None;
    }
    index += RECORD;
    if !how.interrupt && !fits(index) {
        index = base;
    }
    if !memory.write(at(field::INDEX), &[index]) {
        return None;
    }
    Some(if how.interrupt && index >= threshold {
        Stored::AtThreshold
    } else {
        Stored::Quietly
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AREA: u64 = 0x1000;
    const BASE: u64 = 0x2000;

    /// A word that cannot be written.
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

    const fn how(interrupt: bool) -> Store {
        Store {
            area: AREA,
            interrupt,
            off_os: false,
            off_usr: false,
        }
    }

    fn index(memory: &mut Flat) -> u64 {
        memory.read(AREA + field::INDEX).unwrap()
    }

    /// BTS-01, BTS-05, BTS-06: n records, then the newest overwrites entry 0.
    #[test]
    fn circular_buffer_wraps_after_its_last_slot() {
        let mut m = area(BASE, BASE + 3 * RECORD, 0);
        for n in 1..=3 {
            assert_eq!(store(&mut m, &how(false), n, n + 100), Stored::Quietly);
        }
        assert_eq!(index(&mut m), BASE);
        assert_eq!(store(&mut m, &how(false), 4, 104), Stored::Quietly);
        assert_eq!(m.read(BASE), Some(4));
        assert_eq!(m.read(BASE + RECORD), Some(2));
        assert_eq!(index(&mut m), BASE + RECORD);
    }

    /// BTS-07 to BTS-09: a PMI from the threshold on, and nothing beyond the maximum.
    #[test]
    fn interrupting_buffer_asks_for_a_pmi_and_drops_what_does_not_fit() {
        let mut m = area(BASE, BASE + 3 * RECORD, BASE + 2 * RECORD);
        let outcomes: Vec<_> = (0..5).map(|n| store(&mut m, &how(true), n, n)).collect();
        let (quiet, full) = (Stored::Quietly, Stored::AtThreshold);
        assert_eq!(
            outcomes,
            [quiet, full, full, Stored::Dropped, Stored::Dropped]
        );
        assert_eq!(index(&mut m), BASE + 3 * RECORD);
        assert_eq!(m.read(BASE + 3 * RECORD), Some(0));
    }

    /// DS-06: what would fault is dropped and leaves the index alone.
    #[test]
    fn faulting_buffer_drops_the_record() {
        let mut m = area(0x2ff0, 0x9000, 0);
        assert_eq!(store(&mut m, &how(false), 1, 2), Stored::Dropped);
        assert_eq!(index(&mut m), 0x2ff0);
        let outside = Store {
            area: 0x2ff8,
            ..how(false)
        };
        assert_eq!(store(&mut m, &outside, 1, 2), Stored::Dropped);
        let before = m.0.clone();
        assert!(m.write(0x800, &[BASE, BASE, 0x3000, 0]));
        let read_only = Store {
            area: 0x800,
            ..how(false)
        };
        assert_eq!(store(&mut m, &read_only, 1, 2), Stored::Dropped);
        assert_eq!(m.0[0x2000..], before[0x2000..]);
    }

    proptest! {
        /// A quiet record is one that [`store`] stores so.
        #[test]
        fn quiet_record_is_stored_quietly(
            slot in 0..40_u64,
            maximum in 0x1f00..0x2400_u64,
            threshold in 0x1f00..0x2400_u64,
            interrupt: bool,
        ) {
            let at = BASE + slot * RECORD;
            let mut m = area(at, maximum, threshold);
            let stored = store(&mut m, &how(interrupt), 1, 2);
            let quietly = stored == Stored::Quietly && index(&mut m) == at + RECORD;
            let expected = quietly.then_some(at + RECORD);
            let end = Quiet::new(interrupt).end(at, || maximum, || threshold);
            prop_assert_eq!(end, expected);
        }

        /// BTS-10, BTS-21, BTS-22: whatever the fields hold, nothing at or above the maximum is
        /// written, and no arithmetic overflows.
        #[test]
        fn nothing_at_or_above_the_maximum_is_written(
            fields in prop::array::uniform4(prop_oneof![0x1f00..0x2f00_u64, any::<u64>()]),
            interrupt: bool,
        ) {
            let mut m = Flat(vec![0; 0x3000]);
            prop_assert!(m.write(AREA, &fields));
            let before = m.0.clone();
            let _ = store(&mut m, &how(interrupt), u64::MAX, u64::MAX);
            let maximum = usize::try_from(fields[2]).unwrap_or(usize::MAX);
            let written = (0..before.len()).filter(|&i| m.0[i] != before[i]);
            for i in written {
                let is_index = (0x1008..0x1010).contains(&i);
                prop_assert!(is_index || i < maximum);
            }
        }
    }
}
