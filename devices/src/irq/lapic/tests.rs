use std::sync::Arc;

use proptest::prelude::*;

use hindsight_regs::apic::DeliveryMode;

use super::*;
use crate::inspect::test::field;
use crate::irq::message::{Destination, DestinationId};

/// A local APIC whose clock runs at the crystal's rate: one tick is one crystal cycle.
fn lapic() -> Lapic {
    Lapic::new(0, LapicFeatures::default(), &Clock::new_virtual(CRYSTAL_HZ))
}

/// A software-enabled local APIC with spurious vector FFH.
fn software_enabled() -> Lapic {
    let mut lapic = lapic();
    write(&mut lapic, 0xf0, 0x1ff, 0);
    lapic
}

fn write(lapic: &mut Lapic, offset: u64, value: u32, now: Ticks) {
    assert_eq!(lapic.mmio_write(offset, value, now), LapicEffect::None);
}

fn into_x2apic(mut lapic: Lapic) -> Lapic {
    let base = lapic.apic_base();
    lapic.set_apic_base(base | ApicBase::EXTD.bits()).unwrap();
    lapic
}

fn vector(lapic: &mut Lapic) -> Option<u8> {
    lapic.acknowledge().map(|acknowledged| match acknowledged {
        Acknowledged::Vector(vector) => vector,
        Acknowledged::ExtInt => panic!("an ExtINT instead of a vector"),
    })
}

#[test]
fn registers_after_reset_match_the_manual() {
    let mut lapic = lapic();
    let table = [
        (0x20, 0),
        (0x30, 0x0105_0014),
        (0x80, 0),
        (0xd0, 0),
        (0xe0, 0xffff_ffff),
        (0xf0, 0xff),
        (0x280, 0),
        (0x320, 0x1_0000),
        (0x340, 0x1_0000),
        (0x370, 0x1_0000),
        (0x380, 0),
        (0x390, 0),
        (0x3e0, 0),
    ];
    for (offset, value) in table {
        assert_eq!(lapic.mmio_read(offset, 0), value, "offset {offset:#x}");
    }
    assert_eq!(lapic.apic_base(), 0xfee0_0900);
}

#[test]
fn apic_base_write_follows_the_state_diagram() {
    let (disabled, xapic, x2apic) = (0xfee0_0100, 0xfee0_0900, 0xfee0_0d00);
    let table = [
        (vec![xapic], x2apic, Ok(())),
        (vec![xapic], disabled, Ok(())),
        (vec![x2apic], xapic, Err(GpFault)),
        (vec![x2apic], disabled, Ok(())),
        (vec![disabled], x2apic, Err(GpFault)),
        (vec![disabled], xapic, Ok(())),
        (vec![x2apic, disabled], xapic, Ok(())),
        (vec![xapic], 0xfee0_0500, Err(GpFault)),
        (vec![xapic], xapic | 1, Err(GpFault)),
        (vec![xapic], xapic | 1 << 9, Err(GpFault)),
        (vec![xapic], xapic | 1 << 46, Err(GpFault)),
    ];
    for (path, value, result) in table {
        let mut lapic = lapic();
        for step in &path {
            lapic.set_apic_base(*step).unwrap();
        }
        assert_eq!(
            lapic.set_apic_base(value),
            result,
            "{path:x?} -> {value:#x}"
        );
    }
}

#[test]
fn x2apic_mode_without_the_feature_faults() {
    let features = LapicFeatures {
        x2apic: false,
        ..LapicFeatures::default()
    };
    let mut lapic = Lapic::new(0, features, &Clock::new_virtual(1));
    assert_eq!(lapic.set_apic_base(0xfee0_0d00), Err(GpFault));
}

