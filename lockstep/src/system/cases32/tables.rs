//! Random control registers, descriptors, gates, task-state segments and page-table entries.

#![expect(
    clippy::cast_possible_truncation,
    reason = "selectors and fields of tables are cut to their width on purpose"
)]

use crate::layout::DATA;
use crate::rng::Rng;
use crate::system::batch::{
    ControlRegisters, GATE_COUNT, GATES, RANDOM, RESET, WINDOW, WINDOW_PAGES,
};
use crate::system::cases32::{REACH, USER_STACK};
use crate::system::class::SystemClass;
use crate::system::kernel32::{
    DIRECTORY, GDT, LEVELS, PAD, POINTERS, STACKS, TASK_SELECTORS, TASK16, TASK32, TSS, TSS_LIMIT,
    gate_at, window,
};
use hindsight_regs::cr::{Cr0, Cr4};

/// How many random descriptors there are, 8 bytes each.
const DESCRIPTOR_COUNT: u16 = 48;
/// CR0 without paging.
const CR0_UNPAGED: u64 = Cr0::NE.union(Cr0::ET).union(Cr0::MP).union(Cr0::PE).bits();
/// CR0 with paging.
const CR0_PAGED: u64 = CR0_UNPAGED | Cr0::PG.union(Cr0::WP).bits();

/// Control registers for no paging, 32-bit or PAE paging, with CR4.VME at random.
pub(super) fn control_registers(rng: &mut Rng, class: SystemClass) -> ControlRegisters {
    let vme = if rng.one_in(2) {
        Cr4::VME
    } else {
        Cr4::empty()
    };
    let paging = if class == SystemClass::Paging32 {
        1 + rng.below(2)
    } else {
        rng.below(3)
    };
    let cr4 = Cr4::PSE | Cr4::OSFXSR | Cr4::OSXMMEXCPT | vme;
    let (cr0, cr3, cr4) = match paging {
        0 => (CR0_UNPAGED, 0, cr4),
        1 => (CR0_PAGED, DIRECTORY as u64, cr4),
        _ => (CR0_PAGED, POINTERS as u64, cr4 | Cr4::PAE),
    };
    ControlRegisters {
        cr0,
        cr3,
        cr4: cr4.bits(),
    }
}

/// Random descriptors, gates, tasks and page-table entries, with the addresses at which they
/// belong.
pub(super) fn patches(
    rng: &mut Rng,
    class: SystemClass,
    control: ControlRegisters,
) -> Vec<(usize, Vec<u8>)> {
    let word = |d: u64| d.to_le_bytes().to_vec();
    let mut list = Vec::new();
    for n in 0..usize::from(DESCRIPTOR_COUNT) {
        list.push((
            GDT + usize::from(RANDOM) + n * 8,
            word(descriptor(rng, class)),
        ));
    }
    for n in 0..GATE_COUNT {
        list.push((gate_at(GATES + n), word(gate(rng, class))));
    }
    let tss = |at: usize, kind: u64, limit: u64, dpl: u64| {
        word(limit | (at as u64) << 16 | (0x80 | kind | dpl << 5) << 40)
    };
    list.push((GDT + 0x40, tss(TSS, 11, TSS_LIMIT.into(), 0)));
    // Sometimes too short for a task switch.
    let short = u64::from(rng.one_in(8));
    list.push((GDT + 0x58, tss(TASK32, 9, 0x67 - short, rng.below(4))));
    list.push((GDT + 0x60, tss(TASK16, 1, 0x2b - short, rng.below(4))));
    let to = TASK_SELECTORS[rng.below(2) as usize];
    let task_gate = 0x85 << 40 | rng.below(4) << 45 | u64::from(to) << 16;
    list.push((GDT + 0x68, word(task_gate)));
    if !names_tasks(class) {
        for (at, descriptor) in &mut list {
            if (GDT + 0x58..=GDT + 0x68).contains(at) {
                descriptor.fill(0);
            }
        }
    }
    list.push((TSS, kernel_tss(rng, control)));
    list.push((TASK32, task32(rng, control)));
    list.push((TASK16, task16(rng)));
    for pae in [false, true] {
        let (at, len) = window(pae);
        for n in 0..WINDOW_PAGES {
            let page = u64::from(WINDOW + n * 0x1000) | rng.bits() & 0x67;
            list.push((at + n as usize * len, word(page)[..len].to_vec()));
        }
    }
    list
}

