use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use proptest::prelude::*;

use super::*;
use crate::clock::Clock;

/// Notes who was woken, and how often the next event became earlier.
#[derive(Default)]
struct Log {
    woken: Mutex<Vec<usize>>,
    timer_changes: AtomicUsize,
}

impl Wake for Log {
    fn wake(&self, vcpu: usize) {
        self.woken.lock().unwrap().push(vcpu);
    }

    fn timer_changed(&self) {
        self.timer_changes.fetch_add(1, Ordering::Relaxed);
    }
}

struct Rig {
    interrupts: Interrupts,
    clock: Arc<Clock>,
    log: Arc<Log>,
}

impl Rig {
    /// At the crystal's rate: one tick is one crystal cycle. The APICs are software-enabled.
    fn new(n_vcpus: usize) -> Self {
        let clock = Arc::new(Clock::new_virtual(lapic::CRYSTAL_HZ));
        let log = Arc::new(Log::default());
        let interrupts =
            Interrupts::new(n_vcpus, Arc::clone(&clock), Config::default(), log.clone());
        let rig = Self {
            interrupts,
            clock,
            log,
        };
        for vcpu in 0..n_vcpus {
            rig.write(vcpu, 0xf0, 0x1ff);
        }
        rig
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
fn reset_leaves_nothing_pending_and_nothing_to_come() {
    let rig = Rig::new(2);
    assert!(!rig.interrupts.pending(0).any());
    assert!(!rig.interrupts.pending(1).any());
    assert_eq!(rig.interrupts.next_event(), None);
    assert_eq!(rig.woken(), []);
    rig.interrupts.set_virtual_wire();
    assert!(!rig.interrupts.pending(0).any());
}

#[test]
fn reset_with_the_clock_set_back_lets_timers_run_again() {
    let rig = Rig::new(1);
    rig.run_to(1 << 40);
    rig.write(0, 0x320, 0x2_0050);
    rig.write(0, 0x380, 1000);
    rig.interrupts.port_write(0x43, 0x34);
    rig.clock.set(0);
    rig.interrupts.reset();
    assert_eq!(rig.interrupts.next_event(), None);
    rig.interrupts.port_write(0x43, 0x34);
    rig.interrupts.port_write(0x40, 0x10);
    rig.interrupts.port_write(0x40, 0x00);
    assert!(rig.interrupts.next_event().unwrap() < 1000);
}

#[test]
fn state_is_plain_data() {
    fn assert_plain<T: serde::Serialize + serde::de::DeserializeOwned>(_: &T) {}
    assert_plain(&Rig::new(1).interrupts.save());
}

#[test]
fn fixed_ipi_wakes_its_destination_once() {
    let rig = Rig::new(2);
    rig.write(0, 0x310, 0x0100_0000);
    rig.write(0, 0x300, 0x4041);
    rig.write(0, 0x300, 0x4041);
    assert_eq!(rig.woken(), [1]);
    assert!(rig.interrupts.pending(1).interrupt);
    assert!(!rig.interrupts.pending(0).any());
    assert_eq!(rig.interrupts.acknowledge(1), Some(0x41));
    assert!(!rig.interrupts.pending(1).any());
    assert_eq!(rig.interrupts.acknowledge(1), None);
}

#[test]
fn taking_one_event_does_not_announce_the_other_again() {
    let rig = Rig::new(1);
    rig.write(0, 0x300, 0x4_4041);
    rig.interrupts.inject_nmi(0);
    assert_eq!(rig.woken(), [0, 0]);
    assert!(rig.interrupts.take_nmi(0));
    assert!(rig.interrupts.pending(0).interrupt);
    assert_eq!(rig.woken(), []);
}

#[test]
fn self_ipi_in_x2apic_mode_is_pending_at_once() {
    let rig = Rig::new(1);
    let base = rig.interrupts.apic_base(0);
    rig.interrupts.set_apic_base(0, base | 1 << 10).unwrap();
    assert_eq!(rig.interrupts.apic_base(0), base | 1 << 10);
    rig.interrupts.x2apic_write(0, 0x83f, 0x77).unwrap();
    assert_eq!(rig.interrupts.acknowledge(0), Some(0x77));
    assert_eq!(rig.interrupts.x2apic_write(0, 0x83f, 0x177), Err(GpFault));
}

#[test]
fn init_and_start_up_ipis_reach_the_other_processors() {
    let rig = Rig::new(3);
    rig.write(0, 0x300, 0xc_4500);
    rig.write(0, 0x300, 0xc_4608);
    rig.write(0, 0x300, 0xc_4608);
    assert!(!rig.interrupts.pending(0).any());
    for vcpu in [1, 2] {
        let pending = rig.interrupts.pending(vcpu);
        assert_eq!(
            pending,
            Pending {
                init: true,
                sipi: Some(8),
                ..Pending::default()
            }
        );
        assert!(rig.interrupts.take_init(vcpu));
        assert_eq!(rig.interrupts.take_sipi(vcpu), Some(8));
        assert!(!rig.interrupts.pending(vcpu).any());
    }
    // Running, they drop a start-up IPI.
    rig.write(0, 0x300, 0xc_4609);
    assert!(!rig.interrupts.pending(1).any());
}

#[test]
fn lowest_priority_goes_to_the_least_priority_and_then_the_lowest_index() {
    let rig = Rig::new(3);
    for vcpu in 0..3 {
        rig.write(vcpu, 0xd0, 0x0100_0000 << vcpu);
    }
    rig.interrupts.set_cr8(0, 5);
    let vectors = |rig: &Rig| [0, 1, 2].map(|vcpu| rig.interrupts.acknowledge(vcpu));
    let address = 0xfee0_0000 | 0xff << 12 | 1 << 2;
    rig.interrupts.send_msi(address, 0x161);
    assert_eq!(vectors(&rig), [None, Some(0x61), None]);
    rig.interrupts.send_msi(address, 0x162);
    assert_eq!(vectors(&rig), [None, None, Some(0x62)]);
}

#[test]
fn cr8_holds_back_an_interrupt_of_its_class() {
    let rig = Rig::new(1);
    rig.interrupts.set_cr8(0, 4);
    assert_eq!(rig.read(0, 0x80), 0x40);
    rig.write(0, 0x300, 0x4_4041);
    let pending = rig.interrupts.pending(0);
    assert!(pending.held && !pending.interrupt);
    assert_eq!(rig.woken(), [0], "it must watch its CR8");
    rig.interrupts.set_cr8(0, 3);
    assert!(rig.interrupts.pending(0).interrupt);
    assert_eq!(rig.woken(), [0]);
    assert_eq!(rig.interrupts.cr8(0), 3);
}

#[test]
fn isa_line_reaches_the_processor_through_the_virtual_wire() {
    let rig = Rig::new(2);
    rig.initialize_pic();
    rig.interrupts.set_irq(4, true);
    assert!(!rig.interrupts.pending(0).any());
    rig.interrupts.set_virtual_wire();
    assert!(rig.interrupts.pending(0).interrupt);
    assert!(!rig.interrupts.pending(1).any());
    rig.interrupts.set_irq(12, true);
    assert_eq!(rig.interrupts.acknowledge(0), Some(0x2c));
    assert!(!rig.interrupts.pending(0).any());
    rig.interrupts.port_write(0xa0, 0x20);
    rig.interrupts.port_write(0x20, 0x20);
    assert_eq!(rig.interrupts.acknowledge(0), Some(0x24));
}

#[test]
fn isa_line_reaches_a_processor_whose_apic_is_disabled() {
    let rig = Rig::new(1);
    rig.initialize_pic();
    rig.interrupts.set_apic_base(0, 0xfee0_0100).unwrap();
    rig.interrupts.set_irq(4, true);
    assert_eq!(rig.interrupts.acknowledge(0), Some(0x24));
}

#[test]
fn ext_int_entry_of_pin_zero_reaches_its_destination() {
    let rig = Rig::new(2);
    rig.initialize_pic();
    rig.set_pin(0, 1 << 56 | 0x700);
    rig.interrupts.set_irq(4, true);
    assert!(!rig.interrupts.pending(0).any());
    rig.interrupts.set_irq(3, true);
    assert_eq!(rig.interrupts.acknowledge(1), Some(0x23));
    rig.interrupts.port_write(0x20, 0x20);
    assert_eq!(rig.interrupts.acknowledge(1), Some(0x24));
    assert_eq!(rig.interrupts.acknowledge(1), None);
}

#[test]
fn level_line_through_the_ioapic_comes_again_until_it_falls() {
    let rig = Rig::new(2);
    rig.set_pin(20, 1 << 56 | 0x8061);
    rig.interrupts.set_irq(20, true);
    for _ in 0..2 {
        assert_eq!(rig.interrupts.acknowledge(1), Some(0x61));
        assert_eq!(rig.interrupts.acknowledge(1), None);
        rig.write(1, 0xb0, 0);
    }
    assert_eq!(rig.interrupts.acknowledge(1), Some(0x61));
    rig.interrupts.set_irq(20, false);
    rig.write(1, 0xb0, 0);
    assert_eq!(rig.interrupts.acknowledge(1), None);
}

#[test]
fn pit_drives_pin_two_and_line_zero_at_its_time() {
    let rig = Rig::new(1);
    rig.initialize_pic();
    rig.set_pin(2, 0x30);
    rig.interrupts.port_write(0x43, 0x34);
    rig.interrupts.port_write(0x40, 0x9c);
    rig.interrupts.port_write(0x40, 0x2e);
    // 1 + 11932 timer clocks in crystal cycles, rounded up.
    let due = (11_933_u64 * lapic::CRYSTAL_HZ).div_ceil(crate::pit::PIT_HZ);
    assert_eq!(rig.interrupts.next_event(), Some(due));
    assert!(rig.log.timer_changes.load(Ordering::Relaxed) > 0);
    rig.run_to(due - 1);
    assert!(!rig.interrupts.pending(0).any());
    rig.run_to(due);
    assert_eq!(rig.interrupts.acknowledge(0), Some(0x30));
    rig.interrupts.port_write(0x20, 0x0a);
    assert_eq!(rig.interrupts.port_read(0x20), Some(0x01));
    // Several periods late: one interrupt.
    rig.write(0, 0xb0, 0);
    rig.run_to(due * 10);
    assert_eq!(rig.interrupts.acknowledge(0), Some(0x30));
    rig.write(0, 0xb0, 0);
    assert_eq!(rig.interrupts.acknowledge(0), None);
}

#[test]
fn rtc_drives_line_eight_until_register_c_is_read() {
    let rig = Rig::new(1);
    rig.set_pin(8, 0x38);
    rig.interrupts.port_write(0x70, 0x0b);
    rig.interrupts.port_write(0x71, 0x42);
    let next = |rig: &Rig| {
        rig.run_to(rig.interrupts.next_event().unwrap());
        let vector = rig.interrupts.acknowledge(0);
        rig.write(0, 0xb0, 0);
        vector
    };
    assert_eq!(next(&rig), Some(0x38));
    assert_eq!(rig.interrupts.next_event(), None);
    rig.interrupts.port_write(0x70, 0x0c);
    assert_eq!(rig.interrupts.port_read(0x71), Some(0xc0));
    assert_eq!(next(&rig), Some(0x38));
}

#[test]
fn deadline_timer_fires_by_advance_and_by_a_moved_offset() {
    let rig = Rig::new(1);
    rig.write(0, 0x320, 0x4_0050);
    rig.interrupts.set_tsc_deadline(0, 5000, 1000);
    assert_eq!(rig.interrupts.next_event(), Some(4000));
    rig.run_to(4000);
    assert_eq!(rig.interrupts.acknowledge(0), Some(0x50));
    assert_eq!(rig.interrupts.tsc_deadline(0), 0);
    rig.write(0, 0xb0, 0);
    rig.interrupts.set_tsc_deadline(0, 1 << 50, 1000);
    rig.interrupts.tsc_offset_changed(0, 1 << 50);
    assert_eq!(rig.interrupts.acknowledge(0), Some(0x50));
    assert_eq!(rig.interrupts.next_event(), None);
}

#[test]
fn pmi_and_nmi_line_go_through_the_lvt() {
    let rig = Rig::new(1);
    rig.write(0, 0x340, 0x400);
    rig.interrupts.request_pmi(0);
    assert!(rig.interrupts.take_nmi(0));
    assert_eq!(rig.read(0, 0x340), 0x1_0400);
    rig.interrupts.set_nmi_line(true);
    assert!(!rig.interrupts.take_nmi(0));
    rig.interrupts.set_nmi_line(false);
    rig.write(0, 0x360, 0x400);
    rig.interrupts.set_nmi_line(true);
    assert!(rig.interrupts.take_nmi(0));
}

#[test]
fn lapic_access_of_another_size_reads_ones_and_writes_nothing() {
    let rig = Rig::new(1);
    let mut data = [0; 8];
    rig.interrupts.lapic_read(0, 0x30, &mut data);
    assert_eq!(data, [0xff; 8]);
    rig.interrupts.lapic_write(0, 0x80, &[0x20]);
    assert_eq!(rig.read(0, 0x80), 0);
    assert_eq!(rig.read(0, 0x84), u32::MAX);
}

#[test]
fn ports_of_others_are_not_claimed() {
    let rig = Rig::new(1);
    assert_eq!(rig.interrupts.port_read(0x60), None);
    assert!(!rig.interrupts.port_write(0x3f8, 0));
}

/// Asks and takes from within the notification.
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
fn wake_may_call_back() {
    let wake = Arc::new(Reentrant::default());
    let clock = Arc::new(Clock::new_virtual(1));
    let interrupts = Arc::new(Interrupts::new(1, clock, Config::default(), wake.clone()));
    wake.0.set(Arc::downgrade(&interrupts)).unwrap();
    interrupts.lapic_write(0, 0xf0, &0x1ff_u32.to_le_bytes());
    interrupts.send_msi(0xfee0_0000, 0x41);
    assert_eq!(wake.1.load(Ordering::Relaxed), 1);
}

#[test]
fn threads_that_interrupt_each_other_lose_nothing() {
    let rig = Arc::new(Rig::new(2));
    let sender = Arc::clone(&rig);
    let vectors: Vec<u32> = (0x20..0x100).collect();
    let sent = vectors.clone();
    let thread = std::thread::spawn(move || {
        for vector in sent {
            sender.interrupts.send_msi(0xfee0_1000, vector);
        }
    });
    let mut taken = Vec::new();
    while taken.len() < vectors.len() {
        if rig.interrupts.pending(1).interrupt {
            taken.extend(rig.interrupts.acknowledge(1).map(u32::from));
            rig.write(1, 0xb0, 0);
        }
    }
    thread.join().unwrap();
    taken.sort_unstable();
    assert_eq!(taken, vectors);
}

#[test]
fn restore_of_an_impossible_state_is_refused_and_changes_nothing() {
    type Spoil = fn(&mut InterruptsState);
    let table: [(InterruptsError, Spoil); 8] = [
        (
            InterruptsError::LapicCount {
                expected: 2,
                found: 1,
            },
            |s| s.lapics.truncate(1),
        ),
        (InterruptsError::Lapic(1), |s| s.lapics[1].irr[0] = 1),
        (InterruptsError::Lapic(0), |s| {
            s.lapics[0].apic_base = 0xfee0_0500
        }),
        (InterruptsError::Ioapic, |s| s.ioapic.entries[3] = 1 << 20),
        (InterruptsError::Pic, |s| s.pic.chips[1].first = 8),
        (InterruptsError::Pit, |s| s.pit.channels[0].count = 0),
        (InterruptsError::Rtc, |s| s.rtc.registers.truncate(127)),
        (InterruptsError::Lines(1 << 24), |s| s.lines = 1 << 24),
    ];
    let rig = Rig::new(2);
    let good = rig.interrupts.save();
    for (error, spoil) in table {
        let mut bad = good.clone();
        spoil(&mut bad);
        assert_eq!(rig.interrupts.restore(&bad), Err(error), "{error}");
        assert_eq!(rig.interrupts.save(), good, "{error}");
    }
}

#[derive(Clone, Debug)]
enum Step {
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

fn any_step() -> impl Strategy<Value = Step> {
    let vcpu = || 0_usize..4;
    let register = (0_u64..0x40).prop_map(|register| register << 4);
    let base = prop_oneof![Just(0xfee0_0900_u64), Just(0xfee0_0d00), Just(0xfee0_0100)];
    prop_oneof![
        6 => (vcpu(), register, any::<u32>()).prop_map(|(c, o, v)| Step::Lapic(c, o, v)),
        3 => (vcpu(), 0x800_u32..0x840, 0_u64..1 << 20).prop_map(|(c, m, v)| Step::X2apic(c, m, v)),
        1 => (vcpu(), base).prop_map(|(c, v)| Step::Base(c, v)),
        3 => (0_u8..0x40, any::<u32>()).prop_map(|(r, v)| Step::Ioapic(r, v)),
        6 => (0..PORTS.len(), any::<u8>(), any::<bool>()).prop_map(|(p, v, r)| Step::Port(p, v, r)),
        4 => (0_u32..26, any::<bool>()).prop_map(|(l, v)| Step::Line(l, v)),
        2 => (any::<u32>(), any::<u32>()).prop_map(|(a, d)| Step::Msi(a, d)),
        4 => vcpu().prop_map(Step::Take),
        1 => (vcpu(), any::<u64>(), any::<u64>()).prop_map(|(c, d, o)| Step::Deadline(c, d, o)),
        3 => (0_u64..10_000_000).prop_map(Step::Advance),
        3 => Just(Step::NextEvent),
    ]
}

fn take(rig: &Rig, step: &Step) {
    let interrupts = &rig.interrupts;
    match *step {
        Step::Lapic(vcpu, offset, value) => rig.write(vcpu, offset, value),
        Step::X2apic(vcpu, msr, value) => drop(interrupts.x2apic_write(vcpu, msr, value)),
        Step::Base(vcpu, value) => drop(interrupts.set_apic_base(vcpu, value)),
        Step::Ioapic(register, value) => {
            interrupts.ioapic_write(0, &[register]);
            interrupts.ioapic_write(0x10, &value.to_le_bytes());
        }
        Step::Port(index, _, true) => drop(interrupts.port_read(PORTS[index])),
        Step::Port(index, value, false) => drop(interrupts.port_write(PORTS[index], value)),
        Step::Line(line, level) => interrupts.set_irq(line, level),
        Step::Msi(address, data) => interrupts.send_msi(address, data),
        Step::Take(vcpu) => {
            let pending = interrupts.pending(vcpu);
            assert_eq!(interrupts.take_nmi(vcpu), pending.nmi);
            assert_eq!(interrupts.take_smi(vcpu), pending.smi);
            let sipi = pending.sipi.filter(|_| !pending.init);
            assert_eq!(interrupts.take_sipi(vcpu), sipi);
            assert_eq!(interrupts.acknowledge(vcpu).is_some(), pending.interrupt);
            assert_eq!(interrupts.take_init(vcpu), pending.init);
        }
        Step::Deadline(vcpu, deadline, offset) => {
            interrupts.set_tsc_deadline(vcpu, deadline, offset);
        }
        Step::Advance(ticks) => rig.run_to(rig.clock.now() + ticks),
        Step::NextEvent => {
            if let Some(due) = interrupts.next_event().filter(|&due| due < 1 << 60) {
                rig.run_to(due);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_steps_restore_to_a_machine_that_goes_on_alike(
        before in prop::collection::vec(any_step(), 1..60),
        after in prop::collection::vec(any_step(), 1..30),
    ) {
        let rig = Rig::new(3);
        for step in &before {
            take(&rig, step);
        }
        // Bring both to the same point: what is due has fired.
        rig.interrupts.advance(rig.clock.now());
        let state = rig.interrupts.save();
        let copy = Rig::new(3);
        copy.clock.set(rig.clock.now());
        prop_assert_eq!(copy.interrupts.restore(&state), Ok(()));
        prop_assert_eq!(copy.interrupts.save(), state);
        for step in &after {
            take(&rig, step);
            take(&copy, step);
            prop_assert_eq!(copy.interrupts.next_event(), rig.interrupts.next_event());
            for vcpu in 0..3 {
                prop_assert_eq!(copy.interrupts.pending(vcpu), rig.interrupts.pending(vcpu));
                prop_assert_eq!(copy.interrupts.cr8(vcpu), rig.interrupts.cr8(vcpu));
                prop_assert_eq!(copy.interrupts.apic_base(vcpu), rig.interrupts.apic_base(vcpu));
            }
        }
        prop_assert_eq!(copy.interrupts.save(), rig.interrupts.save());
    }

    #[test]
    fn advance_to_the_next_event_makes_progress(steps in prop::collection::vec(any_step(), 1..60)) {
        let rig = Rig::new(2);
        for step in &steps {
            take(&rig, step);
        }
        rig.interrupts.advance(rig.clock.now());
        for _ in 0..20 {
            let Some(due) = rig.interrupts.next_event().filter(|&due| due < 1 << 60) else { break };
            prop_assert!(due > rig.clock.now());
            rig.run_to(due);
        }
    }
}