#[test]
fn x2apic_access_follows_the_manuals_register_table() {
    let mut lapic = into_x2apic(Lapic::new(
        0x23,
        LapicFeatures::default(),
        &Clock::new_virtual(1),
    ));
    assert_eq!(lapic.msr_read(0x802, 0), Ok(0x23));
    assert_eq!(lapic.msr_read(0x80d, 0), Ok(0x2_0008));
    for msr in [0x800, 0x80b, 0x80e, 0x82f, 0x831, 0x83f, 0x840, 0x8ff] {
        assert_eq!(lapic.msr_read(msr, 0), Err(GpFault), "read of {msr:#x}");
    }
    for msr in [0x802, 0x803, 0x80a, 0x80d, 0x810, 0x820, 0x831, 0x839] {
        assert_eq!(
            lapic.msr_write(msr, 0, 0),
            Err(GpFault),
            "write of {msr:#x}"
        );
    }
    let reserved = [
        (0x808, 0x100),
        (0x80b, 1),
        (0x828, 1),
        (0x830, 1 << 12),
        (0x832, 1 << 19),
        (0x834, 1 << 11),
        (0x834, 1 << 17),
        (0x834, 1 << 32),
        (0x837, 1 << 8),
        (0x83e, 4),
        (0x83f, 0x100),
    ];
    for (msr, value) in reserved {
        assert_eq!(
            lapic.msr_write(msr, value, 0),
            Err(GpFault),
            "{msr:#x} = {value:#x}"
        );
    }
    assert_eq!(lapic.msr_write(0x834, 0x1_17ff, 0), Ok(LapicEffect::None));
    assert_eq!(lapic.msr_read(0x834, 0), Ok(0x1_07ff));
}

#[test]
fn each_mode_rejects_the_register_interface_of_the_other() {
    let mut lapic = lapic();
    assert_eq!(lapic.msr_read(0x802, 0), Err(GpFault));
    let mut lapic = into_x2apic(lapic);
    assert_eq!(lapic.mmio_read(0x30, 0), u32::MAX);
}

#[test]
fn acknowledge_returns_the_highest_vector_above_the_priority() {
    let mut lapic = software_enabled();
    for v in [0x31, 0x52, 0x55] {
        assert!(lapic.receive(DeliveryMode::Fixed, v, false));
    }
    assert_eq!(vector(&mut lapic), Some(0x55));
    // A vector of the same priority class stays requested.
    assert_eq!(vector(&mut lapic), None);
    assert_eq!(lapic.ppr(), 0x50);
    write(&mut lapic, 0xb0, 0, 0);
    assert_eq!(vector(&mut lapic), Some(0x52));
    write(&mut lapic, 0xb0, 0, 0);
    write(&mut lapic, 0x80, 0x35, 0);
    assert_eq!(lapic.ppr(), 0x35);
    assert!(!lapic.has_interrupt());
    write(&mut lapic, 0x80, 0x2f, 0);
    assert_eq!(vector(&mut lapic), Some(0x31));
}

#[test]
fn eoi_of_a_level_triggered_vector_is_broadcast_unless_suppressed() {
    let mut lapic = software_enabled();
    lapic.receive(DeliveryMode::Fixed, 0x40, true);
    assert_eq!(vector(&mut lapic), Some(0x40));
    assert_eq!(lapic.mmio_write(0xb0, 0, 0), LapicEffect::Eoi(0x40));
    write(&mut lapic, 0xf0, 0x11ff, 0);
    lapic.receive(DeliveryMode::Fixed, 0x40, true);
    assert_eq!(vector(&mut lapic), Some(0x40));
    assert_eq!(lapic.mmio_write(0xb0, 0, 0), LapicEffect::None);
}

#[test]
fn software_disabled_apic_masks_its_lvt_and_accepts_only_nmi() {
    let mut lapic = lapic();
    write(&mut lapic, 0x340, 0x40, 0);
    assert_eq!(lapic.mmio_read(0x340, 0), 0x1_0040);
    assert!(!lapic.receive(DeliveryMode::Fixed, 0x40, false));
    assert!(lapic.receive(DeliveryMode::Nmi, 0, false));
    assert!(lapic.take_nmi());
    assert!(!lapic.take_nmi());
}

