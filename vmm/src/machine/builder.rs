//! Building a machine: guest memory and image first, then the board and the vCPUs.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use hindsight_cpu::cpuid::{self, CpuidRegs, CpuidTable};
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::msr::{MsrConfig, Msrs};
use hindsight_cpu::profile::{CpuProfile, ProfileError};
use hindsight_cpu::state::{Activity, CpuState, gpr};
use hindsight_cpu::uarch::{CacheGeometry, CacheModel};
use hindsight_devices::clock::Clock;
use hindsight_devices::flash::Flash;
use hindsight_devices::irq::lapic::LapicFeatures;
use hindsight_devices::irq::{Interrupts, InterruptsConfig};
use hindsight_devices::pci::Bridge;
use hindsight_devices::rtc::RtcConfig;
use hindsight_devices::virtio::VirtioDevice;
use hindsight_devices::{Backlog, NanoClock, Requests};
use vm_memory::GuestMemoryMmap;

use super::features::{
    available, executed_by_both, executed_by_kvm, firmware_address_bits, is_complete,
    limit_address_bits,
};
use super::{CPUS_MAX, Machine, MachineError};
use crate::boot::{self, LoadRequest, LoadedImage, Protocol};
use crate::kvm::vcpu::KvmVcpuFd;
use crate::kvm::vm::KvmVm;
use crate::kvm::{self, KvmError};
use crate::memory::layout::{FIRMWARE_MAX, Layout, is_firmware, video_base};
use crate::memory::{self, GuestRam};
use crate::platform::{Buses, PciDevices, ScreenConfig, Sinks, Timekeeping, TimerBell, Wiring};
use crate::vcpu::MachineVcpu;
use crate::vcpu::board::{Board, Package, RequestHandler, RunControl, ThreadWaker};
use crate::vcpu::debug::stop::StopReports;
use crate::vcpu::engine::policy::{Engine, EnginePolicy};
use crate::vcpu::engine::{EngineSwitch, ForcedSwitch};
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::kvm::KvmVcpu;
use crate::vcpu::model::{ResetState, VcpuModel};
use crate::vcpu::run_control::{ResetPolicy, RunEnd, VcpuControl};
use crate::vcpu::translation::TranslationPolicy;
use crate::{deterministic, host_clock};

/// The validated configuration of a machine.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// Guest memory, in bytes.
    pub memory: u64,
    /// Whether huge pages back guest memory.
    pub huge_pages: bool,
    /// Number of vCPUs, 1 to [`CPUS_MAX`].
    pub cpus: usize,
    /// The CPU profile that the guest sees.
    pub cpu: CpuProfile,
    /// The engine in which the machine starts.
    pub engine: Engine,
}

impl MachineConfig {
    /// The facilities of the processor. With `changes`, the machine may change engines.
    fn facilities(&self, changes: bool) -> Result<Facilities, ProfileError> {
        self.cpu.facilities(available(self.engine, changes))
    }
}

/// Guest memory with a loaded image, from which a machine can be built.
///
/// Errors of the image and of the configuration are found before this exists.
pub struct PreparedMachine {
    config: MachineConfig,
    layout: Layout,
    memory: GuestMemoryMmap,
    loaded: LoadedImage,
    seed: Option<u64>,
    policy: Option<EnginePolicy>,
    forced: Option<ForcedSwitch>,
    translation: TranslationPolicy,
    uarch: bool,
    reboots: bool,
    flash: Option<Flash>,
    screen: Option<ScreenConfig>,
    devices: Vec<Box<dyn VirtioDevice>>,
}

