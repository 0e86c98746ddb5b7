//! Kernels whose tables are made here, and memory that only resembles tables.

use hindsight_cpu::state::CpuState;
use object::{Object as _, ObjectSymbol as _};

use super::kallsyms::{DIGIT_TOKENS, KallsymsTables, KernelSymbol, NAMES_PER_MARKER, SearchBudget};
use super::search::{find_symbols, symbol_file};
use crate::memory::LinearMemory;
use crate::test_ram::FlatRam;

const BASE: u64 = 0xffff_ffff_8100_0000;

/// The orders in which kernels have had their tables.
#[derive(Clone, Copy, PartialEq)]
enum TableOrder {
    /// Until Linux 6.1: the offsets come first.
    Early,
    /// Linux 6.2 and 6.3: the same, with the names' numbers in alphabetical order.
    EarlyWithNumbers,
    /// Since Linux 6.4: the offsets come last.
    Late,
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(8), 0);
}

/// The offsets of the symbols, relative to the base, which follows them.
fn offsets(symbols: &[(u64, &str)]) -> Vec<u8> {
    let mut offsets = Vec::new();
    for (address, _) in symbols {
        let offset = match address.checked_sub(BASE) {
            Some(offset) => -1 - i32::try_from(offset).unwrap(),
            None => i32::try_from(*address).unwrap(),
        };
        offsets.extend(offset.to_le_bytes());
    }
    pad(&mut offsets);
    offsets.extend(BASE.to_le_bytes());
    offsets
}

/// The count, the names and the markers.
fn names(symbols: &[(u64, &str)]) -> Vec<u8> {
    let mut bytes = u32::try_from(symbols.len()).unwrap().to_le_bytes().to_vec();
    pad(&mut bytes);
    let (start, mut markers) = (bytes.len(), Vec::new());
    for (i, (_, name)) in symbols.iter().enumerate() {
        if i % NAMES_PER_MARKER == 0 {
            markers.extend(u32::try_from(bytes.len() - start).unwrap().to_le_bytes());
        }
        let codes = name.replace("init", "\x01");
        let len = codes.len();
        if len < 0x80 {
            bytes.push(u8::try_from(len).unwrap());
        } else {
            bytes.push(u8::try_from(len & 0x7f | 0x80).unwrap());
            bytes.push(u8::try_from(len >> 7).unwrap());
        }
        bytes.extend(codes.bytes());
    }
    pad(&mut bytes);
    bytes.extend(markers);
    pad(&mut bytes);
    bytes
}

/// The tokens and their indices. Token 1 is a whole word, those of letters are the letters.
fn tokens() -> Vec<u8> {
    let (mut bytes, mut indices) = (Vec::new(), Vec::new());
    for code in 0..=255_u8 {
        indices.extend(u16::try_from(bytes.len()).unwrap().to_le_bytes());
        match code {
            1 => bytes.extend(b"init"),
            b' '..=b'~' => bytes.push(code),
            _ => bytes.extend(b"xx"),
        }
        bytes.push(0);
    }
    pad(&mut bytes);
    bytes.extend(indices);
    bytes
}

/// Memory with the tables that `scripts/kallsyms.c` makes of these symbols.
fn image(symbols: &[(u64, &str)], order: TableOrder) -> Vec<u8> {
    let mut image = vec![0xcc; 4096];
    if order != TableOrder::Late {
        image.extend(offsets(symbols));
    }
    image.extend(names(symbols));
    if order == TableOrder::EarlyWithNumbers {
        image.extend(vec![0x77; 3 * symbols.len()]);
        pad(&mut image);
    }
    image.extend(tokens());
    if order == TableOrder::Late {
        image.extend(offsets(symbols));
    }
    image.resize(image.len() + 0x2000, 0xcc);
    image
}

fn symbols_of(image: Vec<u8>) -> Option<Vec<KernelSymbol>> {
    let mut windows = image.windows(DIGIT_TOKENS.len());
    let digits = windows.position(|window| window == DIGIT_TOKENS)?;
    let memory = FlatRam::new(image);
    let mut budget = SearchBudget::default();
    KallsymsTables::find(&memory, digits as u64, &mut budget)?.symbols(&memory, &mut budget)
}

#[test]
fn symbols_are_read_in_every_order_of_the_tables() {
    let long = format!("T{}", "x".repeat(200));
    let mut all = vec![(0x1000, "Apercpu"), (BASE, "Tinit_all"), (BASE + 9, &*long)];
    let many: Vec<_> = (0..700)
        .map(|i| (BASE + 16 + i, format!("t_{i}")))
        .collect();
    all.extend(many.iter().map(|(address, name)| (*address, &**name)));
    for order in [
        TableOrder::Early,
        TableOrder::EarlyWithNumbers,
        TableOrder::Late,
    ] {
        let found = symbols_of(image(&all, order)).unwrap();
        assert_eq!(found.len(), all.len());
        for (symbol, (address, name)) in found.iter().zip(&all) {
            assert_eq!(symbol.address, *address);
            let text = [&[symbol.kind][..], &*symbol.name].concat();
            assert_eq!(text, name.as_bytes());
        }
    }
}

