//! Arbitrary accesses to a complete bus: no device panics, and states can be saved and restored.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::acpi_pm::{AcpiPm, AcpiPmState, PIIX4_PM_PORT, PM_PORT, PM_PORTS};
use crate::debug_exit::{DEBUG_EXIT_PORT, DEBUG_EXIT_PORTS, DebugExit};
use crate::debugcon::DebugCon;
use crate::flash::{FLASH_BLOCK, Flash, FlashState};
use crate::fw_cfg::{
    FW_CFG_DMA_OFFSET, FW_CFG_DMA_PORT, FW_CFG_DMA_PORTS, FW_CFG_PORT, FW_CFG_PORTS, FwCfg,
    FwCfgState,
};
use crate::i8042::{I8042, I8042_COMMAND_OFFSET, I8042_COMMAND_PORT, I8042_DATA_PORT, I8042State};
use crate::legacy::{CONTROL_A_PORT, ControlA, POST_CODE_PORT, PostCode};
use crate::pci::{
    Bridge, IntxLines, MsiSender, PCI_PORT, PCI_PORTS, PciConfig, PciDisplay, PciRoot,
    PciRootState, PciState, PciWindow, SharedRoot, WINDOW_BASE, WINDOW_LEN,
};
use crate::serial::{COM1_PORT, Serial, SerialState, UART_PORTS};
use crate::test_device::{
    BYTE_LATCH_PORT, ByteLatches, LATCH_PORT, LATCH_PORTS, LINE_PORT, LINES, Latch, LinePorts,
    TEST_MEMORY_BASE, TEST_MEMORY_LEN, TestMemory,
};
use crate::vga::memory::tests::video_memory;
use crate::vga::{
    DISPI_OFFSET, DISPI_PORT, DISPI_PORTS, VGA_PORT, VGA_PORTS, Vga, VgaState, VideoMemory,
};
use crate::virtio::entropy::{Entropy, SeededEntropy};
use crate::virtio::scsi::VirtioCdrom;
use crate::virtio::test_driver::{self, MemoryDisk};
use crate::virtio::{DmaMemory, VirtioDevice};
use crate::{Backlog, IrqLine, MmioBus, NanoClock, PortBus, Requests, SharedDevice};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

/// Buses with every device of this crate that needs no interrupt controller.
struct FuzzBuses {
    ports: PortBus,
    mmio: MmioBus,
    serial: Arc<Mutex<Serial>>,
    i8042: Arc<Mutex<I8042>>,
    pci: Arc<Mutex<PciConfig>>,
    root: SharedRoot,
    ram: DmaMemory,
    pm: Arc<Mutex<AcpiPm>>,
    fw_cfg: Arc<Mutex<FwCfg>>,
    control_a: Arc<Mutex<ControlA>>,
    memory: Arc<Mutex<TestMemory>>,
    vga: Arc<Mutex<Vga>>,
    video: VideoMemory,
    flash: Arc<Mutex<Flash>>,
}

/// Where the flash chip is.
const FLASH_BASE: u64 = 0xfff0_0000;

#[derive(Debug, PartialEq)]
struct FuzzState {
    serial: SerialState,
    i8042: I8042State,
    pci: PciState,
    root: PciRootState,
    ram: Vec<u8>,
    pm: AcpiPmState,
    fw_cfg: FwCfgState,
    control_a: u8,
    memory: Vec<u8>,
    vga: VgaState,
    /// The start of the video memory, which accesses reach.
    video: Vec<u8>,
    flash: FlashState,
}

fn shared<T>(device: T) -> Arc<Mutex<T>> {
    Arc::new(Mutex::new(device))
}

fn keyboard(requests: Requests) -> I8042 {
    I8042::with_keyboard(requests, IrqLine::unconnected(), false)
}

/// A display adapter and its memory.
fn adapter() -> (Arc<Mutex<Vga>>, VideoMemory) {
    let video = video_memory();
    (shared(Vga::with_memory(video.clone())), video)
}

fn map_adapter(ports: &mut PortBus, vga: &Arc<Mutex<Vga>>) {
    ports.map(VGA_PORT, VGA_PORTS, vga.clone()).unwrap();
    ports
        .map_at(DISPI_PORT, DISPI_PORTS, DISPI_OFFSET, vga.clone())
        .unwrap();
}

/// Bus 0 of a PC with a CD-ROM drive, a source of random numbers and a display.
fn pc_root(ram: &DmaMemory, vga: Arc<Mutex<Vga>>, video: &VideoMemory) -> PciRoot {
    let disc = MemoryDisk::new(vec![0x55; 0x10_000]);
    let devices: [Box<dyn VirtioDevice>; 2] = [
        Box::new(VirtioCdrom::new(Box::new(disc), "fuzz")),
        Box::new(Entropy::new(Box::new(SeededEntropy::new(3)))),
    ];
    let display = PciDisplay {
        vga,
        memory: video.clone(),
        assigned: true,
    };
    PciRoot::new(
        Bridge::Pc,
        (devices.into(), Some(display)),
        ram,
        &MsiSender::new(|_, _| {}),
        IntxLines::new(|_, _| {}),
        Backlog::new(|| {}),
    )
}

