//! Sets of breakpoints and watched bytes, which are queried far more than changed.
//!
//! A query of an address that is in no set, the common case, reads one bit of a filter, however
//! many addresses the set has.

use crate::memory::PAGE;

/// Maximum number of bits in a filter.
const FILTER_BITS_MAX: usize = 1 << 22;
/// Filter bits for each key: at most 1 in 16 queries of other keys passes.
const BITS_PER_KEY: usize = 16;
/// Watched ranges longer than this are searched without a filter.
const LONG: u64 = PAGE;
/// Number of bytes that share a key in the filter of watched bytes.
const LINE: u64 = 64;

/// A set of keys with false positives: it may report keys that it does not have.
#[derive(Debug)]
struct Filter {
    bits: Box<[u64]>,
    shift: u32,
}

impl Filter {
    fn new(keys: impl ExactSizeIterator<Item = u64>) -> Self {
        Self::with_count(keys.len(), keys)
    }

    /// Creates a filter for about `count` keys.
    fn with_count(count: usize, keys: impl Iterator<Item = u64>) -> Self {
        let bits = count.saturating_mul(BITS_PER_KEY).next_power_of_two();
        let bits = bits.clamp(64, FILTER_BITS_MAX);
        let mut filter = Self {
            bits: vec![0; bits / 64].into(),
            shift: 64 - bits.ilog2(),
        };
        for key in keys {
            let (word, bit) = filter.position(key);
            filter.bits[word] |= bit;
        }
        filter
    }

    #[inline]
    fn position(&self, key: u64) -> (usize, u64) {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift;
        (usize::try_from(hash / 64).unwrap_or(0), 1 << (hash % 64))
    }

    #[inline]
    fn may_contain(&self, key: u64) -> bool {
        let (word, bit) = self.position(key);
        self.bits[word] & bit != 0
    }
}

/// Linear addresses of breakpoints.
#[derive(Debug)]
pub(crate) struct BreakpointAddresses {
    addresses: Vec<u64>,
    /// Numbers of the pages that contain a breakpoint.
    pages: Vec<u64>,
    address_filter: Filter,
    page_filter: Filter,
}

impl BreakpointAddresses {
    /// Creates the set of these addresses, which must ascend.
    pub(crate) fn new(addresses: Vec<u64>) -> Self {
        debug_assert!(addresses.is_sorted(), "the addresses ascend");
        let mut pages: Vec<u64> = addresses.iter().map(|lin| lin / PAGE).collect();
        pages.dedup();
        Self {
            address_filter: Filter::new(addresses.iter().copied()),
            page_filter: Filter::new(pages.iter().copied()),
            addresses,
            pages,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    #[inline]
    pub(crate) fn contains(&self, lin: u64) -> bool {
        self.address_filter.may_contain(lin) && self.addresses.binary_search(&lin).is_ok()
    }

    /// Whether there is a breakpoint in the page of a linear address.
    #[inline]
    pub(crate) fn has_on_page(&self, lin: u64) -> bool {
        let page = lin / PAGE;
        self.page_filter.may_contain(page) && self.pages.binary_search(&page).is_ok()
    }

    /// Returns the addresses that another set does not have.
    pub(crate) fn added_to<'a>(&'a self, old: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let addresses = self.addresses.iter().copied();
        addresses.filter(|&lin| !old.contains(lin))
    }
}

/// Disjoint ranges of linear addresses, by their first and last bytes, ascending.
#[derive(Debug, Default)]
struct MergedRanges(Vec<(u64, u64)>);

impl MergedRanges {
    fn new(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match merged.last_mut() {
                Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
                _ => merged.push((first, last)),
            }
        }
        Self(merged)
    }

    fn overlaps(&self, first: u64, last: u64) -> bool {
        let next = self.0.partition_point(|&(_, end)| end < first);
        self.0.get(next).is_some_and(|&(from, _)| from <= last)
    }
}

