//! The time of one exit through the whole path (KVM_RUN, decoding, dispatch, model).
//!
//! It is compared with a bare KVM_RUN loop that completes each exit without decoding it. Batches of
//! both alternate, and the result is the median ratio of adjacent batches: the host is shared, and
//! other load mostly affects both. The guest marks the begin and the end of the measured exits by
//! writes to the debug console, so that the construction of the machine is not measured.
//!
//! Another row is the time of an engine switch, from KVM to the interpreter and back, compared with
//! one KVM_GET_REGS.
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
use hindsight_vmm::boot::{EntryMode, LoadRequest, Protocol};
use hindsight_vmm::kvm::KvmDevice;
use hindsight_vmm::kvm::host_support::HostKvm;
use hindsight_vmm::kvm::tiny_vm::TinyVm;
use hindsight_vmm::machine::{Machine, MachineConfig, PreparedMachine};
use hindsight_vmm::platform::Sinks;
use hindsight_vmm::vcpu::engine::ForcedSwitch;
use hindsight_vmm::vcpu::engine::policy::{Engine, EngineChoice, EnginePolicy};
use hindsight_vmm::vcpu::run_control::Outcome;
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_SYNC_X86_EVENTS, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS,
    kvm_enable_cap, kvm_segment,
};
use kvm_ioctls::{Cap, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit};

/// The number of measured exits in a batch; the guests count them.
const EXITS: u32 = 400;
const MEMORY: u64 = 4 << 20;
const LOAD_ADDRESS: u64 = 0x1_0000;
/// The debug console, where the guest marks the begin and the end.
const MARK_PORT: u16 = 0xe9;
const EXIT_PORT: u16 = 0xf4;
/// KVM_MSR_EXIT_REASON_INVAL, _UNKNOWN and _FILTER.
const MSR_EXITS: u64 = 0b111;

/// Defines guest code for 32-bit protected mode that executes one instruction 400 times.
///
/// Port 0xe8 is a latch of the test device, MSR 0x1d9 is IA32_DEBUGCTL.
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
fn code_between(start: *const u8, end: *const u8) -> &'static [u8] {
    // SAFETY: both labels are in one read-only section, which `guest!` defines contiguously and in
    // this order.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

fn cases() -> [(&'static str, &'static [u8]); 4] {
    [
        (
            "out",
            code_between(&raw const exit_path_out, &raw const exit_path_out_end),
        ),
        (
            "in",
            code_between(&raw const exit_path_in, &raw const exit_path_in_end),
        ),
        (
            "rdmsr",
            code_between(&raw const exit_path_rdmsr, &raw const exit_path_rdmsr_end),
        ),
        (
            "wrmsr",
            code_between(&raw const exit_path_wrmsr, &raw const exit_path_wrmsr_end),
        ),
    ]
}

/// The time between the guest's two marks.
fn measured_time(marks: &[Instant]) -> anyhow::Result<Duration> {
    match marks {
        [begin, end] => Ok(*end - *begin),
        _ => bail!("the guest made {} marks, not 2", marks.len()),
    }
}

/// A debug console that stores the time of each write.
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

const CONFIG: MachineConfig = MachineConfig {
    memory: MEMORY,
    huge_pages: false,
    cpus: 1,
    cpu: CpuProfile::of(CpuModel::SkylakeServer),
    engine: Engine::Kvm,
};

fn load_request(code: &[u8]) -> LoadRequest<'_> {
    LoadRequest {
        image: code,
        protocol: Some(Protocol::Flat),
        load_address: Some(LOAD_ADDRESS),
        mode: Some(EntryMode::Protected),
        ..LoadRequest::default()
    }
}

/// The time of a switch from KVM to the interpreter and back.
///
/// It is the average over a batch of exits that each switch the engine.
fn switch_engine_twice(device: &KvmDevice, code: &[u8]) -> anyhow::Result<Duration> {
    let policy = EnginePolicy {
        choice: EngineChoice::Auto,
        host: HostKvm::usable(),
    };
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let prepared = PreparedMachine::new(&CONFIG, &load_request(code))?
        .with_engine_policy(policy, Some(ForcedSwitch::Exits(1)));
    let machine = prepared.build(Some(device), sinks)?;
    let board = machine.board().clone();
    match machine.run(Some(Duration::from_secs(60)), || {})? {
        Outcome::Exit(0) => {}
        other => bail!("the guest ended with {other:?}"),
    }
    let stats = board
        .run
        .engine
        .stats()
        .expect("the machine can switch engines");
    let switches = u32::try_from(stats.count())?;
    let both_ways = stats.total.saturating_mul(2).checked_div(switches);
    both_ways.context("the engine was never switched")
}

/// The time of a KVM_GET_REGS, on average over a batch.
fn get_regs(device: &KvmDevice, code: &[u8]) -> anyhow::Result<Duration> {
    let vm = bare_vm(device, code, false)?;
    let start = Instant::now();
    for _ in 0..EXITS {
        std::hint::black_box(vm.vcpu().get_regs()?);
    }
    Ok(start.elapsed() / EXITS)
}

