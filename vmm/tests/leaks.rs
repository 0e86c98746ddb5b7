//! Machines free their threads, descriptors and memory. The test is alone in its process.

use std::time::Duration;
use std::{fs, io};

use hindsight_cpu::cpuid::CpuModel;
use hindsight_vmm::boot::{EntryMode, LoadRequest, Protocol};
use hindsight_vmm::kvm::{self, KvmDevice};
use hindsight_vmm::machine::{Machine, MachineConfig};
use hindsight_vmm::platform::Sinks;
use hindsight_vmm::vcpu::engine::policy::Engine;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::{CodeAssembler, al};

fn entries(folder: &str) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS:"));
    let word = line.and_then(|l| l.split_whitespace().nth(1));
    word.and_then(|word| word.parse().ok())
        .expect("/proc/self/status has VmRSS")
}

#[test]
fn fifty_machines_free_all_that_they_used() {
    if kvm::open_device().is_err() {
        eprintln!("skipped: fifty_machines_free_all_that_they_used: /dev/kvm cannot be used here");
        return;
    }
    let mut code = CodeAssembler::new(64).unwrap();
    code.mov(al, 3).unwrap();
    code.out(0xf4, al).unwrap();
    let image = code.assemble(0x10_0000).unwrap();
    let run = || {
        let config = MachineConfig {
            memory: 4 << 20,
            huge_pages: false,
            cpus: 2,
            cpu: CpuModel::SkylakeServer.into(),
            engine: Engine::Kvm,
        };
        let request = LoadRequest {
            image: &image,
            protocol: Some(Protocol::Flat),
            mode: Some(EntryMode::Long),
            ..LoadRequest::default()
        };
        let sinks = Sinks {
            serial: Box::new(io::sink()),
            debugcon: Box::new(io::sink()),
            btm: None,
        };
        let machine =
            Machine::new(Some(&KvmDevice::open().unwrap()), &config, &request, sinks).unwrap();
        let outcome = machine.run(Some(Duration::from_secs(20)), || {}).unwrap();
        assert!(matches!(outcome, Outcome::Exit(3)), "{outcome:?}");
    };
    run();
    let before = (entries("/proc/self/task"), entries("/proc/self/fd"));
    let resident = resident_kib();
    for _ in 0..50 {
        run();
    }
    let after = (entries("/proc/self/task"), entries("/proc/self/fd"));
    assert_eq!(after, before, "numbers of threads and descriptors");
    let grown = resident_kib().saturating_sub(resident);
    assert!(grown < 8 << 10, "resident memory grew by {grown} KiB");
}
