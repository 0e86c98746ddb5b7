//! Finds import circles, and compares docs/internals/design.md with imports and unsafe code.
//!
//! docs/internals/design.md has fenced blocks that this check reads. A block `house FOLDER` lists
//! what each file or folder in FOLDER may import. FOLDER is the `src` of a crate, such as
//! `vmm/src`, or a folder in it:
//!
//! ````text
//! ```house vmm/src
//! boot -> memory, state
//! memory ->
//! ```
//! ````
//!
//! A block `unsafe` lists the files and folders that may contain unsafe code, each with a reason:
//!
//! ````text
//! ```unsafe
//! vmm/src/kvm/ : ioctls
//! ```
//! ````

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::Result;

use super::graph::{Graph, circles};
use super::source::{SourceFile, is_test_file, sources};
use super::{conclude, picture};
use crate::process::root;

const DESIGN: &str = "docs/internals/design.md";
/// The largest circle of files.
const CIRCLE: usize = 4;
/// The crate whose folders form no circle.
const MONITOR: &str = "vmm/src";

type Units = BTreeMap<String, BTreeMap<String, String>>;

/// Fails when imports form a circle, or differ from docs/internals/design.md.
pub fn run() -> Result<()> {
    let sources = sources()?;
    let graphs = graphs(&sources);
    let design = fs::read_to_string(root().join(DESIGN))?;
    let mut findings = Vec::new();
    for graph in &graphs {
        findings.extend(file_circles(graph));
    }
    if let Some(monitor) = graphs.iter().find(|graph| graph.source_folder == MONITOR) {
        let units = monitor.units("");
        findings.extend(folder_circles(&units));
        let svg = fs::read_to_string(root().join(picture::PICTURE))?;
        findings.extend(picture::compare(&svg, &units));
    }
    let mut drawn = false;
    for block in blocks(&design, "house ") {
        drawn |= block.argument == MONITOR;
        findings.extend(compare(&block, &graphs));
    }
    if !drawn {
        findings.push(format!(
            "{DESIGN}: no block `house {MONITOR}`; cargo xtask check-house --print makes it"
        ));
    }
    findings.extend(compare_unsafe(&design, &sources));
    conclude("house", &findings)
}

/// Prints the blocks that match the tree.
pub fn print() -> Result<()> {
    let sources = sources()?;
    let graphs = graphs(&sources);
    let design = fs::read_to_string(root().join(DESIGN))?;
    let mut folders: Vec<String> = blocks(&design, "house ")
        .into_iter()
        .map(|block| block.argument)
        .collect();
    if folders.is_empty() {
        folders.push(MONITOR.to_owned());
    }
    for folder in folders {
        let Some(units) = units_of(&graphs, &folder) else {
            continue;
        };
        println!("```house {folder}");
        for (unit, imports) in units {
            let list: Vec<&str> = imports.keys().map(String::as_str).collect();
            println!("{}", format!("{unit} -> {}", list.join(", ")).trim_end());
        }
        println!("```\n");
    }
    println!("```unsafe");
    for path in unsafe_files(&sources) {
        println!("{path} : ");
    }
    println!("```");
    Ok(())
}

/// The imports of every crate of the workspace.
fn graphs(sources: &[SourceFile]) -> Vec<Graph> {
    let roots: BTreeSet<&str> = sources
        .iter()
        .filter(|source| !source.path.starts_with("guest-tests/") && !is_test_file(&source.path))
        .filter_map(|source| {
            let path = source.path.as_str();
            path.strip_suffix("/lib.rs")
                .or_else(|| path.strip_suffix("/main.rs"))
        })
        .filter(|folder| folder.ends_with("src"))
        .collect();
    roots
        .into_iter()
        .map(|folder| Graph::read(folder, sources))
        .collect()
}

