//! Guests assembled by the tests of whole machines, and machines that run them.

use std::io::{self, Write};
use std::mem;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hindsight_cpu::profile::CpuProfile;
use hindsight_devices::virtio::VirtioDevice;
use hindsight_vmm::boot::{EntryMode, LoadRequest, Protocol};
use hindsight_vmm::kvm::host_support::HostKvm;
use hindsight_vmm::kvm::{self, KvmDevice};
use hindsight_vmm::machine::{Machine, MachineConfig, PreparedMachine};
use hindsight_vmm::platform::Sinks;
use hindsight_vmm::vcpu::board::Board;
use hindsight_vmm::vcpu::engine::ForcedSwitch;
use hindsight_vmm::vcpu::engine::policy::{Engine, EngineChoice, EnginePolicy};
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// The load address and entry point of 64-bit images.
pub const LONG: u64 = 0x10_0000;
/// The load address and entry point of real-mode images.
pub const REAL: u64 = 0x7c00;
/// The size of guest memory, enough for all guests here.
pub const MEMORY: u64 = 8 << 20;
/// The address of the words that guests count in.
pub const COUNTERS: u64 = 0x20_0000;
/// The debug exit port.
pub const EXIT: u32 = 0xf4;

/// Whether KVM can be used on this host; if not, reports that `test` is skipped.
pub fn has_kvm(test: &str) -> bool {
    let usable = kvm::open_device().is_ok_and(|kvm| kvm.create_vm().is_ok());
    if !usable {
        eprintln!("skipped: {test}: /dev/kvm cannot be used here");
    }
    usable
}

/// The engines that this host has.
pub fn engines() -> Vec<Engine> {
    let kvm = kvm::open_device().is_ok_and(|kvm| kvm.create_vm().is_ok());
    let engines = [Engine::Interp, Engine::Kvm].into_iter();
    engines
        .filter(|&engine| kvm || engine == Engine::Interp)
        .collect()
}

