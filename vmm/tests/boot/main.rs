//! `hindsight run` on an image of every boot protocol: what the guest finds at its entry.

#[cfg(test)]
mod guest;
#[cfg(test)]
#[path = "../../src/boot/tests/images.rs"]
#[expect(dead_code, reason = "shared with the unit tests of the loaders")]
mod images;
#[cfg(test)]
mod protocols;
