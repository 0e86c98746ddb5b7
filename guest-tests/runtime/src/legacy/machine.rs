//! The tables of the legacy modes, and the run of a blob.

#![expect(
    clippy::cast_possible_truncation,
    reason = "bits of control registers and flags, and sizes of tables, are below 32 bits"
)]

use core::ptr;

use hindsight_regs::cr::{Cr0, Cr4};
use hindsight_regs::rflags::Rflags;

use crate::cpu;
use crate::legacy::blob::Blob;
use crate::legacy::event::{EVENTS, LegacyEvent};
use crate::legacy::layout::{BASE, DATA, LOW_CODE, MACHINE, SEGMENT, sel};
use crate::legacy::start::{BlobStart, LegacyMode, LegacyPaging};
use crate::legacy::tables::{self, Tss16, Tss32, gate, segment};
use crate::legacy::{stubs, switch};

const CR0_UNPAGED: u32 = Cr0::PE.union(Cr0::ET).union(Cr0::NE).bits() as u32;
const CR0_PAGED: u32 = CR0_UNPAGED | Cr0::PG.bits() as u32;
const CR4_PSE: u32 = Cr4::PSE.bits() as u32;
const CR4_PAE: u32 = Cr4::PAE.bits() as u32;
const FIXED: u32 = Rflags::FIXED.bits() as u32;
const VM: u32 = Rflags::VM.bits() as u32;

/// Bytes of the stack of CPL 0.
pub(super) const STACK_BYTES: usize = 2048;

/// The tables of the legacy modes and the log; a case may change all of it before it calls
/// [`LegacyMachine::run`].
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct LegacyMachine {
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
    /// The action after an event, by vector: see [`action`](crate::legacy::action).
    pub actions: [u8; 256],
    pub(super) count: u32,
    pub(super) log: [LegacyEvent; EVENTS],
    pub(super) saved: SavedState,
    pub(super) entry: EntryImage,
    /// Page directory of 32-bit paging.
    pub directory: AlignedTable<1024, u32>,
    /// Page-directory pointers of PAE paging.
    pub pdpt: AlignedTable<4, u64>,
    pub(super) stack: [u8; STACK_BYTES],
}

/// An aligned table.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct AlignedTable<const N: usize, T>(pub [T; N]);

/// State of 64-bit mode, which the return restores.
#[repr(C)]
#[derive(Debug)]
pub(super) struct SavedState {
    pub(super) rsp: u64,
    pub(super) cr0: u32,
    pub(super) cr3: u32,
    pub(super) cr4: u32,
    pub(super) efer: u32,
}

/// State that the switch to the legacy mode loads.
#[repr(C)]
#[derive(Debug)]
pub(super) struct EntryImage {
    pub(super) gdt_pointer: [u16; 4],
    pub(super) idt_pointer: [u16; 4],
    pub(super) cr0: u32,
    pub(super) cr3: u32,
    pub(super) cr4: u32,
    pub(super) real: u32,
    pub(super) esp: u32,
    pub(super) ss: u32,
    /// How many of `words` are pushed.
    pub(super) len: u32,
    /// GS, FS, ES, DS, general registers, EIP, CS, EFLAGS, ESP, SS, ES, DS, FS, GS.
    pub(super) words: [u32; 21],
}

/// A machine with initial tables, and with the blob at [`BASE`].
///
/// Only the bootstrap processor uses it. Each call replaces the machine of the call before.
pub fn machine(blob: &Blob) -> &'static mut LegacyMachine {
    let machine = ptr::with_exposed_provenance_mut::<LegacyMachine>(MACHINE as usize);
    let code = ptr::with_exposed_provenance_mut::<u8>(BASE as usize);
    // SAFETY: the memory below 640 KiB is RAM, mapped one to one. Only this module uses it while
    // the bootstrap processor runs cases, and callers drop a machine before they ask for the next
    // one. Zeros are a valid machine. `Blob::new` has limited the length of the blob.
    unsafe {
        machine.write_bytes(0, 1);
        let from = ptr::with_exposed_provenance::<u8>(blob.start as usize);
        ptr::copy(from, code, blob.len);
        code.add(blob.len).write_bytes(0xcc, 0x1_0000 - blob.len);
        ptr::with_exposed_provenance_mut::<u8>(DATA as usize).write_bytes(0, 4096);
        let machine = &mut *machine;
        machine.prepare();
        stubs::copy_low_code();
        machine
    }
}

