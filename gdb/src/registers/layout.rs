//! Which registers a vCPU has for the client, with their numbers and names.

use hindsight_cpu::state::seg;

use super::code_model::CodeModel;
use super::info::{AvailableRegisters, RegisterInfo, feature};
use super::location::RegisterLocation;
use super::msrs::msr_registers;
use super::xsave;

/// All registers of a vCPU, in the order of their numbers.
#[derive(Clone, Debug)]
pub struct RegisterLayout {
    model: CodeModel,
    registers: Vec<RegisterInfo>,
    general: usize,
}

const SEGMENT_NAMES: [&str; 6] = ["es", "cs", "ss", "ds", "fs", "gs"];

impl RegisterLayout {
    /// The registers for one kind of code.
    pub fn new(model: CodeModel, available: &AvailableRegisters) -> Self {
        let mut layout = Self {
            model,
            registers: Vec::new(),
            general: 0,
        };
        layout.add_general();
        layout.add_segments();
        layout.add_x87();
        layout.add_sse();
        layout.general = layout.registers.len();
        if model == CodeModel::Code64 {
            for (name, i) in [("fs_base", seg::FS), ("gs_base", seg::GS)] {
                let location = RegisterLocation::SegmentBase(i);
                layout.add(feature::SEGMENTS, name, (64, "int"), location);
            }
        }
        layout.add_vectors(available.xcr0);
        if model == CodeModel::Code64 {
            let location = RegisterLocation::RestartedSystemCall;
            layout.add(feature::LINUX, "orig_rax", (64, "int"), location);
        }
        layout.add_system();
        layout.add_descriptor_caches();
        for row in msr_registers() {
            if available.msrs.contains(&row.index) {
                let location = RegisterLocation::Msr(row.index);
                layout.add(feature::MSRS, &row.name, (64, row.kind), location);
            }
        }
        layout
    }

    /// The kind of code.
    pub const fn model(&self) -> CodeModel {
        self.model
    }

    /// The registers of the `g` packet.
    pub fn general(&self) -> &[RegisterInfo] {
        self.registers.get(..self.general).unwrap_or(&[])
    }

    /// All registers; the index is the number.
    pub fn all(&self) -> &[RegisterInfo] {
        &self.registers
    }

    /// The register with this name.
    pub fn find(&self, name: &str) -> Option<&RegisterInfo> {
        self.registers.iter().find(|register| register.name == name)
    }

    /// The number of the register at this location.
    pub fn number(&self, location: RegisterLocation) -> Option<usize> {
        let mut registers = self.registers.iter();
        registers.position(|register| register.location == location)
    }