/// Assembles code of `bits` that runs at `origin`.
pub fn assemble(
    bits: u32,
    origin: u64,
    code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Vec<u8> {
    let mut assembler = CodeAssembler::new(bits).unwrap();
    code(&mut assembler).unwrap();
    assembler.assemble(origin).unwrap()
}

/// 64-bit code for [`LONG`].
pub fn long(code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    assemble(64, LONG, code)
}

/// Writes `code` to the debug exit port.
pub fn exit(a: &mut CodeAssembler, code: u32) -> Result<(), IcedError> {
    a.mov(eax, code)?;
    a.out(EXIT, eax)
}

/// Writes an MSR.
pub fn wrmsr(a: &mut CodeAssembler, index: u32, value: u64) -> Result<(), IcedError> {
    a.mov(ecx, index)?;
    a.mov(eax, u32::try_from(value & 0xffff_ffff).unwrap())?;
    a.mov(edx, u32::try_from(value >> 32).unwrap())?;
    a.wrmsr()
}

/// A 64-bit image with an IDT.
///
/// The handler of #GP skips the two bytes of RDMSR or WRMSR, those of other exceptions exit with
/// 77H. `interrupt` is the code of the handler of vectors from 32 on; it ends with IRETQ and
/// preserves all registers.
pub fn with_idt(
    interrupt: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
    code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Vec<u8> {
    const GP: u64 = LONG + 0x800;
    const INTERRUPT: u64 = LONG + 0x900;
    const FATAL: u64 = LONG + 0xc00;
    const IDTR: u64 = LONG + 0xff0;
    const IDT: u64 = LONG + 0x1000;
    let mut image = vec![0; 0x2000];
    let mut write = |at: u64, bytes: &[u8], limit: usize| {
        assert!(bytes.len() <= limit, "code is too long");
        let at = usize::try_from(at - LONG).unwrap();
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    let main = long(|a| {
        a.mov(rax, IDTR)?;
        a.lidt(ptr(rax))?;
        code(a)
    });
    write(LONG, &main, 0x800);
    let gp = assemble(64, GP, |a| {
        a.add(rsp, 8)?;
        a.add(qword_ptr(rsp), 2)?;
        a.iretq()
    });
    write(GP, &gp, 0x100);
    write(INTERRUPT, &assemble(64, INTERRUPT, interrupt), 0x300);
    write(FATAL, &assemble(64, FATAL, |a| exit(a, 0x77)), 0x100);
    let limit_and_base = [&0xfff_u16.to_le_bytes()[..], &IDT.to_le_bytes()].concat();
    write(IDTR, &limit_and_base, 10);
    for vector in 0..256 {
        let handler = match vector {
            13 => GP,
            0..32 => FATAL,
            _ => INTERRUPT,
        };
        // A 64-bit interrupt gate to selector 0x10.
        let low = (handler & 0xffff) | 0x10 << 16 | 0x8e00 << 32 | (handler >> 16) << 48;
        let gate = u128::from(low) | u128::from(handler >> 32) << 64;
        write(IDT + vector * 16, &gate.to_le_bytes(), 16);
    }
    image
}

/// A machine with `cpus` vCPUs and a flat image, in KVM.
pub fn machine(image: &[u8], mode: EntryMode, cpus: usize) -> Machine {
    machine_on(Engine::Kvm, image, mode, cpus)
}

/// As [`machine`], in either engine.
pub fn machine_on(engine: Engine, image: &[u8], mode: EntryMode, cpus: usize) -> Machine {
    build(prepared(engine, image, mode, cpus))
}

/// As [`machine`], with the engine switched when the guest arms a facility, and as `forced` says.
pub fn switching_machine(
    image: &[u8],
    mode: EntryMode,
    cpus: usize,
    forced: Option<ForcedSwitch>,
) -> Machine {
    let policy = EnginePolicy {
        choice: EngineChoice::Auto,
        // These guests use nothing that a KVM may lack.
        host: HostKvm::usable(),
    };
    build(prepared(Engine::Kvm, image, mode, cpus).with_engine_policy(policy, forced))
}

/// A machine with one vCPU of the CPU model `cpu`, in the interpreter. It needs no KVM.
pub fn machine_with_model(cpu: CpuProfile, image: &[u8], mode: EntryMode) -> Machine {
    let prepared = prepared_with(cpu, Engine::Interp, image, mode, 1);
    prepared.build(None, sinks()).unwrap()
}

fn prepared(engine: Engine, image: &[u8], mode: EntryMode, cpus: usize) -> PreparedMachine {
    prepared_with(CpuProfile::default(), engine, image, mode, cpus)
}

fn prepared_with(
    cpu: CpuProfile,
    engine: Engine,
    image: &[u8],
    mode: EntryMode,
    cpus: usize,
) -> PreparedMachine {
    prepared_with_devices(cpu, engine, image, (mode, cpus), Vec::new())
}

/// A machine with `devices` on its PCI bus.
pub fn prepared_with_devices(
    cpu: CpuProfile,
    engine: Engine,
    image: &[u8],
    (mode, cpus): (EntryMode, usize),
    devices: Vec<Box<dyn VirtioDevice>>,
) -> PreparedMachine {
    let config = MachineConfig {
        memory: MEMORY,
        huge_pages: false,
        cpus,
        cpu,
        engine,
    };
    let request = LoadRequest {
        image,
        protocol: Some(Protocol::Flat),
        mode: Some(mode),
        ..LoadRequest::default()
    };
    PreparedMachine::with_devices(&config, &request, devices).unwrap()
}

fn sinks() -> Sinks {
    Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()) as Box<dyn Write + Send>,
        btm: None,
    }
}

/// Builds a machine whose output is dropped.
pub fn build(prepared: PreparedMachine) -> Machine {
    let kvm = KvmDevice::open().ok();
    prepared.build(kvm.as_ref(), sinks()).unwrap()
}

/// Runs a 64-bit image on one vCPU for at most `seconds`, with each engine.
///
/// The engines are the interpreter and, if the host has KVM, KVM and forced changes between both.
/// All runs must end in the same way; returns one outcome.
pub fn run(image: &[u8], seconds: f64) -> Outcome {
    let same = |a: &Outcome, b: &Outcome| match (a, b) {
        (Outcome::Exit(a), Outcome::Exit(b)) => a == b,
        (a, b) => mem::discriminant(a) == mem::discriminant(b),
    };
    let interp = run_on(Engine::Interp, image, seconds);
    if !engines().contains(&Engine::Kvm) {
        return interp;
    }
    let kvm = run_on(Engine::Kvm, image, seconds);
    assert!(same(&interp, &kvm), "interpreter: {interp:?}, KVM: {kvm:?}");
    let limit = Duration::from_secs_f64(seconds);
    // A switch at every exit would take too long: some guests have 200 000.
    let machine = switching_machine(image, EntryMode::Long, 1, Some(ForcedSwitch::Exits(97)));
    let switched = machine.run(Some(limit), || {}).unwrap();
    assert!(
        same(&switched, &kvm),
        "with switches: {switched:?}, KVM: {kvm:?}"
    );
    kvm
}

/// Runs a 64-bit image on one vCPU for at most `seconds`.
pub fn run_on(engine: Engine, image: &[u8], seconds: f64) -> Outcome {
    let limit = Duration::from_secs_f64(seconds);
    let machine = machine_on(engine, image, EntryMode::Long, 1);
    machine.run(Some(limit), || {}).unwrap()
}

/// A machine that runs on a thread of its own, for at most a minute.
pub struct RunningGuest {
    pub board: Arc<Board>,
    thread: JoinHandle<Outcome>,
}

impl RunningGuest {
    pub fn start(engine: Engine, image: &[u8], cpus: usize) -> Self {
        Self::start_machine(machine_on(engine, image, EntryMode::Long, cpus))
    }

    pub fn start_machine(machine: Machine) -> Self {
        let board = machine.board().clone();
        let limit = Some(Duration::from_secs(60));
        let thread = thread::spawn(move || machine.run(limit, || {}).unwrap());
        Self { board, thread }
    }

    /// Waits for the end of the run.
    pub fn end(self) -> Outcome {
        self.thread.join().unwrap()
    }

    /// The 64-bit word at `address`.
    pub fn word(&self, address: u64) -> u64 {
        use vm_memory::{Bytes, GuestAddress};
        self.board.ram.map.read_obj(GuestAddress(address)).unwrap()
    }

    /// Sets the 64-bit word at `address`.
    pub fn write_word(&self, address: u64, value: u64) {
        use vm_memory::{Bytes, GuestAddress};
        let memory = &self.board.ram.map;
        memory.write_obj(value, GuestAddress(address)).unwrap();
    }

    /// Waits until the word at `address` is at least `value`.
    pub fn wait_for(&self, address: u64, value: u64) {
        for _ in 0..10_000 {
            if self.word(address) >= value {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!(
            "the guest did not reach {value:#x}: {:#x}",
            self.word(address)
        );
    }
}
