//! When the interpreter translates the guest's code: `--translate`.

/// How often a block of code runs before it is translated, and how much memory translations may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranslationPolicy {
    /// Runs of a block before it is translated.
    pub after: TranslateAfter,
    /// Bytes of translated code of one vCPU at most.
    pub memory: u64,
}

/// When a block of code is translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TranslateAfter {
    /// Never.
    Never,
    /// When translating pays.
    #[default]
    Worthwhile,
    /// After this many runs, at least one.
    Runs(u64),
}

impl TranslateAfter {
    /// Runs before translating pays: translating a block takes as long as running it so often.
    const WORTHWHILE: u64 = 50;

    /// Runs of a block before it is translated; `u64::MAX` for never.
    pub const fn runs(self) -> u64 {
        match self {
            Self::Never => u64::MAX,
            Self::Worthwhile => Self::WORTHWHILE,
            Self::Runs(runs) => runs,
        }
    }
}

impl TranslationPolicy {
    /// The most bytes of translated code, unless that is set.
    pub const DEFAULT_MEMORY: u64 = 64 << 20;
}

impl Default for TranslationPolicy {
    fn default() -> Self {
        Self {
            after: TranslateAfter::default(),
            memory: Self::DEFAULT_MEMORY,
        }
    }
}
