//! From bytes to blocks of operations.

mod block;
mod control;
mod dead_flags;
mod flag_use;
mod integer;
mod operands;
mod select;
#[cfg(test)]
mod tests;
mod transaction;
