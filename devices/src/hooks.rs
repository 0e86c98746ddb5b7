//! What a device may ask of the machine around it: an interrupt line, the time, an end.
//!
//! Each is a cheap, cloneable handle around a closure given by the VMM, so that a model can be
//! tested with a closure that records.

use std::fmt;
use std::sync::Arc;

/// What the guest asks of the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineRequest {
    /// A value was written to the debug exit port; the process status is `(value << 1) | 1`.
    Exit(u32),
    /// The guest asked for a reset (keyboard controller, port 0x92, port 0xcf9).
    Reset,
    /// The guest entered the ACPI soft-off state (S5).
    PowerOff,
}

/// Where devices put their [`MachineRequest`]s.
///
/// The callback runs on the vCPU thread that made the access, with the device locked: it must only
/// note the request (the first one wins, by convention) and return.
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

/// The device's end of one interrupt line.
#[derive(Clone)]
pub struct IrqLine(Arc<dyn Fn(bool) + Send + Sync>);

impl IrqLine {
    /// A line whose level goes to `set`, as true for asserted; repeated levels are passed on.
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
    /// A clock that asks `now`.
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
    //! A recording end for the hooks.

    use std::mem;
    use std::sync::Mutex;

    use super::*;

    /// A request handle, and a function that takes what was sent so far.
    pub fn recorder() -> (Requests, impl Fn() -> Vec<MachineRequest>) {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&sent);
        let requests = Requests::new(move |request| record.lock().unwrap().push(request));
        (requests, move || mem::take(&mut *sent.lock().unwrap()))
    }
}
