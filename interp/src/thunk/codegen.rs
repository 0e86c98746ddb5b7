//! Generates the machine code of thunks.

#![expect(unsafe_code, reason = "generated code is mapped and called")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and offsets are small"
)]

use super::masking::Masking;
use super::vectors::Vectors;
use crate::softvec::SoftInstruction;
use hindsight_translate::wide_moves;
use iced_x86::{
    Code, Encoder, EncodingKind, Instruction, InstructionInfoFactory, InstructionInfoOptions,
    MemoryOperand, OpAccess, OpKind, Register,
};
use std::mem::offset_of;

/// The register file that an instruction mainly uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Integer,
    Vector,
    /// x87 or MMX registers, and possibly vector registers.
    X87,
}

/// How the memory operand is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) size: usize,
    pub(super) read: bool,
    pub(super) write: bool,
    /// Which elements are accessed; `None` for all of them.
    pub(super) masking: Option<Masking>,
}

/// What executes the instruction of a thunk.
#[derive(Debug)]
enum Body {
    /// Machine code at this address.
    Code(usize),
    /// The interpreter, as the host has no such instruction.
    Software(SoftInstruction),
}

/// One generated thunk.
#[derive(Debug)]
pub(super) struct Thunk {
    body: Body,
    pub(super) class: Class,
    pub(super) mmx: bool,
    /// Whether the instruction uses vector registers or MXCSR.
    pub(super) vector: bool,
    pub(super) flags: bool,
    /// Whether the host executes it and it clears the bits above the vector registers it writes.
    pub(super) clears_upper: bool,
    pub(super) gpr_read: Vec<u8>,
    /// Registers that the instruction writes, with their width in bytes.
    pub(super) gpr_write: Vec<(u8, u8)>,
    pub(super) vec_write: Vec<u8>,
    pub(super) memory: Option<Access>,
}

/// The registers that a redirected instruction uses.
#[derive(Debug)]
pub(super) struct RegisterChoice {
    insn: Instruction,
    context: Register,
    base: Register,
    /// The register that replaces RSP as an operand.
    ///
    /// Together with the bytes of the instruction, it is the key of a thunk.
    pub(super) for_rsp: Option<Register>,
}

/// Memory for generated code: writable or executable, never both.
#[derive(Debug, Default)]
pub(super) struct Bank {
    pages: Vec<(usize, usize)>,
}

const BANK: usize = 64 << 10;

const SCRATCH: [Register; 12] = [
    Register::RSI,
    Register::RDI,
    Register::RBX,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
    Register::R14,
    Register::R15,
    Register::RCX,
    Register::RDX,
    Register::RAX,
];

fn used(insn: &Instruction) -> Vec<(Register, OpAccess)> {
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info_options(insn, InstructionInfoOptions::NO_MEMORY_USAGE);
    info.used_registers()
        .iter()
        .map(|u| (u.register(), u.access()))
        .collect()
}

/// Redirects the memory operand to the buffer, and RSP to another register.
///
/// Returns the bytes to execute.
pub(super) fn redirect(original: &Instruction) -> Option<(Vec<u8>, RegisterChoice)> {
    let mut insn = *original;
    insn.set_segment_prefix(Register::None);
    let memory = (0..insn.op_count()).any(|n| insn.op_kind(n) == OpKind::Memory);
    if memory {
        insn.set_memory_base(Register::None);
        insn.set_memory_index(Register::None);
        insn.set_memory_displ_size(0);
        insn.set_memory_displacement64(0);
    }
    let taken: Vec<Register> = used(&insn)
        .iter()
        .map(|(r, _)| r.full_register())
        .chain((0..insn.op_count()).map(|n| insn.op_register(n).full_register()))
        .collect();
    // Instructions with a register pair, such as VP2INTERSECT, are not supported.
    let mut free = SCRATCH.into_iter().filter(|r| !taken.contains(r));
    let context = free.next()?;
    let base = free.next()?;
    let mut for_rsp = None;
    for n in 0..insn.op_count() {
        let r = insn.op_register(n);
        if insn.op_kind(n) == OpKind::Register && r.full_register() == Register::RSP {
            let stand_in = match for_rsp {
                Some(r) => r,
                None => free.next()?,
            };
            for_rsp = Some(stand_in);
            insn.set_op_register(n, resize(stand_in, r.size())?);
        }
    }
    if memory {
        insn.set_memory_base(base);
        insn.set_memory_index_scale(1);
    }
    let mut encoder = Encoder::new(64);
    encoder.encode(&insn, 0).ok()?;
    let bytes = encoder.take_buffer();
    Some((
        bytes,
        RegisterChoice {
            insn,
            context,
            base,
            for_rsp,
        },
    ))
}

