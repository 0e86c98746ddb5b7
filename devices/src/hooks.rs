//! Connections of a device to its machine: an interrupt line, the time, machine requests.
//!
//! Each is a cheap, cloneable handle of a closure that the VMM supplies, so that tests of a device
//! can supply closures that collect the calls.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A request of the guest to the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineRequest {
    /// A value was written to the debug exit port; the process status is `(value << 1) | 1`.
    Exit(u32),
    /// The guest requested a reset (keyboard controller, port 0x92, port 0xcf9).
    Reset,
    /// The guest entered the ACPI soft-off state (S5).
    PowerOff,
}

/// The receiver of the devices' [`MachineRequest`]s.
///
/// The callback runs on the vCPU thread that made the access, with the device locked: it must only
/// store the request (by convention the first one is kept) and return.
#[derive(Clone)]
pub struct Requests(Arc<dyn Fn(MachineRequest) + Send + Sync>);

impl Requests {
    /// A handle that calls `notify` for each request.
    pub fn new(notify: impl Fn(MachineRequest) + Send + Sync + 'static) -> Self {
        Self(Arc::new(notify))
    }

    /// Passes `request` to the machine.
    pub fn send(&self, request: MachineRequest) {
        (self.0)(request);
    }
}

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Requests")
    }
}

/// Whether devices have left work for later, so that no access of a guest takes for ever.
#[derive(Clone)]
pub struct Backlog(Arc<BacklogShared>);

struct BacklogShared {
    waiting: AtomicBool,
    notify: Box<dyn Fn() + Send + Sync>,
}

impl Backlog {
    /// A handle that calls `notify` for each report, with the device locked.
    pub fn new(notify: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(BacklogShared {
            waiting: AtomicBool::new(false),
            notify: Box::new(notify),
        }))
    }

    /// Reports that a device has work left.
    pub fn report(&self) {
        self.0.waiting.store(true, Ordering::SeqCst);
        (self.0.notify)();
    }

    /// Whether a device has reported work since the last call. The caller then does some of it.
    pub fn take(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) && self.0.waiting.swap(false, Ordering::SeqCst)
    }
}

impl fmt::Debug for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Backlog")
    }
}

/// The device's end of one interrupt line.
#[derive(Clone)]
pub struct IrqLine(Arc<dyn Fn(bool) + Send + Sync>);

impl IrqLine {
    /// A line whose levels `set` receives, true for asserted, including repeated ones.
    pub fn new(set: impl Fn(bool) + Send + Sync + 'static) -> Self {
        Self(Arc::new(set))
    }

    /// A line that is connected to nothing.
    pub fn unconnected() -> Self {
        Self::new(|_| {})
    }

    /// Drives the line to `level`.
    pub fn set(&self, level: bool) {
        (self.0)(level);
    }
}

impl fmt::Debug for IrqLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IrqLine")
    }
}

/// The machine's time in nanoseconds since reset; never goes back.
#[derive(Clone)]
pub struct NanoClock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl NanoClock {
    /// A clock whose time `now` returns.
    pub fn new(now: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Nanoseconds since the reset of the machine.
    pub fn now(&self) -> u64 {
        (self.0)()
    }
}

impl fmt::Debug for NanoClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NanoClock")
    }
}

#[cfg(test)]
pub(crate) mod test {
    //! Handles that collect their calls.

    use std::mem;
    use std::sync::Mutex;

    use super::*;

    /// A request handle, and a function that takes the requests sent so far.
    pub fn collector() -> (Requests, impl Fn() -> Vec<MachineRequest>) {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let requests = {
            let sent = Arc::clone(&sent);
            Requests::new(move |request| sent.lock().unwrap().push(request))
        };
        (requests, move || mem::take(&mut *sent.lock().unwrap()))
    }
}
