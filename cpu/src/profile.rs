//! Profiles: a processor, put together from a model and the facilities that it has or lacks.
//!
//! `skylake-server,-pebs,+rtm,+l2cat,pmu=8` is one on the command line. A file says the same in TOML:
//!
//! ```toml
//! model = "skylake-server"
//! with = ["rtm", "l2cat"]
//! without = ["pebs"]
//! pmu = 8
//! ```

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use crate::cpuid::CpuModel;
use crate::facility::Facilities;

/// Facilities by the names that profiles use. `rdt` stands for several.
const NAMES: &[(&str, Facilities)] = &[
    ("x2apic", Facilities::X2APIC),
    ("tsc-deadline", Facilities::TSC_DEADLINE),
    ("tsc-adjust", Facilities::TSC_ADJUST),
    ("rdtscp", Facilities::RDTSCP),
    ("btf", Facilities::BTF),
    ("lbr", Facilities::LBR),
    ("bts", Facilities::BTS),
    ("pmu", Facilities::PMU),
    ("pebs", Facilities::PEBS),
    ("rtm", Facilities::RTM),
    ("rdt", Facilities::RDT),
    ("cmt", Facilities::CMT),
    ("mbm", Facilities::MBM),
    ("l3cat", Facilities::L3CAT),
    ("cdp", Facilities::CDP),
    ("mba", Facilities::MBA),
    ("l2cat", Facilities::L2CAT),
    ("smm", Facilities::SMM),
];

/// What a facility cannot be without.
const NEEDS: &[(Facilities, Facilities)] = &[
    (Facilities::PEBS, Facilities::PMU),
    (Facilities::PMU8, Facilities::PMU),
    (Facilities::CDP, Facilities::L3CAT),
];

/// Facilities that only a profile that names them has.
const EXTRA: Facilities = Facilities::RTM
    .union(Facilities::L2CAT)
    .union(Facilities::PMU8)
    .union(Facilities::SMM);

/// Why a profile was refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ProfileError {
    /// No such model.
    #[error("no processor model `{0}`: there are skylake-server, portable-v1 and host")]
    Model(String),
    /// Neither `+facility`, `-facility` nor `pmu=N`.
    #[error("`{0}` is not +FACILITY, -FACILITY, pmu=4 or pmu=8")]
    Word(String),
    /// No such facility.
    #[error("no facility `{0}`: there are {names}", names = names())]
    Facility(String),
    /// One is both in and out, or named twice.
    #[error("facility `{0}` is named twice")]
    Twice(String),
    /// Not a number of counters that a processor has.
    #[error("pmu={0}: a processor has 4 or 8 general-purpose counters")]
    Counters(u64),
    /// One facility needs another that was left out.
    #[error("{what} needs {lacks}, which the profile leaves out")]
    Needs {
        /// What is in the profile.
        what: String,
        /// What is not.
        lacks: String,
    },
    /// What executes the guest cannot do it.
    #[error("{0} needs the interpreter: --engine interp")]
    Unavailable(String),
    /// Not TOML, or not these keys.
    #[error("{0}")]
    File(String),
}

/// All names, for messages and help.
fn names() -> String {
    let names: Vec<_> = NAMES.iter().map(|&(name, _)| name).collect();
    names.join(", ")
}

/// The names of facilities as profiles spell them.
fn spelled(facilities: Facilities) -> String {
    let mut list: Vec<_> = NAMES
        .iter()
        .filter(|&&(name, facility)| name != "rdt" && facilities.contains(facility))
        .map(|&(name, _)| name)
        .collect();
    if facilities.contains(Facilities::PMU8) {
        list.push("pmu=8");
    }
    list.join(" and ")
}

fn named(name: &str) -> Result<Facilities, ProfileError> {
    let found = NAMES.iter().find(|&&(known, _)| known == name);
    found
        .map(|&(_, facility)| facility)
        .ok_or_else(|| ProfileError::Facility(shown(name)))
}

/// A piece of the user's text, fit for a message.
fn shown(text: &str) -> String {
    text.chars().take(40).flat_map(char::escape_debug).collect()
}

/// A model, and how the processor differs from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    model: CpuModel,
    with: Facilities,
    without: Facilities,
}

impl Default for Profile {
    fn default() -> Self {
        CpuModel::default().into()
    }
}

impl From<CpuModel> for Profile {
    fn from(model: CpuModel) -> Self {
        Self::of(model)
    }
}

