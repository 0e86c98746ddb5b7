//! From bytes to blocks of operations.

mod block;
mod control;
mod dead_flags;
mod fuse;
mod integer;
mod operands;
mod select;
#[cfg(test)]
mod tests;
mod transaction;
mod without_flags;