/// Linear addresses of watched bytes.
#[derive(Debug)]
pub(crate) struct WatchedSet {
    long: MergedRanges,
    short: MergedRanges,
    /// Filters of the short ranges: one of units of [`LINE`] bytes, and one of pages.
    lines: Filter,
    pages: Filter,
}

impl WatchedSet {
    /// Creates the set of the bytes in these ranges of first and last bytes.
    pub(crate) fn new(ranges: impl Iterator<Item = (u64, u64)>) -> Self {
        let (short, long): (Vec<_>, Vec<_>) = ranges.partition(|(from, to)| to - from < LONG);
        let (short, long) = (MergedRanges::new(short), MergedRanges::new(long));
        let keys = |unit: u64| {
            let ranges = short.0.iter();
            ranges.flat_map(move |&(from, to)| from / unit..=to / unit)
        };
        let filter = |unit: u64| Filter::with_count(keys(unit).count(), keys(unit));
        let (lines, pages) = (filter(LINE), filter(PAGE));
        Self {
            long,
            short,
            lines,
            pages,
        }
    }

    /// Whether any of the bytes from `first` to `last` is watched.
    pub(crate) fn overlaps(&self, first: u64, last: u64) -> bool {
        if !self.long.0.is_empty() && self.long.overlaps(first, last) {
            return true;
        }
        let passes = last.wrapping_sub(first) >= PAGE
            || (first / LINE..=last / LINE).any(|line| self.lines.may_contain(line));
        passes && self.short.overlaps(first, last)
    }

    /// Whether any byte in the page of a linear address is watched.
    pub(crate) fn overlaps_page(&self, lin: u64) -> bool {
        let (first, last) = (lin & !(PAGE - 1), lin | (PAGE - 1));
        if !self.long.0.is_empty() && self.long.overlaps(first, last) {
            return true;
        }
        self.pages.may_contain(lin / PAGE) && self.short.overlaps(first, last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breakpoint_set_contains_its_addresses_and_pages_only() {
        let addresses: Vec<u64> = (0..1000)
            .map(|n| 0xffff_ffff_8100_0000 + n * 0x1803)
            .collect();
        let set = BreakpointAddresses::new(addresses.clone());
        for &lin in &addresses {
            assert!(set.contains(lin) && set.has_on_page(lin ^ 1), "{lin:#x}");
            assert!(!set.contains(lin + 1), "{lin:#x}");
        }
        assert!(!set.has_on_page(0xffff_ffff_80ff_f000));
        let more = BreakpointAddresses::new(vec![1, addresses[0]]);
        assert_eq!(more.added_to(&set).collect::<Vec<_>>(), [1]);
        assert!(BreakpointAddresses::new(Vec::new()).is_empty());
    }

    #[test]
    fn watched_set_agrees_with_a_search_of_all_ranges() {
        let ranges: Vec<(u64, u64)> = (0..200_u64)
            .map(|n| (n * 0x345, n * 0x345 + n % 90))
            .chain([(0x20_0000, 0x20_5000), (u64::MAX - 3, u64::MAX)])
            .collect();
        let set = WatchedSet::new(ranges.iter().copied());
        let truth = |first, last| ranges.iter().any(|&(from, to)| from <= last && first <= to);
        for at in (0..0x2_8000).chain(0x1f_fff0..0x20_5010) {
            assert_eq!(set.overlaps(at, at + 7), truth(at, at + 7), "{at:#x}");
        }
        for page in 0..0x210 {
            let (first, last) = (page * PAGE, page * PAGE + PAGE - 1);
            assert_eq!(
                set.overlaps_page(first + 5),
                truth(first, last),
                "{page:#x}"
            );
        }
        assert!(set.overlaps(0, u64::MAX) && set.overlaps(u64::MAX, u64::MAX));
        assert!(!set.overlaps(u64::MAX - 8, u64::MAX - 4));
    }
}
