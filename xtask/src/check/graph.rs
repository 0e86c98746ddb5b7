//! Which file of a crate imports from which.
//!
//! An import counts for the file that defines the item: a `pub use` is followed, and is no import of
//! the file that re-exports. Tests are left out. Paths within macros count as well.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::Visit;
use syn::{Item, UseTree, Visibility};

use super::source::{SourceFile, attributes, is_test, is_test_file};

/// The imports of a crate: for each file the files that it imports from, with an imported name.
pub struct Graph {
    /// The folder of the crate's sources, such as `vmm/src`.
    pub source_folder: String,
    /// file -> file -> a name that it imports; files are relative to the folder.
    pub imports: BTreeMap<String, BTreeMap<String, String>>,
}

type Path = Vec<String>;

/// A file of the crate, as a module.
#[derive(Default)]
struct FileModule {
    file: String,
    /// The items that it defines.
    items: BTreeSet<String>,
    /// The names that it re-exports or imports, and their paths as they are written.
    bindings: BTreeMap<String, (Path, bool)>,
    /// The modules whose names it imports or re-exports all, and whether it re-exports them.
    globs: Vec<(Path, bool)>,
    /// The paths that its code uses.
    paths: BTreeSet<Path>,
}

struct Crate {
    modules: BTreeMap<Path, FileModule>,
}

impl Graph {
    /// Reads the imports of the crate whose sources are in `source_folder`.
    pub fn read(source_folder: &str, sources: &[SourceFile]) -> Self {
        let prefix = format!("{source_folder}/");
        let library = format!("{prefix}lib.rs");
        let is_library = sources.iter().any(|source| source.path == library);
        let mut modules = BTreeMap::new();
        for source in sources {
            let Some(file) = source.path.strip_prefix(&prefix) else {
                continue;
            };
            // A program beside a library is a crate of its own.
            let is_program = is_library && file == "main.rs";
            if is_test_file(&source.path) || is_program || file.starts_with("bin/") {
                continue;
            }
            let mut collector = Collector {
                module: FileModule {
                    file: file.to_owned(),
                    ..FileModule::default()
                },
            };
            collector.visit_file(&source.tree);
            modules.insert(module_path(file), collector.module);
        }
        let whole = Crate { modules };
        let imports = whole
            .modules
            .iter()
            .map(|(path, module)| (module.file.clone(), whole.imports_of(path, module)));
        Self {
            source_folder: source_folder.to_owned(),
            imports: imports.collect(),
        }
    }

    /// The strongly connected components of more than one file, the largest first.
    pub fn circles(&self) -> Vec<Vec<String>> {
        let edges = self
            .imports
            .iter()
            .map(|(file, imports)| (file.clone(), imports.keys().cloned().collect()));
        circles(&edges.collect())
    }

    /// The imports between the units of a folder, which are its files and subfolders.
    ///
    /// `folder` is relative to the crate's sources, "" for all of them. The roots `lib.rs` and `main.rs`
    /// and the folder's own `mod.rs` are no units. Each import comes with one file that has it.
    pub fn units(&self, folder: &str) -> BTreeMap<String, BTreeMap<String, String>> {
        let mut units: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for (file, imports) in &self.imports {
            let Some(unit) = unit_of(folder, file) else {
                continue;
            };
            let entry = units.entry(unit.clone()).or_default();
            for (target, name) in imports {
                if let Some(other) = unit_of(folder, target).filter(|other| *other != unit) {
                    entry
                        .entry(other)
                        .or_insert_with(|| format!("{file} imports {name} of {target}"));
                }
            }
        }
        units
    }
}

/// The file or subfolder of a folder that holds a file, if it is a unit.
fn unit_of(folder: &str, file: &str) -> Option<String> {
    let rest = match folder {
        "" => file,
        _ => file.strip_prefix(folder)?.strip_prefix('/')?,
    };
    match rest.split_once('/') {
        Some((subfolder, _)) => Some(subfolder.to_owned()),
        None => match rest.strip_suffix(".rs")? {
            "lib" | "main" | "mod" => None,
            name => Some(name.to_owned()),
        },
    }
}

