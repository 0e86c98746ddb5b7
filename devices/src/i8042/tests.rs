use std::sync::{Arc, Mutex};

use super::*;
use crate::hooks::test::collector;
use crate::inspect::test::field;

fn get(controller: &mut I8042, offset: u64) -> u8 {
    let mut data = [0];
    controller.read(offset, &mut data);
    data[0]
}

/// Sends a command with its parameter, if any; returns the byte at the data port, if any.
fn response(controller: &mut I8042, command: u8, parameter: Option<u8>) -> Option<u8> {
    controller.write(4, &[command]);
    if let Some(parameter) = parameter {
        controller.write(0, &[parameter]);
    }
    (get(controller, 4) & I8042Status::OUTPUT_FULL.bits() != 0).then(|| get(controller, 0))
}

#[test]
fn pulse_of_the_reset_line_requests_reset() {
    let (requests, sent) = collector();
    let mut controller = I8042::new(requests);
    assert_eq!(get(&mut controller, 4) & 0b11, 0, "ready for a command");
    controller.write(4, &[0xfe]);
    assert_eq!(sent(), [MachineRequest::Reset]);
    controller.write(4, &[0xff]);
    assert!(sent().is_empty());
}

#[test]
fn output_port_write_requests_reset_only_with_the_line_low() {
    let (requests, sent) = collector();
    let mut controller = I8042::new(requests);
    assert_eq!(response(&mut controller, 0xd1, Some(0xdf)), None);
    assert_eq!(response(&mut controller, 0xd0, None), Some(0xdf));
    assert!(sent().is_empty());
    response(&mut controller, 0xd1, Some(0xde));
    assert_eq!(sent(), [MachineRequest::Reset]);
}

#[test]
fn driver_probe_detects_a_controller_without_devices() {
    let mut controller = I8042::new(collector().0);
    assert_eq!(
        response(&mut controller, 0xaa, None),
        Some(SELF_TEST_PASSED)
    );
    assert_eq!(
        response(&mut controller, 0x20, None),
        Some(CommandByte::RESET.bits())
    );
    assert_eq!(response(&mut controller, 0x60, Some(0x47)), None);
    assert_eq!(response(&mut controller, 0x20, None), Some(0x47));
    assert_eq!(response(&mut controller, 0xa7, None), None);
    assert_eq!(response(&mut controller, 0x20, None), Some(0x67));
    assert_eq!(
        response(&mut controller, 0xa9, None),
        Some(AUX_CLOCK_STUCK_LOW)
    );
    assert_eq!(response(&mut controller, 0xd3, Some(0x5a)), Some(0x5a));
}

#[test]
fn byte_for_an_absent_device_times_out_at_once() {
    let mut controller = I8042::new(collector().0);
    controller.write(0, &[0xf2]);
    let full = (I8042Status::TIMEOUT | I8042Status::OUTPUT_FULL).bits();
    assert_eq!(get(&mut controller, 4) & full, full);
    assert_eq!(get(&mut controller, 0), RESEND);
    assert_eq!(get(&mut controller, 4) & full, 0);
}

#[test]
fn restored_state_equals_the_saved_one() {
    let mut controller = I8042::new(collector().0);
    controller.write(4, &[0xaa]);
    controller.write(4, &[0xd1]);
    let saved = controller.save();
    let mut other = I8042::new(collector().0);
    assert_ne!(other.save(), saved);
    other.restore(&saved).unwrap();
    assert_eq!(other.save(), saved);
}

/// A controller with a keyboard as a BIOS leaves it, and the levels of IRQ 1 since the last call.
fn with_keyboard() -> (I8042, impl FnMut() -> Vec<bool>) {
    let levels = Arc::new(Mutex::new(Vec::new()));
    let log = levels.clone();
    let irq = IrqLine::new(move |level| log.lock().unwrap().push(level));
    let controller = I8042::with_keyboard(collector().0, irq, false);
    (controller, move || {
        std::mem::take(&mut *levels.lock().unwrap())
    })
}

