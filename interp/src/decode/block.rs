//! Decodes blocks.

#![expect(
    clippy::cast_possible_truncation,
    reason = "lengths and offsets of a block are small"
)]

use super::dead_flags::{FlagUse, remove_dead_flags};
use super::fuse::{Second, fuse};
use super::select::Selected;
use crate::code::{BlockEntry, BlockPages, mnemonic_number};
use crate::core::{Core, Op};
use crate::fault::Fault;
use crate::memory::PAGE;
use crate::mmu::{AccessKind, TlbSet};
use crate::ops::{branch, last};
use hindsight_cpu::state::seg;
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction};

/// Maximum number of instructions in a block.
const BLOCK_INSTRUCTIONS: usize = 32;
/// Maximum length of an instruction in bytes.
const INSTRUCTION_BYTES: usize = 15;
/// Bit of a block key: the block has one instruction, for exact stepping.
pub(crate) const EXACT: u8 = 0x40;
/// Bit of a block key: the block ends before the breakpoints of its linear page.
const BROKEN: u8 = 0x80;

/// The operations of a block, the numbers of its mnemonics, and its length in bytes.
struct DecodedBlock {
    ops: Vec<Op>,
    mnemonics: Vec<u16>,
    len: u16,
}

/// A block that is being built.
#[derive(Default)]
struct BlockBuilder {
    ops: Vec<Op>,
    /// How each operation uses the flags.
    flag_uses: Vec<FlagUse>,
    mnemonics: Vec<u16>,
    len: u16,
}

impl BlockBuilder {
    /// Appends the operation of an instruction, or fuses it with the operation before it.
    fn push(&mut self, insn: &Instruction, selected: Selected, record: bool) {
        let Selected {
            mut op,
            flag_use,
            facts,
        } = selected;
        // The number of instructions before it, until `finish` knows how many follow.
        op.remaining = self.mnemonics.len() as u8;
        let fused = match (self.ops.last(), self.flag_uses.last(), &facts) {
            (Some(first), Some(first_use), Some(facts)) => {
                let second = Second {
                    insn,
                    op: &op,
                    facts,
                };
                fuse(first, first_use, &second, record)
            }
            _ => None,
        };
        match fused {
            Some((both, flag_use)) => {
                self.ops.pop();
                self.flag_uses.pop();
                self.ops.push(both);
                self.flag_uses.push(flag_use);
            }
            None => {
                self.ops.push(op);
                self.flag_uses.push(flag_use);
            }
        }
        self.mnemonics.push(mnemonic_number(insn));
    }

    /// Removes dead flags, and counts the instructions from each operation to the block's end.
    fn finish(mut self) -> DecodedBlock {
        remove_dead_flags(&mut self.ops, &self.flag_uses);
        let count = self.mnemonics.len();
        debug_assert!(count <= BLOCK_INSTRUCTIONS);
        for op in &mut self.ops {
            op.remaining = count as u8 - op.remaining;
        }
        if let Some(first) = self.ops.first() {
            first.set_count(count as u32);
        }
        DecodedBlock {
            ops: self.ops,
            mnemonics: self.mnemonics,
            len: self.len,
        }
    }
}

/// Bytes of code to decode from.
struct CodeBytes {
    bytes: Vec<u8>,
    gpa: u64,
    /// Guest-physical address of the next page, if the bytes reach into it.
    second_page: Option<u64>,
}

/// Whether bytes that do not decode are an instruction of more than 15 bytes.
///
/// The decoder reports only that it needs more bytes. An instruction is too long if its first 14
/// bytes need more, and the 14 bytes after the first one do, too: only prefixes make an instruction
/// too long.
#[cold]
pub(super) fn is_too_long(bits: u32, bytes: &[u8]) -> bool {
    let needs_more = |bytes: &[u8]| {
        let mut decoder = Decoder::new(bits, bytes, DecoderOptions::NONE);
        let _ = decoder.decode();
        decoder.last_error() == DecoderError::NoMoreBytes
    };
    bytes.len() >= INSTRUCTION_BYTES
        && needs_more(&bytes[..INSTRUCTION_BYTES - 1])
        && needs_more(&bytes[1..INSTRUCTION_BYTES])
}

impl Core {
    /// Translates the address of code to guest-physical, and checks the fetch rights.
    pub(crate) fn translate_code(&mut self, lin: u64) -> Result<u64, Fault> {
        let set = if self.mode.cpl() == 3 {
            TlbSet::User
        } else {
            TlbSet::Supervisor
        };
        if self.mode.is_64bit() && !crate::seg::canonical(lin) {
            return Err(Fault::GP);
        }
        let page = self.translate(lin, AccessKind::Fetch, set)?;
        self.enter_page(lin, page, AccessKind::Fetch, set);
        Ok(page.gpa)
    }

    /// Returns the linear address of an offset in the code segment.
    pub(crate) fn code_lin(&self, rip: u64) -> u64 {
        if self.mode.is_64bit() {
            rip
        } else {
            self.cs().base.wrapping_add(rip) & 0xffff_ffff
        }
    }

