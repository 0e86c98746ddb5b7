//! `--translate`: which of the guest's code the interpreter translates.

/// When a block is translated, and how much memory translated code may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranslationPolicy {
    /// Runs of a block before it is translated.
    pub after: TranslateAfter,
    /// Maximum number of bytes of translated code, for each vCPU.
    pub memory: u64,
}

/// When a block of code is translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TranslateAfter {
    /// Never.
    Never,
    /// Once the block has run so often that translation is likely to save time.
    #[default]
    Worthwhile,
    /// After this many runs, at least one.
    Runs(u64),
}

impl TranslateAfter {
    /// Number of runs of a block that take as long as its translation.
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
    /// The default of [`TranslationPolicy::memory`].
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