impl fmt::Debug for PreparedMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedMachine")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl PreparedMachine {
    /// Allocates the memory of `config` and loads the image of `request` into it.
    ///
    /// # Errors
    ///
    /// When the configuration is impossible, the host lacks the memory, or the image cannot be booted.
    pub fn new(config: &MachineConfig, request: &LoadRequest<'_>) -> Result<Self, MachineError> {
        Self::with_devices(config, request, Vec::new())
    }

    /// Like [`PreparedMachine::new`], with devices on the PCI bus in the order of their slots.
    ///
    /// # Errors
    ///
    /// As for [`PreparedMachine::new`], and when there are more devices than slots.
    pub fn with_devices(
        config: &MachineConfig,
        request: &LoadRequest<'_>,
        devices: Vec<Box<dyn VirtioDevice>>,
    ) -> Result<Self, MachineError> {
        if !(1..=CPUS_MAX).contains(&config.cpus) {
            return Err(MachineError::Cpus(config.cpus));
        }
        let firmware = request.protocol == Some(Protocol::Firmware);
        let max = if firmware {
            Bridge::Pc
        } else {
            Bridge::Generic
        }
        .devices_max(request.text_screen);
        if devices.len() > max {
            return Err(MachineError::Devices(devices.len(), max));
        }
        let mut layout = Layout::new(config.memory)?;
        if request.text_screen {
            let image = firmware.then_some(request.image);
            layout = layout.with_video(video_base(config.memory, image));
        }
        let (layout, memory) = if firmware {
            boot::check_firmware(request.image)?;
            let layout = layout.with_firmware(request.image.len() as u64);
            (layout, memory::allocate(&layout.ram(), config.huge_pages)?)
        } else {
            let memory = memory::allocate(&layout.ram(), config.huge_pages)?;
            let screen = request.text_screen;
            let pci = !devices.is_empty() || screen;
            let layout = boot::acpi::write_tables(&memory, layout, config.cpus, pci, screen)?;
            (layout, memory)
        };
        let loaded = boot::load(&memory, &layout, request)?;
        tracing::debug!(
            "image loaded by protocol {:?}, entered at {:#x}; memory {:#x} bytes",
            loaded.protocol,
            loaded.state.rip,
            config.memory
        );
        Ok(Self {
            config: config.clone(),
            layout,
            memory,
            loaded,
            seed: None,
            policy: None,
            forced: None,
            translation: TranslationPolicy::default(),
            uarch: true,
            reboots: firmware,
            flash: None,
            screen: request.text_screen.then(|| ScreenConfig {
                vga_bios: request.vga_bios.map(<[u8]>::to_vec),
            }),
            devices,
        })
    }

    /// Makes the machine deterministic: see [`crate::deterministic`]. `seed` seeds RDRAND and RDSEED.
    #[must_use]
    pub fn deterministic(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Adds a chip with the variables of the firmware, below its code.
    ///
    /// # Errors
    ///
    /// Both together are more than [`FIRMWARE_MAX`], or there is no firmware.
    pub fn with_firmware_vars(mut self, flash: Flash) -> Result<Self, MachineError> {
        let code = self
            .layout
            .firmware()
            .map_or(0, |code| code.end - code.start);
        if code == 0 || code + flash.size() > FIRMWARE_MAX {
            return Err(MachineError::FirmwareVars(flash.size()));
        }
        self.flash = Some(flash);
        Ok(self)
    }

    /// Makes a reset by the guest end the run, also with firmware.
    #[must_use]
    pub const fn without_reboot(mut self) -> Self {
        self.reboots = false;
        self
    }

    /// Sets when the interpreter translates the guest's code.
    #[must_use]
    pub const fn with_translation(mut self, translation: TranslationPolicy) -> Self {
        self.translation = translation;
        self
    }

    /// Sets whether the branch predictor and the caches are modelled.
    ///
    /// Without them, the performance events that depend on them count 0. See [`hindsight_cpu::uarch`].
    #[must_use]
    pub fn with_uarch(mut self, uarch: bool) -> Self {
        self.uarch = uarch;
        self
    }

    /// Lets a machine that starts in KVM change engines by `policy`; tests add `forced` changes.
    ///
    /// See [`EngineSwitch`].
    #[must_use]
    pub fn with_engine_policy(
        mut self,
        policy: EnginePolicy,
        forced: Option<ForcedSwitch>,
    ) -> Self {
        self.policy = Some(policy);
        self.forced = forced;
        self
    }

    /// Builds the machine. [`Engine::Kvm`] needs `host`.
    ///
    /// # Errors
    ///
    /// When KVM refuses, or a deterministic machine would start in KVM.
    pub fn build(
        mut self,
        host: Option<&kvm::KvmDevice>,
        sinks: Sinks,
    ) -> Result<Machine, MachineError> {
        let deterministic = self.seed.is_some();
        self.check_engine()?;
        let kvm = match (self.config.engine, host) {
            (Engine::Kvm, Some(host)) => Some(KvmParts::new(host, &self.memory, self.config.cpus)?),
            (Engine::Kvm, None) => return Err(KvmError::Missing.into()),
            (Engine::Interp, _) => None,
        };
        // Without KVM there is no other engine to change to.
        let policy = self.policy.take().filter(|_| kvm.is_some());
        let changes = policy.is_some();
        let facilities = self.config.facilities(changes)?;
        let tsc_hz = self.tsc_hz(kvm.as_ref());
        let supported = |leaf, subleaf| match (&kvm, host) {
            (Some(_), Some(host)) if changes => executed_by_both(host, leaf, subleaf),
            (Some(_), Some(host)) => executed_by_kvm(host, leaf, subleaf),
            _ => hindsight_interp::supported_cpuid(leaf, subleaf),
        };
        tracing::debug!(
            "CPU profile {}: {facilities:?}, TSC {tsc_hz} Hz",
            self.config.cpu
        );
        let board = BoardBuilder {
            config: &self.config,
            layout: &self.layout,
            facilities,
            tsc_hz,
            supported: &limit_address_bits(firmware_address_bits(&self.layout), supported),
            deterministic,
            reboots: self.reboots,
            screen: self.screen,
        }
        .build(
            self.memory,
            (policy, self.forced),
            (self.devices, self.flash),
            sinks,
        )?;
        let msrs = MsrConfig::new(facilities, tsc_hz)
            .with_cpuid(&board.package.cpuid)
            .with_uarch(self.uarch)
            .with_firmware(self.layout.firmware().is_some());
        let package = Arc::default();
        let model = |id| {
            let msrs = Msrs::in_package(msrs, Arc::clone(&package));
            let mut model = VcpuModel::new(id, msrs, board.clone());
            model.translation = self.translation;
            if self.reboots {
                model.at_reset = Some(Box::new(reset_state(&model, &self.loaded)));
            }
            model
        };
        let vcpus = match kvm {
            Some(parts) => parts.into_vcpus(&board, &self.loaded, model)?,
            None => interp_vcpus(self.config.cpus, &board, &self.loaded, self.seed, model)?,
        };
        set_first_interrupts(&board.buses.irq, self.config.cpus, self.loaded.protocol);
        Ok(Machine::from_parts(
            board,
            vcpus,
            deterministic,
            self.loaded,
        ))
    }

    /// Checks that the engine can run the machine on this host.
    fn check_engine(&self) -> Result<(), MachineError> {
        if self.seed.is_some() && self.config.engine != Engine::Interp {
            return Err(MachineError::Deterministic);
        }
        let [_, _, ecx, _] = hindsight_interp::supported_cpuid(1, 0);
        if !is_complete(self.config.cpu.model(), ecx) {
            return Err(MachineError::PortableHost);
        }
        Ok(())
    }

    /// The TSC frequency of the machine, in Hz.
    fn tsc_hz(&self, kvm: Option<&KvmParts>) -> u64 {
        match self.seed {
            Some(_) => deterministic::TSC_HZ,
            None => host_clock::tsc_hz(kvm.and_then(KvmParts::tsc_khz)),
        }
    }
}

