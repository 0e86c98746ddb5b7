//! From bytes to blocks of operations.

#![expect(
    clippy::cast_possible_truncation,
    reason = "lengths and offsets of a block are small"
)]

mod cpuid;
mod effects;
mod operands;
mod quiet;
mod select;
#[cfg(test)]
mod tests;
mod transaction;

pub(crate) use cpuid::Features;

use crate::core::{Core, Fault, GP0};
use crate::mmu::Want;
use crate::op::{Handler, LINKABLE, MEM, Next, Op};
use crate::ops::{branch, fused};
use crate::tlb::Set;
use hindsight_cpu::state::seg;
use iced_x86::{Decoder, DecoderError, DecoderOptions, FlowControl, Instruction, OpKind};
use quiet::{Effect, hush};

/// Most instructions in a block.
const MOST: usize = 32;
/// Longest instruction.
const LONGEST: usize = 15;
/// In a block key: one instruction, for exact stepping.
pub(crate) const EXACT: u8 = 0x40;

/// The operations of a block, and its mnemonics.
type Made = (Vec<Op>, Vec<u16>);

/// Bytes of code to decode from.
struct Code {
    bytes: Vec<u8>,
    gpa: u64,
    /// The next page, if the bytes reach into it.
    second: Option<u64>,
}

/// An instruction that is none needs more bytes than the longest may have. The decoder does not tell: it is asked for less
/// than the longest. Only prefixes make an instruction that long, so without its first byte it needs the next 14 still.
#[cold]
fn is_too_long(bits: u32, bytes: &[u8]) -> bool {
    let needs_more = |bytes: &[u8]| {
        let mut decoder = Decoder::new(bits, bytes, DecoderOptions::NONE);
        let _ = decoder.decode();
        decoder.last_error() == DecoderError::NoMoreBytes
    };
    bytes.len() >= LONGEST && needs_more(&bytes[..LONGEST - 1]) && needs_more(&bytes[1..LONGEST])
}

impl Core {
    /// Guest-physical address of code, with fetch rights checked.
    pub(crate) fn translate_code(&mut self, lin: u64) -> Result<u64, Fault> {
        let set = if self.cpl == 3 {
            Set::User
        } else {
            Set::Supervisor
        };
        if self.code == 8 && !crate::seg::canonical(lin) {
            return Err(GP0);
        }
        let page = self.translate(lin, Want::Fetch, set)?;
        self.enter(lin, page, Want::Fetch, set);
        Ok(page.gpa)
    }

    /// Linear address of an offset in the code segment.
    pub(crate) fn code_lin(&self, rip: u64) -> u64 {
        if self.code == 8 {
            rip
        } else {
            self.cs().base.wrapping_add(rip) & 0xffff_ffff
        }
    }

    /// Decodes the block at RIP and keeps it; answers its first operation.
    pub(crate) fn decode(&mut self, rip: u64, gpa: u64, exact: bool) -> Result<Next, Fault> {
        let lin = self.code_lin(rip);
        let most = if exact { 1 } else { MOST };
        let mut code = self.code_bytes(lin, gpa, most * LONGEST);
        let mut made = self.decode_bytes(rip, &code, most)?;
        let mut second = None;
        if made.is_none() {
            // The first instruction goes on in the next page.
            code = self.across(lin, code)?;
            second = code.second;
            made = self.decode_bytes(rip, &code, 1)?;
        }
        let Some((made, len)) = made else {
            return Err(GP0);
        };
        let first = usize::from(len).min(Self::page_rest(lin));
        self.fetch_in_region(gpa, first)?;
        if let Some(other) = second {
            self.fetch_in_region(other, usize::from(len) - first)?;
        }
        let key = self.block_key() | if exact { EXACT } else { 0 };
        self.memory.mark_code(gpa, self.who);
        if let Some(other) = second {
            self.memory.mark_code(other, self.who);
        }
        // Entering the page made it a code page: our write TLB must not know it any more.
        self.catch_up();
        let code = code.bytes.get(..usize::from(len)).unwrap_or(&code.bytes);
        Ok(self.cache.insert(gpa, key, code, second, made))
    }

    fn code_bytes(&mut self, lin: u64, gpa: u64, most: usize) -> Code {
        let len = Self::page_rest(lin).min(most);
        let mut bytes = vec![0; len];
        self.get_phys(gpa, &mut bytes);
        self.leave = false;
        Code {
            bytes,
            gpa,
            second: None,
        }
    }

    fn across(&mut self, lin: u64, mut code: Code) -> Result<Code, Fault> {
        let rest = Self::page_rest(lin);
        let next = lin.wrapping_add(rest as u64) & self.ip_mask;
        let gpa = self.translate_code(next)?;
        code.bytes.resize(rest, 0);
        code.bytes.resize(rest + LONGEST, 0);
        let (_, tail) = code.bytes.split_at_mut(rest);
        self.get_phys(gpa, tail);
        self.leave = false;
        code.second = Some(gpa);
        Ok(code)
    }

