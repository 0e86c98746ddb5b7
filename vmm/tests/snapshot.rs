//! Whole machines are saved, restored, and brought to any instruction.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hindsight_cpu::cpuid::CpuModel;
use hindsight_devices::flash::{FLASH_BLOCK, Flash};
use hindsight_vmm::boot::{EntryMode, LoadRequest, Protocol};
use hindsight_vmm::deterministic::{CheckpointLimits, Timeline};
use hindsight_vmm::deterministic::{DeterministicMachine, RunStop, StopHandle};
use hindsight_vmm::harness::BUILTIN_PAYLOADS;
use hindsight_vmm::machine::{MachineConfig, PreparedMachine};
use hindsight_vmm::platform::Sinks;
use hindsight_vmm::state::Snapshot;
use hindsight_vmm::vcpu::engine::policy::Engine;
use hindsight_vmm::vcpu::run_control::Outcome;

/// A deterministic machine at the entry of a built-in payload.
fn machine(payload: &str, cpus: usize, seed: u64) -> DeterministicMachine {
    let (_, image) = BUILTIN_PAYLOADS
        .iter()
        .find(|(name, _)| *name == payload)
        .expect("the payload is built in");
    let request = LoadRequest {
        image,
        ..LoadRequest::default()
    };
    build(&request, 16 << 20, cpus, seed)
}

fn build(request: &LoadRequest<'_>, memory: u64, cpus: usize, seed: u64) -> DeterministicMachine {
    build_with(request, memory, cpus, seed, None)
}

fn build_with(
    request: &LoadRequest<'_>,
    memory: u64,
    cpus: usize,
    seed: u64,
    flash: Option<Flash>,
) -> DeterministicMachine {
    let config = MachineConfig {
        memory,
        huge_pages: false,
        cpus,
        cpu: CpuModel::PortableV1.into(),
        engine: Engine::Interp,
    };
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let mut prepared = PreparedMachine::new(&config, request).expect("the image is valid");
    if let Some(flash) = flash {
        prepared = prepared
            .with_firmware_vars(flash)
            .expect("there is firmware");
    }
    let machine = prepared.deterministic(seed).build(None, sinks);
    let machine = machine.expect("the interpreter needs nothing of the host");
    machine.into_deterministic().expect("it is deterministic")
}

/// Runs to the end. Returns the hash and the instruction count there.
fn finish(machine: &mut DeterministicMachine) -> (u128, u64) {
    assert_eq!(machine.run_to(u64::MAX), RunStop::Ended);
    let outcome = machine.take_outcome();
    assert!(matches!(outcome, Some(Outcome::Exit(0))), "{outcome:?}");
    (
        machine.hash().expect("memory can be read"),
        machine.icount(),
    )
}

/// About `count` instruction counts, spread over a run of `end` instructions.
fn spread_icounts(end: u64, count: u64) -> impl Iterator<Item = u64> {
    let step = (end / count).max(1);
    (1..=count)
        .map(move |n| n * step - n % 7)
        .filter(move |&icount| icount < end)
}

/// Stops, saves and restores at many instructions. The run must continue as without that.
fn save_at_many_instructions(payload: &str, cpus: usize) {
    let (hash, end) = finish(&mut machine(payload, cpus, 0));
    let mut stopped = machine(payload, cpus, 0);
    for icount in spread_icounts(end, 400) {
        assert_eq!(stopped.run_to(icount), RunStop::Reached);
        assert_eq!(stopped.icount(), icount);
    }
    assert_eq!(
        finish(&mut stopped),
        (hash, end),
        "stopped at many instructions"
    );
    let mut moved = machine(payload, cpus, 0);
    for icount in spread_icounts(end, 60) {
        assert_eq!(moved.run_to(icount), RunStop::Reached);
        let snapshot = moved.save().expect("memory can be read");
        // The snapshot's random numbers replace those of the other seed.
        let mut restored = machine(payload, cpus, 1);
        restored.restore(&snapshot).expect("the snapshot is valid");
        assert_eq!(
            restored.save().expect("memory can be read"),
            snapshot,
            "at {icount}"
        );
        if icount % 5 == 0 && end < 1_000_000 {
            let mut other = machine(payload, cpus, 0);
            other.restore(&snapshot).expect("the snapshot is valid");
            assert_eq!(finish(&mut other), (hash, end), "saved at {icount}");
        }
        moved = restored;
    }
    assert_eq!(
        finish(&mut moved),
        (hash, end),
        "moved from machine to machine"
    );
}

#[test]
fn run_continues_unchanged_after_a_save_between_timer_interrupts() {
    save_at_many_instructions("hlt", 1);
    save_at_many_instructions("ioapic_pic", 1);
}

#[test]
fn run_continues_unchanged_after_a_save_between_exits() {
    save_at_many_instructions("stress_exits", 1);
    save_at_many_instructions("exceptions", 1);
}

#[test]
fn run_of_two_vcpus_continues_unchanged_after_a_save_between_ipis() {
    save_at_many_instructions("ipi_smp", 2);
    save_at_many_instructions("tsc_smp", 2);
}

