//! Branch records in the DS save area, with protection keys in use.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, TABLES, gate, host_cpuid, long_mode, state, vcpu};
use hindsight_cpu::branch::BtsConfig;
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Observe};

const AREA: u64 = 0x20_0000;
const BUFFER: u64 = 0x20_1000;
/// The entry of the page of 2 MiB that has both.
const ENTRY: usize = TABLES + 0x2008;
/// Instructions of [`setup`] up to its first branch.
const FIRST_BRANCH: u64 = 7;
const CR4_SMAP: u64 = 1 << 21;
const CR4_PKE: u64 = 1 << 22;
const RFLAGS_AC: u64 = 1 << 18;

/// This host's CPUID, with protection keys.
fn cpuid_with_pku(leaf: u32, sub: u32) -> [u32; 4] {
    let [eax, ebx, ecx, edx] = host_cpuid(leaf, sub);
    let pku = u32::from((leaf, sub) == (7, 0)) << 3;
    [eax, ebx, ecx | pku, edx]
}

/// A program that sets PKRU, makes three branches, reads the DS save area and halts. Its own page
/// belongs to the supervisor; `rights` are those of the page of the DS save area.
fn setup(ram: &Ram, pkru: u32, rights: u64) -> (CpuState, Machine) {
    let mut st = long_mode(ram, 0);
    st.cr4 |= CR4_SMAP | CR4_PKE;
    st.rflags |= RFLAGS_AC;
    ram.write_u64(TABLES + 0x2000, 0x83);
    ram.write_u64(ENTRY, AREA | rights);
    // mov eax, pkru; xor ecx, ecx; xor edx, edx; wrpkru; mov ecx, 4
    let mut code = vec![0xb8];
    code.extend(pkru.to_le_bytes());
    code.extend([0x31, 0xc9, 0x31, 0xd2, 0x0f, 0x01, 0xef, 0xb9, 4, 0, 0, 0]);
    // dec ecx; jnz back; mov rax, [AREA]; hlt
    code.extend([0xff, 0xc9, 0x75, 0xfc, 0x48, 0x8b, 0x04, 0x25]);
    code.extend(u32::try_from(AREA).unwrap().to_le_bytes());
    code.push(0xf4);
    ram.write(CODE, &code);
    ram.write(CODE + 0x100, &[0xf4]);
    gate(ram, 14, CODE as u64 + 0x100, 0);
    let end = BUFFER + 10 * 24;
    for (n, value) in [BUFFER, BUFFER, end, end].into_iter().enumerate() {
        ram.write_u64(usize::try_from(AREA).unwrap() + 8 * n, value);
    }
    let bts = BtsConfig {
        area: AREA,
        interrupt: false,
        off_os: false,
        off_usr: false,
    };
    let mut observe = Observe::default();
    observe.bts = Some(bts);
    let machine = Machine {
        observe,
        cpuid: Some(cpuid_with_pku),
        ..Machine::default()
    };
    (st, machine)
}

/// Returns the number of records in the buffer, from its index.
fn records(ram: &Ram) -> u64 {
    (ram.read_u64(usize::try_from(AREA).unwrap() + 8) - BUFFER) / 24
}

/// A page that is unmapped without INVLPG keeps its records coming from the TLB only.
fn records_from_tlb(pkru: u32, rights: u64) -> u64 {
    let ram = Ram::new(4 << 20);
    let (st, mut machine) = setup(&ram, pkru, rights);
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut machine, FIRST_BRANCH), Exit::Budget);
    assert_eq!(records(&ram), 1);
    ram.write_u64(ENTRY, 0);
    assert_eq!(cpu.run(&mut machine, 4), Exit::Budget);
    records(&ram)
}

#[test]
fn ds_translation_is_cached_whatever_pkru_holds() {
    for pkru in [0, 0xc, 0xffff_fffc] {
        assert_eq!(records_from_tlb(pkru, 0x83), 3, "supervisor, {pkru:#x}");
        let key_1 = 1 << 59;
        assert_eq!(records_from_tlb(pkru, 0x87 | key_1), 3, "user, {pkru:#x}");
    }
}

#[test]
fn access_to_user_page_obeys_pkru_after_bts_records() {
    let ram = Ram::new(4 << 20);
    let (st, mut machine) = setup(&ram, 0xc, 0x87 | 1 << 59);
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut machine, 100), Exit::Halted);
    let st = state(&mut cpu);
    assert_eq!((st.rip, st.cr2), (CODE as u64 + 0x101, AREA));
    // Present, protection key.
    let frame = usize::try_from(st.gpr[4]).unwrap();
    assert_eq!(ram.read_u64(frame), 0x21);
    assert!(
        records(&ram) >= 3,
        "the records before the fault were stored"
    );
}