#[test]
fn second_nmi_is_latched_while_the_first_is_served_and_a_third_is_merged() {
    let mut lapic = software_enabled();
    for _ in 0..3 {
        lapic.receive(DeliveryMode::Nmi, 0, false);
    }
    assert!(lapic.take_nmi());
    assert!(lapic.take_nmi());
    assert!(!lapic.take_nmi());
    for _ in 0..2 {
        lapic.receive(DeliveryMode::Nmi, 0, false);
    }
    lapic.merge_nmis();
    assert!(lapic.take_nmi());
    assert!(!lapic.take_nmi());
}

#[test]
fn illegal_vector_sets_esr_at_its_next_write_and_interrupts_once() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x370, 0x60, 0);
    write(&mut lapic, 0x300, 0x0f, 0);
    assert_eq!(lapic.mmio_read(0x280, 0), 0);
    assert_eq!(vector(&mut lapic), Some(0x60));
    write(&mut lapic, 0xb0, 0, 0);
    lapic.receive(DeliveryMode::Fixed, 0x0f, false);
    assert_eq!(vector(&mut lapic), None);
    write(&mut lapic, 0x280, 0, 0);
    assert_eq!(lapic.mmio_read(0x280, 0), 0x60);
    write(&mut lapic, 0x280, 0, 0);
    assert_eq!(lapic.mmio_read(0x280, 0), 0);
    assert_eq!(lapic.mmio_read(0x2f0, 0), 0);
    assert_eq!(vector(&mut lapic), Some(0x60));
    write(&mut lapic, 0x280, 0, 0);
    assert_eq!(lapic.mmio_read(0x280, 0), 0x80);
}

#[test]
fn pmi_masks_its_lvt_entry_and_a_masked_entry_loses_it() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x340, 0x41, 0);
    lapic.request_pmi();
    assert_eq!(lapic.mmio_read(0x340, 0), 0x1_0041);
    assert_eq!(vector(&mut lapic), Some(0x41));
    write(&mut lapic, 0xb0, 0, 0);
    lapic.request_pmi();
    write(&mut lapic, 0x340, 0x41, 0);
    assert_eq!(vector(&mut lapic), None);
    write(&mut lapic, 0x340, 0x400, 0);
    lapic.request_pmi();
    assert!(lapic.take_nmi());
    assert_eq!(lapic.mmio_read(0x340, 0), 0x1_0400);
    write(&mut lapic, 0x340, 0x200, 0);
    lapic.request_pmi();
    assert!(lapic.take_smi());
}

#[test]
fn one_shot_timer_counts_down_once() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x320, 0x50, 0);
    write(&mut lapic, 0x3e0, 0, 0);
    write(&mut lapic, 0x380, 100, 1000);
    assert_eq!(lapic.due(), Some(1200));
    assert_eq!(lapic.mmio_read(0x390, 1000), 100);
    assert_eq!(lapic.mmio_read(0x390, 1002), 99);
    lapic.advance(1199);
    assert_eq!(vector(&mut lapic), None);
    assert_eq!(lapic.mmio_read(0x390, 1200), 0);
    assert_eq!(vector(&mut lapic), Some(0x50));
    assert_eq!(lapic.due(), None);
}

#[test]
fn periodic_timer_advanced_late_keeps_its_phase() {
    // 3 GHz: a crystal cycle is 120 ticks.
    let clock = Clock::new_virtual(3_000_000_000);
    let mut lapic = Lapic::new(0, LapicFeatures::default(), &clock);
    write(&mut lapic, 0xf0, 0x1ff, 0);
    write(&mut lapic, 0x3e0, 0b1011, 0);
    write(&mut lapic, 0x320, 0x2_0050, 0);
    write(&mut lapic, 0x380, 10, 0);
    assert_eq!(lapic.due(), Some(1200));
    lapic.advance(1200 * 7 + 300);
    assert_eq!(vector(&mut lapic), Some(0x50));
    write(&mut lapic, 0xb0, 0, 0);
    assert_eq!(vector(&mut lapic), None);
    assert_eq!(lapic.due(), Some(1200 * 8));
    assert_eq!(lapic.mmio_read(0x390, 1200 * 7 + 300), 8);
}

