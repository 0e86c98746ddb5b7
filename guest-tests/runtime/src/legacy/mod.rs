//! Code in the legacy modes: real mode, 16- and 32-bit protected mode, virtual-8086 mode, with or
//! without paging.
//!
//! A *blob* is a piece of assembly that runs in one of these modes. It is copied to [`BASE`], so that
//! real mode reaches it: [`Blob::linear`] and [`Blob::offset`] say where a label then is. It must not
//! depend on where it is linked: refer to its data as `label - start`.
//!
//! [`machine`] prepares the tables (GDT, IDT, IVT, three 32-bit TSSs and one 16-bit TSS, page tables)
//! in low memory, where the case may change them. [`Machine::run`] leaves 64-bit mode, enters the
//! blob, and logs every exception and interrupt with the registers. What happens then is said by
//! [`Machine::actions`]; at first each of them ends the run and brings 64-bit mode back. So a blob
//! ends with UD2, and the last event holds its results.
//!
//! ```ignore
//! blob! {
//!     fn add[16](add_start, add_done; add_stop);
//!     "addw $1, %ax"
//!     "add_done: ud2"
//! }
//! let blob = add();
//! let m = legacy::machine(&blob);
//! let mut start = Start::at(Mode::Real, add_start);
//! start.registers.eax = 41;
//! m.run(&blob, &start);
//! check_eq!(m.last().place(), (6, blob.offset(add_done)), "the end");
//! check_eq!(m.last().registers.eax, 42, "the sum");
//! ```
//!
//! Debug registers keep what 64-bit code loaded into them. No event may come between the call of
//! [`Machine::run`] and the blob's first instruction, so breakpoints belong on the blob's memory.

mod switch;
pub mod tables;

use core::ptr;

use crate::cpu;
use tables::{Tss16, Tss32, gate, segment};

/// Where the blob runs: linear, and physical.
pub const BASE: u32 = 0x1_0000;
/// The blob's segment in real and virtual-8086 mode. It is 64 KiB long.
pub const SEGMENT: u16 = 0x1000;
/// Where the [`Machine`] is.
pub const MACHINE: u32 = 0x2_0000;
/// The real-mode entry stubs and the way into real mode.
pub(crate) const LOW_CODE: u32 = 0x3_0000;
/// Stack pointer in the blob's segment at the start.
pub const STACK: u32 = 0xfff0;
/// A page that the blob may use for data: linear address.
pub const DATA: u32 = 0x4_0000;

/// Selectors of [`Machine::gdt`].
#[expect(missing_docs, reason = "each name says what it selects")]
pub mod sel {
    pub const CODE32: u16 = 0x08;
    pub const DATA32: u16 = 0x10;
    /// 16-bit segments have the base [`super::BASE`] and the limit FFFFH.
    pub const CODE16: u16 = 0x18;
    pub const DATA16: u16 = 0x20;
    pub const USER_CODE32: u16 = 0x2b;
    pub const USER_DATA32: u16 = 0x33;
    pub const USER_CODE16: u16 = 0x3b;
    pub const USER_DATA16: u16 = 0x43;
    /// The way into real mode.
    pub const LOW_CODE: u16 = 0x48;
    /// The task that the blob starts in: [`super::Machine::tss`] 0. The others are not busy.
    pub const TSS0: u16 = 0x50;
    pub const TSS1: u16 = 0x58;
    pub const TSS2: u16 = 0x60;
    pub const TSS16: u16 = 0x68;
    /// A local descriptor table, loaded by nobody: [`super::Machine::ldt`].
    pub const LDT: u16 = 0x70;
    /// From here on descriptors are free for the case's use.
    pub const FREE: u16 = 0x80;
}

/// What is done after an event was logged.
pub mod action {
    /// The run ends.
    pub const END: u8 = 0;
    /// The interrupted code goes on; DR6 is made ready for the next #DB.
    pub const RESUME: u8 = 1;
    /// The same, with RF set.
    pub const RESUME_RF: u8 = 2;
    /// The same, with TF clear.
    pub const RESUME_NO_TF: u8 = 3;
    /// The same, `n` (below 16) bytes further.
    pub const fn skip(n: u8) -> u8 {
        0x10 | (n & 0xf)
    }
}

/// A place in a blob.
pub type Label = unsafe extern "C" fn();

/// A piece of code for a legacy mode: everything between two labels, at most 60 KiB.
#[derive(Clone, Copy, Debug)]
pub struct Blob {
    start: u32,
    len: usize,
}

fn address(label: Label) -> u32 {
    // Payloads are linked below 4 GiB.
    u32::try_from(label as usize).unwrap_or(0)
}

