//! The source lines of an image, from its DWARF.

use std::collections::BTreeMap;

use gimli::{EndianSlice, LittleEndian};
use object::{Object, ObjectSection};

use crate::error::ExportError;

/// Maximum number of rows of line tables that are read.
const ROWS_MAX: usize = 16 << 20;

/// A source line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SourceLine {
    /// Index in [`LineTable::files`].
    pub(crate) file: usize,
    /// Counts from 1.
    pub(crate) line: u32,
}

/// The lines of an image by address.
#[derive(Debug, Default)]
pub(crate) struct LineTable {
    /// Paths of the source files.
    pub(crate) files: Vec<String>,
    /// Start address and length of the code, and its line; ordered by address.
    pub(crate) rows: Vec<(u64, u64, SourceLine)>,
}

impl LineTable {
    /// Reads the line tables of all units, with the lines of inlined functions.
    ///
    /// # Errors
    ///
    /// When the image or its debug information is malformed, or there is none.
    pub(crate) fn of(image: &[u8]) -> Result<Self, ExportError> {
        let file = object::File::parse(image)?;
        let load = |section: gimli::SectionId| {
            let found = file.section_by_name(section.name());
            Ok::<_, gimli::Error>(
                found
                    .and_then(|section| section.uncompressed_data().ok())
                    .unwrap_or_default(),
            )
        };
        let sections = gimli::DwarfSections::load(load).map_err(ExportError::NoLines)?;
        let dwarf = sections.borrow(|section| EndianSlice::new(section, LittleEndian));
        let context = addr2line::Context::from_dwarf(dwarf).map_err(ExportError::NoLines)?;
        let locations = context
            .find_location_range(0, u64::MAX)
            .map_err(ExportError::NoLines)?;
        let mut table = Self::default();
        let mut indices = BTreeMap::new();
        for (address, len, location) in locations.take(ROWS_MAX) {
            let (Some(path), Some(line)) = (location.file, location.line.filter(|&line| line != 0))
            else {
                continue;
            };
            let next = indices.len();
            let file = *indices.entry(path.to_owned()).or_insert(next);
            table.rows.push((address, len, SourceLine { file, line }));
        }
        if table.rows.is_empty() {
            return Err(ExportError::NoLines(gimli::Error::MissingUnitDie));
        }
        table.files = vec![String::new(); indices.len()];
        for (path, index) in indices {
            table.files[index] = path;
        }
        table.rows.sort_unstable();
        Ok(table)
    }

    /// The line of the code at `address`.
    pub(crate) fn find(&self, address: u64) -> Option<SourceLine> {
        let after = self.rows.partition_point(|&(start, ..)| start <= address);
        let &(start, len, line) = self.rows.get(after.checked_sub(1)?)?;
        (address - start < len).then_some(line)
    }
}
