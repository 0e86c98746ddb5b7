//! Arbitrary accesses to a complete bus: no device panics, and states can be saved and restored.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::acpi_pm::{AcpiPm, AcpiPmState, PM_PORT, PM_PORTS};
use crate::debug_exit::{DEBUG_EXIT_PORT, DEBUG_EXIT_PORTS, DebugExit};
use crate::debugcon::DebugCon;
use crate::fw_cfg::{FW_CFG_PORT, FW_CFG_PORTS, FwCfg, FwCfgState};
use crate::i8042::{I8042, I8042_COMMAND_OFFSET, I8042_COMMAND_PORT, I8042_DATA_PORT, I8042State};
use crate::legacy::{CONTROL_A_PORT, ControlA, POST_CODE_PORT, PostCode};
use crate::pci::{PCI_PORT, PCI_PORTS, PciConfig, PciState};
use crate::serial::{COM1_PORT, Serial, SerialState, UART_PORTS};
use crate::test_device::{
    BYTE_LATCH_PORT, ByteLatches, LATCH_PORT, LATCH_PORTS, LINE_PORT, LINES, Latch, LinePorts,
    TEST_MEMORY_BASE, TEST_MEMORY_LEN, TestMemory,
};
use crate::{IrqLine, MmioBus, NanoClock, PortBus, Requests, SharedDevice};
use proptest::prelude::*;

/// Buses with every device of this crate that needs no interrupt controller.
struct FuzzBuses {
    ports: PortBus,
    mmio: MmioBus,
    serial: Arc<Mutex<Serial>>,
    i8042: Arc<Mutex<I8042>>,
    pci: Arc<Mutex<PciConfig>>,
    pm: Arc<Mutex<AcpiPm>>,
    fw_cfg: Arc<Mutex<FwCfg>>,
    control_a: Arc<Mutex<ControlA>>,
    memory: Arc<Mutex<TestMemory>>,
}

#[derive(Debug, PartialEq)]
struct FuzzState {
    serial: SerialState,
    i8042: I8042State,
    pci: PciState,
    pm: AcpiPmState,
    fw_cfg: FwCfgState,
    control_a: u8,
    memory: Vec<u8>,
}

fn shared<T>(device: T) -> Arc<Mutex<T>> {
    Arc::new(Mutex::new(device))
}

impl FuzzBuses {
    fn new() -> Self {
        let requests = Requests::new(|_| {});
        let now = AtomicU64::new(0);
        let clock = NanoClock::new(move || now.fetch_add(100_000_000_000, Ordering::Relaxed));
        let serial = shared(Serial::new(IrqLine::unconnected(), io::sink()));
        let i8042 = shared(I8042::new(requests.clone()));
        let pci = shared(PciConfig::new(requests.clone()));
        let pm = shared(AcpiPm::new(clock, requests.clone()));
        let control_a = shared(ControlA::new(requests.clone()));
        let memory = shared(TestMemory::default());
        let mut fw_cfg = FwCfg::new(2, 1 << 27);
        fw_cfg.add_file("opt/fuzz", vec![7; 100]).unwrap();
        let fw_cfg = shared(fw_cfg);

        let mut ports = PortBus::new();
        let plain: [(u16, u16, SharedDevice); 11] = [
            (I8042_DATA_PORT, 1, i8042.clone()),
            (POST_CODE_PORT, 1, shared(PostCode::default())),
            (CONTROL_A_PORT, 1, control_a.clone()),
            (LATCH_PORT, LATCH_PORTS, shared(Latch::default())),
            (
                BYTE_LATCH_PORT,
                LATCH_PORTS,
                shared(ByteLatches::new(DebugCon::new(io::sink()))),
            ),
            (
                DEBUG_EXIT_PORT,
                DEBUG_EXIT_PORTS,
                shared(DebugExit::new(requests)),
            ),
            (COM1_PORT, UART_PORTS, serial.clone()),
            (FW_CFG_PORT, FW_CFG_PORTS, fw_cfg.clone()),
            (PM_PORT, PM_PORTS, pm.clone()),
            (PCI_PORT, PCI_PORTS, pci.clone()),
            (LINE_PORT, LINES, shared(LinePorts::new(|_, _| {}))),
        ];
        for (base, len, device) in plain {
            ports.map(base, len, device).unwrap();
        }
        ports
            .map_at(I8042_COMMAND_PORT, 1, I8042_COMMAND_OFFSET, i8042.clone())
            .unwrap();
        let mut mmio = MmioBus::new();
        mmio.map(TEST_MEMORY_BASE, TEST_MEMORY_LEN, memory.clone())
            .unwrap();
        Self {
            ports,
            mmio,
            serial,
            i8042,
            pci,
            pm,
            fw_cfg,
            control_a,
            memory,
        }
    }

