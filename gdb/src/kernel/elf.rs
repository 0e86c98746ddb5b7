//! An ELF file that has nothing but symbols and the address ranges that they are in.

use object::elf::{
    ET_EXEC, FileHeader64, SHF_ALLOC, SHF_EXECINSTR, SHF_WRITE, SHN_ABS, SHT_NOBITS, SHT_NULL,
    SHT_STRTAB, SHT_SYMTAB, STB_GLOBAL, STB_LOCAL, STT_FUNC, STT_OBJECT, SectionFlags,
    SectionHeader64, SectionType, Sym64, SymbolInfo, SymbolOther, SymbolSection,
};
use object::pod::{bytes_of, bytes_of_slice};
use object::{LittleEndian as LE, U16, U32, U64};

use super::kallsyms::KernelSymbol;
use crate::elf_header::elf_header;

type ElfSection = SectionHeader64<LE>;

const CODE: SectionFlags = SectionFlags(SHF_ALLOC.0 | SHF_EXECINSTR.0);
const DATA: SectionFlags = SectionFlags(SHF_ALLOC.0 | SHF_WRITE.0);

/// The sections of a kernel: name, flags, and the symbols at the beginning and the end of each.
const SECTIONS: [(&str, SectionFlags, &[u8], &[u8]); 4] = [
    (".text", CODE, b"_stext", b"_etext"),
    (".data", DATA, b"_etext", b"_sinittext"),
    (".init.text", CODE, b"_sinittext", b"_einittext"),
    (".bss", DATA, b"_einittext", b"_end"),
];

/// A section of this kernel.
struct SectionRange {
    /// Which of [`SECTIONS`].
    index: usize,
    first: u64,
    size: u64,
}

/// A string table: strings, each ended by a zero.
struct StringTable(Vec<u8>);

impl StringTable {
    /// A table with the empty string at offset 0.
    fn new() -> Self {
        Self(vec![0])
    }

    /// Adds a string and returns its offset.
    fn add(&mut self, text: &[u8]) -> U32<LE> {
        let offset = u32::try_from(self.0.len()).unwrap_or(0);
        self.0.extend_from_slice(text);
        self.0.push(0);
        U32::new(LE, offset)
    }
}

fn section(name: U32<LE>, kind: SectionType, offset: usize, size: usize) -> ElfSection {
    let zero = U64::new(LE, 0);
    ElfSection {
        sh_name: name,
        sh_type: U32::new(LE, kind),
        sh_flags: U64::new(LE, SectionFlags(0)),
        sh_addr: zero,
        sh_offset: U64::new(LE, offset as u64),
        sh_size: U64::new(LE, size as u64),
        sh_link: U32::new(LE, 0),
        sh_info: U32::new(LE, 0),
        sh_addralign: U64::new(LE, 1),
        sh_entsize: zero,
    }
}

/// The sections whose symbols the kernel has.
fn section_ranges(symbols: &[KernelSymbol]) -> Vec<SectionRange> {
    let address = |name: &[u8]| {
        let found = symbols.iter().find(|symbol| symbol.name == name);
        found.map(|symbol| symbol.address)
    };
    let all = SECTIONS.iter().enumerate();
    all.filter_map(|(index, (.., first, end))| {
        let (first, end) = address(first).zip(address(end))?;
        let size = end.checked_sub(first).filter(|&size| size != 0)?;
        Some(SectionRange { index, first, size })
    })
    .collect()
}

fn is_global(symbol: &KernelSymbol) -> bool {
    symbol.kind.is_ascii_uppercase()
}

fn symbol_entry(symbol: &KernelSymbol, name: U32<LE>, ranges: &[SectionRange]) -> Sym64<LE> {
    let code = matches!(symbol.kind, b't' | b'T' | b'w' | b'W');
    let kind = if code { STT_FUNC } else { STT_OBJECT };
    let bind = if is_global(symbol) {
        STB_GLOBAL
    } else {
        STB_LOCAL
    };
    let contains = |range: &SectionRange| symbol.address.wrapping_sub(range.first) < range.size;
    // Section 0 is the null section.
    let section = ranges.iter().position(contains);
    let section = section.and_then(|index| u16::try_from(index + 1).ok());
    Sym64 {
        st_name: name,
        st_info: SymbolInfo(bind.0 << 4 | kind.0),
        st_other: SymbolOther(0),
        st_shndx: U16::new(LE, section.map_or(SHN_ABS, SymbolSection)),
        st_value: U64::new(LE, symbol.address),
        st_size: U64::new(LE, 0),
    }
}

