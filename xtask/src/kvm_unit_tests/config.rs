//! Reads the tests of a checkout.
//!
//! `x86/unittests.cfg` lists them, and xtask/kvm-unit-tests.toml has this project's expectations.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::process::root;

/// A section of unittests.cfg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitTest {
    pub name: String,
    /// The image's file name.
    pub file: String,
    pub cpus: u32,
    /// Words for the image's command line.
    pub arguments: String,
    /// The architecture to which the test is limited, if any.
    pub architecture: Option<String>,
    /// The test's time limit in seconds.
    pub timeout: Option<u64>,
    /// Guest memory in MiB.
    pub memory: u64,
    /// The test runs only when the user names it.
    pub on_request: bool,
}

/// Guest memory in MiB of a test whose options name no size.
const MEMORY: u64 = 512;

/// Reads the sections of unittests.cfg.
pub fn parse(text: &str) -> Vec<UnitTest> {
    let mut tests: Vec<UnitTest> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            tests.push(UnitTest {
                name: name.to_owned(),
                cpus: 1,
                memory: MEMORY,
                ..UnitTest::default()
            });
            continue;
        }
        let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) else {
            continue;
        };
        let Some(test) = tests.last_mut() else {
            continue;
        };
        let value = value.trim().trim_matches(['"', '\'']);
        match key.trim() {
            "file" => value.clone_into(&mut test.file),
            "smp" => test.cpus = value.parse().unwrap_or(1),
            "arch" => test.architecture = Some(value.to_owned()),
            "timeout" => test.timeout = value.parse().ok(),
            "test_args" => test.arguments = value.replace("`date +%s`", &seconds().to_string()),
            "groups" => test.on_request = value.split(' ').any(|group| group == "nodefault"),
            "qemu_params" => test.memory = memory(value).unwrap_or(MEMORY),
            _ => {}
        }
    }
    tests
}

/// The seconds since 1970.
fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |time| time.as_secs())
}

/// Returns the memory size in MiB that `-m SIZE` in QEMU's options asks for.
fn memory(options: &str) -> Option<u64> {
    let mut words = options.split_whitespace();
    words.find(|&word| word == "-m")?;
    let size = words.next()?;
    match size.strip_suffix(['g', 'G']) {
        Some(gib) => gib.parse::<u64>().ok().map(|gib| gib * 1024),
        None => size.parse().ok(),
    }
}

/// A built checkout of kvm-unit-tests.
#[derive(Debug)]
pub struct Checkout {
    pub folder: PathBuf,
    /// The architecture that its images are built for: `x86_64` or `i386`.
    pub architecture: String,
    pub tests: Vec<UnitTest>,
}

impl Checkout {
    /// Reads a checkout that the user has configured and built.
    pub fn open(folder: &Path) -> Result<Self> {
        let read = |name: &str| {
            let file = folder.join(name);
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
        };
        let settings = read("config.mak").context("the checkout is not configured")?;
        let architecture = settings
            .lines()
            .find_map(|line| line.strip_prefix("ARCH="))
            .context("config.mak has no ARCH")?
            .to_owned();
        let mut tests = parse(&read("x86/unittests.cfg")?);
        tests.retain(|test| {
            let only = test.architecture.as_deref();
            only.is_none_or(|only| only == architecture)
        });
        Ok(Self {
            folder: folder.to_owned(),
            architecture,
            tests,
        })
    }
}

/// The contents of xtask/kvm-unit-tests.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectations {
    /// Tests that require a facility that the default profile lacks.
    lacks: Vec<Lack>,
    /// Tests that require environment variables, which the suite reads from the initial RAM disk.
    #[serde(default)]
    environment: Vec<Environment>,
    /// Tests that run with another processor profile than the default one.
    #[serde(default)]
    profile: Vec<Profile>,
}

/// The processor profile of the tests that match the patterns.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    tests: Vec<String>,
    cpu: String,
}

/// Environment variables of the tests that match the patterns.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Environment {
    tests: Vec<String>,
    variables: String,
}

/// A facility that some tests require and that the default profile lacks.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lack {
    tests: Vec<String>,
    reason: String,
}

impl Expectations {
    /// Reads xtask/kvm-unit-tests.toml.
    pub fn load() -> Result<Self> {
        let file = root().join("xtask/kvm-unit-tests.toml");
        let text =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        toml::from_str(&text).with_context(|| format!("{} is invalid", file.display()))
    }

    /// Returns what a test requires and the default profile lacks, if there is such a thing.
    pub fn reason(&self, name: &str) -> Option<&str> {
        let lack = self.lacks.iter().find(|lack| matches(&lack.tests, name))?;
        Some(&lack.reason)
    }

    /// Returns the environment variables of a test, as lines NAME=VALUE.
    pub fn environment(&self, name: &str) -> Option<&str> {
        let mut given = self.environment.iter();
        let environment = given.find(|given| matches(&given.tests, name))?;
        Some(&environment.variables)
    }

    /// Returns the processor profile of a test, unless it is the default one.
    pub fn profile(&self, name: &str) -> Option<&str> {
        let mut given = self.profile.iter();
        let profile = given.find(|given| matches(&given.tests, name))?;
        Some(&profile.cpu)
    }
}

/// Whether one of the patterns matches a name. A `*` at a pattern's end matches any rest.
fn matches(patterns: &[String], name: &str) -> bool {
    let mut patterns = patterns.iter();
    patterns.any(|pattern| match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_become_tests() {
        let text = "# a comment\n[one]\nfile = a.flat\nsmp = 2\ntest_args = 'x y'\narch = i386\n\
            groups = nodefault tasks\n\n[two]\nfile = b.flat\nqemu_params = -cpu max -m 4g\ntimeout = 30\n";
        let [one, two] = &parse(text)[..] else {
            panic!("two tests");
        };
        assert_eq!((one.name.as_str(), one.cpus, one.memory), ("one", 2, 512));
        assert_eq!((one.arguments.as_str(), one.on_request), ("x y", true));
        assert_eq!(one.architecture.as_deref(), Some("i386"));
        assert_eq!((two.file.as_str(), two.memory), ("b.flat", 4096));
        assert_eq!((two.timeout, two.on_request), (Some(30), false));
    }

    #[test]
    fn reasons_match_names_and_beginnings() {
        let text = "[[lacks]]\ntests = ['svm*', 'la57']\nreason = 'none of these'\n";
        let expectations: Expectations = toml::from_str(text).unwrap();
        assert_eq!(expectations.reason("svm_npt"), Some("none of these"));
        assert_eq!(expectations.reason("la57"), Some("none of these"));
        assert_eq!(expectations.reason("la57x"), None);
    }

    #[test]
    fn profile_is_that_of_the_test() {
        let text = "lacks = []\n[[profile]]\ntests = ['pmu_pebs']\ncpu = 'icelake-server'\n";
        let expectations: Expectations = toml::from_str(text).unwrap();
        assert_eq!(expectations.profile("pmu_pebs"), Some("icelake-server"));
        assert_eq!(expectations.profile("pmu"), None);
    }
}
