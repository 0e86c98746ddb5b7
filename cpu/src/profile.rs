//! Processor profiles: a model, and the facilities by which the processor differs from it.
//!
//! On the command line a profile reads `skylake-server,-pebs,+rtm,+l2cat,pmu=8`. The same in TOML:
//!
//! ```toml
//! model = "skylake-server"
//! with = ["rtm", "l2cat"]
//! without = ["pebs"]
//! pmu = 8
//! ```

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::facility::{self, Facilities, NAMES};
use crate::model::CpuModel;

/// Facilities that need another one.
const NEEDS: &[(Facilities, Facilities)] = &[
    (Facilities::PEBS, Facilities::PMU),
    (Facilities::PMU8, Facilities::PMU),
    (Facilities::CDP, Facilities::L3CAT),
];

/// A profile that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProfileError {
    /// The model does not exist.
    #[error("no processor model `{0}`: choose from {models}", models = models())]
    Model(String),
    /// A word is neither `+facility`, `-facility` nor `pmu=N`.
    #[error("`{0}` is not +FACILITY, -FACILITY, pmu=4 or pmu=8")]
    Word(String),
    /// The facility does not exist.
    #[error("no facility `{0}`: choose from {names}", names = names())]
    Facility(String),
    /// A facility is named twice.
    #[error("facility `{0}` is named twice")]
    Twice(String),
    /// The number of counters is neither 4 nor 8.
    #[error("pmu={0}: a processor has 4 or 8 general-purpose counters")]
    Counters(u64),
    /// A facility needs another that the profile leaves out.
    #[error("{facility} needs {needs}, which the profile leaves out")]
    Needs {
        /// The facility in the profile.
        facility: String,
        /// The facility that is missing.
        needs: String,
    },
    /// No processor of the model has the facility.
    #[error("{model} has no {facility}: `hindsight cpu show {model}` lists its facilities")]
    Lacks {
        /// The model.
        model: CpuModel,
        /// The facility in the profile.
        facility: String,
    },
    /// The engine does not provide the facility.
    #[error("{0} needs the interpreter: --engine interp")]
    Unavailable(String),
    /// The file is not TOML, or has other keys.
    #[error("{0}")]
    File(String),
}

/// All facility names, for messages.
fn names() -> String {
    let names: Vec<_> = NAMES.iter().map(|&(name, _)| name).collect();
    names.join(", ")
}

/// All model names, for messages.
fn models() -> String {
    let names: Vec<_> = CpuModel::all().map(CpuModel::name).collect();
    names.join(", ")
}

/// The names of `facilities`, in a sentence.
fn spell(facilities: Facilities) -> String {
    facilities.names().join(" and ")
}

fn parse(name: &str) -> Result<Facilities, ProfileError> {
    facility::parse_facility(name).ok_or_else(|| ProfileError::Facility(quote(name)))
}

/// The beginning of the user's text, escaped for a message.
fn quote(text: &str) -> String {
    text.chars().take(40).flat_map(char::escape_debug).collect()
}

/// A processor model, and the facilities by which the processor differs from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuProfile {
    model: CpuModel,
    with: Facilities,
    without: Facilities,
}

impl Default for CpuProfile {
    fn default() -> Self {
        CpuModel::default().into()
    }
}

impl From<CpuModel> for CpuProfile {
    fn from(model: CpuModel) -> Self {
        Self::of(model)
    }
}

/// The contents of a profile file.
#[cfg(feature = "toml")]
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileFile {
    model: Option<String>,
    #[serde(default)]
    with: Vec<String>,
    #[serde(default)]
    without: Vec<String>,
    pmu: Option<u64>,
}

impl CpuProfile {
    /// The profile of a model without changes.
    pub const fn of(model: CpuModel) -> Self {
        Self {
            model,
            with: Facilities::empty(),
            without: Facilities::empty(),
        }
    }

    /// The processor model.
    pub const fn model(&self) -> CpuModel {
        self.model
    }

    /// Whether the guest must run in the interpreter all the time.
    ///
    /// No KVM provides RTM or SMM, and switching engines does not help.
    pub const fn needs_interpreter(&self) -> bool {
        self.with.intersects(Facilities::RTM.union(Facilities::SMM))
    }

    /// Parses the text of a profile file.
    ///
    /// # Errors
    ///
    /// The text is not a profile; the message has one line and names the line of the file.
    #[cfg(feature = "toml")]
    pub fn from_toml(text: &str) -> Result<Self, ProfileError> {
        let file: ProfileFile = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| {
                let before = text.get(..span.start).unwrap_or(text);
                before.matches('\n').count() + 1
            });
            let line = line.map_or_else(String::new, |line| format!("line {line}: "));
            let message = error.message().lines().next().unwrap_or_default();
            ProfileError::File(format!("{line}{message}"))
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

    /// Adds or removes the facility of this name.
    fn change(&mut self, name: &str, add: bool) -> Result<(), ProfileError> {
        let facility = parse(name)?;
        if self.with.union(self.without).intersects(facility) {
            return Err(ProfileError::Twice(quote(name)));
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
            4 => self.without |= Facilities::PMU8,
            8 => self.with |= Facilities::PMU8,
            other => return Err(ProfileError::Counters(other)),
        }
        Ok(())
    }