#[test]
fn divide_write_keeps_the_count_of_a_running_timer() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x320, 0x50, 0);
    write(&mut lapic, 0x3e0, 0b1011, 0);
    write(&mut lapic, 0x380, 100, 0);
    write(&mut lapic, 0x3e0, 0b1010, 40);
    assert_eq!(lapic.mmio_read(0x390, 40), 60);
    assert_eq!(lapic.due(), Some(40 + 60 * 128));
}

#[test]
fn deadline_fires_once_when_the_guest_tsc_reaches_it() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x320, 0x4_0050, 0);
    write(&mut lapic, 0x380, 5, 0);
    assert_eq!(lapic.mmio_read(0x380, 0), 0);
    lapic.set_tsc_deadline(1500, 1000, 100);
    assert_eq!(lapic.tsc_deadline(100), 1500);
    assert_eq!(lapic.mmio_read(0x390, 100), 0);
    assert_eq!(lapic.due(), Some(500));
    lapic.advance(499);
    assert_eq!(vector(&mut lapic), None);
    lapic.advance(500);
    assert_eq!(vector(&mut lapic), Some(0x50));
    assert_eq!(lapic.tsc_deadline(501), 0);
    write(&mut lapic, 0xb0, 0, 0);
    lapic.set_tsc_deadline(1501, 1000, 501);
    assert_eq!(vector(&mut lapic), Some(0x50));
}

#[test]
fn deadline_fires_when_a_tsc_offset_change_passes_it() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x320, 0x4_0050, 0);
    lapic.set_tsc_deadline(1 << 40, 0, 100);
    lapic.set_tsc_offset(1 << 40, 100);
    assert_eq!(vector(&mut lapic), Some(0x50));
}

#[test]
fn deadline_beyond_the_end_of_the_clock_is_never_due() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x320, 0x4_0050, 0);
    lapic.set_tsc_deadline(u64::MAX, 0_u64.wrapping_sub(1000), 2000);
    assert_eq!(lapic.due(), None);
}

#[test]
fn masked_deadline_is_cleared_without_an_interrupt() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x320, 0x5_0050, 0);
    lapic.set_tsc_deadline(1500, 0, 0);
    assert_eq!(lapic.due(), None);
    assert_eq!(lapic.tsc_deadline(1500), 0);
    assert_eq!(vector(&mut lapic), None);
}

#[test]
fn deadline_write_in_another_mode_is_ignored_and_mode_change_disarms() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x320, 0x50, 0);
    lapic.set_tsc_deadline(10, 0, 0);
    assert_eq!(lapic.tsc_deadline(0), 0);
    assert_eq!(lapic.due(), None);
    write(&mut lapic, 0x320, 0x4_0050, 0);
    lapic.set_tsc_deadline(10, 0, 0);
    write(&mut lapic, 0x320, 0x50, 0);
    assert_eq!(lapic.tsc_deadline(0), 0);
    assert_eq!(lapic.due(), None);
    write(&mut lapic, 0x380, 10, 0);
    write(&mut lapic, 0x320, 0x4_0050, 0);
    assert_eq!(lapic.due(), None);
}

