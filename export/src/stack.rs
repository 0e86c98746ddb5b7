//! Follows the calls of one vCPU, from its branches.
//!
//! The stack is a shadow of the guest's own: a call pushes, a return pops up to the call that it
//! returns to. Interrupts, exceptions and system calls push too. After a switch of stacks that no
//! branch explains, such as a switch of threads, the stack begins anew.

use std::collections::HashMap;

use hindsight_cpu::branch::BranchClass;

use crate::spaces::SpaceId;
use crate::symbols::{Function, FunctionTable};

/// Deepest stack that is followed; instructions of deeper calls count for the last frame.
const DEPTH_MAX: usize = 256;
/// Maximum number of nodes of a tree of calls; calls beyond count for their caller.
const NODES_MAX: usize = 4 << 20;
/// Maximum number of tasks whose stacks are followed.
const PARKED_MAX: usize = 1 << 16;
/// Bytes of the longest instruction. A return target is at most this far behind the start of its
/// call.
const INSTRUCTION_MAX: u64 = 15;

/// A function of the guest: its index in the table, or none for code without a symbol.
pub(crate) type FunctionIndex = Option<u32>;

/// A node of a tree of calls: a function, called on one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    /// The caller's node; the root is its own.
    pub(crate) parent: u32,
    pub(crate) function: FunctionIndex,
    /// Instructions in the function itself.
    pub(crate) own: u64,
    /// How often the function was called on this path.
    pub(crate) calls: u64,
}

/// The calls of a whole run.
#[derive(Debug)]
pub(crate) struct CallTree {
    nodes: Vec<Node>,
    children: HashMap<(u32, FunctionIndex), u32>,
    /// The stacks of tasks that do not run, by vCPU for idle tasks, and by thread.
    parked: HashMap<(u32, u32), CallStack>,
}

impl CallTree {
    /// The node without a function, above all others.
    pub(crate) const ROOT: u32 = 0;

    pub(crate) fn new() -> Self {
        let root = Node {
            parent: Self::ROOT,
            function: None,
            own: 0,
            calls: 0,
        };
        Self {
            nodes: vec![root],
            children: HashMap::new(),
            parked: HashMap::new(),
        }
    }

    /// All nodes; parents come before their children.
    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Keeps the stack of a task that stops running.
    pub(crate) fn park(&mut self, key: (u32, u32), stack: CallStack) {
        if self.parked.len() < PARKED_MAX {
            self.parked.insert(key, stack);
        }
    }

    /// The stack of a task that runs again; a new one below the node of `name` if it has none.
    pub(crate) fn unpark(&mut self, key: (u32, u32), name: FunctionIndex) -> CallStack {
        let root = self.child(Self::ROOT, name);
        let parked = self.parked.remove(&key);
        parked
            .filter(|stack| stack.root == root)
            .unwrap_or(CallStack {
                root,
                ..CallStack::default()
            })
    }

    /// The node of `function` below `parent`.
    fn child(&mut self, parent: u32, function: FunctionIndex) -> u32 {
        if let Some(&node) = self.children.get(&(parent, function)) {
            return node;
        }
        if self.nodes.len() >= NODES_MAX {
            return parent;
        }
        let node = u32::try_from(self.nodes.len()).unwrap_or(Self::ROOT);
        self.nodes.push(Node {
            parent,
            function,
            own: 0,
            calls: 0,
        });
        self.children.insert((parent, function), node);
        node
    }

    fn node_mut(&mut self, node: u32) -> &mut Node {
        let index = usize::try_from(node).unwrap_or(0);
        &mut self.nodes[index]
    }

    /// The node with this number.
    pub(crate) fn node(&self, node: u32) -> &Node {
        &self.nodes[usize::try_from(node).unwrap_or(0)]
    }

    /// The functions from the root to `node`.
    pub(crate) fn path(&self, mut node: u32) -> Vec<FunctionIndex> {
        let mut path = Vec::new();
        while node != Self::ROOT {
            path.push(self.node(node).function);
            node = self.node(node).parent;
        }
        path.reverse();
        path
    }

    /// Instructions in each node and all below it.
    pub(crate) fn inclusive(&self) -> Vec<u64> {
        let mut sums: Vec<_> = self.nodes.iter().map(|node| node.own).collect();
        for index in (1..sums.len()).rev() {
            let parent = usize::try_from(self.nodes[index].parent).unwrap_or(0);
            sums[parent] += sums[index];
        }
        sums
    }
}