/// A profile as a file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    model: Option<String>,
    #[serde(default)]
    with: Vec<String>,
    #[serde(default)]
    without: Vec<String>,
    pmu: Option<u64>,
}

impl Profile {
    /// A model as it is.
    pub const fn of(model: CpuModel) -> Self {
        Self {
            model,
            with: Facilities::empty(),
            without: Facilities::empty(),
        }
    }

    /// Which processor it is made from.
    pub const fn model(&self) -> CpuModel {
        self.model
    }

    /// The facilities that no KVM can give a guest, natively or by taking turns with the interpreter.
    pub const fn needs_interpreter(&self) -> bool {
        self.with.intersects(Facilities::RTM.union(Facilities::SMM))
    }

    /// Reads the text of a profile file.
    ///
    /// # Errors
    ///
    /// Says what is wrong with it in one line.
    pub fn from_toml(text: &str) -> Result<Self, ProfileError> {
        let file: File = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| {
                let before = text.get(..span.start).unwrap_or(text);
                before.matches('\n').count() + 1
            });
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            let what = error.message().lines().next().unwrap_or_default();
            ProfileError::File(format!("{place}{what}"))
        })?;
        let mut profile: Self = model(file.model.as_deref().unwrap_or("skylake-server"))?.into();
        for (list, add) in [(&file.with, true), (&file.without, false)] {
            for name in list {
                profile.change(name, add)?;
            }
        }
        if let Some(counters) = file.pmu {
            profile.set_counters(counters)?;
        }
        Ok(profile)
    }

    fn change(&mut self, name: &str, add: bool) -> Result<(), ProfileError> {
        let facility = named(name)?;
        if self.with.union(self.without).intersects(facility) {
            return Err(ProfileError::Twice(shown(name)));
        }
        let list = if add {
            &mut self.with
        } else {
            &mut self.without
        };
        *list |= facility;
        Ok(())
    }

    fn set_counters(&mut self, counters: u64) -> Result<(), ProfileError> {
        match counters {
            4 => {}
            8 => self.with |= Facilities::PMU8,
            other => return Err(ProfileError::Counters(other)),
        }
        Ok(())
    }

    /// What the processor has, of what is `available` where it runs. What is available no more than in
    /// part, because the host lacks it, is left out; what the profile asks for by name must be there.
    ///
    /// # Errors
    ///
    /// When the profile asks for what is not available, or for one facility without another that it
    /// needs.
    pub fn facilities(&self, available: Facilities) -> Result<Facilities, ProfileError> {
        let missing = self.with.difference(available);
        if !missing.is_empty() {
            return Err(ProfileError::Unavailable(spelled(missing)));
        }
        let usual = available.difference(EXTRA);
        let has = usual.union(self.with).difference(self.without);
        for &(what, needs) in NEEDS {
            if has.contains(what) && !has.contains(needs) {
                return Err(ProfileError::Needs {
                    what: spelled(what),
                    lacks: spelled(needs),
                });
            }
        }
        Ok(has)
    }
}

fn model(name: &str) -> Result<CpuModel, ProfileError> {
    match name {
        "skylake-server" => Ok(CpuModel::SkylakeServer),
        "portable-v1" => Ok(CpuModel::PortableV1),
        "host" => Ok(CpuModel::Host),
        _ => Err(ProfileError::Model(shown(name))),
    }
}

impl FromStr for Profile {
    type Err = ProfileError;

