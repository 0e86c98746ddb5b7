//! ELF executables, and the plain ELF protocol: a static executable is entered at its entry point in
//! the mode of its class. System V ABI, "Object Files" and "Program Loading".
//!
//! Segments go to their physical addresses. The entry point is a virtual address where a segment's
//! virtual addresses cover it, and is translated; else it is taken as a physical one, as Linux has it.
//! RBX points to the same start info as in the PVH protocol.

use std::ops::Range;

use hindsight_cpu::state::{CpuState, gpr};
use object::LittleEndian;
use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

use crate::boot::place::Places;
use crate::boot::{BootError, Plan, entry, pvh};
use crate::memory::layout::Layout;

const EM_386: u16 = 3;
const EM_X86_64: u16 = 62;
/// Type of the note, of name `Xen`, that holds the PVH entry point: XEN_ELFNOTE_PHYS32_ENTRY.
const PVH_NOTE: u32 = 18;

/// ELFCLASS32 or ELFCLASS64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Elf32,
    Elf64,
}

/// A PT_LOAD segment that occupies memory.
#[derive(Clone, Debug)]
pub(super) struct Segment<'a> {
    /// `segment n`, by its place in the program header table.
    pub(super) name: String,
    pub(super) physical: u64,
    pub(super) virtual_: u64,
    /// Size in memory, at least that of `data`, and not 0.
    pub(super) size: u64,
    pub(super) data: &'a [u8],
}

impl Segment<'_> {
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
    pub(super) class: Class,
    /// As in the header.
    entry: u64,
    segments: Vec<Segment<'a>>,
    /// The PVH note's content, not yet checked.
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
            parse_class::<FileHeader32<LittleEndian>>(image, Class::Elf32)
        } else {
            parse_class::<FileHeader64<LittleEndian>>(image, Class::Elf64)
        }
    }

    /// Places all segments.
    pub(super) fn place(&self, places: &mut Places<'a>) -> Result<(), BootError> {
        for segment in &self.segments {
            places.fixed(
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

    /// End of the highest segment in physical memory.
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

fn parse_class<'a, H>(image: &'a [u8], class: Class) -> Result<Elf<'a>, BootError>
where
    H: FileHeader<Endian = LittleEndian>,
{
    let endian = LittleEndian;
    let header = H::parse(image).map_err(BootError::Elf)?;
    let expected = match class {
        Class::Elf32 => EM_386,
        Class::Elf64 => EM_X86_64,
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
            elf::PT_LOAD => parsed.segments.extend(segment::<H>(image, index, program)?),
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

fn segment<'a, H>(
    image: &'a [u8],
    index: usize,
    program: &H::ProgramHeader,
) -> Result<Option<Segment<'a>>, BootError>
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
    Ok(Some(Segment {
        name,
        physical: program.p_paddr(endian).into(),
        virtual_: program.p_vaddr(endian).into(),
        size,
        data,
    }))
}

/// A static position-independent executable may have a dynamic section, but we apply no relocations.
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

/// Places a plain ELF image.
pub(super) fn place<'a>(
    places: &mut Places<'a>,
    layout: &Layout,
    plan: &Plan<'a>,
) -> Result<CpuState, BootError> {
    let elf = Elf::parse(plan.image)?;
    elf.place(places)?;
    let at = elf.entry()?;
    let start_info = pvh::start_info(places, layout, plan)?;
    let mut state = match elf.class {
        Class::Elf32 => entry::protected(places, at)?,
        Class::Elf64 => entry::long(places, at)?,
    };
    state.gpr[gpr::RBX] = start_info;
    Ok(state)
}
