//! Protection by pages in 64-bit mode: SMEP, SMAP with STAC and CLAC, protection keys, accessed and dirty bits of
//! all levels. SDM Vol. 3A, "Access Rights" and "Accessed and Dirty Flags".

#![no_std]
#![no_main]

use core::arch::asm;
use core::cell::UnsafeCell;

use hindsight_guest::catch::catch;
use hindsight_guest::exception::CaughtException;
use hindsight_guest::insn;
use hindsight_guest::paging::{self, A, ADDRESS, D, P, PS, RW, US};
use hindsight_guest::prelude::*;
use hindsight_payloads::access::{self, ScratchPage};

payload!("protection");

/// Bits of CR4.
const SMEP: u64 = 1 << 20;
const SMAP: u64 = 1 << 21;
const PKE: u64 = 1 << 22;
/// Bits of CPUID.7:EBX and ECX.
const HAS_SMEP: u32 = 1 << 7;
const HAS_SMAP: u32 = 1 << 20;
const HAS_PKU: u32 = 1 << 3;
const WP: u64 = 1 << 16;
/// Bits of a page fault's error code, next to P.
const WRITE: u64 = 2;
const USER: u64 = 4;
const FETCH: u64 = 16;
const KEY: u64 = 32;

static PAGE: ScratchPage = ScratchPage::new();

#[repr(C, align(4096))]
struct Tables(UnsafeCell<[[u64; 512]; 4]>);

// SAFETY: used by the one processor that runs the case.
unsafe impl Sync for Tables {}

static TABLES: Tables = Tables(UnsafeCell::new([[0; 512]; 4]));

/// Runs `f` at CPL 0 with bits of CR4 set, on page tables in which [`PAGE`] alone is open to CPL 3.
fn supervised(cr4: u64, f: impl FnOnce()) -> Option<CaughtException> {
    let page = PAGE.address();
    // Splits the page around it.
    let mut from = insn::read_cr3() & ADDRESS;
    paging::entry(page);
    // SAFETY: tables are mapped one to one, and no processor uses the new ones yet.
    let tables = unsafe { &mut *TABLES.0.get() };
    for (level, shift) in [39, 30, 21, 12].into_iter().enumerate() {
        // SAFETY: `from` is a table of the running page tables.
        tables[level] = unsafe { *(from as *const [u64; 512]) };
        let here = (page >> shift & 511) as usize;
        if shift == 12 || shift == 21 {
            tables[level].iter_mut().for_each(|entry| *entry &= !US);
        }
        tables[level][here] |= US;
        from = tables[level][here] & ADDRESS;
        if shift != 12 {
            let next = TABLES.0.get() as u64 + (level as u64 + 1) * 4096;
            tables[level][here] = next | P | RW | US;
        }
    }
    let (old3, old4) = (insn::read_cr3(), insn::read_cr4());
    insn::write_cr3(TABLES.0.get() as u64);
    insn::write_cr4(old4 | cr4);
    let found = catch(f);
    insn::write_cr4(old4);
    insn::write_cr3(old3);
    found
}

fn code(fault: Option<CaughtException>) -> Option<(u8, u64)> {
    fault.map(|e| (e.vector, e.error))
}

/// Loads a byte with EFLAGS.AC set by STAC, and clears it again.
fn load_with_ac(address: u64) -> u8 {
    let value;
    // SAFETY: a load; AC is left clear, or the exception's handler sees it.
    unsafe { asm!("stac", "mov {}, [{}]", "clac", out(reg_byte) value, in(reg) address) };
    value
}

case! {
    name: "smep", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "with CR4.SMEP CPL 0 cannot fetch from pages open to CPL 3; it still reads and writes them",
    fn body(ctx) {
        if insn::cpuid(7, 0).ebx & HAS_SMEP == 0 {
            skip!(ctx, "CPUID does not announce SMEP");
        }
        // RET.
        access::store(PAGE.address(), 0xc3);
        check!(supervised(0, || access::call(PAGE.address())).is_none(), "without SMEP");
        let fault = supervised(SMEP, || access::call(PAGE.address()));
        check_eq!(fault.map(|e| (e.error, e.cr2)), Some((FETCH | 1, PAGE.address())), "a fetch");
        check!(supervised(SMEP, || access::store(PAGE.address(), 0xc3)).is_none(), "a store");
    }
}

case! {
    name: "smap", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "with CR4.SMAP CPL 0 reads and writes pages open to CPL 3 only between STAC and CLAC",
    fn body(ctx) {
        if insn::cpuid(7, 0).ebx & HAS_SMAP == 0 {
            skip!(ctx, "CPUID does not announce SMAP");
        }
        let at = PAGE.address();
        access::store(at, 0xc3);
        check!(supervised(0, || { access::load(at); }).is_none(), "without SMAP");
        let fault = supervised(SMAP, || { access::load(at); });
        check_eq!(fault.map(|e| (e.error, e.cr2)), Some((1, at)), "a load");
        check_eq!(code(supervised(SMAP, || access::store(at, 1))), Some((14, WRITE | 1)), "a store");
        let mut found = 0;
        check!(supervised(SMAP, || found = load_with_ac(at)).is_none(), "a load after STAC");
        check_eq!(found, 0xc3, "the byte");
        let fault = supervised(SMAP, || {
            load_with_ac(at);
            access::load(at);
        });
        check_eq!(code(fault), Some((14, 1)), "a load after CLAC");
        check!(supervised(SMAP, || access::call(at)).is_none(), "a fetch is SMEP's");
    }
}

