//! Registers as a debugger sees them: which there are, how they are described, and where each is
//! kept.
//!
//! A [`Layout`] lists them in the order of their numbers. Those of [`Layout::general`] make up the
//! `g` packet; the others are fetched one by one when somebody asks for them. The layout is that of
//! 64-bit code at first and never changes by itself, whatever mode the processor is in: a client
//! that did not ask would take the packet for garbage.

mod access;
mod describe;

use std::fmt;
use std::str::FromStr;

use hindsight_regs::msr;

pub(super) use access::{RegisterError, code_base, linear_pc, read, write};

/// What kind of code the client thinks in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    /// 64-bit.
    #[default]
    X8664,
    /// 32-bit.
    I386,
    /// 16-bit.
    I8086,
}

impl FromStr for Mode {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "x86_64" | "x86-64" | "64" => Ok(Self::X8664),
            "i386" | "32" => Ok(Self::I386),
            "i8086" | "16" => Ok(Self::I8086),
            _ => Err(()),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::X8664 => "x86_64",
            Self::I386 => "i386",
            Self::I8086 => "i8086",
        })
    }
}

/// Where a register is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A general register, by its number in instructions.
    General(usize),
    /// The linear address of the next instruction.
    Pc,
    /// RIP without the base of CS.
    Ip,
    Flags,
    Selector(usize),
    SegmentBase(usize),
    SegmentLimit(usize),
    SegmentAccess(usize),
    /// Bytes of the XSAVE area: the component, the offset, the length.
    Xsave(u32, usize, usize),
    /// The x87 tag word in its full form.
    FpuTags,
    Control(u8),
    Efer,
    Xcr0,
    GdtrBase,
    GdtrLimit,
    IdtrBase,
    IdtrLimit,
    LdtrSelector,
    LdtrBase,
    TrSelector,
    TrBase,
    Debug(u8),
    KernelGsBase,
    Msr(u32),
}

/// One register.
#[derive(Clone, Debug)]
pub(super) struct Register {
    pub(super) name: String,
    /// Width as the client sees it.
    pub(super) bits: u32,
    /// The type in the target description.
    kind: &'static str,
    pub(super) place: Place,
    /// The feature of the target description that it belongs to.
    feature: &'static str,
}

impl Place {
    /// The MSR that the register is.
    pub(super) const fn msr(self) -> Option<u32> {
        match self {
            Self::Msr(index) => Some(index),
            Self::Efer => Some(msr::IA32_EFER),
            Self::SegmentBase(4) => Some(msr::IA32_FS_BASE),
            Self::SegmentBase(5) => Some(msr::IA32_GS_BASE),
            Self::KernelGsBase => Some(msr::IA32_KERNEL_GS_BASE),
            _ => None,
        }
    }
}

impl Register {
    /// Width in bytes.
    pub(super) const fn bytes(&self) -> usize {
        (self.bits / 8) as usize
    }
}

const CORE: &str = "org.gnu.gdb.i386.core";
const SSE: &str = "org.gnu.gdb.i386.sse";
const SEGMENTS: &str = "org.gnu.gdb.i386.segments";
const AVX: &str = "org.gnu.gdb.i386.avx";
const AVX512: &str = "org.gnu.gdb.i386.avx512";
const PKEYS: &str = "org.gnu.gdb.i386.pkeys";
const SYSTEM: &str = "org.hindsight.system";
const MSRS: &str = "org.hindsight.msr";

/// XSAVE components, as bits of XCR0. SDM Vol. 1, "XSAVE-Supported Features and State-Component
/// Bitmaps".
const X87_STATE: u32 = 0;
const SSE_STATE: u32 = 1;
const AVX_STATE: u32 = 2;
const OPMASK_STATE: u32 = 5;
const ZMM_HIGH_STATE: u32 = 6;
const HIGH_ZMM_STATE: u32 = 7;
const PKRU_STATE: u32 = 9;

/// All registers of a processor.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    mode: Mode,
    registers: Vec<Register>,
    general: usize,
}

/// What decides which registers there are.
#[derive(Clone, Debug, Default)]
pub(super) struct Available {
    /// XCR0 bits that the processor supports.
    pub(super) xcr0: u64,
    /// MSRs of [`msr_candidates`] that exist.
    pub(super) msrs: Vec<u32>,
}

