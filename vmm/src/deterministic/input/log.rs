//! The text format of an input log.
//!
//! Input is delivered at the beginning of a round of turns, so the number of the round suffices to
//! deliver it again. Instruction count and time are in the log for readers, and as a check.

use std::fmt;
use std::str::FromStr;

use hindsight_devices::clock::Ticks;
use thiserror::Error;

/// The beginning of a log: its kind and version.
pub(super) const MAGIC: &str = "hindsight-input 1";

/// Maximum number of bytes of serial input in one entry; more input makes several entries.
pub const ENTRY_MAX: usize = 1024;

/// An input of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputEvent {
    /// Bytes for COM1, 1 to [`ENTRY_MAX`].
    Serial(Vec<u8>),
    /// Scan codes of set 1 for the keyboard, 1 to [`ENTRY_MAX`] bytes.
    Keys(Vec<u8>),
    /// The user ended the run.
    Quit,
}

/// An entry of the log: an input, and when it was delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedInput {
    /// The round of turns at whose beginning it was delivered.
    pub round: u64,
    /// Instructions that all vCPUs together had retired.
    pub icount: u64,
    /// The clock.
    pub ticks: Ticks,
    /// The input.
    pub event: InputEvent,
}

impl fmt::Display for LoggedInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} ", self.round, self.icount, self.ticks)?;
        let (device, bytes) = match &self.event {
            InputEvent::Quit => return f.write_str("quit"),
            InputEvent::Serial(bytes) => ("serial", bytes),
            InputEvent::Keys(codes) => ("keys", codes),
        };
        write!(f, "{device} ")?;
        bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The machine whose input a log holds. It cannot be delivered to a different machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedMachine {
    /// Number of vCPUs.
    pub cpus: u64,
    /// Bytes of memory.
    pub memory: u64,
    /// The seed of its random numbers.
    pub seed: u64,
}

impl fmt::Display for LoggedMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpus, memory, seed } = self;
        write!(f, "cpus={cpus} memory={memory} seed={seed}")
    }
}

/// Why an input log cannot be read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}: {reason}")]
pub struct InputLogError {
    /// Line, from 1.
    pub line: usize,
    /// What is malformed there.
    pub reason: String,
}

/// An input log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputLog {
    /// The machine whose input it is.
    pub machine: LoggedMachine,
    /// The input, in the order of delivery.
    pub inputs: Vec<LoggedInput>,
}

impl FromStr for InputLog {
    type Err = InputLogError;

    fn from_str(text: &str) -> Result<Self, InputLogError> {
        let error = |line, reason: &str| InputLogError {
            line,
            reason: reason.to_owned(),
        };
        let first = text.lines().next().unwrap_or_default();
        let machine = first
            .strip_prefix(MAGIC)
            .and_then(|rest| rest.strip_prefix(' '))
            .ok_or_else(|| error(1, "not an input log of this version (hindsight-input 1)"))?;
        let machine =
            parse_machine(machine).ok_or_else(|| error(1, "expected cpus=N memory=N seed=N"))?;
        let mut inputs: Vec<LoggedInput> = Vec::new();
        for (line, text) in (2..).zip(text.lines().skip(1)) {
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let input = parse_input(text).map_err(|reason| error(line, reason))?;
            if let Some(last) = inputs.last() {
                let key = |input: &LoggedInput| (input.round, input.icount, input.ticks);
                let (old, new) = (key(last), key(&input));
                if new.0 < old.0 || new.1 < old.1 || new.2 < old.2 {
                    return Err(error(line, "earlier than the line before"));
                }
                if last.event == InputEvent::Quit {
                    return Err(error(line, "an entry follows `quit`, which ends the run"));
                }
            }
            inputs.push(input);
        }
        Ok(Self { machine, inputs })
    }
}

fn parse_machine(text: &str) -> Option<LoggedMachine> {
    let mut fields = text.split(' ');
    let mut field = |name: &str| {
        let value = fields.next()?.strip_prefix(name)?.strip_prefix('=')?;
        value.parse().ok()
    };
    let machine = LoggedMachine {
        cpus: field("cpus")?,
        memory: field("memory")?,
        seed: field("seed")?,
    };
    fields.next().is_none().then_some(machine)
}

fn parse_input(text: &str) -> Result<LoggedInput, &'static str> {
    let mut words = text.split(' ');
    let mut number = || words.next()?.parse().ok();
    let (Some(round), Some(icount), Some(ticks)) = (number(), number(), number()) else {
        return Err("expected three numbers: round, instructions, time");
    };
    let event = match (words.next(), words.next()) {
        (Some("quit"), None) => InputEvent::Quit,
        (Some("serial"), Some(hex)) => InputEvent::Serial(parse_hex(hex)?),
        (Some("keys"), Some(hex)) => InputEvent::Keys(parse_hex(hex)?),
        _ => return Err("expected `serial HEX`, `keys HEX` or `quit`"),
    };
    match words.next() {
        None => Ok(LoggedInput {
            round,
            icount,
            ticks,
            event,
        }),
        Some(_) => Err("expected the end of the line after the input"),
    }
}

fn parse_hex(text: &str) -> Result<Vec<u8>, &'static str> {
    let digits = text.as_bytes();
    if digits.is_empty() || !digits.len().is_multiple_of(2) || digits.len() / 2 > ENTRY_MAX {
        return Err("expected 1 to 1024 bytes, two digits each");
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let bytes = digits.chunks_exact(2).map(|pair| {
        let value = digit(pair[0])? << 4 | digit(pair[1])?;
        u8::try_from(value).ok()
    });
    bytes
        .collect::<Option<_>>()
        .ok_or("not a hexadecimal number")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: LoggedMachine = LoggedMachine {
        cpus: 2,
        memory: 0x10_0000,
        seed: 7,
    };

    #[test]
    fn malformed_log_is_refused_with_the_line_number() {
        let head = format!("{MAGIC} {MACHINE}\n");
        let rows = [
            ("", 1),
            ("hindsight-input 2 cpus=1 memory=1 seed=1", 1),
            ("hindsight-input 1 cpus=1 memory=1", 1),
            ("hindsight-input 1 cpus=1 memory=1 seed=1 more", 1),
            (&*format!("{head}1 2 serial 00"), 2),
            (&*format!("{head}1 2 3 serial 0"), 2),
            (&*format!("{head}1 2 3 serial +0"), 2),
            (&*format!("{head}1 2 3 serial "), 2),
            (&*format!("{head}1 2 3 keys"), 2),
            (&*format!("{head}1 2 3 serial 00 00"), 2),
            (&*format!("{head}1 2 3 mouse 00"), 2),
            (&*format!("{head}\n# so\n9 9 9 quit\n9 9 9 quit"), 5),
            (&*format!("{head}9 9 9 serial 00\n9 8 9 quit"), 3),
            (&*format!("{head}99999999999999999999 1 1 quit"), 2),
        ];
        for (text, line) in rows {
            let error = text.parse::<InputLog>().unwrap_err();
            assert_eq!(error.line, line, "{text:?}: {error}");
        }
    }
}
