//! What one exit costs through the whole path (KVM_RUN, decoding, dispatch, model), against a bare
//! KVM_RUN loop that answers without looking.
//!
//! Batches of both alternate, and what counts is the ratio of neighbours: the machine is shared, and
//! what disturbs one mostly disturbs the other. The guest itself marks the begin and the end of the
//! timed stretch by a write to the debug console, so that building the machine is not counted.
//!
//! One more row is the change of the engine: from KVM into the interpreter and back, against one
//! KVM_GET_REGS.
//!
//! `cargo bench -p hindsight --bench exit_path -- [--quick] [--json]`

#![expect(
    unsafe_code,
    reason = "guest code is assembly text whose symbols Rust must declare"
)]

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::profile::CpuProfile;
use hindsight_regs::msr::IA32_SYSENTER_CS;
use hindsight_vmm::boot::{Mode, Plan, Protocol};
use hindsight_vmm::kvm::Host;
use hindsight_vmm::kvm::host_support::HostKvm;
use hindsight_vmm::kvm::tiny::TinyVm;
use hindsight_vmm::machine::{Config, Machine, Prepared};
use hindsight_vmm::platform::Sinks;
use hindsight_vmm::vcpu::engine::ForcedSwitch;
use hindsight_vmm::vcpu::engine::policy::{Engine, EngineChoice, EnginePolicy};
use hindsight_vmm::vcpu::run_control::Outcome;
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_SYNC_X86_EVENTS, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS,
    kvm_enable_cap, kvm_segment,
};
use kvm_ioctls::{Cap, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit};

/// Exits in the timed stretch; the guests count to it.
const EXITS: u32 = 400;
const MEMORY: u64 = 4 << 20;
const LOAD_ADDRESS: u64 = 0x1_0000;
/// The debug console: where the guest marks begin and end.
const MARK_PORT: u16 = 0xe9;
const EXIT_PORT: u16 = 0xf4;
/// KVM_MSR_EXIT_REASON_INVAL, _UNKNOWN and _FILTER.
const MSR_EXITS: u64 = 0b111;

/// Defines guest code in 32-bit protected mode around the instruction that is measured. Port 0xe8 is
/// a latch of the test device, MSR 0x1d9 is IA32_DEBUGCTL.
macro_rules! guest {
    ($start:literal, $end:literal, $measured:literal) => {
        std::arch::global_asm!(
            ".pushsection .rodata.exit_path, \"a\"",
            ".code32",
            concat!($start, ":"),
            "mov esi, 400",
            "xor eax, eax",
            "xor edx, edx",
            "mov ecx, 0x1d9",
            "out 0xe9, al",
            "2:",
            $measured,
            "dec esi",
            "jnz 2b",
            "out 0xe9, al",
            "xor eax, eax",
            "out 0xf4, eax",
            "3: jmp 3b",
            concat!($end, ":"),
            ".code64",
            ".popsection",
        );
    };
}

guest!("exit_path_out", "exit_path_out_end", "out 0xe8, al");
guest!("exit_path_in", "exit_path_in_end", "in al, 0xe8");
guest!("exit_path_rdmsr", "exit_path_rdmsr_end", "rdmsr");
guest!("exit_path_wrmsr", "exit_path_wrmsr_end", "wrmsr");

unsafe extern "C" {
    static exit_path_out: u8;
    static exit_path_out_end: u8;
    static exit_path_in: u8;
    static exit_path_in_end: u8;
    static exit_path_rdmsr: u8;
    static exit_path_rdmsr_end: u8;
    static exit_path_wrmsr: u8;
    static exit_path_wrmsr_end: u8;
}

/// The bytes between two labels of one [`guest!`].
fn between(start: *const u8, end: *const u8) -> &'static [u8] {
    // SAFETY: both labels are in one stretch of read-only data, in this order.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

fn cases() -> [(&'static str, &'static [u8]); 4] {
    [
        (
            "out",
            between(&raw const exit_path_out, &raw const exit_path_out_end),
        ),
        (
            "in",
            between(&raw const exit_path_in, &raw const exit_path_in_end),
        ),
        (
            "rdmsr",
            between(&raw const exit_path_rdmsr, &raw const exit_path_rdmsr_end),
        ),
        (
            "wrmsr",
            between(&raw const exit_path_wrmsr, &raw const exit_path_wrmsr_end),
        ),
    ]
}

