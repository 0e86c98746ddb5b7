//! Lock-step against the host's processor: random instructions on random state, executed by both.
//!
//! `LOCKSTEP_CASES=n` sets the number of cases, `LOCKSTEP_SEED=s` the seed; `LOCKSTEP_ONE=s`
//! replays one case with all its state. A mismatch prints its own seed.
#![allow(unsafe_code, reason = "instructions are executed on the host")]
#![allow(
    clippy::unwrap_used,
    clippy::allow_attributes,
    reason = "a test may panic"
)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "random values"
)]

mod common;
#[path = "lockstep/generate.rs"]
mod generate;
#[path = "lockstep/native.rs"]
mod native;

use common::{CODE, Machine, Ram, gate, long_mode, state, vcpu};
use generate::{Case, Rng};
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Vcpu};
use native::Native;
use std::collections::BTreeMap;

/// Guest-physical place of the data pages.
const DATA: usize = 0x20_0000;
/// Where the instruction is.
const RIP: u64 = generate::DATA + 0x10_0000;
/// Where the gates lead: 16 bytes for each vector.
const HANDLERS: usize = 0x4_0000;

/// What became of an instruction, on either side.
#[derive(Debug, PartialEq, Eq, Clone)]
#[allow(missing_docs, reason = "the names say all")]
pub struct Result {
    /// Vector of the exception, and CR2 for #PF.
    pub fault: Option<(u8, u64)>,
    pub gpr: [u64; 16],
    pub flags: u64,
    pub vectors: Vec<u8>,
    pub mxcsr: u32,
    pub x87: Vec<u8>,
    pub memory: Vec<u8>,
}

struct Guest {
    cpu: Vcpu,
    ram: Ram,
    base: CpuState,
    machine: Machine,
}

impl Guest {
    fn new() -> Self {
        let ram = Ram::new(4 << 20);
        let mut base = long_mode(&ram, 3);
        // The data pages lie where the host has them too; nothing else is mapped but code.
        let table = common::TABLES + 0x4000;
        let data = generate::DATA as usize;
        ram.write_u64(common::TABLES + 0x1000 + (data >> 30) * 8, table as u64 | 7);
        ram.write_u64(table + (data >> 21 & 511) * 8, (table as u64 + 0x1000) | 7);
        for i in 0..generate::PAGES {
            let entry = (DATA + i * 0x1000) as u64 | 7;
            ram.write_u64(table + 0x1000 + ((data >> 12 & 511) + i) * 8, entry);
        }
        ram.write_u64(
            table + 0x1000 + (RIP as usize >> 12 & 511) * 8,
            CODE as u64 | 5,
        );
        // The rest is not for user code.
        for i in 0..512 {
            ram.write_u64(common::TABLES + 0x2000 + i * 8, (i as u64) << 21 | 0x83);
        }
        for v in 0..32 {
            gate(&ram, v, (HANDLERS + v * 16) as u64, 3);
            ram.write(HANDLERS + v * 16, &[0xf4]);
        }
        base.rip = RIP;
        base.rflags = 0x202;
        base.cr4 |= 1 << 9 | 1 << 10;
        let cpu = vcpu(&ram, &base);
        Self {
            cpu,
            ram,
            base,
            machine: Machine::default(),
        }
    }

    fn run(&mut self, case: &Case) -> Result {
        let mut code = [0x90; 32];
        code[..case.bytes.len()].copy_from_slice(&case.bytes);
        self.ram.write(DATA, &case.memory);
        self.ram.write(CODE, &code);
        let mut st = self.base.clone();
        if case.bits == 32 {
            st.seg[1] = common::segment(0x1b, 0xc0fb);
        }
        st.gpr = case.gpr;
        st.rflags = case.flags;
        native::to_state(case, &mut st.xsave.0);
        self.cpu.load(&st);
        self.cpu.code_changed(CODE as u64, 32);
        let mut exit = self.cpu.run(&mut self.machine, 1);
        let mut st = state(&mut self.cpu);
        // A repeated string instruction may stop in between.
        while exit == Exit::Budget && st.rip == RIP {
            exit = self.cpu.run(&mut self.machine, 1);
            st = state(&mut self.cpu);
        }
        let at = (st.rip as usize).wrapping_sub(HANDLERS);
        let fault = (at < 32 * 16).then_some((at / 16) as u8);
        if let Exit::Missing { bytes, .. } = exit {
            panic!("missing {bytes:02x?}, seed {:#x}", case.seed);
        }
        let mut result = native::from_state(&st);
        result.memory = self.ram.read(DATA, case.memory.len());
        if let Some(vector) = fault {
            // Only the kind is compared: the rest of the state is the handler's.
            result = native::result_of(case);
            result.memory = self.ram.read(DATA, case.memory.len());
            result.fault = Some((vector, if vector == 14 { st.cr2 } else { 0 }));
        } else if st.rip != RIP + case.bytes.len() as u64 {
            result.fault = Some((255, st.rip));
        }
        result
    }
}

