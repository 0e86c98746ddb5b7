use hindsight_regs::apic::DeliveryMode;
use proptest::prelude::*;

use super::*;
use crate::inspect::test::field;
use crate::irq::message::{Destination, DestinationId};

/// An I/O APIC and the messages that it sent.
#[derive(Default)]
struct Bench {
    ioapic: Ioapic,
    sent: Vec<InterruptMessage>,
    rejects: bool,
}

impl Bench {
    fn write(&mut self, offset: u64, data: &[u8]) {
        let Self {
            ioapic,
            sent,
            rejects,
        } = self;
        ioapic.write(offset, data, &mut |message| {
            sent.push(*message);
            !*rejects
        });
    }

    fn set_register(&mut self, register: u8, value: u32) {
        self.write(0x00, &[register]);
        self.write(0x10, &value.to_le_bytes());
    }

    fn register(&mut self, register: u8) -> u32 {
        self.write(0x00, &[register]);
        let mut data = [0; 4];
        self.ioapic.read(0x10, &mut data);
        u32::from_le_bytes(data)
    }

    fn set_pin(&mut self, pin: usize, level: bool) {
        let Self {
            ioapic,
            sent,
            rejects,
        } = self;
        ioapic.set_pin(pin, level, &mut |message| {
            sent.push(*message);
            !*rejects
        });
    }

    fn eoi(&mut self, vector: u8) {
        let Self { ioapic, sent, .. } = self;
        ioapic.eoi(vector, &mut |message| {
            sent.push(*message);
            true
        });
    }
}

#[test]
fn registers_after_reset_match_the_data_sheet() {
    let mut bench = Bench::default();
    assert_eq!(bench.register(0), 0);
    assert_eq!(bench.register(1), 0x0017_0020);
    assert_eq!(bench.register(0x10), 0x1_0000);
    assert_eq!(bench.register(0x3f), 0);
    assert_eq!(bench.register(0x40), 0);
}

#[test]
fn byte_write_of_the_window_keeps_the_other_bytes() {
    let mut bench = Bench::default();
    bench.set_register(0x12, 0x1_a5ff);
    bench.write(0x10, &[0x31]);
    assert_eq!(bench.register(0x12), 0x1_a531);
    let mut byte = [0];
    bench.ioapic.read(0x11, &mut byte);
    assert_eq!(byte, [0xa5]);
}

#[test]
fn edge_triggered_pin_sends_at_each_rising_edge_unless_masked() {
    let mut bench = Bench::default();
    bench.set_register(0x13, 0x0200_0000);
    bench.set_pin(1, true);
    bench.set_pin(1, false);
    bench.set_register(0x12, 0x0931);
    assert_eq!(bench.sent, []);
    bench.set_pin(1, true);
    bench.set_pin(1, true);
    let message = InterruptMessage {
        destination: Destination::Logical(DestinationId::Xapic(2)),
        delivery: DeliveryMode::LowestPriority,
        vector: 0x31,
        level: false,
    };
    assert_eq!(bench.sent, [message]);
    assert_eq!(bench.register(0x12), 0x0931);
}

#[test]
fn level_triggered_pin_sends_again_at_eoi_while_asserted() {
    let mut bench = Bench::default();
    bench.set_register(0x12, 0x8031);
    bench.set_pin(1, true);
    assert_eq!(bench.register(0x12), 0xc031);
    bench.set_pin(1, false);
    bench.set_pin(1, true);
    assert_eq!(bench.sent.len(), 1);
    bench.eoi(0x32);
    assert_eq!(bench.sent.len(), 1);
    bench.eoi(0x31);
    assert_eq!(bench.sent.len(), 2);
    bench.set_pin(1, false);
    bench.write(0x40, &0x31_u32.to_le_bytes());
    assert_eq!(bench.register(0x12), 0x8031);
    assert_eq!(bench.sent.len(), 2);
}

#[test]
fn unmasking_an_asserted_level_triggered_pin_sends() {
    let mut bench = Bench::default();
    bench.set_register(0x12, 0x1_8031);
    bench.set_pin(1, true);
    assert_eq!(bench.sent, []);
    bench.set_register(0x12, 0x8031);
    assert_eq!(bench.sent.len(), 1);
}

#[test]
fn rejected_level_triggered_message_leaves_remote_irr_clear() {
    let mut bench = Bench {
        rejects: true,
        ..Bench::default()
    };
    bench.set_register(0x12, 0x8031);
    bench.set_pin(1, true);
    assert_eq!(bench.register(0x12), 0x8031);
}

#[test]
fn change_to_edge_triggered_clears_remote_irr() {
    let mut bench = Bench::default();
    bench.set_register(0x12, 0x8031);
    bench.set_pin(1, true);
    bench.set_register(0x12, 0x0031);
    assert_eq!(bench.register(0x12), 0x0031);
}

#[test]
fn inspection_decodes_the_redirection_entries() {
    let mut bench = Bench::default();
    bench.set_register(0x13, 0x0300_0000);
    bench.set_register(0x12, 0x8931);
    bench.set_pin(1, true);
    let pin = field(&bench.ioapic, "pin 1");
    assert_eq!(
        pin,
        "vector 0x31 LowestPriority logical 0x03 level remote-IRR"
    );
    assert_eq!(
        field(&bench.ioapic, "pin 2"),
        "vector 0x00 Fixed physical 0x00 edge masked"
    );
    assert_eq!(field(&bench.ioapic, "levels"), "1");
}

proptest! {
    #[test]
    fn any_accesses_leave_a_valid_state(
        steps in prop::collection::vec(
            (any::<u8>(), 0_u64..0x50, any::<u64>(), 0_usize..9, any::<bool>()), 1..60),
    ) {
        let mut bench = Bench::default();
        for (select, offset, value, len, level) in steps {
            bench.write(0, &[select & 0x3f]);
            bench.write(offset, &value.to_le_bytes()[..len]);
            bench.ioapic.read(offset, &mut value.to_le_bytes()[..len]);
            bench.set_pin(usize::from(select & 0x1f), level);
            let state = bench.ioapic.save();
            prop_assert!(Ioapic::accepts_state(&state));
            let mut copy = Ioapic::new();
            copy.restore(&state);
            prop_assert_eq!(copy.save(), state);
        }
    }
}