/// The symbol table with its names, and the number of entries before the first global one.
fn symbol_table(
    symbols: &[KernelSymbol],
    ranges: &[SectionRange],
) -> (Vec<Sym64<LE>>, StringTable, usize) {
    // Local symbols come first.
    let mut sorted: Vec<&KernelSymbol> = symbols.iter().collect();
    sorted.sort_by_key(|symbol| is_global(symbol));
    let locals = sorted.iter().filter(|symbol| !is_global(symbol)).count();
    let mut strings = StringTable::new();
    let null = Sym64 {
        st_name: U32::new(LE, 0),
        st_info: SymbolInfo(0),
        st_other: SymbolOther(0),
        st_shndx: U16::new(LE, SymbolSection(0)),
        st_value: U64::new(LE, 0),
        st_size: U64::new(LE, 0),
    };
    let mut table = vec![null];
    for symbol in sorted {
        let name = strings.add(&symbol.name);
        table.push(symbol_entry(symbol, name, ranges));
    }
    (table, strings, locals + 1)
}

/// An ELF file with these symbols, for a debugger to load at the addresses that they have.
pub fn symbols_to_elf(symbols: &[KernelSymbol]) -> Vec<u8> {
    let ranges = section_ranges(symbols);
    let (table, strings, first_global) = symbol_table(symbols, &ranges);
    let table = bytes_of_slice(&table);
    let count = |n: usize| U32::new(LE, u32::try_from(n).unwrap_or(0));
    let header = size_of::<FileHeader64<LE>>();
    let mut names = StringTable::new();
    let mut sections = vec![section(U32::new(LE, 0), SHT_NULL, 0, 0)];
    for range in &ranges {
        let (name, flags, ..) = SECTIONS[range.index];
        sections.push(ElfSection {
            sh_flags: U64::new(LE, flags),
            sh_addr: U64::new(LE, range.first),
            sh_size: U64::new(LE, range.size),
            ..section(names.add(name.as_bytes()), SHT_NOBITS, header, 0)
        });
    }
    // The string table is the next section.
    let strings_index = sections.len() + 1;
    let name = names.add(b".symtab");
    sections.push(ElfSection {
        sh_link: count(strings_index),
        sh_info: count(first_global),
        sh_addralign: U64::new(LE, 8),
        sh_entsize: U64::new(LE, size_of::<Sym64<LE>>() as u64),
        ..section(name, SHT_SYMTAB, header, table.len())
    });
    let strings_at = header + table.len();
    let name = names.add(b".strtab");
    sections.push(section(name, SHT_STRTAB, strings_at, strings.0.len()));
    let names_at = strings_at + strings.0.len();
    let name = names.add(b".shstrtab");
    sections.push(section(name, SHT_STRTAB, names_at, names.0.len()));
    let sections_at = (names_at + names.0.len()).next_multiple_of(8);
    let mut file = bytes_of(&file_header(sections_at, sections.len())).to_vec();
    for part in [table, &strings.0, &names.0] {
        file.extend_from_slice(part);
    }
    file.resize(sections_at, 0);
    file.extend_from_slice(bytes_of_slice(&sections));
    file
}

fn file_header(sections_at: usize, sections: usize) -> FileHeader64<LE> {
    let half = |n: usize| U16::new(LE, u16::try_from(n).unwrap_or(0));
    FileHeader64 {
        e_shoff: U64::new(LE, sections_at as u64),
        e_shentsize: half(size_of::<ElfSection>()),
        e_shnum: half(sections),
        e_shstrndx: U16::new(LE, SymbolSection(u16::try_from(sections - 1).unwrap_or(0))),
        ..elf_header(ET_EXEC)
    }
}

#[cfg(test)]
mod tests {
    use object::{Object as _, ObjectSection as _, ObjectSymbol as _};

    use super::*;

    #[test]
    fn elf_file_has_every_symbol_in_its_section() {
        let base = 0xffff_ffff_8100_0000;
        let rows = [
            (base, b'T', "_stext"),
            (base + 0x10, b't', "helper"),
            (base + 0x100, b'T', "_etext"),
            (base + 0x180, b'd', "table"),
            (base + 0x200, b'T', "_sinittext"),
            (base + 0x210, b'T', "start_kernel"),
            (base + 0x300, b'T', "_einittext"),
            (base + 0x380, b'B', "jiffies"),
            (base + 0x400, b'B', "_end"),
            (0x1000, b'A', "percpu"),
        ];
        let symbols = rows.map(|(address, kind, name)| KernelSymbol {
            address,
            kind,
            name: name.as_bytes().to_vec(),
        });
        let bytes = symbols_to_elf(&symbols);
        let file = object::File::parse(&*bytes).unwrap();
        assert_eq!(file.symbols().count(), rows.len());
        let section = |name: &str| {
            let symbol = file.symbols().find(|s| s.name() == Ok(name)).unwrap();
            let index = symbol.section_index()?;
            let section = file.section_by_index(index).unwrap();
            Some(section.name().unwrap().to_owned())
        };
        assert_eq!(section("helper").unwrap(), ".text");
        assert_eq!(section("table").unwrap(), ".data");
        assert_eq!(section("start_kernel").unwrap(), ".init.text");
        assert_eq!(section("jiffies").unwrap(), ".bss");
        assert_eq!(section("percpu"), None);
    }
}
