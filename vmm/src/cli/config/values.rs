//! The types of options that are written as one word.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hindsight_cpu::profile::{CpuProfile, ProfileError};
use hindsight_regs::vector::Vector;

use super::option_word::OptionValue;
use super::paths::with_folder;
use crate::cli::logging::{LogFilter, TraceSpec};
use crate::cli::read::read_text;
use crate::console::Backend;
use crate::vcpu::branch_history;
use crate::vcpu::engine::ForcedSwitch;
use crate::vcpu::translation::TranslateAfter;
use crate::virtio::disk::DiskSpec;
use crate::virtio::net::NetSpec;
use crate::virtio::share::ShareSpec;
use crate::virtio::vsock::VsockSpec;
use hindsight_gdb::ListenAddress;

/// The largest profile file that is read, in bytes.
const PROFILE_MAX: u64 = 64 << 10;

/// Returns `path` as text, or says that it cannot be written as one.
fn utf8(path: &Path) -> Result<&str, String> {
    path.to_str()
        .ok_or_else(|| format!("the path {} is not UTF-8", path.display()))
}

/// Parses a number in decimal, or in hexadecimal with 0x.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A number in decimal, or in hexadecimal with 0x.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Number(pub u64);

impl OptionValue for Number {
    const EXPECTED: &'static str = "a number such as 4096 or \"0x1000\"";

    fn parse(text: &str) -> Result<Self, String> {
        let parsed = number(text).map(Self);
        parsed.ok_or_else(|| "not a number (decimal, or hexadecimal with 0x)".to_owned())
    }

    fn format(&self) -> Result<String, String> {
        Ok(self.0.to_string())
    }
}

/// A guest-physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestAddress(pub u64);

impl OptionValue for GuestAddress {
    const EXPECTED: &'static str = "an address such as \"0x100000\"";

    fn parse(text: &str) -> Result<Self, String> {
        Number::parse(text).map(|number| Self(number.0))
    }

    fn format(&self) -> Result<String, String> {
        Ok(format!("{:#x}", self.0))
    }
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl Size {
    /// `count` MiB.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }
}

/// The suffixes of sizes, from the largest, and their binary logarithms.
const SIZE_SUFFIXES: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl OptionValue for Size {
    const EXPECTED: &'static str = "a size such as \"512M\", or a number of bytes";

    /// Bytes, or a number with a suffix: `512M` and `512MiB` are the same.
    fn parse(text: &str) -> Result<Self, String> {
        let upper = text.to_ascii_uppercase();
        let short = upper.strip_suffix("IB").unwrap_or(&upper);
        let suffix = SIZE_SUFFIXES
            .iter()
            .find_map(|&(suffix, shift)| Some((short.strip_suffix(suffix)?.len(), shift)));
        let (digits, shift) = match suffix {
            Some((length, shift)) => (&text[..length], shift),
            None => (text, 0),
        };
        let value = number(digits)
            .ok_or("not a size such as 128M, 1GiB or 0x8000000 (suffixes: K, M, G, T)")?;
        let bytes = value.checked_mul(1 << shift);
        bytes
            .map(Self)
            .ok_or_else(|| "more than 2^64 bytes".to_owned())
    }

    fn format(&self) -> Result<String, String> {
        Ok(self.to_string())
    }
}

impl fmt::Display for Size {
    /// Writes whole units of the largest suffix that fits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |shift: u32| self.0 != 0 && self.0.trailing_zeros() >= shift;
        match SIZE_SUFFIXES.iter().find(|&&(_, shift)| exact(shift)) {
            Some(&(suffix, shift)) => write!(f, "{}{suffix}", self.0 >> shift),
            None => self.0.fmt(f),
        }
    }
}

impl OptionValue for Duration {
    const EXPECTED: &'static str = "a time such as \"10s\", or a number of seconds";

