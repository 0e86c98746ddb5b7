//! Access to the state and the registers of paused vCPUs.

use hindsight_cpu::state::CpuState;
use hindsight_regs::msr;

use super::core::Debugger;
use super::error::DebugError;
use crate::memory::{LinearMemory, read_state_msr, write_state_msr};
use crate::registers::{RegisterInfo, RegisterLocation, read_register, write_register};

impl Debugger {
    /// Checks that the machine is paused and has this vCPU.
    pub(super) fn require_paused(&self, vcpu: usize) -> Result<(), DebugError> {
        let count = self.states.len();
        if !self.paused {
            return Err(DebugError::Running);
        }
        if vcpu >= count {
            return Err(DebugError::NoVcpu { vcpu, count });
        }
        Ok(())
    }

    /// The state of a paused vCPU.
    ///
    /// # Errors
    ///
    /// When the machine runs or has ended, or there is no such vCPU.
    pub fn state(&mut self, vcpu: usize) -> Result<&CpuState, DebugError> {
        self.require_paused(vcpu)?;
        let cached = &mut self.states[vcpu];
        match cached {
            Some(state) => Ok(state),
            None => Ok(cached.insert(self.target.state(vcpu)?)),
        }
    }

    /// Guest memory as a paused vCPU addresses it.
    pub(crate) fn linear_memory(&mut self, vcpu: usize) -> Result<LinearMemory<'_>, DebugError> {
        self.require_paused(vcpu)?;
        let cached = &mut self.states[vcpu];
        if cached.is_none() {
            *cached = Some(self.target.state(vcpu)?);
        }
        let count = self.states.len();
        let state = self.states[vcpu].as_deref();
        Ok(LinearMemory {
            memory: self.target.memory(),
            state: state.ok_or(DebugError::NoVcpu { vcpu, count })?,
        })
    }

    /// Replaces the state of a vCPU.
    fn store_state(&mut self, vcpu: usize, state: Box<CpuState>) -> Result<(), DebugError> {
        self.target.set_state(vcpu, &state)?;
        self.states[vcpu] = Some(state);
        Ok(())
    }

    /// Reads a register, as little-endian bytes.
    pub(crate) fn read_register(
        &mut self,
        vcpu: usize,
        register: &RegisterInfo,
    ) -> Result<Vec<u8>, DebugError> {
        let state = self.state(vcpu)?;
        if let Some(value) = read_register(state, register.location, register.bytes()) {
            return Ok(value);
        }
        let missing = || DebugError::NoRegister(register.name.clone());
        let RegisterLocation::Msr(index) = register.location else {
            return Err(missing());
        };
        let value = self.read_msr(vcpu, index)?.ok_or_else(missing)?;
        Ok(value.to_le_bytes().to_vec())
    }

    /// Reads a register of at most 64 bits.
    pub(crate) fn read_register_u64(
        &mut self,
        vcpu: usize,
        register: &RegisterInfo,
    ) -> Result<u64, DebugError> {
        let bytes = self.read_register(vcpu, register)?;
        let mut wide = [0; 8];
        let len = bytes.len().min(wide.len());
        wide[..len].copy_from_slice(&bytes[..len]);
        Ok(u64::from_le_bytes(wide))
    }

    /// Writes a register from little-endian bytes.
    pub(crate) fn write_register(
        &mut self,
        vcpu: usize,
        location: RegisterLocation,
        value: &[u8],
    ) -> Result<(), DebugError> {
        if let RegisterLocation::Msr(index) = location {
            let mut wide = [0; 8];
            let len = value.len().min(8);
            wide[..len].copy_from_slice(&value[..len]);
            return self.write_msr(vcpu, index, u64::from_le_bytes(wide));
        }
        let controls = self.controls;
        let mut state = Box::new(self.state(vcpu)?.clone());
        write_register(&mut state, &controls, location, value)?;
        if location == RegisterLocation::Control(3) {
            let linear = LinearMemory {
                memory: self.target.memory(),
                state: &state,
            };
            let pdptrs = linear.load_pdptrs(state.cr3);
            if let Some(pdptrs) = pdptrs.map_err(DebugError::NotMemory)? {
                state.pdptr = pdptrs;
            }
        }
        self.store_state(vcpu, state)
    }

    /// The contents of the `g` packet.
    pub(crate) fn read_general(&mut self, vcpu: usize) -> Result<Vec<u8>, DebugError> {
        let registers = self.layout().general().to_vec();
        let mut bytes = Vec::new();
        for register in &registers {
            bytes.extend(self.read_register(vcpu, register)?);
        }
        Ok(bytes)
    }

    /// Writes the contents of a `G` packet: all registers, or none.
    pub(crate) fn write_general(&mut self, vcpu: usize, bytes: &[u8]) -> Result<(), DebugError> {
        let registers = self.layout().general().to_vec();
        let controls = self.controls;
        let mut state = Box::new(self.state(vcpu)?.clone());
        let mut rest = bytes;
        for register in &registers {
            let (value, after) =
                rest.split_at_checked(register.bytes())
                    .ok_or(DebugError::Length {
                        expected: registers.iter().map(RegisterInfo::bytes).sum(),
                        given: bytes.len(),
                    })?;
            rest = after;
            write_register(&mut state, &controls, register.location, value)?;
        }
        self.store_state(vcpu, state)
    }

    /// Reads an MSR as RDMSR does, without its side effects; `None` if the vCPU lacks it.
    pub(crate) fn read_msr(&mut self, vcpu: usize, index: u32) -> Result<Option<u64>, DebugError> {
        if let Some(value) = read_state_msr(self.state(vcpu)?, index) {
            return Ok(Some(value));
        }
        let values = self.target.read_msrs(vcpu, &[index])?;
        Ok(values.first().copied().flatten())
    }

    /// Writes an MSR as WRMSR does.
    pub(crate) fn write_msr(
        &mut self,
        vcpu: usize,
        index: u32,
        value: u64,
    ) -> Result<(), DebugError> {
        if index == msr::IA32_EFER {
            // Which bits it takes depends on other registers.
            return self.write_register(vcpu, RegisterLocation::Efer, &value.to_le_bytes());
        }
        let refused = DebugError::MsrRefused { index, value };
        let mut state = Box::new(self.state(vcpu)?.clone());
        if read_state_msr(&state, index).is_some() {
            write_state_msr(&mut state, index, value).ok_or(refused)?;
            return self.store_state(vcpu, state);
        }
        let written = self.target.write_msr(vcpu, index, value);
        // The write may have changed the vCPU's state too.
        self.states[vcpu] = None;
        if written? { Ok(()) } else { Err(refused) }
    }
}
