//! The probes, one module for each topic.

mod breakpoint;
mod cost;
mod exits;
mod inject;
mod isa;
mod software_int;
mod step;
mod time;

use crate::probe::finding::Probe;

/// All probes, in the order of measurement.
pub fn all() -> impl Iterator<Item = &'static Probe> {
    [
        cost::PROBES,
        exits::PROBES,
        step::PROBES,
        breakpoint::PROBES,
        software_int::PROBES,
        inject::PROBES,
        time::PROBES,
        isa::PROBES,
        breakpoint::LAST,
    ]
    .into_iter()
    .flatten()
}
