//! Task switches: which task a fault of the switch belongs to. SDM Vol. 3A, "Task Switching".
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, IDT, Machine, Ram, long_mode, segment, state, vcpu};
use hindsight_cpu::state::{CpuState, Segment, seg};
use hindsight_interp::Exit;

/// The GDT ends its page, with room for 32 descriptors; what follows is on a page of its own.
const TABLE: usize = 0x3f_ff00;
const CODE0: u16 = 8;
const DATA0: u16 = 0x10;
const CODE3: u16 = 0x1b;
const DATA3: u16 = 0x23;
const OLD: u16 = 0x28;
const NEW: u16 = 0x30;
/// The first selector of the page behind the table.
const BEYOND: u16 = 0x100;

const OLD_TSS: usize = 0x2_0000;
const NEW_TSS: usize = 0x2_1000;
const HANDLERS: usize = 0x2_8000;
const OLD_EIP: u32 = 0x1_0000;
const NEW_EIP: u32 = 0x3_0000;
const NEW_ESP: u32 = 0x7_0000;
const OLD_ESP: u32 = 0x6_0000;
const ESP0: u32 = 0x5_0000;
/// The vector of a task gate to [`NEW`].
const TASK_GATE: u8 = 0x30;

const TS: u32 = 10;
const PF: u32 = 14;
const HLT: u8 = 0xf4;
const JMP: [u8; 7] = [0xea, 0, 0, 0, 0, 0x30, 0];
const CALL: [u8; 7] = [0x9a, 0, 0, 0, 0, 0x30, 0];
const INT: [u8; 2] = [0xcd, TASK_GATE];
const IRET: [u8; 1] = [0xcf];

fn put(ram: &Ram, at: usize, v: u32) {
    ram.write(at, &v.to_le_bytes());
}

fn get(ram: &Ram, at: usize) -> u32 {
    u32::from_le_bytes(ram.read(at, 4).try_into().unwrap())
}

/// A descriptor of a TSS of 104 bytes.
fn tss(base: usize, kind: u64) -> u64 {
    0x67 | (base as u64 & 0xff_ffff) << 16 | (0x80 | kind) << 40
}

/// A processor of protected mode in task [`OLD`], which executes `code`; every vector has a handler
/// that halts. `new` has the CS, SS, DS and LDT of [`NEW`].
fn machine(code: &[u8], new: [u16; 4]) -> (Ram, CpuState) {
    let ram = Ram::new(8 << 20);
    let mut st = long_mode(&ram, 0);
    (st.cr0, st.cr4, st.efer) = (0x11, 0, 0);
    let returns = code == IRET;
    for (n, descriptor) in [
        0,
        0x00cf_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_fb00_0000_ffff,
        0x00cf_f300_0000_ffff,
        tss(OLD_TSS, 0xb),
        tss(NEW_TSS, if returns { 0xb } else { 9 }),
    ]
    .into_iter()
    .enumerate()
    {
        ram.write_u64(TABLE + 8 * n, descriptor);
    }
    for vector in 0..64 {
        let gate = 0x8e00_u64 << 32 | (HANDLERS + vector) as u64 & 0xffff | 8 << 16;
        ram.write_u64(IDT + 8 * vector, gate | 2 << 48);
    }
    ram.write(HANDLERS, &[HLT; 64]);
    let gate = 0x8500_u64 << 32 | u64::from(NEW) << 16;
    ram.write_u64(IDT + 8 * usize::from(TASK_GATE), gate);
    let [cs, ss, ds, ldt] = new;
    for (at, v) in [
        (4, ESP0),
        (8, DATA0.into()),
        (0x20, NEW_EIP),
        (0x24, 2),
        (0x38, NEW_ESP),
        (0x48, ss.into()),
        (0x4c, cs.into()),
        (0x50, ss.into()),
        (0x54, ds.into()),
        (0x58, ds.into()),
        (0x5c, ds.into()),
        (0x60, ldt.into()),
    ] {
        put(&ram, NEW_TSS + at, v);
    }
    // The link of IRET.
    put(&ram, OLD_TSS, NEW.into());
    ram.write(CODE, code);
    st.seg = [segment(DATA0, 0xc093); 6];
    st.seg[seg::CS] = segment(CODE0, 0xc09b);
    st.tr = Segment {
        selector: OLD,
        base: OLD_TSS as u64,
        limit: 0x67,
        access: 0x8b,
        unusable: false,
    };
    (st.gdtr.base, st.gdtr.limit) = (TABLE as u64, 0x37);
    st.gpr[4] = OLD_ESP.into();
    st.rflags = if returns { 0x4002 } else { 2 };
    (ram, st)
}

/// Runs to a handler: its vector, and ESP there.
fn exception(ram: &Ram, st: &CpuState, interrupts: &[u8]) -> (u32, usize, CpuState) {
    let mut cpu = vcpu(ram, st);
    let mut machine = Machine {
        interrupts: interrupts.to_vec(),
        ..Machine::default()
    };
    assert_eq!(cpu.run(&mut machine, 100), Exit::Halted);
    let st = state(&mut cpu);
    let vector = u32::try_from(st.rip - 1 - HANDLERS as u64).unwrap();
    (vector, usize::try_from(st.gpr[4]).unwrap(), st)
}