    /// Seconds, or a number with a unit.
    fn parse(text: &str) -> Result<Self, String> {
        const UNITS: [(&str, f64); 4] = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
        let unit = UNITS
            .iter()
            .find_map(|&(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)));
        let (number, seconds) = unit.unwrap_or((text, 1.0));
        let value: f64 = number
            .parse()
            .map_err(|_| "not a number of seconds, nor a time such as 500ms, 10s, 5m or 1h")?;
        Self::try_from_secs_f64(value * seconds)
            .map_err(|_| "not a possible number of seconds".to_owned())
    }

    fn format(&self) -> Result<String, String> {
        Ok(format!("{}s", self.as_secs_f64()))
    }
}

/// `FILE[=ARGS]`: a module of a PVH or multiboot image, with its command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleArg {
    /// The file.
    pub path: PathBuf,
    /// The command line; empty if none was given.
    pub args: String,
}

impl OptionValue for ModuleArg {
    const EXPECTED: &'static str = "a module as FILE or \"FILE=ARGS\"";

    fn parse(text: &str) -> Result<Self, String> {
        let (path, args) = text.split_once('=').unwrap_or((text, ""));
        Ok(Self {
            path: path.into(),
            args: args.to_owned(),
        })
    }

    fn format(&self) -> Result<String, String> {
        let path = utf8(&self.path)?;
        if path.contains('=') {
            return Err(format!("the module's path {path} contains ="));
        }
        let args = &self.args;
        let separator = if args.is_empty() { "" } else { "=" };
        Ok(format!("{path}{separator}{args}"))
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        Self {
            path: folder.join(self.path),
            ..self
        }
    }
}

/// Where branch trace messages go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BtmTarget {
    /// `-`: standard output.
    Stdout,
    /// A file.
    File(PathBuf),
}

impl OptionValue for BtmTarget {
    const EXPECTED: &'static str = "a file, or \"-\" for standard output";

    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text {
            "-" => Self::Stdout,
            path => Self::File(path.into()),
        })
    }

    fn format(&self) -> Result<String, String> {
        match self {
            Self::Stdout => Ok("-".to_owned()),
            Self::File(path) => utf8(path).map(str::to_owned),
        }
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        match self {
            Self::File(path) => Self::File(folder.join(path)),
            Self::Stdout => Self::Stdout,
        }
    }
}

/// Where the guest's screen is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DisplayTarget {
    /// The machine has no screen.
    #[default]
    None,
    /// As text, on standard output.
    Text,
    /// As a picture in a PNG file, at the end of the run.
    Picture(PathBuf),
}

impl OptionValue for DisplayTarget {
    const EXPECTED: &'static str = "a display: none, text or FILE.png";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "text" => Ok(Self::Text),
            path if path.ends_with(".png") => Ok(Self::Picture(path.into())),
            _ => Err("a picture's name ends in .png".to_owned()),
        }
    }

    fn format(&self) -> Result<String, String> {
        match self {
            Self::None => Ok("none".to_owned()),
            Self::Text => Ok("text".to_owned()),
            Self::Picture(path) => utf8(path).map(str::to_owned),
        }
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        match self {
            Self::Picture(path) => Self::Picture(folder.join(path)),
            other => other,
        }
    }
}

impl OptionValue for Backend {
    const EXPECTED: &'static str = "a console: stdio, none, file:PATH or unix:PATH";

    fn parse(text: &str) -> Result<Self, String> {
        let parsed = text.parse();
        parsed.map_err(|error: crate::console::ParseBackendError| error.to_string())
    }

    fn format(&self) -> Result<String, String> {
        if let Self::File(path) | Self::Unix(path) = self {
            utf8(path)?;
        }
        Ok(self.to_string())
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        match self {
            Self::File(path) => Self::File(folder.join(path)),
            Self::Unix(path) => Self::Unix(folder.join(path)),
            Self::Stdio | Self::None => self,
        }
    }
}

impl OptionValue for DiskSpec {
    const EXPECTED: &'static str = "a disk as FILE or \"FILE,OPTION,...\"";

