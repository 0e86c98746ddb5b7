//! Sampled addresses, counted by symbol.

use std::collections::BTreeMap;

use crate::demo::symbols::Symbols;

/// Sampled addresses, counted by symbol.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampleProfile {
    /// What was sampled: text that follows the number of samples.
    pub about: String,
    /// Samples of each symbol, the most frequent first.
    pub hits: Vec<(String, usize)>,
}

impl SampleProfile {
    /// Counts the symbols of `addresses`.
    pub fn new(about: &str, addresses: &[u64], symbols: &Symbols) -> Self {
        let mut counts = BTreeMap::<String, usize>::new();
        for &address in addresses {
            let name = symbols.find(address).map(|(name, _)| name.to_owned());
            *counts
                .entry(name.unwrap_or_else(|| format!("{address:#x}")))
                .or_default() += 1;
        }
        let mut hits: Vec<_> = counts.into_iter().collect();
        hits.sort_by_key(|hit| std::cmp::Reverse(hit.1));
        Self {
            about: about.to_owned(),
            hits,
        }
    }

    /// The number of samples.
    pub fn total(&self) -> usize {
        self.hits.iter().map(|hit| hit.1).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_counts_symbols_the_most_frequent_first() {
        let profile = SampleProfile::new("test", &[1, 2, 2], &Symbols::default());
        assert_eq!(profile.hits, [("0x2".to_owned(), 2), ("0x1".to_owned(), 1)]);
        assert_eq!(profile.total(), 3);
    }
}
