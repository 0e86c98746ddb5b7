//! Instructions by process of a Linux guest.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Seek};

use hindsight_trace::{Event, LinuxTask, TraceReader};

/// The cost of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessCost {
    /// The process; `None` before the first task is known, and where none is.
    pub tgid: Option<u32>,
    /// The last name of its first thread.
    pub name: String,
    /// How often a vCPU switched to one of its threads.
    pub switches: u64,
    /// Instructions while it ran, with those of the kernel.
    pub instructions: u64,
}

/// The costs of all processes, the most expensive ones first. `retired` has the instructions of
/// each vCPU up to the end of the run. The result is empty if the trace has no tasks.
pub fn process_costs<R: Read + Seek>(
    trace: &mut TraceReader<R>,
    retired: &[u64],
) -> Vec<ProcessCost> {
    let mut vcpus: HashMap<u32, (u64, Option<LinuxTask>)> = HashMap::new();
    let mut costs = BTreeMap::<Option<u32>, ProcessCost>::new();
    let mut spend = |task: Option<LinuxTask>, instructions: u64| {
        let tgid = task.map(|task| task.tgid);
        let cost = costs.entry(tgid).or_default();
        cost.tgid = tgid;
        cost.instructions += instructions;
        cost.switches += 1;
        match task {
            Some(task) if task.pid == task.tgid || cost.name.is_empty() => cost.name = task.name(),
            Some(_) => {}
            None => "[unknown]".clone_into(&mut cost.name),
        }
    };
    for record in trace.records().flatten() {
        if let Event::Task(task) = record.event {
            let (since, old) = vcpus
                .insert(record.cpu, (record.at, task))
                .unwrap_or_default();
            spend(old, record.at.saturating_sub(since));
        }
    }
    if vcpus.is_empty() {
        return Vec::new();
    }
    for (cpu, &end) in (0..).zip(retired) {
        let (since, task) = vcpus.get(&cpu).copied().unwrap_or_default();
        spend(task, end.saturating_sub(since));
    }
    let mut costs: Vec<_> = costs.into_values().collect();
    costs.sort_by(|a, b| {
        b.instructions
            .cmp(&a.instructions)
            .then(a.tgid.cmp(&b.tgid))
    });
    costs
}