    fn parse(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn format(&self) -> Result<String, String> {
        utf8(&self.path)?;
        Ok(self.to_string())
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        self.in_folder(folder)
    }
}

impl OptionValue for ShareSpec {
    const EXPECTED: &'static str = "a folder as \"DIR=TAG\" or \"DIR=TAG,rw\"";

    fn parse(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn format(&self) -> Result<String, String> {
        utf8(&self.folder)?;
        Ok(self.to_string())
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        self.in_folder(folder)
    }
}

impl OptionValue for NetSpec {
    const EXPECTED: &'static str = "a network: none or \"user\"";

    fn parse(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn format(&self) -> Result<String, String> {
        Ok(self.to_string())
    }
}

impl OptionValue for VsockSpec {
    const EXPECTED: &'static str = "sockets as \"cid=N,socket=PATH\"";

    fn parse(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn format(&self) -> Result<String, String> {
        utf8(&self.socket)?;
        Ok(self.to_string())
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        self.in_folder(folder)
    }
}

impl OptionValue for ListenAddress {
    const EXPECTED: &'static str = "an address: tcp:HOST:PORT or unix:PATH";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn format(&self) -> Result<String, String> {
        if let Self::Unix(path) = self {
            utf8(path)?;
        }
        Ok(self.to_string())
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(folder.join(path)),
            other => other,
        }
    }
}

impl OptionValue for CpuProfile {
    const EXPECTED: &'static str = "a CPU profile, or the name of a TOML file with one";

    /// A profile, or a file with one, whose relative name refers to the folder of the
    /// configuration.
    fn parse(text: &str) -> Result<Self, String> {
        let is_file = Path::new(text).extension().is_some_and(|e| e == "toml");
        if !is_file {
            let parsed = text.parse();
            return parsed.map_err(|error: ProfileError| error.to_string());
        }
        let path = with_folder(|folder| folder.join(text));
        let content = read_text("CPU profile", &path, PROFILE_MAX);
        let content = content.map_err(|error| format!("{error:#}"))?;
        Self::from_toml(&content).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn format(&self) -> Result<String, String> {
        Ok(self.to_string())
    }
}

/// `branches[=N][,stop=WHERE][,every]`: which branches of each vCPU are recorded for a debugger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchRecord {
    /// Maximum number of branches that are kept.
    pub limit: usize,
    /// Keep the repetitions of loops.
    pub every: bool,
    /// What freezes the recording.
    pub stop: Option<RecordEnd>,
}

/// What freezes a recording of branches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordEnd {
    /// The execution of a function or an address.
    Location(String),
    /// The delivery of an exception.
    Exception(u8),
}

impl RecordEnd {
    fn parse(text: &str) -> Result<Self, String> {
        let Some(name) = text.strip_prefix('#') else {
            return match text {
                "" => {
                    Err("stop= needs a function, an address, or an exception as in #PF".to_owned())
                }
                location => Ok(Self::Location(location.to_owned())),
            };
        };
        let is_named = |&vector: &u8| {
            let mnemonic = Vector(vector).mnemonic();
            mnemonic.is_some_and(|mnemonic| mnemonic.trim_start_matches('#') == name)
                || name == vector.to_string()
        };
        let vector = (0..32).find(is_named);
        let unknown = || format!("{text} is not an exception (#0 to #31, or as in #PF)");
        vector.map(Self::Exception).ok_or_else(unknown)
    }
}

impl OptionValue for BranchRecord {
    const EXPECTED: &'static str = "\"branches[=N][,stop=WHERE][,every]\"";

    fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let first = parts.next().unwrap_or_default();
        let limit = match first.split_once('=') {
            None if first == "branches" => 0x1_0000,
            Some(("branches", number)) => {
                let most = branch_history::BRANCHES_MAX;
                let count = number.parse().ok().filter(|n| (1..=most).contains(n));
                count.ok_or_else(|| format!("{number} is not a number from 1 to {most}"))?
            }
            _ => return Err("only branches can be recorded: branches or branches=N".to_owned()),
        };
        let (mut every, mut stop) = (false, None);
        for part in parts {
            match part.split_once('=') {
                None if part == "every" => every = true,
                Some(("stop", at)) => stop = Some(RecordEnd::parse(at)?),
                _ => return Err(format!("{part} is neither stop=WHERE nor every")),
            }
        }
        Ok(Self { limit, every, stop })
    }

