//! `hindsight dump`: writes a guest as an ELF core file.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueHint};
use hindsight_gdb::{ClientStream, ListenAddress, RemoteFile};

use super::Status;

/// How long the server may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Zeros of this length become a hole in the file.
const HOLE_BYTES: usize = 4096;

/// Write a guest as an ELF core file, for gdb, crash and drgn.
#[derive(Debug, Args)]
#[command(after_help = "\
The guest stands still meanwhile, and runs on afterwards. One that waits for a debugger after a crash ends then.

Examples:
  hindsight run vmlinuz --initrd initrd.gz --gdb unix:linux.gdb
  hindsight dump unix:linux.gdb linux.core
  crash vmlinux linux.core")]
pub struct DumpArgs {
    /// The address of --gdb: tcp:HOST:PORT, :PORT or unix:PATH
    #[arg(value_name = "ADDRESS")]
    address: ListenAddress,
    /// File to write
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
}

/// Writes the guest to the file.
///
/// # Errors
///
/// When no guest can be debugged at the address, or the file cannot be written.
pub fn run(args: &DumpArgs) -> anyhow::Result<Status> {
    let stream = args.address.connect(ANSWER_LIMIT);
    let stream = stream.with_context(|| format!("no guest can be reached at {}", args.address))?;
    let remote = RemoteFile::open(stream, "/vmcore");
    let mut remote = remote.with_context(|| args.address.to_string())?;
    let name = || format!("{} cannot be written", args.file.display());
    let mut file = File::create(&args.file).with_context(name)?;
    let copied = copy(&mut remote, &mut file);
    let length = copied
        .inspect_err(|_| remove(&args.file))
        .with_context(name)?;
    let mebibytes = length.div_ceil(1 << 20);
    writeln!(io::stdout(), "{}: {mebibytes} MiB", args.file.display())?;
    Ok(Status::Success)
}

/// Removes a file that is not complete. Where that fails, the error that is reported counts.
fn remove(file: &Path) {
    let _ = std::fs::remove_file(file);
}

/// Copies the remote file with holes for its zeros, and returns its length.
fn copy(remote: &mut RemoteFile<ClientStream>, file: &mut File) -> io::Result<u64> {
    let mut offset = 0;
    loop {
        let bytes = remote.read_at(offset)?;
        if bytes.is_empty() {
            file.set_len(offset)?;
            return Ok(offset);
        }
        write_sparse(file, offset, &bytes)?;
        offset += bytes.len() as u64;
    }
}

fn write_sparse(file: &mut File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    for (index, piece) in (0..).zip(bytes.chunks(HOLE_BYTES)) {
        if piece.iter().any(|&byte| byte != 0) {
            file.seek(SeekFrom::Start(offset + index * HOLE_BYTES as u64))?;
            file.write_all(piece)?;
        }
    }
    Ok(())
}
