//! Tests of the transport, with a driver that violates the specification.

use super::entropy::{Entropy, SeededEntropy};
use super::test_driver::{Driver, MEMORY};

const NEEDS_RESET: u32 = 0x40;

fn driver() -> Driver {
    let mut driver = Driver::new(Box::new(Entropy::new(Box::new(SeededEntropy::new(1)))));
    driver.start(0);
    driver
}

#[test]
fn identity_is_that_of_a_modern_device() {
    let mut driver = driver();
    let mut bytes = [0; 4];
    driver.function().config_read(0, &mut bytes);
    assert_eq!(u32::from_le_bytes(bytes), 0x1044_1af4);
    driver.function().config_read(8, &mut bytes);
    assert_eq!(bytes[0], 1, "no legacy interface");
    assert_eq!(driver.read(0x12, 2), 1, "queues");
    assert_eq!(driver.read(0x16, 2), 0);
    assert_eq!(driver.read(0x18, 2), 8, "size of the queue");
}

#[test]
fn driver_without_version_1_is_refused() {
    let mut driver = driver();
    driver.write(0x14, 0, 1);
    driver.write(0x14, 3, 1);
    driver.write(0x14, 11, 1);
    assert_eq!(driver.status(), 3, "FEATURES_OK is not set");
    driver.write(0x08, 0, 4);
    driver.write(0x0c, 1 << 5, 4);
    driver.write(0x08, 1, 4);
    driver.write(0x0c, 1, 4);
    driver.write(0x14, 11, 1);
    assert_eq!(driver.status(), 3, "a feature that was not offered");
}

#[test]
fn requests_wait_until_the_driver_is_ready() {
    let mut driver = driver();
    driver.write(0x14, 0, 1);
    driver.descriptor(0, 0, 0x8_0000, 16, 2, 0);
    driver.offer(0, 0);
    assert_eq!(driver.used(0), 0);
}

#[test]
fn loop_of_descriptors_needs_a_reset() {
    let mut driver = driver();
    driver.descriptor(0, 0, 0x8_0000, 16, 2 | 1, 1);
    driver.descriptor(0, 1, 0x8_0000, 16, 2 | 1, 0);
    driver.offer(0, 0);
    assert_eq!(driver.status() & NEEDS_RESET, NEEDS_RESET);
    assert_eq!(driver.used(0), 0);
    driver.start(0);
    assert_eq!(driver.request(0, &[], 4).len(), 4, "a reset helps");
}

#[test]
fn buffers_beyond_memory_need_a_reset() {
    let end = MEMORY as u64;
    for (address, len) in [
        (end - 8, 9),
        (end, 1),
        (u64::MAX, 2),
        (u64::MAX - 1, 1),
        (0, u32::MAX),
    ] {
        let mut driver = driver();
        driver.descriptor(0, 0, address, len, 2, 0);
        driver.offer(0, 0);
        assert_eq!(
            driver.status() & NEEDS_RESET,
            NEEDS_RESET,
            "{address:#x} {len:#x}"
        );
    }
}

#[test]
fn descriptor_outside_of_its_table_needs_a_reset() {
    let mut driver = driver();
    driver.offer(0, 8);
    assert_eq!(driver.status() & NEEDS_RESET, NEEDS_RESET);
}

#[test]
fn malformed_indirect_tables_need_a_reset() {
    // Not whole descriptors, outside of memory, and a table in a table.
    for (address, len) in [(0x9_0000, 17), (MEMORY as u64, 16), (0x9_0000, 16)] {
        let mut driver = driver();
        driver.descriptor(0, 0, address, len, 4, 0);
        driver.descriptor(2 * 9, 0, 0x9_0000, 16, 4, 0);
        driver.offer(0, 0);
        assert_eq!(
            driver.status() & NEEDS_RESET,
            NEEDS_RESET,
            "{address:#x} {len}"
        );
    }
}

