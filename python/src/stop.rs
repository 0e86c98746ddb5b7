//! Why a machine stopped.

use pyo3::prelude::*;

/// Why a machine stopped.
///
/// `reason` is one of: count, reached, accessed, exception, printed, predicate, asleep, exit, power-off,
/// reset, end-of-input, crash, failed, trace-full, interrupted.
#[pyclass(frozen, module = "hindsight")]
pub(crate) struct Stop(pub(crate) hindsight_api::Stop);

#[pymethods]
impl Stop {
    /// The reason in one word.
    #[getter]
    const fn reason(&self) -> &'static str {
        self.0.reason()
    }

    /// The processor that stopped; None where that is no matter.
    #[getter]
    const fn cpu(&self) -> Option<usize> {
        use hindsight_api::Stop::{Accessed, Exception, Reached};
        match self.0 {
            Reached { cpu, .. } | Accessed { cpu, .. } | Exception { cpu, .. } => Some(cpu),
            _ => None,
        }
    }

    /// The linear address that was reached or accessed; None for other reasons.
    #[getter]
    const fn address(&self) -> Option<u64> {
        use hindsight_api::Stop::{Accessed, Reached};
        match self.0 {
            Reached { address, .. } | Accessed { address, .. } => Some(address),
            _ => None,
        }
    }

    /// Whether the access is a write; None for other reasons.
    #[getter]
    const fn write(&self) -> Option<bool> {
        match self.0 {
            hindsight_api::Stop::Accessed { write, .. } => Some(write),
            _ => None,
        }
    }

    /// The vector of the exception; None for other reasons.
    #[getter]
    const fn vector(&self) -> Option<u8> {
        match self.0 {
            hindsight_api::Stop::Exception { vector, .. } => Some(vector),
            _ => None,
        }
    }

    /// The error code of the exception, if it has one.
    #[getter]
    const fn error_code(&self) -> Option<u32> {
        match self.0 {
            hindsight_api::Stop::Exception { error_code, .. } => error_code,
            _ => None,
        }
    }

    /// The code with which the guest ended the run; None for other reasons.
    #[getter]
    const fn exit_code(&self) -> Option<u32> {
        match self.0 {
            hindsight_api::Stop::Exit(code) => Some(code),
            _ => None,
        }
    }

    /// Whether the run is over: no instruction follows, unless the machine goes back.
    #[getter]
    const fn is_end(&self) -> bool {
        self.0.is_end()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<hindsight.Stop {}: {}>", self.0.reason(), self.0)
    }
}