#[test]
fn timeline_goes_backwards_and_forwards_within_its_limits() {
    let (hash, end) = finish(&mut machine("exceptions", 1, 0));
    let limits = CheckpointLimits {
        spacing: end / 50,
        count: 8,
        bytes: 1 << 24,
    };
    let mut timeline = Timeline::new(machine("exceptions", 1, 0), limits).unwrap();
    let mut forward = Vec::new();
    for icount in spread_icounts(end, 30) {
        assert_eq!(timeline.go_to(icount).unwrap(), RunStop::Reached);
        forward.push((
            icount,
            timeline.machine().state(0),
            timeline.machine().trace_hash(),
        ));
        assert!(timeline.checkpoints().count() <= 8);
    }
    assert_eq!(timeline.go_to(u64::MAX).unwrap(), RunStop::Ended);
    assert_eq!(timeline.machine().hash(), Some(hash));
    for (icount, state, trace) in forward.into_iter().rev() {
        assert_eq!(timeline.go_to(icount).unwrap(), RunStop::Reached);
        assert_eq!(timeline.machine().state(0), state, "at {icount}");
        assert_eq!(timeline.machine().trace_hash(), trace, "at {icount}");
    }
    assert_eq!(timeline.go_to(0).unwrap(), RunStop::Reached);
    assert_eq!(finish(timeline.machine()), (hash, end));
}

#[test]
fn checkpoints_count_the_changed_blocks_of_the_flash_chip() {
    // The code at the reset vector is a loop.
    let mut firmware = vec![0; 0x1_0000];
    firmware[0xfff0..0xfff2].copy_from_slice(&[0xeb, 0xfe]);
    let request = LoadRequest {
        image: &firmware,
        protocol: Some(Protocol::Firmware),
        ..LoadRequest::default()
    };
    let flash = Flash::new(vec![0; 1 << 20], None).unwrap();
    let mut machine = build_with(&request, 16 << 20, 1, 0, Some(flash));
    let mut snapshot = machine.save().expect("memory can be read");
    let chip = snapshot.devices.flash.as_mut().expect("there is a chip");
    chip.changed = (0..100)
        .map(|number| (number, vec![1; FLASH_BLOCK]))
        .collect();
    machine.restore(&snapshot).expect("the snapshot is valid");
    let limits = CheckpointLimits {
        spacing: 1000,
        count: 100,
        bytes: 1 << 20,
    };
    let mut timeline = Timeline::new(machine, limits).unwrap();
    assert_eq!(timeline.go_to(50_000).unwrap(), RunStop::Reached);
    // The first one, and two with 100 blocks each.
    assert!(timeline.checkpoints().count() <= 3);
}

fn snapshot_of(payload: &str) -> Snapshot {
    let mut machine = machine(payload, 1, 0);
    machine.run_to(10_000);
    machine.save().expect("memory can be read")
}

#[test]
fn snapshot_survives_serialization() {
    let snapshot = snapshot_of("hlt");
    let text = serde_json::to_string(&snapshot).unwrap();
    assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot);
}

#[test]
fn snapshot_of_another_machine_is_rejected_and_changes_nothing() {
    let snapshot = snapshot_of("hlt");
    let mut machine = machine("hlt", 2, 0);
    let before = machine.save().unwrap();
    let error = machine.restore(&snapshot).unwrap_err().to_string();
    assert!(error.contains("vCPUs"), "{error}");
    assert_eq!(machine.save().unwrap(), before);
}

type Corruption = fn(&mut Snapshot);

#[test]
fn invalid_snapshots_are_rejected_and_change_nothing() {
    let rows: [(&str, Corruption); 9] = [
        ("version", |s| s.version += 1),
        ("schedule", |s| s.schedule.turn = 1),
        ("schedule", |s| s.schedule.used = u64::MAX),
        ("vCPUs", |s| s.vcpus.clear()),
        ("vCPU 0", |s| s.vcpus[0].cpu.dr7 = 0),
        ("counts of", |s| s.vcpus[0].log.retired = u64::MAX),
        ("MSRs", |s| s.vcpus[0].msrs.stored.clear()),
        ("local APIC 0", |s| s.interrupts.lapics[0].dfr = 0),
        ("test memory", |s| s.devices.test_memory.clear()),
    ];
    let mut machine = machine("hlt", 1, 0);
    machine.run_to(1000);
    let before = machine.save().unwrap();
    for (part, corrupt) in rows {
        let mut snapshot = snapshot_of("hlt");
        corrupt(&mut snapshot);
        let error = machine.restore(&snapshot).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
        assert_eq!(machine.save().unwrap(), before, "{part}");
    }
    machine.restore(&snapshot_of("hlt")).unwrap();
    finish(&mut machine);
}

#[test]
fn snapshot_with_an_unknown_mode_of_the_interval_timer_does_not_parse() {
    let mut value = serde_json::to_value(snapshot_of("hlt")).unwrap();
    value["interrupts"]["pit"]["channels"][0]["mode"] = 9.into();
    let error = serde_json::from_value::<Snapshot>(value).unwrap_err();
    assert!(error.to_string().contains("modes 0 to 5"), "{error}");
}