    fn save(&self) -> FuzzState {
        FuzzState {
            serial: self.serial.lock().unwrap().save(),
            i8042: self.i8042.lock().unwrap().save(),
            pci: self.pci.lock().unwrap().save(),
            pm: self.pm.lock().unwrap().save(),
            fw_cfg: self.fw_cfg.lock().unwrap().save(),
            control_a: self.control_a.lock().unwrap().save(),
            memory: self.memory.lock().unwrap().save(),
        }
    }

    fn restore(&self, saved: &FuzzState) {
        self.serial.lock().unwrap().restore(&saved.serial).unwrap();
        self.i8042.lock().unwrap().restore(&saved.i8042);
        self.pci.lock().unwrap().restore(&saved.pci);
        self.pm.lock().unwrap().restore(&saved.pm);
        self.fw_cfg.lock().unwrap().restore(&saved.fw_cfg);
        self.control_a.lock().unwrap().restore(saved.control_a);
        self.memory.lock().unwrap().restore(&saved.memory).unwrap();
    }
}

/// An access by the guest, or serial input.
#[derive(Clone, Debug)]
enum FuzzAccess {
    In(u16, usize),
    Out(u16, Vec<u8>),
    MmioRead(u64, usize),
    MmioWrite(u64, Vec<u8>),
    Input(Vec<u8>),
}

/// Mostly ports of devices, sometimes any port.
fn port() -> impl Strategy<Value = u16> {
    prop_oneof![
        4 => prop::sample::select(vec![
            0x60, 0x64, 0x80, 0x92, 0xe0, 0xe8, 0xf4, 0x3f8, 0x510, 0x600, 0xcf8, 0x2000,
        ]).prop_flat_map(|base: u16| base.saturating_sub(2)..base + 14),
        1 => any::<u16>(),
    ]
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![0xfeff_fff0..0xff01_0010_u64, any::<u64>(), Just(u64::MAX)]
}

fn access() -> impl Strategy<Value = FuzzAccess> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..10);
    prop_oneof![
        (port(), 0..10_usize).prop_map(|(port, len)| FuzzAccess::In(port, len)),
        (port(), bytes()).prop_map(|(port, data)| FuzzAccess::Out(port, data)),
        (address(), 0..10_usize).prop_map(|(address, len)| FuzzAccess::MmioRead(address, len)),
        (address(), bytes()).prop_map(|(address, data)| FuzzAccess::MmioWrite(address, data)),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(FuzzAccess::Input),
    ]
}

/// Performs an access and returns the bytes that it read.
fn run(buses: &FuzzBuses, access: &FuzzAccess) -> Vec<u8> {
    let mut read = Vec::new();
    match access {
        FuzzAccess::In(port, len) => {
            read.resize(*len, 0);
            buses.ports.read(*port, &mut read);
        }
        FuzzAccess::Out(port, data) => buses.ports.write(*port, data),
        FuzzAccess::MmioRead(address, len) => {
            read.resize(*len, 0);
            buses.mmio.read(*address, &mut read);
        }
        FuzzAccess::MmioWrite(address, data) => buses.mmio.write(*address, data),
        FuzzAccess::Input(data) => {
            buses.serial.lock().unwrap().input(data);
        }
    }
    read
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn accesses_never_panic_and_unclaimed_ones_read_ones(
        accesses in prop::collection::vec(access(), 1..200),
    ) {
        let buses = FuzzBuses::new();
        for access in &accesses {
            let read = run(&buses, access);
            if let FuzzAccess::In(0x100..=0x3f0, 1 | 2 | 4) = access {
                prop_assert!(read.iter().all(|&byte| byte == 0xff));
            }
        }
    }

    #[test]
    fn restored_devices_answer_as_the_saved_ones(
        before in prop::collection::vec(access(), 1..100),
        after in prop::collection::vec(access(), 1..100),
    ) {
        let (buses, copy) = (FuzzBuses::new(), FuzzBuses::new());
        for access in &before {
            run(&buses, access);
        }
        let saved = buses.save();
        copy.restore(&saved);
        prop_assert_eq!(&copy.save(), &saved);
        for access in after.iter().filter(|access| !reaches_unsaved_state(access)) {
            prop_assert_eq!(run(&buses, access), run(&copy, access), "{:?}", access);
        }
    }
}

/// Whether the access reaches the latches, which are not saved, or the timers of the two clocks.
fn reaches_unsaved_state(access: &FuzzAccess) -> bool {
    let (FuzzAccess::In(port, _) | FuzzAccess::Out(port, _)) = access else {
        return false;
    };
    matches!(port, 0x7d..=0x80 | 0xdd..=0xeb | 0x5fd..=0x60b)
}

#[test]
fn access_of_each_size_to_each_port_returns() {
    let buses = FuzzBuses::new();
    for port in 0..=u16::MAX {
        for len in [1, 2, 4] {
            let mut data = vec![0x55; len];
            buses.ports.write(port, &data);
            buses.ports.read(port, &mut data);
        }
    }
    assert!(buses.ports.was_unclaimed(0x70));
}
