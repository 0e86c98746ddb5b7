//! A profile for the Firefox Profiler: a thread for each vCPU, weighted by instructions.

use std::io::{self, Write};
use std::time::UNIX_EPOCH;

use fxprof_processed_profile::{
    CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, Profile, ReferenceTimestamp,
    SamplingInterval, Timestamp, WeightType,
};
use hindsight_trace::TraceHeader;

use crate::error::ExportError;
use crate::flamegraph::name;
use crate::input::RecordStream;
use crate::symbols::FunctionTable;
use crate::timeline::{SampledRun, nanoseconds};

/// Writes the profile as JSON.
pub(crate) fn write(
    records: RecordStream<'_>,
    header: &TraceHeader,
    functions: &FunctionTable,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    let timeline = SampledRun::of(records, header, functions);
    let path = &header.image.path;
    let product = path.rsplit('/').next().unwrap_or(path);
    // Time is that of the guest, which has no date.
    let begin = ReferenceTimestamp::from(UNIX_EPOCH);
    let mut profile = Profile::new(product, begin, SamplingInterval::from_nanos(1_000_000));
    let start = Timestamp::from_nanos_since_reference(0);
    let process = profile.add_process(product, 1, start);
    for (cpu, sampled) in timeline.by_cpu() {
        let thread = profile.add_thread(process, cpu + 1, start, false);
        profile.set_thread_name(thread, &format!("vCPU {cpu}"));
        profile.set_thread_samples_weight_type(thread, WeightType::TracingMs);
        for sample in &sampled.samples {
            let path = timeline.tree.path(sample.node);
            let frames: Vec<_> = path
                .iter()
                .map(|&function| FrameInfo {
                    frame: Frame::Label(profile.intern_string(name(function, functions))),
                    category_pair: CategoryHandle::OTHER.into(),
                    flags: FrameFlags::empty(),
                })
                .collect();
            let stack = profile.intern_stack_frames(thread, frames.into_iter());
            let ns = nanoseconds(sample.ticks, header);
            let weight = i32::try_from(sample.instructions).unwrap_or(i32::MAX);
            let time = Timestamp::from_nanos_since_reference(ns);
            profile.add_sample(thread, time, stack, CpuDelta::ZERO, weight);
        }
    }
    serde_json::to_writer(out, &profile).map_err(io::Error::from)?;
    Ok(())
}
