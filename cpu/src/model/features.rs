//! CPUID features by name.

use std::fmt;

/// A register of CPUID that announces features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum FeatureWord {
    /// CPUID.1:ECX.
    Leaf1Ecx,
    /// CPUID.1:EDX.
    Leaf1Edx,
    /// CPUID.6:EAX.
    Leaf6Eax,
    /// CPUID.7.0:EBX.
    Leaf7Ebx,
    /// CPUID.7.0:ECX.
    Leaf7Ecx,
    /// CPUID.7.0:EDX.
    Leaf7Edx,
    /// CPUID.0DH.1:EAX.
    LeafDEax,
    /// CPUID.80000001H:ECX.
    ExtendedEcx,
    /// CPUID.80000001H:EDX.
    ExtendedEdx,
}

const WORDS: usize = FeatureWord::ExtendedEdx as usize + 1;

/// A feature: its name in model files, and its bit.
type FeatureRow = (&'static str, FeatureWord, u8);

/// All features that a model file can name. Those of facilities follow the profile instead.
#[rustfmt::skip]
const FEATURES: &[FeatureRow] = {
    use FeatureWord::{
        ExtendedEcx, ExtendedEdx, Leaf1Ecx, Leaf1Edx, Leaf6Eax, Leaf7Ebx, Leaf7Ecx, Leaf7Edx, LeafDEax,
    };
    &[
        ("fpu", Leaf1Edx, 0), ("vme", Leaf1Edx, 1), ("de", Leaf1Edx, 2), ("pse", Leaf1Edx, 3),
        ("tsc", Leaf1Edx, 4), ("msr", Leaf1Edx, 5), ("pae", Leaf1Edx, 6), ("mce", Leaf1Edx, 7),
        ("cx8", Leaf1Edx, 8), ("apic", Leaf1Edx, 9), ("sep", Leaf1Edx, 11), ("mtrr", Leaf1Edx, 12),
        ("pge", Leaf1Edx, 13), ("mca", Leaf1Edx, 14), ("cmov", Leaf1Edx, 15), ("pat", Leaf1Edx, 16),
        ("pse36", Leaf1Edx, 17), ("clflush", Leaf1Edx, 19), ("mmx", Leaf1Edx, 23),
        ("fxsr", Leaf1Edx, 24), ("sse", Leaf1Edx, 25), ("sse2", Leaf1Edx, 26), ("ss", Leaf1Edx, 27),
        ("sse3", Leaf1Ecx, 0), ("pclmulqdq", Leaf1Ecx, 1), ("ssse3", Leaf1Ecx, 9),
        ("fma", Leaf1Ecx, 12), ("cx16", Leaf1Ecx, 13), ("pcid", Leaf1Ecx, 17),
        ("sse4.1", Leaf1Ecx, 19), ("sse4.2", Leaf1Ecx, 20), ("movbe", Leaf1Ecx, 22),
        ("popcnt", Leaf1Ecx, 23), ("aes", Leaf1Ecx, 25), ("xsave", Leaf1Ecx, 26),
        ("avx", Leaf1Ecx, 28), ("f16c", Leaf1Ecx, 29), ("rdrand", Leaf1Ecx, 30),
        ("arat", Leaf6Eax, 2),
        ("fsgsbase", Leaf7Ebx, 0), ("bmi1", Leaf7Ebx, 3), ("avx2", Leaf7Ebx, 5),
        ("fdp-excptn-only", Leaf7Ebx, 6), ("smep", Leaf7Ebx, 7), ("bmi2", Leaf7Ebx, 8),
        ("erms", Leaf7Ebx, 9), ("invpcid", Leaf7Ebx, 10), ("fcs-fds-deprecated", Leaf7Ebx, 13),
        ("avx512f", Leaf7Ebx, 16), ("avx512dq", Leaf7Ebx, 17), ("rdseed", Leaf7Ebx, 18),
        ("adx", Leaf7Ebx, 19), ("smap", Leaf7Ebx, 20), ("avx512ifma", Leaf7Ebx, 21),
        ("clflushopt", Leaf7Ebx, 23), ("clwb", Leaf7Ebx, 24), ("avx512cd", Leaf7Ebx, 28),
        ("sha", Leaf7Ebx, 29), ("avx512bw", Leaf7Ebx, 30), ("avx512vl", Leaf7Ebx, 31),
        ("avx512vbmi", Leaf7Ecx, 1), ("umip", Leaf7Ecx, 2), ("pku", Leaf7Ecx, 3),
        ("avx512vbmi2", Leaf7Ecx, 6), ("gfni", Leaf7Ecx, 8), ("vaes", Leaf7Ecx, 9),
        ("vpclmulqdq", Leaf7Ecx, 10), ("avx512vnni", Leaf7Ecx, 11),
        ("avx512bitalg", Leaf7Ecx, 12), ("avx512vpopcntdq", Leaf7Ecx, 14),
        ("rdpid", Leaf7Ecx, 22),
        ("md-clear", Leaf7Edx, 10), ("spec-ctrl", Leaf7Edx, 26), ("stibp", Leaf7Edx, 27),
        ("l1d-flush", Leaf7Edx, 28), ("arch-capabilities", Leaf7Edx, 29), ("ssbd", Leaf7Edx, 31),
        ("xsaveopt", LeafDEax, 0), ("xsavec", LeafDEax, 1), ("xgetbv1", LeafDEax, 2),
        ("xsaves", LeafDEax, 3),
        ("lahf", ExtendedEcx, 0), ("lzcnt", ExtendedEcx, 5), ("prefetchw", ExtendedEcx, 8),
        ("syscall", ExtendedEdx, 11), ("nx", ExtendedEdx, 20), ("pages-1g", ExtendedEdx, 26),
        ("long-mode", ExtendedEdx, 29),
    ]
};

/// Features that need another one.
const NEEDS: &[(&str, &str)] = &[
    ("sse2", "sse"),
    ("sse3", "sse2"),
    ("ssse3", "sse3"),
    ("avx", "xsave"),
    ("avx2", "avx"),
    ("fma", "avx"),
    ("f16c", "avx"),
    ("avx512f", "avx2"),
    ("avx512cd", "avx512f"),
    ("avx512dq", "avx512f"),
    ("avx512bw", "avx512f"),
    ("avx512vl", "avx512f"),
    ("avx512ifma", "avx512f"),
    ("avx512vbmi", "avx512bw"),
    ("avx512vbmi2", "avx512bw"),
    ("avx512vnni", "avx512bw"),
    ("avx512bitalg", "avx512bw"),
    ("avx512vpopcntdq", "avx512f"),
    ("gfni", "sse2"),
    ("sha", "sse2"),
    ("vaes", "aes"),
    ("vaes", "avx"),
    ("vpclmulqdq", "avx"),
    ("vpclmulqdq", "pclmulqdq"),
    ("pku", "xsave"),
    ("xsaveopt", "xsave"),
    ("xsavec", "xsave"),
    ("xgetbv1", "xsave"),
    ("xsaves", "xsavec"),
];

/// A set of CPUID features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeatureSet([u32; WORDS]);

impl FeatureSet {
    /// The bits of a register.
    pub const fn word(&self, word: FeatureWord) -> u32 {
        self.0[word as usize]
    }

    /// Whether the set has the feature of this name.
    pub fn has(&self, name: &str) -> bool {
        self.names().any(|known| known == name)
    }

    /// Adds the feature of this name. Returns `false` if none has it.
    #[must_use]
    pub(super) fn add(&mut self, name: &str) -> bool {
        let found = FEATURES.iter().find(|row| row.0 == name);
        if let Some(&(_, word, bit)) = found {
            self.0[word as usize] |= 1 << bit;
        }
        found.is_some()
    }

    /// The names of the features, in the order of the registers.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        let words = self.0;
        FEATURES
            .iter()
            .filter(move |&&(_, word, bit)| words[word as usize] >> bit & 1 != 0)
            .map(|row| row.0)
    }

    /// A feature without another that it needs.
    pub(super) fn unmet(&self) -> Option<(&'static str, &'static str)> {
        let mut pairs = NEEDS.iter().copied();
        pairs.find(|(feature, needs)| self.has(feature) && !self.has(needs))
    }

    /// The components of XCR0 that the features bring.
    pub fn xcr0(&self) -> u64 {
        let components = [
            ("xsave", 0b11),
            ("avx", 1 << 2),
            ("avx512f", 0b111 << 5),
            ("pku", 1 << 9),
        ];
        let present = components.into_iter().filter(|(name, _)| self.has(name));
        present.fold(0, |all, (_, bits)| all | bits)
    }
}

impl fmt::Display for FeatureSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, name) in self.names().enumerate() {
            let space = if position == 0 { "" } else { " " };
            write!(f, "{space}{name}")?;
        }
        Ok(())
    }
}