    /// Decodes at most `most` instructions. None if the first one needs more bytes.
    fn decode_bytes(
        &mut self,
        rip: u64,
        code: &Code,
        most: usize,
    ) -> Result<Option<(Made, u16)>, Fault> {
        debug_assert!(
            code.gpa % 0x1000 + code.bytes.len() as u64 <= 0x1000 || code.second.is_some()
        );
        let bits = u32::from(self.code) * 8;
        let limit = if self.code == 8 {
            u64::MAX
        } else {
            self.st.seg[seg::CS].limit.into()
        };
        let lin = self.code_lin(rip);
        let mut decoder = Decoder::with_ip(bits, &code.bytes, rip, DecoderOptions::NONE);
        let mut insn = Instruction::default();
        let mut ops: Vec<Op> = Vec::with_capacity(8);
        let mut mnemonics = Vec::with_capacity(8);
        let mut effects: Vec<Effect> = Vec::with_capacity(8);
        let mut ended = false;
        let mut count = 0;
        let mut len = 0;
        while count < most && decoder.can_decode() && !ended {
            let at = decoder.position();
            if count != 0 && self.stops.splits(lin.wrapping_add(at as u64)) {
                break;
            }
            decoder.decode_out(&mut insn);
            let short = decoder.last_error() == DecoderError::NoMoreBytes;
            if short && code.bytes.len() - at < LONGEST {
                if count == 0 {
                    return Ok(None);
                }
                break;
            }
            if rip.wrapping_add(at as u64 + insn.len().max(1) as u64 - 1) > limit {
                if count == 0 {
                    return Err(GP0);
                }
                break;
            }
            let too_long = insn.is_invalid() && is_too_long(bits, &code.bytes[at..]);
            let (mut op, effect) = self.select(&insn, rip, too_long);
            op.at = at as u16;
            op.left = count as u8;
            ended = insn.is_invalid() || insn.flow_control() != FlowControl::Next;
            len = (at + insn.len().max(1)) as u16;
            op.len = insn.len() as u8;
            match fuse(&insn, ops.last(), &op, self.rec.observe.needs_branches()) {
                Some((both, quiet)) => {
                    ops.pop();
                    effects.pop();
                    ops.push(both);
                    effects.push(Effect::Set(quiet));
                }
                None => {
                    ops.push(op);
                    effects.push(effect);
                }
            }
            mnemonics.push(crate::mix::number(&insn));
            count += 1;
        }
        hush(&mut ops, &effects);
        let needs_fall = !ended || falls_through(&insn);
        for op in &mut ops {
            op.left = count as u8 - op.left;
        }
        if needs_fall {
            ops.push(self.fall(rip, len));
        }
        if let Some(first) = ops.first() {
            first.count.set(count as u32);
        }
        Ok(Some(((ops, mnemonics), len)))
    }

    /// The operation after a block's last instruction.
    fn fall(&self, rip: u64, len: u16) -> Op {
        let lin = self.code_lin(rip);
        let link = self.may_link() && (lin ^ lin.wrapping_add(len.into())) >> 12 == 0;
        let mut op = Op::new(if link {
            branch::fall::<true>
        } else {
            branch::fall::<false>
        });
        op.imm = len.into();
        op.at = len;
        op
    }

    /// Direct branches may remember blocks: no segment limit has to be looked at.
    fn may_link(&self) -> bool {
        self.block_key() & 0x10 == 0
    }
}

/// The operation that does two instructions, and how it is executed if nobody sees the flags.
fn fuse(
    insn: &Instruction,
    first: Option<&Op>,
    second: &Op,
    record: bool,
) -> Option<(Op, Option<Handler>)> {
    let first = first?;
    match first.fuse {
        0 => None,
        fused::MOV_REG => fuse_mov(insn, first, second).map(|(op, quiet)| (op, Some(quiet))),
        _ => fuse_branch(insn, first, second, record).map(|op| (op, None)),
    }
}

/// MOV, and what then works on the moved value.
fn fuse_mov(insn: &Instruction, first: &Op, second: &Op) -> Option<(Op, Handler)> {
    let plain = insn.op0_kind() == OpKind::Register
        && second.prefix & MEM == 0
        && (second.d, second.size) == (first.d, first.size);
    // The second operand must not be what was moved.
    let itself = insn.op1_kind() == OpKind::Register && second.s == first.d;
    if !plain || itself {
        return None;
    }
    let [handler, quiet] = fused::after_mov(insn, second)?;
    let mut both = Op::new(handler);
    (both.imm, both.d, both.s, both.size) = (second.imm, second.d, second.s, second.size);
    both.base = first.s;
    (both.at, both.len, both.left) = (first.at, first.len + second.len, first.left);
    Some((both, quiet))
}

/// A comparison and the conditional branch after it.
fn fuse_branch(insn: &Instruction, first: &Op, branch: &Op, record: bool) -> Option<Op> {
    if branch.size != 8 || !insn.is_jcc_short_or_near() {
        return None;
    }
    let cc = (insn.condition_code() as u8).wrapping_sub(1);
    let handler = if record {
        fused::handler::<true>
    } else {
        fused::handler::<false>
    };
    let mut both = Op::new(handler(first.fuse, select::width(first), cc)?);
    (both.imm, both.d, both.s, both.size) = (first.imm, first.d, first.s, first.size);
    both.disp = branch.imm;
    both.prefix = branch.prefix & LINKABLE;
    both.at = first.at;
    both.asz = first.len;
    both.len = first.len + branch.len;
    both.left = first.left;
    Some(both)
}

/// The instruction ends a block, but may go on after it.
fn falls_through(insn: &Instruction) -> bool {
    use FlowControl::{ConditionalBranch, Interrupt, XbeginXabortXend};
    matches!(
        insn.flow_control(),
        ConditionalBranch | Interrupt | XbeginXabortXend | FlowControl::Call
    )
}
