//! Commands that show branch records: the LBR stack and the branch trace store.

use std::fmt::Write as _;

use hindsight_regs::branch::{
    CYC_CNT_MAX, DebugCtl, LBR_DEPTH, LbrCtl, LbrInfo, LbrSelect, arch_info,
};
use hindsight_regs::msr;

use super::arguments::no_arguments;
use super::command::{CommandReply, failed};
use crate::btrace::BTS_RECORD_BYTES;
use crate::debugger::Debugger;
use crate::target::CommandError;

/// How many records of the branch trace store are shown.
const BTS_RECORDS_SHOWN: usize = 32;

/// An MSR of the selected vCPU.
fn read(debugger: &mut Debugger, index: u32) -> Result<u64, CommandError> {
    let value = debugger.read_msr(debugger.selected, index)?;
    value.ok_or_else(|| failed(format!("this processor has no MSR {index:#x}")))
}

/// The names of the flags that are set, in brackets.
fn flags<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    format!("[{}]", names.join(" "))
}

fn debugctl(debugger: &mut Debugger) -> Result<String, CommandError> {
    let value = read(debugger, msr::IA32_DEBUGCTL)?;
    let names = DebugCtl::from_bits_retain(value);
    let names = flags(names.iter_names().map(|(name, _)| name));
    Ok(format!("IA32_DEBUGCTL {value:#x} {names}"))
}

pub(super) fn lbr(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let mut text = debugctl(debugger)?;
    let cpu = debugger.selected;
    if let Some(control) = debugger.read_msr(cpu, msr::IA32_LBR_CTL)? {
        return architectural(debugger, text, control);
    }
    let tos = read(debugger, msr::MSR_LASTBRANCH_TOS)?;
    // Core 2 has no filter.
    if let Some(select) = debugger.read_msr(cpu, msr::MSR_LBR_SELECT)? {
        let names = LbrSelect::from_bits_retain(select);
        let names = flags(names.iter_names().map(|(name, _)| name));
        let _ = write!(text, "  MSR_LBR_SELECT {select:#x} {names}");
    }
    let _ = writeln!(text, "  TOS {tos}");
    last_event(debugger, &mut text)?;
    let mut empty = true;
    let (first_from, first_to, depth) = stack(debugger)?;
    // The newest record first.
    for age in 0..depth {
        let entry = u32::try_from(tos.wrapping_sub(age) % depth).unwrap_or(0);
        let from = read(debugger, first_from + entry)?;
        let to = read(debugger, first_to + entry)?;
        // Before format 5 there is no such MSR, and FROM has the flags.
        let info = debugger.read_msr(cpu, msr::MSR_LBR_INFO_0 + entry)?;
        if (from, to, info.unwrap_or(0)) != (0, 0, 0) {
            empty = false;
            let details = info.map_or_else(String::new, |info| format!("  {}", details(info)));
            let _ = writeln!(text, "{entry:2} {from:#x} -> {to:#x}{details}");
        }
    }
    if empty {
        text.push_str("no branches\n");
    }
    Ok(text)
}

/// The branch before the last exception, if there was one.
fn last_event(debugger: &mut Debugger, text: &mut String) -> Result<(), CommandError> {
    let from = read(debugger, msr::MSR_LER_FROM_LIP)?;
    let to = read(debugger, msr::MSR_LER_TO_LIP)?;
    if (from, to) != (0, 0) {
        let _ = writeln!(text, "before the last exception: {from:#x} -> {to:#x}");
    }
    Ok(())
}

/// The stack of architectural LBR, the newest record first.
fn architectural(debugger: &mut Debugger, mut text: String, control: u64) -> CommandReply {
    let names = LbrCtl::from_bits_retain(control);
    let names = flags(names.iter_names().map(|(name, _)| name));
    let depth = read(debugger, msr::IA32_LBR_DEPTH)?.min(LBR_DEPTH as u64);
    let _ = writeln!(text, "  IA32_LBR_CTL {control:#x} {names}  depth {depth}");
    last_event(debugger, &mut text)?;
    let mut empty = true;
    for entry in (0..).take(usize::try_from(depth).unwrap_or(0)) {
        let from = read(debugger, msr::IA32_LBR_0_FROM_IP + entry)?;
        let to = read(debugger, msr::IA32_LBR_0_TO_IP + entry)?;
        let info = read(debugger, msr::IA32_LBR_0_INFO + entry)?;
        if (from, to, info) != (0, 0, 0) {
            empty = false;
            let kind = branch_type(info);
            let details = details(info);
            let _ = writeln!(text, "{entry:2} {from:#x} -> {to:#x}  {kind}, {details}");
        }
    }
    if empty {
        text.push_str("no branches\n");
    }
    Ok(text)
}

