//! Detects builds without tail-call optimization, and builds for a sanitizer.
//!
//! The former need a dispatch loop, the latter memory accesses that the sanitizer can observe.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(hindsight_trampoline)");
    println!("cargo::rustc-check-cfg=cfg(hindsight_sanitizer)");
    println!("cargo::rerun-if-changed=build.rs");
    let optimized = std::env::var("OPT_LEVEL").is_ok_and(|level| level != "0");
    let sanitizer = std::env::var("CARGO_CFG_SANITIZE").is_ok_and(|list| !list.is_empty());
    if sanitizer {
        println!("cargo::rustc-cfg=hindsight_sanitizer");
    }
    if sanitizer || !optimized {
        println!("cargo::rustc-cfg=hindsight_trampoline");
    }
}
