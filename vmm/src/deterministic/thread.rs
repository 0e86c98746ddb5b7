//! The thread of a deterministic machine.

use std::sync::Arc;

use super::debug;
use super::input::InputFeed;
use super::machine::DeterministicMachine;
use super::timeline::CheckpointLimits;
use super::turn::checkpoint_state;
use crate::vcpu::board::Board;
use crate::vcpu::crash::FinalState;
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::loop_guard::LoopGuard;
use crate::vcpu::run_control::{Checkpoint, Outcome};

/// Runs all vCPUs of a machine on the calling thread until the machine stops.
///
/// Returns the states in which they stopped, if the board requests them. `checkpoints` limits those
/// of a debugger.
pub fn thread(
    vcpus: Vec<InterpVcpu>,
    board: &Arc<Board>,
    feed: InputFeed,
    checkpoints: CheckpointLimits,
) -> Vec<FinalState> {
    let mut machine = DeterministicMachine::new(vcpus, board.clone(), feed);
    let guard = LoopGuard { id: 0, board };
    if board.run.stops.requested() {
        machine = match debug::run(machine, board, checkpoints) {
            Ok(machine) => machine,
            Err(error) => {
                board.run.finish(Outcome::Failed(Box::new(error.into())));
                return Vec::new();
            }
        };
    } else if board
        .run
        .vcpus
        .checkpoint(checkpoint_state(), &mut |_, _| {})
        == Checkpoint::Run
    {
        machine.run_to(u64::MAX);
    }
    drop(guard);
    board.run.set_event_hash(machine.trace_hash());
    for vcpu in &machine.vcpus {
        board.run.add_stats(vcpu.stats());
    }
    let requested = board.run.final_states_requested();
    let last = machine.vcpus.iter_mut().filter(|_| requested);
    last.map(|vcpu| vcpu.final_state(board)).collect()
}
