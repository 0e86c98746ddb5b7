//! Links payloads with the runtime's linker script, at the address it names.

fn main() {
    println!("cargo::rustc-link-arg-bins=-Thindsight-guest.ld");
    println!("cargo::rustc-link-arg-bins=--no-pie");
    println!("cargo::rustc-link-arg-bins=--build-id=none");
}