#[test]
fn logical_destination_matches_by_the_model_of_the_dfr() {
    let mut flat = software_enabled();
    write(&mut flat, 0xd0, 0x0400_0000, 0);
    let mut cluster = software_enabled();
    write(&mut cluster, 0xd0, 0x2400_0000, 0);
    write(&mut cluster, 0xe0, 0x0fff_ffff, 0);
    let x2apic = into_x2apic(Lapic::new(
        0x12,
        LapicFeatures::default(),
        &Clock::new_virtual(1),
    ));
    let xapic = |n| Destination::Logical(DestinationId::Xapic(n));
    let x2apic_id = |n| Destination::Logical(DestinationId::X2apic(n));
    let table = [
        ("flat, one of its bits", &flat, xapic(0x06), true),
        ("flat, none", &flat, xapic(0xf3), false),
        ("flat, all", &flat, xapic(0xff), true),
        ("cluster, one of its bits", &cluster, xapic(0x2c), true),
        ("cluster, another cluster", &cluster, xapic(0x14), false),
        ("cluster, all", &cluster, xapic(0xff), true),
        ("x2APIC, its cluster", &x2apic, x2apic_id(0x1_0004), true),
        (
            "x2APIC, another of its cluster",
            &x2apic,
            x2apic_id(0x1_0002),
            false,
        ),
        (
            "x2APIC, another cluster",
            &x2apic,
            x2apic_id(0x2_0004),
            false,
        ),
        ("x2APIC, all", &x2apic, x2apic_id(u32::MAX), true),
    ];
    for (name, lapic, destination, expected) in table {
        assert_eq!(lapic.matches(destination, false), expected, "{name}");
    }
}

#[test]
fn icr_write_sends_the_message_it_encodes() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x310, 0x0300_0000, 0);
    let message = |destination, delivery, vector| {
        LapicEffect::Send(InterruptMessage {
            destination,
            delivery,
            vector,
            level: false,
        })
    };
    let three = DestinationId::Xapic(3);
    let table = [
        (
            0x0_4041,
            message(Destination::Physical(three), DeliveryMode::Fixed, 0x41),
        ),
        (
            0x0_4941,
            message(
                Destination::Logical(three),
                DeliveryMode::LowestPriority,
                0x41,
            ),
        ),
        (
            0x4_4041,
            message(Destination::Myself, DeliveryMode::Fixed, 0x41),
        ),
        (
            0x8_4041,
            message(Destination::All, DeliveryMode::Fixed, 0x41),
        ),
        (0xc_4400, message(Destination::Others, DeliveryMode::Nmi, 0)),
        (
            0x0_c500,
            message(Destination::Physical(three), DeliveryMode::Init, 0),
        ),
        (0x0_8500, LapicEffect::None),
        (
            0x0_4608,
            message(Destination::Physical(three), DeliveryMode::StartUp, 8),
        ),
        (0x0_4300, LapicEffect::None),
    ];
    for (icr, effect) in table {
        assert_eq!(lapic.mmio_write(0x300, icr, 0), effect, "ICR {icr:#x}");
    }
}

#[test]
fn lint0_with_ext_int_follows_its_pin() {
    let mut lapic = software_enabled();
    lapic.set_lint(0, true);
    assert!(!lapic.has_interrupt());
    write(&mut lapic, 0x350, 0x700, 0);
    write(&mut lapic, 0x80, 0xff, 0);
    assert_eq!(lapic.acknowledge(), Some(Acknowledged::ExtInt));
    lapic.set_lint(0, false);
    assert_eq!(lapic.acknowledge(), None);
}

#[test]
fn level_triggered_lint0_is_requested_again_at_eoi_while_asserted() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x350, 0x8050, 0);
    lapic.set_lint(0, true);
    assert_eq!(lapic.mmio_read(0x350, 0), 0xc050);
    assert_eq!(vector(&mut lapic), Some(0x50));
    assert_eq!(lapic.mmio_write(0xb0, 0, 0), LapicEffect::Eoi(0x50));
    assert_eq!(vector(&mut lapic), Some(0x50));
    lapic.set_lint(0, false);
    assert_eq!(lapic.mmio_write(0xb0, 0, 0), LapicEffect::Eoi(0x50));
    assert_eq!(vector(&mut lapic), None);
}

#[test]
fn init_resets_registers_and_keeps_the_mode() {
    let mut lapic = into_x2apic(software_enabled());
    assert_eq!(lapic.msr_write(0x808, 0x20, 0), Ok(LapicEffect::None));
    lapic.receive(DeliveryMode::Init, 0, false);
    assert!(lapic.take_init());
    assert_eq!(lapic.msr_read(0x808, 0), Ok(0));
    assert_eq!(lapic.msr_read(0x80f, 0), Ok(0xff));
}

