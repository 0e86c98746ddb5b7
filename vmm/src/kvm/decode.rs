//! Decodes the kvm_run page into a [`KvmExit`].

#![expect(
    unsafe_code,
    reason = "reads the union and the data area of the kvm_run page"
)]

use kvm_bindings::{
    KVM_EXIT_DEBUG, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_HLT, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR,
    KVM_EXIT_IO, KVM_EXIT_IO_IN, KVM_EXIT_IRQ_WINDOW_OPEN, KVM_EXIT_MEMORY_FAULT, KVM_EXIT_MMIO,
    KVM_EXIT_SET_TPR, KVM_EXIT_SHUTDOWN, KVM_EXIT_X86_RDMSR, KVM_EXIT_X86_WRMSR, kvm_run,
};

use crate::kvm::exit::{InternalError, KvmExit, MsrReply, PortData};

/// KVM_INTERNAL_ERROR_EMULATION.
const SUBERROR_EMULATION: u32 = 1;
/// KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES.
const FLAG_INSTRUCTION_BYTES: u64 = 1;
/// Maximum number of bytes of instruction that KVM reports.
const INSTRUCTION_BYTES: usize = 15;

/// Decodes the exit that KVM_RUN reported by returning 0.
///
/// # Safety
///
/// `run` is the kvm_run page of a vCPU, mapped with its data area, and nothing has changed
/// `exit_reason` or the union since KVM_RUN last returned.
pub(super) unsafe fn decode(run: &mut kvm_run) -> KvmExit<'_> {
    match run.exit_reason {
        // SAFETY: the caller's guarantee, and the exit reason is KVM_EXIT_IO.
        KVM_EXIT_IO => unsafe { io(run) },
        KVM_EXIT_MMIO => mmio(run),
        KVM_EXIT_X86_RDMSR | KVM_EXIT_X86_WRMSR => msr(run),
        KVM_EXIT_HLT => KvmExit::Halt,
        KVM_EXIT_SET_TPR => KvmExit::TprLowered,
        KVM_EXIT_IRQ_WINDOW_OPEN => KvmExit::InterruptWindow,
        KVM_EXIT_INTR => KvmExit::Kicked,
        KVM_EXIT_SHUTDOWN => KvmExit::Shutdown,
        KVM_EXIT_DEBUG => {
            // SAFETY: every member of the union is plain data, and the page is initialized.
            let arch = unsafe { run.__bindgen_anon_1.debug }.arch;
            KvmExit::Debug {
                vector: arch.exception,
                dr6: arch.dr6,
            }
        }
        KVM_EXIT_INTERNAL_ERROR => KvmExit::InternalError(read_internal_error(run)),
        KVM_EXIT_FAIL_ENTRY => {
            // SAFETY: every member of the union is plain data, and the page is initialized.
            let entry = unsafe { run.__bindgen_anon_1.fail_entry };
            KvmExit::FailEntry {
                reason: entry.hardware_entry_failure_reason,
            }
        }
        KVM_EXIT_MEMORY_FAULT => memory_fault(run),
        reason => KvmExit::Unexpected { reason },
    }
}

/// Decodes KVM_EXIT_MEMORY_FAULT, which comes with an error from KVM_RUN.
pub(super) fn memory_fault(run: &mut kvm_run) -> KvmExit<'_> {
    // SAFETY: every member of the union is plain data, and the page is initialized.
    let fault = unsafe { run.__bindgen_anon_1.memory_fault };
    KvmExit::MemoryFault { address: fault.gpa }
}

/// Decodes KVM_EXIT_IO.
///
/// # Safety
///
/// As for [`decode`], and the exit reason is KVM_EXIT_IO.
unsafe fn io(run: &mut kvm_run) -> KvmExit<'_> {
    // SAFETY: every member of the union is plain data, and the page is initialized.
    let io = unsafe { run.__bindgen_anon_1.io };
    let (size, count) = (usize::from(io.size), io.count as usize);
    let offset = usize::try_from(io.data_offset).expect("an offset in a mapping fits in usize");
    debug_assert!(
        offset >= size_of::<kvm_run>(),
        "the data area is behind the structure"
    );
    debug_assert!(size * count <= 0x1000, "KVM's data area is one page");
    // The data area is outside of `kvm_run`, so its pointer cannot be derived from the reference.
    let start = std::ptr::from_mut(run).addr() + offset;
    let start = std::ptr::with_exposed_provenance_mut::<u8>(start);
    // SAFETY: KVM guarantees that `data_offset` and the elements are inside of the mapping, which
    // the system call that made it exposed. The slice borrows `run`, so the vCPU cannot run and no
    // other reference to the data area exists meanwhile.
    let data = unsafe { std::slice::from_raw_parts_mut(start, size * count) };
    let data = if u32::from(io.direction) == KVM_EXIT_IO_IN {
        PortData::In(data)
    } else {
        PortData::Out(data)
    };
    KvmExit::Io {
        port: io.port,
        size: size.max(1),
        data,
    }
}

