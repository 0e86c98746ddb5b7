//! Guests that write the state at their entry to COM1.
//!
//! Each piece of code ends in an instruction after its last label, so that pieces can be
//! concatenated.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// The debug exit port.
const EXIT: u32 = 0xf4;
const COM1: u32 = 0x3f8;
/// The flags that arithmetic changes.
const STATUS_FLAGS: u32 = 0x8d5;

pub type Code = Result<(), IcedError>;

/// Assembles code of `bits` that runs at `origin`.
pub fn assemble(bits: u32, origin: u64, code: impl FnOnce(&mut CodeAssembler) -> Code) -> Vec<u8> {
    let mut assembler = CodeAssembler::new(bits).unwrap();
    code(&mut assembler).unwrap();
    assembler.assemble(origin).unwrap()
}

/// Writes `verdict` to the debug exit port.
pub fn exit(a: &mut CodeAssembler, verdict: u32) -> Code {
    a.mov(eax, verdict)?;
    a.out(EXIT, eax)
}

/// Exits with `verdict` unless the word is the expected one.
pub fn check(a: &mut CodeAssembler, word: AsmMemoryOperand, expected: u32, verdict: u32) -> Code {
    let mut correct = a.create_label();
    a.cmp(word, expected)?;
    a.je(correct)?;
    exit(a, verdict)?;
    a.set_label(&mut correct)?;
    a.nop()
}

/// Exits with `verdict` unless EAX has the expected value.
pub fn check_eax(a: &mut CodeAssembler, expected: u32, verdict: u32) -> Code {
    let mut correct = a.create_label();
    a.cmp(eax, expected)?;
    a.je(correct)?;
    exit(a, verdict)?;
    a.set_label(&mut correct)?;
    a.nop()
}

/// Writes `text` to COM1. Changes AL and DX.
pub fn print(a: &mut CodeAssembler, text: &str) -> Code {
    a.mov(dx, COM1)?;
    for byte in text.bytes() {
        a.mov(al, u32::from(byte))?;
        a.out(dx, al)?;
    }
    Ok(())
}

/// Writes `name` and EAX to COM1, as eight hexadecimal digits. Changes EAX, ECX, EDX, EDI.
pub fn print_eax(a: &mut CodeAssembler, name: &str) -> Code {
    let (mut next, mut digit) = (a.create_label(), a.create_label());
    a.mov(edi, eax)?;
    print(a, name)?;
    a.mov(ecx, 8)?;
    a.set_label(&mut next)?;
    a.rol(edi, 4)?;
    a.mov(eax, edi)?;
    a.and(al, 0xf)?;
    a.add(al, u32::from(b'0'))?;
    a.cmp(al, u32::from(b'9'))?;
    a.jbe(digit)?;
    a.add(al, u32::from(b'a' - b'9' - 1))?;
    a.set_label(&mut digit)?;
    a.out(dx, al)?;
    a.dec(ecx)?;
    a.jnz(next)
}

/// Writes `name`, and the string that the word at `pointer` points to unless that is 0. Changes
/// EAX, EDX, ESI.
pub fn print_string(a: &mut CodeAssembler, name: &str, pointer: AsmMemoryOperand) -> Code {
    let (mut next, mut end) = (a.create_label(), a.create_label());
    print(a, name)?;
    a.mov(esi, pointer)?;
    a.test(esi, esi)?;
    a.jz(end)?;
    a.set_label(&mut next)?;
    a.mov(al, byte_ptr(esi))?;
    a.test(al, al)?;
    a.jz(end)?;
    a.out(dx, al)?;
    a.inc(esi)?;
    a.jmp(next)?;
    a.set_label(&mut end)?;
    a.nop()
}

/// Writes the bytes from ESI up to ECX. Changes EAX, EDX, ESI.
fn print_bytes(a: &mut CodeAssembler) -> Code {
    let (mut next, mut end) = (a.create_label(), a.create_label());
    a.mov(dx, COM1)?;
    a.set_label(&mut next)?;
    a.cmp(esi, ecx)?;
    a.jae(end)?;
    a.mov(al, byte_ptr(esi))?;
    a.out(dx, al)?;
    a.inc(esi)?;
    a.jmp(next)?;
    a.set_label(&mut end)?;
    a.nop()
}