case! {
    name: "stac_at_cpl3", cpl: [3], rules: [], needs: ["exceptions", "iretq-cpl3", "gd"],
    about: "STAC and CLAC at CPL 3 raise #UD",
    fn body(ctx) {
        // SAFETY: both raise #UD.
        let fault = ctx.run(|| unsafe { asm!("stac") });
        check_eq!(code(fault), Some((6, 0)), "STAC");
        // SAFETY: as above.
        let fault = ctx.run(|| unsafe { asm!("clac") });
        check_eq!(code(fault), Some((6, 0)), "CLAC");
    }
}

fn write_pkru(value: u32) {
    // SAFETY: with CR4.PKE set, it changes the rights of pages with other keys than 0 only.
    unsafe { asm!("wrpkru", in("eax") value, in("ecx") 0, in("edx") 0, options(nostack)) };
}

fn read_pkru() -> u32 {
    let value;
    // SAFETY: registers only.
    unsafe { asm!("rdpkru", out("eax") value, in("ecx") 0, out("edx") _, options(nostack)) };
    value
}

case! {
    name: "protection_keys", cpl: [0, 3], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "PKRU takes reads and writes of pages with its key away, not fetches; without CR4.WP none from CPL 0's writes",
    fn body(ctx) {
        if insn::cpuid(7, 0).ecx & HAS_PKU == 0 {
            skip!(ctx, "CPUID does not announce PKU");
        }
        let fault = ctx.run(|| { read_pkru(); });
        check_eq!(code(fault), Some((6, 0)), "RDPKRU without CR4.PKE");
        let at = PAGE.address();
        access::store(at, 0xc3);
        let old = paging::map(at, at, P | RW | US | 1 << 59);
        insn::write_cr4(insn::read_cr4() | PKE);
        let user = if ctx.cpl == 3 { USER } else { 0 };
        // Of key 1: AD, then WD.
        write_pkru(4);
        check_eq!(read_pkru(), 4, "PKRU");
        check_eq!(code(ctx.run(|| { access::load(at); })), Some((14, KEY | user | 1)), "a load with AD");
        check_eq!(code(ctx.run(|| access::store(at, 1))), Some((14, KEY | user | WRITE | 1)), "a store with AD");
        check!(ctx.run(|| access::call(at)).is_none(), "a fetch with AD");
        write_pkru(8);
        check!(ctx.run(|| { access::load(at); }).is_none(), "a load with WD");
        check_eq!(code(ctx.run(|| access::store(at, 1))), Some((14, KEY | user | WRITE | 1)), "a store with WD");
        insn::write_cr0(insn::read_cr0() & !WP);
        let expected = (ctx.cpl == 3).then_some((14, KEY | user | WRITE | 1));
        check_eq!(code(ctx.run(|| access::store(at, 0xc3))), expected, "a store with WD and without CR0.WP");
        insn::write_cr0(insn::read_cr0() | WP);
        // Both the entry and the key forbid it.
        write_pkru(4);
        paging::map(at, at, P | US | 1 << 59);
        check_eq!(code(ctx.run(|| access::store(at, 1))), Some((14, KEY | user | WRITE | 1)), "a store to a read-only page with AD");
        // The key of a page that is not open to CPL 3 does not count.
        paging::map(at, at, P | RW | 1 << 59);
        check!(catch(|| { access::load(at); }).is_none(), "a supervisor page");
        write_pkru(0);
        insn::write_cr4(insn::read_cr4() & !PKE);
        paging::restore(at, old);
    }
}

/// The entries that lead to an address, the last one included.
fn walk(address: u64) -> [*mut u64; 4] {
    let mut table = insn::read_cr3() & ADDRESS;
    [39, 30, 21, 12].map(|shift| {
        let entry = (table + (address >> shift & 511) * 8) as *mut u64;
        // SAFETY: an entry of a table, which are mapped one to one.
        table = unsafe { entry.read_volatile() } & ADDRESS;
        entry
    })
}

fn bits(entries: [*mut u64; 4]) -> [u64; 4] {
    // SAFETY: entries of the running page tables. Bit 6 of those that lead to tables is ignored.
    entries.map(|entry| unsafe { entry.read_volatile() } & (A | D))
}

