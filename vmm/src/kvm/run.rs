//! From the kvm_run page to our own [`Exit`], and nothing else.

#![expect(
    unsafe_code,
    reason = "reads the union and the data area of the kvm_run page"
)]

use kvm_bindings::{
    KVM_EXIT_DEBUG, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_HLT, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR,
    KVM_EXIT_IO, KVM_EXIT_IO_IN, KVM_EXIT_IRQ_WINDOW_OPEN, KVM_EXIT_MEMORY_FAULT, KVM_EXIT_MMIO,
    KVM_EXIT_SET_TPR, KVM_EXIT_SHUTDOWN, KVM_EXIT_X86_RDMSR, KVM_EXIT_X86_WRMSR, kvm_run,
};

use crate::kvm::exit::{Exit, InternalError, MsrReply, Port};
use crate::kvm::ioctls;

/// Decodes the exit that KVM_RUN just reported by returning 0.
pub(super) fn decode(run: &mut kvm_run) -> Exit<'_> {
    match run.exit_reason {
        KVM_EXIT_IO => io(run),
        KVM_EXIT_MMIO => mmio(run),
        KVM_EXIT_X86_RDMSR | KVM_EXIT_X86_WRMSR => msr(run),
        KVM_EXIT_HLT => Exit::Halt,
        KVM_EXIT_SET_TPR => Exit::TprLowered,
        KVM_EXIT_IRQ_WINDOW_OPEN => Exit::InterruptWindow,
        KVM_EXIT_INTR => Exit::Kicked,
        KVM_EXIT_SHUTDOWN => Exit::Shutdown,
        KVM_EXIT_DEBUG => {
            // SAFETY: the exit reason, which the kernel set, selects this member.
            let arch = unsafe { run.__bindgen_anon_1.debug }.arch;
            Exit::Debug {
                vector: arch.exception,
                dr6: arch.dr6,
            }
        }
        KVM_EXIT_INTERNAL_ERROR => Exit::InternalError(internal_error(run)),
        KVM_EXIT_FAIL_ENTRY => {
            // SAFETY: the exit reason, which the kernel set, selects this member.
            let entry = unsafe { run.__bindgen_anon_1.fail_entry };
            Exit::FailEntry {
                reason: entry.hardware_entry_failure_reason,
            }
        }
        KVM_EXIT_MEMORY_FAULT => memory_fault(run),
        reason => Exit::Unexpected { reason },
    }
}

/// KVM_EXIT_MEMORY_FAULT, which comes with an error from KVM_RUN.
pub(super) fn memory_fault(run: &mut kvm_run) -> Exit<'_> {
    // SAFETY: the exit reason, which the kernel set, selects this member.
    let fault = unsafe { run.__bindgen_anon_1.memory_fault };
    Exit::MemoryFault { address: fault.gpa }
}

fn io(run: &mut kvm_run) -> Exit<'_> {
    // SAFETY: the exit reason, which the kernel set, selects this member.
    let io = unsafe { run.__bindgen_anon_1.io };
    let (size, count) = (usize::from(io.size), io.count as usize);
    let start = std::ptr::from_mut(run).cast::<u8>();
    let offset = usize::try_from(io.data_offset).unwrap_or(0);
    // SAFETY: the kernel promises that `data_offset` and the elements lie inside of the mapping
    // that starts at `run`; the slice borrows `run`, so no other reference exists meanwhile.
    let data = unsafe { std::slice::from_raw_parts_mut(start.add(offset), size * count) };
    let data = if u32::from(io.direction) == KVM_EXIT_IO_IN {
        Port::In(data)
    } else {
        Port::Out(data)
    };
    Exit::Io {
        port: io.port,
        size: size.max(1),
        data,
    }
}

fn mmio(run: &mut kvm_run) -> Exit<'_> {
    // SAFETY: the exit reason, which the kernel set, selects this member.
    let mmio = unsafe { &mut run.__bindgen_anon_1.mmio };
    let len = (mmio.len as usize).min(mmio.data.len());
    let (address, data) = (mmio.phys_addr, &mut mmio.data[..len]);
    if mmio.is_write != 0 {
        Exit::MmioWrite { address, data }
    } else {
        Exit::MmioRead { address, data }
    }
}

fn msr(run: &mut kvm_run) -> Exit<'_> {
    let read = run.exit_reason == KVM_EXIT_X86_RDMSR;
    // SAFETY: the exit reason, which the kernel set, selects this member.
    let msr = unsafe { &mut run.__bindgen_anon_1.msr };
    let (index, value) = (msr.index, msr.data);
    let reply = MsrReply {
        data: &mut msr.data,
        error: &mut msr.error,
    };
    if read {
        Exit::Rdmsr { index, reply }
    } else {
        Exit::Wrmsr {
            index,
            value,
            reply,
        }
    }
}

fn internal_error(run: &kvm_run) -> InternalError {
    let found = ioctls::internal_error(run);
    InternalError {
        suberror: found.map_or(0, |e| e.suberror),
        bytes: found.map_or_else(Vec::new, |e| e.instruction_bytes().to_vec()),
    }
}
