//! The `hindsight` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    hindsight_vmm::cli::main()
}