#[test]
fn indirect_table_is_followed() {
    let mut driver = driver();
    driver.descriptor(0, 0, 0x4_8000, 32, 4, 0);
    driver.descriptor(0x12, 0, 0x8_0000, 8, 2 | 1, 1);
    driver.descriptor(0x12, 1, 0x8_1000, 8, 2, 0);
    driver.offer(0, 0);
    assert_eq!((driver.used(0), driver.status()), (1, 15));
}

#[test]
fn readable_buffer_after_writable_one_needs_a_reset() {
    let mut driver = driver();
    driver.descriptor(0, 0, 0x8_0000, 16, 2 | 1, 1);
    driver.descriptor(0, 1, 0x8_0000, 16, 0, 0);
    driver.offer(0, 0);
    assert_eq!(driver.status() & NEEDS_RESET, NEEDS_RESET);
}

#[test]
fn rings_outside_of_memory_cannot_be_enabled() {
    let mut driver = driver();
    driver.write(0x14, 0, 1);
    driver.write(0x20, u32::try_from(MEMORY).unwrap(), 4);
    driver.write(0x1c, 1, 2);
    assert_eq!(driver.read(0x1c, 2), 0);
    assert_eq!(driver.status() & NEEDS_RESET, NEEDS_RESET);
}

#[test]
fn interrupt_status_is_cleared_by_reading() {
    let mut driver = driver();
    assert!(!driver.function().intx_level());
    driver.request(0, &[], 4);
    assert!(driver.function().intx_level());
    assert_eq!(driver.read(0x1000, 1), 1);
    assert!(!driver.function().intx_level());
    assert_eq!(driver.read(0x1000, 1), 0);
}

#[test]
fn configuration_window_reaches_the_registers() {
    let mut driver = driver();
    let function = driver.function();
    let mut at = 0x40;
    let mut bytes = [0; 4];
    loop {
        function.config_read(at, &mut bytes);
        if bytes[0] == 9 && bytes[3] == 5 {
            break;
        }
        at = bytes[1].into();
        assert_ne!(at, 0, "the access capability exists");
    }
    function.config_write(at + 4, &[0]);
    function.config_write(at + 8, &0x14_u32.to_le_bytes());
    function.config_write(at + 12, &1_u32.to_le_bytes());
    function.config_read(at + 16, &mut bytes[..1]);
    assert_eq!(bytes[0], 15, "the device status");
    function.config_write(at + 16, &[0]);
    assert_eq!(driver.status(), 0, "reset through the window");
}

#[test]
fn restored_function_equals_the_saved_one() {
    let mut driver = driver();
    driver.request(0, &[], 4);
    let saved = driver.function().save();
    driver.write(0x14, 0, 1);
    driver.function().config_write(4, &[0, 0]);
    assert_ne!(driver.function().save(), saved);
    driver.function().restore(&saved).unwrap();
    assert_eq!(driver.function().save(), saved);
}

#[test]
fn impossible_queue_states_are_refused() {
    let mut driver = driver();
    let saved = driver.function().save();
    let mut bad = [saved.clone(), saved.clone(), saved.clone(), saved.clone()];
    bad[0].queues[0].size = 3;
    bad[1].queues[0].addresses[0] = 1;
    bad[2].queues[0].addresses[2] = MEMORY as u64;
    bad[3].queues.clear();
    for state in bad {
        assert!(driver.function().restore(&state).is_err(), "{state:x?}");
    }
    assert_eq!(driver.function().save(), saved);
}

#[test]
fn reset_of_the_bus_leaves_a_function_without_driver_and_address() {
    let mut driver = driver();
    let first = Driver::new(Box::new(Entropy::new(Box::new(SeededEntropy::new(1)))))
        .function()
        .save();
    driver
        .function()
        .config_write(0x10, &0xd000_0000_u32.to_le_bytes());
    assert!(driver.function().decode(0xd000_0000, 4).is_some());
    driver.function().bus_reset(&first);
    assert_eq!(driver.function().save(), first);
    assert!(driver.function().decode(0xd000_0000, 4).is_none());
    driver.function().config_write(4, &[2, 0]);
    assert!(driver.function().decode(0xc000_0000, 4).is_some());
    driver.start(0);
    assert_eq!(driver.request(0, &[], 4).len(), 4);
}