/// Time from the guest's first mark to its last.
fn stretch(marks: &[Instant]) -> anyhow::Result<Duration> {
    match marks {
        [begin, end] => Ok(*end - *begin),
        _ => bail!("the guest made {} marks, not 2", marks.len()),
    }
}

/// A debug console that keeps when it was written to.
struct Marks(Arc<Mutex<Vec<Instant>>>);

impl Write for Marks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Ok(mut marks) = self.0.lock() {
            marks.push(Instant::now());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const CONFIG: Config = Config {
    memory: MEMORY,
    huge_pages: false,
    cpus: 1,
    cpu: CpuProfile::of(CpuModel::SkylakeServer),
    engine: Engine::Kvm,
};

fn plan(code: &[u8]) -> Plan<'_> {
    Plan {
        image: code,
        protocol: Some(Protocol::Flat),
        load_address: Some(LOAD_ADDRESS),
        mode: Some(Mode::Protected),
        ..Plan::default()
    }
}

/// Time of a change from KVM into the interpreter and back, on average over a batch of exits that
/// each change the engine.
fn there_and_back(host: &Host, code: &[u8]) -> anyhow::Result<Duration> {
    let policy = EnginePolicy {
        choice: EngineChoice::Auto,
        host: HostKvm::native(),
    };
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let prepared =
        Prepared::new(&CONFIG, &plan(code))?.changing(policy, Some(ForcedSwitch::Exits(1)));
    let machine = prepared.build(Some(host), sinks)?;
    let board = machine.board().clone();
    match machine.run(Some(Duration::from_secs(60)), || {})? {
        Outcome::Exit(0) => {}
        other => bail!("the guest ended by {other:?}"),
    }
    let stats = board
        .run
        .engine
        .stats()
        .expect("the machine changes engines");
    let changes = u32::try_from(stats.count())?;
    let both_ways = stats.total.saturating_mul(2).checked_div(changes);
    both_ways.context("the engine never changed")
}

/// Time of a KVM_GET_REGS, on average over a batch.
fn get_regs(host: &Host, code: &[u8]) -> anyhow::Result<Duration> {
    let vm = bare_vm(host, code, false)?;
    let start = Instant::now();
    for _ in 0..EXITS {
        std::hint::black_box(vm.vcpu.get_regs()?);
    }
    Ok(start.elapsed() / EXITS)
}

fn measure_change(host: &Host, code: &[u8], batches: usize) -> anyhow::Result<Times> {
    let mut times = Times::default();
    for _ in 0..batches {
        let change = there_and_back(host, code)?;
        times.path.push(change.as_secs_f64() * 1e9);
        let ioctl = in_thread(|| get_regs(host, code))?;
        times.bare.push(ioctl.as_secs_f64() * 1e9);
    }
    Ok(times)
}

fn report_change(times: &Times, json: bool) {
    if json {
        return report("change", times, true);
    }
    let ratio = median(times.path.iter().zip(&times.bare).map(|(a, b)| a / b));
    let us = |values: &[f64]| median(values.iter().copied()) / 1e3;
    println!(
        "change KVM to interpreter and back {:7.1} us, KVM_GET_REGS {:5.1} us, ratio {ratio:.1}",
        us(&times.path),
        us(&times.bare),
    );
}

/// One batch through the whole machine.
fn whole_path(host: &Host, code: &[u8]) -> anyhow::Result<Duration> {
    let marks = Arc::new(Mutex::new(Vec::new()));
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(Marks(marks.clone())),
        btm: None,
    };
    let machine = Machine::new(Some(host), &CONFIG, &plan(code), sinks)?;
    match machine.run(Some(Duration::from_secs(60)), || {})? {
        Outcome::Exit(0) => {}
        other => bail!("the guest ended by {other:?}"),
    }
    let marks = marks.lock().ok().context("the console's thread panicked")?;
    stretch(&marks)
}

fn flat_segment(code: bool) -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector: if code { 0x10 } else { 0x18 },
        type_: if code { 0xb } else { 0x3 },
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