    fn add(
        &mut self,
        feature: &'static str,
        name: &str,
        (bits, kind): (u32, &'static str),
        location: RegisterLocation,
    ) {
        self.registers.push(RegisterInfo {
            name: name.to_owned(),
            bits,
            kind,
            location,
            feature,
        });
    }

    fn add_general(&mut self) {
        // gdb's order of the general registers of 64-bit code is not that of their numbers.
        let wide = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp"];
        let numbers = [0, 3, 1, 2, 6, 7, 5, 4];
        let narrow = ["eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi"];
        let kind = |number, integer| match number {
            4 | 5 => "data_ptr",
            _ => integer,
        };
        if self.model == CodeModel::Code64 {
            for (name, number) in wide.into_iter().zip(numbers) {
                let location = RegisterLocation::Gpr(number);
                self.add(feature::CORE, name, (64, kind(number, "int64")), location);
            }
            for number in 8..16 {
                let location = RegisterLocation::Gpr(number);
                self.add(
                    feature::CORE,
                    &format!("r{number}"),
                    (64, "int64"),
                    location,
                );
            }
            let location = RegisterLocation::LinearPc;
            self.add(feature::CORE, "rip", (64, "code_ptr"), location);
        } else {
            for (number, name) in narrow.into_iter().enumerate() {
                let location = RegisterLocation::Gpr(number);
                self.add(feature::CORE, name, (32, kind(number, "int32")), location);
            }
            let location = RegisterLocation::LinearPc;
            self.add(feature::CORE, "eip", (32, "code_ptr"), location);
        }
        let location = RegisterLocation::Flags;
        self.add(feature::CORE, "eflags", (32, "i386_eflags"), location);
    }

    fn add_segments(&mut self) {
        for i in [seg::CS, seg::SS, seg::DS, seg::ES, seg::FS, seg::GS] {
            let location = RegisterLocation::Selector(i);
            self.add(feature::CORE, SEGMENT_NAMES[i], (32, "int32"), location);
        }
    }

    fn add_xsave(
        &mut self,
        feature: &'static str,
        name: &str,
        shape: (u32, &'static str),
        (component, offset, len): (u32, usize, usize),
    ) {
        let location = RegisterLocation::Xsave {
            component,
            offset,
            len,
        };
        self.add(feature, name, shape, location);
    }

    fn add_x87(&mut self) {
        for i in 0..8 {
            let bytes = (xsave::X87, xsave::ST_OFFSET + 16 * i, 10);
            self.add_xsave(feature::CORE, &format!("st{i}"), (80, "i387_ext"), bytes);
        }
        // FCW, FSW, the tags, and the pointers of the last instruction and its operand.
        for (name, offset, len) in [
            ("fctrl", 0, 2),
            ("fstat", 2, 2),
            ("ftag", 4, 0),
            ("fiseg", 12, 2),
            ("fioff", 8, 4),
            ("foseg", 20, 2),
            ("fooff", 16, 4),
            ("fop", 6, 2),
        ] {
            if name == "ftag" {
                self.add(feature::CORE, name, (32, "int"), RegisterLocation::FpuTags);
            } else {
                self.add_xsave(feature::CORE, name, (32, "int"), (xsave::X87, offset, len));
            }
        }
    }

    fn vector_count(&self) -> usize {
        if self.model == CodeModel::Code64 {
            16
        } else {
            8
        }
    }

    fn add_sse(&mut self) {
        for i in 0..self.vector_count() {
            let bytes = (xsave::SSE, xsave::XMM_OFFSET + 16 * i, 16);
            self.add_xsave(feature::SSE, &format!("xmm{i}"), (128, "vec128"), bytes);
        }
        let bytes = (xsave::SSE, xsave::MXCSR_OFFSET, 4);
        self.add_xsave(feature::SSE, "mxcsr", (32, "i386_mxcsr"), bytes);
    }

    /// AVX, AVX-512 and protection keys.
    fn add_vectors(&mut self, xcr0: u64) {
        let has = |component: u32| xcr0 >> component & 1 != 0;
        if has(xsave::AVX) {
            for i in 0..self.vector_count() {
                let bytes = (xsave::AVX, xsave::YMM_HIGH_OFFSET + 16 * i, 16);
                self.add_xsave(feature::AVX, &format!("ymm{i}h"), (128, "uint128"), bytes);
            }
        }
        let avx512 = [xsave::AVX, xsave::OPMASK, xsave::ZMM_HIGH, xsave::HIGH_ZMM];
        if avx512.into_iter().all(has) {
            self.add_avx512();
        }
        if has(xsave::PKRU) {
            let bytes = (xsave::PKRU, xsave::PKRU_OFFSET, 4);
            self.add_xsave(feature::PKEYS, "pkru", (32, "uint32"), bytes);
        }
    }

    fn add_avx512(&mut self) {
        for i in 0..8 {
            let bytes = (xsave::OPMASK, xsave::OPMASK_OFFSET + 8 * i, 8);
            self.add_xsave(feature::AVX512, &format!("k{i}"), (64, "uint64"), bytes);
        }
        for i in 0..self.vector_count() {
            let bytes = (xsave::ZMM_HIGH, xsave::ZMM_HIGH_OFFSET + 32 * i, 32);
            self.add_xsave(
                feature::AVX512,
                &format!("zmm{i}h"),
                (256, "v2ui128"),
                bytes,
            );
        }
        if self.model != CodeModel::Code64 {
            return;
        }
        for (prefix, suffix, shape, at, len) in [
            ("xmm", "", (128, "vec128"), 0, 16),
            ("ymm", "h", (128, "uint128"), 16, 16),
            ("zmm", "h", (256, "v2ui128"), 32, 32),
        ] {
            for i in 0..16 {
                let bytes = (xsave::HIGH_ZMM, xsave::HIGH_ZMM_OFFSET + 64 * i + at, len);
                let name = format!("{prefix}{}{suffix}", i + 16);
                self.add_xsave(feature::AVX512, &name, shape, bytes);
            }
        }
    }

    /// RIP without the base of CS, control, debug and descriptor-table registers.
    fn add_system(&mut self) {
        for (name, bits, kind, location) in [
            ("ip", 64, "uint64", RegisterLocation::Rip),
            ("k_gs_base", 64, "uint64", RegisterLocation::KernelGsBase),
            ("cr0", 64, "hs_cr0", RegisterLocation::Control(0)),
            ("cr2", 64, "uint64", RegisterLocation::Control(2)),
            ("cr3", 64, "hs_cr3", RegisterLocation::Control(3)),
            ("cr4", 64, "hs_cr4", RegisterLocation::Control(4)),
            ("cr8", 64, "uint64", RegisterLocation::Control(8)),
            ("efer", 64, "hs_efer", RegisterLocation::Efer),
            ("xcr0", 64, "uint64", RegisterLocation::Xcr0),
            ("dr0", 64, "uint64", RegisterLocation::Debug(0)),
            ("dr1", 64, "uint64", RegisterLocation::Debug(1)),
            ("dr2", 64, "uint64", RegisterLocation::Debug(2)),
            ("dr3", 64, "uint64", RegisterLocation::Debug(3)),
            ("dr6", 64, "hs_dr6", RegisterLocation::Debug(6)),
            ("dr7", 64, "hs_dr7", RegisterLocation::Debug(7)),
            ("gdtr_base", 64, "uint64", RegisterLocation::GdtrBase),
            ("gdtr_limit", 16, "uint16", RegisterLocation::GdtrLimit),
            ("idtr_base", 64, "uint64", RegisterLocation::IdtrBase),
            ("idtr_limit", 16, "uint16", RegisterLocation::IdtrLimit),
            ("ldtr", 16, "uint16", RegisterLocation::LdtrSelector),
            ("ldtr_base", 64, "uint64", RegisterLocation::LdtrBase),
            ("tr", 16, "uint16", RegisterLocation::TrSelector),
            ("tr_base", 64, "uint64", RegisterLocation::TrBase),
        ] {
            self.add(feature::SYSTEM, name, (bits, kind), location);
        }
    }

    /// Base, limit and access rights of the segments.
    fn add_descriptor_caches(&mut self) {
        for (i, segment) in SEGMENT_NAMES.into_iter().enumerate() {
            let base = format!("{segment}_base");
            if self.find(&base).is_none() {
                let location = RegisterLocation::SegmentBase(i);
                self.add(feature::SYSTEM, &base, (64, "uint64"), location);
            }
            let location = RegisterLocation::SegmentLimit(i);
            let limit = format!("{segment}_limit");
            self.add(feature::SYSTEM, &limit, (32, "uint32"), location);
            let location = RegisterLocation::SegmentAccess(i);
            let access = format!("{segment}_access");
            self.add(feature::SYSTEM, &access, (16, "hs_access"), location);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_registers_have_the_numbers_that_gdb_expects() {
        let layout = RegisterLayout::new(CodeModel::Code64, &AvailableRegisters::all());
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
        let bytes: usize = layout.general().iter().map(RegisterInfo::bytes).sum();
        assert_eq!(bytes, 17 * 8 + 7 * 4 + 8 * 10 + 8 * 4 + 16 * 16 + 4);
    }

    #[test]
    fn register_names_are_unique_in_every_code_model() {
        for model in CodeModel::ALL {
            let layout = RegisterLayout::new(model, &AvailableRegisters::all());
            let mut names: Vec<_> = layout.all().iter().map(|r| &r.name).collect();
            names.sort();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count, "{model}");
        }
    }
}
