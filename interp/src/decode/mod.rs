//! From bytes to blocks of operations.

mod block;
mod dead_flags;
mod flag_use;
mod operands;
mod select;
#[cfg(test)]
mod tests;
mod transaction;
