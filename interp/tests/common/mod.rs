//! A machine for the interpreter's tests: RAM, and a platform that reads MSRs from a table.
#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test uses a part of it"
)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "test values are small"
)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "guest memory is a raw allocation")]

use hindsight_cpu::pmu::pebs::{PebsLbr, PebsOutcome};
use hindsight_cpu::state::{CpuState, Segment, seg};
use hindsight_interp::{
    Accesses, Branch, Bus, Counting, GpFault, InterruptSource, Memory, MemoryAccess, MsrHandler,
    Observe, Observer, Pending, RegionSpec, RetiredCounts, Ring, SystemEvent, TransactionEvent,
    Vcpu,
};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

/// Page-aligned memory.
struct Pages {
    host: *mut u8,
    len: usize,
}

// SAFETY: it gives out its address only.
unsafe impl Send for Pages {}
// SAFETY: as for Send.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.host, Layout::from_size_align(self.len, 4096).unwrap()) };
    }
}

/// Guest RAM that a test writes without reporting it to the interpreter.
pub struct Ram {
    pages: Arc<Pages>,
    host: *mut u8,
    len: usize,
}

impl Ram {
    pub fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len, 4096).unwrap();
        // SAFETY: the length is not zero.
        let host = unsafe { alloc_zeroed(layout) };
        assert!(!host.is_null());
        let pages = Arc::new(Pages { host, len });
        Self { pages, host, len }
    }

    /// The memory from guest-physical address 0.
    pub fn memory(&self) -> Arc<Memory> {
        let spec = RegionSpec {
            gpa: 0,
            len: self.len as u64,
            host: self.host,
            writable: true,
        };
        // SAFETY: the pages stay allocated as long as the owner, and have no references.
        Arc::new(unsafe { Memory::new(&[spec], Box::new(self.pages.clone())) }.unwrap())
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: in bounds, as just checked.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host.add(at), bytes.len()) };
    }

    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: in bounds, as just checked.
        unsafe { std::ptr::copy_nonoverlapping(self.host.add(at), bytes.as_mut_ptr(), len) };
        bytes
    }

    pub fn write_u64(&self, at: usize, v: u64) {
        self.write(at, &v.to_le_bytes());
    }

    pub fn read_u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.read(at, 8).try_into().unwrap())
    }
}

/// Collects what the guest does.
#[derive(Default)]
pub struct Machine {
    pub out: Vec<(u16, Vec<u8>)>,
    pub mmio: Vec<(u64, Vec<u8>)>,
    /// Address and length of the reads.
    pub mmio_reads: Vec<(u64, usize)>,
    pub observe: Observe,
    pub branches: Vec<Branch>,
    /// Branches in each batch, and what was retired when it came.
    pub batches: Vec<usize>,
    pub retired_at_report: Vec<u64>,
    pub debug_exceptions: u32,
    /// Retired instructions, and the event.
    pub system_events: Vec<(u64, SystemEvent)>,
    pub pmis: u32,
    pub counts: RetiredCounts,
    /// The levels of FERR# that the processor reported, in order.
    pub ferr: Vec<bool>,
    /// IGNNE#: a port write sets it, as port F0H does, until FERR# is deasserted.
    pub ignne: bool,
    /// Answers to RDRAND and RDSEED, the last one first; without any there is no number.
    pub random: Vec<u64>,
    pub interrupts: Vec<u8>,
    pub nmi: bool,
    /// How often NMIs ceased to be blocked.
    pub nmi_windows: u32,
    pub cpuid: Option<fn(u32, u32) -> [u32; 4]>,
    pub portable: bool,
    /// Called whenever the processor asks what waits for it.
    pub at_boundary: Option<Box<dyn FnMut()>>,
}

pub fn host_cpuid(leaf: u32, sub: u32) -> [u32; 4] {
    let r = std::arch::x86_64::__cpuid_count(leaf, sub);
    [r.eax, r.ebx, r.ecx, r.edx]
}

impl Bus for Machine {
    fn port_read(&mut self, port: u16, data: &mut [u8]) {
        data.fill(port as u8);
    }
    fn port_write(&mut self, port: u16, data: &[u8]) {
        self.out.push((port, data.to_vec()));
        self.ignne |= port == 0xf0;
    }
    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]) {
        self.mmio_reads.push((gpa, data.len()));
        data.fill(gpa as u8);
    }
    fn mmio_write(&mut self, gpa: u64, data: &[u8]) {
        self.mmio.push((gpa, data.to_vec()));
    }
}

impl MsrHandler for Machine {
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
        7
    }
    fn cpuid(&self, leaf: u32, sub: u32) -> [u32; 4] {
        self.cpuid.unwrap_or(host_cpuid)(leaf, sub)
    }
    fn portable_results(&self) -> bool {
        self.portable
    }
}

impl InterruptSource for Machine {
    fn pending(&mut self) -> Pending {
        if let Some(at_boundary) = &mut self.at_boundary {
            at_boundary();
        }
        Pending {
            interrupt: !self.interrupts.is_empty(),
            nmi: self.nmi,
            smi: false,
            leave: false,
        }
    }
    fn acknowledge(&mut self) -> Option<u8> {
        self.interrupts.pop()
    }
    fn acknowledge_nmi(&mut self) {
        self.nmi = false;
    }
    fn nmis_unblocked(&mut self) {
        self.nmi_windows += 1;
    }
    fn acknowledge_smi(&mut self) {
        unreachable!("no SMI is pending");
    }
    fn smm(&mut self, _: bool) {}
    fn cr8(&mut self) -> u8 {
        0
    }
    fn set_cr8(&mut self, _: u8) {}
    fn advance(&mut self, counts: RetiredCounts) {
        self.counts = counts;
    }
    fn tsc(&mut self) -> u64 {
        self.counts.instructions
    }
    fn set_ferr(&mut self, asserted: bool) -> bool {
        self.ferr.push(asserted);
        self.ignne &= asserted;
        self.ignne
    }
    fn random(&mut self) -> Option<u64> {
        self.random.pop()
    }
}

