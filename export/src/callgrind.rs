//! Costs and calls in the format of callgrind, version 1: instructions by function and line.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use hindsight_cpu::branch::BranchClass;

use crate::code::execution;
use crate::error::ExportError;
use crate::flamegraph::name;
use crate::flow::Flow;
use crate::input::Guest;
use crate::lines::{LineTable, SourceLine};
use crate::stack::FunctionIndex;

/// A call from a line of one function to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CallSite {
    line: Option<SourceLine>,
    callee: FunctionIndex,
}

/// Costs of one function.
#[derive(Debug, Default)]
struct CallgrindCost {
    own: BTreeMap<Option<SourceLine>, u64>,
    calls: BTreeMap<CallSite, u64>,
}

struct Costs<'a> {
    guest: &'a Guest,
    lines: LineTable,
    functions: BTreeMap<FunctionIndex, CallgrindCost>,
    /// Calls between two functions, and the instructions in them.
    inclusive: HashMap<(FunctionIndex, FunctionIndex), (u64, u64)>,
}

impl<'a> Costs<'a> {
    fn new(flow: &Flow, guest: &'a Guest) -> Result<Self, ExportError> {
        // Without debug information the costs are by function only.
        let lines = LineTable::of(&guest.image).unwrap_or_default();
        let mut costs = Self {
            guest,
            lines,
            functions: BTreeMap::new(),
            inclusive: HashMap::new(),
        };
        for (address, executed) in execution(flow, &guest.image)? {
            let (function, line) = (costs.function(address), costs.lines.find(address));
            let own = &mut costs.functions.entry(function).or_default().own;
            *own.entry(line).or_default() += executed.count;
        }
        costs.add_calls(flow);
        Ok(costs)
    }

    fn function(&self, address: u64) -> FunctionIndex {
        let index = self.guest.functions.index(address)?;
        u32::try_from(index).ok()
    }

    fn add_calls(&mut self, flow: &Flow) {
        for (edge, counted) in &flow.edges {
            let is_call = matches!(
                counted.class,
                BranchClass::DirectCall
                    | BranchClass::IndirectCall
                    | BranchClass::SoftwareInterrupt
                    | BranchClass::Exception
                    | BranchClass::Debug
                    | BranchClass::Interrupt
            );
            if is_call {
                let site = CallSite {
                    line: self.lines.find(edge.from),
                    callee: self.function(edge.to),
                };
                let caller = self.functions.entry(self.function(edge.from)).or_default();
                *caller.calls.entry(site).or_default() += counted.count;
            }
        }
        let below = flow.tree.inclusive();
        for (node, instructions) in flow.tree.nodes().iter().zip(below) {
            let caller = flow.tree.node(node.parent).function;
            let sum = self.inclusive.entry((caller, node.function)).or_default();
            sum.0 += node.calls;
            sum.1 += instructions;
        }
    }

    fn file(&self, line: Option<SourceLine>) -> &str {
        line.map_or("???", |line| &self.lines.files[line.file])
    }

    /// The first line of a function.
    fn definition(&self, function: FunctionIndex) -> Option<SourceLine> {
        let function = self.guest.functions.get(usize::try_from(function?).ok()?)?;
        self.lines.find(function.address)
    }

    fn write_function(
        &self,
        function: FunctionIndex,
        cost: &CallgrindCost,
        out: &mut dyn Write,
    ) -> std::io::Result<()> {
        let number = |line: Option<SourceLine>| line.map_or(0, |line| line.line);
        let functions = &self.guest.functions;
        writeln!(out, "\nfl={}", self.file(self.definition(function)))?;
        writeln!(out, "fn={}", name(function, functions))?;
        let mut file = self.file(self.definition(function));
        let mut set_file = |line, out: &mut dyn Write| {
            let own = self.file(line);
            if own != file {
                file = own;
                return writeln!(out, "fi={own}");
            }
            Ok(())
        };
        for (&line, instructions) in &cost.own {
            set_file(line, out)?;
            writeln!(out, "{} {instructions}", number(line))?;
        }
        for (site, &calls) in &cost.calls {
            set_file(site.line, out)?;
            let target = self.definition(site.callee);
            let between = self.inclusive.get(&(function, site.callee));
            let &(all, instructions) = between.unwrap_or(&(0, 0));
            // The trace has one sum for all calls between two functions: divide it evenly.
            let share =
                u128::from(instructions) * u128::from(calls) / u128::from(all.max(calls).max(1));
            writeln!(
                out,
                "cfi={}\ncfn={}",
                self.file(target),
                name(site.callee, functions)
            )?;
            writeln!(
                out,
                "calls={calls} {}\n{} {share}",
                number(target),
                number(site.line)
            )?;
        }
        Ok(())
    }
}

/// Writes the profile.
pub(crate) fn write(flow: &Flow, guest: &Guest, out: &mut dyn Write) -> Result<(), ExportError> {
    let costs = Costs::new(flow, guest)?;
    let own = costs.functions.values().flat_map(|cost| cost.own.values());
    writeln!(out, "# callgrind format\nversion: 1\ncreator: hindsight")?;
    writeln!(
        out,
        "positions: line\nevents: Ir\nsummary: {}",
        own.sum::<u64>()
    )?;
    for (&function, cost) in &costs.functions {
        costs.write_function(function, cost, out)?;
    }
    Ok(())
}
