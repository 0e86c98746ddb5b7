use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use hindsight_regs::vector::GpFault;
use proptest::prelude::*;

use super::*;
use crate::irq::lapic;

/// Collects the woken vCPUs and counts the changes of the next event.
#[derive(Default)]
struct WakeLog {
    woken: Mutex<Vec<usize>>,
    timer_changes: AtomicUsize,
}

impl Wake for WakeLog {
    fn wake(&self, vcpu: usize) {
        self.woken.lock().unwrap().push(vcpu);
    }

    fn timer_changed(&self) {
        self.timer_changes.fetch_add(1, Ordering::Relaxed);
    }
}

struct Bench {
    interrupts: Interrupts,
    clock: Arc<Clock>,
    log: Arc<WakeLog>,
}

impl Bench {
    /// Controllers at the crystal's rate (one tick is one crystal cycle), with enabled APICs.
    fn new(n_vcpus: usize) -> Self {
        let clock = Arc::new(Clock::new_virtual(lapic::CRYSTAL_HZ));
        let log = Arc::new(WakeLog::default());
        let interrupts = Interrupts::new(
            n_vcpus,
            Arc::clone(&clock),
            InterruptsConfig::default(),
            log.clone(),
        );
        let bench = Self {
            interrupts,
            clock,
            log,
        };
        for vcpu in 0..n_vcpus {
            bench.write(vcpu, 0xf0, 0x1ff);
        }
        bench
    }

    fn write(&self, vcpu: usize, offset: u64, value: u32) {
        self.interrupts
            .lapic_write(vcpu, offset, &value.to_le_bytes());
    }

