//! System batches on KVM and in the interpreter.

#![expect(
    unsafe_code,
    reason = "guest memory is handed to KVM and to the interpreter"
)]

use crate::expected::{self, Expected};
use crate::guest::Around;
use crate::judge::{Mismatch, Tally};
use crate::kernel::MEMORY;
use crate::layout::SLOTS;
use crate::map::Map;
use crate::rng::mix;
use crate::state::{Record, State};
use crate::system::{Kernel, SystemBatch, SystemClass, build};
use anyhow::{Context, Result, bail};
use hindsight_cpu::state::{CpuState, Segment};
use hindsight_interp::{Exit, Memory, RegionSpec, Vcpu};
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, kvm_dtable, kvm_regs, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Batches after which the interpreter starts afresh.
const RENEW: u64 = 256;
/// Batches of a class in turn.
const KEEP: u64 = 16;
/// Differences after which a class is left alone.
const ENOUGH: u64 = 60;
/// Seconds after which a batch in KVM is taken for one without an end, even in an emulator.
const LIMIT: u32 = 30;
/// More than any batch takes.
const BUDGET: u64 = 1 << 20;

/// The host's KVM with one processor.
#[derive(Debug)]
struct Judge {
    vcpu: VcpuFd,
    _vm: VmFd,
    ram: Ram,
}

/// The interpreter.
#[derive(Debug)]
struct Ours {
    cpu: Vcpu,
    around: Around,
    ram: Ram,
    batches: u64,
}

/// Both.
#[derive(Debug)]
pub struct Versus {
    judge: Judge,
    ours: Ours,
}

/// Guest memory, and which kernel is in it.
#[derive(Debug)]
struct Ram {
    map: Map,
    kernel: Option<Kernel>,
}

impl Ram {
    fn new() -> Result<Self> {
        let map = Map::new(0, MEMORY, libc::PROT_READ | libc::PROT_WRITE, None)?;
        Ok(Self { map, kernel: None })
    }

    /// Writes a batch, and its kernel if another one is there.
    fn load(&mut self, batch: &SystemBatch) {
        let kernel = batch.kernel;
        let bytes = self.map.bytes();
        if self.kernel != Some(kernel) {
            bytes.fill(0);
            kernel.install(bytes);
            self.kernel = Some(kernel);
        }
        kernel.load(bytes, batch);
    }

    /// What must be equal after a run, and how it ended.
    fn digest(&mut self, batch: &SystemBatch, end: End) -> u64 {
        let bytes = self.map.bytes();
        let parts = batch.kernel.compared(batch);
        parts.into_iter().fold(end as u64, |sum, (_, from, to)| {
            xxh3_64_with_seed(&bytes[from..to], sum)
        })
    }
}

/// How a batch may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// By its last instruction.
    Done,
    /// By a triple fault: cases after it did not run.
    Shutdown,
}

fn segment(s: &Segment) -> kvm_segment {
    let bit = |n: u16| u8::from(s.access >> n & 1 != 0);
    kvm_segment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        type_: s.access.to_le_bytes()[0] & 15,
        present: bit(7),
        dpl: s.dpl(),
        db: bit(14),
        s: bit(4),
        l: bit(13),
        g: bit(15),
        avl: bit(12),
        unusable: u8::from(s.unusable),
        padding: 0,
    }
}

extern "C" fn interrupted(_: libc::c_int) {}

impl Judge {
    fn new() -> Result<Self> {
        // SAFETY: the handler does nothing; without SA_RESTART the signal ends KVM_RUN.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = interrupted as *const () as usize;
            libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut());
        }
        let kvm = Kvm::new().context("there is no usable /dev/kvm")?;
        let vm = kvm.create_vm()?;
        vm.set_tss_address(0xfffb_d000).ok();
        let ram = Ram::new()?;
        let slot = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: ram.map.pointer().addr() as u64,
        };
        // SAFETY: the memory stays mapped as long as the machine: fields drop in order.
        unsafe { vm.set_user_memory_region(slot) }?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
        Ok(Self { vcpu, _vm: vm, ram })
    }

    fn state(&self, st: &CpuState) -> Result<()> {
        let mut sregs = self.vcpu.get_sregs()?;
        let s = st.seg.each_ref().map(segment);
        [sregs.es, sregs.cs, sregs.ss, sregs.ds, sregs.fs, sregs.gs] = s;
        (sregs.tr, sregs.ldt) = (segment(&st.tr), segment(&st.ldtr));
        let table = |t: hindsight_cpu::state::DescriptorTable| kvm_dtable {
            base: t.base,
            limit: t.limit,
            padding: [0; 3],
        };
        (sregs.gdt, sregs.idt) = (table(st.gdtr), table(st.idtr));
        (sregs.cr0, sregs.cr2, sregs.cr3, sregs.cr4) = (st.cr0, st.cr2, st.cr3, st.cr4);
        (sregs.cr8, sregs.efer) = (0, st.efer);
        self.vcpu.set_sregs(&sregs)?;
        self.vcpu.set_regs(&kvm_regs {
            rsp: st.gpr[4],
            rip: st.rip,
            rflags: st.rflags,
            ..kvm_regs::default()
        })?;
        let mut debug = self.vcpu.get_debug_regs()?;
        (debug.db, debug.dr6, debug.dr7) = ([0; 4], 0xffff_0ff0, 0x400);
        self.vcpu.set_debug_regs(&debug)?;
        Ok(())
    }

    /// Runs a batch. After any other end than [`End::Done`] it is good for nothing more.
    fn run(&mut self, batch: &SystemBatch) -> Result<End> {
        self.ram.load(batch);
        self.state(&batch.kernel.start(batch))?;
        // SAFETY: `Judge::new` has set a handler for the signal, which only interrupts KVM_RUN.
        unsafe { libc::alarm(LIMIT) };
        let exit = self.vcpu.run();
        // SAFETY: as above.
        unsafe { libc::alarm(0) };
        match exit.context("KVM did not come to the end of the batch")? {
            VcpuExit::IoOut(0xf4, _) => {}
            VcpuExit::Shutdown => return Ok(End::Shutdown),
            other => bail!("KVM ended with {other:?}"),
        }
        // The OUT is over when KVM is entered again: not here, as all state is set anew.
        self.vcpu.set_kvm_immediate_exit(1);
        let _ = self.vcpu.run();
        self.vcpu.set_kvm_immediate_exit(0);
        Ok(End::Done)
    }
}

