//! Descriptors and task-state segments of the legacy modes. SDM Vol. 3A, "Segment Descriptors",
//! "Gate descriptors", "Task-State Segment".

/// Kind of [`segment`]: code, readable.
pub const CODE: u32 = 0x9b;
/// Data, writable.
pub const DATA: u32 = 0x93;
/// Data, writable, expanding down.
pub const DATA_DOWN: u32 = 0x97;
/// Code, readable, conforming.
pub const CODE_CONFORMING: u32 = 0x9f;
/// A local descriptor table.
pub const LDT: u32 = 0x82;
/// An available 32-bit TSS.
pub const TSS32: u32 = 0x89;
/// An available 16-bit TSS.
pub const TSS16: u32 = 0x81;
/// Kind of [`gate`]: 32-bit call gate.
pub const CALL32: u32 = 0x8c;
/// 16-bit call gate.
pub const CALL16: u32 = 0x84;
/// Task gate; the offset is not used.
pub const TASK: u32 = 0x85;
/// 32-bit interrupt gate.
pub const INTERRUPT32: u32 = 0x8e;
/// 32-bit trap gate.
pub const TRAP32: u32 = 0x8f;
/// 16-bit interrupt gate.
pub const INTERRUPT16: u32 = 0x86;
/// 16-bit trap gate.
pub const TRAP16: u32 = 0x87;
/// Added to a kind: DPL 3.
pub const USER: u32 = 0x60;
/// Added to a kind of segment: the D/B flag.
pub const BIG: u32 = 0x4000;

/// A segment descriptor. A limit above FFFFFH must have its low 12 bits set, and sets G.
pub const fn segment(base: u32, limit: u32, kind: u32) -> u64 {
    let (limit, granular) = if limit > 0xf_ffff {
        (limit >> 12, 0x8000)
    } else {
        (limit, 0)
    };
    let low = base << 16 | (limit & 0xffff);
    let high =
        (base & 0xff00_0000) | (limit & 0xf_0000) | (base >> 16 & 0xff) | (kind | granular) << 8;
    (high as u64) << 32 | low as u64
}

/// A gate descriptor. A call gate copies no parameters, see [`with_parameters`].
pub const fn gate(selector: u16, offset: u32, kind: u32) -> u64 {
    let low = (selector as u32) << 16 | (offset & 0xffff);
    let high = (offset & 0xffff_0000) | kind << 8;
    (high as u64) << 32 | low as u64
}

/// A call gate that copies `count` (below 32) parameters.
pub const fn with_parameters(gate: u64, count: u8) -> u64 {
    gate | ((count & 31) as u64) << 32
}

/// A 32-bit TSS with its interrupt redirection and I/O permission maps.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the fields are registers")]
pub struct Tss32 {
    pub link: u32,
    pub esp0: u32,
    pub ss0: u32,
    pub esp1: u32,
    pub ss1: u32,
    pub esp2: u32,
    pub ss2: u32,
    pub cr3: u32,
    pub eip: u32,
    pub eflags: u32,
    pub eax: u32,
    pub ecx: u32,
    pub edx: u32,
    pub ebx: u32,
    pub esp: u32,
    pub ebp: u32,
    pub esi: u32,
    pub edi: u32,
    pub es: u32,
    pub cs: u32,
    pub ss: u32,
    pub ds: u32,
    pub fs: u32,
    pub gs: u32,
    pub ldt: u32,
    /// Bit 0 is T.
    pub trap: u16,
    /// Offset of `io`.
    pub io_map: u16,
    /// A clear bit redirects INT n of virtual-8086 mode to the real-mode vector, if CR4.VME is set.
    /// All bits are set at first.
    pub redirect: [u8; 32],
    /// I/O permission map of the ports 0 to 3FFH: a set bit denies access. The last bytes are the
    /// end mark. All bits are set at first.
    pub io: [u8; 132],
}

impl Tss32 {
    /// A TSS of zeros, except that the maps redirect and permit nothing.
    pub const fn new() -> Self {
        Self {
            link: 0,
            esp0: 0,
            ss0: 0,
            esp1: 0,
            ss1: 0,
            esp2: 0,
            ss2: 0,
            cr3: 0,
            eip: 0,
            eflags: 2,
            eax: 0,
            ecx: 0,
            edx: 0,
            ebx: 0,
            esp: 0,
            ebp: 0,
            esi: 0,
            edi: 0,
            es: 0,
            cs: 0,
            ss: 0,
            ds: 0,
            fs: 0,
            gs: 0,
            ldt: 0,
            trap: 0,
            io_map: 136,
            redirect: [0xff; 32],
            io: [0xff; 132],
        }
    }
}

impl Default for Tss32 {
    fn default() -> Self {
        Self::new()
    }
}

/// A 16-bit TSS.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the fields are registers")]
pub struct Tss16 {
    pub link: u16,
    pub sp0: u16,
    pub ss0: u16,
    pub sp1: u16,
    pub ss1: u16,
    pub sp2: u16,
    pub ss2: u16,
    pub ip: u16,
    pub flags: u16,
    pub ax: u16,
    pub cx: u16,
    pub dx: u16,
    pub bx: u16,
    pub sp: u16,
    pub bp: u16,
    pub si: u16,
    pub di: u16,
    pub es: u16,
    pub cs: u16,
    pub ss: u16,
    pub ds: u16,
    pub ldt: u16,
}
