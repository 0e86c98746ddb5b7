//! Finds the address to which Linux's KASLR moved the kernel.

use super::arguments::no_arguments;
use super::command::{CommandReply, failed};
use crate::debugger::Debugger;
use crate::modes;

/// The address that kernels are linked to.
const LINK_ADDRESS: u64 = 0xffff_ffff_8100_0000;
/// The range in which a kernel may put itself, and the alignment that it keeps.
const FIRST: u64 = 0xffff_ffff_8000_0000;
const END: u64 = 0xffff_ffff_c000_0000;
const ALIGNMENT: u64 = 0x20_0000;

/// The other source of symbols.
const OWN_SYMBOLS: &str =
    "or, with the symbols that the kernel itself has: symbol-file target:/kernel";

pub(super) fn kaslr(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let linear = debugger.linear_memory(debugger.selected)?;
    let steps = (END - FIRST) / ALIGNMENT;
    let mut candidates = (0..steps).map(|step| FIRST + step * ALIGNMENT);
    let first = candidates.find(|&at| linear.translate(at).is_some());
    let text = first.filter(|_| modes::is_ia32e(linear.state));
    let text =
        text.ok_or_else(|| failed("no Linux kernel is mapped yet: continue, and try again"))?;
    if text < LINK_ADDRESS {
        // The mapping can begin before the text; a kernel that moved begins at its text.
        return Ok(format!(
            "the kernel's mapping begins at {text:#x}: it is not moved\nsymbol-file \
             vmlinux\n{OWN_SYMBOLS}"
        ));
    }
    let slide = text - LINK_ADDRESS;
    Ok(format!(
        "the kernel's text is at {text:#x}\nsymbol-file vmlinux -o {slide:#x}\n{OWN_SYMBOLS}"
    ))
}
