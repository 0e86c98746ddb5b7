//! `qMemoryRegionInfo`: how a linear address is mapped, for lldb's `memory region`.

use std::ops::Range;

use crate::debugger::Debugger;
use crate::memory::LinearMemory;
use crate::memory::page_tables::{
    LinearRange, MappedRanges, NO_EXECUTE, PagingForm, SameRange, USER, WRITABLE,
};

/// Maximum number of ranges that are searched.
const RANGES_MAX: usize = 1 << 14;

/// Returns the reply for an address in the linear memory of a vCPU.
///
/// The address is guest-physical if the user has chosen that.
pub(super) fn reply(debugger: &mut Debugger, vcpu: usize, address: &[u8]) -> String {
    let address = std::str::from_utf8(address).ok();
    let Some(address) = address.and_then(|digits| u64::from_str_radix(digits, 16).ok()) else {
        return "E01".to_owned();
    };
    let (physical, cancel) = (debugger.settings.physical, debugger.cancel.clone());
    let linear = match debugger.linear_memory(vcpu) {
        Ok(linear) => linear,
        Err(error) => return format!("E.{error}."),
    };
    let form = PagingForm::new(linear.state).filter(|_| !physical);
    let Some(form) = form else {
        return ram_region(linear.memory.ram(), address);
    };
    let same = SameRange::Rights(WRITABLE | USER | NO_EXECUTE);
    let ranges = MappedRanges::find(linear.memory, &form, (same, RANGES_MAX), &cancel);
    let complete = !ranges.incomplete && ranges.found.len() <= RANGES_MAX;
    mapped_region(&linear, &ranges.found, complete, address)
}

fn region(range: Range<u64>, rights: Option<&str>) -> String {
    let size = range.end.wrapping_sub(range.start);
    let region = format!("start:{:x};size:{size:x};", range.start);
    match rights {
        Some(rights) => format!("{region}permissions:{rights};"),
        None => region,
    }
}

fn ram_region(ram: &[Range<u64>], address: u64) -> String {
    if let Some(range) = ram.iter().find(|range| range.contains(&address)) {
        return region(range.clone(), Some("rwx"));
    }
    let start = ram.iter().rfind(|range| range.end <= address);
    let end = ram.iter().find(|range| range.start > address);
    let (start, end) = (
        start.map_or(0, |r| r.end),
        end.map_or(u64::MAX, |r| r.start),
    );
    region(start..end, None)
}

/// A range ends at 2^64 as 0, and an unmapped one at the last address.
fn mapped_region(
    linear: &LinearMemory<'_>,
    ranges: &[LinearRange],
    complete: bool,
    address: u64,
) -> String {
    let after = ranges.partition_point(|range| range.start <= address);
    let (before, next) = (after.checked_sub(1).map(|i| &ranges[i]), ranges.get(after));
    if let Some(range) = before.filter(|range| address - range.start < range.len) {
        let end = range.start.wrapping_add(range.len);
        let write = if range.rights & WRITABLE != 0 {
            "w"
        } else {
            ""
        };
        let execute = if range.rights & NO_EXECUTE == 0 {
            "x"
        } else {
            ""
        };
        return region(range.start..end, Some(&format!("r{write}{execute}")));
    }
    if next.is_none() && !complete {
        return match linear.translate(address) {
            Some(_) => region(
                address & !0xfff..(address | 0xfff).wrapping_add(1),
                Some("r"),
            ),
            None => "E.the page tables are too large.".to_owned(),
        };
    }
    let start = before.map_or(0, |range| range.start.wrapping_add(range.len));
    region(start..next.map_or(u64::MAX, |range| range.start), None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_ram::FlatRam;
    use hindsight_cpu::state::CpuState;

    #[test]
    fn regions_of_ram_and_holes_cover_all_addresses() {
        let ram = [0..0x1000, 0x4000..0x5000];
        assert_eq!(
            ram_region(&ram, 0xfff),
            "start:0;size:1000;permissions:rwx;"
        );
        assert_eq!(ram_region(&ram, 0x1000), "start:1000;size:3000;");
        assert!(ram_region(&ram, u64::MAX - 1).starts_with("start:5000;"));
    }

    #[test]
    fn mapped_regions_have_rights_and_gaps_none() {
        let range = |start, rights| LinearRange {
            start,
            len: 0x1000,
            physical: 0,
            rights,
        };
        let ranges = [
            range(0x2000, WRITABLE | NO_EXECUTE),
            range(0xffff_ffff_ffff_f000, 0),
        ];
        let (ram, state) = (FlatRam::new(Vec::new()), CpuState::reset());
        let linear = LinearMemory {
            memory: &ram,
            state: &state,
        };
        let at = |address| mapped_region(&linear, &ranges, true, address);
        assert_eq!(at(0x2fff), "start:2000;size:1000;permissions:rw;");
        assert_eq!(
            at(u64::MAX),
            "start:fffffffffffff000;size:1000;permissions:rx;"
        );
        assert_eq!(at(0), "start:0;size:2000;");
        assert_eq!(at(0x3000), "start:3000;size:ffffffffffffc000;");
    }
}