/// A bare machine at the entry of `code`.
fn bare_vm(host: &Host, code: &[u8], sync_regs: bool) -> anyhow::Result<TinyVm> {
    let size = usize::try_from(MEMORY)?;
    let mut vm = TinyVm::new(host.kvm(), size, |vm| {
        vm.enable_cap(&kvm_enable_cap {
            cap: Cap::X86UserSpaceMsr as u32,
            args: [MSR_EXITS, 0, 0, 0],
            ..Default::default()
        })?;
        // KVM wants at least one range.
        let passes = MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: IA32_SYSENTER_CS,
            msr_count: 8,
            bitmap: &[1],
        };
        vm.set_msr_filter(MsrFilterDefaultAction::DENY, &[passes])
    })?;
    vm.write(LOAD_ADDRESS, code)?;
    let cpuid = host.kvm().get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    vm.vcpu.set_cpuid2(&cpuid)?;
    let mut sregs = vm.vcpu.get_sregs()?;
    sregs.cr0 |= 1;
    sregs.cs = flat_segment(true);
    let data = flat_segment(false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    vm.vcpu.set_sregs(&sregs)?;
    let mut regs = vm.vcpu.get_regs()?;
    (regs.rip, regs.rflags) = (LOAD_ADDRESS, 2);
    vm.vcpu.set_regs(&regs)?;
    if sync_regs {
        let valid = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS | KVM_SYNC_X86_EVENTS;
        vm.vcpu.get_kvm_run().kvm_valid_regs = u64::from(valid);
    }
    Ok(vm)
}

/// One batch round KVM_RUN and nothing else.
fn bare_loop(host: &Host, code: &[u8], sync_regs: bool) -> anyhow::Result<Duration> {
    let mut vm = bare_vm(host, code, sync_regs)?;
    let mut marks = Vec::new();
    loop {
        match vm.vcpu.run()? {
            VcpuExit::IoOut(MARK_PORT, _) => marks.push(Instant::now()),
            VcpuExit::IoOut(EXIT_PORT, _) => return stretch(&marks),
            VcpuExit::IoOut(..) => {}
            VcpuExit::IoIn(_, data) => data.fill(0),
            VcpuExit::X86Rdmsr(msr) => (*msr.data, *msr.error) = (0, 0),
            VcpuExit::X86Wrmsr(msr) => *msr.error = 0,
            other => bail!("the bare guest stopped by {other:?}"),
        }
    }
}

/// In a thread of its own, as a processor has.
fn in_thread(work: impl FnOnce() -> anyhow::Result<Duration> + Send) -> anyhow::Result<Duration> {
    thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|_| bail!("the thread panicked"))
}

/// Nanoseconds per exit, batch by batch.
#[derive(Default)]
struct Times {
    path: Vec<f64>,
    bare: Vec<f64>,
    bare_sync: Vec<f64>,
}

fn measure(host: &Host, code: &[u8], batches: usize) -> anyhow::Result<Times> {
    let per_exit = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(EXITS);
    let mut times = Times::default();
    for _ in 0..batches {
        let path = whole_path(host, code)?;
        times.path.push(per_exit(path));
        let bare = in_thread(|| bare_loop(host, code, false))?;
        times.bare.push(per_exit(bare));
        let bare = in_thread(|| bare_loop(host, code, true))?;
        times.bare_sync.push(per_exit(bare));
    }
    Ok(times)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn report(name: &str, times: &Times, json: bool) {
    let Times {
        path,
        bare,
        bare_sync,
    } = times;
    if json {
        println!(
            "{}",
            serde_json::json!({ "name": name, "path_ns": path, "bare_ns": bare, "bare_sync_ns": bare_sync })
        );
        return;
    }
    let middle = |values: &[f64]| median(values.iter().copied());
    let ratio = median(path.iter().zip(bare).map(|(path, bare)| path / bare));
    let ours = median(path.iter().zip(bare_sync).map(|(path, bare)| path - bare));
    println!(
        "{name:6} whole path {:7.0} ns, bare {:7.0} ns, ratio {ratio:.3}; bare with sync regs {:7.0} ns, ours {ours:5.0} ns",
        middle(path),
        middle(bare),
        middle(bare_sync),
    );
}

fn main() -> anyhow::Result<()> {
    let has = |flag: &str| std::env::args().any(|argument| argument == flag);
    let host = match Host::open() {
        Ok(host) => host,
        Err(error) => {
            eprintln!("skipped: {error}");
            return Ok(());
        }
    };
    let batches = if has("--quick") { 31 } else { 151 };
    for (name, code) in cases() {
        report(name, &measure(&host, code, batches)?, has("--json"));
    }
    let (_, code) = cases()[0];
    report_change(&measure_change(&host, code, batches)?, has("--json"));
    Ok(())
}
