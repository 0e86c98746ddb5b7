//! `hindsight run` with an image of every boot protocol: the guest's state at its entry, and with firmware.

#[cfg(test)]
mod firmware;
#[cfg(test)]
mod guest;
#[cfg(test)]
#[path = "../../src/boot/tests/images.rs"]
#[expect(dead_code, reason = "shared with the unit tests of the loaders")]
mod images;
#[cfg(test)]
mod protocols;
