//! What the chip says about itself: identifiers and the CFI query table.

use super::FLASH_BLOCK;

/// The maker, Intel, and the chip.
pub(super) const IDENTIFIERS: [u8; 2] = [0x89, 0x18];

/// Address of the table of the command set.
const PRIMARY_TABLE: usize = 0x31;

/// The CFI table of a chip with `size` bytes. Address 10H is its 16th byte.
pub(super) fn query_table(size: usize) -> Vec<u8> {
    let mut table = vec![0; PRIMARY_TABLE + 5];
    let mut put = |at: usize, bytes: &[u8]| table[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x10, b"QRY");
    // Command set 0001h.
    put(0x13, &[1, 0]);
    put(0x15, &PRIMARY_TABLE.to_le_bytes()[..2]);
    // Supply voltages of 4.5 V to 5.5 V, no VPP.
    put(0x1b, &[0x45, 0x55, 0, 0]);
    // Binary logarithms of the typical times: program, buffer (us), erase (ms); then of the maximum.
    put(0x1f, &[7, 7, 10, 0, 4, 4, 4, 0]);
    let log = size.next_power_of_two().trailing_zeros();
    // The size, an interface of 8 bits, and the size of the buffer.
    put(0x27, &[log.to_le_bytes()[0], 0, 0, 8, 0]);
    // One region of blocks: their number less one, and their size in units of 256 bytes.
    put(0x2c, &[1]);
    put(0x2d, &(size / FLASH_BLOCK - 1).to_le_bytes()[..2]);
    put(0x2f, &(FLASH_BLOCK / 256).to_le_bytes()[..2]);
    put(PRIMARY_TABLE, b"PRI10");
    table
}
