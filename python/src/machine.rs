//! The class `Machine`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use hindsight_api::{Error, Events, MachineBuilder, TraceRequest, Until};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::options::{Location, Range, TextOrBytes};
use crate::stop::Stop;
use crate::to_python;
use crate::trace::TraceArrays;

/// The whole state of a machine, with what the guest wrote to its disks.
#[pyclass(frozen, module = "hindsight", name = "Snapshot")]
pub(crate) struct MachineSnapshot(hindsight_api::Snapshot);

#[pymethods]
impl MachineSnapshot {
    /// Instructions that all processors together had retired.
    #[getter]
    fn count(&self) -> u64 {
        self.0.icount()
    }

    fn __repr__(&self) -> String {
        format!("<hindsight.Snapshot at {}>", self.0.icount())
    }
}

/// The exception of a signal that stopped a run.
type Raised = Arc<Mutex<Option<PyErr>>>;

/// A deterministic virtual machine. Between two calls it stands between two instructions.
///
/// The machine boots `image`, or what the TOML file `config` says, in the interpreter: without
/// /dev/kvm, and the same way every time. `options` has further options of `hindsight run`, such as
/// {"firmware": "bios.bin"}. Disks are never changed.
#[pyclass(frozen, module = "hindsight")]
pub(crate) struct Machine {
    /// Locked without the interpreter's lock only: a run takes that lock to look for signals.
    machine: Mutex<hindsight_api::Machine>,
    raised: Raised,
    /// The thread that has locked the machine.
    user: Mutex<Option<ThreadId>>,
}

impl Machine {
    /// Calls `action` without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&mut hindsight_api::Machine) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let set_user = |user| *self.user.lock().unwrap_or_else(PoisonError::into_inner) = user;
        let user = *self.user.lock().unwrap_or_else(PoisonError::into_inner);
        if user == Some(thread::current().id()) {
            return Err(PyRuntimeError::new_err(
                "the machine runs: a signal handler cannot use it, but can raise an exception",
            ));
        }
        let (result, raised) = py.detach(|| {
            let Ok(mut machine) = self.machine.lock() else {
                let broken = "an internal error has left the machine in an unknown state";
                return (None, Some(PyRuntimeError::new_err(broken)));
            };
            set_user(Some(thread::current().id()));
            let result = action(&mut machine);
            set_user(None);
            let raised = self.raised.lock();
            let raised = raised.unwrap_or_else(PoisonError::into_inner).take();
            (Some(result), raised)
        });
        match (result, raised) {
            (Some(result), None) => result.map_err(|error| to_python(&error)),
            (_, Some(error)) => Err(error),
            (None, None) => Err(PyRuntimeError::new_err("the machine is unusable")),
        }
    }

    /// As [`Machine::with`], for what cannot fail.
    fn get<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&mut hindsight_api::Machine) -> T + Send,
    ) -> PyResult<T> {
        self.with(py, |machine| Ok(action(machine)))
    }

    fn stop(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&mut hindsight_api::Machine) -> Result<hindsight_api::Stop, Error> + Send,
    ) -> PyResult<Stop> {
        self.with(py, action).map(Stop)
    }
}

/// Stops runs when Python has a signal to handle, such as that of Ctrl-C.
fn watch_signals(machine: &mut hindsight_api::Machine, raised: Raised) {
    machine.set_poll(move || {
        Python::attach(|py| match py.check_signals() {
            Ok(()) => false,
            Err(error) => {
                *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                true
            }
        })
    });
}

