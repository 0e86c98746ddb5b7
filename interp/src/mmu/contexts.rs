//! Process contexts: which PCIDs have translations in the TLBs.
//!
//! SDM Vol. 3A, "Process-Context Identifiers (PCIDs)".

use super::tlb::CONTEXTS;

/// The process contexts, each with the index by which the TLBs know it.
#[derive(Debug)]
pub(crate) struct Contexts {
    /// The PCID of each context whose translations may be kept.
    pcids: [Option<u16>; CONTEXTS],
    current: usize,
    /// Index of the context to replace next.
    oldest: usize,
}

/// What a load of CR3 does to the process contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContextChange {
    /// Index of the context that is current now.
    pub(crate) index: usize,
    /// Its translations are kept.
    pub(crate) keeps: bool,
}

impl Contexts {
    /// Returns the contexts after a reset: that of PCID 0.
    pub(crate) fn new() -> Self {
        let mut pcids = [None; CONTEXTS];
        pcids[0] = Some(0);
        Self {
            pcids,
            current: 0,
            oldest: 1,
        }
    }

    /// Makes the context of a PCID current. Its translations are kept if `keep`.
    pub(crate) fn load(&mut self, pcid: u16, keep: bool) -> ContextChange {
        let found = self.pcids.iter().position(|p| *p == Some(pcid));
        let index = found.unwrap_or_else(|| self.replace());
        self.pcids[index] = Some(pcid);
        self.current = index;
        ContextChange {
            index,
            keeps: keep && found.is_some(),
        }
    }

    /// Returns the index of a context to replace.
    fn replace(&mut self) -> usize {
        if let Some(unused) = self.pcids.iter().position(Option::is_none) {
            return unused;
        }
        let index = self.oldest;
        self.oldest = (index + 1) % CONTEXTS;
        index
    }

    /// Forgets the translations of a PCID that is not current.
    pub(crate) fn forget(&mut self, pcid: u16) {
        debug_assert!(self.pcids[self.current] != Some(pcid));
        for known in self.pcids.iter_mut().filter(|p| **p == Some(pcid)) {
            *known = None;
        }
    }

    /// Forgets all contexts; the current one is that of `pcid`.
    pub(crate) fn reset(&mut self, pcid: u16) {
        self.pcids = [None; CONTEXTS];
        self.pcids[self.current] = Some(pcid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_is_kept_only_if_it_is_known_and_to_be_kept() {
        let mut contexts = Contexts::new();
        assert!(contexts.load(0, true).keeps);
        let first = contexts.load(5, true);
        assert!(!first.keeps);
        assert!(!contexts.load(5, false).keeps);
        assert!(contexts.load(0, true).keeps);
        assert_eq!(
            contexts.load(5, true),
            ContextChange {
                keeps: true,
                ..first
            }
        );
    }

    #[test]
    fn forgotten_context_is_not_kept() {
        let mut contexts = Contexts::new();
        contexts.load(5, false);
        contexts.load(6, false);
        contexts.forget(5);
        assert!(!contexts.load(5, true).keeps);
        contexts.load(6, true);
        contexts.reset(6);
        assert!(contexts.load(6, true).keeps);
        assert!(!contexts.load(0, true).keeps);
    }

    #[test]
    fn context_of_more_pcids_than_fit_replaces_the_oldest() {
        let mut contexts = Contexts::new();
        let known = u16::try_from(CONTEXTS).unwrap();
        for pcid in 0..=known {
            contexts.load(pcid, true);
        }
        assert!(contexts.load(0, true).keeps);
        assert!(!contexts.load(1, true).keeps);
    }
}
