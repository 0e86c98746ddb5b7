//! The structures of a BIOS in low memory, as far as images read them that a boot loader loads.
//!
//! They are an interrupt table whose services all fail, and the BIOS data area with the size of
//! conventional memory. There is no BIOS: a kernel that calls one in real mode gets errors, and the
//! user a warning that names the service.

use crate::boot::bytes::put;
use crate::boot::placement::Placement;
use crate::memory::layout::{BIOS_CALL_PORT, CONVENTIONAL_END};

/// The interrupt table of real mode: 256 pairs of offset and segment.
const TABLE: u64 = 0;
/// The handlers, in the segment of a BIOS.
const HANDLERS: u64 = 0xf_f000;
const HANDLERS_SEGMENT: u16 = 0xf000;
const HANDLERS_OFFSET: u16 = 0xf000;

/// The handler of interrupts that are no calls: IRET.
const RETURN: u8 = 0xcf;
/// The handler of calls, after that of its vector has pushed AX and set AL to the vector.
///
/// It reports the vector to the monitor and fails: it sets CF in the FLAGS that IRET restores.
///
/// `push dx; mov dx, port; out dx, al; pop dx; pop ax;`
/// `push bp; mov bp, sp; or byte [bp + 6], 1; pop bp; iret`
const FAIL: [u8; 16] = {
    let [low, high] = BIOS_CALL_PORT.to_le_bytes();
    [
        0x52, 0xba, low, high, 0xee, 0x5a, 0x58, // reports
        0x55, 0x89, 0xe5, 0x80, 0x4e, 0x06, 0x01, 0x5d, 0xcf, // fails
    ]
};
/// Offset of [`FAIL`] in the handlers.
const FAIL_AT: u16 = 1;
/// Offset of the handlers of single vectors.
const VECTORS_AT: u16 = 0x20;
/// Size of such a handler: `push ax; mov al, vector; jmp FAIL`.
const VECTOR_SIZE: u16 = 6;

/// The BIOS data area, and the offsets of its fields.
const DATA: u64 = 0x400;
const DATA_SIZE: usize = 0x100;
const COM1: usize = 0x00;
const EBDA_SEGMENT: usize = 0x0e;
/// Size of conventional memory in KiB.
const MEMORY_KIB: usize = 0x13;

/// Places the structures that do not overlap the image. An image may occupy low memory itself.
pub(super) fn add_structures(placement: &mut Placement<'_>) {
    let (table, handlers, data) = (interrupt_table(), handlers(), data_area());
    let sizes = (table.len() as u64, handlers.len() as u64);
    // A table without its handlers would be worse than no table.
    if placement.is_free(TABLE, sizes.0) && placement.is_free(HANDLERS, sizes.1) {
        let _free = placement.fixed("interrupt table", TABLE, sizes.0, table);
        let _free = placement.fixed("BIOS handlers", HANDLERS, sizes.1, handlers);
    }
    let _occupied = placement.fixed("BIOS data area", DATA, data.len() as u64, data);
}

/// Whether the vector is a call of the BIOS, or an exception that the guest does not handle.
///
/// The vectors of the two interrupt controllers and NMIs must not change the CF of the code that
/// they interrupt.
const fn is_call(vector: u8) -> bool {
    !matches!(vector, 2 | 8..=0x0f | 0x70..=0x77)
}

/// The offset of the handler of `vector` in the code of the handlers.
fn handler(vector: u8) -> u16 {
    if is_call(vector) {
        VECTORS_AT + u16::from(vector) * VECTOR_SIZE
    } else {
        0
    }
}

fn interrupt_table() -> Vec<u8> {
    (0..=u8::MAX)
        .flat_map(|vector| [HANDLERS_OFFSET + handler(vector), HANDLERS_SEGMENT])
        .flat_map(u16::to_le_bytes)
        .collect()
}

fn handlers() -> Vec<u8> {
    let mut code = vec![RETURN];
    code.extend(FAIL);
    code.resize(VECTORS_AT.into(), 0);
    for vector in 0..=u8::MAX {
        let next = VECTORS_AT + (u16::from(vector) + 1) * VECTOR_SIZE;
        let [low, high] = FAIL_AT.wrapping_sub(next).to_le_bytes();
        code.extend([0x50, 0xb0, vector, 0xe9, low, high]);
    }
    code
}

fn data_area() -> Vec<u8> {
    let mut data = vec![0; DATA_SIZE];
    let word = |value: u64| u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes();
    put(&mut data, COM1, word(0x3f8));
    put(&mut data, EBDA_SEGMENT, word(CONVENTIONAL_END >> 4));
    put(&mut data, MEMORY_KIB, word(CONVENTIONAL_END >> 10));
    data
}
