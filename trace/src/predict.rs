//! Predicts the next branch of a vCPU from those before it.
//!
//! Encoder and decoder keep the same tables, so a predicted branch is not stored: it only adds 1 to
//! the length of a run. The tables begin empty in every block, so that each block can be read
//! alone.

use hindsight_cpu::branch::BranchClass;

/// Binary logarithm of the entries of each table.
const TABLE_BITS: u32 = 13;

/// A branch, with the instructions since the branch before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BranchStep {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) instructions: u64,
    pub(crate) class: BranchClass,
    pub(crate) cpl: u8,
    pub(crate) to_cpl: u8,
    pub(crate) mispredicted: bool,
}

impl BranchStep {
    const NONE: Self = Self {
        from: 0,
        to: 0,
        instructions: 0,
        class: BranchClass::Conditional,
        cpl: 0,
        to_cpl: 0,
        mispredicted: false,
    };
}

/// Which table predicted a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prediction {
    /// The table that the last four branches index.
    Path,
    /// The table that the last branch indexes.
    Last,
    /// Neither.
    None,
}

/// The tables of one vCPU.
#[derive(Clone, Debug)]
pub(crate) struct BranchTables {
    by_path: Vec<BranchStep>,
    by_last: Vec<BranchStep>,
    /// Sixteen bits for each of the last four branches, the newest in the lowest bits.
    path: u64,
}

impl BranchTables {
    pub(crate) fn new() -> Self {
        Self {
            by_path: vec![BranchStep::NONE; 1 << TABLE_BITS],
            by_last: vec![BranchStep::NONE; 1 << TABLE_BITS],
            path: 0,
        }
    }

    /// Forgets all branches.
    pub(crate) fn clear(&mut self) {
        self.by_path.fill(BranchStep::NONE);
        self.by_last.fill(BranchStep::NONE);
        self.path = 0;
    }

    fn indices(&self) -> (usize, usize) {
        (slot(self.path), slot(self.path & 0xffff))
    }

    /// The branch that this table predicts next.
    pub(crate) fn predicted(&self, prediction: Prediction) -> Option<BranchStep> {
        let (path, last) = self.indices();
        match prediction {
            Prediction::Path => Some(self.by_path[path]),
            Prediction::Last => Some(self.by_last[last]),
            Prediction::None => None,
        }
    }

    /// Enters the next branch into the tables; returns the table that had predicted it.
    #[inline]
    pub(crate) fn learn(&mut self, step: &BranchStep) -> Prediction {
        let (path, last) = self.indices();
        let (by_path, by_last) = (&mut self.by_path[path], &mut self.by_last[last]);
        let prediction = if by_path == step {
            Prediction::Path
        } else if by_last == step {
            Prediction::Last
        } else {
            Prediction::None
        };
        if prediction != Prediction::Path {
            *by_path = *step;
            *by_last = *step;
        }
        let mixed = (step.from ^ step.to.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.path = self.path << 16 | mixed >> 48;
        prediction
    }
}

/// The entry for a path.
fn slot(path: u64) -> usize {
    let mixed = path.wrapping_mul(0xd6e8_feb8_6659_fd93) >> (64 - TABLE_BITS);
    usize::try_from(mixed).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(from: u64, to: u64) -> BranchStep {
        BranchStep {
            from,
            to,
            instructions: 3,
            ..BranchStep::NONE
        }
    }

    #[test]
    fn loop_is_predicted_after_its_second_iteration() {
        let mut predictor = BranchTables::new();
        let body = [step(0x110, 0x200), step(0x208, 0x118), step(0x120, 0x100)];
        let mut run = || body.map(|step| predictor.learn(&step));
        assert_eq!(run(), [Prediction::None; 3]);
        run();
        run();
        assert_eq!(run(), [Prediction::Path; 3]);
        predictor.clear();
        assert_eq!(predictor.learn(&body[0]), Prediction::None);
    }

    #[test]
    fn prediction_is_what_the_decoder_reads_before_it_learns() {
        let mut encoder = BranchTables::new();
        let mut decoder = BranchTables::new();
        let mut x = 1_u64;
        for _ in 0..10_000 {
            x = x
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let next = step(x >> 61, x >> 60 & 3);
            let expected = decoder.clone_prediction(&mut encoder, &next);
            if let Some(predicted) = expected {
                assert_eq!(predicted, next);
            }
            decoder.learn(&next);
        }
    }

    impl BranchTables {
        fn clone_prediction(&self, encoder: &mut Self, next: &BranchStep) -> Option<BranchStep> {
            self.predicted(encoder.learn(next))
        }
    }
}
