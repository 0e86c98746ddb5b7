//! Stubs that all units share: entry, exit and TLB miss.

use crate::asm::{ADDR, Assembler, CALL, Host, JMP, RAX, RDX, Rm, TEMP, jcc};
use crate::flag_stubs::{self, FlagStubs};
use crate::layout::Context;
use crate::vector_stubs::{self, VectorStubs, call_if_loaded};
use crate::x87;
use std::mem::offset_of;

const RSI: Host = Host(6);
const RDI: Host = Host(7);

/// Callee-saved registers, in the order in which they are pushed.
const PRESERVED: [u8; 6] = [3, 5, 12, 13, 14, 15];

/// Guest registers, but for R9 to R11, and the host registers that hold them.
const HOMES: [(u8, u8); 13] = [
    (0, 0),
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 15),
    (5, 5),
    (6, 6),
    (7, 7),
    (8, 8),
    (12, 12),
    (13, 13),
    (14, 14),
    (15, 9),
];

/// Caller-saved registers that hold registers of the guest.
const VOLATILE: [u8; 7] = [0, 1, 2, 6, 7, 8, 9];

/// Addresses of the stubs.
#[derive(Clone, Debug)]
pub(crate) struct Stubs {
    /// Enters units: a function of the address of the guest's general registers.
    pub(crate) enter: u64,
    /// Like `enter`, but loads the vector registers first.
    pub(crate) enter_with_vectors: u64,
    pub(crate) leave: u64,
    pub(crate) find: u64,
    pub(crate) load_vectors: [u64; 3],
    pub(crate) load_x87: u64,
    pub(crate) flags: FlagStubs,
}

fn push(asm: &mut Assembler, r: u8) {
    if r >= 8 {
        asm.bytes(&[0x41]);
    }
    asm.bytes(&[0x50 | (r & 7)]);
}

fn pop(asm: &mut Assembler, r: u8) {
    if r >= 8 {
        asm.bytes(&[0x41]);
    }
    asm.bytes(&[0x58 | (r & 7)]);
}

/// Emits the stubs at the address `base`.
///
/// `callback` is the address of a [`Callback`](crate::Callback), and `data` that of the context.
pub(crate) fn emit(base: u64, data: u64, callback: u64) -> (Vec<u8>, Stubs) {
    let mut asm = Assembler::at(base);
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    let spilled = |n: u8| context(offset_of!(Context, spilled) + usize::from(n) * 8);
    let slot = |guest: u8| Rm::At(TEMP, (guest * 8).cast_signed());

    let vectors = vector_stubs::emit(&mut asm, data);
    let save_x87 = x87::emit_save(&mut asm, data);
    let enter_with_vectors = asm.address();
    asm.jump_to(CALL, vectors.restore);
    let enter = asm.address();
    PRESERVED.iter().for_each(|&r| push(&mut asm, r));
    push(&mut asm, RDI.0);
    asm.load(8, TEMP, Rm::Reg(RDI));
    for n in 0..3 {
        asm.load(8, ADDR, slot(9 + n));
        asm.store(8, spilled(n), ADDR);
    }
    for (guest, host) in HOMES {
        asm.load(8, Host(host), slot(guest));
    }
    asm.encode(&[0xff], 4, 4, context(offset_of!(Context, target)), 0);

    let leave = asm.address();
    asm.store(4, context(offset_of!(Context, exit)), TEMP);
    let leave_numbered = asm.address();
    call_if_loaded(&mut asm, data, vectors.save);
    asm.store_imm(4, context(offset_of!(Context, vectors_loaded)), 0);
    asm.alu_imm(
        7,
        4,
        context(offset_of!(Context, x87)),
        x87::LOADED.cast_signed(),
    );
    let no_x87 = asm.jump(&jcc(5));
    asm.jump_to(CALL, save_x87);
    asm.here(no_x87);
    pop(&mut asm, TEMP.0);
    for (guest, host) in HOMES {
        asm.store(8, slot(guest), Host(host));
    }
    for n in 0..3 {
        asm.load(8, ADDR, spilled(n));
        asm.store(8, slot(9 + n), ADDR);
    }
    PRESERVED.iter().rev().for_each(|&r| pop(&mut asm, r));
    asm.bytes(&[0xc3]);

    let find = emit_find(&mut asm, data, callback, vectors, leave_numbered);
    let load_vectors = vector_stubs::emit_load(&mut asm, data, vectors, leave);
    let load_x87 = x87::emit_load(&mut asm, data, leave);
    let flags = flag_stubs::emit(&mut asm, data, leave_numbered);
    let stubs = Stubs {
        enter,
        enter_with_vectors,
        leave,
        find,
        load_vectors,
        load_x87,
        flags,
    };
    (asm.code, stubs)
}

/// Emits the stub that calls the callback for an access that misses the TLB.
///
/// The linear address is in R10, and the number of the exit in R11. The host address is returned in
/// R10. If there is none, the exit is taken through `leave_numbered`.
fn emit_find(
    asm: &mut Assembler,
    data: u64,
    callback: u64,
    vectors: VectorStubs,
    leave_numbered: u64,
) -> u64 {
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    let find = asm.address();
    asm.store(4, context(offset_of!(Context, exit)), TEMP);
    VOLATILE.iter().for_each(|&r| push(asm, r));
    asm.load(8, RDI, context(offset_of!(Context, callback_data)));
    asm.load(8, RSI, Rm::Reg(ADDR));
    asm.load(4, RDX, Rm::Reg(TEMP));
    call_if_loaded(asm, data, vectors.save);
    asm.constant(RAX, callback);
    // CALL RAX
    asm.bytes(&[0xff, 0xd0]);
    call_if_loaded(asm, data, vectors.restore);
    asm.load(8, ADDR, Rm::Reg(RAX));
    VOLATILE.iter().rev().for_each(|&r| pop(asm, r));
    // TEST R10, R10
    asm.sized(0x85, 8, ADDR.0, Rm::Reg(ADDR));
    let fails = asm.jump(&jcc(4));
    asm.bytes(&[0xc3]);
    asm.here(fails);
    // Drop the return address: ADD RSP, 8
    asm.bytes(&[0x48, 0x83, 0xc4, 8]);
    asm.jump_to(JMP, leave_numbered);
    find
}