fn differ(case: &Case, host: &Result, ours: &Result) -> Option<String> {
    let mask = 0x8d5 & !u64::from(undefined(&case.insn));
    // A misaligned operand at a non-canonical address based on RSP or RBP: either is right.
    let kind = |r: &Result| r.fault.map(|f| if f.0 == 12 { 13 } else { f.0 });
    let either = kind(host) == Some(13) && kind(ours) == Some(13);
    if host.fault != ours.fault && !either {
        return Some(format!(
            "fault: host {:x?}, ours {:x?}",
            host.fault, ours.fault
        ));
    }
    if host.memory != ours.memory {
        let at = host
            .memory
            .iter()
            .zip(&ours.memory)
            .position(|(a, b)| a != b)
            .unwrap();
        let (a, b) = (
            &host.memory[at..][..8.min(host.memory.len() - at)],
            &ours.memory[at..][..8.min(host.memory.len() - at)],
        );
        return Some(format!("memory at {at:#x}: host {a:02x?}, ours {b:02x?}"));
    }
    if host.fault.is_some() && !case.insn.is_string_instruction() {
        return None;
    }
    if host.fault.is_none() {
        for i in 0..if case.bits == 64 { 16 } else { 8 } {
            let width = if case.bits == 64 {
                u64::MAX
            } else {
                0xffff_ffff
            };
            if (host.gpr[i] ^ ours.gpr[i]) & width != 0 {
                return Some(format!(
                    "r{i}: host {:#x}, ours {:#x}",
                    host.gpr[i], ours.gpr[i]
                ));
            }
        }
        if (host.flags ^ ours.flags) & mask != 0 {
            return Some(format!(
                "flags: host {:#x}, ours {:#x}, mask {mask:#x}",
                host.flags, ours.flags
            ));
        }
        if host.vectors != ours.vectors {
            let at = host
                .vectors
                .iter()
                .zip(&ours.vectors)
                .position(|(a, b)| a != b)
                .unwrap();
            return Some(format!("vector register {} byte {}", at / 64, at % 64));
        }
        if host.mxcsr != ours.mxcsr {
            return Some(format!(
                "mxcsr: host {:#x}, ours {:#x}",
                host.mxcsr, ours.mxcsr
            ));
        }
        if host.x87 != ours.x87 {
            let at = host
                .x87
                .iter()
                .zip(&ours.x87)
                .position(|(a, b)| a != b)
                .unwrap();
            return Some(format!(
                "x87 byte {at}: host {:02x?}, ours {:02x?}",
                &host.x87[..],
                &ours.x87[..]
            ));
        }
    }
    None
}

/// Flags that the manual leaves undefined, as bits of RFLAGS.
fn undefined(i: &iced_x86::Instruction) -> u32 {
    use iced_x86::{Mnemonic as M, RflagsBits as R};
    let u = i.rflags_undefined();
    let bit = |flag: u32, bit: u32| if u & flag != 0 { bit } else { 0 };
    let listed = bit(R::OF, 0x800)
        | bit(R::SF, 0x80)
        | bit(R::ZF, 0x40)
        | bit(R::AF, 0x10)
        | bit(R::CF, 1)
        | bit(R::PF, 4);
    match i.mnemonic() {
        M::Bsf | M::Bsr => listed | 0x895,
        M::Rcl | M::Rcr => listed | 0x800,
        M::Bt | M::Bts | M::Btr | M::Btc => listed | 0x894,
        _ => listed,
    }
}

fn env(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    text.strip_prefix("0x")
        .map_or_else(|| text.parse().ok(), |h| u64::from_str_radix(h, 16).ok())
}

#[test]
fn instructions_do_what_the_host_does() {
    // One after the other: both use the same memory and signal handlers.
    let mut host = Native::new();
    compare(64, &mut host);
    compare(32, &mut host);
}

fn compare(bits: u32, host: &mut Native) {
    let cases = env("LOCKSTEP_CASES").unwrap_or(60_000);
    let seed = env("LOCKSTEP_SEED").unwrap_or(0x5eed);
    let one = env("LOCKSTEP_ONE");
    let mut guest = Guest::new();
    let mut seeds = Rng(seed);
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut wrong: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for n in 0.. {
        if n >= one.map_or(cases, |_| 1) {
            break;
        }
        let case_seed = one.unwrap_or_else(|| seeds.next());
        let case = Case::new(case_seed, bits);
        *seen
            .entry(format!("{:?}", case.insn.mnemonic()))
            .or_default() += 1;
        let theirs = host.run(&case);
        let ours = guest.run(&case);
        if one.is_some() {
            println!(
                "{:x?}\nflags {:#x}\nhost {:x?} {:#x} {:x?}\nours {:x?} {:#x} {:x?}",
                case.gpr,
                case.flags,
                theirs.gpr,
                theirs.flags,
                theirs.fault,
                ours.gpr,
                ours.flags,
                ours.fault
            );
        }
        if let Some(what) = differ(&case, &theirs, &ours) {
            let entry = wrong
                .entry(format!("{:?}", case.insn.code()))
                .or_insert_with(|| {
                    (
                        0,
                        format!(
                            "seed {case_seed:#x} {:02x?} {}: {what}",
                            case.bytes,
                            case.text()
                        ),
                    )
                });
            entry.0 += 1;
        }
    }
    println!("{bits} bits: {} mnemonics", seen.len());
    if std::env::var("LOCKSTEP_SHOW").is_ok() {
        println!("{seen:?}");
    }
    for (code, (n, text)) in &wrong {
        println!("{code} ({n} times): {text}");
    }
    assert!(
        wrong.is_empty(),
        "{bits} bits: {} instruction codes differ, seed {seed:#x}",
        wrong.len()
    );
}