fn measure_switch(device: &KvmDevice, code: &[u8], batches: usize) -> anyhow::Result<Times> {
    let mut times = Times::default();
    for _ in 0..batches {
        let switch = switch_engine_twice(device, code)?;
        times.path.push(switch.as_secs_f64() * 1e9);
        let ioctl = in_thread(|| get_regs(device, code))?;
        times.bare.push(ioctl.as_secs_f64() * 1e9);
    }
    Ok(times)
}

fn report_switch(times: &Times, json: bool) {
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

/// Runs one batch in a whole machine.
fn whole_path(device: &KvmDevice, code: &[u8]) -> anyhow::Result<Duration> {
    let marks = Arc::new(Mutex::new(Vec::new()));
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(Marks(marks.clone())),
        btm: None,
    };
    let machine = Machine::new(Some(device), &CONFIG, &load_request(code), sinks)?;
    match machine.run(Some(Duration::from_secs(60)), || {})? {
        Outcome::Exit(0) => {}
        other => bail!("the guest ended with {other:?}"),
    }
    let marks = marks.lock().ok().context("the console's thread panicked")?;
    measured_time(&marks)
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

/// A bare VM with its vCPU at the entry of `code`.
fn bare_vm(device: &KvmDevice, code: &[u8], sync_regs: bool) -> anyhow::Result<TinyVm> {
    let size = usize::try_from(MEMORY)?;
    let mut vm = TinyVm::new(device.kvm(), size, |vm| {
        vm.enable_cap(&kvm_enable_cap {
            cap: Cap::X86UserSpaceMsr as u32,
            args: [MSR_EXITS, 0, 0, 0],
            ..Default::default()
        })?;
        // KVM requires at least one range.
        let allowed = MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: IA32_SYSENTER_CS,
            msr_count: 8,
            bitmap: &[1],
        };
        vm.set_msr_filter(MsrFilterDefaultAction::DENY, &[allowed])
    })?;
    vm.write(LOAD_ADDRESS, code)?;
    let cpuid = device.kvm().get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    vm.vcpu().set_cpuid2(&cpuid)?;
    let mut sregs = vm.vcpu().get_sregs()?;
    sregs.cr0 |= 1;
    sregs.cs = flat_segment(true);
    let data = flat_segment(false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    vm.vcpu().set_sregs(&sregs)?;
    let mut regs = vm.vcpu().get_regs()?;
    (regs.rip, regs.rflags) = (LOAD_ADDRESS, 2);
    vm.vcpu().set_regs(&regs)?;
    if sync_regs {
        let valid = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS | KVM_SYNC_X86_EVENTS;
        vm.kvm_run().kvm_valid_regs = u64::from(valid);
    }
    Ok(vm)
}

/// Runs one batch with nothing but KVM_RUN.
fn bare_loop(device: &KvmDevice, code: &[u8], sync_regs: bool) -> anyhow::Result<Duration> {
    let mut vm = bare_vm(device, code, sync_regs)?;
    let mut marks = Vec::new();
    loop {
        match vm.run()? {
            VcpuExit::IoOut(MARK_PORT, _) => marks.push(Instant::now()),
            VcpuExit::IoOut(EXIT_PORT, _) => return measured_time(&marks),
            VcpuExit::IoOut(..) => {}
            VcpuExit::IoIn(_, data) => data.fill(0),
            VcpuExit::X86Rdmsr(msr) => (*msr.data, *msr.error) = (0, 0),
            VcpuExit::X86Wrmsr(msr) => *msr.error = 0,
            other => bail!("the bare VM stopped with {other:?}"),
        }
    }
}

/// Does `work` in a thread of its own, as a vCPU runs in one.
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

fn measure(device: &KvmDevice, code: &[u8], batches: usize) -> anyhow::Result<Times> {
    let per_exit = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(EXITS);
    let mut times = Times::default();
    for _ in 0..batches {
        let path = whole_path(device, code)?;
        times.path.push(per_exit(path));
        let bare = in_thread(|| bare_loop(device, code, false))?;
        times.bare.push(per_exit(bare));
        let bare = in_thread(|| bare_loop(device, code, true))?;
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
    let median_of = |values: &[f64]| median(values.iter().copied());
    let ratio = median(path.iter().zip(bare).map(|(path, bare)| path / bare));
    let ours = median(path.iter().zip(bare_sync).map(|(path, bare)| path - bare));
    println!(
        "{name:6} whole path {:7.0} ns, bare {:7.0} ns, ratio {ratio:.3}; bare with sync regs {:7.0} ns, ours {ours:5.0} ns",
        median_of(path),
        median_of(bare),
        median_of(bare_sync),
    );
}

fn main() -> anyhow::Result<()> {
    let has = |flag: &str| std::env::args().any(|argument| argument == flag);
    let device = match KvmDevice::open() {
        Ok(device) => device,
        Err(error) => {
            eprintln!("skipped: {error}");
            return Ok(());
        }
    };
    let batches = if has("--quick") { 31 } else { 151 };
    for (name, code) in cases() {
        report(name, &measure(&device, code, batches)?, has("--json"));
    }
    let (_, code) = cases()[0];
    report_switch(&measure_switch(&device, code, batches)?, has("--json"));
    Ok(())
}