    fn format(&self) -> Result<String, String> {
        let stop = match &self.stop {
            Some(RecordEnd::Location(text)) => format!(",stop={text}"),
            Some(RecordEnd::Exception(vector)) => format!(",stop=#{vector}"),
            None => String::new(),
        };
        let every = if self.every { ",every" } else { "" };
        Ok(format!("branches={}{stop}{every}", self.limit))
    }
}

impl OptionValue for TranslateAfter {
    const EXPECTED: &'static str = "\"off\", \"auto\", \"always\", or a number of runs";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Never),
            "auto" => Ok(Self::Worthwhile),
            "always" => Ok(Self::Runs(1)),
            _ => match text.parse() {
                Ok(runs @ 1..) => Ok(Self::Runs(runs)),
                _ => Err(format!(
                    "expected off, auto, always, or a number of runs from 1: {text}"
                )),
            },
        }
    }

    fn format(&self) -> Result<String, String> {
        Ok(match self {
            Self::Never => "off".into(),
            Self::Worthwhile => "auto".into(),
            Self::Runs(1) => "always".into(),
            Self::Runs(runs) => runs.to_string(),
        })
    }
}

impl OptionValue for ForcedSwitch {
    const EXPECTED: &'static str = "a number of exits, or a time such as \"5ms\"";

    fn parse(text: &str) -> Result<Self, String> {
        let number = |digits: &str| digits.parse().ok().filter(|&n: &u64| n != 0);
        let parsed = match text.strip_suffix("ms") {
            Some(digits) => number(digits).map(|ms| Self::Time(Duration::from_millis(ms))),
            None => number(text).map(Self::Exits),
        };
        parsed.ok_or_else(|| "not a number of exits such as 10, nor a time such as 5ms".to_owned())
    }

    fn format(&self) -> Result<String, String> {
        Ok(match self {
            Self::Exits(exits) => exits.to_string(),
            Self::Time(time) => format!("{}ms", time.as_millis()),
        })
    }
}

impl OptionValue for LogFilter {
    const EXPECTED: &'static str = "a level such as \"info\", or a filter";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn format(&self) -> Result<String, String> {
        Ok(self.to_string())
    }
}

