//! The initramfs of the guest, in the format newc of cpio.

use std::io::Write;

/// The guest's first program; `None` in a build without payloads.
pub(super) const INIT: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/init.rs"));

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

/// An archive under construction.
#[derive(Debug, Default)]
pub(super) struct Initramfs {
    archive: Vec<u8>,
    entries: u32,
}

impl Initramfs {
    /// Adds a directory.
    pub(super) fn add_directory(&mut self, name: &str) {
        self.add(name, DIRECTORY, &[]);
    }

    /// Adds a file that may be executed.
    pub(super) fn add_file(&mut self, name: &str, contents: &[u8]) {
        self.add(name, PROGRAM, contents);
    }

    fn add(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let fields = [
            u64::from(self.entries),
            mode.into(),
            // User, group, links, time.
            0,
            0,
            1,
            0,
            contents.len() as u64,
            // Device numbers.
            0,
            0,
            0,
            0,
            name.len() as u64 + 1,
            // No checksum.
            0,
        ];
        self.archive.extend(b"070701");
        for field in fields {
            write!(self.archive, "{field:08x}").expect("writing to a Vec cannot fail");
        }
        self.archive.extend(name.as_bytes());
        self.archive.push(0);
        self.align();
        self.archive.extend(contents);
        self.align();
    }

    fn align(&mut self) {
        let len = self.archive.len().next_multiple_of(4);
        self.archive.resize(len, 0);
    }

    /// The finished archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.archive
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_has_aligned_entries_and_a_trailer() {
        let mut archive = Initramfs::default();
        archive.add_directory("dev");
        archive.add_file("init", b"12345");
        let archive = archive.finish();
        assert_eq!(&archive[..14], b"07070100000001");
        let second = 110 + 4 + 2;
        assert_eq!(&archive[110..114], b"dev\0");
        assert_eq!(&archive[second..second + 6], b"070701");
        assert_eq!(&archive[second + 54..second + 62], b"00000005", "size");
        assert!(archive.windows(5).any(|window| window == b"12345"));
        assert!(archive.ends_with(b"TRAILER!!!\0\0\0\0") || archive.ends_with(b"TRAILER!!!\0"));
        assert!(archive.len().is_multiple_of(4));
    }
}
