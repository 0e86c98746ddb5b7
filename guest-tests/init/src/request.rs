//! Parses the file `/exec` of the initramfs, in which `hindsight exec` says what to run.
//!
//! Records end with a NUL. The first byte of each is its kind.

use core::ffi::CStr;

/// Maximum number of arguments, and most variables of the environment.
pub const WORDS_MAX: usize = 4096;
/// Maximum number of additional groups.
const GROUPS_MAX: usize = 64;
/// Maximum number of folders that the command may change.
pub const FOLDERS_MAX: usize = 16;

/// Pointers to words, with a null pointer at the end.
pub struct Words {
    pointers: [*const u8; WORDS_MAX + 1],
    count: usize,
}

impl Words {
    const fn new() -> Self {
        Self {
            pointers: [core::ptr::null(); WORDS_MAX + 1],
            count: 0,
        }
    }

    fn push(&mut self, word: &'static CStr) {
        if self.count < WORDS_MAX {
            self.pointers[self.count] = word.as_ptr().cast();
            self.count += 1;
        }
    }

    /// The pointers, with the null pointer.
    pub fn pointers(&self) -> &[*const u8] {
        &self.pointers[..=self.count]
    }
}

/// The command to run, with its user, groups and environment.
pub struct Request {
    /// The program, a path or a name.
    pub program: Option<&'static CStr>,
    /// The command's arguments, beginning with its name.
    pub args: Words,
    /// The command's environment.
    pub environment: Words,
    /// The value of PATH.
    pub search_path: &'static [u8],
    /// The current directory.
    pub folder: &'static CStr,
    /// User and group.
    pub user: (u32, u32),
    groups: [u32; GROUPS_MAX],
    group_count: usize,
    /// The mask of file modes.
    pub umask: usize,
    /// Standard input and output are a terminal.
    pub terminal: bool,
    /// The name of the machine.
    pub host_name: &'static CStr,
    /// Folders that the command may change; the tag of number N is `rwN`.
    pub writable: [Option<&'static CStr>; FOLDERS_MAX],
}

fn number(text: &CStr) -> u32 {
    let digits = text.to_bytes().iter();
    digits.fold(0, |sum: u32, digit| {
        sum.wrapping_mul(10)
            .wrapping_add(u32::from(digit.wrapping_sub(b'0')))
    })
}

impl Request {
    /// Makes an empty request.
    pub const fn new() -> Self {
        Self {
            program: None,
            args: Words::new(),
            environment: Words::new(),
            search_path: b"/usr/local/bin:/usr/bin:/bin",
            folder: c"/",
            user: (0, 0),
            groups: [0; GROUPS_MAX],
            group_count: 0,
            umask: 0o022,
            terminal: false,
            host_name: c"hindsight",
            writable: [None; FOLDERS_MAX],
        }
    }

    /// The additional groups.
    pub fn groups(&self) -> &[u32] {
        &self.groups[..self.group_count]
    }

    /// Adds the records of `bytes`.
    pub fn parse(&mut self, mut bytes: &'static [u8]) {
        let mut folders = 0;
        while let Ok(record) = CStr::from_bytes_until_nul(bytes) {
            bytes = &bytes[record.count_bytes() + 1..];
            let Some(kind) = record.to_bytes().first() else {
                continue;
            };
            let Ok(value) = CStr::from_bytes_with_nul(&record.to_bytes_with_nul()[1..]) else {
                continue;
            };
            match kind {
                b'a' => {
                    self.program.get_or_insert(value);
                    self.args.push(value);
                }
                b'e' => {
                    if let Some(path) = value.to_bytes().strip_prefix(b"PATH=") {
                        self.search_path = path;
                    }
                    self.environment.push(value);
                }
                b'd' => self.folder = value,
                b'u' => self.user.0 = number(value),
                b'g' => self.user.1 = number(value),
                b'G' if self.group_count < GROUPS_MAX => {
                    self.groups[self.group_count] = number(value);
                    self.group_count += 1;
                }
                b'm' => self.umask = number(value) as usize,
                b't' => self.terminal = true,
                b'h' => self.host_name = value,
                b'w' if folders < FOLDERS_MAX => {
                    self.writable[folders] = Some(value);
                    folders += 1;
                }
                _ => {}
            }
        }
    }
}
