//! The guest as an ELF core file, for gdb, crash and drgn.
//!
//! The file is never in memory as a whole: its headers are made when a client opens it, and the
//! contents of its segments are read from guest memory. The notes have the registers of each vCPU
//! and, if the guest is a Linux kernel, that kernel's VMCOREINFO. There is a segment for each range
//! of linear addresses that vCPU 0 maps, and then one for each range of RAM. All segments have
//! guest-physical addresses; segments of the same RAM share its bytes in the file.

mod metadata;

use object::elf::{
    ET_CORE, FileHeader64, PF_R, PF_W, PF_X, PT_LOAD, PT_NOTE, ProgramFlags, ProgramHeader64,
    ProgramType,
};
use object::pod::{bytes_of, bytes_of_slice};
use object::{LittleEndian as LE, U16, U32, U64};

use crate::cancel::CancelFlag;
use crate::elf_header::elf_header;
use crate::memory::LinearMemory;
use crate::memory::page_tables::{LinearRange, MappedRanges, PagingForm, SameRange};
use crate::target::PhysicalMemory;

/// Maximum number of mapped ranges with a segment: ELF allows less than 65 536 segments.
const MAPPED_MAX: usize = 4096;
/// Segments begin at multiples of this in the file.
const PAGE: u64 = 4096;

/// A range of RAM, and where the file has its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RamPart {
    /// Offset in the file.
    offset: u64,
    gpa: u64,
    len: u64,
}

/// A core file of a paused machine.
#[derive(Debug)]
pub(crate) struct CoreFile {
    /// The headers and notes, with which the file begins.
    head: Vec<u8>,
    /// The contents of RAM, which follow `head`: in ascending order and without gaps in the file.
    parts: Vec<RamPart>,
}

impl CoreFile {
    /// Makes the headers of a core file of RAM and of the linear memory that vCPU 0 maps.
    ///
    /// `threads` has the `NT_PRSTATUS` note of each vCPU, as [`prstatus`] makes it.
    pub(crate) fn new(linear: &LinearMemory<'_>, threads: &[Vec<u8>], cancel: &CancelFlag) -> Self {
        let memory = linear.memory;
        let mut metadata = Vec::new();
        for thread in threads {
            metadata::append(&mut metadata, b"CORE\0", metadata::PRSTATUS, thread);
        }
        if let Some(info) = metadata::vmcoreinfo(memory) {
            metadata::append(&mut metadata, b"VMCOREINFO\0", 0, &info);
        }
        let mapped = mapped(linear, cancel);
        let ram = memory.ram();
        // What a range maps may lie in several ranges of RAM.
        let clipped = mapped.iter().flat_map(|range| range.in_ram(ram));
        let clipped: Vec<LinearRange> = clipped.take(MAPPED_MAX).collect();
        let count = 1 + clipped.len() + ram.len();
        let metadata_at = size_of::<FileHeader64<LE>>() + count * size_of::<ProgramHeader64<LE>>();
        let head_len = ((metadata_at + metadata.len()) as u64).next_multiple_of(PAGE);
        let parts = ram_parts(ram, head_len);
        let mut headers = vec![metadata_segment(metadata_at as u64, metadata.len() as u64)];
        headers.extend(clipped.iter().filter_map(|range| load(range, &parts)));
        headers.extend(parts.iter().filter_map(|part| {
            let (gpa, len) = (part.gpa, part.len);
            let is_same =
                |range: &LinearRange| (range.start, range.physical, range.len) == (gpa, gpa, len);
            let range = LinearRange {
                start: gpa,
                len,
                physical: gpa,
                rights: 0,
            };
            load(&range, &parts).filter(|_| !clipped.iter().any(is_same))
        }));
        let mut head = bytes_of(&file_header(headers.len())).to_vec();
        head.extend_from_slice(bytes_of_slice(&headers));
        head.resize(metadata_at, 0);
        head.extend_from_slice(&metadata);
        head.resize(usize::try_from(head_len).unwrap_or(head.len()), 0);
        Self { head, parts }
    }

    /// The length of the file in bytes.
    pub(crate) fn len(&self) -> u64 {
        let last = self.parts.last();
        last.map_or(self.head.len() as u64, |part| part.offset + part.len)
    }

