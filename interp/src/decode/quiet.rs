//! Which operations of a block need not set the flags: nothing can look at them before they are set again.

use crate::core::{Handler, Op};

/// What an operation does with the arithmetic flags.
#[derive(Clone, Copy, Debug)]
pub(super) enum Effect {
    /// It may read them, or it may fault or leave, so that they can be seen.
    Seen,
    /// It neither reads nor writes them, and goes on.
    Kept,
    /// It writes all of them, reads none, and goes on; how it is executed without that.
    Set(Option<Handler>),
    /// The same but for CF, which it keeps.
    SetButCarry(Handler),
    /// It writes all of them and reads none, but may fault before; how it is executed without that.
    SetLast(Handler),
}

/// Takes the forms without flags where nobody will ever know.
pub(super) fn hush(ops: &mut [Op], effects: &[Effect]) {
    let mut unseen = false;
    for (op, effect) in ops.iter_mut().zip(effects).rev() {
        let (quiet, before) = match *effect {
            Effect::Seen => (None, false),
            Effect::Kept => (None, unseen),
            Effect::Set(quiet) => (quiet, true),
            Effect::SetButCarry(quiet) => (Some(quiet), unseen),
            Effect::SetLast(quiet) => (Some(quiet), false),
        };
        if let (true, Some(quiet)) = (unseen, quiet) {
            op.set_handler(quiet);
        }
        unseen = before;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::mov;

    fn hushed(effects: &[Effect]) -> Vec<bool> {
        let loud = Handler::Inner(mov::nop);
        let mut ops: Vec<Op> = effects.iter().map(|_| Op::new(loud)).collect();
        hush(&mut ops, effects);
        ops.iter()
            .map(|op| op.handler_address() != Op::new(loud).handler_address())
            .collect()
    }

    #[test]
    fn flags_are_set_unless_they_are_set_again_unseen() {
        let quiet = Handler::Inner(mov::fence);
        let set = Effect::Set(Some(quiet));
        let step = Effect::SetButCarry(quiet);
        let last = Effect::SetLast(quiet);
        for (effects, expected) in [
            (vec![set], vec![false]),
            (vec![set, set], vec![true, false]),
            (vec![set, Effect::Kept, set], vec![true, false, false]),
            (vec![set, Effect::Seen, set], vec![false, false, false]),
            // The second one keeps the first one's CF.
            (vec![set, step], vec![false, false]),
            // All of them are set by the third.
            (vec![set, step, set], vec![true, true, false]),
            // The second one may fault with the flags of the first.
            (vec![set, last], vec![false, false]),
            (vec![set, last, set], vec![false, true, false]),
        ] {
            assert_eq!(hushed(&effects), expected, "{effects:?}");
        }
    }
}
