//! Runs the monitor's gdb tests in a lab.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::{Lab, LabArguments, folder, run};
use crate::artifacts::{build_static_binary, build_static_test};
use crate::guests::initramfs::GuestFile;
use crate::guests::{gdb, make_images};
use crate::process::{existing_file, root};

/// Runs in a lab the gdb tests that `cargo test --test gdb` runs here, all but that of lldb, with
/// `--engine auto`: under the lab's KVM as far as it can do what they require, in the interpreter
/// beyond. A line for each is shown when it ends, and all of them are printed at the end.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Exit status: 0 all passed, 1 some failed, else that of ci/lab.")]
pub struct LabGdbArguments {
    /// The lab.
    pub lab: Lab,
    /// A statically linked hindsight [default: builds one in target/lab/build].
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
    /// Also the tests with Debian's kernel, which take long.
    #[arg(long)]
    pub linux: bool,
    /// Time limit of all of it [default: 1200 amd, 5400 intel].
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,
    /// Only tests whose names contain one of these.
    #[arg(last = true, value_name = "NAME")]
    pub names: Vec<String>,
}

/// Runs the tests; returns the exit status.
pub fn run_tests(arguments: &LabGdbArguments) -> Result<u8> {
    let lab = arguments.lab;
    let binary = match &arguments.binary {
        Some(binary) => existing_file("--binary", binary)?,
        None => build_static_binary()?,
    };
    let files = folder(&format!("{}-gdb-files", lab.name()));
    let out = folder(&format!("{}-gdb-sessions", lab.name()));
    let mut options = LabArguments::new(lab);
    options.files = gdb::make(&files)?;
    let tests = files.join("gdb-tests");
    build_static_test("gdb", &tests)?;
    options.files.push(GuestFile::new(tests, "bin/gdb-tests"));
    options.files.push(GuestFile::in_files(
        root().join("ci/guest/lab-gdb-sessions"),
    )?);
    for source in gdb::guest_sources()? {
        // Where gdb finds what the guests' debugging information names.
        let guest = PathBuf::from("files").join(source.strip_prefix(root())?);
        options.files.push(GuestFile::new(source, guest));
    }
    if arguments.linux {
        let images = root().join("target/guests");
        make_images(&images)?;
        for image in ["vmlinuz", "initrd.gz"] {
            options.files.push(GuestFile::in_files(images.join(image))?);
        }
    }
    let default = match lab {
        Lab::Amd => 1200,
        Lab::Intel => 5400,
    };
    let timeout = arguments.timeout.unwrap_or(default);
    (options.limit, options.timeout) = (Some(timeout), Some(timeout));
    (options.binary, options.out) = (Some(binary), Some(out.clone()));
    options.command = vec!["sh".to_owned(), "/files/lab-gdb-sessions".to_owned()];
    options.command.extend(arguments.names.iter().cloned());
    fs::remove_file(out.join("sessions.txt")).ok();
    let status = run(&options)?;
    print!(
        "{}",
        fs::read_to_string(out.join("sessions.txt")).unwrap_or_default()
    );
    Ok(status)
}
