//! From bytes to blocks of operations.

mod block;
mod effects;
mod operands;
mod quiet;
mod select;
#[cfg(test)]
mod tests;
mod transaction;

pub(crate) use block::EXACT;
