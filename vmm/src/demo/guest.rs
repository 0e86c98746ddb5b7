//! Runs the demo's guest in this process, and gathers what there is to tell.

use std::io;
use std::time::Duration;

use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::msr::MsrConfig;
use thiserror::Error;

use crate::boot::Plan;
use crate::demo::log::{self, Branch, Picture, Record};
use crate::demo::symbols::Symbols;
use crate::harness::BUILTIN_PAYLOADS;
use crate::kvm::{self, KvmError};
use crate::machine::{Config, Machine, MachineError};
use crate::platform::Sinks;
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::recorder::RecordedEvent;
use crate::vcpu::run_control::Outcome;

/// The payload that is run.
const PAYLOAD: &str = "demo";
/// Guest memory, in bytes.
pub const MEMORY: u64 = 16 << 20;
/// The guest needs a tenth of a second; on a host that emulates everything, seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// Why there is nothing to show.
#[derive(Debug, Error)]
pub enum DemoError {
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The machine could not be built or run.
    #[error("the demo's machine")]
    Machine(#[from] MachineError),
    /// The guest is not in this program.
    #[error("this program was built without its payloads")]
    NoPayload,
}

/// All that came out of a run.
#[derive(Debug)]
pub struct Run {
    /// How it ended, in words; `None` is a good end.
    pub problem: Option<String>,
    /// What the monitor saw.
    pub events: Vec<RecordedEvent>,
    /// What the guest kept.
    pub log: Vec<Record>,
    /// What the guest drew.
    pub picture: Option<Picture>,
    /// The branches that the guest traced.
    pub branches: Vec<Branch>,
    /// Names of its addresses.
    pub symbols: Symbols,
    /// Bytes of the image.
    pub image_len: usize,
    /// What the processor's MSRs depend on.
    pub msrs: MsrConfig,
}

/// Runs the demo's guest to its end.
///
/// # Errors
///
/// When KVM cannot be used, or the machine not be built.
pub fn run(engine: Engine, host: Option<&kvm::Host>) -> Result<Run, DemoError> {
    let (_, image) = BUILTIN_PAYLOADS
        .iter()
        .find(|(name, _)| *name == PAYLOAD)
        .ok_or(DemoError::NoPayload)?;
    let config = Config {
        memory: MEMORY,
        huge_pages: false,
        cpus: 1,
        cpu: CpuModel::SkylakeServer.into(),
        engine,
    };
    let plan = Plan {
        image,
        ..Plan::default()
    };
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let mut machine = Machine::new(host, &config, &plan, sinks)?;
    let board = machine.board().clone();
    let recorder = machine.record();
    let outcome = machine.run(Some(LIMIT), || {})?;
    let symbols = Symbols::of(image);
    let log = symbols.address("demo_log");
    let picture = symbols.address("demo_picture");
    let branches = symbols.address("demo_branches");
    Ok(Run {
        problem: problem(&outcome),
        events: recorder.take().0,
        log: log.map_or_else(Vec::new, |at| log::read_log(&board.ram.map, at)),
        picture: picture.and_then(|at| log::read_picture(&board.ram.map, at)),
        branches: branches.map_or_else(Vec::new, |at| log::read_branches(&board.ram.map, at)),
        symbols,
        image_len: image.len(),
        msrs: MsrConfig {
            facilities: Facilities::KVM,
            tsc_hz: board.time.clock.hz(),
            uarch: true,
        },
    })
}

fn problem(outcome: &Outcome) -> Option<String> {
    Some(match outcome {
        Outcome::Exit(0) => return None,
        Outcome::Exit(code) => format!("the guest ended with code {code}"),
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
            "the guest ended the machine before its story was over".to_owned()
        }
    })
}
