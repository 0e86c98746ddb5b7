//! The architectural state of one virtual processor, as plain data.
//!
//! Both ways of running exchange exactly this: KVM's get and set calls fill and read it, the
//! interpreter keeps it live, snapshots store it. State that a model of this crate owns (the MSRs
//! of [`crate::msr`]) is not repeated here; what KVM holds natively is.

use serde::{Deserialize, Serialize};

use crate::debug::Registers;
use crate::smm::Smm;
pub use crate::state_check::StateError;

/// Index of a general register in [`CpuState::gpr`]: the number that instructions encode.
pub mod gpr {
    #![allow(missing_docs, clippy::allow_attributes, reason = "the names say all")]
    pub const RAX: usize = 0;
    pub const RCX: usize = 1;
    pub const RDX: usize = 2;
    pub const RBX: usize = 3;
    pub const RSP: usize = 4;
    pub const RBP: usize = 5;
    pub const RSI: usize = 6;
    pub const RDI: usize = 7;
}

/// Index of a segment register in [`CpuState::seg`]: the number that instructions encode.
pub mod seg {
    #![allow(missing_docs, clippy::allow_attributes, reason = "the names say all")]
    pub const ES: usize = 0;
    pub const CS: usize = 1;
    pub const SS: usize = 2;
    pub const DS: usize = 3;
    pub const FS: usize = 4;
    pub const GS: usize = 5;
}

/// A segment register with its hidden part. SDM Vol. 3A, "Segment Registers".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The visible selector.
    pub selector: u16,
    /// Base linear address.
    pub base: u64,
    /// Limit in bytes, already scaled by the granularity bit.
    pub limit: u32,
    /// Access rights as in the second doubleword of a descriptor, shifted right by 8: type `[3:0]`,
    /// S `[4]`, DPL `[6:5]`, P `[7]`, AVL `[12]`, L `[13]`, D/B `[14]`, G `[15]`; other bits 0.
    pub access: u16,
    /// A null selector was loaded, or the segment was never loaded: using it faults.
    pub unusable: bool,
}

impl Segment {
    /// Descriptor privilege level, 0 to 3.
    pub const fn dpl(self) -> u8 {
        ((self.access >> 5) & 3) as u8
    }

    /// The L bit: 64-bit code segment.
    pub const fn long(self) -> bool {
        self.access & (1 << 13) != 0
    }

    /// The D/B bit: 32-bit default size.
    pub const fn default_big(self) -> bool {
        self.access & (1 << 14) != 0
    }
}

/// Bits 63 to 47 of a linear address are all equal. SDM Vol. 1, "Canonical Addressing".
#[inline]
pub const fn canonical(linear: u64) -> bool {
    linear.cast_signed() << 16 >> 16 == linear.cast_signed()
}

/// GDTR or IDTR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescriptorTable {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes.
    pub limit: u16,
}

/// The MSRs that the processor uses natively in both ways of running and that no model owns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the manual's names")]
pub struct NativeMsrs {
    pub star: u64,
    pub lstar: u64,
    pub cstar: u64,
    pub fmask: u64,
    pub kernel_gs_base: u64,
    pub sysenter_cs: u64,
    pub sysenter_esp: u64,
    pub sysenter_eip: u64,
    pub pat: u64,
}

/// An exception that waits for delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exception {
    /// Vector 0 to 31.
    pub vector: u8,
    /// Error code, for the vectors that push one.
    pub error_code: Option<u32>,
    /// New CR2 for #PF; the bits to merge into DR6 for #DB.
    pub payload: Option<u64>,
}

/// What the processor does between instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    /// Executes instructions.
    #[default]
    Running,
    /// HLT: waits for an interrupt, NMI, INIT or SMI.
    Halted,
    /// After INIT on an application processor: waits for a start-up IPI.
    WaitForSipi,
    /// A triple fault: waits for INIT or RESET.
    Shutdown,
}

/// Events that are under way at an instruction boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// An exception that must be delivered before the next instruction.
    pub exception: Option<Exception>,
    /// An external interrupt whose vector was already acknowledged.
    pub interrupt: Option<u8>,
    /// The shadow of MOV SS or POP SS covers the next instruction.
    pub mov_ss_shadow: bool,
    /// The shadow of STI covers the next instruction.
    pub sti_shadow: bool,
    /// An NMI waits.
    pub nmi_pending: bool,
    /// NMIs are blocked until the next IRET.
    pub nmi_blocked: bool,
    /// DR6 bits of data and I/O breakpoints deferred by a MOV SS shadow.
    pub deferred_db: u64,
}

/// Bytes of the XSAVE area kept: legacy region, header, AVX and AVX-512 state, PKRU (standard
/// format, offsets as CPUID leaf 0DH gives on Intel processors with these components).
pub const XSAVE_LEN: usize = 0xa88;

/// The x87, SSE, AVX, AVX-512 and PKRU state in the standard (non-compacted) XSAVE format.
#[derive(Clone, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct XsaveArea(pub [u8; XSAVE_LEN]);

impl Default for XsaveArea {
    /// The state after RESET: FCW 37FH (as FNINIT leaves it), MXCSR 1F80H, all else zero.
    fn default() -> Self {
        let mut area = Self([0; XSAVE_LEN]);
        area.0[0..2].copy_from_slice(&0x37f_u16.to_le_bytes());
        area.0[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
        area
    }
}

impl core::fmt::Debug for XsaveArea {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("XsaveArea").finish_non_exhaustive()
    }
}

