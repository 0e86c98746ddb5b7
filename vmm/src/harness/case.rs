//! The case records of a payload: lines of text in the ELF section `.hindsight.cases`.
//!
//! A record is one line. Its fields follow the name in any order; `about` extends to the end of the
//! line:
//!
//! ```text
//! case int3 cpl=0,3 rules=EXC-03 needs=exceptions needs_cpl3=int3-cpl3 about=#BP is a trap
//! ```

use std::collections::HashSet;
use std::time::Duration;

use hindsight_cpu::profile::CpuProfile;
use thiserror::Error;

/// Maximum number of cases in an image.
pub const CASES_MAX: usize = 1024;
/// Longest name of a case, in bytes.
pub const NAME_BYTES_MAX: usize = 120;
/// Maximum number of vCPUs of a case.
pub const VCPUS_MAX: u32 = 64;
/// Longest time limit of a case.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(3600);
/// Time limit of a case that does not specify one.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
/// Maximum number of entries in one list of a record.
const LIST_MAX: usize = 64;

/// Why the case records of an image are refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CaseError {
    /// The section is not UTF-8.
    #[error("the case section is not UTF-8 text")]
    NotText,
    /// The section has no record.
    #[error("the case section has no case")]
    Empty,
    /// The image has too many cases.
    #[error("the case section has more than {CASES_MAX} cases")]
    TooMany,
    /// A line does not start with `case`.
    #[error("case section, line {line}: not a case record")]
    NotARecord {
        /// Line in the section, from 1.
        line: usize,
    },
    /// The name is missing, too long, or has characters other than `A-Za-z0-9_-./:+`.
    #[error("case section, line {line}: bad or missing case name")]
    BadName {
        /// Line in the section, from 1.
        line: usize,
    },
    /// Two records have the same name.
    #[error("case `{name}` appears twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A key is unknown, or given twice.
    #[error("case `{name}`: unknown or repeated key `{key}`")]
    BadKey {
        /// Name of the case.
        name: String,
        /// The key.
        key: String,
    },
    /// A value is malformed or out of range.
    #[error("case `{name}`: bad value of `{key}`")]
    BadValue {
        /// Name of the case.
        name: String,
        /// The key.
        key: String,
    },
}

/// One case of a payload, as its record declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PayloadCase {
    /// Name, unique in the image.
    pub name: String,
    /// Privilege levels the case runs at: 0, 3 or both.
    pub cpls: Vec<u8>,
    /// Rules the case asserts.
    pub rules: Vec<String>,
    /// Needs at every level: names of doctor's probes.
    pub needs: Vec<String>,
    /// Additional needs at CPL0.
    pub needs_cpl0: Vec<String>,
    /// Additional needs at CPL3.
    pub needs_cpl3: Vec<String>,
    /// Number of vCPUs, 1 to [`VCPUS_MAX`].
    pub vcpus: u32,
    /// The processor profile, if it is not the default one.
    pub cpu: Option<CpuProfile>,
    /// The case needs a virtual clock, and so deterministic mode.
    pub virtual_clock: bool,
    /// Time limit of one run.
    pub timeout: Duration,
    /// A description for people.
    pub about: String,
}

impl PayloadCase {
    /// All needs of the case at level `cpl`.
    pub fn needs_at(&self, cpl: u8) -> impl Iterator<Item = &str> {
        let additional = if cpl == 3 {
            &self.needs_cpl3
        } else {
            &self.needs_cpl0
        };
        self.needs.iter().chain(additional).map(String::as_str)
    }
}

/// Parses all records of a section.
///
/// # Errors
///
/// A record is malformed, or the section has no record.
pub fn parse_section(section: &[u8]) -> Result<Vec<PayloadCase>, CaseError> {
    let text = std::str::from_utf8(section).map_err(|_| CaseError::NotText)?;
    let mut cases = Vec::new();
    let mut names = HashSet::new();
    for (index, line) in text.split('\n').enumerate() {
        // The linker may insert padding between records.
        let line = line.trim_matches(['\0', '\r', ' ', '\t']);
        if line.is_empty() {
            continue;
        }
        if cases.len() == CASES_MAX {
            return Err(CaseError::TooMany);
        }
        let case = parse_record(line, index + 1)?;
        if !names.insert(case.name.clone()) {
            return Err(CaseError::Duplicate { name: case.name });
        }
        cases.push(case);
    }
    if cases.is_empty() {
        Err(CaseError::Empty)
    } else {
        Ok(cases)
    }
}

