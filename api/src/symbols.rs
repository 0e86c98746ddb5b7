//! Names of addresses: of the image, of ELF files, and of a Linux kernel in guest memory.

use std::collections::HashMap;

use hindsight_export::{Function, FunctionTable, LocationError};
use hindsight_gdb::kernel::KernelSymbol;
use object::{Object, ObjectSymbol, SymbolKind};

/// Maximum number of data symbols that are kept of one file.
const DATA_MAX: usize = 1 << 20;
/// Maximum number of bytes of a data symbol's name; those with longer names are left out.
const NAME_MAX: usize = 256;

/// The functions and data of one file, or of the kernel.
#[derive(Debug, Default)]
struct SymbolTable {
    functions: FunctionTable,
    data: HashMap<String, u64>,
}

impl SymbolTable {
    fn of_elf(file: &[u8]) -> Self {
        let mut data = HashMap::new();
        if let Ok(object) = object::File::parse(file) {
            let symbols = object.symbols().take(4 * DATA_MAX);
            let symbols = symbols.filter(|symbol| {
                matches!(symbol.kind(), SymbolKind::Data | SymbolKind::Unknown)
                    && symbol.is_definition()
            });
            for symbol in symbols.take(DATA_MAX) {
                if let Ok(name) = symbol.name()
                    && (1..=NAME_MAX).contains(&name.len())
                {
                    data.entry(name.to_owned()).or_insert(symbol.address());
                }
            }
        }
        Self {
            functions: FunctionTable::of(file),
            data,
        }
    }

    fn of_kernel(symbols: &[KernelSymbol]) -> Self {
        let mut functions = Vec::new();
        let mut data = HashMap::new();
        for symbol in symbols {
            let name = String::from_utf8_lossy(&symbol.name).into_owned();
            if matches!(symbol.kind, b't' | b'T' | b'w' | b'W') {
                functions.push(Function {
                    address: symbol.address,
                    size: 0,
                    name,
                });
            } else {
                data.entry(name).or_insert(symbol.address);
            }
        }
        Self {
            functions: FunctionTable::new(functions),
            data,
        }
    }

    fn locate(&self, text: &str) -> Result<u64, LocationError> {
        match self.functions.locate(text) {
            Ok((first, _)) => Ok(first),
            Err(error) => self.data.get(text).copied().ok_or(error),
        }
    }
}

/// The symbols that a machine's program can name.
#[derive(Debug)]
pub(crate) struct MachineSymbols {
    files: Vec<SymbolTable>,
    kernel: Option<SymbolTable>,
}

impl MachineSymbols {
    /// The symbols of an image; none if it is no ELF file.
    pub(crate) fn new(image: &[u8]) -> Self {
        Self {
            files: vec![SymbolTable::of_elf(image)],
            kernel: None,
        }
    }

    /// Adds the symbols of an ELF file.
    pub(crate) fn add(&mut self, file: &[u8]) {
        self.files.push(SymbolTable::of_elf(file));
    }

    /// Whether the symbols of a kernel in guest memory were added.
    pub(crate) const fn has_kernel(&self) -> bool {
        self.kernel.is_some()
    }

    /// Drops the symbols of the kernel in guest memory.
    pub(crate) fn forget_kernel(&mut self) {
        self.kernel = None;
    }

    /// Adds the symbols of the kernel in guest memory.
    pub(crate) fn set_kernel(&mut self, symbols: &[KernelSymbol]) {
        self.kernel = Some(SymbolTable::of_kernel(symbols));
    }

    fn tables(&self) -> impl Iterator<Item = &SymbolTable> {
        self.files.iter().chain(&self.kernel)
    }

    /// The address of a symbol, or that is written as a number.
    pub(crate) fn locate(&self, text: &str) -> Result<u64, LocationError> {
        let mut first = None;
        for table in self.tables() {
            match table.locate(text) {
                Ok(address) => return Ok(address),
                Err(error @ LocationError::Ambiguous(..)) => return Err(error),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or_else(|| LocationError::Unknown(text.to_owned())))
    }

    /// The function that contains an address.
    pub(crate) fn function(&self, address: u64) -> Option<&Function> {
        self.tables()
            .find_map(|table| table.functions.find(address))
    }

    /// All functions, by file and address.
    pub(crate) fn functions(&self) -> impl Iterator<Item = &Function> {
        self.tables().flat_map(|table| table.functions.iter())
    }
}