/// A branch, as far as the call stack depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowBranch {
    /// The space in which the addresses are.
    pub(crate) space: SpaceId,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) class: BranchClass,
    pub(crate) cpl: u8,
    pub(crate) to_cpl: u8,
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    node: u32,
    /// Address of the call, or of the interrupted instruction.
    called_from: u64,
    /// The privilege level of the frame's code.
    cpl: u8,
}

/// The stack of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct CallStack {
    /// The node below which all frames are: that of the task's name.
    root: u32,
    frames: Vec<Frame>,
    /// Calls that were too deep to follow.
    beyond: usize,
}

impl CallStack {
    /// The node of the innermost frame.
    pub(crate) fn top(&self) -> u32 {
        self.frames.last().map_or(self.root, |frame| frame.node)
    }

    /// Pushes the function at `address` if the stack is empty.
    pub(crate) fn enter(
        &mut self,
        (space, address): (SpaceId, u64),
        cpl: u8,
        tree: &mut CallTree,
        functions: &FunctionTable,
    ) {
        if self.frames.is_empty() {
            let function = functions
                .index_in(space, address)
                .and_then(|index| u32::try_from(index).ok());
            self.replace_top(function, tree, cpl);
        }
    }

    /// Counts instructions for the innermost frame.
    pub(crate) fn spend(&self, tree: &mut CallTree, instructions: u64) {
        tree.node_mut(self.top()).own += instructions;
    }

    /// Follows a branch.
    pub(crate) fn follow(
        &mut self,
        branch: &FlowBranch,
        tree: &mut CallTree,
        functions: &FunctionTable,
    ) {
        use BranchClass::{
            Abort, CallNext, Conditional, Debug, DirectCall, DirectJump, Exception, Far,
            IndirectCall, IndirectJump, Interrupt, NotTaken, Return, SoftwareInterrupt,
        };
        let function = functions
            .index_in(branch.space, branch.to)
            .and_then(|index| u32::try_from(index).ok());
        match branch.class {
            DirectCall | IndirectCall | SoftwareInterrupt | Exception | Debug | Interrupt => {
                self.push(branch, function, tree);
            }
            Far if branch.to_cpl < branch.cpl => self.push(branch, function, tree),
            Return | Far => self.pop(branch, function, tree, functions),
            Conditional | DirectJump | IndirectJump | CallNext | Abort => {
                self.replace_top(function, tree, branch.to_cpl);
            }
            NotTaken => {}
        }
    }

    fn push(&mut self, branch: &FlowBranch, function: FunctionIndex, tree: &mut CallTree) {
        if self.frames.len() >= DEPTH_MAX {
            self.beyond += 1;
            return;
        }
        let node = tree.child(self.top(), function);
        tree.node_mut(node).calls += 1;
        self.frames.push(Frame {
            node,
            called_from: branch.from,
            cpl: branch.to_cpl,
        });
    }

    fn pop(
        &mut self,
        branch: &FlowBranch,
        function: FunctionIndex,
        tree: &mut CallTree,
        functions: &FunctionTable,
    ) {
        if self.beyond > 0 {
            self.beyond -= 1;
            return;
        }
        let starts_here = |f: &Function| f.address == branch.to;
        let is_begin = functions.find(branch.to).is_some_and(starts_here);
        let returns_to = |frame: &Frame| {
            let length = branch.to.wrapping_sub(frame.called_from);
            length <= INSTRUCTION_MAX
        };
        match self.frames.iter().rposition(returns_to) {
            Some(index) => self.frames.truncate(index),
            // A return to the begin of a function is an indirect call or jump in a retpoline: the
            // call in it goes, and the function replaces the retpoline.
            None if branch.to_cpl == branch.cpl && is_begin => {
                self.frames.pop();
            }
            // A return to less privileged code that was not called from here.
            None if branch.to_cpl > branch.cpl => {
                let outer = self
                    .frames
                    .iter()
                    .rposition(|frame| frame.cpl >= branch.to_cpl);
                self.frames.truncate(outer.map_or(0, |index| index + 1));
            }
            None => self.frames.clear(),
        }
        self.replace_top(function, tree, branch.to_cpl);
    }

