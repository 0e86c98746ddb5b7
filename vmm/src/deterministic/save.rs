//! Saving a deterministic machine, and setting it back.

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::deterministic::{DeterministicMachine, QUANTUM, Schedule};
use crate::state::{MemoryKeeper, RestoreError, Shape, Snapshot, VERSION};
use crate::vcpu::interp::InterpVcpu;

impl DeterministicMachine {
    /// What machines this one's snapshots fit.
    fn shape(&self) -> Shape {
        let regions = self.board.ram.map.iter();
        Shape {
            cpus: self.vcpus.len(),
            memory: regions.map(|r| (r.start_addr().0, r.len())).collect(),
            clock_hz: self.board.time.clock.hz(),
            cpuid: self.board.package.cpuid.clone(),
        }
    }

    /// Saves the whole machine. The processors forget their translations, as they may at any time:
    /// only a guest that changes page tables without the flush that the architecture asks for can
    /// tell.
    ///
    /// # Errors
    ///
    /// When memory cannot be read.
    pub fn save(&mut self) -> Result<Snapshot, RestoreError> {
        let memory = self.memory.as_mut().map(MemoryKeeper::save).transpose()?;
        let (interrupts, devices) = self.board.buses.save();
        Ok(Snapshot {
            version: VERSION,
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

    /// Sets the machine to a snapshot of one of its shape. A machine whose run is over can run
    /// again. Output that the guest wrote stays written.
    ///
    /// # Errors
    ///
    /// A snapshot that does not fit or cannot be; the machine is as it was.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        self.accepts(snapshot)?;
        let old = self.save()?;
        if let Err(error) = self.put(snapshot) {
            // It was just saved, and is restored in the same order.
            self.put(&old)?;
            return Err(error);
        }
        self.board.run.reopen();
        Ok(())
    }

    /// What can be checked before anything is changed.
    fn accepts(&self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        let own = self.shape();
        let other = &snapshot.shape;
        if snapshot.version != VERSION {
            return Err(RestoreError::Version(snapshot.version));
        }
        let differ = [
            (own.cpus != other.cpus, "processors"),
            (own.memory != other.memory, "memory ranges"),
            (own.clock_hz != other.clock_hz, "clocks"),
            (own.cpuid != other.cpuid, "CPUID tables"),
            (snapshot.vcpus.len() != own.cpus, "processors"),
        ];
        if let Some((_, what)) = differ.into_iter().find(|(differ, _)| *differ) {
            return Err(RestoreError::Shape(what));
        }
        let Schedule { turn, used, .. } = snapshot.schedule;
        if turn >= own.cpus || used > QUANTUM {
            return Err(RestoreError::Schedule);
        }
        let keeper = self.memory.as_ref();
        match keeper.and_then(|keeper| keeper.misplaced(&snapshot.memory)) {
            Some(page) => Err(RestoreError::Page(page)),
            None => Ok(()),
        }
    }

    fn put(&mut self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        // The order counts: timers are restored at their time, what drives interrupt lines before
        // what the lines go to, and APICs before the processors that ask where their page is.
        self.board.time.clock.set(snapshot.ticks);
        self.board
            .buses
            .restore(&snapshot.interrupts, &snapshot.devices)?;
        self.board.package.cache().restore(&snapshot.cache)?;
        for (vcpu, state) in self.vcpus.iter_mut().zip(&snapshot.vcpus) {
            vcpu.restore(state)?;
        }
        if let Some(keeper) = &mut self.memory {
            keeper.restore(&snapshot.memory)?;
        }
        self.vcpus.iter_mut().for_each(|vcpu| {
            vcpu.vcpu.forget_translations();
        });
        self.schedule = snapshot.schedule;
        Ok(())
    }
}