/// Collects the paths of all numbers in a tree.
fn number_paths(value: &serde_json::Value, path: &str, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Number(_) => found.push(path.to_owned()),
        serde_json::Value::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                number_paths(value, &format!("{path}/{index}"), found);
            }
        }
        serde_json::Value::Object(map) => {
            for (name, value) in map {
                number_paths(value, &format!("{path}/{name}"), found);
            }
        }
        _ => {}
    }
}

/// Stops the run every 50 ms until the returned flag is set, because a guest may halt for ever.
fn watchdog(stop_handle: StopHandle) -> Arc<AtomicBool> {
    let done = Arc::new(AtomicBool::new(false));
    let finished = done.clone();
    std::thread::spawn(move || {
        while !finished.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(50));
            stop_handle.stop();
        }
    });
    done
}

#[test]
fn stop_interrupts_a_repeated_instruction() {
    // mov edi, 0xc0000000, where no device is; mov ecx, -1; rep stosb
    let request = LoadRequest {
        image: &[0xbf, 0, 0, 0, 0xc0, 0x83, 0xc9, 0xff, 0xf3, 0xaa],
        protocol: Some(Protocol::Flat),
        mode: Some(EntryMode::Protected),
        ..LoadRequest::default()
    };
    let mut machine = build(&request, 16 << 20, 1, 0);
    let done = watchdog(machine.stop_handle());
    let start = std::time::Instant::now();
    assert_eq!(machine.run_to(1000), RunStop::Interrupted);
    done.store(true, Ordering::SeqCst);
    assert!(start.elapsed() < Duration::from_secs(60));
    assert_eq!(machine.icount(), 2, "the instruction has not retired");
}

#[test]
fn corrupt_snapshots_never_panic() {
    const VALUES: [u64; 8] = [0, 1, 2, 0x7f, 0xff, 0xffff_ffff, 1 << 63, u64::MAX];
    let mut valid = snapshot_of("hlt");
    let memory = std::mem::take(&mut valid.memory);
    // The bytes of the test memory have no meaning.
    valid.devices.test_memory.clear();
    let tree = serde_json::to_value(&valid).unwrap();
    let mut paths = Vec::new();
    number_paths(&tree, "", &mut paths);
    paths.retain(|path| !path.contains("/xsave/") && !path.contains("/cpuid/"));
    let mut machine = machine("hlt", 1, 0);
    let mut accepted = 0;
    let done = watchdog(machine.stop_handle());
    for (path, value) in paths
        .iter()
        .flat_map(|path| VALUES.map(|value| (path, value)))
    {
        let mut tree = tree.clone();
        *tree.pointer_mut(path).unwrap() = value.into();
        let Ok(mut snapshot) = serde_json::from_value::<Snapshot>(tree) else {
            continue;
        };
        snapshot.memory = memory.clone();
        snapshot.devices.test_memory = vec![0; 0x1_0000];
        if machine.restore(&snapshot).is_ok() {
            accepted += 1;
            let icount = machine.icount();
            machine.run_to(icount.saturating_add(3000));
        }
    }
    done.store(true, Ordering::SeqCst);
    assert!(accepted > 100, "{accepted}");
}

/// A machine at the entry of Linux, whose images are in the folder `$HINDSIGHT_GUESTS`.
fn linux(cpus: usize, seed: u64) -> DeterministicMachine {
    let folder = std::env::var_os("HINDSIGHT_GUESTS").expect("HINDSIGHT_GUESTS names the images");
    let file = |name: &str| {
        let path = std::path::Path::new(&folder).join(name);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let (kernel, initrd) = (file("vmlinuz"), file("initrd.gz"));
    let request = LoadRequest {
        image: &kernel,
        initrd: Some(&initrd),
        cmdline: b"console=ttyS0 quiet panic=-1 hindsight.selftest".to_vec(),
        ..LoadRequest::default()
    };
    build(&request, 256 << 20, cpus, seed)
}

#[test]
#[ignore = "boots Linux with the guest images of HINDSIGHT_GUESTS; ci/test images runs it"]
fn linux_boot_continues_unchanged_after_saves() {
    for cpus in [1, 2] {
        let mut uninterrupted = linux(cpus, 0);
        let mut moved = linux(cpus, 0);
        for icount in [10, 100, 101, 250, 400, 401, 600].map(|millions| millions * 1_000_000) {
            assert_eq!(moved.run_to(icount - 12_345), RunStop::Reached);
            let snapshot = moved.save().expect("memory can be read");
            moved = linux(cpus, 1);
            moved.restore(&snapshot).expect("the snapshot is valid");
            assert_eq!(moved.run_to(icount), RunStop::Reached);
            assert_eq!(uninterrupted.run_to(icount), RunStop::Reached);
            assert_eq!(
                moved.hash(),
                uninterrupted.hash(),
                "{cpus} vCPUs at {icount}"
            );
        }
    }
}