impl Blob {
    /// The code from `start` up to `end`.
    pub fn new(start: Label, end: Label) -> Self {
        let len = (end as usize).saturating_sub(start as usize);
        assert!(len <= 0xf000, "the blob is too long");
        Self {
            start: address(start),
            len,
        }
    }

    /// The offset of `label` in the blob's segment.
    pub fn offset(&self, label: Label) -> u32 {
        address(label).wrapping_sub(self.start)
    }

    /// The linear address of `label`.
    pub fn linear(&self, label: Label) -> u32 {
        BASE + self.offset(label)
    }
}

/// Declares a blob: its function, which answers the [`Blob`](crate::legacy::Blob); 16 or 32 bits;
/// its labels, of which the first is put at its start and the last at its end and the others are
/// defined in the text; and its text in AT&T syntax.
#[macro_export]
macro_rules! blob {
    ($(#[$doc:meta])* fn $name:ident[$bits:literal]($start:ident $(, $label:ident)*; $end:ident); $($text:literal)*) => {
        core::arch::global_asm!(
            ".pushsection .rodata.hindsight.blob, \"a\"",
            concat!(".code", $bits),
            concat!(".global ", stringify!($start), ", ", stringify!($end) $(, ", ", stringify!($label))*),
            concat!(stringify!($start), ":"),
            $($text,)*
            concat!(stringify!($end), ":"),
            ".code64",
            ".popsection",
            options(att_syntax),
        );
        unsafe extern "C" {
            fn $start();
            $(fn $label();)*
            fn $end();
        }
        $(#[$doc])*
        fn $name() -> $crate::legacy::Blob {
            $crate::legacy::Blob::new($start, $end)
        }
    };
}

/// How the blob is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Real-address mode; all segments are [`SEGMENT`].
    Real,
    /// Protected mode, 16-bit segments with base [`BASE`], at this CPL (0 or 3).
    Protected16(u8),
    /// Protected mode, flat 32-bit segments, at this CPL (0 or 3).
    Protected32(u8),
    /// Virtual-8086 mode; all segments are [`SEGMENT`].
    Virtual8086,
}

/// Paging under the blob, one to one. Not for real mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// None.
    Off,
    /// 32-bit paging with 4 MiB pages: [`Machine::directory`].
    Narrow,
    /// PAE paging, with the page directories of 64-bit mode: [`Machine::pdpt`].
    Pae,
}

/// The general registers, in the order of PUSHA's image.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are registers")]
pub struct Registers {
    pub edi: u32,
    pub esi: u32,
    pub ebp: u32,
    /// Not loaded at the start, and meaningless in an event.
    pub skipped: u32,
    pub ebx: u32,
    pub edx: u32,
    pub ecx: u32,
    pub eax: u32,
}

/// Where and how a blob starts.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// The first instruction.
    pub entry: Label,
    /// The mode.
    pub mode: Mode,
    /// Paging.
    pub paging: Paging,
    /// EFLAGS; bit 1 and, in virtual-8086 mode, VM are added.
    pub eflags: u32,
    /// Bits of CR4 beyond what paging needs.
    pub cr4: u32,
    /// Bits of CR0 beyond PE, ET, NE and PG.
    pub cr0: u32,
    /// The stack pointer: of the blob's segment, or linear in flat segments.
    pub sp: u32,
    /// General registers.
    pub registers: Registers,
}

impl Start {
    /// A start at `entry` with no paging, flags clear, and the stack at [`STACK`].
    pub fn at(mode: Mode, entry: Label) -> Self {
        let flat = matches!(mode, Mode::Protected32(_));
        Self {
            entry,
            mode,
            paging: Paging::Off,
            eflags: 0,
            cr4: 0,
            cr0: 0,
            sp: if flat { BASE + STACK } else { STACK },
            registers: Registers::default(),
        }
    }
}

/// An exception or interrupt, as the entry stub found it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Vector.
    pub vector: u32,
    /// Error code, 0 without one.
    pub error: u32,
    /// Saved EIP or IP.
    pub eip: u32,
    /// Saved CS.
    pub cs: u32,
    /// Saved EFLAGS, or FLAGS in real mode.
    pub eflags: u32,
    /// The interrupted stack pointer.
    pub esp: u32,
    /// The interrupted SS.
    pub ss: u32,
    /// CR2.
    pub cr2: u32,
    /// DR6 for #DB, else 0.
    pub dr6: u32,
    /// DR7 for #DB, else 0.
    pub dr7: u32,
    /// The interrupted GS, FS, ES, DS.
    pub segments: [u32; 4],
    /// General registers.
    pub registers: Registers,
    /// The task register; 0 in real mode.
    pub tr: u32,
    /// CR0.
    pub cr0: u32,
}

