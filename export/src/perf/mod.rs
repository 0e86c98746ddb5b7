//! perf.data, as Linux's `perf record -b` writes it: samples with the last 32 branches.
//!
//! The layout is that of `tools/perf/Documentation/perf.data-file-format.txt` and of
//! `include/uapi/linux/perf_event.h`. Each vCPU is a thread of one process, whose mappings are the
//! image's segments of code. By default each branch is in exactly one sample.

mod processes;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, BufWriter, Seek, Write};

use hindsight_cpu::branch::BranchClass;
use hindsight_trace::{Event, LinuxTask, Record, TraceHeader};
use object::{Object, ObjectSegment, SegmentFlags};

use crate::error::ExportError;
use crate::flow::{FlowStep, Vcpus};
use crate::input::{Guest, RecordStream};
use crate::stack::CallTree;
use crate::timeline::nanoseconds;

/// Branches of a sample, as many as a processor's LBR stack has.
const DEPTH: usize = 32;
/// The process that all vCPUs are threads of.
const PID: u32 = 1;
const HEADER_LEN: u64 = 104;
const ATTR_LEN: u32 = 112;

/// PERF_SAMPLE_IP, TID, TIME, CPU, PERIOD and BRANCH_STACK.
const SAMPLE_TYPE: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 7 | 1 << 8 | 1 << 11;
/// PERF_SAMPLE_BRANCH_USER, KERNEL, ANY and TYPE_SAVE.
const BRANCH_TYPE: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 16;
/// `mmap`, `comm`, `sample_id_all` and `mmap2` of the attributes.
const ATTR_FLAGS: u64 = 1 << 8 | 1 << 9 | 1 << 18 | 1 << 23;
/// HEADER_BRANCH_STACK among the features of the file: perf shows branches.
const HAS_BRANCH_STACK: u64 = 1 << 15;
/// PERF_RECORD_MISC_USER.
const MISC_USER: u16 = 2;
/// PERF_RECORD_MISC_KERNEL.
const MISC_KERNEL: u16 = 1;

const RECORD_MMAP: u32 = 1;
const RECORD_COMM: u32 = 3;
const RECORD_FORK: u32 = 7;
const RECORD_SAMPLE: u32 = 9;
const RECORD_MMAP2: u32 = 10;

/// Little-endian fields, one after another.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a string that ends with zeros, up to a multiple of eight bytes.
    fn text(&mut self, text: &str) -> &mut Self {
        self.0
            .extend(text.bytes().filter(|&byte| byte != 0).take(1024));
        let padded = (self.0.len() + 1).next_multiple_of(8);
        self.0.resize(padded, 0);
        self
    }

    /// TID, TIME and CPU, which end every record other than a sample.
    fn sample_id(&mut self, (pid, tid): (u32, u32), cpu: u32, time: u64) -> &mut Self {
        self.u32(pid).u32(tid).u64(time).u32(cpu).u32(0)
    }

    /// The record of these fields.
    fn record(&self, kind: u32, misc: u16) -> Vec<u8> {
        let mut record = Self::default();
        let size = u16::try_from(self.0.len() + 8).unwrap_or(u16::MAX);
        record.u32(kind).u16(misc).u16(size);
        record.0.extend_from_slice(&self.0);
        record.0
    }
}

/// The kind of a branch in a branch record: PERF_BR_COND and others.
const fn branch_kind(class: BranchClass) -> u64 {
    match class {
        BranchClass::Conditional => 1,
        BranchClass::DirectJump => 2,
        BranchClass::IndirectJump => 3,
        BranchClass::DirectCall | BranchClass::CallNext => 4,
        BranchClass::IndirectCall => 5,
        BranchClass::Return => 6,
        BranchClass::SoftwareInterrupt => 7,
        BranchClass::Far => 11,
        BranchClass::Interrupt | BranchClass::Exception | BranchClass::Debug => 12,
        BranchClass::Abort | BranchClass::NotTaken => 0,
    }
}

/// State of one vCPU since its last sample.
#[derive(Default)]
struct SampledVcpu {
    /// The newest first.
    branches: VecDeque<[u64; 3]>,
    since: u64,
    sampled_at: u64,
}

/// Collects samples.
struct Samples<'a> {
    header: &'a TraceHeader,
    every: u64,
    /// The trace names processes: samples are of the task that runs, and not of the vCPU.
    has_processes: bool,
    vcpus: HashMap<u32, SampledVcpu>,
    /// The records so far, since the header needs their size.
    data: BufWriter<File>,
    len: u64,
}

impl Samples<'_> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.len += bytes.len() as u64;
        self.data.write_all(bytes)
    }

    /// Process, thread and mode of a sample after a branch.
    fn identity(&self, cpu: u32, step: &FlowStep, task: Option<LinuxTask>) -> (u32, u32, u16) {
        if !self.has_processes {
            return (PID, PID + cpu, MISC_USER);
        }
        let (tgid, pid) = task.map_or((u32::MAX, u32::MAX), |task| (task.tgid, task.pid));
        let misc = if step.branch.to_cpl == 3 {
            MISC_USER
        } else {
            MISC_KERNEL
        };
        (tgid, pid, misc)
    }

    fn add(&mut self, record: &Record, step: &FlowStep, task: Option<LinuxTask>) -> io::Result<()> {
        let (pid, tid, misc) = self.identity(record.cpu, step, task);
        let time = nanoseconds(record.ticks, self.header);
        let vcpu = self.vcpus.entry(record.cpu).or_default();
        let predicted = if step.mispredicted { 1 } else { 2 };
        let flags = predicted | branch_kind(step.branch.class) << 20;
        vcpu.branches.truncate(DEPTH - 1);
        vcpu.branches
            .push_front([step.branch.from, step.branch.to, flags]);
        vcpu.since += 1;
        if vcpu.since < self.every {
            return Ok(());
        }
        let mut fields = Fields::default();
        fields.u64(step.branch.to).u32(pid).u32(tid).u64(time);
        fields
            .u32(record.cpu)
            .u32(0)
            .u64(record.at.saturating_sub(vcpu.sampled_at));
        fields.u64(vcpu.branches.len() as u64);
        for &[from, to, flags] in &vcpu.branches {
            fields.u64(from).u64(to).u64(flags);
        }
        vcpu.since = 0;
        vcpu.sampled_at = record.at;
        self.put(&fields.record(RECORD_SAMPLE, misc))
    }
}

