//! Tests of the VGA's registers.

use super::*;
use proptest::prelude::*;

fn read(vga: &mut Vga, port: u16) -> u8 {
    let mut data = [0];
    vga.read(u64::from(port - VGA_PORT), &mut data);
    data[0]
}

fn write(vga: &mut Vga, port: u16, data: &[u8]) {
    vga.write(u64::from(port - VGA_PORT), data);
}

#[test]
fn reset_leaves_80_columns_and_25_rows_in_colour() {
    let mode = Vga::default().text_mode().unwrap();
    assert_eq!((mode.columns, mode.rows), (80, 25));
    assert_eq!(mode.palette[7], [0xaa; 3]);
    assert_eq!(mode.palette[6], [0xaa, 0x55, 0], "brown, not dark yellow");
    assert_eq!(mode.palette[12], [0xff, 0x55, 0x55]);
    assert_eq!(mode.cursor, Some(Cursor { row: 0, column: 0 }));
    assert!(mode.blinks);
}

#[test]
fn word_writes_set_index_and_register() {
    let mut vga = Vga::default();
    for word in [[0x0e, 0x03], [0x0f, 0x25], [0x0c, 0], [0x0d, 80]] {
        write(&mut vga, 0x3d4, &word);
    }
    assert_eq!(read(&mut vga, 0x3d5), 80);
    let mode = vga.text_mode().unwrap();
    // Cell 0x325 is 725 cells after cell 80.
    let cursor = Cursor { row: 9, column: 5 };
    assert_eq!(mode.cursor, Some(cursor));
    write(&mut vga, 0x3d4, &[0x0a, 0x20]);
    assert_eq!(vga.text_mode().unwrap().cursor, None);
}

#[test]
fn cells_begin_at_the_start_address_and_wrap_at_the_end_of_the_memory() {
    let mut vga = Vga::default();
    write(&mut vga, 0x3d4, &[0x0c, 0x3f]);
    write(&mut vga, 0x3d4, &[0x0d, 0xff]);
    let mut memory = vec![0; TEXT_MEMORY_LEN];
    memory[..2].copy_from_slice(b"B\x1e");
    memory[TEXT_MEMORY_LEN - 2..].copy_from_slice(b"A\x07");
    let mode = vga.text_mode().unwrap();
    assert_eq!(mode.cell(&memory, 0, 0), (b'A', 7));
    assert_eq!(mode.cell(&memory, 0, 1), (b'B', 0x1e));
    assert_eq!(mode.cell(&[], 0, 0), (0, 0));
}

#[test]
fn attribute_controller_takes_index_and_data_in_turn() {
    let mut vga = Vga::default();
    read(&mut vga, 0x3da);
    write(&mut vga, 0x3c0, &[0x21]);
    write(&mut vga, 0x3c0, &[0x3f]);
    write(&mut vga, 0x3c0, &[0x22]);
    // The status makes the next write an index again.
    read(&mut vga, 0x3da);
    write(&mut vga, 0x3c0, &[0x21]);
    assert_eq!(read(&mut vga, 0x3c1), 0x3f);
    assert_eq!(vga.text_mode().unwrap().palette[1], [0xff; 3]);
}

#[test]
fn colours_are_written_and_read_in_sequence() {
    let mut vga = Vga::default();
    write(&mut vga, 0x3c8, &[255]);
    for part in [0xff, 2, 3, 4] {
        write(&mut vga, 0x3c9, &[part]);
    }
    write(&mut vga, 0x3c7, &[255]);
    let colours = [(); 4].map(|()| read(&mut vga, 0x3c9));
    assert_eq!(colours, [0x3f, 2, 3, 4], "colour 0 follows colour 255");
}

#[test]
fn protected_registers_keep_all_but_line_compare() {
    let mut vga = Vga::default();
    write(&mut vga, 0x3d4, &[0x11, 0x8e]);
    write(&mut vga, 0x3d4, &[0, 1]);
    assert_eq!(read(&mut vga, 0x3d5), 0x5f);
    write(&mut vga, 0x3d4, &[7, 0]);
    assert_eq!(read(&mut vga, 0x3d5), 0x0f);
    write(&mut vga, 0x3d4, &[0x11, 0x0e]);
    write(&mut vga, 0x3d4, &[0, 1]);
    assert_eq!(read(&mut vga, 0x3d5), 1);
}

