//! Runs the demo's guest in this process, and collects its logs and the monitor's recording.

use std::io;
use std::time::Duration;

use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::msr::MsrConfig;
use thiserror::Error;

use crate::boot::LoadRequest;
use crate::demo::log::{self, DemoPicture, DemoRecord, TracedBranch};
use crate::demo::symbols::Symbols;
use crate::harness::BUILTIN_PAYLOADS;
use crate::kvm::{self, KvmError};
use crate::machine::{Machine, MachineConfig, MachineError};
use crate::platform::Sinks;
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::recorder::RecordedEvent;
use crate::vcpu::run_control::{HaltText, Outcome};

/// The name of the demo's payload.
const PAYLOAD: &str = "demo";
/// Guest memory, in bytes.
pub const MEMORY: u64 = 16 << 20;
/// Time limit. The guest needs a tenth of a second; on a host that emulates everything, seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// Why the demo cannot run.
#[derive(Debug, Error)]
pub enum DemoError {
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The machine cannot be built or run.
    #[error("the demo's machine cannot run")]
    Machine(#[from] MachineError),
    /// The guest is not part of this program.
    #[error(
        "this program was built without its payloads; build it without HINDSIGHT_WITHOUT_PAYLOADS"
    )]
    NoPayload,
}

/// The results of a run.
#[derive(Debug)]
pub struct DemoRun {
    /// Why the guest did not complete its run; `None` if it did.
    pub problem: Option<String>,
    /// The events that the monitor recorded.
    pub events: Vec<RecordedEvent>,
    /// The guest's log.
    pub log: Vec<DemoRecord>,
    /// What the guest drew.
    pub picture: Option<DemoPicture>,
    /// The branches that the guest traced.
    pub branches: Vec<TracedBranch>,
    /// The symbols of the guest's image.
    pub symbols: Symbols,
    /// Size of the image in bytes.
    pub image_len: usize,
    /// The configuration on which the MSRs depend.
    pub msrs: MsrConfig,
}

/// Runs the demo's guest to its end.
///
/// # Errors
///
/// KVM cannot be used, or the machine cannot be built.
pub fn run(engine: Engine, host: Option<&kvm::KvmDevice>) -> Result<DemoRun, DemoError> {
    let (_, image) = BUILTIN_PAYLOADS
        .iter()
        .find(|(name, _)| *name == PAYLOAD)
        .ok_or(DemoError::NoPayload)?;
    let config = MachineConfig {
        memory: MEMORY,
        huge_pages: false,
        cpus: 1,
        cpu: CpuModel::SkylakeServer.into(),
        engine,
    };
    let request = LoadRequest {
        image,
        ..LoadRequest::default()
    };
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let mut machine = Machine::new(host, &config, &request, sinks)?;
    let board = machine.board().clone();
    let recorder = machine.record();
    let outcome = machine.run(Some(LIMIT), || {})?;
    let symbols = Symbols::of(image);
    let log = symbols.address("demo_log");
    let picture = symbols.address("demo_picture");
    let branches = symbols.address("demo_branches");
    Ok(DemoRun {
        problem: problem(&outcome),
        events: recorder.take().0,
        log: log.map_or_else(Vec::new, |at| log::read_log(&board.ram.map, at)),
        picture: picture.and_then(|at| log::read_picture(&board.ram.map, at)),
        branches: branches.map_or_else(Vec::new, |at| log::read_branches(&board.ram.map, at)),
        symbols,
        image_len: image.len(),
        msrs: MsrConfig::new(Facilities::KVM, board.time.clock.hz()).with_uarch(true),
    })
}

fn problem(outcome: &Outcome) -> Option<String> {
    Some(match outcome {
        Outcome::Exit(0) => return None,
        Outcome::Exit(code) => format!("the guest ended with code {code}"),
        &Outcome::Halted { cpu, rip } => HaltText { cpu, rip }.to_string(),
        Outcome::Crash(crash) => crash.summary(),
        Outcome::Timeout(_) => format!("the guest did not end in {} seconds", LIMIT.as_secs()),
        Outcome::Failed(error) => {
            let mut text = error.to_string();
            let mut source = std::error::Error::source(error);
            while let Some(error) = source {
                text = format!("{text}: {error}");
                source = error.source();
            }
            text
        }
        Outcome::PowerOff | Outcome::Quit | Outcome::Reset => {
            "the guest ended the machine before it completed its run".to_owned()
        }
    })
}
