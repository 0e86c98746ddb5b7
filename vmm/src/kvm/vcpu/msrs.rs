//! MSRs of a vCPU in KVM.

use kvm_bindings::{Msrs, kvm_msr_entry};

use super::KvmVcpuFd;
use super::loaded_state::{BASE_MSRS, BaseMsrs};
use crate::kvm::{KvmError, ioctl};

impl KvmVcpuFd {
    /// Sets one MSR in KVM. Returns `false` if KVM refuses it.
    ///
    /// # Errors
    ///
    /// The ioctl itself fails.
    pub fn set_msr(&self, index: u32, data: u64) -> Result<bool, KvmError> {
        Ok(self.set_msrs([(index, data)])?.is_empty())
    }

    /// Sets several MSRs in KVM, in one call if KVM accepts them all. Returns the indices of those
    /// that it refuses.
    ///
    /// # Errors
    ///
    /// The ioctl itself fails.
    pub fn set_msrs(
        &self,
        values: impl IntoIterator<Item = (u32, u64)>,
    ) -> Result<Vec<u32>, KvmError> {
        let entries: Vec<_> = values
            .into_iter()
            .map(|(index, data)| kvm_msr_entry {
                index,
                data,
                ..Default::default()
            })
            .collect();
        let mut refused = Vec::new();
        let mut rest = entries.as_slice();
        while !rest.is_empty() {
            let msrs = Msrs::from_entries(rest)
                .map_err(|_| KvmError::Lacks("space for this machine's MSRs in one call"))?;
            let done = self.fd.set_msrs(&msrs).map_err(ioctl("KVM_SET_MSRS"))?;
            // KVM stops at the first MSR that it refuses.
            let (_, after) = rest.split_at(done.min(rest.len()));
            rest = after;
            if let Some((first, after)) = after.split_first() {
                refused.push(first.index);
                rest = after;
            }
        }
        Ok(refused)
    }

    /// Sets the MSRs of the base architecture.
    pub(super) fn load_base_msrs(&self, msrs: BaseMsrs) -> Result<(), KvmError> {
        let refused = self.set_msrs(BASE_MSRS.into_iter().zip(msrs.0))?;
        let mut needed = BASE_MSRS
            .into_iter()
            .zip(msrs.0)
            .filter(|&(_, value)| value != 0);
        if needed.any(|(index, _)| refused.contains(&index)) {
            return Err(KvmError::Lacks("an MSR of the base architecture"));
        }
        Ok(())
    }

    /// The MSRs of the base architecture; 0 for those that KVM lacks.
    pub(super) fn base_msrs(&self) -> Result<BaseMsrs, KvmError> {
        let mut values = [0; BASE_MSRS.len()];
        let mut from = 0;
        while from < BASE_MSRS.len() {
            let entries: Vec<_> = BASE_MSRS[from..]
                .iter()
                .map(|&index| kvm_msr_entry {
                    index,
                    ..Default::default()
                })
                .collect();
            let mut msrs = Msrs::from_entries(&entries)
                .map_err(|_| KvmError::Lacks("space for this machine's MSRs in one call"))?;
            let done = self.fd.get_msrs(&mut msrs).map_err(ioctl("KVM_GET_MSRS"))?;
            for (value, entry) in values[from..].iter_mut().zip(&msrs.as_slice()[..done]) {
                *value = entry.data;
            }
            // KVM stops at the first MSR that it lacks.
            from += done + 1;
        }
        Ok(BaseMsrs(values))
    }
}
