//! The Rust files of the checkout, and which of their items are tests.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use proc_macro2::TokenStream;
use syn::visit::Visit;
use syn::{Attribute, Item};
use xshell::cmd;

use crate::process::{root, shell};

/// A parsed file.
pub struct SourceFile {
    /// The file's path, relative to the checkout.
    pub path: String,
    /// The file's text.
    pub text: String,
    /// The file's syntax tree.
    pub tree: syn::File,
}

/// The files that git knows or would add, with this extension, relative to the checkout.
pub fn files(extension: &str) -> Result<Vec<String>> {
    let shell = shell()?;
    let pattern = format!("*.{extension}");
    let list = cmd!(
        shell,
        "git ls-files --cached --others --exclude-standard -- {pattern}"
    );
    let list = list.quiet().read()?;
    let mut names: Vec<String> = list
        .lines()
        .filter(|name| root().join(name).is_file())
        .map(String::from)
        .collect();
    names.sort();
    names.dedup();
    Ok(names)
}

/// All Rust files of the checkout.
pub fn sources() -> Result<Vec<SourceFile>> {
    files("rs")?.into_iter().map(read).collect()
}

fn read(path: String) -> Result<SourceFile> {
    let text = fs::read_to_string(root().join(&path))?;
    let tree = syn::parse_file(&text).with_context(|| format!("{path} is no Rust"))?;
    Ok(SourceFile { path, text, tree })
}

/// Whether a file holds nothing but tests, benchmarks, examples or fuzz targets.
pub fn is_test_file(path: &str) -> bool {
    let parts: Vec<&str> = Path::new(path)
        .iter()
        .filter_map(|part| part.to_str())
        .collect();
    let folders = ["tests", "benches", "examples", "fuzz", "fuzz_targets"];
    parts
        .iter()
        .any(|part| folders.contains(part) || *part == "tests.rs" || *part == "build.rs")
}

/// Whether attributes limit an item to tests.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        if attribute.path().is_ident("test") {
            return true;
        }
        let Ok(list) = attribute.meta.require_list() else {
            return false;
        };
        attribute.path().is_ident("cfg") && requires_test(list.tokens.clone())
    })
}

/// Whether a cfg predicate holds in tests only: `test`, or `all(test, ..)`.
fn requires_test(tokens: TokenStream) -> bool {
    let text = tokens.to_string().replace(' ', "");
    text == "test"
        || text.starts_with("all(test,")
        || text == "loom"
        || text.starts_with("all(loom,")
}

/// The attributes of an item.
pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Counts the lines of test items of a file.
pub fn test_lines(tree: &syn::File) -> usize {
    struct Counter(usize);
    impl<'a> Visit<'a> for Counter {
        fn visit_item(&mut self, item: &'a Item) {
            if is_test(attributes(item)) {
                let span = syn::spanned::Spanned::span(item);
                self.0 += span.end().line + 1 - span.start().line;
            } else {
                syn::visit::visit_item(self, item);
            }
        }
    }
    let mut counter = Counter(0);
    counter.visit_file(tree);
    counter.0
}