#[test]
fn corrupt_tables_never_panic() {
    let symbols = [(BASE, "Tinit_all"), (BASE + 4, "Tmore")];
    let valid = image(&symbols, TableOrder::EarlyWithNumbers);
    assert!(symbols_of(valid.clone()).is_some());
    for at in (0..valid.len()).step_by(3) {
        let mut corrupt = valid.clone();
        corrupt[at] ^= 0xff;
        symbols_of(corrupt);
    }
}

#[test]
fn tokens_without_the_other_tables_are_no_kernel() {
    let padded = [&[0; 4096], DIGIT_TOKENS, &[0; 9000]].concat();
    assert_eq!(symbols_of(padded), None);
    assert_eq!(symbols_of(DIGIT_TOKENS.to_vec()), None);
}

#[test]
fn offset_that_wraps_the_address_space_does_not_panic() {
    let symbols = [(BASE, "Tinit_all"), (BASE + 4, "Tmore")];
    let mut image = image(&symbols, TableOrder::Early);
    // The offsets are at the beginning, followed by the base.
    image[4096..4100].copy_from_slice(&i32::MIN.to_le_bytes());
    image[4104..4112].copy_from_slice(&0xffff_ffff_8000_0000_u64.to_le_bytes());
    assert_eq!(symbols_of(image).unwrap()[0].address, u64::MAX);
}

#[test]
fn tables_are_found_across_the_pieces_of_a_search() {
    let symbols = [(BASE, "Tinit_all"), (BASE + 4, "Tmore")];
    let tables = image(&symbols, TableOrder::Late);
    let digits = |image: &[u8]| {
        image
            .windows(DIGIT_TOKENS.len())
            .position(|w| w == DIGIT_TOKENS)
    };
    // RAM is searched in pieces of 1 MiB: put the tokens of the digits across the end of one.
    let at = ((1 << 20) - digits(&tables).unwrap() - 5) & !7;
    let ram = FlatRam::new([vec![0; at], tables].concat());
    let state = CpuState::reset();
    let linear = LinearMemory {
        memory: &ram,
        state: &state,
    };
    assert_eq!(find_symbols(&linear, &|| false).unwrap().len(), 2);
    assert_eq!(find_symbols(&linear, &|| true), None);
    let file = symbol_file(&linear, &|| false).unwrap();
    let file = object::File::parse(&*file).unwrap();
    assert!(file.symbols().any(|symbol| symbol.name() == Ok("init_all")));
}

/// Tables with one long token, which the names repeat.
fn image_with_long_token(token: usize, name: &str) -> Vec<u8> {
    let symbols: Vec<_> = (0..200).map(|i| (BASE + i, name)).collect();
    let mut image = image(&symbols, TableOrder::Early);
    let (mut tokens, mut indices) = (Vec::new(), Vec::new());
    for code in 0..=255_u8 {
        indices.extend(u16::try_from(tokens.len()).unwrap().to_le_bytes());
        match code {
            1 => tokens.extend(vec![b'y'; token]),
            b' '..=b'~' => tokens.push(code),
            _ => tokens.extend(b"xx"),
        }
        tokens.push(0);
    }
    pad(&mut tokens);
    let old = self::tokens();
    let at = image.windows(old.len()).position(|w| w == old).unwrap();
    image.splice(at.., [tokens, indices, vec![0xcc; 0x2000]].concat());
    image
}

#[test]
fn names_that_unpack_to_more_than_a_name_are_no_kernel() {
    let name = format!("T{}", "init".repeat(100));
    assert!(symbols_of(image_with_long_token(4, &name)).is_some());
    assert_eq!(symbols_of(image_with_long_token(5000, &name)), None);
}

#[test]
fn search_ends_when_its_budget_is_used_up() {
    let symbols = [(BASE, "Tinit_all"), (BASE + 4, "Tmore")];
    let tables = image(&symbols, TableOrder::Late);
    let digits = tables
        .windows(DIGIT_TOKENS.len())
        .position(|w| w == DIGIT_TOKENS);
    let memory = FlatRam::new(tables);
    let mut budget = SearchBudget::default();
    let mut find = || KallsymsTables::find(&memory, digits.unwrap() as u64, &mut budget);
    let found = (0..1000).take_while(|_| find().is_some()).count();
    assert!((1..1000).contains(&found), "{found}");
}
