//! The interpreter's side: a guest with a kernel of a few instructions, which notes exceptions as
//! the host's signal handler does.

#![expect(unsafe_code, reason = "guest memory is a raw mapping")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in guest memory are small"
)]

use crate::batch::{Batch, CS64, DS};
use crate::handlers::{copy, flat, gates, put, stubs};
use crate::layout::*;
use crate::map::Map;
use anyhow::{Result, anyhow};
use hindsight_cpu::pmu::pebs::Stored;
use hindsight_cpu::state::{CpuState, seg};
use hindsight_interp::{
    Accesses, Branch, Bus, Counting, Exit, GpFault, Interrupts, Memory, Msrs, Observe, Observer,
    Pending, RegionSpec, RetiredCounts, Ring, TransactionEvent, Vcpu, supported_cpuid,
};
use std::sync::Arc;

/// Guest-physical address of the region.
const REGION: usize = 0x10_0000;
const TABLES: usize = 0x1000;
const GDT: usize = 0x8000;
const IDT: usize = 0x9000;
const TSS: usize = 0xa000;
const HANDLERS: usize = 0x1_0000;
/// Top of the kernel's stack; the region's address stands there.
const STACK: usize = 0x1_fff0;
/// Where the kernel sees guest-physical memory.
const KERNEL: u64 = 0xffff_8000_0000_0000;
/// Vector by which a batch leaves.
const LEAVE: usize = 0x80;
/// More than any batch takes.
const BUDGET: u64 = 1 << 24;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".global hs_lockstep_kernel, hs_lockstep_leave, hs_lockstep_stubs, hs_lockstep_kernel_end",
    "hs_lockstep_kernel:",
    // On the stack: the vector, the error code, the frame, the region's address.
    "push rax",
    "push rcx",
    "mov rcx, [rsp + 72]",
    "mov eax, [rcx + {current}]",
    "and eax, 63",
    "shl eax, 5",
    "add rcx, rax",
    "mov eax, [rsp + 16]",
    "inc eax",
    "mov [rcx + {faults}], eax",
    "mov eax, [rsp + 24]",
    "mov [rcx + {faults} + 4], eax",
    "mov rax, [rsp + 32]",
    "mov [rcx + {faults} + 16], rax",
    "xor eax, eax",
    "cmp dword ptr [rsp + 16], 14",
    "jne 1f",
    "mov rax, cr2",
    "1: mov [rcx + {faults} + 8], rax",
    "mov rcx, [rsp + 72]",
    "mov eax, [rcx + {current}]",
    "and eax, 63",
    "mov eax, [rcx + rax * 4 + {post}]",
    "mov [rsp + 32], rax",
    "pop rcx",
    "pop rax",
    "add rsp, 16",
    "iretq",
    "hs_lockstep_leave:",
    // The end of a batch: the next one starts when OUT is over.
    "mov rax, [rsp + 40]",
    "add rax, {code}",
    "mov [rsp], rax",
    "out 0xf4, al",
    "iretq",
    stubs!("hs_lockstep_stubs", "hs_lockstep_kernel"),
    "hs_lockstep_kernel_end:",
    ".popsection",
    current = const CURRENT,
    faults = const FAULTS,
    post = const POST,
    code = const CODE,
);

unsafe extern "C" {
    static hs_lockstep_kernel: u8;
    static hs_lockstep_leave: u8;
    static hs_lockstep_stubs: u8;
    static hs_lockstep_kernel_end: u8;
}

/// What surrounds the processor: a port that ends a run.
#[derive(Debug, Default)]
pub(crate) struct Around {
    /// The port was written.
    pub(crate) done: bool,
}

impl Bus for Around {
    fn port_read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn port_write(&mut self, _: u16, _: &[u8]) {
        self.done = true;
    }
    fn mmio_read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn mmio_write(&mut self, _: u64, _: &[u8]) {}
}

impl Msrs for Around {
    fn rdmsr(&mut self, _: u32) -> Result<u64, GpFault> {
        Err(GpFault)
    }
    fn wrmsr(&mut self, _: u32, _: u64) -> Result<(), GpFault> {
        Err(GpFault)
    }
    fn rdpmc(&mut self, _: u32) -> Result<u64, GpFault> {
        Err(GpFault)
    }
    fn tsc_aux(&mut self) -> u32 {
        0
    }
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        supported_cpuid(leaf, subleaf)
    }
    fn portable_results(&self) -> bool {
        false
    }
}

