//! The commands behind gdb's `monitor`.
//!
//! Each command is a row of a table: its name, its arguments, its help and its function. A
//! machine adds its own by [`MachineCommands`](crate::target::MachineCommands). An error is one line.

mod arguments;
mod branches;
mod command;
mod descriptors;
mod disassembly;
mod kaslr;
mod machine;
mod paging;
mod registers;
mod settings;
mod stops;
mod table;

pub use arguments::{no_arguments, parse_number};
pub(crate) use table::run;