fn resize(r: Register, size: usize) -> Option<Register> {
    let n = r.number() as u32;
    Some(match size {
        8 => r,
        4 => Register::EAX + n,
        2 => Register::AX + n,
        _ => return None,
    })
}

fn at(context: Register, offset: usize) -> MemoryOperand {
    MemoryOperand::with_base_displ(context, offset as i64)
}

struct Emit(Vec<u8>, bool);

impl Emit {
    fn add(&mut self, insn: Result<Instruction, iced_x86::IcedError>) {
        let mut encoder = Encoder::new(64);
        match insn.and_then(|i| encoder.encode(&i, 0)) {
            Ok(_) => self.0.extend(encoder.take_buffer()),
            Err(_) => self.1 = false,
        }
    }
    fn load(&mut self, code: Code, r: Register, c: Register, offset: usize) {
        self.add(Instruction::with2(code, r, at(c, offset)));
    }
    fn store(&mut self, code: Code, c: Register, offset: usize, r: Register) {
        self.add(Instruction::with2(code, at(c, offset), r));
    }
    fn memory(&mut self, code: Code, c: Register, offset: usize) {
        self.add(Instruction::with1(code, at(c, offset)));
    }
}

/// The registers that an instruction reads and writes, by kind.
#[derive(Default)]
struct Uses {
    gpr: Vec<(Register, bool, u8)>,
    vec: Vec<(u8, bool)>,
    k: Vec<(u8, bool)>,
    x87: bool,
    mmx: bool,
}