impl Interrupts for Around {
    fn pending(&mut self) -> Pending {
        Pending {
            leave: self.done,
            ..Pending::default()
        }
    }
    fn acknowledge(&mut self) -> Option<u8> {
        None
    }
    fn acknowledge_nmi(&mut self) {}
    fn acknowledge_smi(&mut self) {}
    fn smm(&mut self, _: bool) {}
    fn cr8(&mut self) -> u8 {
        0
    }
    fn set_cr8(&mut self, _: u8) {}
    fn advance(&mut self, _: RetiredCounts) {}
    fn tsc(&mut self) -> u64 {
        0
    }
    fn random(&mut self) -> u64 {
        0
    }
}

impl Observer for Around {
    fn observe(&mut self) -> Observe {
        Observe::default()
    }
    fn branches(&mut self, _: u64, _: &mut [Branch]) {}
    fn debug_exception(&mut self) {}
    fn counting(&mut self) -> Counting {
        Counting::NONE
    }
    fn accesses(&mut self, _: Ring, _: &Accesses<'_>) -> u64 {
        1
    }
    fn caches_flushed(&mut self, _: Option<u64>) {}
    fn pebs_stored(&mut self, _: &Stored) {}
    fn request_pmi(&mut self) {}
    fn allows_transactions(&self) -> bool {
        true
    }
    fn transaction(&mut self, _: TransactionEvent, _: Ring) {}
}

/// The interpreter with one region.
#[derive(Debug)]
pub struct Guest {
    // Before the memory it uses.
    cpu: Vcpu,
    around: Around,
    ram: Map,
    base: u32,
}

impl Guest {
    /// A guest whose user code sees the region at `base`.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(base: u32) -> Result<Self> {
        let len = REGION + GUEST_LEN as usize;
        let mut ram = Map::new(0, len, libc::PROT_READ | libc::PROT_WRITE, None)?;
        install(ram.bytes(), base);
        let cpu = processor(&ram, len, base)?;
        Ok(Self {
            cpu,
            around: Around::default(),
            ram,
            base,
        })
    }

    /// Drops everything that the interpreter has learnt.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn renew(&mut self) -> Result<()> {
        let len = REGION + GUEST_LEN as usize;
        install(self.ram.bytes(), self.base);
        self.cpu = processor(&self.ram, len, self.base)?;
        self.around = Around::default();
        Ok(())
    }

    /// The region's memory.
    pub fn region(&mut self) -> &mut [u8] {
        &mut self.ram.bytes()[REGION..]
    }

    /// Tells that the code is new.
    pub fn code_changed(&mut self) {
        let at = REGION as u64 + u64::from(CODE);
        self.cpu.code_changed(at, CODE_LEN.into());
    }

    /// Runs the batch that is in the region.
    ///
    /// # Errors
    /// An instruction that the interpreter lacks, a shutdown, or no end.
    pub fn run(&mut self, _: &Batch) -> Result<()> {
        self.around.done = false;
        let exit = self.cpu.run(&mut self.around, BUDGET);
        crate::native::normalize(self.region());
        if exit == Exit::Leave && self.around.done {
            return Ok(());
        }
        self.renew()?;
        Err(match exit {
            Exit::Missing { bytes, rip } => {
                anyhow!("the interpreter lacks the instruction {bytes:02x?} at {rip:#x}")
            }
            Exit::Budget => anyhow!("no end"),
            other => anyhow!("the interpreter ended with {other:?}"),
        })
    }
}

