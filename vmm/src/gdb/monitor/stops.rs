//! Commands that have the guest stop for something that gdb has no words for.

use std::fmt::Write as _;

use hindsight_cpu::stops::{MsrStops, PortWatchpoint};

use crate::gdb::debugger::Debugger;
use crate::gdb::monitor::{Answer, MonitorError, number, usage};
use crate::gdb::stop::EXCEPTIONS;

/// An exception by its name or number.
fn vector(text: &str) -> Result<usize, MonitorError> {
    let named = EXCEPTIONS.iter().position(|name| {
        name.trim_start_matches('#')
            .eq_ignore_ascii_case(text.trim_start_matches('#'))
    });
    if let Some(vector) = named {
        return Ok(vector);
    }
    let vector = number(text)?;
    usize::try_from(vector)
        .ok()
        .filter(|&vector| vector < 32)
        .ok_or_else(|| MonitorError::Bad(format!("{text} is not an exception (0 to 31, or #PF)")))
}

pub(super) fn catch(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
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
            let mut wanted = 0;
            for name in names {
                wanted |= 1 << vector(name)?;
            }
            stops.exceptions |= wanted;
        }
        ["msr"] => stops.msrs = MsrStops::All,
        ["msr", indices @ ..] => {
            let mut list = match &stops.msrs {
                MsrStops::Only(list) => list.clone(),
                _ => Vec::new(),
            };
            for index in indices {
                let index = number(index)?;
                list.push(u32::try_from(index).map_err(|_| usage())?);
            }
            stops.msrs = MsrStops::Only(list);
        }
        ["cr", numbers @ ..] if !numbers.is_empty() => {
            let mut wanted = 0;
            for text in numbers {
                let number = number(text)?;
                if !matches!(number, 0 | 2 | 3 | 4 | 8) {
                    return Err(MonitorError::Bad(format!("there is no CR{number}")));
                }
                wanted |= 1 << number;
            }
            stops.controls |= wanted;
        }
        _ => return Err(usage()),
    }
    Ok(caught(debugger))
}

fn caught(debugger: &Debugger) -> String {
    let stops = &debugger.breakpoints;
    let mut text = "caught:".to_owned();
    if stops.exceptions == u32::MAX {
        text.push_str(" all exceptions");
    } else {
        for vector in (0..32).filter(|vector| stops.exceptions >> vector & 1 != 0) {
            match EXCEPTIONS.get(vector) {
                Some(name) => {
                    let _ = write!(text, " {name}");
                }
                None => {
                    let _ = write!(text, " {vector}");
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

pub(super) fn watch_io(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    let (ports, read, write) = match arguments {
        [] => return Ok(watched(debugger)),
        ["off"] => {
            debugger.breakpoints.ports.clear();
            return Ok(watched(debugger));
        }
        [ports] => (*ports, true, true),
        [ports, "r"] => (*ports, true, false),
        [ports, "w"] => (*ports, false, true),
        [ports, "rw"] => (*ports, true, true),
        _ => return Err(usage()),
    };
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let port = |text: &str| -> Result<u16, MonitorError> {
        u16::try_from(number(text)?)
            .map_err(|_| MonitorError::Bad(format!("{text} is not a port (0 to 0xffff)")))
    };
    let (first, last) = (port(first)?, port(last)?);
    if first > last {
        return Err(usage());
    }
    if debugger.breakpoints.ports.len() >= 1000 {
        return Err(MonitorError::Bad("too many".to_owned()));
    }
    debugger.breakpoints.ports.push(PortWatchpoint {
        first,
        last,
        read,
        write,
    });
    Ok(watched(debugger))
}

fn watched(debugger: &Debugger) -> String {
    let mut text = "watched:".to_owned();
    for watch in &debugger.breakpoints.ports {
        let way = match (watch.read, watch.write) {
            (true, false) => "r",
            (false, true) => "w",
            _ => "rw",
        };
        let _ = write!(text, " {:#x}-{:#x} {way}", watch.first, watch.last);
    }
    if debugger.breakpoints.ports.is_empty() {
        text.push_str(" no port");
    }
    text
}
