//! Decodes the records of a block. The bytes are untrusted.

use crate::block::{BlockInfo, RECORDS_MAX};
use crate::encode::{Position, class, code};
use crate::event::{BranchEvent, DeviceAccess, Event, Record};
use crate::predict::{BranchStep, BranchTables, Prediction};
use crate::process::LinuxTask;
use crate::varint::{take, take_byte, take_difference};

/// Decodes the records of one block in order.
#[derive(Debug)]
pub(crate) struct BlockDecoder {
    raw: Vec<u8>,
    /// How many bytes of `raw` are used.
    used: usize,
    cpu: u32,
    /// Branches left in the current run of predicted branches.
    run: u8,
    /// Records left, by the count in the block's header.
    due: u32,
    position: Position,
    predictor: BranchTables,
}

impl BlockDecoder {
    /// A decoder of the block `info` whose bytes are `raw`.
    pub(crate) fn new(info: &BlockInfo, raw: Vec<u8>) -> Self {
        Self {
            raw,
            used: 0,
            cpu: info.cpu,
            run: 0,
            due: info.records.min(RECORDS_MAX),
            position: Position {
                branch_at: info.first_at,
                at: info.first_at,
                clock: info.ticks.wrapping_sub(info.first_at),
                ..Position::default()
            },
            predictor: BranchTables::new(),
        }
    }

    /// The next record; `Ok(None)` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Record>, &'static str> {
        if self.due == 0 {
            let complete = self.used == self.raw.len() && self.run == 0;
            return complete
                .then_some(None)
                .ok_or("it has more records than its header says");
        }
        self.due -= 1;
        let event = if self.run > 0 {
            self.run -= 1;
            self.branch(Prediction::Path)
        } else {
            self.coded()
        };
        let event = event.ok_or("its records are malformed")?;
        let ticks = self.position.at.wrapping_add(self.position.clock);
        Ok(Some(Record {
            cpu: self.cpu,
            at: self.position.at,
            ticks,
            event,
        }))
    }

    fn branch(&mut self, prediction: Prediction) -> Option<Event> {
        let step = self.predictor.predicted(prediction)?;
        Some(self.take_step(step))
    }

    fn take_step(&mut self, step: BranchStep) -> Event {
        self.predictor.learn(&step);
        let at = self.position.branch_at.wrapping_add(step.instructions);
        self.position.branch_at = at;
        self.position.at = at;
        self.position.to = step.to;
        Event::Branch(BranchEvent {
            from: step.from,
            to: step.to,
            class: step.class,
            cpl: step.cpl,
            to_cpl: step.to_cpl,
            mispredicted: step.mispredicted,
        })
    }

    /// Decodes the record that begins with the next code.
    fn coded(&mut self) -> Option<Event> {
        let raw = std::mem::take(&mut self.raw);
        let mut input = raw.get(self.used..).unwrap_or_default();
        let event = match take_byte(&mut input)? {
            run @ 0..code::RUN_MAX => {
                self.run = run;
                self.branch(Prediction::Path)
            }
            code::LAST => self.branch(Prediction::Last),
            code @ (code::BRANCH | code::MISPREDICTED) => {
                let step = self.literal(&mut input, code == code::MISPREDICTED);
                step.map(|step| self.take_step(step))
            }
            code => {
                self.position.at = take_difference(&mut input, self.position.at)?;
                self.other(code, &mut input)
            }
        };
        self.used = raw.len() - input.len();
        self.raw = raw;
        event
    }

    fn literal(&self, input: &mut &[u8], mispredicted: bool) -> Option<BranchStep> {
        let kind = take_byte(input)?;
        let instructions = take(input)?;
        let from = take_difference(input, self.position.to)?;
        let to = take_difference(input, from)?;
        Some(BranchStep {
            from,
            to,
            instructions,
            class: class(kind & 0xf)?,
            cpl: kind >> 4 & 3,
            to_cpl: kind >> 6,
            mispredicted,
        })
    }

    fn other(&mut self, code: u8, input: &mut &[u8]) -> Option<Event> {
        Some(match code {
            code::TIME => {
                let at = self.position.at;
                let ticks = take_difference(input, at.wrapping_add(self.position.clock))?;
                self.position.clock = ticks.wrapping_sub(at);
                Event::Time { ticks }
            }
            code::HALT => Event::Halt,
            code::DELIVERY => {
                let (vector, has) = (take_byte(input)?, take_byte(input)?);
                let mut if_has = |bit: u8| (has & bit != 0).then(|| take(input));
                let (error_code, address) = (if_has(1), if_has(2));
                Event::Delivery {
                    vector,
                    error_code: match error_code {
                        Some(code) => Some(u32::try_from(code?).ok()?),
                        None => None,
                    },
                    address: match address {
                        Some(address) => Some(address?),
                        None => None,
                    },
                }
            }
            code::MSR_READ => Event::MsrRead {
                index: small(input)?,
                value: Some(take(input)?),
            },
            code::MSR_READ_FAULT => Event::MsrRead {
                index: small(input)?,
                value: None,
            },
            code::MSR_WRITE | code::MSR_WRITE_FAULT => Event::MsrWrite {
                index: small(input)?,
                value: take(input)?,
                accepted: code == code::MSR_WRITE,
            },
            code::PORT_READ..=code::MMIO_WRITE => Event::Device(DeviceAccess {
                port: matches!(code, code::PORT_READ | code::PORT_WRITE),
                write: matches!(code, code::PORT_WRITE | code::MMIO_WRITE),
                address: take(input)?,
                size: small(input)?,
                value: take(input)?,
            }),
            code::CONTROL => Event::ControlRegister {
                number: small(input)?,
                value: take(input)?,
            },
            code::LOAD | code::STORE => {
                let address = take_difference(input, self.position.access)?;
                self.position.access = address;
                Event::Access {
                    address,
                    size: small(input)?,
                    store: code == code::STORE,
                }
            }
            code::TASK => Event::Task(Some(LinuxTask {
                pid: small(input)?,
                tgid: small(input)?,
                comm: take_array(input)?,
            })),
            code::UNKNOWN_TASK => Event::Task(None),
            _ => return None,
        })
    }
}

/// Reads bytes; `None` if there are too few.
fn take_array<const N: usize>(input: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = input.split_first_chunk()?;
    *input = rest;
    Some(*first)
}

/// Reads a number; `None` if it does not fit into `T`.
fn small<T: TryFrom<u64>>(input: &mut &[u8]) -> Option<T> {
    T::try_from(take(input)?).ok()
}