#[test]
fn graphics_mode_has_no_text() {
    let mut vga = Vga::default();
    write(&mut vga, 0x3ce, &[6, 5]);
    assert_eq!(vga.text_mode(), None);
}

#[test]
fn waiting_for_a_retrace_ends() {
    let mut vga = Vga::default();
    let status: Vec<u8> = (0..4).map(|_| read(&mut vga, 0x3da) & 8).collect();
    assert_eq!(status, [0, 8, 0, 8]);
}

#[test]
fn state_with_another_colour_table_is_refused() {
    let mut vga = Vga::default();
    let good = vga.save();
    let short = VgaState {
        dac: vec![0; 3],
        ..good.clone()
    };
    let outside = VgaState {
        dac_next: [0, 768],
        ..good.clone()
    };
    for state in [short, outside] {
        assert_eq!(vga.restore(&state), Err(VgaError));
    }
    assert_eq!(vga.save(), good);
}

proptest! {
    #[test]
    fn any_accesses_leave_a_screen_of_limited_size(
        accesses in prop::collection::vec((0_u64..u64::from(VGA_PORTS), any::<bool>(), any::<[u8; 2]>()), 0..300),
    ) {
        let mut vga = Vga::default();
        for (offset, writes, mut data) in accesses {
            if writes {
                vga.write(offset, &data);
            } else {
                vga.read(offset, &mut data);
            }
        }
        let mut other = Vga::default();
        other.restore(&vga.save()).unwrap();
        prop_assert_eq!(other.save(), vga.save());
        if let Some(mode) = vga.text_mode() {
            prop_assert!((1..=256).contains(&mode.columns) && (1..=128).contains(&mode.rows));
            mode.cell(&[1; TEXT_MEMORY_LEN], mode.rows - 1, mode.columns - 1);
        }
    }
}

/// Writes a DISPI register by the ports.
fn set_dispi(vga: &mut Vga, index: u16, value: u16) {
    vga.write(DISPI_OFFSET.into(), &index.to_le_bytes());
    vga.write(u64::from(DISPI_OFFSET) + 1, &value.to_le_bytes());
}

#[test]
fn dispi_ports_set_a_graphics_mode_and_clear_its_memory() {
    let memory = memory::tests::video_memory();
    let mut vga = Vga::with_memory(memory.clone());
    memory.write(640 * 480 - 1, &[1, 2]);
    for (index, value) in [(1, 640), (2, 480), (3, 8), (4, 0x41)] {
        set_dispi(&mut vga, index, value);
    }
    let mut bytes = [0; 2];
    memory.read(640 * 480 - 1, &mut bytes);
    assert_eq!(bytes, [0, 2]);
    vga.write(DISPI_OFFSET.into(), &[2, 0]);
    for offset in [1, 2] {
        vga.read(u64::from(DISPI_OFFSET) + offset, &mut bytes);
        assert_eq!(bytes, 480_u16.to_le_bytes());
    }
    assert_eq!(vga.text_mode(), None);
    let ScreenMode::Graphics(mode) = vga.mode() else {
        panic!("a graphics mode");
    };
    assert_eq!((mode.width, mode.height), (640, 480));
    assert_eq!(mode.palette[12], [0xaa, 0, 0x55]);
    set_dispi(&mut vga, 4, 0);
    assert!(vga.text_mode().is_some());
}

#[test]
fn colour_table_has_8_bits_where_the_guest_selects_them() {
    let mut vga = Vga::default();
    for (index, value) in [(1, 640), (2, 480), (3, 8), (4, 0x61)] {
        set_dispi(&mut vga, index, value);
    }
    write(&mut vga, 0x3c8, &[3]);
    for part in [0xff, 0x40, 1] {
        write(&mut vga, 0x3c9, &[part]);
    }
    let ScreenMode::Graphics(mode) = vga.mode() else {
        panic!("a graphics mode");
    };
    assert_eq!(mode.rgb(&[3]), [0xff, 0x40, 1]);
}

#[test]
fn vga_graphics_have_no_picture() {
    let mut vga = Vga::default();
    write(&mut vga, 0x3ce, &[6, 5]);
    assert_eq!(vga.mode(), ScreenMode::Planar);
}

#[test]
fn state_with_impossible_dispi_registers_is_refused() {
    let mut vga = Vga::default();
    let mut state = vga.save();
    state.dispi.registers[4] = 1;
    assert_eq!(vga.restore(&state), Err(VgaError));
    assert_eq!(vga.save(), VgaState::default());
}
