//! Paging: 32-bit and PAE paging in protected mode, global and large pages in 64-bit mode.
//! SDM Vol. 3A, "Paging".

#![no_std]
#![no_main]

use hindsight_guest::blob;
use hindsight_guest::insn;
use hindsight_guest::legacy::{
    self, Blob, BlobLabel, BlobStart, DATA, LegacyMachine, LegacyMode, LegacyPaging,
};
use hindsight_guest::paging::{self as tables, A, D, P, RW, US};
use hindsight_guest::prelude::*;
use hindsight_payloads::access::{self, ScratchPage};

payload!("paging");

const WP: u32 = 1 << 16;
const PGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
/// The linear address that the legacy cases map: its directory entry is number 512.
const TARGET: u32 = 0x8000_0000;

static FIRST: ScratchPage = ScratchPage::new();
static SECOND: ScratchPage = ScratchPage::new();

blob! {
    fn code[32](p_load, p_store, p_reload; p_stop);
    "movl (%esi), %eax"
    "ud2"
    "p_store: movl %eax, (%esi)"
    "ud2"
    // Changes the entry at EDI, then loads CR3 again.
    "p_reload: orl %eax, (%edi)"
    "movl %cr3, %eax"
    "movl %eax, %cr3"
    "ud2"
}

fn machine() -> (Blob, &'static mut LegacyMachine) {
    let blob = code();
    (blob, legacy::machine(&blob))
}

/// A start at `entry` with ESI at the target.
fn start(entry: BlobLabel, cpl: u8, paging: LegacyPaging) -> BlobStart {
    let mut start = BlobStart::at(LegacyMode::Protected32(cpl), entry);
    start.paging = paging;
    start.registers.esi = TARGET;
    start.registers.eax = 0x5a5a;
    start
}

/// The error code of the page fault at the target; none if there was none.
fn fault(m: &LegacyMachine) -> Option<u32> {
    let last = m.last();
    (last.vector == 14 && last.cr2 == TARGET).then_some(last.error)
}

/// The page table that [`map_small`] points the directory at: the data page of the blob.
fn table_entry() -> *mut u32 {
    core::ptr::with_exposed_provenance_mut(DATA as usize)
}

/// Maps the target by a 4 KiB page to the blob's memory at 1F000H.
fn map_small(m: &mut LegacyMachine, directory: u32, entry: u32) {
    m.directory.0[512] = DATA | directory;
    // SAFETY: the data page belongs to the case.
    unsafe { table_entry().write_volatile(0x1_f000 | entry) };
}

fn small_entry() -> u32 {
    // SAFETY: as above.
    unsafe { table_entry().read_volatile() }
}

case! {
    name: "narrow_rights", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "32-bit paging: present, write and user rights of both levels, CR0.WP, and the error codes",
    fn body(_ctx) {
        // Directory, table, CPL, CR0.WP, a store; the error code.
        let rows = [
            (0, 7, 0, 0, false, Some(0)),
            (7, 0, 3, 0, true, Some(6)),
            (7, 7, 3, 0, true, None),
            (7, 5, 3, 0, true, Some(7)),
            (5, 7, 3, 0, true, Some(7)),
            (7, 3, 3, 0, false, Some(5)),
            (3, 7, 3, 0, false, Some(5)),
            (7, 5, 0, 0, true, None),
            (7, 5, 0, WP, true, Some(3)),
            (3, 3, 0, WP, true, None),
        ];
        for (directory, entry, cpl, cr0, store, expected) in rows {
            let (blob, m) = machine();
            map_small(m, directory, entry);
            let mut at = start(if store { p_store } else { p_load }, cpl, LegacyPaging::Bits32);
            at.cr0 = cr0;
            m.run(&blob, &at);
            check_eq!(fault(m), expected, "the error code");
        }
    }
}

case! {
    name: "narrow_accessed_dirty", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "32-bit paging: a load sets A in both entries, a store D in the last one",
    fn body(_ctx) {
        let (blob, m) = machine();
        map_small(m, 7, 7);
        m.run(&blob, &start(p_load, 0, LegacyPaging::Bits32));
        check_eq!((m.directory.0[512] & 0x60, small_entry() & 0x60), (0x20, 0x20), "after a load");
        let (blob, m) = machine();
        map_small(m, 7, 7);
        m.run(&blob, &start(p_store, 0, LegacyPaging::Bits32));
        check_eq!((m.directory.0[512] & 0x60, small_entry() & 0x60), (0x20, 0x60), "after a store");
        let (blob, m) = machine();
        m.directory.0[512] = 0x87;
        m.run(&blob, &start(p_store, 0, LegacyPaging::Bits32));
        check_eq!(m.directory.0[512] & 0x60, 0x60, "a 4 MiB page");
    }
}