fn parse_record(record: &str, line: usize) -> Result<PayloadCase, CaseError> {
    let rest = record
        .strip_prefix("case ")
        .ok_or(CaseError::NotARecord { line })?
        .trim_start();
    let (name, mut rest) = rest.split_once(' ').unwrap_or((rest, ""));
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_name_byte) {
        return Err(CaseError::BadName { line });
    }
    let mut case = PayloadCase {
        name: name.to_owned(),
        cpls: vec![0],
        rules: Vec::new(),
        needs: Vec::new(),
        needs_cpl0: Vec::new(),
        needs_cpl3: Vec::new(),
        vcpus: 1,
        cpu: None,
        virtual_clock: false,
        timeout: TIMEOUT_DEFAULT,
        about: String::new(),
    };
    let mut keys = HashSet::new();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Ok(case);
        }
        if let Some(about) = rest.strip_prefix("about=") {
            case.about = crate::harness::serial::escape(about.as_bytes());
            return Ok(case);
        }
        let (field, after) = rest.split_once(' ').unwrap_or((rest, ""));
        let (key, value) = field.split_once('=').unwrap_or((field, ""));
        if !keys.insert(key) {
            return Err(bad_key(name, key));
        }
        set_field(&mut case, key, value)?;
        rest = after;
    }
}

fn set_field(case: &mut PayloadCase, key: &str, value: &str) -> Result<(), CaseError> {
    let bad = |name: &str| CaseError::BadValue {
        name: name.to_owned(),
        key: escape_short(key),
    };
    match key {
        "cpl" => case.cpls = parse_cpls(value).ok_or_else(|| bad(&case.name))?,
        "rules" => case.rules = parse_list(value).ok_or_else(|| bad(&case.name))?,
        "needs" => case.needs = parse_list(value).ok_or_else(|| bad(&case.name))?,
        "needs_cpl0" => case.needs_cpl0 = parse_list(value).ok_or_else(|| bad(&case.name))?,
        "needs_cpl3" => case.needs_cpl3 = parse_list(value).ok_or_else(|| bad(&case.name))?,
        "vcpus" => {
            let vcpus = value.parse().ok().filter(|n| (1..=VCPUS_MAX).contains(n));
            case.vcpus = vcpus.ok_or_else(|| bad(&case.name))?;
        }
        "cpu" => case.cpu = Some(value.parse().map_err(|_| bad(&case.name))?),
        "clock" if value == "virtual" => case.virtual_clock = true,
        "clock" => return Err(bad(&case.name)),
        "timeout_ms" => {
            let limit = value.parse().ok().map(Duration::from_millis);
            let limit = limit.filter(|t| !t.is_zero() && *t <= TIMEOUT_MAX);
            case.timeout = limit.ok_or_else(|| bad(&case.name))?;
        }
        _ => return Err(bad_key(&case.name, key)),
    }
    Ok(())
}

fn parse_cpls(value: &str) -> Option<Vec<u8>> {
    match value {
        "0" => Some(vec![0]),
        "3" => Some(vec![3]),
        "0,3" | "3,0" => Some(vec![0, 3]),
        _ => None,
    }
}

fn parse_list(value: &str) -> Option<Vec<String>> {
    if value.is_empty() {
        return Some(Vec::new());
    }
    let items: Vec<String> = value.split(',').map(str::to_owned).collect();
    let good = |item: &String| {
        !item.is_empty() && item.len() <= NAME_BYTES_MAX && item.bytes().all(is_name_byte)
    };
    (items.len() <= LIST_MAX && items.iter().all(good)).then_some(items)
}

/// Whether a name may contain `byte`. Bytes with a meaning on a kernel command line, in a shell or
/// in a report are excluded.
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_-./:+".contains(&byte)
}

fn bad_key(name: &str, key: &str) -> CaseError {
    CaseError::BadKey {
        name: name.to_owned(),
        key: escape_short(key),
    }
}

