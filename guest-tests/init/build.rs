//! Links a static Linux program at a fixed address.

fn main() {
    println!("cargo::rustc-link-arg-bins=--no-pie");
    println!("cargo::rustc-link-arg-bins=--build-id=none");
}