/// The strongly connected components of more than one node, the largest first.
pub fn circles(edges: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<String>> {
    let reach = |from: &str| {
        let mut reached: BTreeSet<&str> = BTreeSet::new();
        let mut queue = vec![from];
        while let Some(node) = queue.pop() {
            for next in edges.get(node).into_iter().flatten() {
                if reached.insert(next) {
                    queue.push(next);
                }
            }
        }
        reached
    };
    let reachable: BTreeMap<&str, BTreeSet<&str>> = edges
        .keys()
        .map(|node| (node.as_str(), reach(node)))
        .collect();
    let mut done: BTreeSet<&str> = BTreeSet::new();
    let mut found = Vec::new();
    for (node, targets) in &reachable {
        if done.contains(node) || !targets.contains(node) {
            continue;
        }
        let mutual = |other: &&&str| {
            reachable
                .get(**other)
                .is_some_and(|back| back.contains(node))
        };
        let circle: Vec<&str> = targets.iter().filter(mutual).copied().collect();
        done.extend(&circle);
        if circle.len() > 1 {
            found.push(circle.into_iter().map(String::from).collect());
        }
    }
    found.sort_by_key(|circle: &Vec<String>| std::cmp::Reverse(circle.len()));
    found
}

/// The path of the module in a file.
fn module_path(file: &str) -> Path {
    let mut parts: Path = file
        .trim_end_matches(".rs")
        .split('/')
        .map(String::from)
        .collect();
    if parts
        .last()
        .is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main"))
    {
        parts.pop();
    }
    parts
}

impl Crate {
    fn imports_of(&self, path: &Path, module: &FileModule) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let mut add = |target: Option<Path>, name: &str| {
            let file = target
                .and_then(|target| self.modules.get(&target))
                .map(|target| &target.file);
            if let Some(file) = file.filter(|file| **file != module.file) {
                found.entry(file.clone()).or_insert_with(|| name.to_owned());
            }
        };
        for (name, (target, is_public)) in &module.bindings {
            let resolved = self.resolve(path, target, 0);
            let is_module = self
                .absolute(path, target)
                .is_some_and(|t| self.modules.contains_key(&t));
            // A re-export is no import, and a module is imported for the paths that begin with it.
            if !is_public && !is_module {
                add(resolved, name);
            }
        }
        for used in &module.paths {
            if let Some((target, _)) = module.bindings.get(&used[0]) {
                let full: Path = target.iter().chain(&used[1..]).cloned().collect();
                add(self.resolve(path, &full, 0), &used.join("::"));
            } else if is_relative(&used[0]) || self.modules.contains_key(&child(path, &used[0])) {
                add(self.resolve(path, used, 0), &used.join("::"));
            } else {
                for (glob, is_public) in &module.globs {
                    let full: Path = glob.iter().chain(used).cloned().collect();
                    if !is_public && self.defines(path, glob, &used[0]) {
                        add(self.resolve(path, &full, 0), &used.join("::"));
                    }
                }
            }
        }
        found
    }

    /// Whether the module at a path has an item or a re-export of this name.
    fn defines(&self, from: &Path, target: &Path, name: &str) -> bool {
        let module = self
            .absolute(from, target)
            .and_then(|target| self.modules.get(&target));
        module
            .is_some_and(|module| module.items.contains(name) || module.bindings.contains_key(name))
    }

    /// A path as it is written in a module, from the root of the crate; None for other crates.
    fn absolute(&self, from: &Path, path: &[String]) -> Option<Path> {
        let mut base = match path.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => from.clone(),
            first if self.modules.contains_key(&child(from, first)) => {
                return Some(from.iter().chain(path).cloned().collect());
            }
            _ => return None,
        };
        let mut rest = path.iter().peekable();
        while let Some(part) = rest.next_if(|part| is_relative(part)) {
            if part == "super" {
                base.pop();
            }
        }
        base.extend(rest.cloned());
        Some(base)
    }

    /// The module that defines what a path names, with re-exports followed.
    fn resolve(&self, from: &Path, path: &[String], depth: usize) -> Option<Path> {
        let absolute = self.absolute(from, path)?;
        let mut module = Vec::new();
        for (number, part) in absolute.iter().enumerate() {
            let next = child(&module, part);
            if self.modules.contains_key(&next) {
                module = next;
                continue;
            }
            let here = self.modules.get(&module)?;
            if here.items.contains(part) || depth > 8 {
                return Some(module);
            }
            let rest = &absolute[number + 1..];
            if let Some((target, _)) = here.bindings.get(part) {
                let full: Path = target.iter().chain(rest).cloned().collect();
                return self.resolve(&module, &full, depth + 1);
            }
            for (glob, _) in &here.globs {
                if self.defines(&module, glob, part) {
                    let full: Path = glob.iter().chain(&absolute[number..]).cloned().collect();
                    return self.resolve(&module, &full, depth + 1);
                }
            }
            return Some(module);
        }
        Some(module)
    }
}

