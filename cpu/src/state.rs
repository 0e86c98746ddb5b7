//! The architectural state of one virtual processor, as plain data.
//!
//! All engines exchange exactly this: KVM's get and set calls fill and read it, the interpreter
//! keeps it live, snapshots store it. State that a model of this crate owns (the MSRs of
//! [`crate::msr`]) is not repeated here.

use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::dr::{Dr6, Dr7};
use hindsight_regs::rflags::Rflags;

use crate::debug::DebugRegisters;
use crate::smm::Smm;
pub use crate::state_check::StateError;

/// Index of a general register in [`CpuState::gpr`]: the number that instructions encode.
///
/// R8 to R15 have the indices 8 to 15.
pub mod gpr {
    /// RAX.
    pub const RAX: usize = 0;
    /// RCX.
    pub const RCX: usize = 1;
    /// RDX.
    pub const RDX: usize = 2;
    /// RBX.
    pub const RBX: usize = 3;
    /// RSP.
    pub const RSP: usize = 4;
    /// RBP.
    pub const RBP: usize = 5;
    /// RSI.
    pub const RSI: usize = 6;
    /// RDI.
    pub const RDI: usize = 7;
}

/// Index of a segment register in [`CpuState::seg`]: the number that instructions encode.
pub mod seg {
    /// ES.
    pub const ES: usize = 0;
    /// CS.
    pub const CS: usize = 1;
    /// SS.
    pub const SS: usize = 2;
    /// DS.
    pub const DS: usize = 3;
    /// FS.
    pub const FS: usize = 4;
    /// GS.
    pub const GS: usize = 5;
}

/// A segment register with its hidden part. SDM Vol. 3A, "Segment Registers".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
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
    /// A null selector was loaded, or the segment was never loaded: an access through it faults.
    pub unusable: bool,
}

impl Segment {
    /// Descriptor privilege level, 0 to 3.
    pub const fn dpl(self) -> u8 {
        ((self.access >> 5) & 3) as u8
    }

    /// Whether the L bit is set: a 64-bit code segment.
    pub const fn long(self) -> bool {
        self.access & (1 << 13) != 0
    }

    /// Whether the D/B bit is set: a default size of 32 bits.
    pub const fn default_big(self) -> bool {
        self.access & (1 << 14) != 0
    }
}

/// Whether bits 63 to 47 of a linear address are all equal. SDM Vol. 1, "Canonical Addressing".
#[inline]
pub const fn canonical(linear: u64) -> bool {
    linear.cast_signed() << 16 >> 16 == linear.cast_signed()
}

/// GDTR or IDTR. SDM Vol. 3A, "Memory-Management Registers".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DescriptorTable {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes.
    pub limit: u16,
}

/// The MSRs that every engine holds as part of the processor state and that no model owns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ProcessorMsrs {
    /// IA32_STAR.
    pub star: u64,
    /// IA32_LSTAR.
    pub lstar: u64,
    /// IA32_CSTAR.
    pub cstar: u64,
    /// IA32_FMASK. The MSR table owns the register; an engine copies its value here.
    pub fmask: u64,
    /// IA32_KERNEL_GS_BASE.
    pub kernel_gs_base: u64,
    /// IA32_SYSENTER_CS.
    pub sysenter_cs: u64,
    /// IA32_SYSENTER_ESP.
    pub sysenter_esp: u64,
    /// IA32_SYSENTER_EIP.
    pub sysenter_eip: u64,
    /// IA32_PAT.
    pub pat: u64,
}

/// An MSR that is part of [`CpuState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessorMsr {
    /// IA32_EFER: [`CpuState::efer`].
    Efer,
    /// IA32_FS_BASE: the base of FS.
    FsBase,
    /// IA32_GS_BASE: the base of GS.
    GsBase,
    /// IA32_STAR.
    Star,
    /// IA32_LSTAR.
    Lstar,
    /// IA32_CSTAR.
    Cstar,
    /// IA32_KERNEL_GS_BASE.
    KernelGsBase,
    /// IA32_SYSENTER_CS.
    SysenterCs,
    /// IA32_SYSENTER_ESP.
    SysenterEsp,
    /// IA32_SYSENTER_EIP.
    SysenterEip,
    /// IA32_PAT.
    Pat,
}

