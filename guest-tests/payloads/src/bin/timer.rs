//! The platform's timers against each other: TSC, APIC timer, PIT, RTC, PM timer.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic::{self, read, write};
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::insn::{self, rdtsc};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, LVT_MASKED};
use hindsight_guest::trap;
use hindsight_guest::{pic, port};
use hindsight_payloads::clock::{self, PM_HZ, pm_timer, rate_by_pm_timer, wait_until};

payload!("timer");

/// Frequency of the PIT in Hz.
const PIT_HZ: u64 = 1_193_182;
const PIT_CONTROL: u16 = 0x43;
const PIT_0: u16 = 0x40;
const PIT_2: u16 = 0x42;
/// Gate and speaker of PIT channel 2, and its output.
const SPEAKER: u16 = 0x61;
const RTC_INDEX: u16 = 0x70;
const RTC_DATA: u16 = 0x71;
/// First vector of the legacy interrupt controllers.
const PIC_BASE: u8 = 0x20;
const PIT_LINE: u8 = 0;
const RTC_LINE: u8 = 8;

static TAKEN: AtomicU64 = AtomicU64::new(0);

fn taken() -> u64 {
    TAKEN.load(Ordering::Acquire)
}

fn count_pit(_: &mut TrapFrame) {
    TAKEN.fetch_add(1, Ordering::AcqRel);
    pic::eoi(PIT_LINE);
}

fn count_rtc(_: &mut TrapFrame) {
    rtc(0x0c);
    TAKEN.fetch_add(1, Ordering::AcqRel);
    pic::eoi(RTC_LINE);
}

fn rtc(register: u8) -> u8 {
    port::outb(RTC_INDEX, register);
    port::inb(RTC_DATA)
}

fn set_rtc(register: u8, value: u8) {
    port::outb(RTC_INDEX, register);
    port::outb(RTC_DATA, value);
}

/// Whether `found` lies within `per_mille` thousandths of `expected`.
fn near(found: u64, expected: u64, per_mille: u64) -> bool {
    found.abs_diff(expected) <= expected * per_mille / 1000
}

/// Whether one of a few measurements is near `expected`.
///
/// A single measurement may take longer on a host that is busy.
fn measured_near(expected: u64, per_mille: u64, measure: impl Fn() -> u64) -> bool {
    (0..20).any(|_| near(measure(), expected, per_mille))
}

/// Starts channel 0 as a rate generator with interrupts of `divisor` PIT ticks each, on the PIC.
fn start_pit(divisor: u16) {
    TAKEN.store(0, Ordering::Release);
    pic::init(PIC_BASE);
    trap::set_handler(PIC_BASE + PIT_LINE, count_pit);
    port::outb(PIT_CONTROL, 0b0011_0100);
    let [low, high] = divisor.to_le_bytes();
    port::outb(PIT_0, low);
    port::outb(PIT_0, high);
    pic::unmask(PIT_LINE);
}

/// Lets the PIC through LINT0 where the APIC is enabled: ExtINT.
fn virtual_wire() {
    apic::enable();
    write(ApicRegister::LVT_LINT0, 0b111 << 8);
}

case! {
    name: "pm_timer_counts", cpl: [0], rules: [], needs: ["io-exit"],
    about: "the PM timer goes forwards, in 24 bits",
    fn body(_ctx) {
        let first = pm_timer();
        check!(wait_until(1000, || pm_timer() != first), "it counts");
        let step = pm_timer().wrapping_sub(first) & 0xff_ffff;
        check!(step < PM_HZ, "forwards");
    }
}

case! {
    name: "tsc_rate", cpl: [0], rules: ["TSC-08", "ART-05"], needs: ["io-exit"], timeout_ms: 10000,
    about: "the TSC runs at the frequency of leaf 15H, measured by the PM timer",
    fn body(ctx) {
        let Some(hz) = clock::tsc_hz() else { skip!(ctx, "CPUID has no leaf 15H") };
        check!(measured_near(hz, 1, || rate_by_pm_timer(100, rdtsc)), "within 0.1 percent");
    }
}

case! {
    name: "apic_timer_rate", cpl: [0], rules: ["ART-08"], needs: ["io-exit"], timeout_ms: 10000,
    about: "the APIC timer counts at the crystal's frequency, divided as configured",
    fn body(ctx) {
        let Some(hz) = clock::crystal_hz() else { skip!(ctx, "CPUID has no leaf 15H") };
        apic::enable();
        write(ApicRegister::LVT_TIMER, LVT_MASKED);
        for (divide, by) in [(0b1011, 1), (0b0011, 16), (0b1010, 128)] {
            write(ApicRegister::TIMER_DIVIDE, divide);
            let elapsed = || u64::from(u32::MAX - read(ApicRegister::TIMER_CURRENT));
            let rate = || {
                write(ApicRegister::TIMER_INITIAL, u32::MAX);
                rate_by_pm_timer(50, elapsed)
            };
            check!(measured_near(hz / by, 2, rate), "within 0.2 percent");
        }
        apic::disable();
    }
}