    /// Reads bytes from `offset` on. At the end of a part, reads less than `buffer` holds.
    pub(crate) fn read(
        &self,
        memory: &dyn PhysicalMemory,
        offset: u64,
        buffer: &mut [u8],
    ) -> usize {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(rest) = self.head.get(from..).filter(|rest| !rest.is_empty()) {
            let len = rest.len().min(buffer.len());
            buffer[..len].copy_from_slice(&rest[..len]);
            return len;
        }
        let after = self.parts.partition_point(|part| part.offset <= offset);
        let Some(part) = after.checked_sub(1).and_then(|index| self.parts.get(index)) else {
            return 0;
        };
        let within = offset - part.offset;
        let left = usize::try_from(part.len.saturating_sub(within)).unwrap_or(usize::MAX);
        let len = left.min(buffer.len());
        memory.read(part.gpa + within, &mut buffer[..len])
    }
}

/// The linear addresses that vCPU 0 maps; none while paging is off.
fn mapped(linear: &LinearMemory<'_>, cancel: &CancelFlag) -> Vec<LinearRange> {
    let Some(form) = PagingForm::new(linear.state) else {
        return Vec::new();
    };
    let search = (SameRange::Physical, MAPPED_MAX);
    MappedRanges::find(linear.memory, &form, search, cancel).found
}

/// Assigns offsets in the file to the ranges of RAM, from `offset` on.
fn ram_parts(ram: &[std::ops::Range<u64>], mut offset: u64) -> Vec<RamPart> {
    let part = |range: &std::ops::Range<u64>| {
        let (gpa, len) = (range.start, range.end - range.start);
        let part = RamPart { offset, gpa, len };
        offset += len;
        part
    };
    ram.iter().map(part).collect()
}

fn segment(
    kind: ProgramType,
    flags: ProgramFlags,
    offset: u64,
    (vaddr, paddr): (u64, u64),
    len: u64,
) -> ProgramHeader64<LE> {
    let wide = |value| U64::new(LE, value);
    ProgramHeader64 {
        p_type: U32::new(LE, kind),
        p_flags: U32::new(LE, flags),
        p_offset: wide(offset),
        p_vaddr: wide(vaddr),
        p_paddr: wide(paddr),
        p_filesz: wide(len),
        p_memsz: wide(len),
        p_align: wide(if kind == PT_LOAD { PAGE } else { 4 }),
    }
}

fn metadata_segment(offset: u64, len: u64) -> ProgramHeader64<LE> {
    segment(PT_NOTE, ProgramFlags(0), offset, (0, 0), len)
}

/// Returns the segment of a mapped range; `None` if it does not lie in one range of RAM.
fn load(range: &LinearRange, parts: &[RamPart]) -> Option<ProgramHeader64<LE>> {
    let inside = |part: &&RamPart| range.physical.wrapping_sub(part.gpa) < part.len;
    let part = parts.iter().find(inside)?;
    let offset = part.offset + (range.physical - part.gpa);
    let flags = ProgramFlags(PF_R.0 | PF_W.0 | PF_X.0);
    let addresses = (range.start, range.physical);
    Some(segment(PT_LOAD, flags, offset, addresses, range.len))
}

fn file_header(segments: usize) -> FileHeader64<LE> {
    let half = |n: usize| U16::new(LE, u16::try_from(n).unwrap_or(0));
    FileHeader64 {
        e_phoff: U64::new(LE, size_of::<FileHeader64<LE>>() as u64),
        e_phentsize: half(size_of::<ProgramHeader64<LE>>()),
        e_phnum: half(segments),
        ..elf_header(ET_CORE)
    }
}

