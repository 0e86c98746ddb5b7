//! The saved state of a whole machine as plain data, and the errors of restoring it.

mod devices;
mod file;
mod pages;
mod pmu_totals;
mod run_log;
mod schedule;
mod snapshot;

pub use devices::{DevicesError, DevicesState};
pub use file::SnapshotFileError;
pub(crate) use pages::MemorySaver;
pub use pages::{PAGE, Pages};
pub use pmu_totals::{PmuTotalsState, RingShare};
pub use run_log::RunLogState;
pub use schedule::Schedule;
pub use snapshot::{MachineShape, RestoreError, SNAPSHOT_VERSION, Snapshot, VcpuState};