case! {
    name: "narrow_reserved", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "32-bit paging: bit 21 of a 4 MiB page is reserved; without CR4.PSE bit 7 means nothing",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG takes bit 21 for an address bit");
        }
        let (blob, m) = machine();
        m.directory.0[512] = 0x87 | 1 << 21;
        m.run(&blob, &start(p_load, 0, LegacyPaging::Bits32));
        check_eq!(fault(m), Some(9), "RSVD and P");
    }
}

case! {
    name: "pae", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "PAE paging: absent pointers fault; reserved bits of a pointer raise #GP when CR3 is loaded",
    fn body(_ctx) {
        let (blob, m) = machine();
        m.pdpt.0[2] = 0;
        m.run(&blob, &start(p_load, 3, LegacyPaging::Pae));
        check_eq!(fault(m), Some(4), "an absent pointer");

        if insn::is_qemu_tcg() {
            // It does not check the pointers.
            return;
        }
        let (blob, m) = machine();
        let mut at = start(p_reload, 0, LegacyPaging::Pae);
        at.registers.edi = u32::try_from((&raw const m.pdpt.0[2]).addr()).unwrap_or(0);
        at.registers.eax = 1 << 5;
        m.run(&blob, &at);
        check_eq!(m.last().code(), (13, 0), "a reserved bit");
        check!(m.last().eip > blob.linear(p_reload), "at the load of CR3");

        let (blob, m) = machine();
        let mut at = start(p_reload, 0, LegacyPaging::Pae);
        at.registers.edi = u32::try_from((&raw const m.pdpt.0[2]).addr()).unwrap_or(0);
        at.registers.eax = 0xe00;
        m.run(&blob, &at);
        check_eq!(m.last().vector, 6, "bits for software are not reserved");
    }
}

fn mark(page: &ScratchPage, value: u8) -> u64 {
    access::store(page.address(), value);
    page.address()
}

case! {
    name: "global_pages", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "a load of CR3 forgets other pages; INVLPG and a change of CR4.PGE forget global ones too",
    fn body(_ctx) {
        let address = 0x30_0000_0000;
        let (first, second) = (mark(&FIRST, 1), mark(&SECOND, 2));
        let cr4 = insn::read_cr4();
        insn::write_cr4(cr4 | PGE);
        let entry = tables::entry(address);
        // SAFETY: the entry of an address that nothing else uses.
        let set = |frame: u64, flags: u64| unsafe { entry.write_volatile(frame | P | RW | US | A | D | flags) };
        let reload: [(u64, fn(u64)); 4] = [
            (0, |_| insn::write_cr3(insn::read_cr3())),
            (GLOBAL, insn::invlpg),
            (GLOBAL, |_| {
                insn::write_cr4(insn::read_cr4() & !PGE);
                insn::write_cr4(insn::read_cr4() | PGE);
            }),
            (0, insn::invlpg),
        ];
        for (flags, forget) in reload {
            set(first, flags);
            insn::invlpg(address);
            check_eq!(access::load(address), 1, "the first page");
            set(second, flags);
            forget(address);
            check_eq!(access::load(address), 2, "the second page");
        }
        // SAFETY: as above.
        unsafe { entry.write_volatile(0) };
        insn::invlpg(address);
        insn::write_cr4(cr4);
    }
}

case! {
    name: "large_page_invalidation", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "INVLPG of any address of a 2 MiB page forgets the whole page",
    fn body(_ctx) {
        let address = 0x31_0000_0000;
        tables::entry(address);
        // The directory entry is found from the table's: both tables are new.
        let cr3 = insn::read_cr3() & tables::ADDRESS;
        // SAFETY: tables are mapped one to one.
        let directory = unsafe {
            let pdpt = *((cr3 + 8 * (address >> 39 & 511)) as *const u64) & tables::ADDRESS;
            let pd = *((pdpt + 8 * (address >> 30 & 511)) as *const u64) & tables::ADDRESS;
            (pd + 8 * (address >> 21 & 511)) as *mut u64
        };
        let (first, second) = (0x40_0000_u64, 0x60_0000_u64);
        access::store(first + 0x5000, 1);
        access::store(second + 0x5000, 2);
        // SAFETY: as above.
        let old = unsafe { directory.read_volatile() };
        // SAFETY: as above.
        let set = |v: u64| unsafe { directory.write_volatile(v) };
        set(first | 0x87);
        insn::invlpg(address);
        check_eq!(access::load(address + 0x5000), 1, "the first page");
        set(second | 0x87);
        insn::invlpg(address + 0x1f_0000);
        check_eq!(access::load(address + 0x5000), 2, "the second page");
        set(old);
        insn::invlpg(address);
    }
}