fn is_relative(part: &str) -> bool {
    matches!(part, "crate" | "self" | "super")
}

fn child(module: &Path, name: &str) -> Path {
    let mut path = module.clone();
    path.push(name.to_owned());
    path
}

/// Collects what a file defines, imports and uses.
struct Collector {
    module: FileModule,
}

impl Collector {
    fn add_use(&mut self, tree: &UseTree, prefix: &Path, is_public: bool) {
        match tree {
            UseTree::Path(path) => {
                self.add_use(
                    &path.tree,
                    &child(prefix, &path.ident.to_string()),
                    is_public,
                );
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                let (name, path) = if name == "self" {
                    (prefix.last().cloned().unwrap_or_default(), prefix.clone())
                } else {
                    (name.clone(), child(prefix, &name))
                };
                self.module.bindings.insert(name, (path, is_public));
            }
            UseTree::Rename(rename) => {
                let name = rename.ident.to_string();
                let path = if name == "self" {
                    prefix.clone()
                } else {
                    child(prefix, &name)
                };
                self.module
                    .bindings
                    .insert(rename.rename.to_string(), (path, is_public));
            }
            UseTree::Glob(_) => self.module.globs.push((prefix.clone(), is_public)),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_use(tree, prefix, is_public);
                }
            }
        }
    }

    /// Finds the paths in a macro's tokens.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Path = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.finish(&mut path);
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => {
                    colons += 1
                }
                TokenTree::Group(group) => {
                    self.finish(&mut path);
                    self.add_tokens(group.stream());
                }
                _ => self.finish(&mut path),
            }
        }
        self.finish(&mut path);
    }

    fn finish(&mut self, path: &mut Path) {
        if !path.is_empty() {
            self.module.paths.insert(std::mem::take(path));
        }
    }
}

impl<'a> Visit<'a> for Collector {
    fn visit_item(&mut self, item: &'a Item) {
        if is_test(attributes(item)) {
            return;
        }
        let name = match item {
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Macro(item) => item.ident.as_ref(),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        if let Some(name) = name {
            self.module.items.insert(name.to_string());
        }
        if let Item::Use(item) = item {
            let is_public = !matches!(item.vis, Visibility::Inherited);
            self.add_use(&item.tree, &Vec::new(), is_public);
            return;
        }
        syn::visit::visit_item(self, item);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let parts = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string())
            .collect();
        self.module.paths.insert(parts);
        syn::visit::visit_path(self, path);
    }

