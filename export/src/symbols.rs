//! The functions of a guest image.

use std::fmt::{self, Write};

use object::{Object, ObjectSymbol, SymbolKind, SymbolSection};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::spaces::{AddressSpaces, SpaceId};

/// Maximum number of symbols that are read of one image.
const SYMBOLS_MAX: usize = 4 << 20;
/// Maximum number of bytes of a function's name; functions with longer names are left out.
const NAME_MAX: usize = 1024;
/// Maximum number of bytes of all names of one image.
const NAME_BYTES_MAX: usize = 64 << 20;

/// A named range of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Linear address of the first byte.
    pub address: u64,
    /// Size in bytes; a label without a size extends to the next symbol.
    pub size: u64,
    /// Demangled name.
    pub name: String,
}

/// The functions of a guest, ordered by address.
#[derive(Debug, Default)]
pub struct FunctionTable {
    /// Those of the image or the kernel, by address, and then those of processes.
    functions: Vec<Function>,
    /// How many of them are of the image or the kernel.
    ordered: usize,
    spaces: AddressSpaces,
}

/// Why a location cannot be found.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LocationError {
    /// The name is neither a symbol nor an address.
    #[error("{0:?} is neither an address nor a symbol of the image")]
    Unknown(String),
    /// Several functions have the name.
    #[error("{0:?} names {1} functions of the image; give an address")]
    Ambiguous(String, usize),
}

/// The demangled name of a symbol; `None` if it is too long to be a name.
fn function_name(bytes: &[u8]) -> Option<String> {
    if bytes.is_empty() || bytes.len() > NAME_MAX {
        return None;
    }
    let mangled = std::str::from_utf8(bytes).ok()?;
    // A mangled name may refer to parts of itself, and so be short for a very long one.
    let mut name = BoundedText::default();
    Some(
        match write!(name, "{:#}", rustc_demangle::demangle(mangled)) {
            Ok(()) => name.0,
            Err(_) => mangled.to_owned(),
        },
    )
}

/// Text that refuses to become longer than a name may be.
#[derive(Default)]
struct BoundedText(String);

impl fmt::Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > NAME_MAX {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

impl FunctionTable {
    /// The functions of an ELF image that runs at its link address; none of other images.
    pub fn of(image: &[u8]) -> Self {
        let Ok(file) = object::File::parse(image) else {
            return Self::default();
        };
        Self::of_symbols(file.symbols())
    }

    /// The functions that an ELF file exports to others.
    pub(crate) fn dynamic(file: &object::File<'_>) -> Self {
        Self::of_symbols(file.dynamic_symbols())
    }

    fn of_symbols<'a>(symbols: object::SymbolIterator<'a, 'a>) -> Self {
        let is_code = |symbol: &object::Symbol<'_, '_>| {
            let kind = symbol.kind();
            let named = matches!(
                kind,
                SymbolKind::Text | SymbolKind::Label | SymbolKind::Unknown
            );
            named && matches!(symbol.section(), SymbolSection::Section(_))
        };
        let mut functions = Vec::new();
        let mut budget = NAME_BYTES_MAX;
        for symbol in symbols.filter(is_code).take(SYMBOLS_MAX) {
            let Ok(bytes) = symbol.name_bytes() else {
                continue;
            };
            // Finding the end of a name takes time also when the function is left out.
            let Some(rest) = budget.checked_sub(bytes.len()) else {
                break;
            };
            budget = rest;
            if let Some(name) = function_name(bytes) {
                budget = budget.saturating_sub(name.len());
                functions.push(Function {
                    address: symbol.address(),
                    size: symbol.size(),
                    name,
                });
            }
        }
        Self::new(functions)
    }

    /// A table of these functions.
    pub fn new(mut functions: Vec<Function>) -> Self {
        // Of several names for an address, the one with a size wins, then the first.
        functions.sort_by(|a, b| {
            let key = |f: &Function| (f.address, f.size == 0);
            key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
        });
        functions.dedup_by_key(|function| function.address);
        let mut next = None;
        for function in functions.iter_mut().rev() {
            if let (0, Some(next)) = (function.size, next) {
                function.size = next - function.address;
            }
            next = Some(function.address);
        }
        Self {
            ordered: functions.len(),
            functions,
            spaces: AddressSpaces::default(),
        }
    }