#[test]
fn each_byte_of_a_key_makes_an_edge_on_irq_1() {
    let (mut controller, mut levels) = with_keyboard();
    assert_eq!(controller.key_input(&[0x1e, 0x9e]), 2);
    assert_eq!(levels(), [false, true]);
    assert_eq!(get(&mut controller, 4) & 1, 1);
    assert_eq!(get(&mut controller, 0), 0x1e);
    assert_eq!(levels(), [false, false, true]);
    assert_eq!(get(&mut controller, 0), 0x9e);
    assert_eq!(levels(), [false]);
    assert_eq!(get(&mut controller, 4) & 1, 0);
}

#[test]
fn disabled_interrupt_stays_low_and_disabled_clock_holds_keys() {
    let (mut controller, mut levels) = with_keyboard();
    response(&mut controller, 0x60, Some(0x64));
    controller.key_input(&[0x1e]);
    assert!(levels().iter().all(|level| !level));
    assert_eq!(get(&mut controller, 0), 0x1e);
    response(&mut controller, 0xad, None);
    controller.key_input(&[0x1f]);
    assert_eq!(get(&mut controller, 4) & 1, 0);
    assert_eq!(response(&mut controller, 0xae, None), Some(0x1f));
}

#[test]
fn response_of_the_controller_keeps_the_key_that_waits() {
    let (mut controller, _) = with_keyboard();
    controller.key_input(&[0x1e, 0x9e]);
    assert_eq!(response(&mut controller, 0x20, None), Some(0x65));
    assert_eq!(get(&mut controller, 0), 0x1e);
    assert_eq!(get(&mut controller, 0), 0x9e);
}

#[test]
fn driver_probe_detects_the_keyboard() {
    let (mut controller, _) = with_keyboard();
    let mut send = |byte: u8| {
        controller.write(0, &[byte]);
        std::iter::from_fn(|| (get(&mut controller, 4) & 1 != 0).then(|| get(&mut controller, 0)))
            .collect::<Vec<_>>()
    };
    assert_eq!(send(0xff), [0xfa, 0xaa]);
    assert_eq!(send(0xf2), [0xfa, 0xab, 0x41]);
    assert_eq!(send(0xed), [0xfa]);
    assert_eq!(send(2), [0xfa]);
}

#[test]
fn keys_without_a_keyboard_are_not_taken() {
    let mut controller = I8042::new(collector().0);
    assert!(!controller.has_key_capacity());
    assert_eq!(controller.key_input(&[0x1e]), 0);
}

#[test]
fn state_of_a_controller_with_another_keyboard_is_refused() {
    let (mut controller, _) = with_keyboard();
    controller.key_input(&[0x1e; 9]);
    let saved = controller.save();
    let (mut other, _) = with_keyboard();
    other.restore(&saved).unwrap();
    assert_eq!(other.save(), saved);
    let mut bad = saved.clone();
    bad.keyboard.as_mut().unwrap().codes = vec![0; 1000].into();
    assert_eq!(other.restore(&bad), Err(I8042Error));
    assert_eq!(other.save(), saved);
    let mut plain = I8042::new(collector().0);
    assert_eq!(plain.restore(&saved), Err(I8042Error));
}

#[test]
fn inspection_decodes_the_registers() {
    let mut controller = I8042::new(collector().0);
    controller.write(4, &[0xd1]);
    assert_eq!(field(&controller, "status"), "SYSTEM COMMAND UNLOCKED");
    assert_eq!(
        field(&controller, "command byte"),
        "SYSTEM KEYBOARD_DISABLED AUX_DISABLED"
    );
    assert_eq!(field(&controller, "output port"), "NO_RESET A20");
    assert_eq!(field(&controller, "output buffer"), "empty");
    assert_eq!(field(&controller, "pending command"), "WriteOutputPort");
    controller.write(4, &[0xaa]);
    assert_eq!(field(&controller, "output buffer"), "0x55");
    assert_eq!(field(&controller, "pending command"), "none");
}
