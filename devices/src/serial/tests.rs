use std::sync::{Arc, Mutex};

use super::*;
use crate::inspect::test::field;

const LSR: u8 = 5;
const MSR: u8 = 6;
const SCR: u8 = 7;

const RECEIVED: u8 = InterruptEnable::RECEIVED.bits();
const THR_EMPTY: u8 = InterruptEnable::THR_EMPTY.bits();
const FIFO_ENABLE: u8 = FifoControl::ENABLE.bits();
const DIVISOR_LATCH: u8 = LineControl::DIVISOR_LATCH.bits();
const IDLE: u8 = LineStatus::IDLE.bits();

/// A UART, the bytes that it sent and the levels of its interrupt.
struct Bench {
    serial: Serial,
    sent: Arc<Mutex<Vec<u8>>>,
    levels: Arc<Mutex<Vec<bool>>>,
}

struct SharedOutput(Arc<Mutex<Vec<u8>>>);

impl Write for SharedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Bench {
    fn new() -> Self {
        let (sent, levels) = (Arc::default(), Arc::new(Mutex::new(Vec::new())));
        let collected = Arc::clone(&levels);
        let irq = IrqLine::new(move |level| collected.lock().unwrap().push(level));
        let serial = Serial::new(irq, SharedOutput(Arc::clone(&sent)));
        Self {
            serial,
            sent,
            levels,
        }
    }

    fn get(&mut self, register: u8) -> u8 {
        let mut data = [0];
        self.serial.read(register.into(), &mut data);
        data[0]
    }

    fn set(&mut self, register: u8, value: u8) {
        self.serial.write(register.into(), &[value]);
    }

    fn levels(&self) -> Vec<bool> {
        mem::take(&mut *self.levels.lock().unwrap())
    }
}

#[test]
fn bytes_written_to_the_data_register_are_sent() {
    let mut bench = Bench::new();
    bench.set(DATA, b'h');
    bench.set(DATA, b'i');
    assert_eq!(*bench.sent.lock().unwrap(), b"hi");
    assert_eq!(bench.get(LSR), IDLE);
    assert!(bench.levels().is_empty());
}

#[test]
fn divisor_latch_hides_data_and_interrupt_enable() {
    let mut bench = Bench::new();
    bench.set(LCR, 0x83);
    bench.set(DATA, 1);
    bench.set(IER, 0x0f);
    assert_eq!((bench.get(DATA), bench.get(IER)), (1, 0x0f));
    bench.set(LCR, 0x03);
    assert_eq!(bench.get(IER), 0);
    assert!(bench.sent.lock().unwrap().is_empty());
    assert!(bench.levels().is_empty());
}

#[test]
fn fifo_bits_of_iir_follow_fcr() {
    let mut bench = Bench::new();
    assert_eq!(bench.get(IIR_FCR), InterruptId::None.iir(false));
    bench.set(IIR_FCR, FIFO_ENABLE);
    assert_eq!(bench.get(IIR_FCR), InterruptId::None.iir(true));
}

/// The probes by which a driver distinguishes an 8250, 16450, 16550A and later parts.
#[test]
fn driver_probes_find_a_16550a() {
    let mut bench = Bench::new();
    bench.set(IER, 0);
    assert_eq!(bench.get(IER), 0);
    bench.set(IER, 0x0f);
    assert_eq!(bench.get(IER), 0x0f);
    bench.set(IER, 0xff);
    assert_eq!(bench.get(IER), 0x0f, "no sleep mode, no DMA bits");
    bench.set(IER, 0);
    bench.set(MCR, 0x1a);
    assert_eq!(bench.get(MSR) & 0xf0, 0x90, "loopback of RTS and OUT2");
    bench.set(MCR, 0);
    bench.set(IIR_FCR, FIFO_ENABLE);
    assert_eq!(bench.get(IIR_FCR) >> 6, 3);
    bench.set(LCR, 0xbf);
    assert_ne!(bench.get(IIR_FCR), 0, "no enhanced feature register");
    bench.set(LCR, 0);
    bench.set(IIR_FCR, 0x21);
    assert_eq!(bench.get(IIR_FCR) >> 5, 6, "no 64-byte FIFO");
    bench.set(SCR, 0x5a);
    assert_eq!(bench.get(SCR), 0x5a);
}