    /// `pub(super)` and `pub(in path)` import nothing.
    fn visit_visibility(&mut self, _: &'a Visibility) {}

    fn visit_macro(&mut self, item: &'a syn::Macro) {
        self.add_tokens(item.tokens.clone());
        syn::visit::visit_macro(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(files: &[(&str, &str)]) -> Graph {
        let sources: Vec<SourceFile> = files
            .iter()
            .map(|(path, text)| SourceFile {
                path: format!("a/src/{path}"),
                text: (*text).to_owned(),
                tree: syn::parse_file(text).unwrap(),
            })
            .collect();
        Graph::read("a/src", &sources)
    }

    fn imports(graph: &Graph, file: &str) -> Vec<String> {
        graph.imports[file].keys().cloned().collect()
    }

    #[test]
    fn import_is_followed_through_a_re_export() {
        let graph = graph(&[
            ("lib.rs", "mod x; mod y;"),
            ("x/mod.rs", "mod inner; pub use inner::Thing;"),
            ("x/inner.rs", "pub struct Thing;"),
            ("y.rs", "use crate::x::Thing; fn f(_: Thing) {}"),
        ]);
        assert_eq!(imports(&graph, "y.rs"), ["x/inner.rs"]);
        assert_eq!(imports(&graph, "x/mod.rs"), Vec::<String>::new());
    }

    #[test]
    fn path_in_code_and_in_a_macro_is_an_import() {
        let graph = graph(&[
            ("lib.rs", "mod x; mod y; mod z;"),
            ("x.rs", "pub const A: u8 = 1;"),
            ("y.rs", "fn f() -> u8 { crate::x::A }"),
            ("z.rs", "use super::x; fn f() { assert_eq!(x::A, 1) }"),
        ]);
        assert_eq!(imports(&graph, "y.rs"), ["x.rs"]);
        assert_eq!(imports(&graph, "z.rs"), ["x.rs"]);
    }

    #[test]
    fn tests_do_not_import() {
        let graph = graph(&[
            ("lib.rs", "mod x; mod y;"),
            ("x.rs", "pub const A: u8 = 1;"),
            ("y.rs", "#[cfg(test)] mod tests { use crate::x::A; }"),
        ]);
        assert_eq!(imports(&graph, "y.rs"), Vec::<String>::new());
    }

    #[test]
    fn glob_import_counts_for_the_names_in_use() {
        let graph = graph(&[
            ("lib.rs", "mod x; mod y;"),
            ("x.rs", "pub struct A; pub struct B;"),
            ("y.rs", "use crate::x::*; fn f(_: A) {}"),
        ]);
        assert_eq!(imports(&graph, "y.rs"), ["x.rs"]);
    }

    #[test]
    fn restricted_visibility_is_no_import() {
        let graph = graph(&[
            ("lib.rs", "mod x;"),
            ("x/mod.rs", "mod a; pub struct X;"),
            ("x/a.rs", "pub(super) struct A; pub(in crate::x) struct B;"),
        ]);
        assert_eq!(imports(&graph, "x/a.rs"), Vec::<String>::new());
    }

    #[test]
    fn import_circle_is_found() {
        let graph = graph(&[
            ("lib.rs", "mod x; mod y; mod z;"),
            ("x.rs", "use crate::y::Y; pub struct X;"),
            ("y.rs", "use crate::x::X; pub struct Y;"),
            ("z.rs", "use crate::x::X;"),
        ]);
        assert_eq!(graph.circles(), [["x.rs", "y.rs"]]);
    }

    #[test]
    fn units_are_files_and_subfolders() {
        let graph = graph(&[
            ("lib.rs", "mod x; mod y;"),
            ("x/mod.rs", "mod a; mod b; pub use a::A;"),
            ("x/a.rs", "pub struct A;"),
            ("x/b.rs", "use super::a::A;"),
            ("y.rs", "use crate::x::A;"),
        ]);
        let units = graph.units("");
        assert_eq!(units.keys().collect::<Vec<_>>(), ["x", "y"]);
        assert_eq!(units["y"].keys().collect::<Vec<_>>(), ["x"]);
        assert_eq!(graph.units("x")["b"].keys().collect::<Vec<_>>(), ["a"]);
    }
}