#[test]
fn fault_of_the_new_tasks_segments_saves_its_eip() {
    for code in [&JMP[..], &CALL, &INT, &IRET] {
        let (ram, st) = machine(code, [CODE0, DATA0, BEYOND, 0]);
        let (vector, esp, after) = exception(&ram, &st, &[]);
        assert_eq!((vector, get(&ram, esp)), (TS, BEYOND.into()), "{code:x?}");
        assert_eq!(esp, NEW_ESP as usize - 16, "{code:x?}");
        assert_eq!(get(&ram, esp + 4), NEW_EIP, "{code:x?}");
        assert_eq!(after.tr.selector, NEW, "{code:x?}");
        let old_eip = u32::try_from(CODE + code.len()).unwrap();
        assert_eq!(get(&ram, OLD_TSS + 0x20), old_eip, "{code:x?}");
        assert_eq!(get(&ram, OLD_TSS + 0x38), OLD_ESP, "{code:x?}");
    }
}

#[test]
fn fault_of_a_task_of_cpl_3_saves_its_esp() {
    for code in [&JMP[..], &CALL, &INT, &IRET] {
        let (ram, st) = machine(code, [CODE3, DATA3, BEYOND, 0]);
        let (vector, esp, _) = exception(&ram, &st, &[]);
        assert_eq!((vector, esp), (TS, ESP0 as usize - 24), "{code:x?}");
        assert_eq!(get(&ram, esp + 4), NEW_EIP, "{code:x?}");
        assert_eq!(get(&ram, esp + 16), NEW_ESP, "{code:x?}");
    }
}

#[test]
fn interrupt_through_a_task_gate_sets_ext_in_the_fault_of_its_task() {
    let (ram, mut st) = machine(&[0x90], [CODE0, DATA0, BEYOND, 0]);
    st.rflags |= 0x200;
    let (vector, esp, _) = exception(&ram, &st, &[TASK_GATE]);
    assert_eq!((vector, get(&ram, esp)), (TS, u32::from(BEYOND) | 1));
    assert_eq!(get(&ram, esp + 4), NEW_EIP);
}

#[test]
fn page_fault_of_the_ldt_descriptor_stays_one() {
    let (ram, mut st) = machine(&JMP, [CODE3, DATA3, DATA3, BEYOND]);
    // From CPL 3, so that the handler has the new task's stack for CPL 0.
    ram.write_u64(TABLE + usize::from(NEW), tss(NEW_TSS, 0x69));
    st.seg[seg::CS] = segment(CODE3, 0xc0fb);
    st.seg[seg::SS] = segment(DATA3, 0xc0f3);
    st.gdtr.limit = 0x1ff;
    // 4 MiB pages, of which the second one is absent.
    (st.cr0, st.cr4, st.cr3) = (0x8000_0011, 0x10, 0x1000);
    ram.write(0x1000, &[0; 0x1000]);
    put(&ram, 0x1000, 0x87);
    put(&ram, NEW_TSS + 0x1c, 0x1000);
    let (vector, esp, after) = exception(&ram, &st, &[]);
    assert_eq!((vector, after.cr2), (PF, 0x40_0000));
    assert_eq!(get(&ram, esp + 4), NEW_EIP);
}

#[test]
fn page_fault_of_a_write_to_the_old_tss_leaves_both_tasks_as_they_were() {
    let (ram, mut st) = machine(&CALL, [CODE0, DATA0, DATA0, 0]);
    (st.cr0, st.cr4, st.cr3) = (0x8000_0011, 0x10, 0x1000);
    ram.write(0x1000, &[0; 0x1000]);
    put(&ram, 0x1000, 0x87);
    // The TSS leaves the first 4 MiB after the saved EIP.
    st.tr.base = 0x40_0000 - 0x24;
    put(&ram, 0x40_0000 - 4, 0x55);
    let (vector, esp, after) = exception(&ram, &st, &[]);
    assert_eq!((vector, after.cr2), (PF, 0x40_0000));
    assert_eq!((get(&ram, esp + 4), after.tr.selector), (OLD_EIP, OLD));
    assert_eq!(get(&ram, 0x40_0000 - 4), 0x55, "EIP in the old TSS");
    assert_eq!(get(&ram, NEW_TSS), 0, "the link");
}

#[test]
fn old_tss_that_is_too_short_is_an_invalid_tss() {
    for (code, limit) in [(&JMP[..], 0x5e), (&CALL, 0), (&INT, 0x5e), (&IRET, 0)] {
        let (ram, mut st) = machine(code, [CODE0, DATA0, DATA0, 0]);
        st.tr.limit = limit;
        let (vector, esp, after) = exception(&ram, &st, &[]);
        assert_eq!((vector, get(&ram, esp)), (TS, OLD.into()), "{code:x?}");
        assert_eq!(get(&ram, esp + 4), OLD_EIP, "{code:x?}");
        assert_eq!(after.tr.selector, OLD);
    }
}
