//! Names for a guest's addresses, from the symbol table of its ELF image, and its instructions.

use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter, Instruction};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind, SymbolSection};

/// A function or a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Symbol {
    address: u64,
    size: u64,
    name: String,
}

/// The symbols and the code of an image that runs where it is linked.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    /// By address.
    symbols: Vec<Symbol>,
    /// Segments: address and bytes.
    segments: Vec<(u64, Vec<u8>)>,
}

impl Symbols {
    /// Those of an ELF64 image; none if it is no such image.
    pub fn of(image: &[u8]) -> Self {
        let Ok(file) = ElfFile64::<object::LittleEndian>::parse(image) else {
            return Self::default();
        };
        let named = |symbol: &object::read::elf::ElfSymbol64<'_, '_, object::LittleEndian>| {
            let wanted = matches!(
                symbol.kind(),
                SymbolKind::Text | SymbolKind::Data | SymbolKind::Label | SymbolKind::Unknown
            );
            wanted && matches!(symbol.section(), SymbolSection::Section(_))
        };
        let mut symbols: Vec<_> = file
            .symbols()
            .filter(named)
            .filter_map(|symbol| {
                Some(Symbol {
                    address: symbol.address(),
                    size: symbol.size(),
                    name: short(symbol.name().ok()?),
                })
            })
            .collect();
        symbols.sort_by_key(|symbol| symbol.address);
        reach_to_the_next(&mut symbols);
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

    /// The symbol that `address` lies in, and how far into it.
    pub fn find(&self, address: u64) -> Option<(&str, u64)> {
        let after = self.symbols.partition_point(|s| s.address <= address);
        let symbol = self.symbols[..after]
            .iter()
            .rev()
            .find(|s| address - s.address < s.size)?;
        Some((&symbol.name, address - symbol.address))
    }

    /// `name+0x12`, or the plain address where no symbol is.
    pub fn place(&self, address: u64) -> String {
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

/// Labels of assembly have no size: they reach as far as the next symbol.
fn reach_to_the_next(symbols: &mut [Symbol]) {
    let mut next = None;
    for symbol in symbols.iter_mut().rev() {
        if let (0, Some(next)) = (symbol.size, next) {
            symbol.size = next - symbol.address;
        }
        next = Some(symbol.address);
    }
}

/// An instruction as AT&T text, as everywhere in this program.
pub fn disassemble(instruction: &Instruction) -> String {
    let mut text = String::new();
    GasFormatter::new().format(instruction, &mut text);
    text
}

/// The last part of a Rust path, without its hash; other names without the prefix by which the
/// guest's runtime keeps its own apart.
fn short(name: &str) -> String {
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
        let symbol = |address, size, name: &str| Symbol {
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
    fn place_names_the_symbol_around_an_address() {
        let symbols = symbols();
        assert_eq!(symbols.place(0x100), "one");
        assert_eq!(symbols.place(0x10f), "one+0xf");
        assert_eq!(symbols.place(0x110), "0x110");
        assert_eq!(symbols.place(0), "0x0");
        assert_eq!(symbols.address("two"), Some(0x120));
    }

    #[test]
    fn labels_reach_to_the_next_symbol() {
        let mut symbols = symbols();
        symbols.symbols[0].size = 0;
        reach_to_the_next(&mut symbols.symbols);
        assert_eq!(symbols.place(0x11f), "one+0x1f");
        assert_eq!(symbols.place(0x124), "0x124");
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
    fn rust_names_are_cut_to_their_last_part() {
        assert_eq!(short("_ZN4demo6escape17h0123456789abcdefE"), "escape");
        assert_eq!(short("hindsight_land"), "land");
        assert_eq!(short("main"), "main");
    }

    #[test]
    fn no_image_has_no_symbols() {
        assert_eq!(Symbols::of(b"\x7fELF").place(16), "0x10");
    }
}