impl Ours {
    fn new() -> Result<Self> {
        let ram = Ram::new()?;
        let spec = RegionSpec {
            gpa: 0,
            len: MEMORY as u64,
            host: ram.map.pointer(),
            writable: true,
        };
        // SAFETY: the owner keeps the mapping, whose bytes are used between runs only.
        let memory = unsafe { Memory::new(&[spec], ram.map.owner()) }?;
        Ok(Self {
            cpu: Vcpu::new(Arc::new(memory)),
            around: Around::default(),
            ram,
            batches: 0,
        })
    }

    fn run(&mut self, batch: &SystemBatch) -> Result<End> {
        self.batches += 1;
        if self.batches > RENEW {
            *self = Self::new()?;
        }
        self.ram.load(batch);
        self.cpu.code_changed(0, MEMORY as u64);
        self.cpu.load(&batch.kernel.start(batch));
        self.around.done = false;
        match self.cpu.run(&mut self.around, BUDGET) {
            Exit::Leave if self.around.done => Ok(End::Done),
            Exit::Shutdown => Ok(End::Shutdown),
            other => bail!("the interpreter ended with {other:?}"),
        }
    }
}

impl Versus {
    /// Both engines.
    ///
    /// # Errors
    /// When there is no KVM or no memory.
    pub fn new() -> Result<Self> {
        Ok(Self {
            judge: Judge::new()?,
            ours: Ours::new()?,
        })
    }

    /// Whether KVM leaves what the interpreter left elsewhere.
    fn agrees(&mut self, batch: &SystemBatch, expected: u64) -> Result<bool> {
        let end = self.judge.run(batch);
        let agrees = match &end {
            Ok(end) => self.judge.ram.digest(batch, *end) == expected,
            Err(_) => false,
        };
        if !matches!(end, Ok(End::Done)) {
            self.judge = Judge::new()?;
        }
        Ok(agrees)
    }

    /// Runs a batch on both; None if all is equal. A triple fault ends both in the same way.
    fn differs(&mut self, batch: &SystemBatch) -> Result<Option<String>> {
        let (judged, ours) = (self.judge.run(batch), self.ours.run(batch));
        let text = match (&judged, &ours) {
            (Ok(theirs), Ok(ours)) => self.compare(batch, *theirs, *ours),
            (Err(e), _) | (_, Err(e)) => e.to_string(),
        };
        if !matches!(judged, Ok(End::Done)) {
            self.judge = Judge::new()?;
        }
        if ours.is_err() {
            self.ours = Ours::new()?;
        }
        Ok((!text.is_empty()).then_some(text))
    }

