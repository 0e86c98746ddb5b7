//! Commands that set stops for which gdb has no command.

use std::fmt::Write as _;

use hindsight_cpu::stops::{MsrStops, PortWatchpoint};
use hindsight_regs::vector::Vector;

use super::arguments::parse_number;
use super::command::{CommandReply, failed};
use crate::breakpoints::BreakpointSet;
use crate::debugger::Debugger;
use crate::target::CommandError;

/// Maximum number of ranges of ports that are watched.
const PORT_RANGES_MAX: usize = 1000;

/// Parses an exception, by its mnemonic with or without `#`, or by its number.
fn parse_exception(text: &str) -> Result<u8, CommandError> {
    let name = text.trim_start_matches('#');
    let named = (0..32).find(|&vector| {
        let mnemonic = Vector(vector).mnemonic();
        mnemonic.is_some_and(|mnemonic| mnemonic.eq_ignore_ascii_case(name))
    });
    if let Some(vector) = named {
        return Ok(vector);
    }
    let vector = parse_number(text)?;
    u8::try_from(vector)
        .ok()
        .filter(|&vector| vector < 32)
        .ok_or_else(|| {
            failed(format!(
                "{text} is not an exception (0 to 31, or as in #PF)"
            ))
        })
}

fn parse_control_register(text: &str) -> Result<u16, CommandError> {
    match parse_number(text)? {
        number @ (0 | 2 | 3 | 4 | 8) => Ok(1 << number),
        number => Err(failed(format!(
            "there is no CR{number}: there are 0, 2, 3, 4 and 8"
        ))),
    }
}

pub(super) fn catch(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let stops = &mut debugger.breakpoints;
    match arguments {
        [] => {}
        ["off"] => {
            stops.exceptions = 0;
            stops.controls = 0;
            stops.msrs = MsrStops::None;
        }
        ["exception"] => stops.exceptions = u32::MAX,
        ["exception", names @ ..] => {
            let mut added = 0;
            for name in names {
                added |= 1 << parse_exception(name)?;
            }
            stops.exceptions |= added;
        }
        ["msr"] => stops.msrs = MsrStops::All,
        ["msr", indices @ ..] => {
            let mut list = match &stops.msrs {
                MsrStops::Only(list) => list.clone(),
                _ => Vec::new(),
            };
            for index in indices {
                let number = u32::try_from(parse_number(index)?);
                list.push(number.map_err(|_| {
                    failed(format!(
                        "{index} is not the index of an MSR (0 to 0xffffffff)"
                    ))
                })?);
            }
            stops.msrs = MsrStops::Only(list);
        }
        ["cr", numbers @ ..] if !numbers.is_empty() => {
            let mut added = 0;
            for number in numbers {
                added |= parse_control_register(number)?;
            }
            stops.controls |= added;
        }
        _ => return Err(CommandError::Usage),
    }
    Ok(caught(stops))
}

/// The stops that `catch` has set, in one line.
fn caught(stops: &BreakpointSet) -> String {
    let mut text = "caught:".to_owned();
    if stops.exceptions == u32::MAX {
        text.push_str(" all exceptions");
    } else {
        for vector in (0..32).filter(|vector| stops.exceptions >> vector & 1 != 0) {
            let vector = Vector(vector);
            match vector.mnemonic() {
                Some(_) => {
                    let _ = write!(text, " {vector}");
                }
                None => {
                    let _ = write!(text, " {}", vector.0);
                }
            }
        }
    }
    match &stops.msrs {
        MsrStops::None => {}
        MsrStops::All => text.push_str(" writes to MSRs"),
        MsrStops::Only(list) => {
            for index in list {
                let _ = write!(text, " MSR {index:#x}");
            }
        }
    }
    for number in (0..16).filter(|number| stops.controls >> number & 1 != 0) {
        let _ = write!(text, " CR{number}");
    }
    text.push_str(" triple faults");
    text
}

fn parse_port(text: &str) -> Result<u16, CommandError> {
    u16::try_from(parse_number(text)?)
        .map_err(|_| failed(format!("{text} is not a port (0 to 0xffff)")))
}

pub(super) fn watch_io(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let watched_ports = &mut debugger.breakpoints.ports;
    let (ports, read, write) = match arguments {
        [] => return Ok(watched(watched_ports)),
        ["off"] => {
            watched_ports.clear();
            return Ok(watched(watched_ports));
        }
        [ports] | [ports, "rw"] => (*ports, true, true),
        [ports, "r"] => (*ports, true, false),
        [ports, "w"] => (*ports, false, true),
        _ => return Err(CommandError::Usage),
    };
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let (first, last) = (parse_port(first)?, parse_port(last)?);
    if first > last {
        return Err(failed(format!(
            "{ports}: the first port is after the last one"
        )));
    }
    if watched_ports.len() >= PORT_RANGES_MAX {
        return Err(failed(format!(
            "{PORT_RANGES_MAX} ranges are watched already; `monitor watch-io off` removes them"
        )));
    }
    watched_ports.push(PortWatchpoint {
        first,
        last,
        read,
        write,
    });
    Ok(watched(watched_ports))
}

/// The ports that are watched, in one line.
fn watched(ports: &[PortWatchpoint]) -> String {
    let mut text = "watched:".to_owned();
    for range in ports {
        let accesses = match (range.read, range.write) {
            (true, false) => "r",
            (false, true) => "w",
            _ => "rw",
        };
        let _ = write!(text, " {:#x}-{:#x} {accesses}", range.first, range.last);
    }
    if ports.is_empty() {
        text.push_str(" no port");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_go_by_mnemonic_or_number() {
        for (text, vector) in [
            ("#PF", 14),
            ("pf", 14),
            ("14", 14),
            ("0x1f", 31),
            ("#VE", 20),
        ] {
            assert_eq!(parse_exception(text), Ok(vector), "{text}");
        }
        let error = parse_exception("99").unwrap_err().to_string();
        assert!(error.starts_with("99 is not an exception"), "{error}");
    }

    #[test]
    fn caught_stops_are_listed_in_one_line() {
        let mut stops = BreakpointSet::default();
        stops.exceptions = 1 << 14 | 1 << 2 | 1 << 30;
        stops.msrs = MsrStops::Only(vec![0xc000_0080]);
        stops.controls = 1 << 3;
        let line = "caught: NMI #PF 30 MSR 0xc0000080 CR3 triple faults";
        assert_eq!(caught(&stops), line);
    }
}