/// BR_TYPE in words.
fn branch_type(info: u64) -> &'static str {
    match (info & arch_info::BR_TYPE) >> arch_info::BR_TYPE_SHIFT {
        arch_info::JCC => "jcc",
        arch_info::NEAR_IND_JMP | arch_info::NEAR_REL_JMP => "jmp",
        arch_info::NEAR_IND_CALL | arch_info::NEAR_REL_CALL => "call",
        arch_info::NEAR_RET => "ret",
        _ => "other",
    }
}

/// The MSRs of LBR entry 0, and the number of entries: 32 with MSR_LBR_INFO_x, 16, or Core 2's 4.
fn stack(debugger: &mut Debugger) -> Result<(u32, u32, u64), CommandError> {
    let cpu = debugger.selected;
    let (from, to) = (msr::MSR_LASTBRANCH_0_FROM_IP, msr::MSR_LASTBRANCH_0_TO_IP);
    if debugger.read_msr(cpu, msr::MSR_LBR_INFO_0)?.is_some() {
        return Ok((from, to, LBR_DEPTH as u64));
    }
    if debugger.read_msr(cpu, from)?.is_some() {
        return Ok((from, to, LBR_DEPTH as u64 / 2));
    }
    let (from, to) = (msr::CORE_LASTBRANCH_0_FROM_IP, msr::CORE_LASTBRANCH_0_TO_IP);
    Ok((from, to, LBR_DEPTH as u64 / 8))
}

/// MSR_LBR_INFO_x in words.
fn details(info: u64) -> String {
    let mut text = format!("{} cycles", info & CYC_CNT_MAX);
    let info = LbrInfo::from_bits_retain(info);
    for (flag, word) in [
        (LbrInfo::MISPRED, "mispredicted"),
        (LbrInfo::IN_TSX, "in a transaction"),
        (LbrInfo::TSX_ABORT, "abort"),
    ] {
        if info.contains(flag) {
            let _ = write!(text, ", {word}");
        }
    }
    text
}

pub(super) fn bts(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let mut text = debugctl(debugger)?;
    let area = read(debugger, msr::IA32_DS_AREA)?;
    let _ = writeln!(text, "  IA32_DS_AREA {area:#x}");
    if area == 0 {
        return Ok(text);
    }
    let linear = debugger.linear_memory(debugger.selected)?;
    let words = |at: u64, count: usize| -> Option<Vec<u64>> {
        let bytes = linear.read(at, count * 8);
        let words = bytes
            .chunks_exact(8)
            .map(|b| b.try_into().unwrap_or([0; 8]));
        let words: Vec<u64> = words.map(u64::from_le_bytes).collect();
        (words.len() == count).then_some(words)
    };
    let Some(&[base, index, maximum, threshold]) = words(area, 4).as_deref() else {
        text.push_str("the DS management area is not mapped to memory\n");
        return Ok(text);
    };
    let _ = writeln!(
        text,
        "base {base:#x}  index {index:#x}  absolute maximum {maximum:#x}  interrupt threshold \
         {threshold:#x}"
    );
    let record_bytes = BTS_RECORD_BYTES as u64;
    let records = index.saturating_sub(base) / record_bytes;
    let _ = writeln!(text, "{records} records below the index, the newest first:");
    for record in (0..records).rev().take(BTS_RECORDS_SHOWN) {
        let at = base.wrapping_add(record * record_bytes);
        let Some(&[from, to, kind]) = words(at, 3).as_deref() else {
            let _ = writeln!(text, "{record:4} is not mapped to memory");
            break;
        };
        let _ = writeln!(text, "{record:4} {from:#x} -> {to:#x}  flags {kind:#x}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_of_a_record_name_its_flags() {
        assert_eq!(details(7), "7 cycles");
        assert_eq!(
            details(LbrInfo::MISPRED.bits() | LbrInfo::IN_TSX.bits() | 0xffff),
            "65535 cycles, mispredicted, in a transaction"
        );
        let info = arch_info::NEAR_RET << arch_info::BR_TYPE_SHIFT | 7;
        assert_eq!(
            (branch_type(info), details(info)),
            ("ret", "7 cycles".to_owned())
        );
    }
}