    /// The facilities of this profile that the engine can provide.
    ///
    /// `available` are the facilities that the engine provides. A facility that is not available is
    /// left out, unless the profile names it.
    ///
    /// # Errors
    ///
    /// The profile names a facility that is not available, or one without another that it needs.
    pub fn facilities(&self, available: Facilities) -> Result<Facilities, ProfileError> {
        let missing = self.with.difference(available);
        if !missing.is_empty() {
            return Err(ProfileError::Unavailable(spell(missing)));
        }
        let model = self.model.definition();
        let foreign = self.with.difference(model.facilities | model.options);
        if !foreign.is_empty() {
            return Err(ProfileError::Lacks {
                model: self.model,
                facility: spell(foreign),
            });
        }
        let default = available.intersection(model.facilities);
        let mut has = default.union(self.with).difference(self.without);
        if !has.contains(Facilities::PMU) && !self.with.contains(Facilities::PMU8) {
            // The counters that a model has by default go with the others.
            has.remove(Facilities::PMU8);
        }
        for &(facility, needs) in NEEDS {
            if has.contains(facility) && !has.contains(needs) {
                return Err(ProfileError::Needs {
                    facility: spell(facility),
                    needs: spell(needs),
                });
            }
        }
        Ok(has)
    }
}

fn model(name: &str) -> Result<CpuModel, ProfileError> {
    CpuModel::from_name(name).ok_or_else(|| ProfileError::Model(quote(name)))
}

impl FromStr for CpuProfile {
    type Err = ProfileError;

    /// Parses `MODEL,+FACILITY,-FACILITY,pmu=N`; the model defaults to `skylake-server`.
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
                profile.set_counters(number.map_err(|_| ProfileError::Word(quote(word)))?)?;
            } else {
                return Err(ProfileError::Word(quote(word)));
            }
        }
        Ok(profile)
    }
}

impl fmt::Display for CpuProfile {
    /// The profile as [`FromStr`] parses it.
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
        if self.without.contains(Facilities::PMU8) {
            f.write_str(",pmu=4")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<CpuProfile, ProfileError> {
        text.parse()
    }

    fn all(text: &str) -> Result<Facilities, ProfileError> {
        parse(text)?.facilities(Facilities::all())
    }

    #[test]
    fn profile_adds_and_removes_facilities() {
        assert_eq!(all("skylake-server"), Ok(Facilities::INTERP_DEFAULT));
        let wide = Facilities::INTERP_DEFAULT
            .difference(Facilities::PEBS)
            .union(Facilities::RTM | Facilities::L2CAT | Facilities::PMU8);
        assert_eq!(all("skylake-server,-pebs,+rtm,+l2cat,pmu=8"), Ok(wide));
        assert_eq!(
            all("-rdt"),
            Ok(Facilities::INTERP_DEFAULT.difference(Facilities::RDT))
        );
        assert_eq!(
            parse("portable-v1,pmu=4").unwrap().model(),
            CpuModel::PortableV1
        );
    }

    #[test]
    fn profile_can_halve_the_counters_of_a_model_or_leave_all_out() {
        let all_of = |text| all(text).unwrap();
        assert!(all_of("icelake-server").contains(Facilities::PMU8));
        let four = all_of("icelake-server,pmu=4");
        assert!(four.contains(Facilities::PMU) && !four.contains(Facilities::PMU8));
        let none = all_of("icelake-server,-pmu,-pebs");
        assert!(!none.intersects(Facilities::PMU | Facilities::PMU8));
        assert!(all("icelake-server,-pmu,-pebs,pmu=8").is_err());
        assert_eq!(all("skylake-server,pmu=4"), all("skylake-server"));
    }

    #[test]
    fn display_round_trips_through_from_str() {
        for text in [
            "host",
            "skylake-server,+rtm,+l2cat,-pebs,pmu=8",
            "portable-v1,-lbr,-mba",
            "portable-v2,-pebs",
            "icelake-server,-lbr,pmu=4",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn malformed_profiles_are_rejected() {
        let word = |text: &str| Err(ProfileError::Word(text.into()));
        let rows = [
            ("", Err(ProfileError::Model(String::new()))),
            ("skylark", Err(ProfileError::Model("skylark".into()))),
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
    fn inconsistent_profiles_are_rejected_with_a_reason() {
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
        let under_kvm = |text| parse(text).unwrap().facilities(Facilities::KVM);
        let expected = "l2cat and pmu=8 needs the interpreter: --engine interp";
        assert_eq!(under_kvm("+l2cat,pmu=8").unwrap_err().to_string(), expected);
        let expected = "rtm and pmu=8 needs the interpreter: --engine interp";
        assert_eq!(under_kvm("+rtm,pmu=8").unwrap_err().to_string(), expected);
    }

    #[cfg(feature = "toml")]
    #[test]
    fn profile_file_equals_the_command_line_form() {
        let text = "# A wide one.\nwith = [\"rtm\"]\nwithout = [\"pebs\"]\npmu = 8\n";
        assert_eq!(CpuProfile::from_toml(text), parse("+rtm,-pebs,pmu=8"));
        assert_eq!(CpuProfile::from_toml(""), Ok(CpuProfile::default()));
        let rows = [
            ("model = \"x\"", "no processor model `x`"),
            ("\nwidth = 3", "line 2: unknown field `width`"),
            ("with = \"rtm\"", "line 1: invalid type"),
            ("pmu = \"8\"", "line 1: invalid type"),
            ("pmu = -8", "line 1: invalid value"),
            ("= =", "line 1: "),
        ];
        for (text, expected) in rows {
            let line = CpuProfile::from_toml(text).unwrap_err().to_string();
            assert!(line.starts_with(expected) && !line.contains('\n'), "{line}");
        }
    }

    proptest! {
        #[test]
        fn error_for_any_text_has_one_line(text in any::<String>(), words in "[+=a-z8,-]{0,30}") {
            for text in [text, words] {
                if let Err(error) = parse(&text) {
                    prop_assert!(!error.to_string().contains('\n'));
                }
                #[cfg(feature = "toml")]
                if let Err(error) = CpuProfile::from_toml(&text) {
                    prop_assert!(!error.to_string().contains('\n'));
                }
            }
        }
    }
}