/// The KVM side of a machine under construction.
struct KvmParts {
    vcpus: Vec<KvmVcpuFd>,
}

impl KvmParts {
    fn new(
        device: &kvm::KvmDevice,
        memory: &GuestMemoryMmap,
        cpus: usize,
    ) -> Result<Self, KvmError> {
        let vm = KvmVm::with_rom(device, memory, is_firmware)?;
        let vcpus = (0_u32..).take(cpus).map(|id| KvmVcpuFd::new(&vm, id));
        Ok(Self {
            vcpus: vcpus.collect::<Result<_, _>>()?,
        })
    }

    fn tsc_khz(&self) -> Option<u32> {
        self.vcpus.first().and_then(KvmVcpuFd::tsc_khz)
    }

    fn into_vcpus(
        self,
        board: &Board,
        loaded: &LoadedImage,
        model: impl Fn(usize) -> VcpuModel,
    ) -> Result<Vec<MachineVcpu>, MachineError> {
        let vcpus = self.vcpus.into_iter().zip(0_u32..).enumerate();
        vcpus
            .map(|(id, (fd, wide))| {
                fd.set_cpuid(wide, &board.package.cpuid)?;
                let state = first_state(id, loaded, &board.package.cpuid);
                Ok(KvmVcpu::new(fd, model(id), &state)?.into())
            })
            .collect()
    }
}