fn mmio(run: &mut kvm_run) -> KvmExit<'_> {
    // SAFETY: every member of the union is plain data, and the page is initialized.
    let mmio = unsafe { &mut run.__bindgen_anon_1.mmio };
    let len = (mmio.len as usize).min(mmio.data.len());
    let (address, data) = (mmio.phys_addr, &mut mmio.data[..len]);
    if mmio.is_write != 0 {
        KvmExit::MmioWrite { address, data }
    } else {
        KvmExit::MmioRead { address, data }
    }
}

fn msr(run: &mut kvm_run) -> KvmExit<'_> {
    let read = run.exit_reason == KVM_EXIT_X86_RDMSR;
    // SAFETY: every member of the union is plain data, and the page is initialized.
    let msr = unsafe { &mut run.__bindgen_anon_1.msr };
    let (index, value) = (msr.index, msr.data);
    let reply = MsrReply {
        data: &mut msr.data,
        error: &mut msr.error,
    };
    if read {
        KvmExit::Rdmsr { index, reply }
    } else {
        KvmExit::Wrmsr {
            index,
            value,
            reply,
        }
    }
}

/// Decodes KVM_EXIT_INTERNAL_ERROR; `None` at any other exit.
pub(crate) fn internal_error(run: &kvm_run) -> Option<InternalError> {
    (run.exit_reason == KVM_EXIT_INTERNAL_ERROR).then(|| read_internal_error(run))
}

fn read_internal_error(run: &kvm_run) -> InternalError {
    // SAFETY: every member of the union is plain data, and the page is initialized.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    let has_bytes = internal.suberror == SUBERROR_EMULATION
        && internal.ndata >= 3
        && internal.data[0] & FLAG_INSTRUCTION_BYTES != 0;
    let mut bytes = Vec::new();
    if has_bytes {
        // data[0] holds the flags. From data[1] on: one byte of length, 15 bytes of instruction.
        let [len, first @ ..] = internal.data[1].to_le_bytes();
        bytes.extend(first);
        bytes.extend(internal.data[2].to_le_bytes());
        bytes.truncate(usize::from(len).min(INSTRUCTION_BYTES));
    }
    InternalError {
        suberror: internal.suberror,
        bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emulation_failure(flags: u64, len: u8) -> kvm_run {
        let mut run = kvm_run {
            exit_reason: KVM_EXIT_INTERNAL_ERROR,
            ..Default::default()
        };
        // SAFETY: every member of the union is plain data, so any of them may be written.
        let internal = unsafe { &mut run.__bindgen_anon_1.internal };
        internal.suberror = SUBERROR_EMULATION;
        internal.ndata = 3;
        internal.data[0] = flags;
        internal.data[1] = u64::from_le_bytes([len, 1, 2, 3, 4, 5, 6, 7]);
        internal.data[2] = u64::from_le_bytes([8, 9, 10, 11, 12, 13, 14, 15]);
        run
    }

    #[test]
    fn internal_error_holds_the_reported_instruction_bytes() {
        let error = internal_error(&emulation_failure(1, 3)).unwrap();
        assert_eq!(error.bytes, [1, 2, 3]);
        let error = internal_error(&emulation_failure(1, 15)).unwrap();
        assert_eq!(
            error.bytes,
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
        );
    }

    #[test]
    fn internal_error_with_impossible_length_is_truncated() {
        let error = internal_error(&emulation_failure(1, 200)).unwrap();
        assert_eq!(error.bytes.len(), 15);
    }

    #[test]
    fn internal_error_without_the_flag_has_no_bytes() {
        let error = internal_error(&emulation_failure(0, 3)).unwrap();
        assert_eq!(error.bytes, [0_u8; 0]);
    }

    #[test]
    fn other_exits_have_no_internal_error() {
        let run = kvm_run {
            exit_reason: kvm_bindings::KVM_EXIT_HLT,
            ..Default::default()
        };
        assert_eq!(internal_error(&run), None);
    }
}
