//! Removes dead flags: those that are overwritten before anything can read them.

use crate::core::{Handler, Op};
use crate::facts::{FlagFacts, InstructionFacts};
use crate::flags::ARITHMETIC;

/// How an operation uses the arithmetic flags.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlagUse {
    flags: FlagFacts,
    /// Whether other code may read the flags that were set before the operation.
    exposed: bool,
    /// A handler that does the same without computing the flags, if there is one.
    without_flags: Option<Handler>,
}

impl FlagUse {
    /// Returns how the operation of an instruction uses the flags.
    pub(super) fn new(facts: &InstructionFacts, without_flags: Option<Handler>) -> Self {
        debug_assert!(without_flags.is_none() || facts.flags.written == facts.flags.changed);
        Self {
            flags: facts.flags,
            exposed: facts.exposes_flags(),
            without_flags,
        }
    }

    /// Returns the same use, by an operation that must compute the flags.
    pub(super) fn with_flags_only(self) -> Self {
        Self {
            without_flags: None,
            ..self
        }
    }

    /// Returns the use by an operation that only raises an exception.
    pub(super) fn exposing() -> Self {
        Self {
            flags: FlagFacts::KEEPS,
            exposed: true,
            without_flags: None,
        }
    }
}

/// Replaces handlers whose flags are dead by those that do not compute them.
pub(super) fn remove_dead_flags(ops: &mut [Op], uses: &[FlagUse]) {
    debug_assert_eq!(ops.len(), uses.len());
    let mut live = ARITHMETIC;
    for (op, flag_use) in ops.iter_mut().zip(uses).rev() {
        let flags = flag_use.flags;
        if let Some(handler) = flag_use.without_flags
            && !live.intersects(flags.changed)
        {
            op.set_handler(handler);
        }
        live = if flag_use.exposed {
            ARITHMETIC
        } else {
            live.difference(flags.written) | flags.read
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::mov;
    use hindsight_regs::rflags::Rflags;

    fn replaced(uses: &[FlagUse]) -> Vec<bool> {
        let original = Handler::Inner(mov::nop);
        let mut ops: Vec<Op> = uses.iter().map(|_| Op::new(original)).collect();
        remove_dead_flags(&mut ops, uses);
        ops.iter()
            .map(|op| op.handler_address() != Op::new(original).handler_address())
            .collect()
    }

    fn flag_use(read: Rflags, written: Rflags, exposed: bool) -> FlagUse {
        FlagUse {
            flags: FlagFacts {
                read,
                written,
                changed: written,
                undefined: Rflags::empty(),
            },
            exposed,
            without_flags: Some(Handler::Inner(mov::fence)),
        }
    }

    #[test]
    fn flags_are_computed_unless_they_are_dead() {
        let none = Rflags::empty();
        let set = flag_use(none, ARITHMETIC, false);
        let step = flag_use(none, ARITHMETIC.difference(Rflags::CF), false);
        let memory = flag_use(none, ARITHMETIC, true);
        let keep = FlagUse {
            without_flags: None,
            ..flag_use(none, none, false)
        };
        let read = |flags| FlagUse {
            without_flags: None,
            ..flag_use(flags, none, false)
        };
        let maybe = FlagUse {
            flags: FlagFacts {
                written: none,
                ..set.flags
            },
            without_flags: None,
            ..set
        };
        let expose = FlagUse::exposing();
        for (uses, expected) in [
            (vec![set], vec![false]),
            (vec![set, set], vec![true, false]),
            (vec![set, keep, set], vec![true, false, false]),
            (vec![set, expose, set], vec![false, false, false]),
            (vec![set, read(Rflags::ZF), set], vec![false, false, false]),
            // It may keep the flags of the first.
            (vec![set, maybe, set], vec![true, false, false]),
            (vec![set, maybe], vec![false, false]),
            // The second one keeps the first one's CF.
            (vec![set, step], vec![false, false]),
            // All of them are set by the third.
            (vec![set, step, set], vec![true, true, false]),
            // Of those that the second one sets, none is read; of the first, CF is.
            (
                vec![set, step, read(Rflags::CF), set],
                vec![false, true, false, false],
            ),
            // The second one may fault with the flags of the first.
            (vec![set, memory], vec![false, false]),
            (vec![set, memory, set], vec![false, true, false]),
        ] {
            assert_eq!(replaced(&uses), expected, "{uses:?}");
        }
    }
}
