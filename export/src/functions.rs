//! Instructions by function.

use std::collections::BTreeMap;
use std::io::{Read, Seek};

use hindsight_trace::TraceReader;

use crate::error::ExportError;
use crate::flamegraph::name;
use crate::flow::Flow;
use crate::stack::{CallTree, FunctionIndex};
use crate::symbols::FunctionTable;

/// The cost of one function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FunctionCost {
    /// The function's name.
    pub name: String,
    /// How often the function was called.
    pub calls: u64,
    /// Instructions in the function itself.
    pub own: u64,
    /// Instructions in the function and in what it calls.
    pub inclusive: u64,
}

/// The costs of all functions, the most expensive ones first.
///
/// # Errors
///
/// When the trace cannot be read.
pub fn function_costs<R: Read + Seek>(
    trace: &mut TraceReader<R>,
    functions: &FunctionTable,
) -> Result<Vec<FunctionCost>, ExportError> {
    let header = trace.header().clone();
    let mut stream = trace.records().map(Result::ok);
    let flow = Flow::of(&mut stream, functions, &header);
    Ok(costs(&flow.tree, functions))
}

/// The costs of all functions of a tree, the most expensive ones first.
pub(crate) fn costs(tree: &CallTree, functions: &FunctionTable) -> Vec<FunctionCost> {
    let inclusive = tree.inclusive();
    let mut costs = BTreeMap::<FunctionIndex, FunctionCost>::new();
    for (number, (node, below)) in (0..).zip(tree.nodes().iter().zip(inclusive)).skip(1) {
        let cost = costs.entry(node.function).or_default();
        cost.calls += node.calls;
        cost.own += node.own;
        // A recursive call is part of the outer one.
        if !tree.path(node.parent).contains(&node.function) || number == CallTree::ROOT {
            cost.inclusive += below;
        }
    }
    let named = costs.into_iter().map(|(function, cost)| FunctionCost {
        name: name(function, functions).to_owned(),
        ..cost
    });
    let mut named: Vec<_> = named.collect();
    named.sort_by(|a, b| b.own.cmp(&a.own).then_with(|| a.name.cmp(&b.name)));
    named
}