pub(crate) use metadata::prstatus;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_ram::FlatRam;
    use hindsight_cpu::state::CpuState;
    use object::read::elf::{ElfFile64, FileHeader as _, ProgramHeader as _};

    /// Reads the whole file in pieces.
    fn bytes(core: &CoreFile, ram: &FlatRam) -> Vec<u8> {
        let mut file = Vec::new();
        let mut buffer = [0; 1000];
        loop {
            match core.read(ram, file.len() as u64, &mut buffer) {
                0 => return file,
                len => file.extend_from_slice(&buffer[..len]),
            }
        }
    }

    fn core(ram: &FlatRam, state: &CpuState) -> Vec<u8> {
        let linear = LinearMemory { memory: ram, state };
        let threads = [prstatus(0, state), prstatus(1, state)];
        let core = CoreFile::new(&linear, &threads, &CancelFlag::default());
        let file = bytes(&core, ram);
        assert_eq!(file.len() as u64, core.len());
        file
    }

    /// Returns the linear address, guest-physical address and contents of each loadable segment.
    fn segments(file: &[u8]) -> Vec<(u64, u64, &[u8])> {
        let header = FileHeader64::<LE>::parse(file).unwrap();
        let headers = header.program_headers(LE, file).unwrap();
        let loads = headers.iter().filter(|s| s.p_type(LE) == PT_LOAD);
        loads
            .map(|s| (s.p_vaddr(LE), s.p_paddr(LE), s.data(LE, file).unwrap()))
            .collect()
    }

    #[test]
    fn file_has_mapped_ranges_and_then_all_ram() {
        let mut ram = FlatRam::new(vec![0; 0x6000]);
        // The page at -4096 is that at 0x5000.
        for (at, entry) in [
            (0x1000 + 8 * 511, 0x2003_u64),
            (0x2000 + 8 * 511, 0x3003),
            (0x3000 + 8 * 511, 0x4003),
            (0x4000 + 8 * 511, 0x5003),
            // Beyond RAM.
            (0x4000 + 8 * 510, 0x9003),
        ] {
            ram.write(at, &entry.to_le_bytes());
        }
        ram.write(0x5000, b"mapped");
        let mut state = CpuState::reset();
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8000_0011, 0x1000, 0x20, 0x500);
        let file = core(&ram, &state);
        let segments = segments(&file);
        assert_eq!(segments.len(), 2);
        let (vaddr, paddr, data) = segments[0];
        assert_eq!(
            (vaddr, paddr, data.len()),
            (0xffff_ffff_ffff_f000, 0x5000, 0x1000)
        );
        assert_eq!(&data[..6], b"mapped");
        assert_eq!((segments[1].0, segments[1].1), (0, 0));
        assert_eq!(segments[1].2, ram.bytes);
    }

    #[test]
    fn guest_without_paging_has_its_ram_alone() {
        let ram = FlatRam::new(vec![7; 0x3000]);
        let file = core(&ram, &CpuState::reset());
        assert_eq!(segments(&file), [(0, 0, &ram.bytes[..])]);
        ElfFile64::<LE>::parse(&*file).unwrap();
    }

    #[test]
    fn metadata_has_registers_and_vmcoreinfo() {
        let mut ram = FlatRam::new(vec![0; 0x4000]);
        let mut entry = Vec::new();
        metadata::append(
            &mut entry,
            b"VMCOREINFO\0",
            0,
            b"OSRELEASE=6.1\nCRASHTIME=1\n",
        );
        ram.write(0x2000, &entry);
        let mut state = CpuState::reset();
        state.gpr[3] = 0x1234;
        let file = core(&ram, &state);
        let header = FileHeader64::<LE>::parse(&*file).unwrap();
        let headers = header.program_headers(LE, &*file).unwrap();
        let mut metadata = headers[0].notes(LE, &*file).unwrap().unwrap();
        for pid in [1_u32, 2] {
            let thread = metadata.next().unwrap().unwrap();
            assert_eq!((thread.name(), thread.desc().len()), (&b"CORE"[..], 336));
            assert_eq!(thread.desc()[32..36], pid.to_le_bytes());
            // RBX is the sixth register.
            assert_eq!(thread.desc()[112 + 5 * 8..][..8], 0x1234_u64.to_le_bytes());
        }
        let info = metadata.next().unwrap().unwrap();
        assert_eq!(info.name(), b"VMCOREINFO");
        assert_eq!(info.desc(), b"OSRELEASE=6.1\nCRASHTIME=1\n");
    }

    #[test]
    fn forged_vmcoreinfo_beyond_its_limit_is_left_out() {
        let mut ram = FlatRam::new(vec![0; 0x4000]);
        ram.write(0x3000, &[11, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        ram.write(0x300c, b"VMCOREINFO\0\0OSRELEASE=");
        assert_eq!(metadata::vmcoreinfo(&ram), None);
    }
}
