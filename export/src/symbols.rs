//! The functions of a guest image.

use object::{Object, ObjectSymbol, SymbolKind, SymbolSection};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::spaces::{AddressSpaces, SpaceId};

/// Maximum number of symbols that are read of one image.
const SYMBOLS_MAX: usize = 4 << 20;

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
        let functions = symbols.filter(is_code).take(SYMBOLS_MAX);
        let functions = functions.filter_map(|symbol| {
            let name = symbol.name().ok().filter(|name| !name.is_empty())?;
            Some(Function {
                address: symbol.address(),
                size: symbol.size(),
                name: format!("{:#}", rustc_demangle::demangle(name)),
            })
        });
        Self::new(functions.collect())
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
            [f] => Ok((f.address, f.address + f.size.max(1) - 1)),
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
}