/// An exception that waits for delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PendingException {
    /// Vector, 0 to 31, but not 2.
    pub vector: u8,
    /// Error code, for the vectors that push one.
    pub error_code: Option<u32>,
    /// New CR2 for #PF; the bits to merge into DR6 for #DB.
    pub payload: Option<u64>,
}

/// Whether the processor executes instructions, and what it waits for if not.
///
/// SDM Vol. 3C, "Guest Non-Register State" (activity state).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Activity {
    /// The vCPU executes instructions.
    #[default]
    Running,
    /// After HLT: it waits for an interrupt, NMI, INIT or SMI.
    Halted,
    /// After INIT on an application processor: it waits for a start-up IPI.
    WaitForSipi,
    /// After a triple fault: it waits for INIT or RESET.
    Shutdown,
}

/// Events that are pending, and the conditions that block events, at an instruction boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PendingEvents {
    /// An exception that must be delivered before the next instruction.
    pub exception: Option<PendingException>,
    /// Vector of an external interrupt that was acknowledged but not delivered yet.
    pub interrupt: Option<u8>,
    /// MOV SS or POP SS blocks interrupts and #DB until the next instruction completes.
    pub mov_ss_shadow: bool,
    /// STI blocks interrupts until the next instruction completes.
    pub sti_shadow: bool,
    /// An NMI is pending.
    pub nmi_pending: bool,
    /// NMIs are blocked until the next IRET.
    pub nmi_blocked: bool,
    /// DR6 bits B3:0 of breakpoints whose #DB the MOV SS shadow defers.
    pub deferred_db: u64,
}

/// Bytes of an [`XsaveArea`]: legacy region, header, AVX and AVX-512 state, PKRU.
///
/// The offsets are those of CPUID leaf 0DH on Intel processors with these components.
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

#[cfg(feature = "serde")]
impl serde::Serialize for XsaveArea {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.as_slice().serialize(serializer)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for XsaveArea {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Vec::<u8>::deserialize(deserializer)?;
        let len = bytes.len();
        let bytes = bytes
            .try_into()
            .map_err(|_| serde::de::Error::invalid_length(len, &"an XSAVE area of 2696 bytes"))?;
        Ok(Self(bytes))
    }
}

/// The architectural state of one virtual processor, without what the models own.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CpuState {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15; see [`gpr`].
    pub gpr: [u64; 16],
    /// Instruction pointer.
    pub rip: u64,
    /// RFLAGS: [`hindsight_regs::rflags::Rflags`].
    pub rflags: u64,
    /// ES, CS, SS, DS, FS, GS; see [`seg`]. FS.base and GS.base are the MSRs of these names.
    pub seg: [Segment; 6],
    /// Local descriptor table register.
    pub ldtr: Segment,
    /// Task register.
    pub tr: Segment,
    /// Global descriptor table register.
    pub gdtr: DescriptorTable,
    /// Interrupt descriptor table register.
    pub idtr: DescriptorTable,
    /// CR0: [`hindsight_regs::cr::Cr0`].
    pub cr0: u64,
    /// CR2: linear address of the last page fault.
    pub cr2: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4: [`hindsight_regs::cr::Cr4`].
    pub cr4: u64,
    /// The task priority, bits `[7:4]` of the local APIC's TPR.
    pub cr8: u64,
    /// IA32_EFER: [`hindsight_regs::cr::Efer`].
    pub efer: u64,
    /// XCR0.
    pub xcr0: u64,
    /// The page-directory-pointer entries loaded in PAE mode.
    pub pdptr: [u64; 4],
    /// DR0 to DR3.
    pub dr: [u64; 4],
    /// DR6, with its fixed bits.
    pub dr6: u64,
    /// DR7, with its fixed bits.
    pub dr7: u64,
    /// MSRs that no model owns.
    pub msrs: ProcessorMsrs,
    /// x87, vector and protection-key registers.
    pub xsave: XsaveArea,
    /// Pending events and interrupt shadows.
    pub events: PendingEvents,
    /// Whether it executes instructions.
    pub activity: Activity,
    /// System-management mode.
    pub smm: Smm,
}

