//! The Python package `hindsight`, which runs Hindsight's deterministic machines.
//!
//! Classes and methods are those of [`hindsight_api`]; arrays are numpy's. `hindsight/__init__.pyi` has
//! the types that checkers see.

mod machine;
mod options;
mod stop;
mod trace;

use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(
    hindsight,
    Error,
    PyRuntimeError,
    "A machine does not do what is required: the message says why, and the way out."
);

/// An error of the machine as a Python exception, with its causes.
fn to_python(error: &hindsight_api::Error) -> PyErr {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    Error::new_err(text)
}

/// Run deterministic virtual machines: boot them, stop them anywhere, inspect and trace them, go back.
#[pymodule]
fn _hindsight(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<machine::Machine>()?;
    module.add_class::<machine::MachineSnapshot>()?;
    module.add_class::<stop::Stop>()?;
    module.add_class::<trace::TraceArrays>()?;
    module.add("Error", module.py().get_type::<Error>())?;
    module.add("KINDS", trace::KINDS)?;
    module.add("REGISTERS", hindsight_api::REGISTER_NAMES.to_vec())
}
