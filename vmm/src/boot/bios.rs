//! The structures of a BIOS in low memory, as far as images read them that a boot loader loads.
//!
//! They are an interrupt table whose services all fail, and the BIOS data area with the size of
//! conventional memory. There is no BIOS: a kernel that calls one in real mode gets errors and
//! continues without.

use crate::boot::bytes::put;
use crate::boot::placement::Placement;
use crate::memory::layout::CONVENTIONAL_END;

/// The interrupt table of real mode: 256 pairs of offset and segment.
const TABLE: u64 = 0;
/// The handlers, at the end of the segment of a BIOS.
const HANDLERS: u64 = 0xf_ff00;
const HANDLERS_SEGMENT: u16 = 0xf000;
const HANDLERS_OFFSET: u16 = 0xff00;

/// IRET, followed by a service that fails: it sets CF in the FLAGS that IRET restores.
///
/// `iret; push bp; mov bp, sp; or byte [bp + 6], 1; pop bp; iret`
const CODE: [u8; 10] = [0xcf, 0x55, 0x89, 0xe5, 0x80, 0x4e, 0x06, 0x01, 0x5d, 0xcf];
/// Offset of the failing service in the handlers.
const FAIL: u16 = 1;

/// The BIOS data area, and the offsets of its fields.
const DATA: u64 = 0x400;
const DATA_SIZE: usize = 0x100;
const COM1: usize = 0x00;
const EBDA_SEGMENT: usize = 0x0e;
/// Size of conventional memory in KiB.
const MEMORY_KIB: usize = 0x13;

/// Places the structures that do not overlap the image. An image may occupy low memory itself.
pub(super) fn add_structures(placement: &mut Placement<'_>) {
    let data = data_area();
    // A table without its handlers would be worse than no table.
    let handlers = placement.fixed("BIOS handlers", HANDLERS, CODE.len() as u64, CODE.to_vec());
    if handlers.is_ok() {
        let table = interrupt_table();
        let _occupied = placement.fixed("interrupt table", TABLE, table.len() as u64, table);
    }
    let _occupied = placement.fixed("BIOS data area", DATA, data.len() as u64, data);
}

fn interrupt_table() -> Vec<u8> {
    let entry = |vector: u8| {
        // Exceptions and the vectors of the two interrupt controllers must not change the CF of the
        // code that they interrupt.
        let handler = match vector {
            0..=0x0f | 0x70..=0x77 => HANDLERS_OFFSET,
            _ => HANDLERS_OFFSET + FAIL,
        };
        [handler, HANDLERS_SEGMENT]
    };
    (0..=u8::MAX)
        .flat_map(entry)
        .flat_map(u16::to_le_bytes)
        .collect()
}

fn data_area() -> Vec<u8> {
    let mut data = vec![0; DATA_SIZE];
    let word = |value: u64| u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes();
    put(&mut data, COM1, word(0x3f8));
    put(&mut data, EBDA_SEGMENT, word(CONVENTIONAL_END >> 4));
    put(&mut data, MEMORY_KIB, word(CONVENTIONAL_END >> 10));
    data
}