    /// Replaces the function of the innermost frame.
    fn replace_top(&mut self, function: FunctionIndex, tree: &mut CallTree, cpl: u8) {
        let Some(&top) = self.frames.last() else {
            let node = tree.child(self.root, function);
            self.frames.push(Frame {
                node,
                called_from: u64::MAX,
                cpl,
            });
            return;
        };
        let old = tree.node(top.node);
        if old.function != function {
            let node = tree.child(old.parent, function);
            if let Some(top) = self.frames.last_mut() {
                top.node = node;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions() -> FunctionTable {
        let names = ["main", "leaf", "irq", "user"];
        let functions = names.iter().zip(1..).map(|(name, n)| Function {
            address: n * 0x100,
            size: 0x100,
            name: (*name).to_owned(),
        });
        FunctionTable::new(functions.collect())
    }

    /// Follows branches of ten instructions each; returns `path own calls` of all nodes.
    fn follow(branches: &[(u64, u64, BranchClass, u8, u8)]) -> Vec<String> {
        let (mut stack, mut tree, functions) = (CallStack::default(), CallTree::new(), functions());
        for &(from, to, class, cpl, to_cpl) in branches {
            stack.spend(&mut tree, 10);
            stack.follow(
                &FlowBranch {
                    space: SpaceId::NONE,
                    from,
                    to,
                    class,
                    cpl,
                    to_cpl,
                },
                &mut tree,
                &functions,
            );
        }
        let name = |index: FunctionIndex| {
            let function = functions.get(usize::try_from(index?).ok()?)?;
            Some(function.name.clone())
        };
        let nodes = tree.nodes().iter().zip(0..).skip(1);
        let text = nodes.map(|(node, number)| {
            let path: Vec<_> = tree
                .path(number)
                .into_iter()
                .map(|f| name(f).unwrap_or_default())
                .collect();
            format!("{} {} {}", path.join(";"), node.own, node.calls)
        });
        text.collect()
    }

    #[test]
    fn calls_and_interrupts_nest_and_return() {
        use BranchClass::*;
        let nodes = follow(&[
            (0, 0x100, DirectJump, 0, 0),
            (0x110, 0x200, DirectCall, 0, 0),
            (0x220, 0x300, Interrupt, 0, 0),
            (0x330, 0x220, Far, 0, 0),
            (0x240, 0x115, Return, 0, 0),
            (0x120, 0x200, DirectCall, 0, 0),
            (0x240, 0x125, Return, 0, 0),
            (0x130, 0x110, Conditional, 0, 0),
        ]);
        assert_eq!(nodes, ["main 30 0", "main;leaf 30 2", "main;leaf;irq 10 1"]);
    }

    #[test]
    fn tail_call_takes_the_place_of_its_caller() {
        use BranchClass::*;
        let nodes = follow(&[
            (0, 0x100, DirectJump, 0, 0),
            (0x110, 0x200, DirectCall, 0, 0),
            (0x210, 0x300, DirectJump, 0, 0),
            (0x310, 0x115, Return, 0, 0),
            (0x120, 0x100, Conditional, 0, 0),
        ]);
        assert_eq!(nodes, ["main 20 0", "main;leaf 10 1", "main;irq 10 0"]);
    }

    #[test]
    fn system_call_returns_to_its_user_code() {
        use BranchClass::*;
        let nodes = follow(&[
            (0, 0x400, Far, 0, 3),
            (0x410, 0x100, Far, 3, 0),
            (0x110, 0x200, DirectCall, 0, 0),
            // Not to the instruction after the system call: a signal handler.
            (0x220, 0x450, Far, 0, 3),
            (0x460, 0x400, DirectJump, 3, 3),
        ]);
        assert_eq!(
            nodes,
            ["user 20 0", "user;main 10 1", "user;main;leaf 10 1"]
        );
    }

    #[test]
    fn retpoline_is_replaced_by_the_function_that_it_calls() {
        use BranchClass::*;
        // `leaf` is the retpoline; `irq` is called through it, and returns to `main`.
        let nodes = follow(&[
            (0, 0x100, DirectJump, 0, 0),
            (0x110, 0x200, DirectCall, 0, 0),
            (0x200, 0x20c, DirectCall, 0, 0),
            (0x210, 0x300, Return, 0, 0),
            (0x330, 0x115, Return, 0, 0),
            (0x120, 0x100, Conditional, 0, 0),
        ]);
        assert_eq!(
            nodes,
            [
                "main 20 0",
                "main;leaf 10 1",
                "main;leaf;leaf 10 1",
                "main;irq 10 0"
            ]
        );
    }

    #[test]
    fn endless_recursion_is_bounded() {
        let call = (0x110, 0x100, BranchClass::DirectCall, 0, 0);
        assert_eq!(follow(&vec![call; 10_000]).len(), DEPTH_MAX);
    }
}
