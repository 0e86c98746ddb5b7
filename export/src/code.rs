//! How often each instruction was executed, from the straight code between branches.

use std::collections::BTreeMap;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};
use object::{Object, ObjectSegment};

use crate::flow::Flow;

/// Maximum number of distinct instructions that are counted.
const INSTRUCTIONS_MAX: usize = 16 << 20;

/// An instruction that was executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InstructionCount {
    pub(crate) count: u64,
    pub(crate) len: u8,
    /// Whether the instruction is a conditional branch.
    pub(crate) conditional: bool,
}

/// The instructions that were executed, by address.
pub(crate) type Execution = BTreeMap<u64, InstructionCount>;

/// The bytes of an image at their addresses.
struct Code<'a> {
    segments: Vec<(u64, &'a [u8])>,
    bits: u32,
}

impl<'a> Code<'a> {
    fn of(image: &'a [u8]) -> Result<Self, object::Error> {
        let file = object::File::parse(image)?;
        let segments = file.segments();
        let segments =
            segments.filter_map(|segment| Some((segment.address(), segment.data().ok()?)));
        Ok(Self {
            segments: segments.collect(),
            bits: if file.is_64() { 64 } else { 32 },
        })
    }

    fn decode(&self, address: u64, instruction: &mut Instruction) -> bool {
        let bytes = self.segments.iter().find_map(|&(start, bytes)| {
            let offset = usize::try_from(address.checked_sub(start)?).ok()?;
            bytes.get(offset..).filter(|bytes| !bytes.is_empty())
        });
        let Some(bytes) = bytes else { return false };
        let mut decoder = Decoder::with_ip(self.bits, bytes, address, DecoderOptions::NONE);
        decoder.decode_out(instruction);
        !instruction.is_invalid()
    }
}

/// Decodes all code that was executed. Code that is not in the image is left out.
pub(crate) fn execution(flow: &Flow, image: &[u8]) -> Result<Execution, object::Error> {
    let code = Code::of(image)?;
    let mut counts = Execution::new();
    let mut instruction = Instruction::default();
    for (span, counted) in &flow.spans {
        let mut address = span.start;
        while address < span.end && counts.len() < INSTRUCTIONS_MAX {
            if !code.decode(address, &mut instruction) {
                break;
            }
            let executed = counts.entry(address).or_default();
            executed.count += counted.count;
            executed.len = u8::try_from(instruction.len()).unwrap_or(0);
            executed.conditional = instruction.flow_control() == FlowControl::ConditionalBranch;
            address = instruction.next_ip();
        }
    }
    Ok(counts)
}