/// MSRs that are shown as registers where they exist: the facilities of this processor that have to
/// do with debugging and monitoring.
pub(super) fn msr_candidates() -> Vec<(u32, String, &'static str)> {
    let mut all: Vec<(u32, String, &'static str)> = Vec::new();
    let mut one = |index, name: &str, kind| all.push((index, name.to_owned(), kind));
    one(msr::IA32_DEBUGCTL, "debugctl", "hs_debugctl");
    one(msr::MSR_LBR_SELECT, "lbr_select", "hs_lbr_select");
    one(msr::MSR_LASTBRANCH_TOS, "lbr_tos", "uint64");
    one(msr::MSR_LER_FROM_LIP, "ler_from", "code_ptr");
    one(msr::MSR_LER_TO_LIP, "ler_to", "code_ptr");
    one(msr::IA32_DS_AREA, "ds_area", "data_ptr");
    one(
        msr::IA32_PERF_GLOBAL_CTRL,
        "perf_global_ctrl",
        "hs_perf_global",
    );
    one(
        msr::IA32_PERF_GLOBAL_STATUS,
        "perf_global_status",
        "hs_perf_global",
    );
    one(msr::IA32_FIXED_CTR_CTRL, "fixed_ctr_ctrl", "uint64");
    one(msr::IA32_PEBS_ENABLE, "pebs_enable", "uint64");
    one(msr::IA32_PERF_CAPABILITIES, "perf_capabilities", "uint64");
    one(msr::IA32_TIME_STAMP_COUNTER, "tsc", "uint64");
    one(msr::IA32_TSC_ADJUST, "tsc_adjust", "int64");
    one(msr::IA32_TSC_AUX, "tsc_aux", "uint64");
    one(msr::IA32_TSC_DEADLINE, "tsc_deadline", "uint64");
    one(msr::IA32_APIC_BASE, "apic_base", "uint64");
    one(msr::IA32_MISC_ENABLE, "misc_enable", "uint64");
    let mut run = |first: u32, count: u32, name: &str, kind| {
        for i in 0..count {
            all.push((first + i, format!("{name}{i}"), kind));
        }
    };
    run(msr::IA32_PMC0, 8, "pmc", "uint64");
    run(msr::IA32_PERFEVTSEL0, 8, "perfevtsel", "hs_perfevtsel");
    run(msr::IA32_FIXED_CTR0, 3, "fixed_ctr", "uint64");
    run(msr::MSR_LASTBRANCH_0_FROM_IP, 32, "lbr_from", "uint64");
    run(msr::MSR_LASTBRANCH_0_TO_IP, 32, "lbr_to", "uint64");
    run(msr::MSR_LBR_INFO_0, 32, "lbr_info", "hs_lbr_info");
    all
}

const SEGMENT_NAMES: [&str; 6] = ["es", "cs", "ss", "ds", "fs", "gs"];

impl Layout {
    /// The registers of a processor in one mode.
    pub(super) fn new(mode: Mode, available: &Available) -> Self {
        let mut layout = Self {
            mode,
            registers: Vec::new(),
            general: 0,
        };
        layout.core();
        layout.sse();
        layout.general = layout.registers.len();
        if mode == Mode::X8664 {
            layout.add(SEGMENTS, "fs_base", 64, "int", Place::SegmentBase(4));
            layout.add(SEGMENTS, "gs_base", 64, "int", Place::SegmentBase(5));
        }
        layout.vectors(available.xcr0);
        layout.system();
        for (index, name, kind) in msr_candidates() {
            if available.msrs.contains(&index) {
                layout.add(MSRS, &name, 64, kind, Place::Msr(index));
            }
        }
        layout
    }

    /// Those of the `g` packet.
    pub(super) fn general(&self) -> &[Register] {
        self.registers.get(..self.general).unwrap_or(&[])
    }

    /// All, in the order of their numbers.
    pub(super) fn all(&self) -> &[Register] {
        &self.registers
    }

    /// The register with this name.
    pub(super) fn find(&self, name: &str) -> Option<&Register> {
        self.registers.iter().find(|register| register.name == name)
    }

    /// The number of the register in this place.
    pub(super) fn number(&self, place: Place) -> Option<usize> {
        self.registers
            .iter()
            .position(|register| register.place == place)
    }

    fn add(
        &mut self,
        feature: &'static str,
        name: &str,
        bits: u32,
        kind: &'static str,
        place: Place,
    ) {
        self.registers.push(Register {
            name: name.to_owned(),
            bits,
            kind,
            place,
            feature,
        });
    }

    fn core(&mut self) {
        // gdb's order of the general registers, which is not that of their numbers.
        let wide = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp"];
        let numbers = [0, 3, 1, 2, 6, 7, 5, 4];
        let narrow = ["eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi"];
        if self.mode == Mode::X8664 {
            for (name, number) in wide.into_iter().zip(numbers) {
                let kind = if matches!(number, 4 | 5) {
                    "data_ptr"
                } else {
                    "int64"
                };
                self.add(CORE, name, 64, kind, Place::General(number));
            }
            for number in 8..16 {
                self.add(
                    CORE,
                    &format!("r{number}"),
                    64,
                    "int64",
                    Place::General(number),
                );
            }
            self.add(CORE, "rip", 64, "code_ptr", Place::Pc);
        } else {
            for (number, name) in narrow.into_iter().enumerate() {
                let kind = if matches!(number, 4 | 5) {
                    "data_ptr"
                } else {
                    "int32"
                };
                self.add(CORE, name, 32, kind, Place::General(number));
            }
            self.add(CORE, "eip", 32, "code_ptr", Place::Pc);
        }
        self.add(CORE, "eflags", 32, "i386_eflags", Place::Flags);
        for index in [1, 2, 3, 0, 4, 5] {
            self.add(
                CORE,
                SEGMENT_NAMES[index],
                32,
                "int32",
                Place::Selector(index),
            );
        }
        for i in 0..8 {
            let place = Place::Xsave(X87_STATE, 32 + 16 * i, 10);
            self.add(CORE, &format!("st{i}"), 80, "i387_ext", place);
        }
        // FCW, FSW, the tags, and the pointers of the last instruction and its operand.
        for (name, place) in [
            ("fctrl", Place::Xsave(X87_STATE, 0, 2)),
            ("fstat", Place::Xsave(X87_STATE, 2, 2)),
            ("ftag", Place::FpuTags),
            ("fiseg", Place::Xsave(X87_STATE, 12, 2)),
            ("fioff", Place::Xsave(X87_STATE, 8, 4)),
            ("foseg", Place::Xsave(X87_STATE, 20, 2)),
            ("fooff", Place::Xsave(X87_STATE, 16, 4)),
            ("fop", Place::Xsave(X87_STATE, 6, 2)),
        ] {
            self.add(CORE, name, 32, "int", place);
        }
    }

    fn vector_count(&self) -> usize {
        if self.mode == Mode::X8664 { 16 } else { 8 }
    }

    fn sse(&mut self) {
        for i in 0..self.vector_count() {
            let place = Place::Xsave(SSE_STATE, 160 + 16 * i, 16);
            self.add(SSE, &format!("xmm{i}"), 128, "vec128", place);
        }
        let place = Place::Xsave(SSE_STATE, 24, 4);
        self.add(SSE, "mxcsr", 32, "i386_mxcsr", place);
    }

    /// AVX, AVX-512 and protection keys, at the offsets that [`hindsight_cpu::state::XsaveArea`]
    /// has.
    fn vectors(&mut self, xcr0: u64) {
        let has = |component: u32| xcr0 >> component & 1 != 0;
        let count = self.vector_count();
        if has(AVX_STATE) {
            for i in 0..count {
                let place = Place::Xsave(AVX_STATE, 576 + 16 * i, 16);
                self.add(AVX, &format!("ymm{i}h"), 128, "uint128", place);
            }
        }
        if has(AVX_STATE) && has(OPMASK_STATE) && has(ZMM_HIGH_STATE) && has(HIGH_ZMM_STATE) {
            for i in 0..8 {
                let place = Place::Xsave(OPMASK_STATE, 1088 + 8 * i, 8);
                self.add(AVX512, &format!("k{i}"), 64, "uint64", place);
            }
            for i in 0..count {
                let place = Place::Xsave(ZMM_HIGH_STATE, 1152 + 32 * i, 32);
                self.add(AVX512, &format!("zmm{i}h"), 256, "v2ui128", place);
            }
            if self.mode == Mode::X8664 {
                let high = |i: usize, at| 1664 + 64 * i + at;
                for (prefix, suffix, bits, kind, at, len) in [
                    ("xmm", "", 128, "vec128", 0, 16),
                    ("ymm", "h", 128, "uint128", 16, 16),
                    ("zmm", "h", 256, "v2ui128", 32, 32),
                ] {
                    for i in 0..16 {
                        let place = Place::Xsave(HIGH_ZMM_STATE, high(i, at), len);
                        let name = format!("{prefix}{}{suffix}", i + 16);
                        self.add(AVX512, &name, bits, kind, place);
                    }
                }
            }
        }
        if has(PKRU_STATE) {
            let place = Place::Xsave(PKRU_STATE, 2688, 4);
            self.add(PKEYS, "pkru", 32, "uint32", place);
        }
    }

    fn system(&mut self) {
        self.add(SYSTEM, "ip", 64, "uint64", Place::Ip);
        self.add(SYSTEM, "k_gs_base", 64, "uint64", Place::KernelGsBase);
        for (number, kind) in [
            (0, "hs_cr0"),
            (2, "uint64"),
            (3, "hs_cr3"),
            (4, "hs_cr4"),
            (8, "uint64"),
        ] {
            self.add(
                SYSTEM,
                &format!("cr{number}"),
                64,
                kind,
                Place::Control(number),
            );
        }
        self.add(SYSTEM, "efer", 64, "hs_efer", Place::Efer);
        self.add(SYSTEM, "xcr0", 64, "uint64", Place::Xcr0);
        for number in [0, 1, 2, 3, 6, 7] {
            let kind = match number {
                6 => "hs_dr6",
                7 => "hs_dr7",
                _ => "uint64",
            };
            self.add(
                SYSTEM,
                &format!("dr{number}"),
                64,
                kind,
                Place::Debug(number),
            );
        }
        for (name, bits, place) in [
            ("gdtr_base", 64, Place::GdtrBase),
            ("gdtr_limit", 16, Place::GdtrLimit),
            ("idtr_base", 64, Place::IdtrBase),
            ("idtr_limit", 16, Place::IdtrLimit),
            ("ldtr", 16, Place::LdtrSelector),
            ("ldtr_base", 64, Place::LdtrBase),
            ("tr", 16, Place::TrSelector),
            ("tr_base", 64, Place::TrBase),
        ] {
            let kind = if bits == 64 { "uint64" } else { "uint16" };
            self.add(SYSTEM, name, bits, kind, place);
        }
        for (i, name) in SEGMENT_NAMES.into_iter().enumerate() {
            let shown = self.find(&format!("{name}_base")).is_some();
            if !shown {
                let place = Place::SegmentBase(i);
                self.add(SYSTEM, &format!("{name}_base"), 64, "uint64", place);
            }
            let place = Place::SegmentLimit(i);
            self.add(SYSTEM, &format!("{name}_limit"), 32, "uint32", place);
            let place = Place::SegmentAccess(i);
            self.add(SYSTEM, &format!("{name}_access"), 16, "hs_access", place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything() -> Available {
        Available {
            xcr0: 0x2e7,
            msrs: msr_candidates().iter().map(|row| row.0).collect(),
        }
    }

    #[test]
    fn numbers_of_the_core_are_those_that_gdb_expects() {
        let layout = Layout::new(Mode::X8664, &everything());
        for (number, name) in [
            (0, "rax"),
            (1, "rbx"),
            (4, "rsi"),
            (6, "rbp"),
            (7, "rsp"),
            (16, "rip"),
            (17, "eflags"),
            (18, "cs"),
            (23, "gs"),
            (24, "st0"),
            (32, "fctrl"),
            (40, "xmm0"),
            (56, "mxcsr"),
            (57, "fs_base"),
        ] {
            assert_eq!(layout.all()[number].name, name);
        }
        assert_eq!(layout.general().len(), 57);
        let bytes: usize = layout.general().iter().map(Register::bytes).sum();
        assert_eq!(bytes, 17 * 8 + 7 * 4 + 8 * 10 + 8 * 4 + 16 * 16 + 4);
    }

    #[test]
    fn names_are_unique_in_every_mode() {
        for mode in [Mode::X8664, Mode::I386, Mode::I8086] {
            let layout = Layout::new(mode, &everything());
            let mut names: Vec<_> = layout.all().iter().map(|r| &r.name).collect();
            names.sort();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count, "{mode}");
        }
    }
}
