//! Words that no identifier contains, and types that are defined more than once.

use std::collections::BTreeMap;

use anyhow::Result;
use syn::visit::Visit;
use syn::{Ident, Item};

use super::source::{SourceFile, attributes, is_test, is_test_file, sources};
use super::{NameSettings, conclude, settings};

/// Fails when an identifier is in none of the field's words, or a type's name has two meanings.
pub fn run() -> Result<()> {
    let settings = settings()?.names;
    let sources = sources()?;
    let mut findings = Vec::new();
    for source in &sources {
        let mut visitor = Names {
            settings: &settings,
            path: &source.path,
            found: Vec::new(),
        };
        visitor.visit_file(&source.tree);
        findings.extend(visitor.found);
    }
    findings.extend(duplicates(&settings, &sources));
    conclude("names", &findings)
}

/// The words of an identifier, in lower case: `btm_sink` and `BtmSink` have two each.
fn words(name: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut previous_lower = false;
    for c in name.chars() {
        let boundary = c == '_' || (c.is_uppercase() && previous_lower);
        if boundary && !word.is_empty() {
            words.push(std::mem::take(&mut word));
        }
        if c != '_' {
            word.extend(c.to_lowercase());
        }
        previous_lower = c.is_lowercase() || c.is_ascii_digit();
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

/// The word for which an identifier is refused, and the reason; or None.
fn refusal(settings: &NameSettings, name: &str, is_module: bool) -> Option<(String, String)> {
    let words = words(name);
    if let Some(word) = words.iter().find(|word| settings.parts.contains(word)) {
        return Some((word.clone(), format!("'{name}' contains the word '{word}'")));
    }
    if let Some(text) = settings
        .texts
        .iter()
        .find(|text| name.contains(text.as_str()))
    {
        return Some((text.clone(), format!("'{name}' contains '{text}'")));
    }
    if words.len() == 1 && settings.whole.contains(&words[0]) {
        return Some((words[0].clone(), format!("'{name}' is no name")));
    }
    (is_module && settings.modules.iter().any(|module| module == name))
        .then(|| (name.to_owned(), format!("'{name}' is no name of a module")))
}

struct Names<'a> {
    settings: &'a NameSettings,
    path: &'a str,
    found: Vec<String>,
}

impl Names<'_> {
    fn check(&mut self, name: &Ident, is_module: bool) {
        let text = name.to_string();
        let Some((word, reason)) = refusal(self.settings, &text, is_module) else {
            return;
        };
        let mut allowed = self.settings.allow.iter();
        if !allowed.any(|it| it.covers(&text, self.path) || it.covers(&word, self.path)) {
            let line = name.span().start().line;
            self.found.push(format!("{}:{line}: {reason}", self.path));
        }
    }
}

impl<'a> Visit<'a> for Names<'_> {
    fn visit_item(&mut self, item: &'a Item) {
        match item {
            Item::Const(item) => self.check(&item.ident, false),
            Item::Enum(item) => self.check(&item.ident, false),
            Item::Macro(item) => {
                if let Some(name) = &item.ident {
                    self.check(name, false);
                }
            }
            Item::Mod(item) => self.check(&item.ident, true),
            Item::Static(item) => self.check(&item.ident, false),
            Item::Struct(item) => self.check(&item.ident, false),
            Item::Trait(item) => self.check(&item.ident, false),
            Item::Type(item) => self.check(&item.ident, false),
            Item::Union(item) => self.check(&item.ident, false),
            _ => {}
        }
        syn::visit::visit_item(self, item);
    }

    fn visit_signature(&mut self, signature: &'a syn::Signature) {
        self.check(&signature.ident, false);
        syn::visit::visit_signature(self, signature);
    }

    fn visit_field(&mut self, field: &'a syn::Field) {
        if let Some(name) = &field.ident {
            self.check(name, false);
        }
        syn::visit::visit_field(self, field);
    }

    fn visit_variant(&mut self, variant: &'a syn::Variant) {
        self.check(&variant.ident, false);
        syn::visit::visit_variant(self, variant);
    }

    fn visit_impl_item_const(&mut self, item: &'a syn::ImplItemConst) {
        self.check(&item.ident, false);
        syn::visit::visit_impl_item_const(self, item);
    }

    fn visit_trait_item_const(&mut self, item: &'a syn::TraitItemConst) {
        self.check(&item.ident, false);
        syn::visit::visit_trait_item_const(self, item);
    }

    fn visit_trait_item_type(&mut self, item: &'a syn::TraitItemType) {
        self.check(&item.ident, false);
        syn::visit::visit_trait_item_type(self, item);
    }

    fn visit_use_rename(&mut self, rename: &'a syn::UseRename) {
        self.check(&rename.rename, false);
    }

    /// Locals and parameters. A name in capitals in a pattern is a constant or a variant.
    fn visit_pat_ident(&mut self, pattern: &'a syn::PatIdent) {
        if !pattern.ident.to_string().starts_with(char::is_uppercase) {
            self.check(&pattern.ident, false);
        }
        syn::visit::visit_pat_ident(self, pattern);
    }
}

