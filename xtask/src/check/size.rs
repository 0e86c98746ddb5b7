//! The length of files and functions.

use anyhow::Result;
use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{Block, Expr, ExprMatch, Ident, Item, Stmt};

use super::source::{attributes, is_test, sources, test_lines};
use super::{SizeSettings, conclude, settings};

/// The lines of a flat match's arm.
const ARM_LINES: usize = 5;
/// The lines around a flat match.
const LINES_BESIDE: usize = 20;

/// Fails when a file or a function is too long.
pub fn run() -> Result<()> {
    let settings = settings()?.size;
    let mut findings = Vec::new();
    for source in sources()? {
        let lines = source.text.lines().count() - test_lines(&source.tree);
        let limit = settings.file_lines;
        if lines > limit && !is_allowed(&settings, &source.path, &source.path) {
            findings.push(format!(
                "{}: {lines} lines without tests, more than {limit}",
                source.path
            ));
        }
        let mut visitor = FunctionVisitor {
            settings: &settings,
            path: &source.path,
            found: Vec::new(),
        };
        visitor.visit_file(&source.tree);
        findings.extend(visitor.found);
    }
    conclude("size", &findings)
}

fn is_allowed(settings: &SizeSettings, name: &str, path: &str) -> bool {
    settings
        .allow
        .iter()
        .any(|allowed| allowed.covers(name, path))
}

struct FunctionVisitor<'a> {
    settings: &'a SizeSettings,
    path: &'a str,
    found: Vec<String>,
}

impl FunctionVisitor<'_> {
    fn check(&mut self, name: &Ident, block: &Block) {
        let start = name.span().start().line;
        let lines = block.span().end().line + 1 - start;
        let name = name.to_string();
        let limit = self.settings.function_lines;
        if lines > limit && !is_flat(block) && !is_allowed(self.settings, &name, self.path) {
            self.found.push(format!(
                "{}:{start}: fn {name}: {lines} lines, more than {limit}",
                self.path
            ));
        }
    }
}

impl<'a> Visit<'a> for FunctionVisitor<'_> {
    fn visit_item(&mut self, item: &'a Item) {
        if !is_test(attributes(item)) {
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_item_fn(&mut self, function: &'a syn::ItemFn) {
        self.check(&function.sig.ident, &function.block);
        syn::visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'a syn::ImplItemFn) {
        self.check(&function.sig.ident, &function.block);
        syn::visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'a syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.check(&function.sig.ident, block);
        }
        syn::visit::visit_trait_item_fn(self, function);
    }
}

/// Whether a body is one flat match, with few lines besides: each arm takes a few lines at most.
fn is_flat(block: &Block) -> bool {
    let found = block.stmts.iter().filter_map(|statement| match statement {
        Stmt::Expr(expression, _) => match_of(expression),
        Stmt::Local(local) => local.init.as_ref().and_then(|init| match_of(&init.expr)),
        _ => None,
    });
    let Some(longest) = found.max_by_key(|found| lines(&found.span())) else {
        return false;
    };
    let outside = lines(&block.span()) - lines(&longest.span());
    outside <= LINES_BESIDE
        && longest
            .arms
            .iter()
            .all(|arm| lines(&arm.span()) <= ARM_LINES)
}

fn match_of(expression: &Expr) -> Option<&ExprMatch> {
    match expression {
        Expr::Match(found) => Some(found),
        Expr::Call(call) => call.args.iter().find_map(match_of),
        Expr::Try(inner) => match_of(&inner.expr),
        Expr::Return(inner) => inner.expr.as_deref().and_then(match_of),
        _ => None,
    }
}

fn lines(span: &proc_macro2::Span) -> usize {
    span.end().line + 1 - span.start().line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Block {
        syn::parse_str(text).unwrap()
    }

    #[test]
    fn match_with_short_arms_is_flat() {
        assert!(is_flat(&body(
            "{ let a = 1; match a {\n 1 => 2,\n _ => {\n 3\n }\n } }"
        )));
    }

    #[test]
    fn match_with_a_long_arm_is_not_flat() {
        assert!(!is_flat(&body(
            "{ match a {\n 1 => 2,\n _ => {\n1;\n2;\n3;\n4;\n5\n }\n } }"
        )));
    }

    #[test]
    fn body_without_match_is_not_flat() {
        assert!(!is_flat(&body("{ a(); b() }")));
    }
}