/// Whether the cases may use descriptors of tasks.
///
/// Only one class switches tasks, because KVM emulates task switches. Two others only load and
/// inspect the descriptors.
fn names_tasks(class: SystemClass) -> bool {
    matches!(
        class,
        SystemClass::Tasks | SystemClass::Segments32 | SystemClass::Descriptors32
    )
}

/// A random descriptor.
fn descriptor(rng: &mut Rng, class: SystemClass) -> u64 {
    let present = u64::from(!rng.one_in(6)) << 47;
    let dpl = rng.below(4);
    let limit = rng.below(REACH);
    match rng.below(6) {
        // System descriptors and gates.
        0 => {
            let at = *rng.pick(&[TSS, TASK32, TASK16, GDT + RANDOM as usize]) as u64;
            let limit = *rng.pick(&[0x2a, 0x2b, 0x66, 0x67, 0x8f, 0x17f]);
            let kind = match rng.below(16) {
                1 | 5 | 9 if !names_tasks(class) => 0,
                kind => kind,
            };
            present | dpl << 45 | kind << 40 | at << 16 | limit
        }
        1 => {
            let kind = *rng.pick(&[4, 12, 12]) << 40;
            let count = rng.below(32) << 32;
            present | dpl << 45 | kind | count | u64::from(selector(rng)) << 16 | pad()
        }
        // Code of 16 or 32 bits with the base 0, sometimes too short for the code that it should
        // run.
        2 | 3 => {
            let size = rng.below(2) << 54;
            let kind = (0x18 | rng.below(8)) << 40;
            let limit = if rng.one_in(4) {
                limit
            } else {
                0x000f_0000_0000_ffff | 1 << 55
            };
            present | dpl << 45 | kind | size | limit
        }
        _ => {
            let kind = 0x10 | rng.below(8);
            let size = rng.below(2) << 54;
            // IRET to a stack that is not present raises #SS on processors, and #NP in emulators.
            let present = if class == SystemClass::Iret32 {
                1 << 47
            } else {
                present
            };
            if dpl == 0 && kind & 2 != 0 {
                // A case at CPL 0 may load it into SS, and its end must still be delivered: make it
                // flat.
                return present | (0x12 | kind & 1) << 40 | 0x00cf_0000_0000_ffff;
            }
            present | dpl << 45 | kind << 40 | size | u64::from(DATA) << 16 | limit
        }
    }
}

/// The offset fields of a gate that leads to [`PAD`].
fn pad() -> u64 {
    u64::from(PAD & 0xffff) | u64::from(PAD & 0xffff_0000) << 32
}

fn gate(rng: &mut Rng, class: SystemClass) -> u64 {
    let present = u64::from(!rng.one_in(6)) << 47;
    let kind = match *rng.pick(&[14, 14, 15, 6, 7, 6, 5, 5, 12, 0, 9]) {
        5 if !names_tasks(class) => 14,
        kind => kind,
    };
    let selector = match (kind, rng.below(3)) {
        (5, 0 | 1) => TASK_SELECTORS[rng.below(2) as usize],
        (_, 0 | 1) => 0x10,
        _ => selector(rng),
    };
    kind << 40 | present | rng.below(4) << 45 | u64::from(selector) << 16 | pad()
}