fn interp_vcpus(
    cpus: usize,
    board: &Board,
    loaded: &LoadedImage,
    seed: Option<u64>,
    model: impl Fn(usize) -> VcpuModel,
) -> Result<Vec<MachineVcpu>, MachineError> {
    let memory = board.ram.for_interpreters()?;
    let vcpus = (0..cpus).map(|id| {
        let state = first_state(id, loaded, &board.package.cpuid);
        let mut vcpu = InterpVcpu::new(memory.clone(), model(id), &state);
        if let Some(seed) = seed {
            vcpu.make_deterministic(seed);
        }
        vcpu.into()
    });
    Ok(vcpus.collect())
}

/// The inputs from which a board is built.
struct BoardBuilder<'a> {
    config: &'a MachineConfig,
    layout: &'a Layout,
    facilities: Facilities,
    tsc_hz: u64,
    /// CPUID of what the engine can execute, by leaf and subleaf.
    supported: &'a dyn Fn(u32, u32) -> CpuidRegs,
    /// Whether the clock is virtual.
    deterministic: bool,
    /// Whether a reset by the guest starts the firmware again.
    reboots: bool,
    /// The screen, if there is one.
    screen: Option<ScreenConfig>,
}

impl BoardBuilder<'_> {
    fn build(
        &self,
        memory: GuestMemoryMmap,
        (policy, forced): (Option<EnginePolicy>, Option<ForcedSwitch>),
        (devices, flash): (Vec<Box<dyn VirtioDevice>>, Option<Flash>),
        sinks: Sinks,
    ) -> Result<Arc<Board>, MachineError> {
        let cpus = self.config.cpus;
        let clock = Arc::new(if self.deterministic {
            Clock::new_virtual(self.tsc_hz)
        } else {
            Clock::host(self.tsc_hz, host_clock::read_tsc)
        });
        clock.pause();
        let bell = Arc::new(TimerBell::default());
        let end = Arc::new(RunEnd::with_resets(self.reset_policy()));
        let vcpus = Arc::new(VcpuControl::new(cpus, self.config.engine));
        let engine = EngineSwitch::new(cpus, policy, forced, vcpus.clone(), bell.clone());
        let waker = Arc::new(ThreadWaker {
            vcpus: vcpus.clone(),
            bell: bell.clone(),
        });
        let irq = Interrupts::new(cpus, clock.clone(), self.irq_config(), waker);
        let handler = RequestHandler {
            vcpus: vcpus.clone(),
            bell: bell.clone(),
            end: end.clone(),
        };
        let (nano_clock, doorbells) = (clock.clone(), vcpus.clone());
        let ram = GuestRam::new(memory);
        let pci = if self.layout.firmware().is_some() {
            PciDevices::new(Bridge::Pc, devices, ram.for_devices()?)
        } else if devices.is_empty() && self.screen.is_none() {
            PciDevices::default()
        } else {
            PciDevices::new(Bridge::Generic, devices, ram.for_devices()?)
        };
        let buses = Buses::new(
            Wiring {
                irq: Arc::new(irq),
                nanos: NanoClock::new(move || nano_clock.ns_from_ticks(nano_clock.now())),
                requests: Requests::new(move |request| handler.request(request)),
                // The vCPU leaves the interpreter after this access.
                backlog: Backlog::new(move || doorbells.ring_all()),
                layout: self.layout,
                cpus: u16::try_from(cpus).unwrap_or(u16::MAX),
                pci,
                flash,
                screen: self.screen.clone(),
            },
            sinks,
        )?;
        let stops = StopReports::new().map_err(MachineError::StopReports)?;
        Ok(Arc::new(Board {
            ram,
            buses,
            time: Timekeeping::new(clock, bell.clone()),
            package: self.package(),
            run: RunControl::new(vcpus, engine, stops, end, bell),
        }))
    }

    const fn reset_policy(&self) -> ResetPolicy {
        match (self.reboots, self.deterministic) {
            (false, _) => ResetPolicy::End,
            (true, false) => ResetPolicy::Reboot,
            (true, true) => ResetPolicy::RebootInTurn,
        }
    }

    fn package(&self) -> Package {
        let config = cpuid::CpuidConfig::new(self.config.cpu.model(), self.facilities, self.tsc_hz)
            .with_cpus(u32::try_from(self.config.cpus).unwrap_or(u32::MAX));
        Package::new(
            CpuidTable::new(&config, self.supported),
            self.facilities.contains(Facilities::SMM),
            CacheModel::new(CacheGeometry::L3),
        )
    }

    fn irq_config(&self) -> InterruptsConfig {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let host_seconds = i64::try_from(since.unwrap_or_default().as_secs()).unwrap_or(0);
        InterruptsConfig {
            rtc: RtcConfig {
                epoch_seconds: if self.deterministic {
                    deterministic::RTC_EPOCH
                } else {
                    host_seconds
                },
                memory_below_4g: self.layout.low_end(),
                memory_above_4g: self.layout.memory() - self.layout.low_end(),
            },
            lapic: LapicFeatures {
                x2apic: self.facilities.contains(Facilities::X2APIC),
                tsc_deadline: self.facilities.contains(Facilities::TSC_DEADLINE),
                ..LapicFeatures::default()
            },
        }
    }
}