impl Serialize for XsaveArea {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.as_slice().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for XsaveArea {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Vec::<u8>::deserialize(deserializer)?;
        let len = bytes.len();
        let bytes = bytes
            .try_into()
            .map_err(|_| serde::de::Error::invalid_length(len, &"an XSAVE area of 2696 bytes"))?;
        Ok(Self(bytes))
    }
}

/// The whole architectural state of one virtual processor, less what the models own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the manual's names")]
pub struct CpuState {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15; see [`gpr`].
    pub gpr: [u64; 16],
    pub rip: u64,
    pub rflags: u64,
    /// ES, CS, SS, DS, FS, GS; see [`seg`]. FS.base and GS.base are the MSRs of these names.
    pub seg: [Segment; 6],
    pub ldtr: Segment,
    pub tr: Segment,
    pub gdtr: DescriptorTable,
    pub idtr: DescriptorTable,
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    /// The task priority, bits `[7:4]` of the local APIC's TPR.
    pub cr8: u64,
    pub efer: u64,
    pub xcr0: u64,
    /// The page-directory-pointer entries loaded in PAE mode.
    pub pdptr: [u64; 4],
    /// DR0 to DR3.
    pub dr: [u64; 4],
    pub dr6: u64,
    pub dr7: u64,
    pub msrs: NativeMsrs,
    pub xsave: XsaveArea,
    pub events: Events,
    pub activity: Activity,
    pub smm: Smm,
}

/// IA32_PAT after RESET. SDM Vol. 3A, "Page Attribute Table (PAT)".
pub const PAT_RESET: u64 = 0x0007_0406_0007_0406;

impl CpuState {
    /// The debug registers, as their model has them.
    pub fn debug(&self) -> Registers {
        Registers {
            addresses: self.dr,
            status: self.dr6,
            control: self.dr7,
        }
    }

    /// Takes the debug registers back from their model.
    pub fn set_debug(&mut self, registers: &Registers) {
        self.dr = registers.addresses;
        self.dr6 = registers.status;
        self.dr7 = registers.control;
    }

    /// The state after RESET. SDM Vol. 3A, "Processor State After Reset". `rdx` of a Skylake
    /// server (its CPUID signature) is put there by the owner of the CPUID table.
    pub fn reset() -> Self {
        let data = Segment {
            limit: 0xffff,
            access: 0x93,
            ..Segment::default()
        };
        let mut seg = [data; 6];
        seg[seg::CS] = Segment {
            selector: 0xf000,
            base: 0xffff_0000,
            limit: 0xffff,
            access: 0x9b,
            unusable: false,
        };
        Self {
            gpr: [0; 16],
            rip: 0xfff0,
            rflags: 2,
            seg,
            ldtr: Segment {
                limit: 0xffff,
                access: 0x82,
                ..Segment::default()
            },
            tr: Segment {
                limit: 0xffff,
                access: 0x8b,
                ..Segment::default()
            },
            gdtr: DescriptorTable {
                base: 0,
                limit: 0xffff,
            },
            idtr: DescriptorTable {
                base: 0,
                limit: 0xffff,
            },
            cr0: 0x6000_0010,
            cr2: 0,
            cr3: 0,
            cr4: 0,
            cr8: 0,
            efer: 0,
            xcr0: 1,
            pdptr: [0; 4],
            dr: [0; 4],
            dr6: 0xffff_0ff0,
            dr7: 0x400,
            msrs: NativeMsrs {
                pat: PAT_RESET,
                ..NativeMsrs::default()
            },
            xsave: XsaveArea::default(),
            events: Events::default(),
            activity: Activity::Running,
            smm: Smm::default(),
        }
    }

    /// Applies INIT: as RESET, but what INIT keeps is kept (CR2 is cleared; the XSAVE state, CR0.CD
    /// and CR0.NW, and the MSRs stay). SDM Vol. 3A, "Processor State After Reset", table of INIT.
    pub fn init(&mut self) {
        let old = self.clone();
        *self = Self::reset();
        self.cr0 = 0x10 | (old.cr0 & 0x6000_0000);
        self.msrs = old.msrs;
        self.xsave = old.xsave;
        self.xcr0 = old.xcr0;
        self.smm.base = old.smm.base;
    }

    /// Applies a start-up IPI to a processor that waits for one. SDM Vol. 3A, "MP Initialization
    /// Protocol Algorithm for MP Systems".
    pub fn start_up(&mut self, vector: u8) {
        let cs = &mut self.seg[seg::CS];
        (cs.selector, cs.base) = (u16::from(vector) << 8, u64::from(vector) << 12);
        self.rip = 0;
        self.activity = Activity::Running;
    }

    /// Current privilege level: the DPL of SS.
    pub const fn cpl(&self) -> u8 {
        self.seg[seg::SS].dpl()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_after_reset_survives_serialization() {
        let state = CpuState::reset();
        let json = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<CpuState>(&json).unwrap(), state);
    }

    #[test]
    fn start_up_enters_the_page_of_its_vector() {
        let mut state = CpuState::reset();
        state.activity = Activity::WaitForSipi;
        state.start_up(0x9a);
        let cs = state.seg[seg::CS];
        assert_eq!((cs.selector, cs.base, state.rip), (0x9a00, 0x9a000, 0));
        assert_eq!(state.activity, Activity::Running);
    }

    #[test]
    fn init_keeps_msrs_and_clears_debug_registers() {
        let mut state = CpuState::reset();
        state.msrs.lstar = 0x1234;
        state.dr[2] = 7;
        state.dr7 = 0x401;
        state.init();
        assert_eq!(state.msrs.lstar, 0x1234);
        assert_eq!(
            (state.dr, state.dr6, state.dr7),
            ([0; 4], 0xffff_0ff0, 0x400)
        );
    }
}