    /// Adds functions whose addresses depend on the process.
    pub(crate) fn add_unordered(&mut self, functions: Vec<Function>, spaces: AddressSpaces) {
        self.functions.extend(functions);
        self.spaces = spaces;
    }

    /// The code that processes map.
    pub(crate) const fn spaces(&self) -> &AddressSpaces {
        &self.spaces
    }

    /// Number of functions.
    pub(crate) const fn len(&self) -> usize {
        self.functions.len()
    }

    pub(crate) fn into_functions(self) -> Vec<Function> {
        self.functions
    }

    /// Those of the image or the kernel, by address.
    fn ordered(&self) -> &[Function] {
        &self.functions[..self.ordered]
    }

    /// Whether no function is known.
    pub const fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// All functions of the image or the kernel, by address.
    pub fn iter(&self) -> std::slice::Iter<'_, Function> {
        self.ordered().iter()
    }

    /// The index of the function that contains `address`.
    pub fn index(&self, address: u64) -> Option<usize> {
        let functions = self.ordered();
        let after = functions.partition_point(|f| f.address <= address);
        let index = after.checked_sub(1)?;
        let function = &functions[index];
        (address - function.address < function.size.max(1)).then_some(index)
    }

    /// The index of the function that contains `address` of a process, or of the kernel.
    pub(crate) fn index_in(&self, space: SpaceId, address: u64) -> Option<usize> {
        let own = self.spaces.find(space, address);
        own.and_then(|index| usize::try_from(index).ok())
            .or_else(|| self.index(address))
    }

    /// The name of an address of a process, as [`FunctionTable::name_address`].
    pub(crate) fn name_address_in(&self, space: SpaceId, address: u64) -> String {
        let Some((index, start)) = self.spaces.find_start(space, address) else {
            return self.name_address(address);
        };
        let name = usize::try_from(index)
            .ok()
            .and_then(|index| self.get(index));
        let name = name.map_or("[unknown]", |function| &function.name);
        match address - start {
            0 => name.to_owned(),
            offset => format!("{name}+{offset:#x}"),
        }
    }

    /// The function that contains `address`.
    pub fn find(&self, address: u64) -> Option<&Function> {
        self.index(address).map(|index| &self.functions[index])
    }

    /// The function with this index.
    pub fn get(&self, index: usize) -> Option<&Function> {
        self.functions.get(index)
    }

    /// The name of an address: `name+0x12`, or the address if no function contains it.
    pub fn name_address(&self, address: u64) -> String {
        match self.find(address) {
            Some(f) if f.address == address => f.name.clone(),
            Some(f) => format!("{}+{:#x}", f.name, address - f.address),
            None => format!("{address:#x}"),
        }
    }

    /// The first and last address of a location: an address, or the name of a function.
    ///
    /// # Errors
    ///
    /// When there is no such function, or several.
    pub fn locate(&self, text: &str) -> Result<(u64, u64), LocationError> {
        let number = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        };
        if let Some(address) = number {
            return Ok((address, address));
        }
        let last_part = |name: &str| name.rsplit("::").next().is_some_and(|last| last == text);
        let named = |exact: bool| {
            let matches = move |f: &&Function| {
                if exact {
                    f.name == text
                } else {
                    last_part(&f.name)
                }
            };
            self.ordered().iter().filter(matches).collect::<Vec<_>>()
        };
        let exact = named(true);
        let found = if exact.is_empty() {
            named(false)
        } else {
            exact
        };
        match found.as_slice() {
            [] => Err(LocationError::Unknown(text.to_owned())),
            [f] => Ok((f.address, f.address.saturating_add(f.size.max(1) - 1))),
            several => Err(LocationError::Ambiguous(text.to_owned(), several.len())),
        }
    }
}