fn writes(a: OpAccess) -> bool {
    matches!(
        a,
        OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

fn uses(chosen: &RegisterChoice) -> Uses {
    let mut u = Uses::default();
    for (r, access) in used(&chosen.insn) {
        let w = writes(access);
        if r.is_gpr() {
            let full = r.full_register();
            if full != chosen.base {
                let size = (r.size() as u8).max(if r.size() == 4 { 8 } else { 0 });
                u.gpr.push((full, w, size));
            }
        } else if r.is_vector_register() {
            let n = r.number() as u8;
            match u.vec.iter_mut().find(|v| v.0 == n) {
                Some(v) => v.1 |= w,
                None => u.vec.push((n, w)),
            }
        } else if r.is_k() {
            u.k.push((r.number() as u8, w));
        } else if r.is_mm() {
            u.mmx = true;
        } else if r.is_st() {
            u.x87 = true;
        }
    }
    u
}

/// Generates the thunk of a redirected instruction.
///
/// With `software`, the thunk computes the instruction without code.
pub(super) fn build(
    bank: &mut Bank,
    original: &Instruction,
    bytes: &[u8],
    chosen: RegisterChoice,
    software: bool,
) -> Option<Thunk> {
    let u = uses(&chosen);
    let fpu = chosen.insn.cpuid_features().iter().any(|f| {
        use iced_x86::CpuidFeature as F;
        matches!(f, F::FPU | F::FPU287 | F::FPU387)
    });
    let x87 = u.x87 || fpu;
    let name = format!("{:?}", chosen.insn.mnemonic());
    let converts = name.starts_with("Cvt") || name.starts_with("Vcvt");
    let vector = !u.vec.is_empty() || !u.k.is_empty() || converts;
    let wide = chosen.insn.encoding() != EncodingKind::Legacy;
    let class = match (x87 || u.mmx, vector) {
        (true, _) => Class::X87,
        (_, true) => Class::Vector,
        _ => Class::Integer,
    };
    let body = if software {
        Body::Software(SoftInstruction::of(original)?)
    } else {
        let mut e = Emit(Vec::new(), true);
        let c = chosen.context;
        prologue(&mut e, &chosen, &u, class, vector, wide);
        e.0.extend_from_slice(bytes);
        epilogue(&mut e, c, &chosen, &u, class, vector, wide);
        if !e.1 {
            return None;
        }
        Body::Code(bank.add(&e.0)?)
    };
    let memory = (0..original.op_count())
        .find(|&n| original.op_kind(n) == OpKind::Memory)
        .map(|n| access(original, n));
    if memory.is_some_and(|m| m.size == 0 || m.size > 64) {
        return None;
    }
    let name = |r: Register| {
        if Some(r) == chosen.for_rsp {
            4
        } else {
            r.number() as u8
        }
    };
    Some(Thunk {
        body,
        class,
        mmx: u.mmx && !x87,
        clears_upper: wide && !software,
        vector,
        flags: chosen.insn.rflags_modified() != 0,
        gpr_read: u.gpr.iter().map(|g| name(g.0)).collect(),
        gpr_write: u
            .gpr
            .iter()
            .filter(|g| g.1)
            .map(|g| (name(g.0), g.2))
            .collect(),
        vec_write: u.vec.iter().filter(|v| v.1).map(|v| v.0).take(4).collect(),
        memory,
    })
}

fn access(i: &Instruction, operand: u32) -> Access {
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(i);
    let how = info.op_access(operand);
    let masking = Masking::of(i);
    // A masked store does not read the elements that it leaves unchanged.
    let masked_store = masking.is_some() && writes(how);
    let unread = matches!(
        how,
        OpAccess::Write | OpAccess::NoMemAccess | OpAccess::None
    );
    Access {
        size: i.memory_size().size(),
        read: !unread && !masked_store,
        write: writes(how),
        masking,
    }
}

fn zmm_offset(n: u8) -> usize {
    offset_of!(Vectors, zmm) + usize::from(n) * 64
}

fn gpr_offset(chosen: &RegisterChoice, r: Register) -> usize {
    let n = if Some(r) == chosen.for_rsp {
        4
    } else {
        r.number()
    };
    offset_of!(Vectors, gpr) + n * 8
}

const SAVED: [Register; 6] = [
    Register::RBX,
    Register::RBP,
    Register::R12,
    Register::R13,
    Register::R14,
    Register::R15,
];

fn prologue(
    e: &mut Emit,
    chosen: &RegisterChoice,
    u: &Uses,
    class: Class,
    vector: bool,
    wide: bool,
) {
    let c = chosen.context;
    for r in SAVED {
        e.add(Instruction::with1(Code::Push_r64, r));
    }
    if c != Register::RDI {
        e.add(Instruction::with2(Code::Mov_r64_rm64, c, Register::RDI));
    }
    if class == Class::X87 {
        e.memory(Code::Fxrstor64_m512byte, c, offset_of!(Vectors, fx));
    }
    if vector {
        e.memory(Code::Ldmxcsr_m32, c, offset_of!(Vectors, run_mxcsr));
    }
    for &(n, _) in &u.vec {
        if wide {
            let (load, _, first) = wide_moves();
            e.load(load, first + u32::from(n), c, zmm_offset(n));
        } else {
            e.load(
                Code::Movups_xmm_xmmm128,
                Register::XMM0 + u32::from(n),
                c,
                zmm_offset(n),
            );
        }
    }
    for &(n, _) in &u.k {
        let offset = offset_of!(Vectors, k) + usize::from(n) * 8;
        e.load(
            Code::VEX_Kmovq_kr_km64,
            Register::K0 + u32::from(n),
            c,
            offset,
        );
    }
    e.memory(Code::Push_rm64, c, offset_of!(Vectors, flags));
    e.add(Ok(Instruction::with(Code::Popfq)));
    // LEA and MOV do not change the flags.
    e.load(Code::Lea_r64_m, chosen.base, c, offset_of!(Vectors, buffer));
    for &(r, ..) in &u.gpr {
        e.load(Code::Mov_r64_rm64, r, c, gpr_offset(chosen, r));
    }
}

fn epilogue(
    e: &mut Emit,
    c: Register,
    chosen: &RegisterChoice,
    u: &Uses,
    class: Class,
    vector: bool,
    wide: bool,
) {
    for &(r, w, _) in &u.gpr {
        if w {
            e.store(Code::Mov_rm64_r64, c, gpr_offset(chosen, r), r);
        }
    }
    e.add(Ok(Instruction::with(Code::Pushfq)));
    e.memory(Code::Pop_rm64, c, offset_of!(Vectors, flags));
    if vector {
        e.memory(Code::Stmxcsr_m32, c, offset_of!(Vectors, run_mxcsr));
    }
    for &(n, w) in &u.vec {
        if w && wide {
            let (_, store, first) = wide_moves();
            e.store(store, c, zmm_offset(n), first + u32::from(n));
        } else if w {
            e.store(
                Code::Movups_xmmm128_xmm,
                c,
                zmm_offset(n),
                Register::XMM0 + u32::from(n),
            );
        }
    }
    for &(n, w) in &u.k {
        if w {
            let offset = offset_of!(Vectors, k) + usize::from(n) * 8;
            e.store(
                Code::VEX_Kmovq_m64_kr,
                c,
                offset,
                Register::K0 + u32::from(n),
            );
        }
    }
    if class == Class::X87 {
        e.memory(Code::Fxsave64_m512byte, c, offset_of!(Vectors, fx));
        e.add(Ok(Instruction::with(Code::Fninit)));
    }
    if vector && wide {
        e.add(Ok(Instruction::with(Code::VEX_Vzeroupper)));
    }
    if vector || class == Class::X87 {
        // The host's own MXCSR has the default value.
        e.add(Instruction::with2(
            Code::Mov_rm32_imm32,
            at(c, offset_of!(Vectors, saved_mxcsr)),
            0x1f80_i32,
        ));
        e.memory(Code::Ldmxcsr_m32, c, offset_of!(Vectors, saved_mxcsr));
    }
    e.add(Ok(Instruction::with(Code::Cld)));
    for r in SAVED.into_iter().rev() {
        e.add(Instruction::with1(Code::Pop_r64, r));
    }
    e.add(Ok(Instruction::with(Code::Retnq)));
}

impl Bank {
    /// Copies code into executable memory, and returns its address.
    fn add(&mut self, code: &[u8]) -> Option<usize> {
        let fits = self
            .pages
            .last()
            .is_some_and(|&(_, used)| used + code.len() <= BANK);
        if !fits {
            // SAFETY: the call makes an anonymous private mapping that nothing else uses.
            let base = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    BANK,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            if base == libc::MAP_FAILED {
                return None;
            }
            self.pages.push((base.expose_provenance(), 0));
        }
        let (base, used) = self.pages.last_mut()?;
        let start = *base + *used;
        let page = std::ptr::with_exposed_provenance_mut::<u8>(*base);
        // SAFETY: this bank owns the mapping, and `used + code.len()` lies in it. No thunk of this
        // bank runs meanwhile, because the bank belongs to one processor.
        unsafe {
            if libc::mprotect(page.cast(), BANK, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                return None;
            }
            let to = std::ptr::with_exposed_provenance_mut::<u8>(start);
            std::ptr::copy_nonoverlapping(code.as_ptr(), to, code.len());
            if libc::mprotect(page.cast(), BANK, libc::PROT_READ | libc::PROT_EXEC) != 0 {
                return None;
            }
        }
        *used += code.len().next_multiple_of(16);
        Some(start)
    }
}

impl Drop for Bank {
    fn drop(&mut self) {
        for &(base, _) in &self.pages {
            // SAFETY: `add` made the mapping with this length, and thunks do not outlive the
            // processor.
            unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(base), BANK) };
        }
    }
}

impl Thunk {
    /// Executes the instruction with the registers of `vectors`.
    pub(super) fn call(&self, vectors: &mut Vectors) {
        let entry = match &self.body {
            Body::Code(address) => std::ptr::with_exposed_provenance::<()>(*address),
            Body::Software(instruction) => return instruction.call(vectors),
        };
        // SAFETY: `entry` is code that `build` generated: it follows the C calling convention,
        // touches only the context, and its instruction can raise no exception, as floating-point
        // exceptions are masked and the memory operand is the buffer inside the context.
        unsafe {
            let f: extern "C" fn(*mut Vectors) = std::mem::transmute(entry);
            f(vectors);
        }
    }
}
