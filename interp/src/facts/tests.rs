//! Checks the facts against the decoder library, and by examples.

use super::encodings::examples;
use super::{InstructionFacts, Operand, OperandAccess};
use crate::features::Features;
use crate::flags::ARITHMETIC;
use crate::registers::Reg;
use hindsight_regs::rflags::Rflags;
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic as M,
    OpAccess, RflagsBits,
};
use std::collections::BTreeSet;

/// Returns an example of each encoding that the interpreter executes.
///
/// Each has its code size in bytes.
fn supported() -> Vec<(u8, Instruction)> {
    let features = Features::all();
    let mut all = Vec::new();
    for (bits, code_size) in [(16, 2), (32, 4), (64, 8)] {
        let offered = |i: &Instruction| i.cpuid_features().iter().all(|f| features.has(*f));
        all.extend(
            examples(bits)
                .into_values()
                .filter(offered)
                .map(|i| (code_size, i)),
        );
    }
    all
}

fn decode(bytes: &[u8], code_size: u8) -> Instruction {
    let bits = u32::from(code_size) * 8;
    Decoder::new(bits, bytes, DecoderOptions::NONE).decode()
}

fn facts(bytes: &[u8]) -> InstructionFacts {
    InstructionFacts::of(&decode(bytes, 8), 8)
}

/// Converts the library's flag bits to arithmetic flags.
fn rflags(bits: u32) -> Rflags {
    [
        (RflagsBits::CF, Rflags::CF),
        (RflagsBits::PF, Rflags::PF),
        (RflagsBits::AF, Rflags::AF),
        (RflagsBits::ZF, Rflags::ZF),
        (RflagsBits::SF, Rflags::SF),
        (RflagsBits::OF, Rflags::OF),
    ]
    .into_iter()
    .filter(|(bit, _)| bits & bit != 0)
    .fold(Rflags::empty(), |all, (_, flag)| all | flag)
}

fn access(access: OpAccess) -> OperandAccess {
    match access {
        OpAccess::None | OpAccess::NoMemAccess => OperandAccess::NONE,
        OpAccess::Read | OpAccess::CondRead => OperandAccess::READ,
        OpAccess::Write => OperandAccess::WRITE,
        // A value that is not written is kept.
        OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite => {
            OperandAccess::READ_WRITE
        }
    }
}

/// Asserts that `agrees` is false for exactly the expected mnemonics.
fn assert_differences(expected: &[M], agrees: impl Fn(&Instruction, &InstructionFacts) -> bool) {
    let mut differ = BTreeSet::new();
    for (code_size, i) in supported() {
        if !agrees(&i, &InstructionFacts::of(&i, code_size)) {
            differ.insert(format!("{:?}", i.mnemonic()));
        }
    }
    let expected: BTreeSet<_> = expected.iter().map(|m| format!("{m:?}")).collect();
    assert_eq!(differ, expected);
}

/// Whether an instruction enters other code, which may read and change the flags.
fn transfers(i: &Instruction) -> bool {
    i.flow_control() != FlowControl::Next && !i.is_jcc_short_or_near() && !i.is_loopcc()
        || matches!(i.mnemonic(), M::Rsm | M::Xbegin | M::Xend | M::Xabort)
}

#[test]
fn flags_that_are_read_match_the_library() {
    assert_differences(&[], |i, facts| {
        let read = rflags(i.rflags_read());
        facts.flags.read == read || transfers(i) && facts.flags.read.contains(read)
    });
}

#[test]
fn flags_that_are_changed_match_the_library() {
    assert_differences(&[], |i, facts| {
        let defined = i.rflags_written() | i.rflags_cleared() | i.rflags_set();
        let modified = rflags(i.rflags_modified());
        let changed = facts.flags.changed;
        transfers(i) || changed.contains(rflags(defined)) && modified.contains(changed)
    });
}

#[test]
fn undefined_flags_match_the_library() {
    assert_differences(&[], |i, facts| {
        facts.flags.undefined == rflags(i.rflags_undefined())
    });
}

#[test]
fn operand_accesses_match_the_library() {
    let in_table = |facts: &InstructionFacts| facts.access != [OperandAccess::READ_WRITE; 5];
    let mut factory = InstructionInfoFactory::new();
    let mut differ = BTreeSet::new();
    for (code_size, i) in supported() {
        let facts = InstructionFacts::of(&i, code_size);
        let info = factory.info(&i);
        for (n, ours) in (0..i.op_count()).zip(facts.access) {
            if in_table(&facts) && ours != access(info.op_access(n)) {
                differ.insert(format!(
                    "{:?} {n} {ours:?} {:?}",
                    i.code(),
                    info.op_access(n)
                ));
            }
        }
    }
    assert_eq!(differ, BTreeSet::new());
}