/// The name of the process and its mappings.
fn process(header: &TraceHeader, guest: &Guest) -> Result<Vec<u8>, ExportError> {
    let path = &header.image.path;
    let name = path.rsplit('/').next().unwrap_or(path);
    let name: String = name.chars().take(15).collect();
    let mut data = Vec::new();
    for cpu in 0..header.cpus.clamp(1, 4096) {
        let mut comm = Fields::default();
        comm.u32(PID).u32(PID + cpu).text(&name);
        comm.sample_id((PID, PID + cpu), cpu, 0);
        data.extend(comm.record(RECORD_COMM, 0));
    }
    if guest.image.is_empty() {
        return Ok(data);
    }
    let file = object::File::parse(guest.image.as_slice())?;
    for segment in file.segments() {
        let executable = match segment.flags() {
            SegmentFlags::Elf { p_flags, .. } => p_flags.0 & 1 != 0,
            _ => false,
        };
        if !executable {
            continue;
        }
        let (offset, _) = segment.file_range();
        let mut map = Fields::default();
        map.u32(PID)
            .u32(PID)
            .u64(segment.address())
            .u64(segment.size())
            .u64(offset);
        // Device, inode and its generation; PROT_READ and PROT_EXEC; MAP_PRIVATE.
        map.u32(0).u32(0).u64(0).u64(0).u32(5).u32(2);
        map.text(path).sample_id((PID, PID), 0, 0);
        data.extend(map.record(RECORD_MMAP2, MISC_USER));
    }
    Ok(data)
}

/// The header of the file and the attributes of its event, before `len` bytes of data.
fn start(len: u64, every: u64) -> Vec<u8> {
    // perf takes a period of one branch for branch trace store, whose samples have no stack.
    let every = every.max(2);
    let attrs_len = u64::from(ATTR_LEN) + 16;
    let mut fields = Fields(b"PERFILE2".to_vec());
    fields
        .u64(HEADER_LEN)
        .u64(attrs_len)
        .u64(HEADER_LEN)
        .u64(attrs_len);
    fields.u64(HEADER_LEN + attrs_len).u64(len).u64(0).u64(0);
    fields.u64(HAS_BRANCH_STACK).u64(0).u64(0).u64(0);
    // PERF_TYPE_HARDWARE and PERF_COUNT_HW_BRANCH_INSTRUCTIONS.
    fields
        .u32(0)
        .u32(ATTR_LEN)
        .u64(4)
        .u64(every)
        .u64(SAMPLE_TYPE)
        .u64(0)
        .u64(ATTR_FLAGS);
    fields
        .u32(0)
        .u32(0)
        .u64(0)
        .u64(0)
        .u64(BRANCH_TYPE)
        .u64(0)
        .u32(0)
        .u32(0)
        .u64(0);
    fields.u32(0).u16(0).u16(0);
    // No IDs: there is one event.
    fields.u64(0).u64(0);
    fields.0
}

/// Writes perf.data with a sample every `every` branches.
pub(crate) fn write(
    records: RecordStream<'_>,
    header: &TraceHeader,
    guest: &Guest,
    every: u64,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    let log = processes::records(header, &guest.processes);
    let mut samples = Samples {
        header,
        every: every.max(1),
        has_processes: !log.is_empty(),
        vcpus: HashMap::new(),
        data: BufWriter::new(tempfile::tempfile()?),
        len: 0,
    };
    if log.is_empty() {
        samples.put(&process(header, guest)?)?;
    } else {
        samples.put(&log)?;
    }
    let (mut vcpus, mut tree) = (Vcpus::new(header), CallTree::new());
    for record in records {
        let Some(record) = record else {
            vcpus.clear();
            samples.vcpus.clear();
            continue;
        };
        if let Event::Task(_) = record.event {
            // The branches of a sample are of one task.
            samples.vcpus.remove(&record.cpu);
        }
        let flow = vcpus.of(&record);
        if let Some(step) = flow.follow(&record, &mut tree, &guest.functions) {
            samples.add(&record, &step, flow.running.task)?;
        }
    }
    out.write_all(&start(samples.len, every.max(1)))?;
    let mut data = samples
        .data
        .into_inner()
        .map_err(|error| error.into_error())?;
    data.rewind()?;
    io::copy(&mut data, out)?;
    // The only feature has an empty section, right behind its own entry.
    let end = HEADER_LEN + u64::from(ATTR_LEN) + 16 + samples.len + 16;
    let mut section = Fields::default();
    section.u64(end).u64(0);
    out.write_all(&section.0)?;
    Ok(())
}