fn file_circles(graph: &Graph) -> Vec<String> {
    let mut findings = Vec::new();
    for circle in graph
        .circles()
        .into_iter()
        .filter(|circle| circle.len() > CIRCLE)
    {
        let folder = &graph.source_folder;
        findings.push(format!(
            "{folder}: a circle of {} files, more than {CIRCLE}: {}",
            circle.len(),
            circle.join(" ")
        ));
        for file in &circle {
            for (target, name) in graph.imports[file]
                .iter()
                .filter(|(target, _)| circle.contains(target))
            {
                findings.push(format!("  {folder}/{file} imports {name} of {target}"));
            }
        }
    }
    findings
}

fn folder_circles(units: &Units) -> Vec<String> {
    let edges: BTreeMap<String, BTreeSet<String>> = units
        .iter()
        .map(|(unit, imports)| (unit.clone(), imports.keys().cloned().collect()))
        .collect();
    let mut findings = Vec::new();
    for circle in circles(&edges) {
        findings.push(format!(
            "{MONITOR}: folders in a circle: {}",
            circle.join(" ")
        ));
        for unit in &circle {
            let inside = units[unit]
                .iter()
                .filter(|(other, _)| circle.contains(other));
            findings.extend(inside.map(|(_, example)| format!("  {example}")));
        }
    }
    findings
}

/// A fenced block of docs/internals/design.md.
struct PageBlock {
    /// What follows the block's kind.
    argument: String,
    /// The lines, with their numbers.
    lines: Vec<(usize, String)>,
    /// The line of the fence.
    line: usize,
}

/// The fenced blocks whose info string begins with `kind`.
fn blocks(page: &str, kind: &str) -> Vec<PageBlock> {
    let mut found: Vec<PageBlock> = Vec::new();
    let mut inside = false;
    for (number, line) in page.lines().enumerate() {
        match line.strip_prefix("```") {
            Some(_) if inside => inside = false,
            Some(info) => {
                if let Some(argument) = format!("{info} ").strip_prefix(kind) {
                    let argument = argument.trim().to_owned();
                    found.push(PageBlock {
                        argument,
                        lines: Vec::new(),
                        line: number + 1,
                    });
                    inside = true;
                }
            }
            None => {
                if let Some(block) = found.last_mut().filter(|_| inside) {
                    block.lines.push((number + 1, line.to_owned()));
                }
            }
        }
    }
    found
}

/// The imports between the units of a folder, if a crate has it.
fn units_of(graphs: &[Graph], folder: &str) -> Option<Units> {
    graphs.iter().find_map(|graph| {
        let rest = folder.strip_prefix(&graph.source_folder)?;
        let inner = if rest.is_empty() {
            ""
        } else {
            rest.strip_prefix('/')?
        };
        Some(graph.units(inner)).filter(|units| !units.is_empty())
    })
}

/// Compares the lines of a block with the imports; returns the differences.
fn compare(block: &PageBlock, graphs: &[Graph]) -> Vec<String> {
    let folder = &block.argument;
    let Some(units) = units_of(graphs, folder) else {
        return vec![format!(
            "{DESIGN}:{}: there is no folder {folder} with Rust files",
            block.line
        )];
    };
    let mut findings = Vec::new();
    let mut drawn = BTreeMap::new();
    for (number, line) in &block.lines {
        let Some((unit, imports)) = line.split_once("->") else {
            findings.push(format!(
                "{DESIGN}:{number}: not `FOLDER -> FOLDERS`: {line}"
            ));
            continue;
        };
        let names = imports
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        drawn.insert(
            unit.trim().to_owned(),
            (*number, names.map(String::from).collect::<BTreeSet<_>>()),
        );
    }
    for (unit, imports) in &units {
        let Some((number, allowed)) = drawn.get(unit) else {
            findings.push(format!(
                "{DESIGN}:{}: {folder}/{unit} is not listed",
                block.line
            ));
            continue;
        };
        for (other, example) in imports
            .iter()
            .filter(|(other, _)| !allowed.contains(*other))
        {
            findings.push(format!(
                "{DESIGN}:{number}: {unit} may not import {other}, but {folder}/{example}"
            ));
        }
        for other in allowed.iter().filter(|other| !imports.contains_key(*other)) {
            findings.push(format!("{DESIGN}:{number}: {unit} does not import {other}"));
        }
    }
    for (unit, (number, _)) in drawn.iter().filter(|(unit, _)| !units.contains_key(*unit)) {
        findings.push(format!("{DESIGN}:{number}: there is no {folder}/{unit}"));
    }
    findings
}

