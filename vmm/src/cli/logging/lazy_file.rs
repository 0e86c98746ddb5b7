//! A file that is created when the first line is written to it.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tracing_subscriber::fmt::MakeWriter;

use crate::output::Output;

/// A file that is created by the first write, or by [`LazyFile::open`].
///
/// A run that fails before its machine exists thus leaves no empty file behind.
#[derive(Clone, Debug)]
pub(super) struct LazyFile(Arc<LazyFileState>);

#[derive(Debug)]
struct LazyFileState {
    path: PathBuf,
    output: Output,
    file: OnceLock<io::Result<File>>,
}

impl LazyFile {
    /// A file at `path`, which does not yet exist; `output` counts what is written.
    pub(super) fn new(path: PathBuf, output: Output) -> Self {
        Self(Arc::new(LazyFileState {
            path,
            output,
            file: OnceLock::new(),
        }))
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.0.path
    }

    /// Creates the file, if no write has done so.
    pub(super) fn open(&self) -> io::Result<&File> {
        let file = self.0.file.get_or_init(|| File::create(&self.0.path));
        file.as_ref().map_err(|error| {
            let code = error.raw_os_error();
            code.map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
        })
    }
}

impl Write for LazyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut file = self.open()?;
        self.0.output.write_with(bytes, |part| file.write(part))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.open()?.flush()
    }
}

impl<'a> MakeWriter<'a> for LazyFile {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