/// The beginning of untrusted text, escaped for an error message.
fn escape_short(text: &str) -> String {
    let end = text.char_indices().nth(40).map_or(text.len(), |(at, _)| at);
    crate::harness::serial::escape(&text.as_bytes()[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn record_with_every_key_is_parsed() {
        let text = b"case tsc/adjust cpl=0,3 rules=TSC-01,ADJ-02 needs=tsc-msr needs_cpl0=a \
            needs_cpl3=tsd-cpl3 vcpus=2 cpu=+l2cat,pmu=8 clock=virtual timeout_ms=1500 \
            about=it = moves, both ways\n";
        let cases = parse_section(text).unwrap();
        assert_eq!(cases.len(), 1);
        let case = &cases[0];
        assert_eq!(case.name, "tsc/adjust");
        assert_eq!(case.cpls, [0, 3]);
        assert_eq!(case.rules, ["TSC-01", "ADJ-02"]);
        assert_eq!(case.vcpus, 2);
        let cpu = case.cpu.map(|cpu| cpu.to_string());
        assert_eq!(cpu.as_deref(), Some("skylake-server,+l2cat,pmu=8"));
        assert!(case.virtual_clock);
        assert_eq!(case.timeout, Duration::from_millis(1500));
        assert_eq!(case.about, "it = moves, both ways");
        assert_eq!(case.needs_at(0).collect::<Vec<_>>(), ["tsc-msr", "a"]);
        assert_eq!(
            case.needs_at(3).collect::<Vec<_>>(),
            ["tsc-msr", "tsd-cpl3"]
        );
    }

    #[test]
    fn record_with_only_a_name_gets_the_defaults() {
        let cases = parse_section(b"case a").unwrap();
        assert_eq!(
            (cases[0].cpls.as_slice(), cases[0].vcpus),
            ([0].as_slice(), 1)
        );
        assert_eq!(cases[0].timeout, TIMEOUT_DEFAULT);
        assert!(!cases[0].virtual_clock);
    }

    #[test]
    fn records_with_nul_padding_are_parsed() {
        let cases = parse_section(b"case a cpl=3\n\0\0\0case b rules= about=\n\0").unwrap();
        assert_eq!(cases.len(), 2);
        assert_eq!(cases[1].name, "b");
        assert!(cases[1].rules.is_empty());
    }

    #[test]
    fn malformed_records_are_refused() {
        let value = |key: &str| CaseError::BadValue {
            name: "a".into(),
            key: key.into(),
        };
        let key = |key: &str| CaseError::BadKey {
            name: "a".into(),
            key: key.into(),
        };
        let table: &[(&[u8], CaseError)] = &[
            (b"", CaseError::Empty),
            (b"\0\n \n", CaseError::Empty),
            (b"case \xff", CaseError::NotText),
            (b"cases a", CaseError::NotARecord { line: 1 }),
            (b"\ncase  ", CaseError::NotARecord { line: 2 }),
            (b"case a;b", CaseError::BadName { line: 1 }),
            (b"case a\ncase a", CaseError::Duplicate { name: "a".into() }),
            (b"case a cpl=1", value("cpl")),
            (b"case a cpl=0,0", value("cpl")),
            (b"case a vcpus=0", value("vcpus")),
            (b"case a vcpus=65", value("vcpus")),
            (b"case a vcpus=99999999999999999999", value("vcpus")),
            (b"case a cpu=z80", value("cpu")),
            (b"case a clock=wall", value("clock")),
            (b"case a timeout_ms=0", value("timeout_ms")),
            (b"case a timeout_ms=-1", value("timeout_ms")),
            (b"case a timeout_ms=3600001", value("timeout_ms")),
            (b"case a rules=x,,y", value("rules")),
            (b"case a needs=x;y", value("needs")),
            (b"case a what=1", key("what")),
            (b"case a wh\x1bt", key("wh\\x1bt")),
            (b"case a cpl=0 cpl=3", key("cpl")),
        ];
        for (text, expected) in table {
            let row = String::from_utf8_lossy(text);
            assert_eq!(parse_section(text).unwrap_err(), *expected, "row {row:?}");
        }
    }

    #[test]
    fn more_cases_than_the_limit_are_refused() {
        let text: String = (0..=CASES_MAX).map(|n| format!("case c{n}\n")).collect();
        assert_eq!(
            parse_section(text.as_bytes()).unwrap_err(),
            CaseError::TooMany
        );
    }

    proptest! {
        #[test]
        fn any_section_parses_or_fails_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            text in "(case [a-c ]{1,4}( (cpl|vcpus|needs|x)=[0-9a,=]{0,5}){0,3}[\n\0é]?){0,4}",
        ) {
            let _ = parse_section(&bytes);
            let _ = parse_section(text.as_bytes());
        }
    }
}
