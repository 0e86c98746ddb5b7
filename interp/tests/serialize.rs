//! Serializing instructions make a processor see code that another one wrote before it set a flag.
//! SDM Vol. 3A, "Handling Self- and Cross-Modifying Code".
#![allow(unsafe_code, reason = "the programs are assembly")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, between, long_mode};
use hindsight_interp::{Exit, Memory, Vcpu};
use std::time::{Duration, Instant};

/// The doublewords by which the two sides meet.
const FLAG: usize = 0x20_0000;
const ANSWER: usize = 0x20_0040;
const ACKNOWLEDGED: usize = 0x20_0080;
/// `mov eax, imm32; ret`.
const PROCEDURE: usize = 0x21_0000;
const ROUNDS: u32 = 300;

macro_rules! readers {
    ($($name:ident: $($line:literal),+;)+) => {
        $(std::arch::global_asm!(
            concat!(".global sr_", stringify!($name), ", sr_", stringify!($name), "_end"),
            concat!("sr_", stringify!($name), ":"),
            "xor r12d, r12d",
            "mov r13d, 0x200000",
            "mov r14d, 0x210000",
            "2: mov r15d, [r13]",
            "cmp r15d, r12d",
            "je 2b",
            "mov r12d, r15d",
            $($line,)+
            "call r14",
            "mov [r13 + 0x40], eax",
            "mov [r13 + 0x80], r12d",
            "cmp r12d, 300",
            "jne 2b",
            "hlt",
            concat!("sr_", stringify!($name), "_end:"),
        );)+

        $(#[test]
        fn $name() {
            unsafe extern "C" {
                #[link_name = concat!("sr_", stringify!($name))]
                static FIRST: u8;
                #[link_name = concat!("sr_", stringify!($name), "_end")]
                static END: u8;
            }
            // SAFETY: labels of one section.
            assert_sees_new_code(unsafe { between(&raw const FIRST, &raw const END) });
        })+
    };
}

readers! {
    cpuid_shows_new_code: "xor eax, eax", "cpuid";
    wbinvd_shows_new_code: "wbinvd";
    lidt_shows_new_code: "sidt [r13 + 0x100]", "lidt [r13 + 0x100]";
    lgdt_shows_new_code: "sgdt [r13 + 0x100]", "lgdt [r13 + 0x100]";
    lldt_shows_new_code: "xor eax, eax", "lldt ax";
    invlpg_shows_new_code: "invlpg [r14]";
    mov_cr3_shows_new_code: "mov rax, cr3", "mov cr3, rax";
    mov_dr_shows_new_code: "mov rax, dr7", "mov dr7, rax";
    iret_shows_new_code: "mov rcx, rsp", "mov eax, ss", "push rax", "push rcx", "pushfq",
        "mov eax, cs", "push rax", "lea rax, [rip + 3f]", "push rax", "iretq", "3:";
}

/// Runs a reader while this thread writes the procedure's result and then the flag, each round.
fn assert_sees_new_code(reader: &[u8]) {
    let ram = Ram::new(4 << 20);
    let st = long_mode(&ram, 0);
    ram.write(CODE, reader);
    ram.write(PROCEDURE, &[0xb8, 0, 0, 0, 0, 0xc3]);
    let memory = ram.memory();
    std::thread::scope(|scope| {
        let shared = &memory;
        let reader = scope.spawn(move || {
            let mut cpu = Vcpu::new(shared.clone());
            cpu.load(&st);
            run_to_halt(&mut cpu)
        });
        let stale = (1..=ROUNDS).filter(|&n| round(&memory, n) != n).count();
        assert_eq!(stale, 0, "of {ROUNDS} calls ran old code");
        assert!(reader.join().unwrap());
    });
}

fn run_to_halt(cpu: &mut Vcpu) -> bool {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        if cpu.run(&mut Machine::default(), 100_000) == Exit::Halted {
            return true;
        }
    }
    false
}

/// Writes new code, then the flag; returns what the reader's call gave.
fn round(memory: &Memory, n: u32) -> u32 {
    let get = |at: usize| {
        let mut bytes = [0; 4];
        assert!(memory.read(at as u64, &mut bytes));
        u32::from_le_bytes(bytes)
    };
    assert!(memory.write(PROCEDURE as u64 + 1, &n.to_le_bytes()));
    assert!(memory.write(FLAG as u64, &n.to_le_bytes()));
    let end = Instant::now() + Duration::from_secs(20);
    while get(ACKNOWLEDGED) != n && Instant::now() < end {
        std::hint::spin_loop();
    }
    get(ANSWER)
}
