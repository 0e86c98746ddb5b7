//! Traces as numpy's arrays.

use std::path::PathBuf;

use hindsight_api::{BranchClass, DataAccess, TakenBranch};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::to_python;

/// The names of the kinds of branches: `KINDS[branch["kind"]]`.
pub(crate) const KINDS: [&str; 14] = [
    "conditional",
    "direct-jump",
    "indirect-jump",
    "direct-call",
    "call-next",
    "indirect-call",
    "return",
    "far",
    "software-interrupt",
    "exception",
    "debug",
    "interrupt",
    "abort",
    "not-taken",
];

const _: () = assert!(KINDS.len() == BranchClass::ALL.len());

/// A field of an array: name, format and offset.
type Field = (&'static str, &'static str, usize);

const BRANCH_FIELDS: [Field; 9] = [
    ("at", "<u8", 0),
    ("time", "<u8", 8),
    ("from", "<u8", 16),
    ("to", "<u8", 24),
    ("cpu", "<u2", 32),
    ("kind", "u1", 34),
    ("cpl", "u1", 35),
    ("to_cpl", "u1", 36),
    ("mispredicted", "?", 37),
];
const BRANCH_LEN: usize = 40;

const ACCESS_FIELDS: [Field; 6] = [
    ("at", "<u8", 0),
    ("time", "<u8", 8),
    ("address", "<u8", 16),
    ("size", "<u2", 24),
    ("cpu", "<u2", 26),
    ("write", "?", 28),
];
const ACCESS_LEN: usize = 32;

/// What the processors did in a part of a run.
///
/// `len(trace)` is the number of its records.
#[pyclass(frozen, module = "hindsight", name = "Trace")]
pub(crate) struct TraceArrays(pub(crate) hindsight_api::Trace);

fn cpu(number: u32) -> [u8; 2] {
    u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes()
}

fn pack_branch(bytes: &mut Vec<u8>, branch: &TakenBranch) {
    for number in [branch.at, branch.time, branch.from, branch.to] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(cpu(branch.cpu));
    bytes.extend([branch.class as u8, branch.cpl, branch.to_cpl]);
    bytes.extend([branch.mispredicted.into(), 0, 0]);
}

fn pack_access(bytes: &mut Vec<u8>, access: &DataAccess) {
    for number in [access.at, access.time, access.address] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(access.size.to_le_bytes());
    bytes.extend(cpu(access.cpu));
    bytes.extend([access.write.into(), 0, 0, 0]);
}

/// An array of records with these fields over packed bytes. numpy is imported here, not before.
fn array<'py>(
    py: Python<'py>,
    bytes: &[u8],
    fields: &[Field],
    len: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let numpy = py.import("numpy")?;
    let description = PyDict::new(py);
    let column = |index: usize| fields.iter().map(move |field| [field.0, field.1][index]);
    description.set_item("names", column(0).collect::<Vec<_>>())?;
    description.set_item("formats", column(1).collect::<Vec<_>>())?;
    let offsets: Vec<_> = fields.iter().map(|field| field.2).collect();
    description.set_item("offsets", offsets)?;
    description.set_item("itemsize", len)?;
    let dtype = numpy.call_method1("dtype", (description,))?;
    numpy.call_method1("frombuffer", (PyBytes::new(py, bytes), dtype))
}

/// Packs records without the interpreter's lock.
fn packed<T: Send>(
    py: Python<'_>,
    records: Result<
        impl Iterator<Item = Result<T, impl Into<hindsight_api::Error>>> + Send,
        hindsight_api::Error,
    >,
    pack: fn(&mut Vec<u8>, &T),
) -> PyResult<Vec<u8>> {
    let records = records.map_err(|error| to_python(&error))?;
    let packed = py.detach(|| {
        let mut bytes = Vec::new();
        for record in records {
            // The growth of a large array can fail, and must not end the process.
            if bytes.try_reserve(BRANCH_LEN.max(ACCESS_LEN)).is_err() {
                return Ok(None);
            }
            pack(&mut bytes, &record.map_err(Into::into)?);
        }
        Ok(Some(bytes))
    });
    let packed = packed.map_err(|error: hindsight_api::Error| to_python(&error))?;
    packed.ok_or_else(|| PyMemoryError::new_err("the trace has too many records for this host"))
}

#[pymethods]
impl TraceArrays {
    /// The branches, interrupts and exceptions, as an array with the fields at, time, from, to, cpu,
    /// kind (an index of hindsight.KINDS), cpl, to_cpl and mispredicted.
    ///
    /// `at` is the number of instructions that the processor had retired, with the branch.
    fn branches<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes = packed(py, self.0.branches(), pack_branch)?;
        array(py, &bytes, &BRANCH_FIELDS, BRANCH_LEN)
    }

    /// The loads and stores, as an array with the fields at, time, address, size, cpu and write.
    ///
    /// `at` is the number of instructions that the processor had retired before: with one processor,
    /// `machine.seek(at)` goes to the instruction that accesses memory.
    fn accesses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes = packed(py, self.0.accesses(), pack_access)?;
        array(py, &bytes, &ACCESS_FIELDS, ACCESS_LEN)
    }

    /// Write the trace to a file, which `hindsight export` reads.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let written = py.detach(|| self.0.write(path));
        written.map_err(|error| to_python(&error))
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.0.len()).unwrap_or(usize::MAX)
    }

    fn __repr__(&self) -> String {
        format!("<hindsight.Trace of {} records>", self.0.len())
    }
}