impl OptionValue for TraceSpec {
    const EXPECTED: &'static str = "events as \"KIND[,KIND...][=FILE]\"";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn format(&self) -> Result<String, String> {
        if let Some(path) = &self.file {
            utf8(path)?;
        }
        Ok(self.to_string())
    }

    fn resolve_paths(self, folder: &Path) -> Self {
        Self {
            file: self.file.map(|path| folder.join(path)),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes_and_limits() {
        let rows = [
            ("128M", Some(128 << 20)),
            ("128MiB", Some(128 << 20)),
            ("128mib", Some(128 << 20)),
            ("0x1000", Some(0x1000)),
            ("0x10K", Some(0x4000)),
            ("1g", Some(1 << 30)),
            ("4096", Some(4096)),
            ("0", Some(0)),
            ("", None),
            ("M", None),
            ("MiB", None),
            ("12iB", None),
            ("12MB", None),
            ("1.5G", None),
            ("-1", None),
            ("\u{131}B", None),
            ("99999999T", None),
        ];
        for (text, expected) in rows {
            assert_eq!(Size::parse(text).ok(), expected.map(Size), "{text:?}");
        }
    }

    #[test]
    fn times_have_units_and_limits() {
        let rows = [
            ("0.5", Some(500)),
            ("90", Some(90_000)),
            ("500ms", Some(500)),
            ("10s", Some(10_000)),
            ("1m", Some(60_000)),
            ("1.5h", Some(5_400_000)),
            ("-1", None),
            ("nan", None),
            ("x", None),
            ("s", None),
            ("1 day", None),
            ("1e300", None),
        ];
        for (text, expected) in rows {
            let time = expected.map(Duration::from_millis);
            assert_eq!(Duration::parse(text).ok(), time, "{text:?}");
        }
    }

    #[test]
    fn forced_switch_counts_exits_or_milliseconds() {
        let time = ForcedSwitch::Time(Duration::from_millis(5));
        assert_eq!(ForcedSwitch::parse("10"), Ok(ForcedSwitch::Exits(10)));
        assert_eq!(ForcedSwitch::parse("5ms"), Ok(time));
        for text in ["0", "0ms", "ms", "", "5s"] {
            assert!(ForcedSwitch::parse(text).is_err(), "{text:?}");
        }
    }

    fn assert_reads_back<T: OptionValue + PartialEq + std::fmt::Debug>(words: &[&str]) {
        for word in words {
            let value = T::parse(word).unwrap();
            let again = T::parse(&value.format().unwrap()).unwrap();
            assert_eq!(value, again, "{word:?}");
        }
    }

    #[test]
    fn formatted_value_reads_back() {
        assert_reads_back::<Number>(&["0", "7", "0xffffffffffffffff"]);
        assert_reads_back::<GuestAddress>(&["0", "7", "0xffffffffffffffff"]);
        assert_reads_back::<Size>(&["0", "1", "1025", "128M", "3073M", "5G", "16384T"]);
        assert_reads_back::<Duration>(&["0", "0.4", "1e-9", "4m", "1e19", "123456789.123"]);
        assert_reads_back::<ModuleArg>(&["a", "a=b c", "a=b=c"]);
        assert_reads_back::<DiskSpec>(&["a", "a,b,ro", "a.qcow2,snapshot,backing,format=raw"]);
        assert_reads_back::<ShareSpec>(&["a=b", "/x=y=tag,rw"]);
        assert_reads_back::<NetSpec>(&["none", "user", "user,hostfwd=tcp::2222-:22"]);
        assert_reads_back::<VsockSpec>(&["cid=3,socket=s", "cid=77,socket=/a,b=c"]);
        assert_reads_back::<BtmTarget>(&["-", "file"]);
        assert_reads_back::<DisplayTarget>(&["none", "text", "a.png"]);
        assert_reads_back::<Backend>(&["stdio", "none", "file:a:b", "unix:s"]);
        assert_reads_back::<ListenAddress>(&["tcp::1234", "tcp:127.0.0.1:1", "unix:s"]);
        assert_reads_back::<CpuProfile>(&["host", "portable-v1,-lbr", "-rdt", "+rtm,-pebs,pmu=8"]);
        assert_reads_back::<BranchRecord>(&["branches", "branches=3", "branches,every"]);
        assert_reads_back::<BranchRecord>(&["branches,stop=panic", "branches=9,stop=#14,every"]);
        assert_reads_back::<ForcedSwitch>(&["10", "5ms"]);
        assert_reads_back::<TranslateAfter>(&["off", "auto", "always", "20"]);
        assert_reads_back::<LogFilter>(&["info", "warn,msr=debug", ""]);
        assert_reads_back::<TraceSpec>(&["all", "exit,msr", "io=file", "gdb,mode=a=b"]);
    }

    #[test]
    fn paths_in_words_are_resolved() {
        let folder = Path::new("/f");
        let resolved = |text: &str| ModuleArg::parse(text).unwrap().resolve_paths(folder);
        assert_eq!(resolved("m=x").format().unwrap(), "/f/m=x");
        assert_eq!(resolved("/m").format().unwrap(), "/m");
        let trace = TraceSpec::parse("io=t").unwrap().resolve_paths(folder);
        assert_eq!(trace.format().unwrap(), "io=/f/t");
        for (text, expected) in [("file:o", "file:/f/o"), ("unix:../s", "unix:/f/../s")] {
            let backend = Backend::parse(text).unwrap().resolve_paths(folder);
            assert_eq!(backend.format().unwrap(), expected);
        }
    }
}
