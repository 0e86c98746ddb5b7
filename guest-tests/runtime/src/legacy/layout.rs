//! Addresses and selectors of the legacy modes.

/// Linear and physical address of the blob.
pub const BASE: u32 = 0x1_0000;
/// Segment of the blob in real and virtual-8086 mode; it is 64 KiB long.
pub const SEGMENT: u16 = 0x1000;
/// Linear and physical address of the tables: a [`crate::legacy::LegacyMachine`].
pub const MACHINE: u32 = 0x2_0000;
/// Address of the real-mode entry stubs and of the code that switches to real mode.
pub(crate) const LOW_CODE: u32 = 0x3_0000;
/// Stack pointer in the blob's segment at the start.
pub const STACK: u32 = 0xfff0;
/// Linear address of a page that the blob may use for data.
pub const DATA: u32 = 0x4_0000;

/// Selectors of the GDT of a [`crate::legacy::LegacyMachine`].
#[expect(missing_docs, reason = "each name says what it selects")]
pub mod sel {
    pub const CODE32: u16 = 0x08;
    pub const DATA32: u16 = 0x10;
    /// 16-bit segments have the base [`super::BASE`] and the limit FFFFH.
    pub const CODE16: u16 = 0x18;
    pub const DATA16: u16 = 0x20;
    pub const USER_CODE32: u16 = 0x2b;
    pub const USER_DATA32: u16 = 0x33;
    pub const USER_CODE16: u16 = 0x3b;
    pub const USER_DATA16: u16 = 0x43;
    /// 16-bit code segment of the code that switches to real mode.
    pub const LOW_CODE: u16 = 0x48;
    /// The task in which the blob starts: TSS 0. The others are not busy.
    pub const TSS0: u16 = 0x50;
    pub const TSS1: u16 = 0x58;
    pub const TSS2: u16 = 0x60;
    pub const TSS16: u16 = 0x68;
    /// The local descriptor table, which is not loaded.
    pub const LDT: u16 = 0x70;
    /// The first descriptor that the case may use.
    pub const FREE: u16 = 0x80;
}
