//! Arguments of the package's methods, as Rust's types.

use pyo3::prelude::*;

/// An address, or the name of a symbol.
#[derive(FromPyObject)]
pub(crate) enum Location {
    #[pyo3(transparent, annotation = "int")]
    Address(u64),
    #[pyo3(transparent, annotation = "str")]
    Symbol(String),
}

/// Text or bytes.
#[derive(FromPyObject)]
pub(crate) enum TextOrBytes {
    #[pyo3(transparent, annotation = "str")]
    Text(String),
    #[pyo3(transparent, annotation = "bytes")]
    Bytes(Vec<u8>),
}

impl TextOrBytes {
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::Text(text) => text.into_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// One location, or a location and a number of bytes.
#[derive(FromPyObject)]
pub(crate) enum Range {
    #[pyo3(transparent, annotation = "tuple[int | str, int]")]
    Bytes((Location, u64)),
    #[pyo3(transparent, annotation = "int | str")]
    Quadword(Location),
}

impl Location {
    /// The linear address.
    pub(crate) fn find(
        self,
        machine: &mut hindsight_api::Machine,
    ) -> Result<u64, hindsight_api::Error> {
        match self {
            Self::Address(address) => Ok(address),
            Self::Symbol(name) => machine.symbol(&name),
        }
    }
}

impl Range {
    /// The linear address and the length; 8 bytes without a length.
    pub(crate) fn find(
        self,
        machine: &mut hindsight_api::Machine,
    ) -> Result<(u64, u64), hindsight_api::Error> {
        match self {
            Self::Bytes((location, len)) => Ok((location.find(machine)?, len)),
            Self::Quadword(location) => Ok((location.find(machine)?, 8)),
        }
    }
}