#[test]
fn transmitter_interrupt_is_raised_on_enable_and_acknowledged_by_iir() {
    let mut bench = Bench::new();
    bench.set(IER, THR_EMPTY);
    assert_eq!(bench.levels(), [true]);
    assert_eq!(bench.get(IIR_FCR), InterruptId::ThrEmpty.iir(false));
    assert_eq!(bench.levels(), [false]);
    assert_eq!(bench.get(IIR_FCR), InterruptId::None.iir(false));
    bench.set(IER, THR_EMPTY);
    assert!(bench.levels().is_empty(), "already enabled");
    bench.set(IER, 0);
    bench.set(IER, THR_EMPTY);
    assert_eq!(bench.levels(), [true]);
}

#[test]
fn each_byte_sent_makes_a_new_edge() {
    let mut bench = Bench::new();
    bench.set(IER, THR_EMPTY);
    bench.levels();
    bench.set(DATA, b'a');
    bench.set(DATA, b'b');
    assert_eq!(bench.levels(), [false, true, false, true]);
}

#[test]
fn received_data_interrupt_is_pending_until_the_fifo_is_empty() {
    let mut bench = Bench::new();
    bench.set(IER, RECEIVED);
    assert_eq!(bench.serial.input(b"ab"), 2);
    assert_eq!(bench.levels(), [true]);
    assert_eq!(bench.get(LSR), IDLE | LineStatus::DATA_READY.bits());
    assert_eq!(bench.get(IIR_FCR), InterruptId::Received.iir(false));
    assert_eq!(bench.get(DATA), b'a');
    assert_eq!(bench.get(IIR_FCR), InterruptId::Received.iir(false));
    assert!(bench.levels().is_empty());
    assert_eq!(bench.get(DATA), b'b');
    assert_eq!(bench.levels(), [false]);
    assert_eq!(
        (bench.get(IIR_FCR), bench.get(LSR)),
        (InterruptId::None.iir(false), IDLE)
    );
}

#[test]
fn received_data_has_priority_over_an_empty_transmitter() {
    let mut bench = Bench::new();
    bench.serial.input(b"x");
    bench.set(IER, RECEIVED | THR_EMPTY);
    assert_eq!(bench.get(IIR_FCR), InterruptId::Received.iir(false));
    assert_eq!(bench.get(DATA), b'x');
    assert_eq!(bench.levels(), [true]);
    assert_eq!(bench.get(IIR_FCR), InterruptId::ThrEmpty.iir(false));
    assert_eq!(bench.levels(), [false]);
}

#[test]
fn enabling_the_interrupt_again_with_received_data_makes_a_new_edge() {
    let mut bench = Bench::new();
    bench.set(IER, RECEIVED);
    bench.serial.input(b"x");
    bench.set(IER, 0);
    bench.set(IER, RECEIVED);
    assert_eq!(bench.levels(), [true, false, true]);
}

#[test]
fn interrupt_is_gated_by_out2() {
    let mut bench = Bench::new();
    bench.set(MCR, 0);
    bench.set(IER, THR_EMPTY);
    assert!(bench.levels().is_empty());
    bench.set(MCR, ModemControl::OUT2.bits());
    assert_eq!(bench.levels(), [true]);
}

#[test]
fn input_is_bounded_and_keeps_its_order() {
    let mut bench = Bench::new();
    let bytes: Vec<u8> = (0..=255).cycle().take(3 * BACKLOG_MAX).collect();
    assert_eq!(bench.serial.input(&bytes), BACKLOG_MAX);
    assert_eq!(bench.serial.input(&bytes[BACKLOG_MAX..]), FIFO_MAX);
    assert_eq!(bench.serial.input(&bytes), 0);
    let read: Vec<u8> = (0..BACKLOG_MAX + FIFO_MAX)
        .map(|_| bench.get(DATA))
        .collect();
    assert_eq!(read, bytes[..BACKLOG_MAX + FIFO_MAX]);
    assert_eq!(bench.get(LSR), IDLE);
}

