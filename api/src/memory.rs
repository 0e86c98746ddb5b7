//! Guest memory of a machine.

use hindsight_cpu::state::CpuState;
use hindsight_gdb::memory::{LinearMemory, MemoryPiece};
use hindsight_gdb::target::PhysicalMemory;

use crate::{Error, Machine};

impl Machine {
    /// Reads memory at a linear address, by the paging of processor `cpu`.
    ///
    /// # Errors
    ///
    /// When a byte is not mapped, or is not RAM.
    pub fn read_memory(&mut self, cpu: usize, address: u64, len: usize) -> Result<Vec<u8>, Error> {
        self.check_length(len)?;
        let state = self.registers(cpu)?.0;
        let linear = self.linear(&state);
        let bytes = linear.read(address, len);
        if bytes.len() == len {
            return Ok(bytes);
        }
        Err(Error::Unmapped {
            address: address.wrapping_add(bytes.len() as u64),
        })
    }

    /// Reads guest-physical memory.
    ///
    /// # Errors
    ///
    /// When a byte is not RAM.
    pub fn read_physical(&self, address: u64, len: usize) -> Result<Vec<u8>, Error> {
        self.check_length(len)?;
        let mut bytes = vec![0; len];
        let read = self.memory.read(address, &mut bytes);
        if read == len {
            return Ok(bytes);
        }
        Err(Error::Unmapped {
            address: address.wrapping_add(read as u64),
        })
    }

    /// Writes memory at a linear address, by the paging of processor `cpu`, even where the guest may
    /// only read. From here on the run is another one.
    ///
    /// # Errors
    ///
    /// When a byte is not mapped, or is not RAM. Then nothing is written.
    pub fn write_memory(&mut self, cpu: usize, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let state = self.registers(cpu)?.0;
        let pieces = self.linear(&state).pieces(address, bytes.len());
        let pieces = pieces.ok_or(Error::Unmapped { address })?;
        self.write_pieces(&pieces, bytes);
        Ok(())
    }

    /// Writes guest-physical memory. From here on the run is another one.
    ///
    /// # Errors
    ///
    /// When a byte is not RAM. Then nothing is written.
    pub fn write_physical(&mut self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let memory: &dyn PhysicalMemory = &self.memory;
        let pieces = memory.pieces(address, bytes.len());
        let pieces = pieces.ok_or(Error::Unmapped { address })?;
        self.write_pieces(&pieces, bytes);
        Ok(())
    }

    /// The guest-physical address behind a linear one, by the paging of processor `cpu`; `None` if it
    /// is not mapped.
    ///
    /// # Errors
    ///
    /// When there is no such processor.
    pub fn translate(&mut self, cpu: usize, address: u64) -> Result<Option<u64>, Error> {
        let state = self.registers(cpu)?.0;
        Ok(self.linear(&state).translate(address))
    }

    const fn linear<'a>(&'a self, state: &'a CpuState) -> LinearMemory<'a> {
        LinearMemory {
            memory: &self.memory,
            state,
        }
    }

    fn check_length(&self, len: usize) -> Result<(), Error> {
        let (len, memory) = (len as u64, self.memory_size());
        if len > memory {
            return Err(Error::Length { len, memory });
        }
        Ok(())
    }

    fn write_pieces(&mut self, pieces: &[MemoryPiece], bytes: &[u8]) {
        self.begin_write();
        for MemoryPiece { gpa, range } in pieces {
            if let Some(part) = bytes.get(range.clone()) {
                self.timeline.machine().write_memory(*gpa, part);
            }
        }
    }
}