/// Reloads all segment registers from the GDT, with their present selectors.
fn reload_segments(a: &mut CodeAssembler) -> Code {
    let (mut far_return, mut done) = (a.create_label(), a.create_label());
    a.mov(ax, ds)?;
    a.mov(ds, ax)?;
    a.mov(es, ax)?;
    a.mov(ss, ax)?;
    a.xor(eax, eax)?;
    a.mov(ax, cs)?;
    // A near call that returns by a far return.
    match a.bitness() {
        64 => a.push(rax)?,
        _ => a.push(eax)?,
    }
    a.call(far_return)?;
    a.jmp(done)?;
    a.set_label(&mut far_return)?;
    // The operand size is the mode's: 64 bits in 64-bit mode.
    a.retf()?;
    a.set_label(&mut done)?;
    a.nop()
}

/// Writes CR0, CS, DS, the flags except for the status flags, and in 64-bit mode EFER.
///
/// It uses the stack, so that a missing stack crashes the guest. Preserves EBX, EBP, ESI.
pub fn print_state(a: &mut CodeAssembler) -> Code {
    match a.bitness() {
        64 => {
            a.pushfq()?;
            a.pop(rax)?;
        }
        _ => {
            a.pushfd()?;
            a.pop(eax)?;
        }
    }
    a.and(eax, !STATUS_FLAGS)?;
    print_eax(a, "flags=")?;
    if a.bitness() != 16 {
        reload_segments(a)?;
    }
    match a.bitness() {
        64 => a.mov(rax, cr0)?,
        _ => a.mov(eax, cr0)?,
    }
    print_eax(a, " cr0=")?;
    a.xor(eax, eax)?;
    a.mov(ax, cs)?;
    print_eax(a, " cs=")?;
    a.xor(eax, eax)?;
    a.mov(ax, ds)?;
    print_eax(a, " ds=")?;
    if a.bitness() == 64 {
        a.mov(ecx, 0xc000_0080_u32)?;
        a.rdmsr()?;
        print_eax(a, " efer=")?;
    }
    print(a, "\n")
}

/// The offsets of the fields of an information structure, in bytes.
struct InfoLayout {
    cmdline: i32,
    count: i32,
    list: i32,
    /// The size of an entry of the list of modules. An entry starts with the address.
    entry: i32,
    /// The offset of the end, or of the length, in an entry.
    end: i32,
    is_length: bool,
    args: i32,
}

const MULTIBOOT: InfoLayout = InfoLayout {
    cmdline: 16,
    count: 20,
    list: 24,
    entry: 16,
    end: 4,
    is_length: false,
    args: 8,
};

const START_INFO: InfoLayout = InfoLayout {
    cmdline: 24,
    count: 12,
    list: 16,
    entry: 32,
    end: 8,
    is_length: true,
    args: 16,
};

/// Writes the command line, and each module's content and command line. EBX is the address of the
/// structure.
fn print_strings(a: &mut CodeAssembler, layout: &InfoLayout) -> Code {
    let (mut module, mut end) = (a.create_label(), a.create_label());
    print_string(a, "cmdline=", dword_ptr(ebx + layout.cmdline))?;
    a.mov(ebp, dword_ptr(ebx + layout.list))?;
    a.mov(ebx, dword_ptr(ebx + layout.count))?;
    a.set_label(&mut module)?;
    a.test(ebx, ebx)?;
    a.jz(end)?;
    print(a, "\nmodule=")?;
    a.mov(esi, dword_ptr(ebp))?;
    a.mov(ecx, dword_ptr(ebp + layout.end))?;
    if layout.is_length {
        a.add(ecx, esi)?;
    }
    print_bytes(a)?;
    print_string(a, " args=", dword_ptr(ebp + layout.args))?;
    // Modules are page-aligned.
    a.mov(eax, dword_ptr(ebp))?;
    a.and(eax, 0xfff)?;
    check_eax(a, 0, 6)?;
    a.add(ebp, layout.entry)?;
    a.dec(ebx)?;
    a.jmp(module)?;
    a.set_label(&mut end)?;
    a.nop()?;
    print(a, "\n")
}