/// The hash by which a trace names an image.
pub fn image_hash(image: &[u8]) -> String {
    format!("{:016x}", xxh3_64(image))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> FunctionTable {
        let function = |address, size, name: &str| Function {
            address,
            size,
            name: name.to_owned(),
        };
        FunctionTable::new(vec![
            function(0x120, 4, "b::two"),
            function(0x100, 0, "label"),
            function(0x100, 0x10, "a::one"),
            function(0x118, 0, "tail"),
            function(0x130, 4, "c::two"),
        ])
    }

    #[test]
    fn address_is_named_by_its_function() {
        let table = table();
        assert_eq!(table.name_address(0x10f), "a::one+0xf");
        assert_eq!(table.name_address(0x110), "0x110");
        assert_eq!(table.name_address(0x11f), "tail+0x7");
        assert_eq!(table.name_address(0x50), "0x50");
    }

    #[test]
    fn location_is_an_address_or_an_unambiguous_name() {
        let table = table();
        assert_eq!(table.locate("0x1f"), Ok((0x1f, 0x1f)));
        assert_eq!(table.locate("one"), Ok((0x100, 0x10f)));
        assert_eq!(table.locate("c::two"), Ok((0x130, 0x133)));
        assert!(
            table
                .locate("two")
                .unwrap_err()
                .to_string()
                .contains("names 2 functions")
        );
        assert!(
            table
                .locate("three")
                .unwrap_err()
                .to_string()
                .contains("neither")
        );
    }

    #[test]
    fn malformed_image_has_no_functions() {
        assert!(FunctionTable::of(b"\x7fELF\x02\x01\x01").is_empty());
    }

    /// An ELF file with one section of code and `count` functions, all of which have the name at
    /// `name` in the string table.
    fn elf(strings: &[u8], name: u32, count: usize) -> Vec<u8> {
        let (header, section) = (64_u64, 64);
        let symbols_at = header + 4 * section;
        let symbols_len = 24 * (count as u64 + 1);
        let strings_at = symbols_at + symbols_len;
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
        let words = |file: &mut Vec<u8>, words: &[u64]| {
            file.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        };
        words(&mut file, &[0, 0, header, 0x40_0000_0000]);
        file.extend([0, 0, 64, 0, 4, 0, 3, 0]);
        // Name and type, flags, address, offset, size, link and info, alignment, entry size.
        let (code, symbol_table, string_table) = (1 << 32, 2 << 32, 3 << 32);
        words(&mut file, &[0; 8]);
        words(&mut file, &[code, 6, 0x1000, 0, 0x1000, 0, 1, 0]);
        words(
            &mut file,
            &[symbol_table, 0, 0, symbols_at, symbols_len, 3, 8, 24],
        );
        words(
            &mut file,
            &[
                string_table,
                0,
                0,
                strings_at,
                strings.len() as u64,
                0,
                1,
                0,
            ],
        );
        words(&mut file, &[0; 3]);
        for n in 0..count as u64 {
            // A global function of section 1.
            words(
                &mut file,
                &[u64::from(name) | 0x1_0012 << 32, 0x1000 + n, 1],
            );
        }
        file.extend(strings);
        file
    }

    #[test]
    fn functions_with_impossibly_long_names_are_left_out() {
        let short = elf(b"\0short\0", 1, 3);
        let functions = FunctionTable::of(&short);
        assert_eq!(
            (functions.len(), &*functions.functions[0].name),
            (3, "short")
        );
        let mut strings = vec![b'x'; NAME_MAX + 2];
        strings[0] = 0;
        strings.push(0);
        assert!(FunctionTable::of(&elf(&strings, 1, 3)).is_empty());
        assert_eq!(FunctionTable::of(&elf(&strings, 2, 3)).len(), 3);
    }

    #[test]
    fn names_of_an_image_are_bounded_together() {
        let mut strings = vec![b'x'; NAME_BYTES_MAX / 16];
        strings[0] = 0;
        strings.extend(b"\0short\0");
        let name = u32::try_from(strings.len() - 6).unwrap();
        assert_eq!(FunctionTable::of(&elf(&strings, name, 40)).len(), 40);
        // 200 000 names of 4 MiB would take minutes.
        assert!(FunctionTable::of(&elf(&strings, 1, 200_000)).is_empty());
        let long = [&[0], &[b'y'; NAME_MAX][..], &[0]].concat();
        let functions = FunctionTable::of(&elf(&long, 1, 100_000));
        assert_eq!(functions.len(), NAME_BYTES_MAX / NAME_MAX / 2);
    }
}
