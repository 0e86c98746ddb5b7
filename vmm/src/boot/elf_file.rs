//! ELF executables. System V ABI, "Object Files" and "Program Loading".
//!
//! Segments are loaded at their physical addresses. If the virtual addresses of a segment contain
//! the entry point, it is a virtual address and is translated; otherwise it is a physical one, as
//! in Linux.

use std::ops::Range;

use object::LittleEndian;
use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

use crate::boot::BootError;
use crate::boot::placement::Placement;

const EM_386: u16 = 3;
const EM_X86_64: u16 = 62;
/// XEN_ELFNOTE_PHYS32_ENTRY: the type of the note, of name `Xen`, that holds the PVH entry point.
const PVH_NOTE: u32 = 18;

/// ELFCLASS32 or ELFCLASS64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ElfClass {
    Elf32,
    Elf64,
}

/// A PT_LOAD segment that occupies memory.
#[derive(Clone, Debug)]
pub(super) struct LoadSegment<'a> {
    /// `segment n`, by its index in the program header table.
    pub(super) name: String,
    pub(super) physical: u64,
    pub(super) virtual_: u64,
    /// Size in memory: at least that of `data`, and not 0.
    pub(super) size: u64,
    pub(super) data: &'a [u8],
}

impl LoadSegment<'_> {
    fn physical_range(&self) -> Range<u64> {
        self.physical..self.physical.saturating_add(self.size)
    }

    fn virtual_range(&self) -> Range<u64> {
        self.virtual_..self.virtual_.saturating_add(self.size)
    }
}

/// An ELF executable for x86 that needs neither interpreter nor relocation.
#[derive(Clone, Debug)]
pub(super) struct Elf<'a> {
    pub(super) class: ElfClass,
    /// The entry point in the header.
    entry: u64,
    segments: Vec<LoadSegment<'a>>,
    /// The content of the PVH note, not yet checked.
    pub(super) pvh_entry: Option<&'a [u8]>,
}

/// Whether `image` starts with the ELF magic.
pub(super) fn is_elf(image: &[u8]) -> bool {
    image.starts_with(&elf::ELFMAG)
}

impl<'a> Elf<'a> {
    /// Reads the headers.
    pub(super) fn parse(image: &'a [u8]) -> Result<Self, BootError> {
        if !is_elf(image) {
            return Err(BootError::NotElf);
        }
        if image.get(5) == Some(&2) {
            return Err(BootError::ElfBigEndian);
        }
        if image.get(4) == Some(&1) {
            parse_class::<FileHeader32<LittleEndian>>(image, ElfClass::Elf32)
        } else {
            parse_class::<FileHeader64<LittleEndian>>(image, ElfClass::Elf64)
        }
    }

    /// Places all segments.
    pub(super) fn add_segments(&self, placement: &mut Placement<'a>) -> Result<(), BootError> {
        for segment in &self.segments {
            placement.fixed(
                segment.name.clone(),
                segment.physical,
                segment.size,
                segment.data,
            )?;
        }
        Ok(())
    }

    /// The physical address of the entry point.
    pub(super) fn entry(&self) -> Result<u64, BootError> {
        let by_virtual = self
            .segments
            .iter()
            .find(|segment| segment.virtual_range().contains(&self.entry))
            .and_then(|segment| segment.physical.checked_add(self.entry - segment.virtual_));
        let address = by_virtual.unwrap_or(self.entry);
        if self.loads(address) {
            Ok(address)
        } else {
            Err(BootError::EntryOutside { entry: self.entry })
        }
    }

    /// The physical end of the highest segment.
    pub(super) fn end(&self) -> u64 {
        let ends = self
            .segments
            .iter()
            .map(|segment| segment.physical_range().end);
        ends.max().unwrap_or(0)
    }

    /// Whether a segment occupies the physical address.
    pub(super) fn loads(&self, address: u64) -> bool {
        self.segments
            .iter()
            .any(|segment| segment.physical_range().contains(&address))
    }
}