fn mmio_bus(root: &SharedRoot, memory: SharedDevice, flash: SharedDevice) -> MmioBus {
    let mut mmio = MmioBus::new();
    mmio.map(TEST_MEMORY_BASE, TEST_MEMORY_LEN, memory).unwrap();
    let flash_len = 2 * FLASH_BLOCK as u64;
    mmio.map(FLASH_BASE, flash_len, flash).unwrap();
    let root = root.clone();
    let base = WINDOW_BASE;
    let window = shared(PciWindow { root, base });
    mmio.map(WINDOW_BASE, WINDOW_LEN, window).unwrap();
    mmio
}

/// The RAM that devices access.
fn read_ram(ram: &DmaMemory) -> Vec<u8> {
    let mut bytes = vec![0; test_driver::MEMORY];
    ram.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

impl FuzzBuses {
    fn new() -> Self {
        let requests = Requests::new(|_| {});
        let now = AtomicU64::new(0);
        let clock = NanoClock::new(move || now.fetch_add(100_000_000_000, Ordering::Relaxed));
        let serial = shared(Serial::new(IrqLine::unconnected(), io::sink()));
        let i8042 = shared(keyboard(requests.clone()));
        let (ram, _) = test_driver::memory();
        let (vga, video) = adapter();
        let root = shared(pc_root(&ram, vga.clone(), &video));
        let pci = shared(PciConfig::with_root(requests.clone(), root.clone()));
        let pm = shared(AcpiPm::new(clock, requests.clone()));
        let control_a = shared(ControlA::new(requests.clone()));
        let memory = shared(TestMemory::default());
        let mut fw_cfg = FwCfg::new(2, 1 << 27).with_dma(ram.clone());
        fw_cfg.add_file("opt/fuzz", vec![7; 100]).unwrap();
        let fw_cfg = shared(fw_cfg);

        let mut ports = PortBus::new();
        let plain: [(u16, u16, SharedDevice); 12] = [
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
            (PIIX4_PM_PORT, PM_PORTS, pm.clone()),
            (PCI_PORT, PCI_PORTS, pci.clone()),
            (LINE_PORT, LINES, shared(LinePorts::new(|_, _| {}))),
        ];
        for (base, len, device) in plain {
            ports.map(base, len, device).unwrap();
        }
        ports
            .map_at(I8042_COMMAND_PORT, 1, I8042_COMMAND_OFFSET, i8042.clone())
            .unwrap();
        let dma = fw_cfg.clone();
        ports
            .map_at(FW_CFG_DMA_PORT, FW_CFG_DMA_PORTS, FW_CFG_DMA_OFFSET, dma)
            .unwrap();
        let flash = shared(Flash::new(vec![0x5a; 2 * FLASH_BLOCK], None).unwrap());
        let mmio = mmio_bus(&root, memory.clone(), flash.clone());
        map_adapter(&mut ports, &vga);
        Self {
            ports,
            mmio,
            serial,
            i8042,
            pci,
            root,
            ram,
            pm,
            fw_cfg,
            control_a,
            memory,
            vga,
            video,
            flash,
        }
    }

    fn save(&self) -> FuzzState {
        FuzzState {
            serial: self.serial.lock().unwrap().save(),
            i8042: self.i8042.lock().unwrap().save(),
            pci: self.pci.lock().unwrap().save(),
            root: self.root.lock().unwrap().save(),
            ram: read_ram(&self.ram),
            pm: self.pm.lock().unwrap().save(),
            fw_cfg: self.fw_cfg.lock().unwrap().save(),
            control_a: self.control_a.lock().unwrap().save(),
            memory: self.memory.lock().unwrap().save(),
            vga: self.vga.lock().unwrap().save(),
            video: {
                let mut bytes = vec![0; 0x1000];
                self.video.read(0, &mut bytes);
                bytes
            },
            flash: self.flash.lock().unwrap().save(),
        }
    }

    fn restore(&self, saved: &FuzzState) {
        self.serial.lock().unwrap().restore(&saved.serial).unwrap();
        self.i8042.lock().unwrap().restore(&saved.i8042).unwrap();
        self.pci.lock().unwrap().restore(&saved.pci);
        self.root.lock().unwrap().restore(&saved.root).unwrap();
        self.ram.write_slice(&saved.ram, GuestAddress(0)).unwrap();
        self.pm.lock().unwrap().restore(&saved.pm);
        self.fw_cfg.lock().unwrap().restore(&saved.fw_cfg);
        self.control_a.lock().unwrap().restore(saved.control_a);
        self.memory.lock().unwrap().restore(&saved.memory).unwrap();
        self.vga.lock().unwrap().restore(&saved.vga).unwrap();
        self.video.write(0, &saved.video);
        self.flash.lock().unwrap().restore(&saved.flash).unwrap();
    }
}

/// An access by the guest, or serial input, which is typed on the keyboard too.
#[derive(Clone, Debug)]
enum FuzzAccess {
    In(u16, usize),
    Out(u16, Vec<u8>),
    MmioRead(u64, usize),
    MmioWrite(u64, Vec<u8>),
    Input(Vec<u8>),
    /// A read and a write of a register of a PCI function: device and function, register, data.
    PciConfig(u8, u8, Vec<u8>),
    /// A DMA command of fw_cfg: control, length and address.
    Dma(u32, u32, u64),
}

/// Mostly ports of devices, sometimes any port.
fn port() -> impl Strategy<Value = u16> {
    prop_oneof![
        4 => prop::sample::select(vec![
            0x60, 0x64, 0x80, 0x92, 0xe0, 0xe8, 0xf4, 0x1ce, 0x3c0, 0x3d0, 0x3f8, 0x510, 0x514, 0x600, 0xcf8,
            0x2000, 0xb000,
        ]).prop_flat_map(|base: u16| base.saturating_sub(2)..base + 14),
        1 => any::<u16>(),
    ]
}

fn address() -> impl Strategy<Value = u64> {
    // The BARs of slots 2 and 3 after reset are among them.
    prop_oneof![
        0xfeff_fff0..0xff01_0010_u64,
        FLASH_BASE - 2..FLASH_BASE + 0x2002,
        WINDOW_BASE + 0x1_0000..WINDOW_BASE + 0x2_0000,
        // Those of the display.
        WINDOW_BASE + 0xf_8400..WINDOW_BASE + 0xf_8610,
        0xd000_0000..0xd000_0100_u64,
        any::<u64>(),
        Just(u64::MAX)
    ]
}

/// Mostly DMA of an item that exists.
fn dma_control() -> impl Strategy<Value = u32> {
    let item = prop::sample::select(vec![0_u32, 5, 0x19, 0x20]);
    prop_oneof![
        (item, 0..0x20_u32).prop_map(|(item, bits)| item << 16 | bits),
        any::<u32>(),
    ]
}

fn access() -> impl Strategy<Value = FuzzAccess> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..10);
    prop_oneof![
        (port(), 0..10_usize).prop_map(|(port, len)| FuzzAccess::In(port, len)),
        (port(), bytes()).prop_map(|(port, data)| FuzzAccess::Out(port, data)),
        (address(), 0..10_usize).prop_map(|(address, len)| FuzzAccess::MmioRead(address, len)),
        (address(), bytes()).prop_map(|(address, data)| FuzzAccess::MmioWrite(address, data)),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(FuzzAccess::Input),
        (
            // Those of the display, too.
            prop_oneof![4 => 0..0x28_u8, 1 => Just(0xf8)],
            // COMMAND, SMRAM control, and any other.
            prop_oneof![Just(4), Just(0x72), any::<u8>()],
            prop::collection::vec(any::<u8>(), 1..5)
        )
            .prop_map(|(function, register, data)| FuzzAccess::PciConfig(function, register, data)),
        (
            dma_control(),
            0..0x200_u32,
            prop_oneof![0..0x10_0000_u64, any::<u64>()]
        )
            .prop_map(|(control, len, address)| FuzzAccess::Dma(control, len, address)),
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
            buses.i8042.lock().unwrap().key_input(data);
        }
        FuzzAccess::PciConfig(function, register, data) => {
            let address = 1 << 31 | u32::from(*function) << 8 | u32::from(register & 0xfc);
            buses.ports.write(PCI_PORT, &address.to_le_bytes());
            let port = PCI_PORT + 4 + u16::from(register & 3);
            read.resize(data.len(), 0);
            buses.ports.read(port, &mut read);
            buses.ports.write(port, data);
        }
        FuzzAccess::Dma(control, len, address) => {
            const COMMAND: u32 = 0x1000;
            let mut command = control.to_be_bytes().to_vec();
            command.extend(len.to_be_bytes());
            command.extend(address.to_be_bytes());
            buses
                .ram
                .write_slice(&command, GuestAddress(COMMAND.into()))
                .unwrap();
            buses.ports.write(FW_CFG_DMA_PORT, &[0; 4]);
            buses
                .ports
                .write(FW_CFG_DMA_PORT + 4, &COMMAND.to_be_bytes());
            read.resize(command.len(), 0);
            buses
                .ram
                .read_slice(&mut read, GuestAddress(COMMAND.into()))
                .unwrap();
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
            if let FuzzAccess::In(0x100..=0x1c8 | 0x1d2..=0x3b0 | 0x3e0..=0x3f0, 1 | 2 | 4) = access {
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
    matches!(port, 0x7d..=0x80 | 0xdd..=0xeb | 0x5fd..=0x60b | 0xaffd..=0xb00b)
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
