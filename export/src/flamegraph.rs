//! Flame graphs: instructions by stack of functions.

use std::fmt::Write as _;
use std::io::Write;

use crate::error::ExportError;
use crate::stack::{CallTree, FunctionIndex};
use crate::symbols::FunctionTable;

/// The name of a function in a stack.
pub(crate) fn name(function: FunctionIndex, functions: &FunctionTable) -> &str {
    let found = function.and_then(|index| functions.get(usize::try_from(index).ok()?));
    found.map_or("[unknown]", |function| &function.name)
}

/// Writes a line for each stack: its functions with semicolons between them, and its instructions.
pub(crate) fn write_folded(
    tree: &CallTree,
    functions: &FunctionTable,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    for (number, node) in (0..).zip(tree.nodes()) {
        if node.own == 0 {
            continue;
        }
        let path = tree.path(number);
        let mut names = path
            .iter()
            .map(|&function| name(function, functions).replace(';', ":"));
        let first = names.next().unwrap_or_else(|| "[unknown]".to_owned());
        let stack = names.fold(first, |stack, name| stack + ";" + &name);
        writeln!(out, "{stack} {}", node.own)?;
    }
    Ok(())
}

/// Width of the picture, and height of a frame, in pixels.
const WIDTH: f64 = 1200.0;
const ROW: f64 = 17.0;
/// The narrowest frame that is drawn, and the narrowest that has its name, in pixels.
const NARROWEST: f64 = 0.3;
const NAMED: f64 = 30.0;
/// Width of a character, in pixels.
const CHARACTER: f64 = 6.6;

/// A frame of the picture.
struct DrawnFrame {
    node: u32,
    x: f64,
    width: f64,
    depth: usize,
    instructions: u64,
}

/// A count as a float; counts beyond 2^53 lose their last digits.
fn precise(count: u64) -> f64 {
    count as f64
}

/// Computes the position of each frame; callers are below their callees.
fn layout(tree: &CallTree) -> Vec<DrawnFrame> {
    let inclusive = tree.inclusive();
    let total = precise(inclusive.first().copied().unwrap_or(0).max(1));
    let mut children: Vec<Vec<u32>> = vec![Vec::new(); inclusive.len()];
    for (number, node) in (0..).zip(tree.nodes()).skip(1) {
        if let Some(siblings) = children.get_mut(usize::try_from(node.parent).unwrap_or(0)) {
            siblings.push(number);
        }
    }
    let count = |node: u32| inclusive[usize::try_from(node).unwrap_or(0)];
    let mut frames = Vec::new();
    let mut due = vec![(CallTree::ROOT, 0.0, 0)];
    while let Some((node, x, depth)) = due.pop() {
        let instructions = count(node);
        let width = precise(instructions) / total * WIDTH;
        if width < NARROWEST {
            continue;
        }
        frames.push(DrawnFrame {
            node,
            x,
            width,
            depth,
            instructions,
        });
        let below = &mut children[usize::try_from(node).unwrap_or(0)];
        below.sort_by_key(|&child| std::cmp::Reverse(count(child)));
        let mut x = x;
        for &child in below.iter() {
            due.push((child, x, depth + 1));
            x += precise(count(child)) / total * WIDTH;
        }
    }
    frames
}

/// Escapes text for XML.
pub(crate) fn escape(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;");
    escaped.replace('>', "&gt;").replace('"', "&quot;")
}

/// A warm colour that depends on the name only.
fn colour(name: &str) -> String {
    let hash = name.bytes().fold(7_u32, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(byte.into())
    });
    format!(
        "hsl({},{}%,{}%)",
        15 + hash % 40,
        70 + hash / 40 % 20,
        62 + hash / 800 % 12
    )
}

/// Writes a picture in which the width of a frame is its instructions.
pub(crate) fn write_svg(
    tree: &CallTree,
    functions: &FunctionTable,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    let frames = layout(tree);
    let depth = frames.iter().map(|frame| frame.depth).max().unwrap_or(0);
    let height = (depth + 1) as f64 * ROW + 30.0;
    let total = frames.first().map_or(0, |frame| frame.instructions);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"monospace\" font-size=\"11\">\n<title>{total} instructions</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for frame in &frames {
        let function = tree.node(frame.node).function;
        let name = if frame.node == CallTree::ROOT {
            "all"
        } else {
            name(function, functions)
        };
        let y = height - (frame.depth + 1) as f64 * ROW - 15.0;
        let percent = 100.0 * precise(frame.instructions) / precise(total.max(1));
        let (x, width) = (frame.x, frame.width);
        // Writing to a string does not fail.
        let _ = write!(
            svg,
            "<g><title>{}: {} instructions, {percent:.2} %</title>\
             <rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{}\"/>",
            escape(name),
            frame.instructions,
            ROW - 1.0,
            colour(name)
        );
        if width >= NAMED {
            let fits = |n: usize| (n + 1) as f64 * CHARACTER <= width - 6.0;
            let label: String = (0..)
                .zip(name.chars())
                .take_while(|(n, _)| fits(*n))
                .map(|(_, c)| c)
                .collect();
            let _ = write!(
                svg,
                "<text x=\"{:.2}\" y=\"{:.1}\">{}</text>",
                x + 3.0,
                y + 12.0,
                escape(&label)
            );
        }
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    out.write_all(svg.as_bytes())?;
    Ok(())
}
