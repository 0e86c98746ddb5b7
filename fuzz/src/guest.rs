//! Guests that the fuzzer writes, run by a deterministic machine: no KVM is needed.
//!
//! A guest is a list of operations in slots of one size. An exception continues with the next slot, so
//! that one fault does not end the guest.

use std::io;

use arbitrary::Arbitrary;
use hindsight_vmm::boot::{EntryMode, LoadRequest};
use hindsight_vmm::deterministic::DeterministicMachine;
use hindsight_vmm::machine::{MachineConfig, PreparedMachine};
use hindsight_vmm::platform::Sinks;
use hindsight_vmm::vcpu::engine::policy::Engine;

/// RAM of the guest.
const MEMORY: u64 = 4 << 20;
/// Instructions of one run: every operation some times. Executing and decoding them takes most of a run.
const INSTRUCTIONS: u64 = 2000;
/// Where a protected-mode or 64-bit image is loaded.
const IMAGE: u32 = 0x10_0000;
/// Offsets in the image: handlers of exceptions without and with an error code, the IDT, its register
/// image, the operations.
const HANDLERS: [usize; 2] = [0x100, 0x140];
const IDT: usize = 0x200;
const IDTR: usize = 0x400;
const CODE: usize = 0x1000;
/// Bytes of a slot.
const SLOT: usize = 32;
/// Top of the stack of operations and handlers.
const STACK: u32 = 0x17_f000;
/// Most operations of a guest.
const OPERATIONS: usize = 64;

/// The mode in which the guest begins.
#[derive(Clone, Copy, Debug, Arbitrary)]
pub enum Mode {
    /// Raw code only.
    Real,
    /// 32-bit code, without paging at first.
    Protected,
    /// 64-bit code.
    Long,
}

/// The processor that the guest sees.
#[derive(Clone, Copy, Debug, Arbitrary)]
pub enum Processor {
    /// The model of deterministic runs.
    Portable,
    /// The default model, with everything that can be added.
    Skylake,
}

/// An operation of a guest.
#[derive(Clone, Debug, Arbitrary)]
pub enum Operation {
    /// WRMSR, to one of the MSRs that have models.
    Wrmsr(u8, u64),
    /// WRMSR to any MSR.
    WrmsrAny(u32, u64),
    /// RDMSR.
    Rdmsr(u8),
    /// MOV to a control register.
    MovCr(u8, u32),
    /// MOV to a debug register.
    MovDr(u8, u32),
    /// A write to the local APIC's page.
    Lapic(u16, u32),
    /// A write to the I/O APIC: a register and its value.
    Ioapic(u8, u32),
    /// OUT of 1, 2 or 4 bytes.
    Out(u16, u8, u32),
    /// IN of 1, 2 or 4 bytes.
    In(u16, u8),
    /// A write to low memory, where the page and descriptor tables are.
    Poke(u16, u32),
    /// INT n.
    Int(u8),
    /// XBEGIN, STI, HLT, INT1, and others without operands.
    Short(u8),
    /// Any bytes.
    Raw([u8; 15]),
    /// Any instruction of the map 0F.
    Mapped(u8, [u8; 8]),
    /// A jump back by up to 256 slots.
    Back(u8),
}

/// A guest.
#[derive(Clone, Debug, Arbitrary)]
pub struct Guest {
    mode: Mode,
    processor: Processor,
    two_cpus: bool,
    operations: Vec<Operation>,
    raw: Vec<u8>,
}

/// The MSRs that have models: what an operation chooses from.
const MSRS: [u32; 40] = [
    0x10,
    0x1b,
    0x3a,
    0x3b,
    0x8b,
    0xc1,
    0xc2,
    0xfe,
    0x122,
    0x174,
    0x186,
    0x187,
    0x1a0,
    0x1a2,
    0x1c8,
    0x1c9,
    0x1d9,
    0x1dd,
    0x200,
    0x201,
    0x250,
    0x277,
    0x2ff,
    0x309,
    0x30b,
    0x345,
    0x38d,
    0x38f,
    0x390,
    0x3f1,
    0x3f6,
    0x600,
    0x6e0,
    0x802,
    0x80b,
    0x830,
    0x832,
    0xc8d,
    0xc000_0080,
    0xc000_0102,
];