#[test]
fn instruction_that_cannot_fault_accesses_no_memory_and_no_system_state() {
    let mut factory = InstructionInfoFactory::new();
    let mut count = 0;
    for (code_size, i) in supported() {
        let facts = InstructionFacts::of(&i, code_size);
        if facts.exposes_flags() {
            continue;
        }
        count += 1;
        let info = factory.info(&i);
        let accessed = info
            .used_memory()
            .iter()
            .any(|m| !matches!(m.access(), OpAccess::NoMemAccess | OpAccess::None));
        assert!(!accessed, "{i:?}");
        assert!(!i.is_privileged() && !i.is_stack_instruction(), "{i:?}");
        assert_eq!(i.flow_control(), FlowControl::Next, "{i:?}");
        // The library reports the segment register even if only the address is used.
        let general = info
            .used_registers()
            .iter()
            .filter(|r| !(facts.memory.is_some() && r.register().is_segment_register()))
            .all(|r| r.register().is_gpr());
        assert!(general, "{i:?}");
    }
    assert!(count > 300, "{count}");
}

#[test]
fn branches_and_transaction_ends_end_their_block() {
    for (code_size, i) in supported() {
        let facts = InstructionFacts::of(&i, code_size);
        if i.flow_control() != FlowControl::Next {
            assert!(facts.ends_block && facts.may_leave, "{i:?}");
        }
        let jcc = i.is_jcc_short_or_near();
        assert_eq!(facts.branch_condition.is_some(), jcc, "{i:?}");
    }
    // XBEGIN, XEND; HLT stays in its block until it has halted.
    for (bytes, ends) in [
        (&[0xc7, 0xf8, 0, 0, 0, 0][..], true),
        (&[0x0f, 1, 0xd5], true),
        (&[0xf4], false),
    ] {
        assert_eq!(facts(bytes).ends_block, ends, "{bytes:02x?}");
    }
}

#[test]
fn flags_of_shift_depend_on_its_count() {
    let empty = Rflags::empty();
    for (bytes, written, changed, undefined) in [
        // SHL EAX, 1; 32; 2; CL. SHL RAX, 32.
        (&[0xd1, 0xe0][..], ARITHMETIC, ARITHMETIC, Rflags::AF),
        (&[0xc1, 0xe0, 32], empty, empty, empty),
        (
            &[0xc1, 0xe0, 2],
            ARITHMETIC,
            ARITHMETIC,
            Rflags::AF | Rflags::OF,
        ),
        (&[0xd3, 0xe0], empty, ARITHMETIC, Rflags::AF | Rflags::OF),
        (
            &[0x48, 0xc1, 0xe0, 32],
            ARITHMETIC,
            ARITHMETIC,
            Rflags::AF | Rflags::OF,
        ),
    ] {
        let flags = facts(bytes).flags;
        let ours = (flags.written, flags.changed, flags.undefined);
        assert_eq!(ours, (written, changed, undefined), "{bytes:02x?}");
    }
}

#[test]
fn division_keeps_undefined_flags_and_may_fault() {
    // DIV ECX.
    let facts = facts(&[0xf7, 0xf1]);
    assert_eq!(facts.flags.changed, Rflags::empty());
    assert_eq!(facts.flags.undefined, ARITHMETIC);
    assert!(facts.may_fault && !facts.may_leave);
}

#[test]
fn memory_operand_exposes_flags_unless_only_its_address_is_used() {
    // ADD EAX, [RBX]; LEA EAX, [RBX]; NOP [RAX]; ADD EAX, EBX.
    for (bytes, exposes) in [
        (&[0x03, 0x03][..], true),
        (&[0x8d, 0x03], false),
        (&[0x0f, 0x1f, 0x00], false),
        (&[0x01, 0xd8], false),
    ] {
        assert_eq!(facts(bytes).exposes_flags(), exposes, "{bytes:02x?}");
    }
}

#[test]
fn control_register_operand_is_special_and_may_fault() {
    // MOV CR3, RAX.
    let facts = facts(&[0x0f, 0x22, 0xd8]);
    assert_eq!(
        facts.operands[..2],
        [Operand::Special(Reg::Rbx), Operand::General(Reg::Rax)]
    );
    assert!(facts.may_fault && facts.may_leave);
}

#[test]
fn memory_operand_has_base_index_scale_and_segment() {
    // MOV SPL, FS:[RBX + 8*R9 + 0x10].
    let facts = facts(&[0x64, 0x42, 0x8a, 0x64, 0xcb, 0x10]);
    let memory = facts.memory.expect("there is one");
    assert_eq!(
        (memory.base, memory.index, memory.scale),
        (Reg::Rbx, Reg::R9, 3)
    );
    assert_eq!((memory.displacement, memory.rip_relative), (0x10, false));
    assert_eq!(
        (facts.segment, facts.address_size, facts.operand_size),
        (Some(4), 8, 1)
    );
}

#[test]
fn operand_relative_to_rip_has_its_offset_as_displacement() {
    // MOV EAX, [RIP + 0x20], 6 bytes long.
    let facts = facts(&[0x8b, 0x05, 0x20, 0, 0, 0]);
    let memory = facts.memory.expect("there is one");
    assert!(memory.rip_relative);
    assert_eq!((memory.base, memory.displacement), (Reg::Zero, 0x26));
}

#[test]
fn string_operand_has_segment_and_address_size_but_no_memory_operand() {
    // REP MOVSW with 32-bit addresses.
    let facts = facts(&[0x67, 0xf3, 0x66, 0xa5]);
    assert_eq!(facts.operands[..2], [Operand::String; 2]);
    assert!(facts.memory.is_none());
    assert_eq!(
        (facts.segment, facts.address_size, facts.operand_size),
        (Some(3), 4, 2)
    );
}