    /// `MODEL,+FACILITY,-FACILITY,pmu=N`. Without a model it is `skylake-server`.
    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let mut words = text.split(',').peekable();
        let mut profile = Self::default();
        if let Some(name) =
            words.next_if(|word| !word.starts_with(['+', '-']) && !word.contains('='))
        {
            profile = model(name)?.into();
        }
        let mut counters = false;
        for word in words {
            if let Some(name) = word.strip_prefix('+') {
                profile.change(name, true)?;
            } else if let Some(name) = word.strip_prefix('-') {
                profile.change(name, false)?;
            } else if let Some(number) = word.strip_prefix("pmu=") {
                if std::mem::replace(&mut counters, true) {
                    return Err(ProfileError::Twice("pmu=".to_owned()));
                }
                let number = number.parse();
                profile.set_counters(number.map_err(|_| ProfileError::Word(shown(word)))?)?;
            } else {
                return Err(ProfileError::Word(shown(word)));
            }
        }
        Ok(profile)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.model)?;
        for (sign, list) in [('+', self.with), ('-', self.without)] {
            for &(name, facility) in NAMES {
                if name != "rdt" && list.contains(facility) {
                    write!(f, ",{sign}{name}")?;
                }
            }
        }
        if self.with.contains(Facilities::PMU8) {
            f.write_str(",pmu=8")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Profile, ProfileError> {
        text.parse()
    }

    fn all(text: &str) -> Result<Facilities, ProfileError> {
        parse(text)?.facilities(Facilities::all())
    }

    #[test]
    fn facilities_are_put_in_and_left_out() {
        assert_eq!(all("skylake-server"), Ok(Facilities::OBSERVED));
        let wide = Facilities::OBSERVED
            .difference(Facilities::PEBS)
            .union(Facilities::RTM | Facilities::L2CAT | Facilities::PMU8);
        assert_eq!(all("skylake-server,-pebs,+rtm,+l2cat,pmu=8"), Ok(wide));
        assert_eq!(
            all("-rdt"),
            Ok(Facilities::OBSERVED.difference(Facilities::RDT))
        );
        assert_eq!(
            parse("portable-v1,pmu=4").unwrap().model(),
            CpuModel::PortableV1
        );
    }

    #[test]
    fn shown_as_it_is_parsed() {
        for text in [
            "host",
            "skylake-server,+rtm,+l2cat,-pebs,pmu=8",
            "portable-v1,-lbr,-mba",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn malformed_profiles_are_refused() {
        let word = |text: &str| Err(ProfileError::Word(text.into()));
        let rows = [
            ("", Err(ProfileError::Model(String::new()))),
            ("skylake", Err(ProfileError::Model("skylake".into()))),
            ("skylake-server,", word("")),
            ("skylake-server,pebs", word("pebs")),
            ("+avx1024", Err(ProfileError::Facility("avx1024".into()))),
            ("+rtm,-rtm", Err(ProfileError::Twice("rtm".into()))),
            ("-rdt,+mba", Err(ProfileError::Twice("mba".into()))),
            ("pmu=8,pmu=8", Err(ProfileError::Twice("pmu=".into()))),
            ("pmu=7", Err(ProfileError::Counters(7))),
            ("pmu=-1", word("pmu=-1")),
        ];
        for (text, expected) in rows {
            assert_eq!(parse(text), expected, "{text:?}");
        }
    }

    #[test]
    fn broken_combinations_are_refused_with_a_reason() {
        let rows = [
            ("-pmu", "pebs needs pmu, which the profile leaves out"),
            (
                "-pmu,-pebs,pmu=8",
                "pmu=8 needs pmu, which the profile leaves out",
            ),
            ("-l3cat", "cdp needs l3cat, which the profile leaves out"),
        ];
        for (text, expected) in rows {
            assert_eq!(all(text).unwrap_err().to_string(), expected);
        }
        assert!(all("-pmu,-pebs").is_ok() && all("-l3cat,-cdp").is_ok());
        let natively = |text| parse(text).unwrap().facilities(Facilities::NATIVE);
        let expected = "l2cat and pmu=8 needs the interpreter: --engine interp";
        assert_eq!(natively("+l2cat,pmu=8").unwrap_err().to_string(), expected);
        let expected = "rtm and pmu=8 needs the interpreter: --engine interp";
        assert_eq!(natively("+rtm,pmu=8").unwrap_err().to_string(), expected);
    }

    #[test]
    fn files_say_the_same() {
        let text = "# A wide one.\nwith = [\"rtm\"]\nwithout = [\"pebs\"]\npmu = 8\n";
        assert_eq!(Profile::from_toml(text), parse("+rtm,-pebs,pmu=8"));
        assert_eq!(Profile::from_toml(""), Ok(Profile::default()));
        let rows = [
            ("model = \"x\"", "no processor model `x`"),
            ("\nwidth = 3", "line 2: unknown field `width`"),
            ("with = \"rtm\"", "line 1: invalid type"),
            ("pmu = \"8\"", "line 1: invalid type"),
            ("pmu = -8", "line 1: invalid value"),
            ("= =", "line 1: "),
        ];
        for (text, expected) in rows {
            let line = Profile::from_toml(text).unwrap_err().to_string();
            assert!(line.starts_with(expected) && !line.contains('\n'), "{line}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused_in_one_line(text in any::<String>(), words in "[+=a-z8,-]{0,30}") {
            for text in [text, words] {
                if let Err(error) = parse(&text) {
                    prop_assert!(!error.to_string().contains('\n'));
                }
                if let Err(error) = Profile::from_toml(&text) {
                    prop_assert!(!error.to_string().contains('\n'));
                }
            }
        }
    }
}
