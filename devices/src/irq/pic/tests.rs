use proptest::prelude::*;

use super::*;
use crate::inspect::test::field;

/// A pair as PC firmware initializes it: vectors 20H and 28H, nothing masked.
fn pic() -> Pic {
    let mut pic = Pic::new();
    initialize(&mut pic, 0x01);
    pic
}

fn initialize(pic: &mut Pic, icw4: u8) {
    for (port, base, wiring) in [(0x20, 0x20, 4), (0xa0, 0x28, 2)] {
        pic.write(port, 0x11);
        pic.write(port + 1, base);
        pic.write(port + 1, wiring);
        pic.write(port + 1, icw4);
    }
}

fn acknowledged(pic: &mut Pic) -> Option<u8> {
    pic.output().then(|| pic.acknowledge())
}

#[test]
fn requests_are_acknowledged_by_priority_and_nest() {
    let mut pic = pic();
    pic.set_line(4, true);
    pic.set_line(3, true);
    assert_eq!(acknowledged(&mut pic), Some(0x23));
    assert_eq!(acknowledged(&mut pic), None);
    pic.set_line(1, true);
    assert_eq!(acknowledged(&mut pic), Some(0x21));
    pic.write(0x20, 0x20);
    assert_eq!(acknowledged(&mut pic), None);
    pic.write(0x20, 0x20);
    assert_eq!(acknowledged(&mut pic), Some(0x24));
}

#[test]
fn slave_line_is_acknowledged_through_the_cascade() {
    let mut pic = pic();
    pic.set_line(12, true);
    pic.set_line(8, true);
    assert_eq!(acknowledged(&mut pic), Some(0x28));
    assert_eq!(acknowledged(&mut pic), None);
    pic.write(0xa0, 0x20);
    assert_eq!(acknowledged(&mut pic), None);
    pic.write(0x20, 0x20);
    assert_eq!(acknowledged(&mut pic), Some(0x2c));
}

#[test]
fn special_fully_nested_master_accepts_a_higher_slave_line() {
    let mut pic = pic();
    initialize(&mut pic, 0x11);
    pic.set_line(12, true);
    assert_eq!(acknowledged(&mut pic), Some(0x2c));
    pic.set_line(3, true);
    assert_eq!(acknowledged(&mut pic), None);
    pic.set_line(8, true);
    assert_eq!(acknowledged(&mut pic), Some(0x28));
}

#[test]
fn edge_requests_once_and_level_requests_until_it_falls() {
    let mut pic = pic();
    pic.write(0x4d0, 0xff);
    assert_eq!(pic.read(0x4d0), 0xf8);
    pic.write(0x4d0, 0x20);
    pic.set_line(1, true);
    pic.set_line(5, true);
    assert_eq!(acknowledged(&mut pic), Some(0x21));
    pic.write(0x20, 0x20);
    assert_eq!(acknowledged(&mut pic), Some(0x25));
    pic.write(0x20, 0x20);
    assert_eq!(acknowledged(&mut pic), Some(0x25));
    pic.write(0x20, 0x20);
    pic.set_line(5, false);
    assert_eq!(acknowledged(&mut pic), None);
}

#[test]
fn acknowledge_without_a_request_returns_line_seven_and_sets_no_isr_bit() {
    let mut pic = pic();
    assert_eq!(pic.acknowledge(), 0x27);
    pic.write(0x20, 0x0b);
    assert_eq!(pic.read(0x20), 0);
}

#[test]
fn mask_holds_a_request_and_registers_read_back() {
    let mut pic = pic();
    pic.write(0x21, 0x02);
    pic.set_line(1, true);
    assert_eq!(acknowledged(&mut pic), None);
    assert_eq!(pic.read(0x20), 0x02);
    assert_eq!(pic.read(0x21), 0x02);
    pic.write(0x21, 0x00);
    assert_eq!(acknowledged(&mut pic), Some(0x21));
    assert_eq!(pic.read(0x20), 0);
    pic.write(0x20, 0x0b);
    assert_eq!(pic.read(0x20), 0x02);
}

