//! Puts the linker script where the linker of a dependent payload finds it.

fn main() {
    println!("cargo::rerun-if-changed=hindsight-guest.ld");
    println!("cargo::rustc-link-search={}", env!("CARGO_MANIFEST_DIR"));
}