#[test]
fn clear_receiver_empties_the_fifo_while_the_divisor_latch_is_selected() {
    let mut bench = Bench::new();
    bench.serial.input(b"stale");
    bench.set(LCR, DIVISOR_LATCH);
    bench.set(IIR_FCR, FIFO_ENABLE | FifoControl::CLEAR_RECEIVER.bits());
    assert_eq!(bench.get(LCR), DIVISOR_LATCH);
    assert_eq!(bench.get(LSR), IDLE);
}

#[test]
fn loopback_receives_sent_bytes_and_keeps_input_in_the_backlog() {
    let mut bench = Bench::new();
    bench.set(MCR, ModemControl::LOOP.bits());
    bench.serial.input(b"x");
    bench.set(DATA, b'l');
    assert_eq!(bench.get(DATA), b'l');
    assert_eq!(bench.get(LSR), IDLE);
    assert!(bench.sent.lock().unwrap().is_empty());
    bench.set(MCR, 0);
    bench.serial.input(b"y");
    assert_eq!((bench.get(DATA), bench.get(DATA)), (b'x', b'y'));
}

#[test]
fn wide_access_reaches_successive_registers() {
    let mut bench = Bench::new();
    bench.serial.write(3, &[0x1b, 0x03]);
    let mut data = [0; 2];
    bench.serial.read(3, &mut data);
    assert_eq!(data, [0x1b, 0x03]);
}

struct BrokenOutput;

impl Write for BrokenOutput {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn output_that_fails_is_dropped() {
    let mut serial = Serial::new(IrqLine::unconnected(), BrokenOutput);
    serial.write(0, b"a");
    serial.write(0, b"b");
    let mut data = [0];
    serial.read(LSR.into(), &mut data);
    assert_eq!(data, [IDLE]);
}

/// A UART with no field at its default value.
fn non_default() -> Bench {
    let mut bench = Bench::new();
    bench.set(LCR, DIVISOR_LATCH);
    bench.set(DATA, 1);
    bench.set(IER, 2);
    bench.set(LCR, 0x1b);
    bench.set(SCR, 7);
    bench.set(IIR_FCR, FIFO_ENABLE);
    bench.set(MCR, 0x0b);
    bench.set(IER, RECEIVED | THR_EMPTY);
    bench.serial.input(&[0x41; 100]);
    bench
}

#[test]
fn restored_state_equals_the_saved_one() {
    let saved = non_default().serial.save();
    let mut bench = Bench::new();
    assert_ne!(bench.serial.save(), saved);
    bench.serial.restore(&saved).unwrap();
    assert_eq!(bench.serial.save(), saved);
    assert_eq!(bench.levels(), [true]);
    assert_eq!(bench.get(IIR_FCR), InterruptId::Received.iir(true));
    bench.set(DATA, b'!');
    assert_eq!(*bench.sent.lock().unwrap(), b"!", "the output is kept");
}

#[test]
fn restore_of_an_invalid_state_fails_and_changes_nothing() {
    let mut bench = non_default();
    let before = bench.serial.save();
    let mut bad = before.clone();
    bad.fifo = vec![0; FIFO_MAX + 1];
    let error = SerialError::TooMuchInput {
        fifo: FIFO_MAX + 1,
        backlog: 36,
    };
    assert_eq!(bench.serial.restore(&bad), Err(error));
    let mut bad = before.clone();
    bad.backlog = vec![0; BACKLOG_MAX + 1];
    assert!(bench.serial.restore(&bad).is_err());
    let mut bad = before.clone();
    bad.interrupt_enable = 0x10;
    assert_eq!(
        bench.serial.restore(&bad),
        Err(SerialError::InterruptEnable(0x10))
    );
    assert_eq!(bench.serial.save(), before);
}

#[test]
fn inspection_decodes_the_registers() {
    let mut bench = Bench::new();
    bench.set(LCR, 0x03);
    bench.set(IER, RECEIVED);
    bench.serial.input(&[0x41; 70]);
    let table = [
        ("divisor", "12"),
        ("rate", "9600 baud"),
        ("IER", "RECEIVED"),
        ("interrupt", "Received"),
        ("LCR", "WORD_LENGTH_0 WORD_LENGTH_1"),
        ("MCR", "OUT2"),
        ("received bytes", "64"),
        ("backlog bytes", "6"),
        ("IRQ level", "1"),
    ];
    for (name, value) in table {
        assert_eq!(field(&bench.serial, name), value, "{name}");
    }
}