    fn read(&self, vcpu: usize, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.interrupts.lapic_read(vcpu, offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn set_pin(&self, pin: u8, entry: u64) {
        let halves = [(0, entry & 0xffff_ffff), (1, entry >> 32)];
        for (half, value) in halves.into_iter().rev() {
            self.interrupts.ioapic_write(0, &[0x10 + 2 * pin + half]);
            self.interrupts
                .ioapic_write(0x10, &value.to_le_bytes()[..4]);
        }
    }

    /// Vectors 20H and 28H, nothing masked.
    fn initialize_pic(&self) {
        for (port, base, wiring) in [(0x20, 0x20, 4), (0xa0, 0x28, 2)] {
            for (offset, value) in [(0, 0x11), (1, base), (1, wiring), (1, 0x01)] {
                assert!(self.interrupts.port_write(port + offset, value));
            }
        }
    }

    fn run_to(&self, now: u64) {
        self.clock.set(now);
        self.interrupts.advance(now);
    }

    fn woken(&self) -> Vec<usize> {
        std::mem::take(&mut self.log.woken.lock().unwrap())
    }
}

#[test]
fn reset_leaves_no_pending_event_and_no_timer() {
    let bench = Bench::new(2);
    assert!(!bench.interrupts.pending(0).any());
    assert!(!bench.interrupts.pending(1).any());
    assert_eq!(bench.interrupts.next_event(), None);
    assert!(bench.woken().is_empty());
    bench.interrupts.set_virtual_wire();
    assert!(!bench.interrupts.pending(0).any());
}

#[test]
fn timers_count_after_a_reset_with_the_clock_set_back() {
    let bench = Bench::new(1);
    bench.run_to(1 << 40);
    bench.write(0, 0x320, 0x2_0050);
    bench.write(0, 0x380, 1000);
    bench.interrupts.port_write(0x43, 0x34);
    bench.clock.set(0);
    bench.interrupts.reset();
    assert_eq!(bench.interrupts.next_event(), None);
    bench.interrupts.port_write(0x43, 0x34);
    bench.interrupts.port_write(0x40, 0x10);
    bench.interrupts.port_write(0x40, 0x00);
    assert!(bench.interrupts.next_event().unwrap() < 1000);
}

#[cfg(feature = "serde")]
#[test]
fn state_can_be_serialized() {
    fn assert_plain<T: serde::Serialize + serde::de::DeserializeOwned>(_: &T) {}
    assert_plain(&Bench::new(1).interrupts.save());
}

#[test]
fn fixed_ipi_wakes_its_destination_once() {
    let bench = Bench::new(2);
    bench.write(0, 0x310, 0x0100_0000);
    bench.write(0, 0x300, 0x4041);
    bench.write(0, 0x300, 0x4041);
    assert_eq!(bench.woken(), [1]);
    assert!(bench.interrupts.pending(1).interrupt);
    assert!(!bench.interrupts.pending(0).any());
    assert_eq!(bench.interrupts.acknowledge(1), Some(0x41));
    assert!(!bench.interrupts.pending(1).any());
    assert_eq!(bench.interrupts.acknowledge(1), None);
}

#[test]
fn taking_one_event_does_not_wake_for_the_other_again() {
    let bench = Bench::new(1);
    bench.write(0, 0x300, 0x4_4041);
    bench.interrupts.inject_nmi(0);
    assert_eq!(bench.woken(), [0, 0]);
    assert!(bench.interrupts.take_nmi(0));
    assert!(bench.interrupts.pending(0).interrupt);
    assert!(bench.woken().is_empty());
}

#[test]
fn self_ipi_in_x2apic_mode_is_pending_at_once() {
    let bench = Bench::new(1);
    let base = bench.interrupts.apic_base(0);
    bench.interrupts.set_apic_base(0, base | 1 << 10).unwrap();
    assert_eq!(bench.interrupts.apic_base(0), base | 1 << 10);
    bench.interrupts.x2apic_write(0, 0x83f, 0x77).unwrap();
    assert_eq!(bench.interrupts.acknowledge(0), Some(0x77));
    assert_eq!(bench.interrupts.x2apic_write(0, 0x83f, 0x177), Err(GpFault));
}

#[test]
fn init_and_start_up_ipis_reach_the_other_vcpus() {
    let bench = Bench::new(3);
    bench.write(0, 0x300, 0xc_4500);
    bench.write(0, 0x300, 0xc_4608);
    bench.write(0, 0x300, 0xc_4608);
    assert!(!bench.interrupts.pending(0).any());
    for vcpu in [1, 2] {
        let pending = bench.interrupts.pending(vcpu);
        assert_eq!(
            pending,
            PendingInterrupts {
                init: true,
                sipi: Some(8),
                ..PendingInterrupts::default()
            }
        );
        assert!(bench.interrupts.take_init(vcpu));
        assert_eq!(bench.interrupts.take_sipi(vcpu), Some(8));
        assert!(!bench.interrupts.pending(vcpu).any());
    }
    // A running vCPU drops a start-up IPI.
    bench.write(0, 0x300, 0xc_4609);
    assert!(!bench.interrupts.pending(1).any());
}

#[test]
fn lowest_priority_message_goes_to_the_lowest_ppr_and_then_the_lowest_index() {
    let bench = Bench::new(3);
    for vcpu in 0..3 {
        bench.write(vcpu, 0xd0, 0x0100_0000 << vcpu);
    }
    bench.interrupts.set_cr8(0, 5);
    let vectors = |bench: &Bench| [0, 1, 2].map(|vcpu| bench.interrupts.acknowledge(vcpu));
    let address = 0xfee0_0000 | 0xff << 12 | 1 << 2;
    bench.interrupts.send_msi(address, 0x161);
    assert_eq!(vectors(&bench), [None, Some(0x61), None]);
    bench.interrupts.send_msi(address, 0x162);
    assert_eq!(vectors(&bench), [None, None, Some(0x62)]);
}

#[test]
fn cr8_inhibits_an_interrupt_of_its_class() {
    let bench = Bench::new(1);
    bench.interrupts.set_cr8(0, 4);
    assert_eq!(bench.read(0, 0x80), 0x40);
    bench.write(0, 0x300, 0x4_4041);
    let pending = bench.interrupts.pending(0);
    assert!(pending.held && !pending.interrupt);
    assert_eq!(bench.woken(), [0], "the vCPU must compare its CR8");
    bench.interrupts.set_cr8(0, 3);
    assert!(bench.interrupts.pending(0).interrupt);
    assert_eq!(bench.woken(), [0]);
    assert_eq!(bench.interrupts.cr8(0), 3);
}

#[test]
fn isa_line_reaches_the_vcpu_through_the_virtual_wire() {
    let bench = Bench::new(2);
    bench.initialize_pic();
    bench.interrupts.set_irq(4, true);
    assert!(!bench.interrupts.pending(0).any());
    bench.interrupts.set_virtual_wire();
    assert!(bench.interrupts.pending(0).interrupt);
    assert!(!bench.interrupts.pending(1).any());
    bench.interrupts.set_irq(12, true);
    assert_eq!(bench.interrupts.acknowledge(0), Some(0x2c));
    assert!(!bench.interrupts.pending(0).any());
    bench.interrupts.port_write(0xa0, 0x20);
    bench.interrupts.port_write(0x20, 0x20);
    assert_eq!(bench.interrupts.acknowledge(0), Some(0x24));
}

#[test]
fn isa_line_reaches_a_vcpu_with_a_disabled_apic() {
    let bench = Bench::new(1);
    bench.initialize_pic();
    bench.interrupts.set_apic_base(0, 0xfee0_0100).unwrap();
    bench.interrupts.set_irq(4, true);
    assert_eq!(bench.interrupts.acknowledge(0), Some(0x24));
}

#[test]
fn ext_int_entry_of_pin_zero_reaches_its_destination() {
    let bench = Bench::new(2);
    bench.initialize_pic();
    bench.set_pin(0, 1 << 56 | 0x700);
    bench.interrupts.set_irq(4, true);
    assert!(!bench.interrupts.pending(0).any());
    bench.interrupts.set_irq(3, true);
    assert_eq!(bench.interrupts.acknowledge(1), Some(0x23));
    bench.interrupts.port_write(0x20, 0x20);
    assert_eq!(bench.interrupts.acknowledge(1), Some(0x24));
    assert_eq!(bench.interrupts.acknowledge(1), None);
}

#[test]
fn level_triggered_line_interrupts_again_until_it_falls() {
    let bench = Bench::new(2);
    bench.set_pin(20, 1 << 56 | 0x8061);
    bench.interrupts.set_irq(20, true);
    for _ in 0..2 {
        assert_eq!(bench.interrupts.acknowledge(1), Some(0x61));
        assert_eq!(bench.interrupts.acknowledge(1), None);
        bench.write(1, 0xb0, 0);
    }
    assert_eq!(bench.interrupts.acknowledge(1), Some(0x61));
    bench.interrupts.set_irq(20, false);
    bench.write(1, 0xb0, 0);
    assert_eq!(bench.interrupts.acknowledge(1), None);
}

#[test]
fn pit_drives_pin_two_and_line_zero_when_due() {
    let bench = Bench::new(1);
    bench.initialize_pic();
    bench.set_pin(2, 0x30);
    bench.interrupts.port_write(0x43, 0x34);
    bench.interrupts.port_write(0x40, 0x9c);
    bench.interrupts.port_write(0x40, 0x2e);
    // 1 + 11932 timer clocks in crystal cycles, rounded up.
    let due = (11_933_u64 * lapic::CRYSTAL_HZ).div_ceil(crate::pit::PIT_HZ);
    assert_eq!(bench.interrupts.next_event(), Some(due));
    assert!(bench.log.timer_changes.load(Ordering::Relaxed) > 0);
    bench.run_to(due - 1);
    assert!(!bench.interrupts.pending(0).any());
    bench.run_to(due);
    assert_eq!(bench.interrupts.acknowledge(0), Some(0x30));
    bench.interrupts.port_write(0x20, 0x0a);
    assert_eq!(bench.interrupts.port_read(0x20), Some(0x01));
    // Several periods later, one interrupt is pending.
    bench.write(0, 0xb0, 0);
    bench.run_to(due * 10);
    assert_eq!(bench.interrupts.acknowledge(0), Some(0x30));
    bench.write(0, 0xb0, 0);
    assert_eq!(bench.interrupts.acknowledge(0), None);
}

#[test]
fn rtc_drives_line_eight_until_register_c_is_read() {
    let bench = Bench::new(1);
    bench.set_pin(8, 0x38);
    bench.interrupts.port_write(0x70, 0x0b);
    bench.interrupts.port_write(0x71, 0x42);
    let next = |bench: &Bench| {
        bench.run_to(bench.interrupts.next_event().unwrap());
        let vector = bench.interrupts.acknowledge(0);
        bench.write(0, 0xb0, 0);
        vector
    };
    assert_eq!(next(&bench), Some(0x38));
    assert_eq!(bench.interrupts.next_event(), None);
    bench.interrupts.port_write(0x70, 0x0c);
    assert_eq!(bench.interrupts.port_read(0x71), Some(0xc0));
    assert_eq!(next(&bench), Some(0x38));
}

#[test]
fn deadline_timer_fires_by_advance_and_by_an_offset_change() {
    let bench = Bench::new(1);
    bench.write(0, 0x320, 0x4_0050);
    bench.interrupts.set_tsc_deadline(0, 5000, 1000);
    assert_eq!(bench.interrupts.next_event(), Some(4000));
    bench.run_to(4000);
    assert_eq!(bench.interrupts.acknowledge(0), Some(0x50));
    assert_eq!(bench.interrupts.tsc_deadline(0), 0);
    bench.write(0, 0xb0, 0);
    bench.interrupts.set_tsc_deadline(0, 1 << 50, 1000);
    bench.interrupts.tsc_offset_changed(0, 1 << 50);
    assert_eq!(bench.interrupts.acknowledge(0), Some(0x50));
    assert_eq!(bench.interrupts.next_event(), None);
}

#[test]
fn pmi_and_nmi_line_are_delivered_through_the_lvt() {
    let bench = Bench::new(1);
    bench.write(0, 0x340, 0x400);
    bench.interrupts.request_pmi(0);
    assert!(bench.interrupts.take_nmi(0));
    assert_eq!(bench.read(0, 0x340), 0x1_0400);
    bench.interrupts.set_nmi_line(true);
    assert!(!bench.interrupts.take_nmi(0));
    bench.interrupts.set_nmi_line(false);
    bench.write(0, 0x360, 0x400);
    bench.interrupts.set_nmi_line(true);
    assert!(bench.interrupts.take_nmi(0));
}

#[test]
fn lapic_access_of_another_size_reads_ones_and_writes_nothing() {
    let bench = Bench::new(1);
    let mut data = [0; 8];
    bench.interrupts.lapic_read(0, 0x30, &mut data);
    assert_eq!(data, [0xff; 8]);
    bench.interrupts.lapic_write(0, 0x80, &[0x20]);
    assert_eq!(bench.read(0, 0x80), 0);
    assert_eq!(bench.read(0, 0x84), u32::MAX);
}

#[test]
fn ports_of_other_devices_are_not_claimed() {
    let bench = Bench::new(1);
    assert_eq!(bench.interrupts.port_read(0x60), None);
    assert!(!bench.interrupts.port_write(0x3f8, 0));
}

/// Acknowledges from within the notification.
#[derive(Default)]
struct Reentrant(OnceLock<Weak<Interrupts>>, AtomicUsize);

impl Wake for Reentrant {
    fn wake(&self, vcpu: usize) {
        let interrupts = self.0.get().and_then(Weak::upgrade).unwrap();
        if interrupts.acknowledge(vcpu).is_some() {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn wake_may_call_back_into_the_controllers() {
    let wake = Arc::new(Reentrant::default());
    let clock = Arc::new(Clock::new_virtual(1));
    let interrupts = Arc::new(Interrupts::new(
        1,
        clock,
        InterruptsConfig::default(),
        wake.clone(),
    ));
    wake.0.set(Arc::downgrade(&interrupts)).unwrap();
    interrupts.lapic_write(0, 0xf0, &0x1ff_u32.to_le_bytes());
    interrupts.send_msi(0xfee0_0000, 0x41);
    assert_eq!(wake.1.load(Ordering::Relaxed), 1);
}

#[test]
fn concurrent_interrupts_are_all_delivered() {
    let bench = Arc::new(Bench::new(2));
    let sender = Arc::clone(&bench);
    let vectors: Vec<u32> = (0x20..0x100).collect();
    let sent = vectors.clone();
    let thread = std::thread::spawn(move || {
        for vector in sent {
            sender.interrupts.send_msi(0xfee0_1000, vector);
        }
    });
    let mut taken = Vec::new();
    while taken.len() < vectors.len() {
        if bench.interrupts.pending(1).interrupt {
            taken.extend(bench.interrupts.acknowledge(1).map(u32::from));
            bench.write(1, 0xb0, 0);
        }
    }
    thread.join().unwrap();
    taken.sort_unstable();
    assert_eq!(taken, vectors);
}

#[test]
fn restore_of_an_invalid_state_fails_and_changes_nothing() {
    type Corrupt = fn(&mut InterruptsState);
    let table: [(InterruptsError, Corrupt); 8] = [
        (
            InterruptsError::LapicCount {
                expected: 2,
                found: 1,
            },
            |s| s.lapics.truncate(1),
        ),
        (InterruptsError::Lapic(1), |s| s.lapics[1].irr.0[0] = 1),
        (InterruptsError::Lapic(0), |s| {
            s.lapics[0].apic_base = 0xfee0_0500
        }),
        (InterruptsError::Ioapic, |s| {
            s.ioapic.entries[3] = (1 << 20).into()
        }),
        (InterruptsError::Pic, |s| s.pic.chips[1].first = 8),
        (InterruptsError::Pit, |s| s.pit.channels[0].count = 0),
        (InterruptsError::Rtc, |s| s.rtc.registers.truncate(127)),
        (InterruptsError::Lines(1 << 24), |s| s.lines = 1 << 24),
    ];
    let bench = Bench::new(2);
    let good = bench.interrupts.save();
    for (error, corrupt) in table {
        let mut bad = good.clone();
        corrupt(&mut bad);
        assert_eq!(bench.interrupts.restore(&bad), Err(error), "{error}");
        assert_eq!(bench.interrupts.save(), good, "{error}");
    }
}

#[derive(Clone, Debug)]
enum BusStep {
    Lapic(usize, u64, u32),
    X2apic(usize, u32, u64),
    Base(usize, u64),
    Ioapic(u8, u32),
    Port(usize, u8, bool),
    Line(u32, bool),
    Msi(u32, u32),
    Take(usize),
    Deadline(usize, u64, u64),
    Advance(u64),
    NextEvent,
}

fn any_step() -> impl Strategy<Value = BusStep> {
    let vcpu = || 0_usize..4;
    let register = (0_u64..0x40).prop_map(|register| register << 4);
    let base = prop_oneof![Just(0xfee0_0900_u64), Just(0xfee0_0d00), Just(0xfee0_0100)];
    prop_oneof![
        6 => (vcpu(), register, any::<u32>()).prop_map(|(c, o, v)| BusStep::Lapic(c, o, v)),
        3 => (vcpu(), 0x800_u32..0x840, 0_u64..1 << 20)
            .prop_map(|(c, m, v)| BusStep::X2apic(c, m, v)),
        1 => (vcpu(), base).prop_map(|(c, v)| BusStep::Base(c, v)),
        3 => (0_u8..0x40, any::<u32>()).prop_map(|(r, v)| BusStep::Ioapic(r, v)),
        6 => (0..PORTS.len(), any::<u8>(), any::<bool>())
            .prop_map(|(p, v, r)| BusStep::Port(p, v, r)),
        4 => (0_u32..26, any::<bool>()).prop_map(|(l, v)| BusStep::Line(l, v)),
        2 => (any::<u32>(), any::<u32>()).prop_map(|(a, d)| BusStep::Msi(a, d)),
        4 => vcpu().prop_map(BusStep::Take),
        1 => (vcpu(), any::<u64>(), any::<u64>()).prop_map(|(c, d, o)| BusStep::Deadline(c, d, o)),
        3 => (0_u64..10_000_000).prop_map(BusStep::Advance),
        3 => Just(BusStep::NextEvent),
    ]
}

fn apply(bench: &Bench, step: &BusStep) {
    let interrupts = &bench.interrupts;
    match *step {
        BusStep::Lapic(vcpu, offset, value) => bench.write(vcpu, offset, value),
        BusStep::X2apic(vcpu, msr, value) => drop(interrupts.x2apic_write(vcpu, msr, value)),
        BusStep::Base(vcpu, value) => drop(interrupts.set_apic_base(vcpu, value)),
        BusStep::Ioapic(register, value) => {
            interrupts.ioapic_write(0, &[register]);
            interrupts.ioapic_write(0x10, &value.to_le_bytes());
        }
        BusStep::Port(index, _, true) => drop(interrupts.port_read(PORTS[index])),
        BusStep::Port(index, value, false) => drop(interrupts.port_write(PORTS[index], value)),
        BusStep::Line(line, level) => interrupts.set_irq(line, level),
        BusStep::Msi(address, data) => interrupts.send_msi(address, data),
        BusStep::Take(vcpu) => {
            let pending = interrupts.pending(vcpu);
            assert_eq!(interrupts.take_nmi(vcpu), pending.nmi);
            interrupts.take_nmi(vcpu);
            assert_eq!(interrupts.take_smi(vcpu), pending.smi);
            let sipi = pending.sipi.filter(|_| !pending.init);
            assert_eq!(interrupts.take_sipi(vcpu), sipi);
            assert_eq!(interrupts.acknowledge(vcpu).is_some(), pending.interrupt);
            assert_eq!(interrupts.take_init(vcpu), pending.init);
        }
        BusStep::Deadline(vcpu, deadline, offset) => {
            interrupts.set_tsc_deadline(vcpu, deadline, offset);
        }
        BusStep::Advance(ticks) => bench.run_to(bench.clock.now() + ticks),
        BusStep::NextEvent => {
            if let Some(due) = interrupts.next_event().filter(|&due| due < 1 << 60) {
                bench.run_to(due);
            }
        }
    }
}

#[test]
fn inspection_shows_the_current_time_and_changes_nothing() {
    let bench = Bench::new(1);
    bench.interrupts.port_write(0x43, 0x34);
    bench.interrupts.port_write(0x40, 0x10);
    bench.interrupts.port_write(0x40, 0x00);
    bench.clock.set(lapic::CRYSTAL_HZ);
    let before = bench.interrupts.save();
    let devices = [
        (InterruptDevice::Lapic(0), "mode", "xAPIC"),
        (InterruptDevice::Ioapic, "ID", "0"),
        (InterruptDevice::Pic, "INTR", "no"),
        (InterruptDevice::Pit, "channel 0 mode", "RateGenerator"),
        (InterruptDevice::Rtc, "time", "1970-01-01 00:00:01"),
    ];
    for (device, name, value) in devices {
        let fields = bench.interrupts.inspect(device).unwrap();
        let field = fields.iter().find(|field| field.name == name);
        assert_eq!(
            field.map(|field| field.value.as_str()),
            Some(value),
            "{device:?}"
        );
    }
    assert_eq!(bench.interrupts.inspect(InterruptDevice::Lapic(1)), None);
    assert_eq!(bench.interrupts.save(), before);
}

proptest! {
    #[test]
    fn restored_controllers_continue_as_the_saved_ones(
        before in prop::collection::vec(any_step(), 1..60),
        after in prop::collection::vec(any_step(), 1..30),
    ) {
        let bench = Bench::new(3);
        for step in &before {
            apply(&bench, step);
        }
        // Timers that are due have fired in both.
        bench.interrupts.advance(bench.clock.now());
        let state = bench.interrupts.save();
        let copy = Bench::new(3);
        copy.clock.set(bench.clock.now());
        prop_assert_eq!(copy.interrupts.restore(&state), Ok(()));
        prop_assert_eq!(copy.interrupts.save(), state);
        for step in &after {
            apply(&bench, step);
            apply(&copy, step);
            prop_assert_eq!(copy.interrupts.next_event(), bench.interrupts.next_event());
            for vcpu in 0..3 {
                prop_assert_eq!(copy.interrupts.pending(vcpu), bench.interrupts.pending(vcpu));
                prop_assert_eq!(copy.interrupts.cr8(vcpu), bench.interrupts.cr8(vcpu));
                prop_assert_eq!(copy.interrupts.apic_base(vcpu), bench.interrupts.apic_base(vcpu));
            }
        }
        prop_assert_eq!(copy.interrupts.save(), bench.interrupts.save());
    }

    #[test]
    fn advance_to_the_next_event_makes_progress(steps in prop::collection::vec(any_step(), 1..60)) {
        let bench = Bench::new(2);
        for step in &steps {
            apply(&bench, step);
        }
        bench.interrupts.advance(bench.clock.now());
        for _ in 0..20 {
            let due = bench.interrupts.next_event().filter(|&due| due < 1 << 60);
            let Some(due) = due else { break };
            prop_assert!(due > bench.clock.now());
            bench.run_to(due);
        }
    }
}
