//! Encodes records into the bytes of a block.

use hindsight_cpu::branch::BranchClass;
use xxhash_rust::xxh3::xxh3_64;

use crate::block::{BlockInfo, HEADER_LEN, RAW_MAX, RECORDS_MAX};
use crate::event::{BranchEvent, DeviceAccess, Event};
use crate::predict::{BranchStep, BranchTables, Prediction};
use crate::varint::{put, put_difference};

/// The first byte of each record. A value below `RUN_MAX` is a run of predicted branches: their
/// number less one.
pub(crate) mod code {
    /// The longest run of predicted branches in one byte.
    pub(crate) const RUN_MAX: u8 = 0xc0;
    pub(crate) const LAST: u8 = 0xc0;
    pub(crate) const BRANCH: u8 = 0xc1;
    pub(crate) const MISPREDICTED: u8 = 0xc2;
    pub(crate) const TIME: u8 = 0xc3;
    pub(crate) const HALT: u8 = 0xc4;
    pub(crate) const DELIVERY: u8 = 0xc5;
    pub(crate) const MSR_READ: u8 = 0xc6;
    pub(crate) const MSR_READ_FAULT: u8 = 0xc7;
    pub(crate) const MSR_WRITE: u8 = 0xc8;
    pub(crate) const MSR_WRITE_FAULT: u8 = 0xc9;
    pub(crate) const PORT_READ: u8 = 0xca;
    pub(crate) const PORT_WRITE: u8 = 0xcb;
    pub(crate) const MMIO_READ: u8 = 0xcc;
    pub(crate) const MMIO_WRITE: u8 = 0xcd;
    pub(crate) const CONTROL: u8 = 0xce;
    pub(crate) const LOAD: u8 = 0xcf;
    pub(crate) const STORE: u8 = 0xd0;
    pub(crate) const TASK: u8 = 0xd1;
    pub(crate) const UNKNOWN_TASK: u8 = 0xd2;
}

/// Raw bytes at which a block is full. The other half is more than any one record takes.
const RAW_FULL: usize = RAW_MAX as usize / 2;
/// Compression level: fast, as most of the work is done by prediction.
const LEVEL: i32 = 3;

/// Values of earlier records in the block, which encoder and decoder both keep: a record has the
/// differences from them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Position {
    /// Count of instructions of the last branch.
    pub(crate) branch_at: u64,
    /// Count of instructions of the last record.
    pub(crate) at: u64,
    /// The target of the last branch.
    pub(crate) to: u64,
    /// The address of the last access.
    pub(crate) access: u64,
    /// Ticks minus instructions, at the last reading of the clock.
    pub(crate) clock: u64,
}

/// Encodes the records of one vCPU, one block after another.
#[derive(Debug)]
pub(crate) struct BlockEncoder {
    cpu: u32,
    raw: Vec<u8>,
    /// Length of the current run of predicted branches, which is not in `raw` yet.
    run: u8,
    records: u32,
    branches: u32,
    first_at: u64,
    first_ticks: u64,
    position: Position,
    predictor: BranchTables,
}

/// A block that is ready to be written.
#[derive(Debug)]
pub(crate) struct PackedBlock {
    pub(crate) info: BlockInfo,
    /// How many of the records are branches.
    pub(crate) branches: u32,
    /// Header and compressed bytes.
    pub(crate) bytes: Vec<u8>,
}

impl BlockEncoder {
    pub(crate) fn new(cpu: u32) -> Self {
        Self {
            cpu,
            raw: Vec::new(),
            run: 0,
            records: 0,
            branches: 0,
            first_at: 0,
            first_ticks: 0,
            position: Position::default(),
            predictor: BranchTables::new(),
        }
    }

    /// Whether the block must be taken before another record is added.
    pub(crate) fn is_full(&self) -> bool {
        self.records >= RECORDS_MAX || self.raw.len() >= RAW_FULL
    }