#[test]
fn start_up_ipi_is_accepted_only_by_a_waiting_processor() {
    let mut lapic = Lapic::new(1, LapicFeatures::default(), &Clock::new_virtual(1));
    lapic.receive(DeliveryMode::StartUp, 8, false);
    lapic.receive(DeliveryMode::StartUp, 9, false);
    assert_eq!(lapic.take_sipi(), Some(8));
    lapic.receive(DeliveryMode::StartUp, 9, false);
    assert_eq!(lapic.take_sipi(), None);
    lapic.receive(DeliveryMode::Init, 0, false);
    lapic.receive(DeliveryMode::StartUp, 7, false);
    // The INIT comes first, or it would undo the start.
    assert_eq!(lapic.take_sipi(), None);
    assert!(lapic.take_init());
    assert_eq!(lapic.take_sipi(), Some(7));
}

#[derive(Clone, Debug)]
enum LapicStep {
    Write(u64, u32),
    Read(u64),
    MsrWrite(u32, u64),
    MsrRead(u32),
    Base(u64),
    Receive(u8, u8, bool),
    Deadline(u64, u64),
    Lint(usize, bool),
    Acknowledge,
    Pmi,
    Init,
    Advance(u64),
}

fn any_value() -> impl Strategy<Value = u32> {
    prop_oneof![
        any::<u32>(),
        0_u32..0x200,
        (0_u32..8).prop_map(|mode| mode << 17 | 0x50)
    ]
}

fn any_step() -> impl Strategy<Value = LapicStep> {
    let offset = || prop_oneof![(0_u64..0x40).prop_map(|reg| reg << 4), any::<u64>()];
    let base = prop_oneof![
        Just(0xfee0_0900_u64),
        Just(0xfee0_0d00),
        Just(0xfee0_0100),
        any::<u64>()
    ];
    prop_oneof![
        8 => (offset(), any_value()).prop_map(|(o, v)| LapicStep::Write(o, v)),
        4 => offset().prop_map(LapicStep::Read),
        4 => (0x800_u32..0x840, any_value()).prop_map(|(m, v)| LapicStep::MsrWrite(m, v.into())),
        1 => (any::<u32>(), any::<u64>()).prop_map(|(m, v)| LapicStep::MsrWrite(m, v)),
        2 => (0x7ff_u32..0x901).prop_map(LapicStep::MsrRead),
        1 => base.prop_map(LapicStep::Base),
        4 => (0_u8..8, any::<u8>(), any::<bool>())
            .prop_map(|(d, v, l)| LapicStep::Receive(d, v, l)),
        2 => (any::<u64>(), any::<u64>()).prop_map(|(d, o)| LapicStep::Deadline(d, o)),
        2 => (0_usize..3, any::<bool>()).prop_map(|(p, l)| LapicStep::Lint(p, l)),
        4 => Just(LapicStep::Acknowledge),
        1 => Just(LapicStep::Pmi),
        1 => Just(LapicStep::Init),
        3 => prop_oneof![0_u64..1000, any::<u64>()].prop_map(LapicStep::Advance),
    ]
}

