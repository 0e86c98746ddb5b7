//! The symbols and instructions of a guest's ELF image.

use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter, Instruction};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind, SymbolSection};

/// A function, a variable or a label.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ElfSymbol {
    address: u64,
    size: u64,
    name: String,
}

/// The symbols and the segments of an image that runs at its link address.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    /// In ascending order of their addresses.
    symbols: Vec<ElfSymbol>,
    /// Address and bytes of each segment.
    segments: Vec<(u64, Vec<u8>)>,
}

impl Symbols {
    /// Reads an ELF64 image. An image of another format has no symbols.
    pub fn of(image: &[u8]) -> Self {
        let Ok(file) = ElfFile64::<object::LittleEndian>::parse(image) else {
            return Self::default();
        };
        let named = |symbol: &object::read::elf::ElfSymbol64<'_, '_, object::LittleEndian>| {
            let is_location = matches!(
                symbol.kind(),
                SymbolKind::Text | SymbolKind::Data | SymbolKind::Label | SymbolKind::Unknown
            );
            is_location && matches!(symbol.section(), SymbolSection::Section(_))
        };
        let mut symbols: Vec<_> = file
            .symbols()
            .filter(named)
            .filter_map(|symbol| {
                Some(ElfSymbol {
                    address: symbol.address(),
                    size: symbol.size(),
                    name: short_name(symbol.name().ok()?),
                })
            })
            .collect();
        symbols.sort_by_key(|symbol| symbol.address);
        extend_labels(&mut symbols);
        let segments = file
            .segments()
            .filter_map(|segment| Some((segment.address(), segment.data().ok()?.to_vec())))
            .collect();
        Self { symbols, segments }
    }

    /// The address of the symbol `name`.
    pub fn address(&self, name: &str) -> Option<u64> {
        let found = self.symbols.iter().find(|symbol| symbol.name == name);
        found.map(|symbol| symbol.address)
    }

    /// The symbol that contains `address`, and the offset in it.
    pub fn find(&self, address: u64) -> Option<(&str, u64)> {
        let after = self.symbols.partition_point(|s| s.address <= address);
        let symbol = self.symbols[..after]
            .iter()
            .rev()
            .find(|s| address - s.address < s.size)?;
        Some((&symbol.name, address - symbol.address))
    }

    /// The name of an address: `name+0x12`, or the address if no symbol contains it.
    pub fn name_address(&self, address: u64) -> String {
        match self.find(address) {
            Some((name, 0)) => name.to_owned(),
            Some((name, offset)) => format!("{name}+{offset:#x}"),
            None => format!("{address:#x}"),
        }
    }

    /// The 64-bit instruction at `address`.
    pub fn instruction(&self, address: u64) -> Option<Instruction> {
        let code = self.segments.iter().find_map(|(start, bytes)| {
            let offset = usize::try_from(address.checked_sub(*start)?).ok()?;
            bytes.get(offset..).filter(|code| !code.is_empty())
        })?;
        let instruction = Decoder::with_ip(64, code, address, DecoderOptions::NONE).decode();
        (!instruction.is_invalid()).then_some(instruction)
    }
}

/// Extends labels of assembly text, which have no size, to the next symbol.
fn extend_labels(symbols: &mut [ElfSymbol]) {
    let mut next = None;
    for symbol in symbols.iter_mut().rev() {
        if let (0, Some(next)) = (symbol.size, next) {
            symbol.size = next - symbol.address;
        }
        next = Some(symbol.address);
    }
}

/// Formats an instruction in AT&T syntax, as everywhere in this program.
pub fn disassemble(instruction: &Instruction) -> String {
    let mut text = String::new();
    GasFormatter::new().format(instruction, &mut text);
    text
}

/// The last part of a Rust path, without its hash. Other names lose the prefix of the guest's
/// runtime.
fn short_name(name: &str) -> String {
    let plain = format!("{:#}", rustc_demangle::demangle(name));
    let last = plain.rsplit("::").next().unwrap_or(&plain);
    let last = last.strip_prefix("hindsight_").unwrap_or(last);
    let printable = |c: &char| c.is_ascii_graphic();
    last.chars().filter(printable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols() -> Symbols {
        let symbol = |address, size, name: &str| ElfSymbol {
            address,
            size,
            name: name.to_owned(),
        };
        Symbols {
            symbols: vec![symbol(0x100, 0x10, "one"), symbol(0x120, 4, "two")],
            segments: vec![(0x100, vec![0x90, 0x0f, 0x0b])],
        }
    }

    #[test]
    fn address_is_named_by_symbol_and_offset() {
        let symbols = symbols();
        assert_eq!(symbols.name_address(0x100), "one");
        assert_eq!(symbols.name_address(0x10f), "one+0xf");
        assert_eq!(symbols.name_address(0x110), "0x110");
        assert_eq!(symbols.name_address(0), "0x0");
        assert_eq!(symbols.address("two"), Some(0x120));
    }

    #[test]
    fn labels_extend_to_the_next_symbol() {
        let mut symbols = symbols();
        symbols.symbols[0].size = 0;
        extend_labels(&mut symbols.symbols);
        assert_eq!(symbols.name_address(0x11f), "one+0x1f");
        assert_eq!(symbols.name_address(0x124), "0x124");
    }

    #[test]
    fn instruction_is_read_from_the_image() {
        let symbols = symbols();
        let text = |address| symbols.instruction(address).as_ref().map(disassemble);
        assert_eq!(text(0x101).as_deref(), Some("ud2"));
        assert_eq!(text(0x103), None);
        assert_eq!(text(0x50), None);
    }

    #[test]
    fn rust_path_is_shortened_to_its_last_part() {
        assert_eq!(short_name("_ZN4demo6escape17h0123456789abcdefE"), "escape");
        assert_eq!(short_name("hindsight_land"), "land");
        assert_eq!(short_name("main"), "main");
    }

    #[test]
    fn malformed_image_has_no_symbols() {
        assert_eq!(Symbols::of(b"\x7fELF").name_address(16), "0x10");
    }
}