    /// What differs after a batch; nothing if all is equal.
    fn compare(&mut self, batch: &SystemBatch, their_end: End, our_end: End) -> String {
        let (theirs, ours) = (self.judge.ram.map.bytes(), self.ours.ram.map.bytes());
        let mut text = String::new();
        if their_end != our_end {
            text += &format!("end: KVM {their_end:?}, ours {our_end:?}; ");
        }
        for (name, from, to) in batch.kernel.compared(batch) {
            let (a, b) = (&theirs[from..to], &ours[from..to]);
            if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
                let at = at & !7;
                let end = (at + 32).min(a.len());
                text += &format!(
                    "{name} at {at:#x}: KVM {:02x?}, ours {:02x?}; ",
                    &a[at..end],
                    &b[at..end]
                );
            }
        }
        text
    }

    /// Runs a batch; a difference is bisected to its case. With what the interpreter leaves known
    /// already, only KVM runs, unless it leaves something else.
    ///
    /// # Errors
    /// When an engine cannot be made.
    pub fn batch(
        &mut self,
        class: SystemClass,
        seed: u64,
        expected: Option<u64>,
        tally: &mut Tally,
    ) -> Result<()> {
        let batch = build(class, seed, SLOTS);
        tally.cases += batch.slots.len() as u64;
        for slot in &batch.slots {
            *tally.codes.entry(slot.kind().to_owned()).or_default() += 1;
        }
        let equal = match expected {
            Some(digest) => self.agrees(&batch, digest)?,
            None => self.differs(&batch)?.is_none(),
        };
        if equal {
            return Ok(());
        }
        let (mut good, mut bad) = (0, batch.slots.len());
        while bad - good > 1 {
            let middle = good.midpoint(bad);
            if self.differs(&build(class, seed, middle))?.is_some() {
                bad = middle;
            } else {
                good = middle;
            }
        }
        let part = build(class, seed, bad);
        let mut what = self
            .differs(&part)?
            .unwrap_or_else(|| "not again".to_owned());
        what.truncate(900);
        let slot = &part.slots[bad - 1];
        tally.mismatches.push(Mismatch {
            seed,
            run: bad as u64 - 1,
            code: slot.kind().to_owned(),
            text: slot.text.clone(),
            what,
        });
        Ok(())
    }
}

/// What to run.
#[derive(Debug)]
pub struct Plan<'a> {
    /// These classes.
    pub classes: &'a [SystemClass],
    /// Cases of each, counting those that the state has.
    pub cases: u64,
    /// Stop after this time.
    pub time: Option<Duration>,
    /// Decides everything.
    pub seed: u64,
    /// Where to keep the state.
    pub path: Option<&'a Path>,
    /// What the interpreter leaves, as far as it is known.
    pub expected: &'a Expected,
}

/// The seed of a batch.
fn seed_of(seed: u64, class: SystemClass, index: u64) -> u64 {
    mix(mix(seed ^ (class as u64) << 48).wrapping_add(index))
}

/// Runs system classes, in turn, and adds to the state.
///
/// # Errors
/// When there is no KVM, or memory or the state's file fails.
pub fn run(plan: &Plan<'_>, state: &mut State) -> Result<()> {
    let mut versus = Versus::new()?;
    let begin = Instant::now();
    let more = || plan.time.is_none_or(|t| begin.elapsed() < t);
    let mut going = true;
    while going && more() {
        going = false;
        for &class in plan.classes {
            let record = state.classes.entry(class.key()).or_default();
            let open = record.cases < plan.cases && record.mismatched < ENOUGH;
            if open && more() {
                some(&mut versus, class, plan, record)?;
                going = true;
            }
        }
        if let Some(path) = plan.path {
            state.write(path)?;
        }
    }
    for class in plan.classes {
        if let Some(record) = state.classes.get(&class.key()) {
            show(&class.name(), record);
        }
    }
    Ok(())
}

/// Runs the next batches of a class.
fn some(
    versus: &mut Versus,
    class: SystemClass,
    plan: &Plan<'_>,
    record: &mut Record,
) -> Result<()> {
    let start = Instant::now();
    let mut tally = Tally::default();
    let mut index = record.seeds.get(&plan.seed).copied().unwrap_or_default();
    let until = index + KEEP;
    while record.cases + tally.cases < plan.cases && index < until {
        let known = plan.expected.digest(plan.seed, &class.name(), index);
        let one = seed_of(plan.seed, class, index);
        versus.batch(class, one, known, &mut tally)?;
        index += 1;
    }
    record.seeds.insert(plan.seed, index);
    record.seconds += start.elapsed().as_secs_f64();
    record.add(tally);
    record.opcodes = record.codes.len();
    Ok(())
}

fn show(name: &str, record: &Record) {
    println!(
        "{name:14} {:>8} cases, {:>7.1} s, {} mismatches",
        record.cases, record.seconds, record.mismatched
    );
    for m in record.mismatches.iter().take(12) {
        println!(
            "    --system {name} --one {:#x} case {}: {}: {}",
            m.seed, m.run, m.text, m.what
        );
    }
}

/// What the interpreter leaves of so many cases of each class.
///
/// # Errors
/// When there is no memory.
pub fn expect(classes: &[SystemClass], cases: u64, seed: u64) -> Result<Expected> {
    let mut ours = Ours::new()?;
    let mut expected = Expected::new(seed);
    for &class in classes {
        let mut digests = Vec::new();
        for index in 0..cases.div_ceil(SLOTS as u64 - 1) {
            let batch = build(class, seed_of(seed, class, index), SLOTS);
            digests.push(match ours.run(&batch) {
                Ok(end) => ours.ram.digest(&batch, end),
                Err(e) => {
                    println!("{} {:#x}: {e}", class.name(), seed_of(seed, class, index));
                    ours = Ours::new()?;
                    expected::NONE
                }
            });
        }
        expected.insert(class.name(), digests);
    }
    Ok(expected)
}
