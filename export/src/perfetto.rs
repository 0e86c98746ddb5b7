//! A time line for Perfetto: functions and events of each vCPU.
//!
//! The messages are the parts that are needed of `perfetto_trace.proto`, with its field numbers.

use std::io::Write;

use hindsight_trace::{Event, TraceHeader};
use prost::Message;

use crate::error::ExportError;
use crate::flamegraph::name;
use crate::input::RecordStream;
use crate::stack::FunctionIndex;
use crate::symbols::FunctionTable;
use crate::timeline::{SampledRun, SampledStacks, describe, nanoseconds};

/// Deepest stack that is drawn.
const DEPTH_MAX: usize = 48;
/// All packets are of one sequence.
const SEQUENCE: u32 = 1;

/// `perfetto.protos.Trace`.
#[derive(Clone, PartialEq, Message)]
struct Packets {
    #[prost(message, repeated, tag = "1")]
    packet: Vec<TracePacket>,
}

/// `perfetto.protos.TracePacket`.
#[derive(Clone, PartialEq, Message)]
struct TracePacket {
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, tag = "10")]
    trusted_packet_sequence_id: u32,
    #[prost(message, optional, tag = "11")]
    track_event: Option<TrackEvent>,
    #[prost(message, optional, tag = "60")]
    track_descriptor: Option<TrackDescriptor>,
}

/// `perfetto.protos.TrackEvent`.
#[derive(Clone, PartialEq, Message)]
struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    debug_annotations: Vec<DebugAnnotation>,
    #[prost(int32, tag = "9")]
    kind: i32,
    #[prost(uint64, tag = "11")]
    track_uuid: u64,
    #[prost(string, repeated, tag = "22")]
    categories: Vec<String>,
    #[prost(string, optional, tag = "23")]
    name: Option<String>,
}

/// `perfetto.protos.DebugAnnotation`.
#[derive(Clone, PartialEq, Message)]
struct DebugAnnotation {
    #[prost(string, tag = "10")]
    name: String,
    #[prost(string, tag = "6")]
    string_value: String,
}

/// `perfetto.protos.TrackDescriptor`.
#[derive(Clone, PartialEq, Message)]
struct TrackDescriptor {
    #[prost(uint64, tag = "1")]
    uuid: u64,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(uint64, optional, tag = "5")]
    parent_uuid: Option<u64>,
}

/// TYPE_SLICE_BEGIN, TYPE_SLICE_END and TYPE_INSTANT.
const SLICE_BEGIN: i32 = 1;
const SLICE_END: i32 = 2;
const INSTANT: i32 = 3;

/// The root of all tracks, and those of a vCPU.
const ROOT: u64 = 1;
const fn functions_track(cpu: u32) -> u64 {
    0x100 + (cpu as u64) * 2
}
const fn events_track(cpu: u32) -> u64 {
    functions_track(cpu) + 1
}

/// Writes packets one by one.
struct Packer<'a> {
    header: &'a TraceHeader,
    out: &'a mut dyn Write,
}

impl Packer<'_> {
    fn put(&mut self, packet: TracePacket) -> std::io::Result<()> {
        let packet = TracePacket {
            trusted_packet_sequence_id: SEQUENCE,
            ..packet
        };
        self.out.write_all(
            &Packets {
                packet: vec![packet],
            }
            .encode_to_vec(),
        )
    }

    fn track(&mut self, uuid: u64, name: String, parent_uuid: Option<u64>) -> std::io::Result<()> {
        let track = TrackDescriptor {
            uuid,
            name,
            parent_uuid,
        };
        self.put(TracePacket {
            track_descriptor: Some(track),
            ..TracePacket::default()
        })
    }

    fn event(&mut self, ticks: u64, event: TrackEvent) -> std::io::Result<()> {
        let timestamp = Some(nanoseconds(ticks, self.header));
        self.put(TracePacket {
            timestamp,
            track_event: Some(event),
            ..TracePacket::default()
        })
    }

    fn slice(&mut self, ticks: u64, track: u64, name: Option<&str>) -> std::io::Result<()> {
        let event = TrackEvent {
            kind: if name.is_some() {
                SLICE_BEGIN
            } else {
                SLICE_END
            },
            track_uuid: track,
            name: name.map(str::to_owned),
            ..TrackEvent::default()
        };
        self.event(ticks, event)
    }

    /// Writes the functions of a vCPU as slices. A function that is in two successive samples is
    /// one slice.
    fn stacks(
        &mut self,
        cpu: u32,
        sampled: &SampledStacks,
        (timeline, functions): (&SampledRun, &FunctionTable),
    ) -> std::io::Result<()> {
        let track = functions_track(cpu);
        let mut open: Vec<FunctionIndex> = Vec::new();
        for sample in &sampled.samples {
            let mut path = timeline.tree.path(sample.node);
            path.truncate(DEPTH_MAX);
            let common = open.iter().zip(&path).take_while(|(a, b)| a == b).count();
            for _ in common..open.len() {
                self.slice(sample.ticks, track, None)?;
            }
            for &function in &path[common..] {
                self.slice(sample.ticks, track, Some(name(function, functions)))?;
            }
            open = path;
        }
        for _ in open {
            self.slice(sampled.last_ticks, track, None)?;
        }
        Ok(())
    }

    fn marks(&mut self, timeline: &SampledRun) -> std::io::Result<()> {
        for mark in &timeline.marks {
            let (category, text) = describe(&mark.event);
            let name = match mark.event {
                Event::Delivery { vector, .. } => format!("{category} {vector:#x}"),
                _ => category.to_owned(),
            };
            let annotation = |name: &str, string_value| DebugAnnotation {
                name: name.to_owned(),
                string_value,
            };
            let event = TrackEvent {
                debug_annotations: vec![
                    annotation("event", text),
                    annotation("instructions", mark.at.to_string()),
                ],
                kind: INSTANT,
                track_uuid: events_track(mark.cpu),
                categories: vec![category.to_owned()],
                name: Some(name),
            };
            self.event(mark.ticks, event)?;
        }
        Ok(())
    }
}

/// Writes the time line.
pub(crate) fn write(
    records: RecordStream<'_>,
    header: &TraceHeader,
    functions: &FunctionTable,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    let timeline = SampledRun::of(records, header, functions);
    let mut packer = Packer { header, out };
    let path = &header.image.path;
    packer.track(
        ROOT,
        path.rsplit('/').next().unwrap_or(path).to_owned(),
        None,
    )?;
    for cpu in 0..header.cpus.clamp(1, 4096) {
        packer.track(functions_track(cpu), format!("vCPU {cpu}"), Some(ROOT))?;
        packer.track(events_track(cpu), format!("vCPU {cpu} events"), Some(ROOT))?;
    }
    for (cpu, sampled) in timeline.by_cpu() {
        packer.stacks(cpu, sampled, (&timeline, functions))?;
    }
    packer.marks(&timeline)?;
    Ok(())
}
