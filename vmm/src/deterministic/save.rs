//! Saves and restores a deterministic machine.

use hindsight_devices::clock::Ticks;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::machine::DeterministicMachine;
use super::turn::QUANTUM;
use crate::state::{MachineShape, MemorySaver, RestoreError, SNAPSHOT_VERSION, Schedule, Snapshot};
use crate::vcpu::interp::InterpVcpu;

/// The latest time of a snapshot: half of what the clock counts to, which no run reaches.
const MAX_TICKS: Ticks = Ticks::MAX / 2;

impl DeterministicMachine {
    /// The machine's configuration, which its snapshots must match.
    fn shape(&self) -> MachineShape {
        let regions = self.board.ram.map.iter();
        MachineShape {
            cpus: self.vcpus.len(),
            memory: regions.map(|r| (r.start_addr().0, r.len())).collect(),
            clock_hz: self.board.time.clock.hz(),
            cpuid: self.board.package.cpuid.clone(),
        }
    }

    /// Saves the whole machine.
    ///
    /// It flushes the TLB of every vCPU, as a processor may at any time. Only a guest that changes
    /// page tables without the flush that the architecture requires can observe it.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read.
    pub fn save(&mut self) -> Result<Snapshot, RestoreError> {
        let memory = self.memory.as_mut().map(MemorySaver::save).transpose()?;
        let (interrupts, devices) = self.board.buses.save();
        Ok(Snapshot {
            version: SNAPSHOT_VERSION,
            shape: self.shape(),
            ticks: self.board.time.clock.now(),
            schedule: self.schedule,
            vcpus: self.vcpus.iter_mut().map(InterpVcpu::save).collect(),
            interrupts,
            devices,
            cache: self.board.package.cache().save(),
            memory: memory.unwrap_or_default(),
        })
    }

    /// Restores a snapshot of a machine of the same shape. A run that has ended can run again.
    ///
    /// Output that the guest has written is not taken back.
    ///
    /// # Errors
    ///
    /// The snapshot does not fit or is invalid; the machine has not changed.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        self.check(snapshot)?;
        let old = self.save()?;
        if let Err(error) = self.apply(snapshot) {
            // The machine made `old` itself, so this fails only if memory cannot be written.
            self.apply(&old)?;
            return Err(error);
        }
        self.board.run.reopen();
        Ok(())
    }

    /// Checks what can be checked before anything is changed.
    fn check(&self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        let own = self.shape();
        let other = &snapshot.shape;
        if snapshot.version != SNAPSHOT_VERSION {
            return Err(RestoreError::Version(snapshot.version));
        }
        let parts = [
            (own.cpus != other.cpus, "vCPUs"),
            (own.memory != other.memory, "memory ranges"),
            (own.clock_hz != other.clock_hz, "clocks"),
            (own.cpuid != other.cpuid, "CPUID tables"),
            (snapshot.vcpus.len() != own.cpus, "vCPUs"),
        ];
        if let Some((_, part)) = parts.into_iter().find(|(differs, _)| *differs) {
            return Err(RestoreError::Shape(part));
        }
        let Schedule {
            turn, used, inputs, ..
        } = snapshot.schedule;
        if turn >= own.cpus || used > QUANTUM || inputs > u64::MAX / 2 {
            return Err(RestoreError::Schedule);
        }
        if snapshot.ticks > MAX_TICKS {
            return Err(RestoreError::Clock);
        }
        let saver = self.memory.as_ref();
        match saver.and_then(|saver| saver.misplaced(&snapshot.memory)) {
            Some(page) => Err(RestoreError::Page(page)),
            None => Ok(()),
        }
    }

    fn apply(&mut self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        // The order matters: the clock before the timers, devices that drive interrupt lines before
        // the interrupt controllers, and APICs before the vCPUs, which read their APIC base.
        self.board.time.clock.set(snapshot.ticks);
        self.board
            .buses
            .restore(&snapshot.interrupts, &snapshot.devices)?;
        self.board.package.cache().restore(&snapshot.cache)?;
        for (vcpu, state) in self.vcpus.iter_mut().zip(&snapshot.vcpus) {
            vcpu.restore(state)?;
        }
        if let Some(saver) = &mut self.memory {
            saver.restore(&snapshot.memory)?;
        }
        self.vcpus.iter_mut().for_each(|vcpu| {
            vcpu.vcpu.forget_translations();
        });
        self.schedule = snapshot.schedule;
        Ok(())
    }
}