#[test]
fn automatic_eoi_with_rotation_gives_the_acknowledged_line_lowest_priority() {
    let mut pic = pic();
    initialize(&mut pic, 0x03);
    pic.write(0x20, 0x80);
    pic.set_line(3, true);
    assert_eq!(acknowledged(&mut pic), Some(0x23));
    for line in [3, 4] {
        pic.set_line(line, false);
        pic.set_line(line, true);
    }
    assert_eq!(acknowledged(&mut pic), Some(0x24));
    assert_eq!(acknowledged(&mut pic), Some(0x23));
}

#[test]
fn rotating_and_specific_commands_change_the_priorities() {
    let mut pic = pic();
    // Set priority: line 5 is lowest, so 6 is highest.
    pic.write(0x20, 0xc5);
    pic.set_line(0, true);
    pic.set_line(6, true);
    assert_eq!(acknowledged(&mut pic), Some(0x26));
    // Specific EOI of line 6.
    pic.write(0x20, 0x66);
    assert_eq!(acknowledged(&mut pic), Some(0x20));
    // Rotate on non-specific EOI: line 0 becomes lowest.
    pic.write(0x20, 0xa0);
    assert_eq!(pic.save().chips[0].first, 1);
}

#[test]
fn special_mask_mode_accepts_lower_lines_while_a_masked_one_is_in_service() {
    let mut pic = pic();
    pic.set_line(1, true);
    assert_eq!(acknowledged(&mut pic), Some(0x21));
    pic.set_line(4, true);
    pic.write(0x21, 0x02);
    assert_eq!(acknowledged(&mut pic), None);
    pic.write(0x20, 0x68);
    assert_eq!(acknowledged(&mut pic), Some(0x24));
}

#[test]
fn poll_acknowledges_and_returns_the_line() {
    let mut pic = pic();
    pic.set_line(5, true);
    pic.write(0x20, 0x0c);
    assert_eq!(pic.read(0x20), 0x85);
    assert_eq!(acknowledged(&mut pic), None);
    pic.write(0x20, 0x0c);
    assert_eq!(pic.read(0x20), 0);
    assert_eq!(pic.save().chips[0].isr, 0x20);
}

#[test]
fn initialization_clears_requests_and_masks() {
    let mut pic = pic();
    pic.set_line(1, true);
    pic.write(0x21, 0xff);
    initialize(&mut pic, 0x01);
    assert_eq!(pic.read(0x21), 0);
    assert_eq!(acknowledged(&mut pic), None);
}

#[test]
fn inspection_decodes_both_chips() {
    let mut pic = pic();
    pic.write(0x21, 0x02);
    pic.set_line(1, true);
    pic.set_line(9, true);
    let table = [
        ("master vectors from", "0x20"),
        ("master IRR", "1 2"),
        ("master IMR", "1"),
        ("slave vectors from", "0x28"),
        ("slave IRR", "1"),
        ("slave ISR", "none"),
        ("slave highest priority", "0"),
        ("INTR", "yes"),
    ];
    for (name, value) in table {
        assert_eq!(field(&pic, name), value, "{name}");
    }
}

proptest! {
    #[test]
    fn any_accesses_leave_a_valid_state(
        steps in prop::collection::vec((0_usize..6, any::<u8>(), 0_u8..17, any::<bool>()), 1..80),
    ) {
        let ports = [0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1];
        let mut pic = Pic::new();
        for (port, value, line, flag) in steps {
            pic.write(ports[port], value);
            pic.set_line(line, flag);
            if flag {
                pic.read(ports[port]);
            }
            if pic.output() {
                pic.acknowledge();
            }
            let state = pic.save();
            prop_assert!(Pic::accepts_state(&state));
            let mut copy = Pic::new();
            copy.restore(&state);
            prop_assert_eq!(copy.save(), state);
        }
    }
}