#[pymethods]
impl Machine {
    #[new]
    #[pyo3(signature = (image = None, *, config = None, protocol = None, initrd = None, cmdline = None,
        memory = None, cpus = None, cpu = None, disks = Vec::new(), seed = None,
        symbols = Vec::new(), options = BTreeMap::new()),
        text_signature = "(image=None, *, config=None, protocol=None, initrd=None, cmdline=None, \
            memory=None, cpus=None, cpu=None, disks=(), seed=None, symbols=(), options={})")]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn new(
        py: Python<'_>,
        image: Option<PathBuf>,
        config: Option<PathBuf>,
        protocol: Option<String>,
        initrd: Option<PathBuf>,
        cmdline: Option<String>,
        memory: Option<String>,
        cpus: Option<usize>,
        cpu: Option<String>,
        disks: Vec<PathBuf>,
        seed: Option<u64>,
        symbols: Vec<PathBuf>,
        options: BTreeMap<String, String>,
    ) -> PyResult<Self> {
        let mut builder = image.map_or_else(MachineBuilder::default, MachineBuilder::new);
        let words = [
            ("config", config.map(PathBuf::into_os_string)),
            ("protocol", protocol.map(Into::into)),
            ("initrd", initrd.map(PathBuf::into_os_string)),
            ("cmdline", cmdline.map(Into::into)),
            ("memory", memory.map(Into::into)),
            ("cpus", cpus.map(|cpus| cpus.to_string().into())),
            ("cpu", cpu.map(Into::into)),
            ("seed", seed.map(|seed| seed.to_string().into())),
        ];
        for (name, value) in words {
            if let Some(value) = value {
                builder = builder.option(name, value);
            }
        }
        for disk in disks {
            builder = builder.disk(disk);
        }
        for (name, value) in options {
            builder = builder.option(&name, value);
        }
        for file in symbols {
            builder = builder.symbols(file);
        }
        let built = py.detach(|| builder.build());
        let mut machine = built.map_err(|error| to_python(&error))?;
        let raised = Raised::default();
        watch_signals(&mut machine, raised.clone());
        Ok(Self {
            machine: Mutex::new(machine),
            raised,
            user: Mutex::default(),
        })
    }

    /// Instructions that all processors together have retired.
    #[getter]
    fn count(&self, py: Python<'_>) -> PyResult<u64> {
        self.get(py, |machine| machine.count())
    }

    /// The lowest count to which the machine can go back.
    #[getter]
    fn begin(&self, py: Python<'_>) -> PyResult<u64> {
        self.get(py, |machine| machine.begin())
    }

    /// The machine's clock, in nanoseconds.
    #[getter]
    fn time(&self, py: Python<'_>) -> PyResult<u64> {
        self.get(py, hindsight_api::Machine::time)
    }

    /// Number of processors.
    #[getter]
    fn cpus(&self, py: Python<'_>) -> PyResult<usize> {
        self.get(py, hindsight_api::Machine::cpus)
    }

    /// The processor that executes the next instruction, unless it is halted.
    #[getter]
    fn current_cpu(&self, py: Python<'_>) -> PyResult<usize> {
        self.get(py, hindsight_api::Machine::current_cpu)
    }

    /// Guest memory, in bytes.
    #[getter]
    fn memory_size(&self, py: Python<'_>) -> PyResult<u64> {
        self.get(py, |machine| machine.memory_size())
    }

    /// What the guest has printed on COM1 and the debug console: the last megabytes.
    #[getter]
    fn output(&self, py: Python<'_>) -> PyResult<String> {
        let output = self.get(py, |machine| machine.output())?;
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    /// Return what the guest has printed since the last call.
    fn take_output(&self, py: Python<'_>) -> PyResult<String> {
        let output = self.get(py, hindsight_api::Machine::take_output)?;
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    /// Run to the end, or until nothing wakes the guest.
    fn run(&self, py: Python<'_>) -> PyResult<Stop> {
        self.stop(py, hindsight_api::Machine::run)
    }

    /// Run a number of instructions.
    fn run_for(&self, py: Python<'_>, instructions: u64) -> PyResult<Stop> {
        self.stop(py, |machine| machine.run_for(instructions))
    }

    /// Run to an instruction count. Where it is already behind, the machine does not run.
    fn run_to(&self, py: Python<'_>, count: u64) -> PyResult<Stop> {
        self.stop(py, |machine| machine.run_to(count))
    }

    /// Run until one of the conditions is met.
    ///
    /// locations: addresses or symbols of instructions, before which the machine stops.
    /// writes, reads, accesses: an address or symbol, or one with a number of bytes (8 without).
    /// raises: the vector of an exception.
    /// prints: a text that the guest prints.
    /// within: the most instructions to run.
    #[pyo3(signature = (*locations, writes = None, reads = None, accesses = None, raises = None,
        prints = None, within = None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn run_until(
        &self,
        py: Python<'_>,
        locations: Vec<Location>,
        writes: Option<Range>,
        reads: Option<Range>,
        accesses: Option<Range>,
        raises: Option<u8>,
        prints: Option<TextOrBytes>,
        within: Option<u64>,
    ) -> PyResult<Stop> {
        if raises.is_some_and(|vector| vector > 31) {
            return Err(PyValueError::new_err("exceptions have the vectors 0 to 31"));
        }
        self.stop(py, |machine| {
            let mut until = Until::new();
            for location in locations {
                until = until.reaches_address(location.find(machine)?);
            }
            if let Some(range) = writes {
                let (address, len) = range.find(machine)?;
                until = until.writes(address, len);
            }
            if let Some(range) = reads {
                let (address, len) = range.find(machine)?;
                until = until.reads(address, len);
            }
            if let Some(range) = accesses {
                let (address, len) = range.find(machine)?;
                until = until.accesses(address, len);
            }
            if let Some(vector) = raises {
                until = until.raises(vector);
            }
            if let Some(text) = prints {
                until = until.prints(text.into_bytes());
            }
            if let Some(instructions) = within {
                until = until.within(instructions);
            }
            machine.run_until(&until)
        })
    }

    /// Run until predicate(machine) is true, which is called after every so many instructions.
    #[pyo3(signature = (predicate, *, every = 10_000))]
    fn run_until_true(
        slf: &Bound<'_, Self>,
        predicate: &Bound<'_, PyAny>,
        every: u64,
    ) -> PyResult<Stop> {
        if every == 0 {
            return Err(to_python(&Error::Every));
        }
        loop {
            let stop = slf.get().run_for(slf.py(), every)?;
            if stop.0 != hindsight_api::Stop::Count {
                return Ok(stop);
            }
            if predicate.call1((slf,))?.is_truthy()? {
                return Ok(Stop(hindsight_api::Stop::Predicate));
            }
            slf.py().check_signals()?;
        }
    }

    /// Go to an instruction count, backwards or forwards. Going back undoes what was written since.
    fn seek(&self, py: Python<'_>, count: u64) -> PyResult<Stop> {
        self.stop(py, |machine| machine.seek(count))
    }

    /// Go back a number of instructions.
    fn back(&self, py: Python<'_>, instructions: u64) -> PyResult<Stop> {
        self.stop(py, |machine| machine.back(instructions))
    }

    /// Return all registers of a processor by name; segment registers are selectors.
    #[pyo3(signature = (cpu = 0))]
    fn registers(&self, py: Python<'_>, cpu: usize) -> PyResult<BTreeMap<&'static str, u64>> {
        let registers = self.with(py, |machine| machine.registers(cpu))?;
        Ok(registers.iter().collect())
    }

    /// Return the value of a register.
    #[pyo3(signature = (name, cpu = 0))]
    fn register(&self, py: Python<'_>, name: String, cpu: usize) -> PyResult<u64> {
        self.with(py, |machine| {
            let value = machine.registers(cpu)?.get(&name);
            value.ok_or(Error::Register(name))
        })
    }

    /// Set a register. From here on the run is another one.
    #[pyo3(signature = (name, value, cpu = 0))]
    fn set_register(&self, py: Python<'_>, name: &str, value: u64, cpu: usize) -> PyResult<()> {
        self.with(py, |machine| machine.set_register(cpu, name, value))
    }

    /// Read memory at a linear address, by the paging of a processor, or at a physical one.
    #[pyo3(signature = (location, size, *, cpu = 0, physical = false))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        location: Location,
        size: usize,
        cpu: usize,
        physical: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.with(py, |machine| {
            let address = location.find(machine)?;
            if physical {
                machine.read_physical(address, size)
            } else {
                machine.read_memory(cpu, address, size)
            }
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Read a little-endian number of 1, 2, 4 or 8 bytes at a linear address.
    #[pyo3(signature = (location, size = 8, *, cpu = 0))]
    fn read_int(
        &self,
        py: Python<'_>,
        location: Location,
        size: usize,
        cpu: usize,
    ) -> PyResult<u64> {
        if ![1, 2, 4, 8].contains(&size) {
            return Err(PyValueError::new_err("a number has 1, 2, 4 or 8 bytes"));
        }
        let bytes = self.with(py, |machine| {
            let address = location.find(machine)?;
            machine.read_memory(cpu, address, size)
        })?;
        let bytes = bytes.iter().rev();
        Ok(bytes.fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    /// Write memory. From here on the run is another one.
    #[pyo3(signature = (location, data, *, cpu = 0, physical = false))]
    fn write(
        &self,
        py: Python<'_>,
        location: Location,
        data: TextOrBytes,
        cpu: usize,
        physical: bool,
    ) -> PyResult<()> {
        let data = data.into_bytes();
        self.with(py, |machine| {
            let address = location.find(machine)?;
            if physical {
                machine.write_physical(address, &data)
            } else {
                machine.write_memory(cpu, address, &data)
            }
        })
    }

    /// Return the physical address behind a linear one; None if it is not mapped.
    #[pyo3(signature = (address, cpu = 0))]
    fn translate(&self, py: Python<'_>, address: u64, cpu: usize) -> PyResult<Option<u64>> {
        self.with(py, |machine| machine.translate(cpu, address))
    }

    /// Return the address of a symbol of the image, of a file of symbols, or of a Linux kernel that runs.
    fn symbol(&self, py: Python<'_>, name: &str) -> PyResult<u64> {
        self.with(py, |machine| machine.symbol(name))
    }

    /// Return the name of an address, such as "main+0x12".
    fn name_of(&self, py: Python<'_>, address: u64) -> PyResult<String> {
        self.get(py, |machine| machine.name_of(address))
    }

    /// Return address, size and name of all functions whose symbols are known.
    fn functions(&self, py: Python<'_>) -> PyResult<Vec<(u64, u64, String)>> {
        self.get(py, |machine| {
            let functions = machine.functions();
            let tuple = |f: &hindsight_api::Function| (f.address, f.size, f.name.clone());
            functions.map(tuple).collect()
        })
    }

    /// Trace what the processors do, until stop_trace().
    ///
    /// events: names with commas between them, of: branches, calls, exceptions, interrupts, msr, io,
    /// mode, accesses.
    /// cpls: the privilege levels to trace; all without.
    /// ranges: pairs of the first and the last address of code; everything without.
    /// last: keep only about this many of the last records.
    /// bytes_max: the most bytes of the trace, compressed; then the machine stops: "trace-full".
    #[pyo3(signature = (events = "branches", *, cpls = None, ranges = Vec::new(), last = None,
        bytes_max = TraceRequest::BYTES_MAX),
        text_signature = "($self, events='branches', *, cpls=None, ranges=(), last=None, \
            bytes_max=67108864)")]
    fn start_trace(
        &self,
        py: Python<'_>,
        events: &str,
        cpls: Option<Vec<u8>>,
        ranges: Vec<(u64, u64)>,
        last: Option<u64>,
        bytes_max: u64,
    ) -> PyResult<()> {
        let events: Events = events
            .parse()
            .map_err(|error| PyValueError::new_err(format!("{error}")))?;
        let mut mask = 0;
        for level in cpls.unwrap_or_else(|| vec![0, 1, 2, 3]) {
            if level > 3 {
                return Err(PyValueError::new_err("privilege levels are 0 to 3"));
            }
            mask |= 1 << level;
        }
        let request = TraceRequest {
            cpls: mask,
            ranges,
            last,
            bytes_max,
            ..events.into()
        };
        self.with(py, |machine| machine.start_trace(request))
    }

    /// End the trace and return it.
    fn stop_trace(&self, py: Python<'_>) -> PyResult<TraceArrays> {
        self.with(py, hindsight_api::Machine::stop_trace)
            .map(TraceArrays)
    }

    /// Send text or bytes to COM1. The guest gets them when it runs, as fast as it takes them.
    fn send(&self, py: Python<'_>, data: TextOrBytes) -> PyResult<()> {
        let data = data.into_bytes();
        self.with(py, |machine| machine.send(data))
    }

    /// Return the whole state of the machine, with what the guest wrote to its disks.
    fn snapshot(&self, py: Python<'_>) -> PyResult<MachineSnapshot> {
        self.with(py, hindsight_api::Machine::snapshot)
            .map(MachineSnapshot)
    }

    /// Bring the machine to the state of a machine with the same configuration.
    fn restore(&self, py: Python<'_>, snapshot: &Bound<'_, MachineSnapshot>) -> PyResult<()> {
        let snapshot = snapshot.get();
        self.with(py, |machine| machine.restore(&snapshot.0))
    }

    /// Write the whole state of the machine to a file, with what the guest wrote to its disks.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |machine| machine.save(path))
    }

    /// Bring the machine to the state in a file of save(), of a machine with the same configuration.
    fn load(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |machine| machine.load(path))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.get(py, |machine| {
            let rip = machine.registers(0).map_or(0, |registers| registers.rip());
            let name = machine.name_of(rip);
            format!("<hindsight.Machine at {}: {name}>", machine.count())
        })
    }
}