/// Instructions without operands that matter to state: STI, CLI, HLT, PUSHF, POPF, IRET, CPUID, RDTSC,
/// WBINVD, INT1, INT3, XBEGIN, XEND, XTEST, RSM, CLTS, RDRAND, NOP.
const SHORT: [&[u8]; 18] = [
    &[0xfb],
    &[0xfa],
    &[0xf4],
    &[0x9c],
    &[0x9d],
    &[0xcf],
    &[0x0f, 0xa2],
    &[0x0f, 0x31],
    &[0x0f, 0x09],
    &[0xf1],
    &[0xcc],
    &[0xc7, 0xf8, 0, 0, 0, 0],
    &[0x0f, 0x01, 0xd5],
    &[0x0f, 0x01, 0xd6],
    &[0x0f, 0xaa],
    &[0x0f, 0x06],
    &[0x0f, 0xc7, 0xf0],
    &[0x90],
];

/// `mov REGISTER, value`, for EAX (0) to EDI (7).
fn load(register: u8, value: u32) -> Vec<u8> {
    [&[0xb8 + register][..], &value.to_le_bytes()].concat()
}

/// `mov edi, address; mov eax, value; mov [rdi], eax`.
fn store(address: u32, value: u32) -> Vec<u8> {
    [load(7, address), load(0, value), vec![0x89, 0x07]].concat()
}

fn wrmsr(index: u32, value: u64) -> Vec<u8> {
    let [low, high] = [value & 0xffff_ffff, value >> 32].map(|half| half as u32);
    [
        load(1, index),
        load(0, low),
        load(2, high),
        vec![0x0f, 0x30],
    ]
    .concat()
}

impl Operation {
    /// The code: at most [`SLOT`] bytes, the same in 32-bit and 64-bit mode.
    fn code(&self, at: usize) -> Vec<u8> {
        match *self {
            Self::Wrmsr(index, value) => wrmsr(MSRS[usize::from(index) % MSRS.len()], value),
            Self::WrmsrAny(index, value) => wrmsr(index, value),
            Self::Rdmsr(index) => {
                let index = MSRS[usize::from(index) % MSRS.len()];
                [load(1, index), vec![0x0f, 0x32]].concat()
            }
            Self::MovCr(number, value) => {
                let number = [0, 2, 3, 4, 8][usize::from(number) % 5];
                [load(0, value), vec![0x0f, 0x22, 0xc0 | number << 3]].concat()
            }
            Self::MovDr(number, value) => {
                [load(0, value), vec![0x0f, 0x23, 0xc0 | (number & 7) << 3]].concat()
            }
            Self::Lapic(offset, value) => store(0xfee0_0000 | u32::from(offset & 0xfff), value),
            Self::Ioapic(register, value) => [
                store(0xfec0_0000, register.into()),
                load(7, 0xfec0_0010),
                vec![0xb8],
                value.to_le_bytes().to_vec(),
                vec![0x89, 0x07],
            ]
            .concat(),
            Self::Out(port, size, value) => {
                let out: &[u8] = [&[0xee_u8][..], &[0x66, 0xef], &[0xef]][usize::from(size) % 3];
                [load(2, port.into()), load(0, value), out.to_vec()].concat()
            }
            Self::In(port, size) => {
                let input: &[u8] = [&[0xec_u8][..], &[0x66, 0xed], &[0xed]][usize::from(size) % 3];
                [load(2, port.into()), input.to_vec()].concat()
            }
            Self::Poke(word, value) => store(u32::from(word) * 8, value),
            Self::Int(vector) => vec![0xcd, vector],
            Self::Short(index) => SHORT[usize::from(index) % SHORT.len()].to_vec(),
            Self::Raw(bytes) => bytes.to_vec(),
            Self::Mapped(opcode, rest) => [&[0x0f, opcode][..], &rest].concat(),
            Self::Back(count) => {
                let to = at.saturating_sub(usize::from(count) * SLOT).max(CODE);
                let distance = to as i64 - (at as i64 + 5);
                [&[0xe9][..], &(distance as i32).to_le_bytes()].concat()
            }
        }
    }
}