/// Sets what the boot protocol defines of the local APICs.
fn set_first_interrupts(irq: &Interrupts, cpus: usize, protocol: Protocol) {
    if !matches!(protocol, Protocol::Pvh | Protocol::Elf) {
        // Firmware leaves virtual wire mode on: interrupts of the 8259 pair reach the boot processor.
        irq.set_virtual_wire();
    }
    for id in 1..cpus {
        irq.set_wait_for_sipi(id, true);
    }
}

/// The state to which a reset of the machine brings a vCPU back.
fn reset_state(model: &VcpuModel, loaded: &LoadedImage) -> ResetState {
    ResetState {
        cpu: first_state(model.id, loaded, &model.board.package.cpuid),
        msrs: model.msrs.save(),
    }
}

/// The state in which vCPU `id` starts.
///
/// The boot protocol defines that of vCPU 0; the others wait for a start-up IPI.
fn first_state(id: usize, loaded: &LoadedImage, cpuid: &CpuidTable) -> CpuState {
    let signature = u64::from(cpuid.query(1, 0, 0, 0, 0)[0]);
    if id == 0 {
        let mut state = loaded.state.clone();
        if loaded.protocol == Protocol::Firmware {
            state.gpr[gpr::RDX] = signature;
        }
        return state;
    }
    let mut state = CpuState::reset();
    state.gpr[gpr::RDX] = signature;
    state.activity = Activity::WaitForSipi;
    state
}