/// Returns the types that are defined more than once in the workspace, outside of tests.
fn duplicates(settings: &NameSettings, sources: &[SourceFile]) -> Vec<String> {
    let mut types: BTreeMap<String, Vec<(String, usize)>> = BTreeMap::new();
    for source in sources {
        let other_workspace = source.path.starts_with("guest-tests/");
        if other_workspace || is_test_file(&source.path) {
            continue;
        }
        let mut visitor = Types { found: Vec::new() };
        visitor.visit_file(&source.tree);
        for (name, line) in visitor.found {
            types
                .entry(name)
                .or_default()
                .push((source.path.clone(), line));
        }
    }
    let mut findings = Vec::new();
    for (name, places) in types {
        let rest = places.iter().filter(|(path, _)| {
            !settings
                .duplicates
                .iter()
                .any(|allowed| allowed.covers(&name, path))
        });
        if places.len() > 1 && rest.count() > 0 {
            let list: Vec<String> = places
                .iter()
                .map(|(path, line)| format!("{path}:{line}"))
                .collect();
            findings.push(format!(
                "{}: type {name} is defined {} times: {}",
                list[0],
                list.len(),
                list.join(" ")
            ));
        }
    }
    findings
}

struct Types {
    found: Vec<(String, usize)>,
}

impl<'a> Visit<'a> for Types {
    fn visit_item(&mut self, item: &'a Item) {
        if is_test(attributes(item)) {
            return;
        }
        let name = match item {
            Item::Enum(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        if let Some(name) = name {
            self.found
                .push((name.to_string(), name.span().start().line));
        }
        syn::visit::visit_item(self, item);
    }

    /// Types within functions are local to them.
    fn visit_block(&mut self, _: &'a syn::Block) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn sample() -> NameSettings {
        NameSettings {
            parts: list(&["told"]),
            texts: list(&["UD_"]),
            whole: list(&["place"]),
            modules: list(&["watch"]),
            allow: Vec::new(),
            duplicates: Vec::new(),
        }
    }

    #[test]
    fn words_are_split_at_underscores_and_capitals() {
        assert_eq!(words("is_told"), ["is", "told"]);
        assert_eq!(words("BtmSink2Told"), ["btm", "sink2", "told"]);
        assert_eq!(words("MAX_LEN"), ["max", "len"]);
    }

    #[test]
    fn forbidden_word_is_refused_anywhere() {
        assert!(refusal(&sample(), "was_told_twice", false).is_some());
        assert!(refusal(&sample(), "WasTold", false).is_some());
        assert!(refusal(&sample(), "untold", false).is_none());
    }

    #[test]
    fn whole_name_is_refused_alone_only() {
        assert!(refusal(&sample(), "Place", false).is_some());
        assert!(refusal(&sample(), "place_of_entry", false).is_none());
    }

    #[test]
    fn module_name_is_refused_for_modules_only() {
        assert!(refusal(&sample(), "watch", true).is_some());
        assert!(refusal(&sample(), "watch", false).is_none());
    }

    #[test]
    fn type_defined_twice_names_both_places() {
        let source = |path: &str, text: &str| SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
            tree: syn::parse_file(text).unwrap(),
        };
        let sources = [
            source(
                "a/src/lib.rs",
                "struct Event; #[cfg(test)] mod tests { struct Only; }",
            ),
            source("b/src/lib.rs", "\nenum Event {} struct Only;"),
        ];
        let found = duplicates(&sample(), &sources);
        assert_eq!(
            found,
            ["a/src/lib.rs:1: type Event is defined 2 times: a/src/lib.rs:1 b/src/lib.rs:2"]
        );
    }
}