fn apply(lapic: &mut Lapic, step: &LapicStep, now: &mut Ticks) {
    let _ = match *step {
        LapicStep::Write(offset, value) => lapic.mmio_write(offset, value, *now),
        LapicStep::MsrWrite(msr, value) => lapic
            .msr_write(msr, value, *now)
            .unwrap_or(LapicEffect::None),
        _ => LapicEffect::None,
    };
    match *step {
        LapicStep::Write(..) | LapicStep::MsrWrite(..) => {}
        LapicStep::Read(offset) => drop(lapic.mmio_read(offset, *now)),
        LapicStep::MsrRead(msr) => drop(lapic.msr_read(msr, *now)),
        LapicStep::Base(value) => drop(lapic.set_apic_base(value)),
        LapicStep::Receive(delivery, vector, level) => {
            if let Some(delivery) = DeliveryMode::from_bits(delivery.into()) {
                lapic.receive(delivery, vector, level);
            }
        }
        LapicStep::Deadline(deadline, offset) => lapic.set_tsc_deadline(deadline, offset, *now),
        LapicStep::Lint(pin, level) => lapic.set_lint(pin, level),
        LapicStep::Acknowledge => drop(lapic.acknowledge()),
        LapicStep::Pmi => lapic.request_pmi(),
        LapicStep::Init => lapic.init(),
        LapicStep::Advance(ticks) => {
            *now = now.saturating_add(ticks);
            lapic.advance(*now);
        }
    }
}

proptest! {
    #[test]
    fn any_accesses_leave_a_valid_state_that_can_be_restored(
        steps in prop::collection::vec(any_step(), 1..60),
    ) {
        let clock = Arc::new(Clock::new_virtual(2_400_000_000));
        let mut lapic = Lapic::new(0, LapicFeatures::default(), &clock);
        let mut now = 0;
        for step in &steps {
            apply(&mut lapic, step, &mut now);
            let state = lapic.save();
            prop_assert!(lapic.accepts_state(&state), "{state:x?} after {step:x?}");
            prop_assert!(lapic.ppr() >= lapic.tpr() & 0xf0);
            let mut copy = Lapic::new(0, LapicFeatures::default(), &clock);
            copy.restore(&state, now);
            prop_assert_eq!(copy.save(), state);
            prop_assert_eq!(copy.has_interrupt(), lapic.has_interrupt());
        }
    }

    #[test]
    fn timer_fires_at_its_due_time_and_not_earlier(
        hz in 1_000_000_u64..5_000_000_000,
        mode in 0_u32..2,
        divide in 0_u32..12,
        count in 1_u32..1_000_000,
        start in 0_u64..1 << 50,
    ) {
        let mut lapic = Lapic::new(0, LapicFeatures::default(), &Clock::new_virtual(hz));
        write(&mut lapic, 0xf0, 0x1ff, start);
        write(&mut lapic, 0x3e0, divide, start);
        write(&mut lapic, 0x320, mode << 17 | 0x50, start);
        write(&mut lapic, 0x380, count, start);
        let due = lapic.due().unwrap();
        if due > start {
            lapic.advance(due - 1);
            prop_assert!(!lapic.has_interrupt());
        }
        lapic.advance(due);
        prop_assert_eq!(vector(&mut lapic), Some(0x50));
        prop_assert_eq!(lapic.due().is_some(), mode == 1);
    }
}

#[test]
fn inspection_decodes_the_registers() {
    let mut lapic = software_enabled();
    write(&mut lapic, 0x350, 0x1_8731, 0);
    write(&mut lapic, 0x320, 0x2_0050, 0);
    write(&mut lapic, 0x3e0, 0b1011, 0);
    write(&mut lapic, 0x380, 100, 0);
    lapic.advance(40);
    assert!(lapic.receive(DeliveryMode::Fixed, 0x61, true));
    let table = [
        ("mode", "xAPIC"),
        ("spurious vector", "0xff"),
        ("SVR", "ENABLE"),
        ("IRR", "0x61"),
        ("ISR", "none"),
        ("TMR", "0x61"),
        ("LVT LINT0", "vector 0x31 ExtInt level masked"),
        ("timer mode", "Periodic"),
        ("current count", "60"),
        ("divide by", "1"),
        ("pending", "INTR"),
    ];
    for (name, value) in table {
        assert_eq!(field(&lapic, name), value, "{name}");
    }
    lapic.set_apic_base(0xfee0_0100).unwrap();
    assert_eq!(field(&lapic, "mode"), "disabled");
    assert_eq!(field(&lapic, "pending"), "none");
}