/// A random selector.
pub(super) fn selector(rng: &mut Rng) -> u16 {
    let rpl = rng.below(4) as u16;
    match rng.below(12) {
        0 => rpl,
        1 => rng.bits() as u16,
        2 => 0x40 + rpl,
        n @ 3..=5 => {
            let (code, stack) = LEVELS[[0, 1, 3][n as usize - 3]];
            if rng.one_in(2) { code } else { stack }
        }
        _ => (RANDOM + rng.below(u64::from(DESCRIPTOR_COUNT) + 4) as u16 * 8) | rpl,
    }
}

/// A selector that tasks load into DS, ES, FS and GS.
fn data_selector(rng: &mut Rng) -> u16 {
    if rng.one_in(2) { 0x2b } else { selector(rng) }
}

fn put32(bytes: &mut [u8], at: usize, v: u32) {
    bytes[at..at + 4].copy_from_slice(&v.to_le_bytes());
}

fn put16(bytes: &mut [u8], at: usize, v: u16) {
    bytes[at..at + 2].copy_from_slice(&v.to_le_bytes());
}

/// Writes ESP0 to ESP2 and SS0 to SS2 of a 32-bit TSS.
fn put_stacks(bytes: &mut [u8]) {
    for (n, sp) in STACKS.iter().enumerate() {
        put32(bytes, 4 + n * 8, *sp);
        put32(bytes, 8 + n * 8, [0x18, 0x39, 0][n]);
    }
}

fn kernel_tss(rng: &mut Rng, control: ControlRegisters) -> Vec<u8> {
    let mut bytes = vec![0; 0x90];
    put_stacks(&mut bytes);
    // The previous task link: the target of IRET with NT set.
    put16(&mut bytes, 0, TASK_SELECTORS[rng.below(2) as usize]);
    put32(&mut bytes, 0x1c, control.cr3 as u32);
    put16(&mut bytes, 0x66, 0x88);
    for byte in &mut bytes[0x68..0x88] {
        *byte = rng.byte();
    }
    // The interrupt that ends a case is never redirected to the virtual-8086 program.
    bytes[0x68 + usize::from(RESET / 8)] |= 1 << (RESET % 8);
    bytes[0x88..].fill(0xff);
    bytes
}

fn task32(rng: &mut Rng, control: ControlRegisters) -> Vec<u8> {
    let mut bytes = vec![0; 0x68];
    put_stacks(&mut bytes);
    put32(&mut bytes, 0x1c, control.cr3 as u32);
    put32(&mut bytes, 0x20, PAD);
    put32(&mut bytes, 0x24, rng.bits() as u32 & 0x3cd5 | 2);
    for n in 0..8 {
        put32(&mut bytes, 0x28 + n * 4, rng.bits() as u32);
    }
    let (cs, ss) = LEVELS[*rng.pick(&[0, 1, 3])];
    put32(&mut bytes, 0x38, USER_STACK);
    for (n, s) in [data_selector(rng), cs, ss].into_iter().enumerate() {
        put16(&mut bytes, 0x48 + n * 4, s);
    }
    for n in 3..6 {
        put16(&mut bytes, 0x48 + n * 4, data_selector(rng));
    }
    bytes
}

fn task16(rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0; 0x2c];
    for (n, sp) in STACKS.iter().enumerate().take(2) {
        put16(&mut bytes, 2 + n * 4, *sp as u16);
        put16(&mut bytes, 4 + n * 4, [0x18, 0x39][n]);
    }
    put16(&mut bytes, 0x0e, PAD as u16);
    put16(&mut bytes, 0x10, rng.bits() as u16 & 0x3cd5 | 2);
    for n in 0..8 {
        put16(&mut bytes, 0x12 + n * 2, rng.bits() as u16);
    }
    // At CPL 0 the stack is in the scratch memory at the bottom.
    put16(&mut bytes, 0x1a, 0x1800);
    for (n, s) in [data_selector(rng), 0x10, 0x18, data_selector(rng)]
        .into_iter()
        .enumerate()
    {
        put16(&mut bytes, 0x22 + n * 2, s);
    }
    bytes
}