    /// Decodes the block at RIP and adds it to the cache.
    pub(crate) fn decode(
        &mut self,
        rip: u64,
        gpa: u64,
        exact: bool,
    ) -> Result<BlockEntry<Self>, Fault> {
        let lin = self.code_lin(rip);
        let most = if exact { 1 } else { BLOCK_INSTRUCTIONS };
        let mut code = self.read_code(lin, gpa, most * INSTRUCTION_BYTES);
        let mut decoded = self.decode_bytes(rip, &code, most)?;
        if decoded.is_none() {
            // The first instruction continues in the next page.
            code = self.read_code_across(lin, code)?;
            decoded = self.decode_bytes(rip, &code, 1)?;
        }
        let Some(block) = decoded else {
            return Err(Fault::GP);
        };
        let len = usize::from(block.len);
        let first = len.min(Self::page_rest(lin));
        self.fetch_in_transaction(gpa, first)?;
        if let Some(second) = code.second_page {
            self.fetch_in_transaction(second, len - first)?;
        }
        let (key, linear) = self.block_key_at(lin, exact);
        self.memory.mark_code(gpa);
        if let Some(second) = code.second_page {
            self.memory.mark_code(second);
        }
        // The page has become a code page, so the TLB for writes must no longer contain it.
        self.follow_code_changes();
        let bytes = code.bytes.get(..len).unwrap_or(&code.bytes);
        let pages = BlockPages {
            second: code.second_page.filter(|_| len > first),
            linear,
        };
        let decoded = (block.ops, block.mnemonics);
        Ok(self.code.insert(gpa, key, bytes, pages, decoded))
    }

    /// Returns the key of the block at a linear address.
    ///
    /// Also returns the linear page to which the block is confined, if the page has a breakpoint.
    pub(crate) fn block_key_at(&self, lin: u64, exact: bool) -> (u8, Option<u64>) {
        let key = self.block_key();
        if exact {
            (key | EXACT, None)
        } else if self.debug.stops.has_breakpoint_on_page(lin) {
            (key | BROKEN, Some(lin & !(PAGE - 1)))
        } else {
            (key, None)
        }
    }

    /// Reads at most `most` bytes of code within one page.
    fn read_code(&mut self, lin: u64, gpa: u64, most: usize) -> CodeBytes {
        let len = Self::page_rest(lin).min(most);
        let mut bytes = vec![0; len];
        self.get_phys(gpa, &mut bytes);
        self.exit.requested = false;
        CodeBytes {
            bytes,
            gpa,
            second_page: None,
        }
    }

    /// Reads the rest of the page and as much of the next one as an instruction may have.
    fn read_code_across(&mut self, lin: u64, mut code: CodeBytes) -> Result<CodeBytes, Fault> {
        let rest = Self::page_rest(lin);
        let next = lin.wrapping_add(rest as u64) & self.mode.ip_mask();
        let gpa = self.translate_code(next)?;
        code.bytes.resize(rest, 0);
        code.bytes.resize(rest + INSTRUCTION_BYTES, 0);
        let (_, tail) = code.bytes.split_at_mut(rest);
        self.get_phys(gpa, tail);
        self.exit.requested = false;
        code.second_page = Some(gpa);
        Ok(code)
    }

    /// Decodes at most `most` instructions; `None` if the first one needs more bytes.
    fn decode_bytes(
        &mut self,
        rip: u64,
        code: &CodeBytes,
        most: usize,
    ) -> Result<Option<DecodedBlock>, Fault> {
        debug_assert!(
            code.gpa % PAGE + code.bytes.len() as u64 <= PAGE || code.second_page.is_some()
        );
        let bits = u32::from(self.mode.code_size()) * 8;
        let limit = if self.mode.is_64bit() {
            u64::MAX
        } else {
            self.state.seg[seg::CS].limit.into()
        };
        let lin = self.code_lin(rip);
        let mut decoder = Decoder::with_ip(bits, &code.bytes, rip, DecoderOptions::NONE);
        let mut insn = Instruction::default();
        let mut block = BlockBuilder::default();
        let mut ended = false;
        while block.mnemonics.len() < most && decoder.can_decode() && !ended {
            let at = decoder.position();
            let is_first = block.mnemonics.is_empty();
            if !is_first && self.debug.stops.has_breakpoint(lin.wrapping_add(at as u64)) {
                break;
            }
            decoder.decode_out(&mut insn);
            let short = decoder.last_error() == DecoderError::NoMoreBytes;
            if short && code.bytes.len() - at < INSTRUCTION_BYTES {
                if is_first {
                    return Ok(None);
                }
                break;
            }
            if rip.wrapping_add(at as u64 + insn.len().max(1) as u64 - 1) > limit {
                if is_first {
                    return Err(Fault::GP);
                }
                break;
            }
            let too_long = insn.is_invalid() && is_too_long(bits, &code.bytes[at..]);
            let mut selected = self.select(&insn, rip, too_long);
            selected.op.offset = at as u16;
            selected.op.len = insn.len() as u8;
            ended = selected.facts.as_ref().is_none_or(|facts| facts.ends_block);
            debug_assert!(ended || !selected.op.is_last());
            block.len = (at + insn.len().max(1)) as u16;
            block.push(&insn, selected, self.branches.records());
        }
        debug_assert!(usize::from(block.len) <= code.bytes.len().max(1));
        let mut block = block.finish();
        if !block.ops.last().is_some_and(Op::is_last) {
            block.ops.push(self.fall(rip, block.len));
        }
        Ok(Some(block))
    }

    /// Returns the operation after a last instruction that may not branch.
    fn fall(&self, rip: u64, len: u16) -> Op {
        let lin = self.code_lin(rip);
        let same_page = (lin ^ lin.wrapping_add(len.into())) >> 12 == 0;
        let mut op = Op::new(if same_page && !self.is_code_limited() {
            last!(branch::fall::<true>)
        } else {
            last!(branch::fall::<false>)
        });
        op.imm = len.into();
        op.offset = len;
        op
    }
}
