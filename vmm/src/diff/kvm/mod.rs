//! Compares a deterministic run in the interpreter with KVM, instruction by instruction.
//!
//! The interpreter leads. KVM has a vCPU and memory of its own, and executes the same instructions
//! one by one. The results of instructions that depend on devices or on the models, and of
//! interrupts, are copied from the interpreter instead ([`follow_action`]). General, segment and
//! control registers are compared after each instruction, the other registers and memory at the
//! end of each stride. If those differ, the stride is executed again, and everything is compared
//! after each instruction.

mod compare;
mod error;
mod follow_action;
mod follower;
mod pair;

pub use error::{KvmDiffError, NotComparable};
pub use pair::{KvmBranch, KvmDiffProgress};

use super::divergence::Divergence;
use crate::deterministic::DeterministicMachine;
use pair::{EnginePair, FoundDifference, StrideEnd};

/// The result of a comparison with KVM.
#[derive(Debug)]
pub enum KvmDiffVerdict {
    /// No difference.
    Same {
        /// How much was compared.
        compared: KvmDiffProgress,
        /// The run ended there.
        ended: bool,
    },
    /// The first difference; the interpreter is machine 0, KVM machine 1.
    Different {
        /// How much was the same.
        compared: KvmDiffProgress,
        /// Where they diverge.
        divergence: Box<Divergence>,
    },
}

/// Compares the run of `leader` from its current instruction up to instruction `limit` with KVM.
///
/// Memory and all registers are compared every `stride` instructions. Then `progress` receives how
/// much was compared, and the branches that KVM took in those instructions.
///
/// # Errors
///
/// When there is no KVM or it rejects the machine, or memory cannot be read or written.
pub fn compare_with_kvm(
    leader: DeterministicMachine,
    limit: u64,
    stride: u64,
    progress: &mut dyn FnMut(KvmDiffProgress, &[KvmBranch]),
) -> Result<KvmDiffVerdict, KvmDiffError> {
    let mut pair = EnginePair::new(leader)?;
    loop {
        let at_start = pair.compared();
        let end = limit.min(at_start.icount.saturating_add(stride.max(1)));
        let stride_end = pair.run_to(end, false)?;
        let ended = matches!(stride_end, StrideEnd::RunEnded);
        let found = match stride_end {
            StrideEnd::Different(found) => found,
            StrideEnd::Reached | StrideEnd::RunEnded => FoundDifference {
                step: None,
                differences: pair.compare_all()?,
            },
        };
        if !found.differences.is_empty() {
            let (compared, divergence) = pair.find_first(at_start, end, found)?;
            return Ok(KvmDiffVerdict::Different {
                compared,
                divergence: Box::new(divergence),
            });
        }
        let compared = pair.compared();
        progress(compared, &pair.take_branches());
        if ended || end == limit {
            return Ok(KvmDiffVerdict::Same { compared, ended });
        }
    }
}
