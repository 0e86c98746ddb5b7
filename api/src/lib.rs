//! Runs Hindsight's deterministic machines from a program.
//!
//! A [`Machine`] boots an image in the interpreter, without `/dev/kvm`, the same way every time. A
//! program runs it to an instruction, a symbol, an access or a line of output, reads and writes its
//! registers and memory, records its branches and accesses, and goes back.
//!
//! ```no_run
//! use hindsight_api::{Events, Machine, Until};
//!
//! # fn main() -> Result<(), hindsight_api::Error> {
//! let mut machine = Machine::builder("kernel.elf").memory("64M").build()?;
//! machine.run_until(&Until::new().reaches("main"))?;
//! machine.start_trace(Events::BRANCHES)?;
//! machine.run_for(1_000_000)?;
//! for branch in machine.stop_trace()?.branches()? {
//!     let branch = branch?;
//!     println!("{} {}", branch.at, machine.name_of(branch.to));
//! }
//! machine.back(1)?;
//! println!("{:#x}", machine.registers(0)?.rip());
//! # Ok(())
//! # }
//! ```
//!
//! Instructions are counted from the start of the run, over all virtual processors. The same count
//! is the same state in every run with the same input.

mod builder;
mod console;
mod error;
mod machine;
mod memory;
mod poll;
mod registers;
mod stop;
mod symbols;
mod trace;
mod until;

pub use builder::MachineBuilder;
pub use error::Error;
pub use hindsight_cpu::branch::BranchClass;
pub use hindsight_export::Function;
pub use hindsight_trace::{Event, EventKinds as Events, Record};
pub use hindsight_vmm::state::Snapshot;
pub use machine::Machine;
pub use poll::StopHandle;
pub use registers::{REGISTER_NAMES, RegisterFile};
pub use stop::Stop;
pub use trace::{DataAccess, TakenBranch, Trace, TraceRequest};
pub use until::Until;
