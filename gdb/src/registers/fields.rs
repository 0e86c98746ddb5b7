//! The flags of registers, by the names that the manual gives them.

use super::info::feature;

/// Named bits of a register: name, first bit, last bit.
pub(super) type FlagFields = &'static [(&'static str, u8, u8)];

const EFLAGS: FlagFields = &[
    ("CF", 0, 0),
    ("", 1, 1),
    ("PF", 2, 2),
    ("AF", 4, 4),
    ("ZF", 6, 6),
    ("SF", 7, 7),
    ("TF", 8, 8),
    ("IF", 9, 9),
    ("DF", 10, 10),
    ("OF", 11, 11),
    ("IOPL", 12, 13),
    ("NT", 14, 14),
    ("RF", 16, 16),
    ("VM", 17, 17),
    ("AC", 18, 18),
    ("VIF", 19, 19),
    ("VIP", 20, 20),
    ("ID", 21, 21),
];

const MXCSR: FlagFields = &[
    ("IE", 0, 0),
    ("DE", 1, 1),
    ("ZE", 2, 2),
    ("OE", 3, 3),
    ("UE", 4, 4),
    ("PE", 5, 5),
    ("DAZ", 6, 6),
    ("IM", 7, 7),
    ("DM", 8, 8),
    ("ZM", 9, 9),
    ("OM", 10, 10),
    ("UM", 11, 11),
    ("PM", 12, 12),
    ("FZ", 15, 15),
];

const CR0: FlagFields = &[
    ("PE", 0, 0),
    ("MP", 1, 1),
    ("EM", 2, 2),
    ("TS", 3, 3),
    ("ET", 4, 4),
    ("NE", 5, 5),
    ("WP", 16, 16),
    ("AM", 18, 18),
    ("NW", 29, 29),
    ("CD", 30, 30),
    ("PG", 31, 31),
];

const CR3: FlagFields = &[("PCID", 0, 11), ("PDBR", 12, 63)];

const CR4: FlagFields = &[
    ("VME", 0, 0),
    ("PVI", 1, 1),
    ("TSD", 2, 2),
    ("DE", 3, 3),
    ("PSE", 4, 4),
    ("PAE", 5, 5),
    ("MCE", 6, 6),
    ("PGE", 7, 7),
    ("PCE", 8, 8),
    ("OSFXSR", 9, 9),
    ("OSXMMEXCPT", 10, 10),
    ("UMIP", 11, 11),
    ("LA57", 12, 12),
    ("VMXE", 13, 13),
    ("SMXE", 14, 14),
    ("FSGSBASE", 16, 16),
    ("PCIDE", 17, 17),
    ("OSXSAVE", 18, 18),
    ("SMEP", 20, 20),
    ("SMAP", 21, 21),
    ("PKE", 22, 22),
];

const EFER: FlagFields = &[
    ("SCE", 0, 0),
    ("LME", 8, 8),
    ("LMA", 10, 10),
    ("NXE", 11, 11),
];

const DR6: FlagFields = &[
    ("B0", 0, 0),
    ("B1", 1, 1),
    ("B2", 2, 2),
    ("B3", 3, 3),
    ("BD", 13, 13),
    ("BS", 14, 14),
    ("BT", 15, 15),
    ("RTM", 16, 16),
];

const DR7: FlagFields = &[
    ("L0", 0, 0),
    ("G0", 1, 1),
    ("L1", 2, 2),
    ("G1", 3, 3),
    ("L2", 4, 4),
    ("G2", 5, 5),
    ("L3", 6, 6),
    ("G3", 7, 7),
    ("LE", 8, 8),
    ("GE", 9, 9),
    ("RTM", 11, 11),
    ("GD", 13, 13),
    ("RW0", 16, 17),
    ("LEN0", 18, 19),
    ("RW1", 20, 21),
    ("LEN1", 22, 23),
    ("RW2", 24, 25),
    ("LEN2", 26, 27),
    ("RW3", 28, 29),
    ("LEN3", 30, 31),
];

const ACCESS: FlagFields = &[
    ("TYPE", 0, 3),
    ("S", 4, 4),
    ("DPL", 5, 6),
    ("P", 7, 7),
    ("AVL", 12, 12),
    ("L", 13, 13),
    ("DB", 14, 14),
    ("G", 15, 15),
];

const DEBUGCTL: FlagFields = &[
    ("LBR", 0, 0),
    ("BTF", 1, 1),
    ("TR", 6, 6),
    ("BTS", 7, 7),
    ("BTINT", 8, 8),
    ("BTS_OFF_OS", 9, 9),
    ("BTS_OFF_USR", 10, 10),
    ("FREEZE_LBRS_ON_PMI", 11, 11),
    ("FREEZE_PERFMON_ON_PMI", 12, 12),
    ("FREEZE_WHILE_SMM", 14, 14),
    ("RTM", 15, 15),
];

const LBR_SELECT: FlagFields = &[
    ("CPL_EQ_0", 0, 0),
    ("CPL_NEQ_0", 1, 1),
    ("JCC", 2, 2),
    ("NEAR_REL_CALL", 3, 3),
    ("NEAR_IND_CALL", 4, 4),
    ("NEAR_RET", 5, 5),
    ("NEAR_IND_JMP", 6, 6),
    ("NEAR_REL_JMP", 7, 7),
    ("FAR_BRANCH", 8, 8),
    ("EN_CALLSTACK", 9, 9),
];

const LBR_INFO: FlagFields = &[
    ("CYCLES", 0, 15),
    ("TSX_ABORT", 61, 61),
    ("IN_TSX", 62, 62),
    ("MISPRED", 63, 63),
];

const PERF_GLOBAL: FlagFields = &[
    ("PMC", 0, 7),
    ("FIXED0", 32, 32),
    ("FIXED1", 33, 33),
    ("FIXED2", 34, 34),
    ("LBR_FRZ", 58, 58),
    ("CTR_FRZ", 59, 59),
    ("OVF_BUF", 62, 62),
    ("COND_CHGD", 63, 63),
];

const PERFEVTSEL: FlagFields = &[
    ("EVENT", 0, 7),
    ("UMASK", 8, 15),
    ("USR", 16, 16),
    ("OS", 17, 17),
    ("EDGE", 18, 18),
    ("PC", 19, 19),
    ("INT", 20, 20),
    ("ANY", 21, 21),
    ("EN", 22, 22),
    ("INV", 23, 23),
    ("CMASK", 24, 31),
];

/// The flag types that a feature defines: name, size in bytes, fields.
pub(super) fn flag_types(name: &str) -> &'static [(&'static str, u8, FlagFields)] {
    match name {
        feature::CORE => &[("i386_eflags", 4, EFLAGS)],
        feature::SSE => &[("i386_mxcsr", 4, MXCSR)],
        feature::SYSTEM => &[
            ("hs_cr0", 8, CR0),
            ("hs_cr3", 8, CR3),
            ("hs_cr4", 8, CR4),
            ("hs_efer", 8, EFER),
            ("hs_dr6", 8, DR6),
            ("hs_dr7", 8, DR7),
            ("hs_access", 2, ACCESS),
        ],
        feature::MSRS => &[
            ("hs_debugctl", 8, DEBUGCTL),
            ("hs_lbr_select", 8, LBR_SELECT),
            ("hs_lbr_info", 8, LBR_INFO),
            ("hs_perf_global", 8, PERF_GLOBAL),
            ("hs_perfevtsel", 8, PERFEVTSEL),
        ],
        _ => &[],
    }
}