/// Page tables, descriptors and the kernel.
fn install(ram: &mut [u8], base: u32) {
    let at = base as usize;
    put(ram, TABLES, TABLES as u64 + 0x1007);
    put(
        ram,
        TABLES + 0x1000 + (at >> 30) * 8,
        TABLES as u64 + 0x2007,
    );
    put(
        ram,
        TABLES + 0x2000 + (at >> 21 & 511) * 8,
        TABLES as u64 + 0x3007,
    );
    for (part, len, rights) in [
        (DATA, DATA_LEN, NX | 7),
        (READ_ONLY, 0x1000, NX | 5),
        (PARAMS, PARAMS_LEN, NX | 7),
        (LOG, LOG_LEN, NX | 7),
        (CODE, CODE_LEN, 5),
        (CELLS, 0x1000, NX | 7),
    ] {
        for page in (part..part + len).step_by(0x1000) {
            let entry = TABLES + 0x3000 + ((at + page as usize) >> 12 & 511) * 8;
            put(ram, entry, (REGION as u64 + u64::from(page)) | rights);
        }
    }
    // The kernel sees all of memory in the upper half.
    put(ram, TABLES + 0x800, TABLES as u64 + 0x4003);
    put(ram, TABLES + 0x4000, TABLES as u64 + 0x5003);
    put(ram, TABLES + 0x5000, 0x83);
    for (i, d) in [
        0,
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_fb00_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
    ]
    .into_iter()
    .enumerate()
    {
        put(ram, GDT + i * 8, d);
    }
    put(ram, TSS + 4, KERNEL + STACK as u64);
    put(ram, STACK, base.into());
    install_kernel(ram);
    let cells = REGION + CELLS as usize;
    put(ram, cells, u64::from(base + CODE + CODE_LEN) - 2);
    // INT LEAVE.
    let exit = REGION + (CODE + CODE_LEN) as usize - 2;
    ram[exit..exit + 2].copy_from_slice(&[0xcd, LEAVE as u8]);
}

const NX: u64 = 1 << 63;

fn install_kernel(ram: &mut [u8]) {
    let start = &raw const hs_lockstep_kernel;
    let place = |label: *const u8| label.addr() - start.addr();
    // SAFETY: both labels are of one section, in order, with instructions between.
    unsafe { copy(ram, HANDLERS, start..&raw const hs_lockstep_kernel_end) };
    let mut gate = |vector: usize, at: usize, dpl: u64| {
        let target = KERNEL + (HANDLERS + at) as u64;
        let low = target & 0xffff | 0x10 << 16 | (0x8e00 | dpl << 13) << 32;
        put(ram, IDT + vector * 16, low | (target & 0xffff_0000) << 32);
        put(ram, IDT + vector * 16 + 8, target >> 32);
    };
    let stubs = place(&raw const hs_lockstep_stubs);
    for (vector, at, dpl) in gates() {
        gate(vector, stubs + at, dpl);
    }
    gate(LEAVE, place(&raw const hs_lockstep_leave), 3);
}

fn processor(ram: &Map, len: usize, base: u32) -> Result<Vcpu> {
    let spec = RegionSpec {
        gpa: 0,
        len: len as u64,
        host: ram.pointer(),
        writable: true,
    };
    // SAFETY: the owner keeps the mapping, whose bytes are used between runs only.
    let memory = unsafe { Memory::new(&[spec], ram.owner()) }?;
    let mut cpu = Vcpu::new(Arc::new(memory));
    cpu.load(&start(base));
    Ok(cpu)
}

/// User code at the start of the batch, as under Linux.
fn start(base: u32) -> CpuState {
    let mut st = CpuState::reset();
    st.cr0 = 0x8005_0033;
    st.cr3 = TABLES as u64;
    // PSE, PAE, PGE, OSFXSR, OSXMMEXCPT, FSGSBASE, OSXSAVE.
    st.cr4 = 0x5_06b0;
    st.efer = 0xd01;
    st.xcr0 = u64::from(supported_cpuid(0xd, 0)[0]) & 0xe7;
    st.seg = [flat(DS, 0xc0f3); 6];
    st.seg[seg::CS] = flat(CS64, 0xa0fb);
    for null in [seg::FS, seg::GS] {
        st.seg[null] = flat(0, 0xc0f3);
    }
    st.tr = flat(0x40, 0x8b);
    (st.tr.base, st.tr.limit) = (KERNEL + TSS as u64, 0x67);
    st.ldtr.unusable = true;
    (st.gdtr.base, st.gdtr.limit) = (KERNEL + GDT as u64, 0x37);
    (st.idtr.base, st.idtr.limit) = (KERNEL + IDT as u64, 0xfff);
    st.rip = u64::from(base + CODE);
    st.rflags = 0x202;
    st
}
