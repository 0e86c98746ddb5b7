//! A virtual machine of one vCPU and one stretch of memory at guest-physical 0, and an alarm that
//! kicks a vCPU out of KVM_RUN: all that a probe of this host's KVM needs.

#![expect(
    unsafe_code,
    reason = "hands guest memory to KVM, and a timer that signals this thread"
)]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::Duration;

use kvm_bindings::{KVM_CAP_MULTI_ADDRESS_SPACE, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vm_memory::{GuestMemoryError, MemoryRegionAddress};
use vmm_sys_util::signal::register_signal_handler;

/// The virtual machine. The fields drop in this order, so KVM lets go of the memory first.
#[derive(Debug)]
pub struct TinyVm {
    /// Its only vCPU.
    pub vcpu: VcpuFd,
    /// The machine itself.
    pub vm: VmFd,
    memory: GuestMemoryMmap,
}

impl TinyVm {
    /// A machine with `size` bytes of zeroed memory. `setup` runs before the vCPU is created.
    ///
    /// # Errors
    ///
    /// When KVM or the kernel refuses a step.
    pub fn new(
        kvm: &Kvm,
        size: usize,
        setup: impl FnOnce(&VmFd) -> Result<(), kvm_ioctls::Error>,
    ) -> io::Result<Self> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)])
            .map_err(|error| io::Error::other(error.to_string()))?;
        let vm = kvm.create_vm()?;
        // Some Intel hosts want these before the first vCPU; others do not have them.
        let _ = vm.set_identity_map_address(0xfffb_c000);
        let _ = vm.set_tss_address(0xfffb_d000);
        for region in memory.iter() {
            let host = region
                .get_host_address(MemoryRegionAddress(0))
                .map_err(|error| io::Error::other(error.to_string()))?;
            // Slots from here on are what system-management mode sees.
            const SMM: u32 = 1 << 16;
            let spaces = vm.check_extension_raw(u64::from(KVM_CAP_MULTI_ADDRESS_SPACE));
            for slot in if spaces > 1 { &[0, SMM][..] } else { &[0][..] } {
                let slot = kvm_userspace_memory_region {
                    slot: *slot,
                    flags: 0,
                    guest_phys_addr: 0,
                    memory_size: region.len(),
                    userspace_addr: host.addr() as u64,
                };
                // SAFETY: the range is a mapping that `memory` owns; it lives as long as `vm`, and
                // is reached only through vm-memory's volatile accesses.
                unsafe { vm.set_user_memory_region(slot) }?;
            }
        }
        setup(&vm)?;
        let vcpu = vm.create_vcpu(0)?;
        Ok(Self { vcpu, vm, memory })
    }

    /// Copies into guest memory.
    ///
    /// # Errors
    ///
    /// When the range is not all in it.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(outside)
    }

    /// Reads eight bytes of guest memory.
    ///
    /// # Errors
    ///
    /// When they are not all in it.
    pub fn read_u64(&self, address: u64) -> io::Result<u64> {
        self.memory.read_obj(GuestAddress(address)).map_err(outside)
    }
}

fn outside(error: GuestMemoryError) -> io::Error {
    io::Error::other(error.to_string())
}

/// A timer that signals the thread which made it, so that KVM_RUN there returns EINTR. It repeats,
/// so a signal that comes just before KVM_RUN costs one more period and is never lost.
#[derive(Debug)]
pub struct Alarm {
    timer: libc::timer_t,
}

extern "C" fn wake_up(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Alarm {
    /// A disarmed alarm for the calling thread.
    ///
    /// # Errors
    ///
    /// When the kernel has no timer left for us.
    pub fn new() -> io::Result<Self> {
        let signal = libc::SIGRTMIN() + 7;
        register_signal_handler(signal, wake_up)?;
        // SAFETY: all zeros is a valid sigevent.
        let mut event: libc::sigevent = unsafe { MaybeUninit::zeroed().assume_init() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        // SAFETY: it only asks for this thread's number.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer: libc::timer_t = ptr::null_mut();
        // SAFETY: both pointers are to live locals of the types the call wants.
        let result =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if result == 0 {
            Ok(Self { timer })
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Signals after `after`, and then every millisecond. Zero disarms.
    pub fn arm(&self, after: Duration) {
        let every = if after.is_zero() {
            Duration::ZERO
        } else {
            Duration::from_millis(1)
        };
        let spec = libc::itimerspec {
            it_value: timespec(after),
            it_interval: timespec(every),
        };
        // SAFETY: the timer is ours and alive, and the pointer is to a live local.
        unsafe { libc::timer_settime(self.timer, 0, &raw const spec, ptr::null_mut()) };
    }

    /// No more signals.
    pub fn disarm(&self) {
        self.arm(Duration::ZERO);
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer is ours, and nobody can use it after this.
        unsafe { libc::timer_delete(self.timer) };
    }
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(duration.subsec_nanos()),
    }
}

/// Processor time that this thread has used, guests included.
pub fn thread_time() -> Duration {
    let mut time = timespec(Duration::ZERO);
    // SAFETY: the pointer is to a live local of the type the call wants.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
}