impl LegacyMachine {
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
        let mut stub = stubs::protected_stubs();
        for entry in &mut self.idt {
            *entry = gate(sel::CODE32, stub, tables::INTERRUPT32 | tables::USER);
            stub += stubs::STUB_BYTES;
        }
        for (vector, stub) in (0_usize..256).zip(stubs::real_stubs()) {
            // SAFETY: the first KiB is RAM that holds only the interrupt vectors of real mode.
            unsafe {
                ptr::with_exposed_provenance_mut::<u32>(vector * 4).write_volatile(stub);
            }
        }
        for tss in &mut self.tss {
            *tss = Tss32::new();
        }
        let stack = &raw const self.stack;
        self.tss[0].esp0 = address_of(stack) + STACK_BYTES as u32;
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
        segment(address_of(table), u32::try_from(len).unwrap_or(1) - 1, kind)
    }

    /// Runs `blob` until an event ends it, and returns in 64-bit mode.
    pub fn run(&mut self, blob: &Blob, start: &BlobStart) {
        let index = cpu::current().index;
        self.count = 0;
        self.entry = self.entry_image(blob, start);
        let cr3 = self.entry.cr3;
        for tss in &mut self.tss {
            tss.cr3 = cr3;
        }
        switch::enter(self);
        cpu::init(index);
    }

    fn entry_image(&self, blob: &Blob, start: &BlobStart) -> EntryImage {
        let (cs, data) = match start.mode {
            LegacyMode::Real | LegacyMode::Virtual8086 => (SEGMENT, SEGMENT),
            LegacyMode::Protected16(0) => (sel::CODE16, sel::DATA16),
            LegacyMode::Protected16(_) => (sel::USER_CODE16, sel::USER_DATA16),
            LegacyMode::Protected32(0) => (sel::CODE32, sel::DATA32),
            LegacyMode::Protected32(_) => (sel::USER_CODE32, sel::USER_DATA32),
        };
        let outer = matches!(
            start.mode,
            LegacyMode::Virtual8086 | LegacyMode::Protected16(1..) | LegacyMode::Protected32(1..)
        );
        let virtual86 = start.mode == LegacyMode::Virtual8086;
        let (cr0, cr3, cr4) = match start.paging {
            LegacyPaging::Off => (CR0_UNPAGED, 0, 0),
            LegacyPaging::Bits32 => (CR0_PAGED, address_of(&raw const self.directory), CR4_PSE),
            LegacyPaging::Pae => (CR0_PAGED, address_of(&raw const self.pdpt), CR4_PAE),
        };
        let eip = match start.mode {
            LegacyMode::Protected32(_) => blob.linear(start.entry),
            _ => blob.offset(start.entry),
        };
        let data = u32::from(data);
        let initial = if virtual86 { 0 } else { data };
        let r = &start.registers;
        let eflags = start.eflags | FIXED | if virtual86 { VM } else { 0 };
        let (ss, esp) = if outer {
            (u32::from(sel::DATA32), self.tss[0].esp0)
        } else {
            (data, start.sp)
        };
        let words = [
            initial,
            initial,
            initial,
            initial,
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
        EntryImage {
            gdt_pointer: pointer(address_of(&raw const self.gdt), size_of_val(&self.gdt)),
            idt_pointer: pointer(address_of(&raw const self.idt), size_of_val(&self.idt)),
            cr0: cr0 | start.cr0,
            cr3,
            cr4: cr4 | start.cr4,
            real: u32::from(start.mode == LegacyMode::Real),
            esp,
            ss,
            len: if outer { 21 } else { 15 },
            words,
        }
    }

    /// The logged events in order; the last one ended the run.
    pub fn events(&self) -> &[LegacyEvent] {
        let count = usize::try_from(self.count).unwrap_or(EVENTS);
        &self.log[..count.min(EVENTS)]
    }

    /// The event that ended the run.
    pub fn last(&self) -> &LegacyEvent {
        self.events().last().unwrap_or(&self.log[0])
    }
}

/// Physical and linear address of a part of the machine.
fn address_of<T>(part: *const T) -> u32 {
    u32::try_from(part.expose_provenance()).unwrap_or(0)
}

fn pointer(base: u32, len: usize) -> [u16; 4] {
    let limit = u16::try_from(len - 1).unwrap_or(u16::MAX);
    [limit, (base & 0xffff) as u16, (base >> 16) as u16, 0]
}