impl Event {
    /// Vector and EIP: what most checks compare.
    pub fn place(&self) -> (u32, u32) {
        (self.vector, self.eip)
    }

    /// Vector and error code.
    pub fn code(&self) -> (u32, u32) {
        (self.vector, self.error)
    }
}

/// The most events that are kept; the run ends with one more.
pub const EVENTS: usize = 64;

/// The tables of the legacy modes, and the log. All of it may be changed before [`Machine::run`].
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Machine {
    /// Global descriptors, by selector / 8.
    pub gdt: [u64; 64],
    /// Gates of protected mode. At first 32-bit interrupt gates of DPL 3 for all vectors.
    pub idt: [u64; 256],
    /// Local descriptors, for [`sel::LDT`].
    pub ldt: [u64; 8],
    /// 32-bit tasks. Task 0 has the stack of CPL 0; 1 and 2 are zero but for CR3.
    pub tss: [Tss32; 3],
    /// A 16-bit task.
    pub tss16: Tss16,
    /// What to do after an event, by vector: see [`action`].
    pub actions: [u8; 256],
    count: u32,
    log: [Event; EVENTS],
    kept: Kept,
    image: Image,
    /// Page directory of 32-bit paging.
    pub directory: Table<1024, u32>,
    /// Page-directory pointers of PAE paging.
    pub pdpt: Table<4, u64>,
    stack: [u8; 2048],
}

/// An aligned table.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Table<const N: usize, T>(pub [T; N]);

/// What 64-bit mode gets back.
#[repr(C)]
#[derive(Debug)]
struct Kept {
    rsp: u64,
    cr0: u32,
    cr3: u32,
    cr4: u32,
    efer: u32,
}

/// What the switch loads.
#[repr(C)]
#[derive(Debug)]
struct Image {
    gdt_pointer: [u16; 4],
    idt_pointer: [u16; 4],
    cr0: u32,
    cr3: u32,
    cr4: u32,
    real: u32,
    esp: u32,
    ss: u32,
    /// How many of `words` count.
    len: u32,
    /// GS, FS, ES, DS, general registers, EIP, CS, EFLAGS, ESP, SS, ES, DS, FS, GS.
    words: [u32; 21],
}

/// A machine with fresh tables, and the blob in its place. The bootstrap processor's only.
pub fn machine(blob: &Blob) -> &'static mut Machine {
    let place = ptr::with_exposed_provenance_mut::<Machine>(MACHINE as usize);
    let code = ptr::with_exposed_provenance_mut::<u8>(BASE as usize);
    // SAFETY: the memory below 640 KiB is RAM, mapped one to one, and used by nobody else while the
    // bootstrap processor runs cases; zeros are a valid machine. The blob lies in the image.
    unsafe {
        place.write_bytes(0, 1);
        let from = ptr::with_exposed_provenance::<u8>(blob.start as usize);
        ptr::copy(from, code, blob.len);
        code.add(blob.len).write_bytes(0xcc, 0x1_0000 - blob.len);
        ptr::with_exposed_provenance_mut::<u8>(DATA as usize).write_bytes(0, 4096);
        let machine = &mut *place;
        machine.prepare();
        switch::copy_low_code();
        machine
    }
}

impl Machine {
    fn prepare(&mut self) {
        let blob = |kind| segment(BASE, 0xffff, kind);
        let flat = |kind| segment(0, 0xffff_ffff, kind);
        let fixed = [
            0,
            flat(tables::CODE | tables::BIG),
            flat(tables::DATA | tables::BIG),
            blob(tables::CODE),
            blob(tables::DATA),
            flat(tables::CODE | tables::BIG | tables::USER),
            flat(tables::DATA | tables::BIG | tables::USER),
            blob(tables::CODE | tables::USER),
            blob(tables::DATA | tables::USER),
            segment(LOW_CODE, 0xffff, tables::CODE),
            self.descriptor(&raw const self.tss[0], size_of::<Tss32>(), tables::TSS32),
            self.descriptor(&raw const self.tss[1], size_of::<Tss32>(), tables::TSS32),
            self.descriptor(&raw const self.tss[2], size_of::<Tss32>(), tables::TSS32),
            self.descriptor(&raw const self.tss16, size_of::<Tss16>(), tables::TSS16),
            self.descriptor(&raw const self.ldt, size_of_val(&self.ldt), tables::LDT),
        ];
        self.gdt[..fixed.len()].copy_from_slice(&fixed);
        let mut stub = switch::protected_stubs();
        for entry in &mut self.idt {
            *entry = gate(sel::CODE32, stub, tables::INTERRUPT32 | tables::USER);
            stub += switch::STUB;
        }
        for (vector, stub) in (0_usize..256).zip(switch::real_stubs()) {
            // SAFETY: the first KiB is RAM and nothing but the interrupt vectors of real mode.
            unsafe {
                ptr::with_exposed_provenance_mut::<u32>(vector * 4).write_volatile(stub);
            }
        }
        for tss in &mut self.tss {
            *tss = Tss32::new();
        }
        let stack = &raw const self.stack;
        self.tss[0].esp0 = at(stack) + 2048;
        self.tss[0].ss0 = sel::DATA32.into();
        for (n, entry) in (0_u32..).zip(&mut self.directory.0) {
            *entry = n << 22 | 0x87;
        }
        let directories = switch::directories();
        for (n, entry) in (0_u64..).zip(&mut self.pdpt.0) {
            *entry = directories + n * 4096 + 1;
        }
    }