case! {
    name: "accessed_and_dirty", cpl: [0, 3], rules: [], needs: ["exceptions", "intn-cpl0"], needs_cpl3: ["iretq-cpl3"],
    about: "an access sets A in the entries of all levels, a store D in the last one, and a refused store no D",
    fn body(ctx) {
        let at = PAGE.address();
        let old = paging::map(at, at, P | RW | US);
        let entries = walk(at);
        let clear = || {
            for entry in entries {
                // SAFETY: entries of the running page tables keep what they map.
                unsafe { entry.write_volatile(entry.read_volatile() & !(A | D)) };
            }
            insn::write_cr3(insn::read_cr3());
        };
        clear();
        check!(ctx.run(|| { access::load(at); }).is_none(), "a load");
        check_eq!(bits(entries), [A, A, A, A], "after a load");
        clear();
        check!(ctx.run(|| access::store(at, 1)).is_none(), "a store");
        check_eq!(bits(entries), [A, A, A, A | D], "after a store");
        // D set by hand is left alone; without it a store through a filled TLB sets it.
        clear();
        check!(ctx.run(|| { access::load(at); access::store(at, 2); }).is_none(), "a load and a store");
        check_eq!(bits(entries)[3], A | D, "after both");
        paging::change(at, 0, RW | D);
        let fault = ctx.run(|| access::store(at, 3));
        let user = if ctx.cpl == 3 { USER } else { 0 };
        check_eq!(code(fault), Some((14, user | WRITE | 1)), "a store to a page that is read-only");
        check_eq!(bits(entries)[3] & D, 0, "after it");
        paging::restore(at, old);
    }
}

case! {
    name: "large_page_bits", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "a 2 MiB page has A and D in its directory entry",
    fn body(_ctx) {
        // Memory that nothing else uses.
        let at = 0x230_0000;
        let entry = walk(at)[2];
        // SAFETY: an entry of the running page tables.
        let get = || unsafe { entry.read_volatile() };
        require_eq!(get() & PS, PS, "a large page");
        // SAFETY: it keeps what it maps.
        unsafe { entry.write_volatile(get() & !(A | D)) };
        insn::write_cr3(insn::read_cr3());
        check!(catch(|| { access::load(at); }).is_none(), "a load");
        check_eq!(get() & (A | D), A, "after a load");
        check!(catch(|| access::store(at, 0)).is_none(), "a store");
        check_eq!(get() & (A | D), A | D, "after a store");
    }
}

/// LDT and available TSS of 64-bit mode at a base: two words of the GDT.
const fn system_descriptor(kind: u64, base: u64) -> [u64; 2] {
    let low = 0x67 | (base & 0xff_ffff) << 16 | (0x80 | kind) << 40 | (base >> 24 & 0xff) << 56;
    [low, base >> 32]
}

#[repr(C, packed)]
struct TablePointer {
    limit: u16,
    base: *const u64,
}

case! {
    name: "system_segment_bases", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "LLDT and LTR refuse a base that is not canonical with #GP(selector), and mark no TSS as busy",
    fn body(_ctx) {
        /// Selectors of the descriptors behind those of the runtime.
        const FIRST: u16 = 0x780;
        let mut old = TablePointer { limit: 0, base: core::ptr::null() };
        // SAFETY: stores the register.
        unsafe { asm!("sgdt [{}]", in(reg) &raw mut old, options(nostack)) };
        let (base, words) = (old.base, usize::from(old.limit).div_ceil(8));
        let mut gdt = [0_u64; 256];
        check!(words <= usize::from(FIRST / 8), "the runtime's GDT is short enough");
        for (n, word) in gdt.iter_mut().enumerate().take(words) {
            // SAFETY: within the limit of the table.
            *word = unsafe { base.add(n).read() };
        }
        for (n, (kind, base)) in [(2, 1 << 47), (9, 1 << 47), (2, 0xffff_8000_0000_0000)].into_iter().enumerate() {
            let at = usize::from(FIRST / 8) + n * 2;
            gdt[at..at + 2].copy_from_slice(&system_descriptor(kind, base));
        }
        let own = TablePointer { limit: 2047, base: gdt.as_ptr() };
        // SAFETY: a copy with more descriptors; the old table comes back.
        unsafe { asm!("lgdt [{}]", in(reg) &raw const own, options(nostack)) };
        let lldt = |selector: u16| {
            // SAFETY: nothing uses an LDT.
            catch(|| unsafe { asm!("lldt {:x}", in(reg) selector, options(nostack)) })
        };
        let ltr = |selector: u16| {
            // SAFETY: TR is not loaded.
            catch(|| unsafe { asm!("ltr {:x}", in(reg) selector, options(nostack)) })
        };
        let found = [lldt(FIRST), ltr(FIRST + 16), lldt(FIRST + 32), lldt(0)];
        // SAFETY: the table that was there before.
        unsafe { asm!("lgdt [{}]", in(reg) &raw const old, options(nostack)) };
        let found = found.map(code);
        check_eq!(found[0], Some((13, FIRST.into())), "LLDT");
        check_eq!(found[1], Some((13, u64::from(FIRST + 16))), "LTR");
        check_eq!([found[2], found[3]], [None, None], "a canonical base");
        // SAFETY: the compiler does not know that LTR writes there.
        let tss = unsafe { (&raw const gdt[usize::from(FIRST / 8) + 2]).read_volatile() };
        check_eq!(tss >> 40 & 0xf, 9, "the type of the TSS");
    }
}