impl Observer for Machine {
    fn observe(&mut self) -> Observe {
        self.observe
    }
    fn branches(&mut self, _: u64, branches: &mut [Branch]) {
        self.branches.extend_from_slice(branches);
        self.batches.push(branches.len());
        self.retired_at_report.push(self.counts.instructions);
    }
    fn debug_exception(&mut self) {
        self.debug_exceptions += 1;
        self.observe.step_on_branch = false;
        self.observe.debug_exceptions = false;
    }
    fn counting(&mut self) -> Counting {
        Counting::NONE
    }
    fn accesses(&mut self, _: Ring, _: &Accesses<'_>) -> u64 {
        1
    }

    fn line_access(&mut self, _: Ring, _: &MemoryAccess) {}

    fn accesses_of_block(&mut self, _: Ring, _: u64, _: u64) {}
    fn caches_flushed(&mut self, _: Option<u64>) {}
    fn pebs_lbr(&mut self) -> PebsLbr {
        PebsLbr::default()
    }
    fn pebs_stored(&mut self, _: &PebsOutcome) {}
    fn request_pmi(&mut self) {
        self.pmis += 1;
    }
    fn allows_transactions(&self) -> bool {
        true
    }
    fn transaction(&mut self, _: TransactionEvent, _: Ring) {}
    fn system_event(&mut self, event: SystemEvent) {
        self.system_events.push((self.counts.instructions, event));
    }
}

/// Where [`long_mode`] puts things.
pub const TABLES: usize = 0x1000;
pub const GDT: usize = 0x8000;
pub const IDT: usize = 0x9000;
pub const TSS: usize = 0xa000;
pub const CODE: usize = 0x10000;
pub const STACK: usize = 0x80000;

pub fn segment(selector: u16, access: u16) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: 0xffff_ffff,
        access,
        unusable: false,
    }
}

/// Memory identity-mapped with 2 MiB pages (user and supervisor), a GDT, an IDT whose gates are
/// empty, a TSS; the processor in 64-bit mode at CPL `cpl`.
pub fn long_mode(ram: &Ram, cpl: u8) -> CpuState {
    ram.write_u64(TABLES, (TABLES as u64 + 0x1000) | 7);
    ram.write_u64(TABLES + 0x1000, (TABLES as u64 + 0x2000) | 7);
    for i in 0..512 {
        ram.write_u64(TABLES + 0x2000 + i * 8, (i as u64) << 21 | 0x87);
    }
    let gdt: [u64; 8] = [
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_fb00_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
        0x0000_8b00_0000_0067 | (TSS as u64) << 16,
        0,
    ];
    for (i, d) in gdt.iter().enumerate() {
        ram.write_u64(GDT + i * 8, *d);
    }
    ram.write_u64(TSS + 4, STACK as u64 - 0x8000);
    let mut st = CpuState::reset();
    st.cr0 = 0x8005_0033;
    st.cr3 = TABLES as u64;
    st.cr4 = 0x6b0;
    st.efer = 0xd01;
    if host_cpuid(1, 0)[2] & 1 << 26 != 0 {
        st.cr4 |= 1 << 18;
        st.xcr0 = u64::from(host_cpuid(0xd, 0)[0]) & 0xe7;
    }
    let ring = u16::from(cpl) << 5;
    let (cs, ss) = if cpl == 0 { (8, 16) } else { (0x2b, 0x23) };
    st.seg = [segment(ss, 0xc093 | ring); 6];
    st.seg[seg::CS] = segment(cs, 0xa09b | ring);
    st.tr = Segment {
        selector: 0x30,
        base: TSS as u64,
        limit: 0x67,
        access: 0x8b,
        unusable: false,
    };
    st.ldtr.unusable = true;
    st.gdtr.base = GDT as u64;
    st.gdtr.limit = 63;
    st.idtr.base = IDT as u64;
    st.idtr.limit = 0xfff;
    st.rip = CODE as u64;
    st.gpr[4] = STACK as u64;
    st
}

/// Installs a 64-bit interrupt gate.
pub fn gate(ram: &Ram, vector: usize, target: u64, dpl: u64) {
    let low =
        (target & 0xffff) | 8 << 16 | (0x8e00 | dpl << 13) << 32 | (target & 0xffff_0000) << 32;
    ram.write_u64(IDT + vector * 16, low);
    ram.write_u64(IDT + vector * 16 + 8, target >> 32);
}

pub fn vcpu(ram: &Ram, st: &CpuState) -> Vcpu {
    let mut vcpu = Vcpu::new(ram.memory());
    vcpu.load(st);
    vcpu
}

pub fn state(vcpu: &mut Vcpu) -> CpuState {
    let mut st = CpuState::reset();
    vcpu.store(&mut st);
    st
}

/// Bytes between two labels of `global_asm!`.
///
/// # Safety
/// Both must be labels of the same section, in order.
pub unsafe fn between(from: *const u8, to: *const u8) -> &'static [u8] {
    // SAFETY: by the contract.
    unsafe { std::slice::from_raw_parts(from, to.offset_from(from) as usize) }
}
