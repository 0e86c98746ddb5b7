//! The output of `hindsight test` while it runs.

use std::io::{self, Write};

use crate::harness::report::{Summary, tap, text};
use crate::harness::select::TestJob;
use crate::harness::verdict::CaseResult;

/// The output: lines for people or TAP, and the progress line.
pub(super) struct ReportConsole<'a> {
    pub(super) out: &'a mut dyn Write,
    pub(super) tap: bool,
    pub(super) progress: Option<text::ProgressLine>,
}

impl ReportConsole<'_> {
    pub(super) fn begin(&mut self, count: usize) -> io::Result<()> {
        if self.tap {
            tap::write_plan(&mut self.out, count)
        } else {
            Ok(())
        }
    }

    pub(super) fn progress(
        &mut self,
        jobs: &[TestJob],
        running: &[usize],
        ended: usize,
    ) -> io::Result<()> {
        let Some(progress) = &mut self.progress else {
            return Ok(());
        };
        let names: Vec<String> = running.iter().map(|index| jobs[*index].id()).collect();
        progress.show(&mut self.out, ended, jobs.len(), &names)
    }

    fn clear(&mut self) -> io::Result<()> {
        self.progress
            .as_mut()
            .map_or(Ok(()), |progress| progress.clear(&mut self.out))
    }

    pub(super) fn result(&mut self, number: usize, result: &CaseResult) -> io::Result<()> {
        self.clear()?;
        if self.tap {
            tap::write_result(&mut self.out, number, result)
        } else {
            text::write_result(&mut self.out, result)
        }
    }

    /// Writes the summary, which is the last line; in TAP it is a comment.
    pub(super) fn end(
        &mut self,
        results: &[CaseResult],
        count: usize,
        interrupted: bool,
    ) -> io::Result<Summary> {
        self.clear()?;
        let mut summary = Summary::default();
        results.iter().for_each(|result| summary.count(result));
        if interrupted {
            let missing = format!("interrupted: {} cases not run", count - results.len());
            if self.tap {
                tap::write_bail_out(&mut self.out, &missing)?;
            } else {
                writeln!(self.out, "{missing}")?;
            }
        }
        writeln!(self.out, "{}{summary}", if self.tap { "# " } else { "" })?;
        self.out.flush()?;
        Ok(summary)
    }
}