    fn descriptor<T>(&self, table: *const T, len: usize, kind: u32) -> u64 {
        segment(at(table), u32::try_from(len).unwrap_or(1) - 1, kind)
    }

    /// Runs `blob` until an event ends it, and comes back to 64-bit mode.
    pub fn run(&mut self, blob: &Blob, start: &Start) {
        let index = cpu::current().index;
        self.count = 0;
        self.image = self.image_of(blob, start);
        let cr3 = self.image.cr3;
        for tss in &mut self.tss {
            tss.cr3 = cr3;
        }
        switch::enter(self);
        cpu::init(index);
    }

    fn image_of(&self, blob: &Blob, start: &Start) -> Image {
        let (cs, data) = match start.mode {
            Mode::Real | Mode::Virtual8086 => (SEGMENT, SEGMENT),
            Mode::Protected16(0) => (sel::CODE16, sel::DATA16),
            Mode::Protected16(_) => (sel::USER_CODE16, sel::USER_DATA16),
            Mode::Protected32(0) => (sel::CODE32, sel::DATA32),
            Mode::Protected32(_) => (sel::USER_CODE32, sel::USER_DATA32),
        };
        let outer = matches!(
            start.mode,
            Mode::Virtual8086 | Mode::Protected16(1..) | Mode::Protected32(1..)
        );
        let virtual86 = start.mode == Mode::Virtual8086;
        let (cr0, cr3, cr4) = match start.paging {
            Paging::Off => (0x31, 0, 0),
            Paging::Narrow => (0x8000_0031, at(&raw const self.directory), 0x10),
            Paging::Pae => (0x8000_0031, at(&raw const self.pdpt), 0x20),
        };
        let eip = match start.mode {
            Mode::Protected32(_) => blob.linear(start.entry),
            _ => blob.offset(start.entry),
        };
        let data = u32::from(data);
        let now = if virtual86 { 0 } else { data };
        let r = &start.registers;
        let eflags = start.eflags | 2 | u32::from(virtual86) << 17;
        let (ss, esp) = if outer {
            (u32::from(sel::DATA32), self.tss[0].esp0)
        } else {
            (data, start.sp)
        };
        let words = [
            now,
            now,
            now,
            now,
            r.edi,
            r.esi,
            r.ebp,
            0,
            r.ebx,
            r.edx,
            r.ecx,
            r.eax,
            eip,
            cs.into(),
            eflags,
            start.sp,
            data,
            data,
            data,
            data,
            data,
        ];
        Image {
            gdt_pointer: pointer(at(&raw const self.gdt), size_of_val(&self.gdt)),
            idt_pointer: pointer(at(&raw const self.idt), size_of_val(&self.idt)),
            cr0: cr0 | start.cr0,
            cr3,
            cr4: cr4 | start.cr4,
            real: u32::from(start.mode == Mode::Real),
            esp,
            ss,
            len: if outer { 21 } else { 15 },
            words,
        }
    }

    /// The logged events, in order; the last one ended the run.
    pub fn events(&self) -> &[Event] {
        let count = usize::try_from(self.count).unwrap_or(EVENTS);
        &self.log[..count.min(EVENTS)]
    }

    /// The event that ended the run.
    pub fn last(&self) -> &Event {
        self.events().last().unwrap_or(&self.log[0])
    }
}

/// Physical and linear address of a part of the machine.
fn at<T>(place: *const T) -> u32 {
    u32::try_from(place.expose_provenance()).unwrap_or(0)
}

fn pointer(base: u32, len: usize) -> [u16; 4] {
    let limit = u16::try_from(len - 1).unwrap_or(u16::MAX);
    [limit, (base & 0xffff) as u16, (base >> 16) as u16, 0]
}
