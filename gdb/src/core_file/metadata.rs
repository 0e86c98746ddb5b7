//! The notes of a core file: the registers, and a Linux kernel's VMCOREINFO.

use hindsight_cpu::state::{CpuState, gpr, seg};
use object::elf::NT_PRSTATUS;

use crate::modes;
use crate::target::PhysicalMemory;

/// The type of a note with the registers of a thread.
pub(super) const PRSTATUS: u32 = NT_PRSTATUS.0;

/// The size of Linux's `struct elf_prstatus` for x86-64 in bytes.
///
/// The next two constants are the offsets of its process ID and its registers.
const PRSTATUS_BYTES: usize = 336;
const PRSTATUS_PID: usize = 32;
const PRSTATUS_REGISTERS: usize = 112;

/// The name of a VMCOREINFO note, padded to a multiple of 4.
///
/// The note consists of a header of [`INFO_HEADER`] bytes, this name, and contents that begin with
/// [`INFO_FIRST`]. The header has the length of the name, the length of the contents, and type 0.
const INFO_NAME: &[u8] = b"VMCOREINFO\0\0";
const INFO_FIRST: &[u8] = b"OSRELEASE=";
const INFO_HEADER: usize = 12;
/// Maximum length of the contents that Linux writes: a page.
const INFO_MAX: usize = 4096;
const PAGE: usize = 4096;

/// Appends a note to `metadata`. `name` ends with a zero byte.
pub(super) fn append(metadata: &mut Vec<u8>, name: &[u8], kind: u32, contents: &[u8]) {
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(0).to_le_bytes();
    metadata.extend(length(name));
    metadata.extend(length(contents));
    metadata.extend(kind.to_le_bytes());
    for bytes in [name, contents] {
        metadata.extend_from_slice(bytes);
        metadata.resize(metadata.len().next_multiple_of(4), 0);
    }
}

/// Returns the `struct elf_prstatus` of a vCPU.
///
/// Its process ID is `vcpu` + 1, the thread's number for a connected debugger.
pub(crate) fn prstatus(vcpu: u32, state: &CpuState) -> Vec<u8> {
    let general = |index: usize| state.gpr[index];
    let segment = |index: usize| &state.seg[index];
    let selector = |index| u64::from(segment(index).selector);
    let registers = [
        general(15),
        general(14),
        general(13),
        general(12),
        general(gpr::RBP),
        general(gpr::RBX),
        general(11),
        general(10),
        general(9),
        general(8),
        general(gpr::RAX),
        general(gpr::RCX),
        general(gpr::RDX),
        general(gpr::RSI),
        general(gpr::RDI),
        // No system call is to be restarted.
        u64::MAX,
        modes::linear_pc(state, state.rip),
        selector(seg::CS),
        state.rflags,
        general(gpr::RSP),
        selector(seg::SS),
        segment(seg::FS).base,
        segment(seg::GS).base,
        selector(seg::DS),
        selector(seg::ES),
        selector(seg::FS),
        selector(seg::GS),
    ];
    let mut status = vec![0; PRSTATUS_BYTES];
    status[PRSTATUS_PID..][..4].copy_from_slice(&(vcpu + 1).to_le_bytes());
    let words = status[PRSTATUS_REGISTERS..].chunks_exact_mut(8);
    for (word, register) in words.zip(registers) {
        word.copy_from_slice(&register.to_le_bytes());
    }
    status
}

/// Returns the contents of a Linux kernel's VMCOREINFO note, if RAM has one.
///
/// The kernel has prepared the note at the beginning of a page.
pub(super) fn vmcoreinfo(memory: &dyn PhysicalMemory) -> Option<Vec<u8>> {
    let mut found = None;
    memory.visit_data(&mut |gpa, piece| {
        for (page, bytes) in (gpa..).step_by(PAGE).zip(piece.chunks(PAGE)) {
            if let Some(len) = info_length(bytes).filter(|_| found.is_none()) {
                let mut info = vec![0; len];
                let at = page + (INFO_HEADER + INFO_NAME.len()) as u64;
                found = memory.read_exact(at, &mut info).then_some(info);
            }
        }
    });
    found
}

/// Returns the length of the contents, if the page begins with a VMCOREINFO note.
fn info_length(page: &[u8]) -> Option<usize> {
    let (header, rest) = page.split_at_checked(INFO_HEADER)?;
    let name_len = &header[..4];
    let kind = &header[8..];
    let contents = rest.strip_prefix(INFO_NAME)?;
    if name_len != 11_u32.to_le_bytes() || kind != [0; 4] || !contents.starts_with(INFO_FIRST) {
        return None;
    }
    let len = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
    usize::try_from(len).ok().filter(|&len| len <= INFO_MAX)
}