/// A multiboot kernel: the verdict is 2 if EAX is wrong, 3 if the loader's name is missing.
pub fn multiboot(a: &mut CodeAssembler) -> Code {
    check_eax(a, 0x2bad_b002, 2)?;
    print_state(a)?;
    a.mov(esi, dword_ptr(ebx + 64))?;
    check(a, dword_ptr(esi), u32::from_le_bytes(*b"hind"), 3)?;
    a.mov(eax, dword_ptr(ebx))?;
    print_eax(a, "info=")?;
    a.mov(eax, dword_ptr(ebx + 4))?;
    print_eax(a, " lower=")?;
    a.mov(eax, dword_ptr(ebx + 8))?;
    print_eax(a, " upper=")?;
    print(a, "\n")?;
    print_strings(a, &MULTIBOOT)?;
    exit(a, 0)
}

/// A kernel that receives start info: the verdict is 2 if the magic is wrong, 3 if there is no
/// RSDP, 4 if the memory map does not start with RAM.
pub fn start_info(a: &mut CodeAssembler) -> Code {
    check(a, dword_ptr(ebx), 0x336e_c578, 2)?;
    print_state(a)?;
    a.mov(esi, dword_ptr(ebx + 32))?;
    check(a, dword_ptr(esi), u32::from_le_bytes(*b"RSD "), 3)?;
    a.mov(esi, dword_ptr(ebx + 40))?;
    check(a, dword_ptr(esi + 16), 1, 4)?;
    a.mov(eax, dword_ptr(ebx + 4))?;
    print_eax(a, "version=")?;
    a.mov(eax, dword_ptr(ebx + 48))?;
    print_eax(a, " ranges=")?;
    print(a, "\n")?;
    print_strings(a, &START_INFO)?;
    exit(a, 0)
}

/// A kernel for the 64-bit Linux protocol: the verdict is 2 if the boot parameters have no header,
/// 4 if their memory map does not start with RAM.
pub fn linux(a: &mut CodeAssembler) -> Code {
    const E820: i32 = 0x2d0;
    a.mov(ebx, esi)?;
    check(a, dword_ptr(ebx + 0x202), u32::from_le_bytes(*b"HdrS"), 2)?;
    check(a, dword_ptr(ebx + E820 + 16), 1, 4)?;
    print_state(a)?;
    a.movzx(eax, byte_ptr(ebx + 0x210))?;
    print_eax(a, "loader=")?;
    a.movzx(eax, byte_ptr(ebx + 0x1e8))?;
    print_eax(a, " ranges=")?;
    print_string(a, "\ncmdline=", dword_ptr(ebx + 0x228))?;
    a.mov(esi, dword_ptr(ebx + 0x218))?;
    a.mov(ecx, dword_ptr(ebx + 0x21c))?;
    a.add(ecx, esi)?;
    print(a, "\ninitrd=")?;
    print_bytes(a)?;
    print(a, "\n")?;
    exit(a, 0)
}

/// A flat image that writes the state and EDX.
pub fn flat(a: &mut CodeAssembler) -> Code {
    a.mov(ebx, edx)?;
    print_state(a)?;
    a.mov(eax, ebx)?;
    print_eax(a, "edx=")?;
    print(a, "\n")?;
    exit(a, 0)
}

/// Writes CPUID's vendor string and the signature of leaf 1.
pub fn cpuid(a: &mut CodeAssembler) -> Code {
    const SCRATCH: u32 = 0x20_0000;
    a.xor(eax, eax)?;
    a.cpuid()?;
    a.mov(esi, SCRATCH)?;
    a.mov(dword_ptr(esi), esi)?;
    a.add(dword_ptr(esi), 4)?;
    a.mov(dword_ptr(esi + 4), ebx)?;
    a.mov(dword_ptr(esi + 8), edx)?;
    a.mov(dword_ptr(esi + 12), ecx)?;
    print_string(a, "vendor=", dword_ptr(esi))?;
    a.mov(eax, 1)?;
    a.xor(ecx, ecx)?;
    a.cpuid()?;
    print_eax(a, " signature=")?;
    print(a, "\n")?;
    exit(a, 0)
}