fn parse_class<'a, H>(image: &'a [u8], class: ElfClass) -> Result<Elf<'a>, BootError>
where
    H: FileHeader<Endian = LittleEndian>,
{
    let endian = LittleEndian;
    let header = H::parse(image).map_err(BootError::Elf)?;
    let expected = match class {
        ElfClass::Elf32 => EM_386,
        ElfClass::Elf64 => EM_X86_64,
    };
    let machine = header.e_machine(endian).0;
    if machine != expected {
        return Err(BootError::ElfMachine { machine, expected });
    }
    let kind = header.e_type(endian);
    if kind != elf::ET_EXEC && kind != elf::ET_DYN {
        return Err(BootError::ElfType(kind.0));
    }
    let mut parsed = Elf {
        class,
        entry: header.e_entry(endian).into(),
        segments: Vec::new(),
        pvh_entry: None,
    };
    let table = header
        .program_headers(endian, image)
        .map_err(BootError::Elf)?;
    for (index, program) in table.iter().enumerate() {
        match program.p_type(endian) {
            elf::PT_LOAD => parsed
                .segments
                .extend(load_segment::<H>(image, index, program)?),
            elf::PT_INTERP => return Err(BootError::ElfInterpreter),
            elf::PT_DYNAMIC => refuse_relocations::<H>(image, program)?,
            elf::PT_NOTE if parsed.pvh_entry.is_none() => {
                parsed.pvh_entry = pvh_note::<H>(image, program)?;
            }
            _ => {}
        }
    }
    if parsed.segments.is_empty() {
        return Err(BootError::ElfNoSegments);
    }
    Ok(parsed)
}

fn load_segment<'a, H>(
    image: &'a [u8],
    index: usize,
    program: &H::ProgramHeader,
) -> Result<Option<LoadSegment<'a>>, BootError>
where
    H: FileHeader<Endian = LittleEndian>,
{
    let endian = LittleEndian;
    let name = format!("segment {index}");
    let file_size: u64 = program.p_filesz(endian).into();
    let size: u64 = program.p_memsz(endian).into();
    if file_size > size {
        return Err(BootError::ElfSegmentSizes {
            name,
            file_size,
            memory_size: size,
        });
    }
    if size == 0 {
        return Ok(None);
    }
    let data = if file_size == 0 {
        &[]
    } else {
        program.data(endian, image).map_err(|()| {
            let offset: u64 = program.p_offset(endian).into();
            BootError::ElfSegmentTruncated {
                name: name.clone(),
                end: offset.saturating_add(file_size),
                file_end: image.len() as u64,
            }
        })?
    };
    Ok(Some(LoadSegment {
        name,
        physical: program.p_paddr(endian).into(),
        virtual_: program.p_vaddr(endian).into(),
        size,
        data,
    }))
}

/// Refuses an image with relocations, which the loader does not apply.
fn refuse_relocations<H>(image: &[u8], program: &H::ProgramHeader) -> Result<(), BootError>
where
    H: FileHeader<Endian = LittleEndian>,
{
    let endian = LittleEndian;
    let entries = program.dynamic(endian, image).map_err(BootError::Elf)?;
    let sizes = [
        elf::DT_RELSZ,
        elf::DT_RELASZ,
        elf::DT_RELRSZ,
        elf::DT_PLTRELSZ,
    ];
    for entry in entries.unwrap_or_default() {
        let size: u64 = entry.d_val(endian).into();
        if sizes.contains(&entry.d_tag(endian)) && size != 0 {
            return Err(BootError::ElfRelocations(size));
        }
    }
    Ok(())
}

fn pvh_note<'a, H>(
    image: &'a [u8],
    program: &H::ProgramHeader,
) -> Result<Option<&'a [u8]>, BootError>
where
    H: FileHeader<Endian = LittleEndian>,
{
    let endian = LittleEndian;
    let Some(mut notes) = program.notes(endian, image).map_err(BootError::Elf)? else {
        return Ok(None);
    };
    while let Some(note) = notes.next().map_err(BootError::Elf)? {
        if note.name() == b"Xen" && note.n_type(endian).0 == PVH_NOTE {
            return Ok(Some(note.desc()));
        }
    }
    Ok(None)
}