    /// Records in the block so far.
    pub(crate) const fn records(&self) -> u32 {
        self.records
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// The clock after `at` instructions, extrapolated from its last reading.
    pub(crate) const fn ticks(&self, at: u64) -> u64 {
        at.wrapping_add(self.position.clock)
    }

    /// Sets the clock without a record, while the block is empty.
    pub(crate) const fn set_clock(&mut self, at: u64, ticks: u64) {
        self.position.clock = ticks.wrapping_sub(at);
    }

    /// Adds a record. The block must not be full.
    pub(crate) fn add(&mut self, at: u64, event: &Event) {
        debug_assert!(!self.is_full());
        if self.records == 0 {
            self.first_at = at;
            self.first_ticks = self.ticks(at);
            self.position = Position {
                branch_at: at,
                at,
                clock: self.position.clock,
                ..Position::default()
            };
        }
        self.records += 1;
        if let Event::Branch(branch) = event {
            self.add_branch(at, branch);
        } else {
            self.flush_run();
            self.add_other(at, event);
        }
        self.position.at = at;
    }

    #[inline]
    fn add_branch(&mut self, at: u64, branch: &BranchEvent) {
        let &BranchEvent {
            from,
            to,
            class,
            cpl,
            to_cpl,
            mispredicted,
        } = branch;
        self.branches += 1;
        let instructions = at.wrapping_sub(self.position.branch_at);
        let step = BranchStep {
            from,
            to,
            instructions,
            class,
            cpl,
            to_cpl,
            mispredicted,
        };
        match self.predictor.learn(&step) {
            Prediction::Path => {
                self.run += 1;
                if self.run == code::RUN_MAX {
                    self.flush_run();
                }
            }
            Prediction::Last => {
                self.flush_run();
                self.raw.push(code::LAST);
            }
            Prediction::None => {
                self.flush_run();
                self.put_branch(&step);
            }
        }
        self.position.branch_at = at;
        self.position.to = to;
    }

    fn put_branch(&mut self, step: &BranchStep) {
        let code = if step.mispredicted {
            code::MISPREDICTED
        } else {
            code::BRANCH
        };
        let levels = (step.cpl & 3) << 4 | (step.to_cpl & 3) << 6;
        self.raw.extend([code, step.class as u8 | levels]);
        put(&mut self.raw, step.instructions);
        put_difference(&mut self.raw, step.from, self.position.to);
        put_difference(&mut self.raw, step.to, step.from);
    }

    fn flush_run(&mut self) {
        if self.run != 0 {
            self.raw.push(self.run - 1);
            self.run = 0;
        }
    }

    /// Writes the code and the position of a record that is not a branch.
    fn put_code(&mut self, code: u8, at: u64) {
        self.raw.push(code);
        put_difference(&mut self.raw, at, self.position.at);
    }

    fn put_numbers(&mut self, code: u8, at: u64, numbers: &[u64]) {
        self.put_code(code, at);
        for &number in numbers {
            put(&mut self.raw, number);
        }
    }

    fn add_other(&mut self, at: u64, event: &Event) {
        match *event {
            Event::Branch(_) => {}
            Event::Time { ticks } => {
                self.put_code(code::TIME, at);
                let extrapolated = self.ticks(at);
                put_difference(&mut self.raw, ticks, extrapolated);
                self.position.clock = ticks.wrapping_sub(at);
            }
            Event::Halt => self.put_code(code::HALT, at),
            Event::Delivery {
                vector,
                error_code,
                address,
            } => {
                let has = u8::from(error_code.is_some()) | u8::from(address.is_some()) << 1;
                self.put_code(code::DELIVERY, at);
                self.raw.extend([vector, has]);
                error_code
                    .into_iter()
                    .for_each(|code| put(&mut self.raw, code.into()));
                address
                    .into_iter()
                    .for_each(|address| put(&mut self.raw, address));
            }
            Event::MsrRead {
                index,
                value: Some(value),
            } => {
                self.put_numbers(code::MSR_READ, at, &[index.into(), value]);
            }
            Event::MsrRead { index, value: None } => {
                self.put_numbers(code::MSR_READ_FAULT, at, &[index.into()]);
            }
            Event::MsrWrite {
                index,
                value,
                accepted,
            } => {
                let code = if accepted {
                    code::MSR_WRITE
                } else {
                    code::MSR_WRITE_FAULT
                };
                self.put_numbers(code, at, &[index.into(), value]);
            }
            Event::Device(access) => self.add_device(at, &access),
            Event::Task(None) => self.put_code(code::UNKNOWN_TASK, at),
            Event::Task(Some(task)) => {
                self.put_numbers(code::TASK, at, &[task.pid.into(), task.tgid.into()]);
                self.raw.extend(task.comm);
            }
            Event::ControlRegister { number, value } => {
                self.put_numbers(code::CONTROL, at, &[number.into(), value]);
            }
            Event::Access {
                address,
                size,
                store,
            } => {
                self.put_code(if store { code::STORE } else { code::LOAD }, at);
                put_difference(&mut self.raw, address, self.position.access);
                put(&mut self.raw, size.into());
                self.position.access = address;
            }
        }
    }

    fn add_device(&mut self, at: u64, access: &DeviceAccess) {
        let code = match (access.port, access.write) {
            (true, false) => code::PORT_READ,
            (true, true) => code::PORT_WRITE,
            (false, false) => code::MMIO_READ,
            (false, true) => code::MMIO_WRITE,
        };
        self.put_numbers(
            code,
            at,
            &[access.address, access.size.into(), access.value],
        );
    }

    /// Takes the block and begins the next one; `None` if it has no records.
    pub(crate) fn take(&mut self) -> std::io::Result<Option<PackedBlock>> {
        if self.records == 0 {
            return Ok(None);
        }
        self.flush_run();
        let packed = zstd::bulk::compress(&self.raw, LEVEL)?;
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let info = BlockInfo {
            offset: 0,
            cpu: self.cpu,
            records: self.records,
            raw_len: len(&self.raw),
            packed_len: len(&packed),
            first_at: self.first_at,
            last_at: self.position.at,
            ticks: self.first_ticks,
            hash: xxh3_64(&packed),
        };
        let branches = self.branches;
        self.raw.clear();
        self.predictor.clear();
        (self.records, self.branches) = (0, 0);
        let mut bytes = Vec::with_capacity(HEADER_LEN + packed.len());
        bytes.extend(info.to_bytes());
        bytes.extend(packed);
        Ok(Some(PackedBlock {
            info,
            branches,
            bytes,
        }))
    }
}

/// The class with this number.
pub(crate) fn class(number: u8) -> Option<BranchClass> {
    BranchClass::ALL.get(usize::from(number)).copied()
}