/// IA32_PAT after RESET. SDM Vol. 3A, "Page Attribute Table (PAT)".
pub const PAT_RESET: u64 = 0x0007_0406_0007_0406;

/// CR0 after RESET: caches disabled, real-address mode.
const CR0_RESET: u64 = Cr0::CD.union(Cr0::NW).union(Cr0::ET).bits();
/// The bits of CR0 that INIT keeps.
const CR0_KEPT_BY_INIT: u64 = Cr0::CD.union(Cr0::NW).bits();

/// Present, DPL 0, 64-bit execute/read, accessed, limit in pages.
const ACCESS_FLAT_CODE64: u16 = 0xa09b;
/// Present, DPL 0, 32-bit read/write, accessed, limit in pages.
const ACCESS_FLAT_DATA: u16 = 0xc093;

impl CpuState {
    /// The debug registers in the form of their model.
    pub fn debug(&self) -> DebugRegisters {
        DebugRegisters {
            addresses: self.dr,
            status: self.dr6,
            control: self.dr7,
        }
    }

    /// Sets the debug registers from their model.
    pub fn set_debug(&mut self, registers: &DebugRegisters) {
        self.dr = registers.addresses;
        self.dr6 = registers.status;
        self.dr7 = registers.control;
    }

    /// The state after RESET. SDM Vol. 3A, "Processor State After Reset".
    ///
    /// The owner of the CPUID table sets RDX, which holds the processor's signature.
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
            rflags: Rflags::FIXED.bits(),
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
            cr0: CR0_RESET,
            cr2: 0,
            cr3: 0,
            cr4: 0,
            cr8: 0,
            efer: 0,
            xcr0: 1,
            pdptr: [0; 4],
            dr: [0; 4],
            dr6: Dr6::RESET,
            dr7: Dr7::RESET.0,
            msrs: ProcessorMsrs {
                pat: PAT_RESET,
                ..ProcessorMsrs::default()
            },
            xsave: XsaveArea::default(),
            events: PendingEvents::default(),
            activity: Activity::Running,
            smm: Smm::default(),
        }
    }

    /// A processor in 64-bit mode at CPL 0, with flat segments and interrupts disabled.
    ///
    /// `cr3` is the physical address of page tables that map the code at `rip` and the stack, whose
    /// top is `rsp`. There are no descriptor tables in memory: until the guest loads its own, an
    /// exception ends in a triple fault. SDM Vol. 3A, "Initializing IA-32e Mode".
    pub fn long_mode(cr3: u64, rip: u64, rsp: u64) -> Self {
        let data = Segment {
            selector: 0x10,
            base: 0,
            limit: u32::MAX,
            access: ACCESS_FLAT_DATA,
            unusable: false,
        };
        let mut state = Self::reset();
        state.seg = [data; 6];
        state.seg[seg::CS] = Segment {
            selector: 0x8,
            access: ACCESS_FLAT_CODE64,
            ..data
        };
        state.ldtr.unusable = true;
        (state.gdtr.limit, state.idtr.limit) = (0, 0);
        state.cr0 = Cr0::PE.union(Cr0::ET).union(Cr0::PG).bits();
        state.cr3 = cr3;
        state.cr4 = Cr4::PAE.bits();
        state.efer = Efer::LME.union(Efer::LMA).bits();
        state.rip = rip;
        state.gpr[gpr::RSP] = rsp;
        state
    }

    /// Applies INIT. SDM Vol. 3A, "Processor State After Reset".
    ///
    /// CR0.CD and CR0.NW, the MSRs, the XSAVE state and SMBASE stay; all else is as after RESET.
    pub fn init(&mut self) {
        let old = self.clone();
        *self = Self::reset();
        self.cr0 = Cr0::ET.bits() | (old.cr0 & CR0_KEPT_BY_INIT);
        self.msrs = old.msrs;
        self.xsave = old.xsave;
        self.xcr0 = old.xcr0;
        self.smm.base = old.smm.base;
    }

    /// Applies a start-up IPI to a processor that waits for one.
    ///
    /// `vector` is the number of the 4-KiB page at which the processor starts. SDM Vol. 3A, "MP
    /// Initialization Protocol Algorithm for MP Systems".
    pub fn start_up(&mut self, vector: u8) {
        let cs = &mut self.seg[seg::CS];
        (cs.selector, cs.base) = (u16::from(vector) << 8, u64::from(vector) << 12);
        self.rip = 0;
        self.activity = Activity::Running;
    }

    /// Current privilege level, 0 to 3: the DPL of SS.
    pub const fn cpl(&self) -> u8 {
        self.seg[seg::SS].dpl()
    }

    /// Whether IA-32e mode is active: IA32_EFER.LMA.
    pub const fn is_long_mode(&self) -> bool {
        self.efer & Efer::LMA.bits() != 0
    }

    /// Whether paging is enabled: CR0.PG.
    pub const fn has_paging(&self) -> bool {
        self.cr0 & Cr0::PG.bits() != 0
    }

    /// Whether PAE paging is used, whose page-directory pointers the processor keeps.
    ///
    /// SDM Vol. 3A, "PAE Paging": CR0.PG and CR4.PAE are set, and IA32_EFER.LMA is clear.
    pub const fn has_pae_paging(&self) -> bool {
        self.has_paging() && self.cr4 & Cr4::PAE.bits() != 0 && !self.is_long_mode()
    }

    /// Value of an MSR that is part of this state.
    pub const fn msr(&self, msr: ProcessorMsr) -> u64 {
        match msr {
            ProcessorMsr::Efer => self.efer,
            ProcessorMsr::FsBase => self.seg[seg::FS].base,
            ProcessorMsr::GsBase => self.seg[seg::GS].base,
            ProcessorMsr::Star => self.msrs.star,
            ProcessorMsr::Lstar => self.msrs.lstar,
            ProcessorMsr::Cstar => self.msrs.cstar,
            ProcessorMsr::KernelGsBase => self.msrs.kernel_gs_base,
            ProcessorMsr::SysenterCs => self.msrs.sysenter_cs,
            ProcessorMsr::SysenterEsp => self.msrs.sysenter_esp,
            ProcessorMsr::SysenterEip => self.msrs.sysenter_eip,
            ProcessorMsr::Pat => self.msrs.pat,
        }
    }

    /// The field of an MSR that is part of this state. The caller checks the value.
    pub const fn msr_mut(&mut self, msr: ProcessorMsr) -> &mut u64 {
        match msr {
            ProcessorMsr::Efer => &mut self.efer,
            ProcessorMsr::FsBase => &mut self.seg[seg::FS].base,
            ProcessorMsr::GsBase => &mut self.seg[seg::GS].base,
            ProcessorMsr::Star => &mut self.msrs.star,
            ProcessorMsr::Lstar => &mut self.msrs.lstar,
            ProcessorMsr::Cstar => &mut self.msrs.cstar,
            ProcessorMsr::KernelGsBase => &mut self.msrs.kernel_gs_base,
            ProcessorMsr::SysenterCs => &mut self.msrs.sysenter_cs,
            ProcessorMsr::SysenterEsp => &mut self.msrs.sysenter_esp,
            ProcessorMsr::SysenterEip => &mut self.msrs.sysenter_eip,
            ProcessorMsr::Pat => &mut self.msrs.pat,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "serde")]
    #[test]
    fn state_after_reset_survives_serialization() {
        let state = CpuState::reset();
        let json = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<CpuState>(&json).unwrap(), state);
    }

    #[test]
    fn long_mode_state_passes_the_check_of_restored_states() {
        let state = CpuState::long_mode(0x1000, 0x10_0000, 0x8000);
        assert_eq!(state.check(), Ok(()));
        assert!(state.is_long_mode() && state.has_paging() && state.seg[seg::CS].long());
        assert_eq!((state.cpl(), state.rip), (0, 0x10_0000));
    }

    #[test]
    fn start_up_begins_at_the_page_of_its_vector() {
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