/// The files that opt in to unsafe code.
fn unsafe_files(sources: &[SourceFile]) -> Vec<String> {
    let own = ["guest-tests/", "xtask/src/check/house.rs"];
    let files = sources
        .iter()
        .filter(|source| !own.iter().any(|own| source.path.starts_with(own)));
    let marks = ["expect(unsafe_code", "allow(unsafe_code"];
    files
        .filter(|source| {
            let dense: String = source.text.split_whitespace().collect();
            marks.iter().any(|mark| dense.contains(mark))
        })
        .map(|source| source.path.clone())
        .collect()
}

/// Compares the page's list of unsafe code with the tree; returns the differences.
fn compare_unsafe(design: &str, sources: &[SourceFile]) -> Vec<String> {
    let files = unsafe_files(sources);
    let blocks = blocks(design, "unsafe ");
    let Some(block) = blocks.first() else {
        return vec![format!(
            "{DESIGN}: no block `unsafe`; cargo xtask check-house --print makes it"
        )];
    };
    let mut findings = Vec::new();
    let mut listed = Vec::new();
    for (number, line) in block
        .lines
        .iter()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let (path, reason) = line.split_once(':').unwrap_or((line.as_str(), ""));
        if reason.trim().is_empty() {
            findings.push(format!("{DESIGN}:{number}: no reason: {line}"));
        }
        listed.push((*number, path.trim().to_owned()));
    }
    let covers = |entry: &str, file: &str| {
        file == entry || (entry.ends_with('/') && file.starts_with(entry))
    };
    for file in &files {
        if !listed.iter().any(|(_, entry)| covers(entry, file)) {
            findings.push(format!(
                "{file}: contains unsafe code, and {DESIGN} does not list it"
            ));
        }
    }
    for (number, entry) in &listed {
        if !files.iter().any(|file| covers(entry, file)) {
            findings.push(format!(
                "{DESIGN}:{number}: {entry} contains no unsafe code"
            ));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> SourceFile {
        SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
            tree: syn::parse_file(text).unwrap(),
        }
    }

    fn sample() -> Vec<SourceFile> {
        vec![
            source("a/src/lib.rs", "mod x; mod y;"),
            source("a/src/x.rs", "use crate::y::Y;"),
            source(
                "a/src/y.rs",
                "#![expect(unsafe_code, reason = \"..\")] pub struct Y;",
            ),
        ]
    }

    fn findings(design: &str) -> Vec<String> {
        let graphs = graphs(&sample());
        blocks(design, "house ")
            .iter()
            .flat_map(|block| compare(block, &graphs))
            .collect()
    }

    #[test]
    fn matching_picture_has_no_finding() {
        assert_eq!(
            findings("```house a/src\nx -> y\ny ->\n```\n"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn missing_and_stale_imports_are_found() {
        assert_eq!(
            findings("```house a/src\nx ->\ny -> x\n```\n"),
            [
                "docs/internals/design.md:2: x may not import y, but a/src/x.rs imports Y of y.rs",
                "docs/internals/design.md:3: y does not import x"
            ]
        );
    }

    #[test]
    fn missing_and_stale_units_are_found() {
        assert_eq!(
            findings("text\n```house a/src\nx -> y\nz ->\n```\n"),
            [
                "docs/internals/design.md:2: a/src/y is not listed",
                "docs/internals/design.md:4: there is no a/src/z"
            ]
        );
    }

    #[test]
    fn unlisted_and_stale_unsafe_files_are_found() {
        let found = compare_unsafe("```unsafe\na/src/x.rs : why\n```\n", &sample());
        assert_eq!(
            found,
            [
                "a/src/y.rs: contains unsafe code, and docs/internals/design.md does not list it",
                "docs/internals/design.md:2: a/src/x.rs contains no unsafe code"
            ]
        );
        assert!(compare_unsafe("```unsafe\na/src/ : why\n```\n", &sample()).is_empty());
    }
}