/// `mov eax, [sp + offset]; and eax, -32; add eax, 32; mov esp, STACK; jmp eax`: continues with the slot
/// after the one that faulted.
fn handler(offset: u8) -> Vec<u8> {
    [
        &[0x8b, 0x44, 0x24, offset, 0x83, 0xe0, 0xe0, 0x83, 0xc0, 0x20][..],
        &load(4, STACK),
        &[0xff, 0xe0],
    ]
    .concat()
}

impl Guest {
    fn image(&self) -> Vec<u8> {
        let long = match self.mode {
            Mode::Real => {
                return self
                    .raw
                    .iter()
                    .copied()
                    .chain([0xf4])
                    .take(0x8000)
                    .collect();
            }
            Mode::Protected => false,
            Mode::Long => true,
        };
        let count = self.operations.len().min(OPERATIONS);
        let mut image = vec![0; CODE + (count + 1) * SLOT];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        // lidt [IDTR], with a SIB byte in 64-bit mode.
        let idtr = (IMAGE + IDTR as u32).to_le_bytes();
        let lidt: &[u8] = if long {
            &[0x0f, 0x01, 0x1c, 0x25]
        } else {
            &[0x0f, 0x01, 0x1d]
        };
        let first = [
            lidt,
            &idtr,
            &load(4, STACK),
            &load(0, IMAGE + CODE as u32),
            &[0xff, 0xe0],
        ];
        put(0, &first.concat());
        let word = if long { 8 } else { 4 };
        put(HANDLERS[0], &handler(0));
        put(HANDLERS[1], &handler(word));
        let gate_size = if long { 16 } else { 8 };
        for vector in 0..32 {
            let has_code = matches!(vector, 8 | 10..=14 | 17 | 21);
            let [l0, l1, h0, h1] = (IMAGE + HANDLERS[usize::from(has_code)] as u32).to_le_bytes();
            put(
                IDT + vector * gate_size,
                &[l0, l1, 0x10, 0, 0, 0x8e, h0, h1],
            );
        }
        let limit = (32 * gate_size - 1) as u16;
        put(IDTR, &limit.to_le_bytes());
        put(IDTR + 2, &u64::from(IMAGE + IDT as u32).to_le_bytes());
        for (index, operation) in self.operations.iter().take(count).enumerate() {
            let at = CODE + index * SLOT;
            let mut code = operation.code(at);
            // The rest of a slot: NOPs.
            code.resize(SLOT, 0x90);
            put(at, &code);
        }
        put(CODE + count * SLOT, &[0xf4]);
        image
    }

    /// Runs the guest to its end or for [`INSTRUCTIONS`].
    pub fn run(&self) {
        let image = self.image();
        let mut machine = self.machine(&image);
        let _ = machine.run_to(INSTRUCTIONS);
        drop(machine.take_outcome());
    }

    fn machine(&self, image: &[u8]) -> DeterministicMachine {
        let cpu = match self.processor {
            Processor::Portable => "portable-v1",
            Processor::Skylake => "skylake-server,+rtm,+smm,+l2cat,pmu=8",
        };
        let mode = match self.mode {
            Mode::Real => EntryMode::Real,
            Mode::Protected => EntryMode::Protected,
            Mode::Long => EntryMode::Long,
        };
        let request = LoadRequest {
            image,
            mode: Some(mode),
            ..LoadRequest::default()
        };
        machine(cpu, 1 + usize::from(self.two_cpus), &request)
    }
}

/// A deterministic machine at the entry of an image.
pub fn machine(cpu: &str, cpus: usize, request: &LoadRequest<'_>) -> DeterministicMachine {
    let config = MachineConfig {
        memory: MEMORY,
        huge_pages: false,
        cpus,
        cpu: cpu.parse().expect("a profile"),
        engine: Engine::Interp,
    };
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let prepared = PreparedMachine::new(&config, request).expect("the image fits");
    let machine = prepared.deterministic(1).build(None, sinks);
    let machine = machine.expect("the interpreter needs nothing of the host");
    machine.into_deterministic().expect("it is deterministic")
}