case! {
    name: "pit_rate", cpl: [0], rules: [], needs: ["io-exit"], timeout_ms: 10000,
    about: "channel 2 of the PIT ends its count after the right time by the PM timer",
    fn body(_ctx) {
        const TICKS: u16 = 20_000;
        let measure = || {
            port::outb(SPEAKER, port::inb(SPEAKER) & !0b11 | 1);
            port::outb(PIT_CONTROL, 0b1011_0000); // channel 2, both bytes, mode 0
            let [low, high] = TICKS.to_le_bytes();
            port::outb(PIT_2, low);
            port::outb(PIT_2, high);
            let start = pm_timer();
            if !wait_until(2000, || port::inb(SPEAKER) & 1 << 5 != 0) {
                return 0;
            }
            pm_timer().wrapping_sub(start) & 0xff_ffff
        };
        let expected = u64::from(TICKS) * PM_HZ / PIT_HZ;
        check!(measured_near(expected, 10, measure), "within 1 percent");
    }
}

case! {
    name: "pit_latch", cpl: [0], rules: [], needs: ["io-exit"],
    about: "a latched count reads back in two bytes, and falls",
    fn body(_ctx) {
        port::outb(SPEAKER, port::inb(SPEAKER) & !0b11 | 1);
        port::outb(PIT_CONTROL, 0b1011_0100); // channel 2, both bytes, mode 2
        port::outb(PIT_2, 0xff);
        port::outb(PIT_2, 0xff);
        let latched = || {
            port::outb(PIT_CONTROL, 0b1000_0000);
            u16::from_le_bytes([port::inb(PIT_2), port::inb(PIT_2)])
        };
        let first = latched();
        clock::wait(2);
        let second = latched();
        check!(second < first, "it falls");
    }
}

case! {
    name: "pit_interrupts", cpl: [0], rules: [], needs: ["interrupt"], timeout_ms: 5000,
    about: "channel 0 interrupts through the PIC at its rate",
    fn body(_ctx) {
        virtual_wire();
        start_pit(5966); // 200 Hz
        insn::sti();
        let start = pm_timer();
        let came = wait_until(3000, || taken() >= 20);
        let elapsed = pm_timer().wrapping_sub(start) & 0xff_ffff;
        insn::cli();
        pic::mask_all();
        check!(came, "twenty are taken");
        // Twenty periods are 100 ms; the first may come early, and the host may hold some back.
        check!(elapsed > PM_HZ / 10 * 9 / 10, "not too fast");
        apic::disable();
    }
}

case! {
    name: "tsc_in_hlt", cpl: [0], rules: ["TSC-07"], needs: ["interrupt", "hlt-exit"], timeout_ms: 5000,
    about: "the TSC counts at its rate while the processor is halted",
    fn body(ctx) {
        let Some(hz) = clock::tsc_hz() else { skip!(ctx, "CPUID has no leaf 15H") };
        virtual_wire();
        start_pit(11932); // 100 Hz
        let halted_rate = || {
            let (pm, tsc) = (pm_timer(), rdtsc());
            let until = taken() + 10;
            while taken() < until {
                insn::sti_hlt();
                insn::cli();
            }
            let ticks = rdtsc().wrapping_sub(tsc);
            let elapsed = pm_timer().wrapping_sub(pm) & 0xff_ffff;
            ticks * 1000 / elapsed.max(1)
        };
        check!(measured_near(hz * 1000 / PM_HZ, 2, halted_rate), "within 0.2 percent");
        pic::mask_all();
        apic::disable();
    }
}

case! {
    name: "rtc_time", cpl: [0], rules: [], needs: ["io-exit"],
    about: "the RTC holds a time of day, and says that it is valid",
    fn body(_ctx) {
        check_eq!(rtc(0x0d) & 0x80, 0x80, "valid RAM and time");
        check!(wait_until(1000, || rtc(0x0a) & 0x80 == 0), "no update in progress for ever");
        let binary = rtc(0x0b) & 1 << 2 != 0;
        let number = |register| {
            let raw = rtc(register);
            if binary { raw } else { (raw >> 4) * 10 + (raw & 0xf) }
        };
        check!(number(0) < 60 && number(2) < 60, "seconds and minutes");
        check!((1..=31).contains(&number(7)) && (1..=12).contains(&number(8)), "day and month");
    }
}

case! {
    name: "rtc_periodic", cpl: [0], rules: [], needs: ["interrupt"], timeout_ms: 5000,
    about: "the RTC interrupts periodically through the second PIC",
    fn body(_ctx) {
        TAKEN.store(0, Ordering::Release);
        virtual_wire();
        pic::init(PIC_BASE);
        trap::set_handler(PIC_BASE + RTC_LINE, count_rtc);
        let (a, b) = (rtc(0x0a), rtc(0x0b));
        set_rtc(0x0a, 0x26); // 1024 Hz
        set_rtc(0x0b, b | 1 << 6);
        rtc(0x0c);
        pic::unmask(RTC_LINE);
        insn::sti();
        let came = wait_until(2000, || taken() >= 10);
        insn::cli();
        set_rtc(0x0b, b);
        set_rtc(0x0a, a);
        pic::mask_all();
        check!(came, "ten are taken");
        apic::disable();
    }
}
