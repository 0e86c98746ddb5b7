//! Access to guest memory.

use super::core::Debugger;
use super::error::DebugError;

impl Debugger {
    /// Reads memory at a linear address of a vCPU, up to the first byte that cannot be read.
    ///
    /// The address is guest-physical if the user has chosen that.
    pub(crate) fn read_memory(
        &mut self,
        vcpu: usize,
        at: u64,
        len: usize,
    ) -> Result<Vec<u8>, DebugError> {
        let physical = self.settings.physical;
        let linear = self.linear_memory(vcpu)?;
        let bytes = if physical {
            let mut bytes = vec![0; len];
            let count = linear.memory.read(at, &mut bytes);
            bytes.truncate(count);
            bytes
        } else {
            linear.read(at, len)
        };
        if bytes.is_empty() && len != 0 {
            return Err(DebugError::NotMemory(at));
        }
        Ok(bytes)
    }

    /// Writes memory: all of it, or none.
    pub(crate) fn write_memory(
        &mut self,
        vcpu: usize,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), DebugError> {
        let physical = self.settings.physical;
        let linear = self.linear_memory(vcpu)?;
        let pieces = if physical {
            linear.memory.pieces(at, bytes.len())
        } else {
            linear.pieces(at, bytes.len())
        };
        for piece in pieces.ok_or(DebugError::NotMemory(at))? {
            self.target.write_memory(piece.gpa, &bytes[piece.range])?;
        }
        Ok(())
    }
}
