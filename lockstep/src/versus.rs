//! System batches on KVM and in the interpreter.

#![expect(
    unsafe_code,
    reason = "guest memory is handed to KVM and to the interpreter"
)]

use crate::guest::Around;
use crate::judge::{Mismatch, Tally};
use crate::kernel::{MEMORY, compared, install, load, start};
use crate::layout::{FIRST, SLOTS};
use crate::map::Map;
use crate::rng::mix;
use crate::state::State;
use crate::system::{SystemBatch, SystemClass, build};
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

/// Batches after which the interpreter starts afresh.
const RENEW: u64 = 256;
/// More than any batch takes.
const BUDGET: u64 = 1 << 20;

/// The host's KVM with one processor.
#[derive(Debug)]
struct Judge {
    vcpu: VcpuFd,
    _vm: VmFd,
    ram: Map,
}

/// The interpreter.
#[derive(Debug)]
struct Ours {
    cpu: Vcpu,
    around: Around,
    ram: Map,
}

/// Both.
#[derive(Debug)]
pub struct Versus {
    judge: Judge,
    ours: Ours,
    batches: u64,
}

fn memory() -> Result<Map> {
    let mut ram = Map::new(0, MEMORY, libc::PROT_READ | libc::PROT_WRITE, None)?;
    install(ram.bytes(), FIRST);
    Ok(ram)
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

impl Judge {
    fn new() -> Result<Self> {
        let kvm = Kvm::new().context("there is no usable /dev/kvm")?;
        let vm = kvm.create_vm()?;
        vm.set_tss_address(0xfffb_d000).ok();
        let ram = memory()?;
        let slot = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: ram.pointer().addr() as u64,
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

    fn run(&mut self, st: &CpuState) -> Result<()> {
        self.state(st)?;
        match self.vcpu.run()? {
            VcpuExit::IoOut(0xf4, _) => {}
            other => bail!("KVM ended with {other:?}"),
        }
        // The OUT is over when KVM is entered again: not here, as all state is set anew.
        self.vcpu.set_kvm_immediate_exit(1);
        let _ = self.vcpu.run();
        self.vcpu.set_kvm_immediate_exit(0);
        Ok(())
    }
}

impl Ours {
    fn new() -> Result<Self> {
        let ram = memory()?;
        let spec = RegionSpec {
            gpa: 0,
            len: MEMORY as u64,
            host: ram.pointer(),
            writable: true,
        };
        // SAFETY: the memory lives as long as the processor, and is touched between runs only.
        let memory = unsafe { Memory::new(&[spec]) }?;
        Ok(Self {
            cpu: Vcpu::new(Arc::new(memory)),
            around: Around::default(),
            ram,
        })
    }

    fn run(&mut self, st: &CpuState) -> Result<()> {
        self.cpu.code_changed(0, MEMORY as u64);
        self.cpu.load(st);
        self.around.done = false;
        match self.cpu.run(&mut self.around, BUDGET) {
            Exit::Leave if self.around.done => Ok(()),
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
            batches: 0,
        })
    }

    /// Runs a batch on both; None if all is equal.
    fn differs(&mut self, batch: &SystemBatch) -> Result<Option<String>> {
        let st = start(FIRST);
        load(self.judge.ram.bytes(), FIRST, batch);
        load(self.ours.ram.bytes(), FIRST, batch);
        if let Err(e) = self.judge.run(&st) {
            self.judge = Judge::new()?;
            return Ok(Some(e.to_string()));
        }
        if let Err(e) = self.ours.run(&st) {
            self.ours = Ours::new()?;
            return Ok(Some(e.to_string()));
        }
        let (theirs, ours) = (self.judge.ram.bytes(), self.ours.ram.bytes());
        let mut text = String::new();
        for (name, from, to) in compared(FIRST, batch) {
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
        Ok((!text.is_empty()).then_some(text))
    }

    /// Runs a batch; a difference is bisected to its case.
    ///
    /// # Errors
    /// When an engine cannot be made.
    pub fn batch(&mut self, class: SystemClass, seed: u64, tally: &mut Tally) -> Result<()> {
        self.batches += 1;
        if self.batches.is_multiple_of(RENEW) {
            self.ours = Ours::new()?;
        }
        let batch = build(class, seed, FIRST, SLOTS);
        tally.cases += batch.slots.len() as u64;
        for slot in &batch.slots {
            let kind = slot.text.split_whitespace().next().unwrap_or_default();
            let kind = if slot.text.starts_with('[') {
                slot.text.split(']').next().unwrap_or(kind)
            } else {
                kind
            };
            *tally
                .codes
                .entry(kind.trim_start_matches('[').to_owned())
                .or_default() += 1;
        }
        if self.differs(&batch)?.is_none() {
            return Ok(());
        }
        let (mut good, mut bad) = (0, batch.slots.len());
        while bad - good > 1 {
            let middle = good.midpoint(bad);
            if self.differs(&build(class, seed, FIRST, middle))?.is_some() {
                bad = middle;
            } else {
                good = middle;
            }
        }
        let part = build(class, seed, FIRST, bad);
        let mut what = self
            .differs(&part)?
            .unwrap_or_else(|| "not again".to_owned());
        what.truncate(900);
        tally.mismatches.push(Mismatch {
            seed,
            run: bad as u64 - 1,
            code: part.slots[bad - 1]
                .text
                .split_whitespace()
                .next()
                .unwrap_or_default()
                .to_owned(),
            text: part.slots[bad - 1].text.clone(),
            what,
        });
        Ok(())
    }
}

/// Runs system classes and adds to the state.
///
/// # Errors
/// When there is no KVM, or memory or the state's file fails.
pub fn run(
    classes: &[SystemClass],
    cases: u64,
    time: Option<Duration>,
    seed: u64,
    path: Option<&Path>,
    state: &mut State,
) -> Result<()> {
    let mut versus = Versus::new()?;
    let begin = Instant::now();
    for &class in classes {
        let name = format!("{class:?}").to_lowercase();
        let record = state.classes.entry(format!("system-{name}")).or_default();
        let start = Instant::now();
        let mut tally = Tally::default();
        let mut index = record.seeds.get(&seed).copied().unwrap_or_default();
        while record.cases + tally.cases < cases && time.is_none_or(|t| begin.elapsed() < t) {
            let one = mix(mix(seed ^ (class as u64) << 48).wrapping_add(index));
            versus.batch(class, one, &mut tally)?;
            index += 1;
        }
        record.seeds.insert(seed, index);
        record.seconds += start.elapsed().as_secs_f64();
        record.add(tally);
        record.opcodes = record.codes.len();
        println!(
            "{name:14} {:>8} cases, {} mismatches",
            record.cases, record.mismatched
        );
        for m in record.mismatches.iter().take(12) {
            println!(
                "    --system {name} --one {:#x} case {}: {}: {}",
                m.seed, m.run, m.text, m.what
            );
        }
        if let Some(path) = path {
            state.write(path)?;
        }
    }
    Ok(())
}
