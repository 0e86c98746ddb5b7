//! Dead flags: operations of a block whose flags are overwritten before anything can read them.

use crate::core::{Handler, Op};

/// How an operation uses the arithmetic flags.
#[derive(Clone, Copy, Debug)]
pub(super) enum FlagUse {
    /// It may read them, or it may fault or leave the block, after which anything may read them.
    Reads,
    /// It neither reads nor writes them, and cannot leave the block.
    Preserves,
    /// It writes all of them, reads none, and cannot leave the block. The handler, if there is one,
    /// does the same without the flags.
    Writes(Option<Handler>),
    /// Like `Writes`, but it preserves CF.
    WritesAllButCarry(Handler),
    /// Like `Writes`, but it may fault before it writes them.
    FaultsOrWrites(Handler),
}

/// Replaces the handlers of operations whose flags are dead by those that do not compute them.
pub(super) fn remove_dead_flags(ops: &mut [Op], uses: &[FlagUse]) {
    let mut dead = false;
    for (op, flag_use) in ops.iter_mut().zip(uses).rev() {
        let (without_flags, dead_before) = match *flag_use {
            FlagUse::Reads => (None, false),
            FlagUse::Preserves => (None, dead),
            FlagUse::Writes(handler) => (handler, true),
            FlagUse::WritesAllButCarry(handler) => (Some(handler), dead),
            FlagUse::FaultsOrWrites(handler) => (Some(handler), false),
        };
        if let (true, Some(handler)) = (dead, without_flags) {
            op.set_handler(handler);
        }
        dead = dead_before;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::mov;

    fn replaced(uses: &[FlagUse]) -> Vec<bool> {
        let original = Handler::Inner(mov::nop);
        let mut ops: Vec<Op> = uses.iter().map(|_| Op::new(original)).collect();
        remove_dead_flags(&mut ops, uses);
        ops.iter()
            .map(|op| op.handler_address() != Op::new(original).handler_address())
            .collect()
    }

    #[test]
    fn flags_are_computed_unless_they_are_dead() {
        let without_flags = Handler::Inner(mov::fence);
        let set = FlagUse::Writes(Some(without_flags));
        let step = FlagUse::WritesAllButCarry(without_flags);
        let last = FlagUse::FaultsOrWrites(without_flags);
        for (uses, expected) in [
            (vec![set], vec![false]),
            (vec![set, set], vec![true, false]),
            (vec![set, FlagUse::Preserves, set], vec![true, false, false]),
            (vec![set, FlagUse::Reads, set], vec![false, false, false]),
            // The second one keeps the first one's CF.
            (vec![set, step], vec![false, false]),
            // All of them are set by the third.
            (vec![set, step, set], vec![true, true, false]),
            // The second one may fault with the flags of the first.
            (vec![set, last], vec![false, false]),
            (vec![set, last, set], vec![false, true, false]),
        ] {
            assert_eq!(replaced(&uses), expected, "{uses:?}");
        }
    }
}
