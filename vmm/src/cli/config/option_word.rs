//! Values that are one word on the command line and one string in the file.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{self, Serialize, Serializer};

use super::paths;

/// A type whose values are written as one word.
pub trait OptionValue: Sized {
    /// Describes a valid word, for the message about a value of another TOML type.
    const EXPECTED: &'static str;

    /// Parses a word.
    ///
    /// # Errors
    ///
    /// One line that says what is wrong with the word.
    fn parse(text: &str) -> Result<Self, String>;

    /// Writes the word that [`OptionValue::parse`] reads back.
    ///
    /// # Errors
    ///
    /// When no word stands for the value, such as a path that is not UTF-8.
    fn format(&self) -> Result<String, String>;

    /// Resolves every relative path in the value against `folder`. A value without paths stays.
    #[must_use]
    fn resolve_paths(self, _folder: &Path) -> Self {
        self
    }
}

/// An option's value of type `T`. In the file, a number may stand for the word of its digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OptionWord<T>(pub T);

impl<T: OptionValue> FromStr for OptionWord<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        T::parse(text).map(Self)
    }
}

impl<T: OptionValue + Clone> Serialize for OptionWord<T> {
    /// Writes a number where the word is one. Paths become absolute, so that the file may be stored
    /// anywhere.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let folder = std::env::current_dir().map_err(ser::Error::custom)?;
        let value = self.0.clone().resolve_paths(&folder);
        let text = value.format().map_err(ser::Error::custom)?;
        match text.parse() {
            Ok(number) => serializer.serialize_i64(number),
            Err(_) => serializer.serialize_str(&text),
        }
    }
}

impl<'de, T: OptionValue> Deserialize<'de> for OptionWord<T> {
    /// Paths are relative to the folder of the file that is being read.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value: T = deserializer.deserialize_any(WordVisitor(PhantomData))?;
        Ok(Self(paths::with_folder(|folder| {
            value.resolve_paths(folder)
        })))
    }
}

struct WordVisitor<T>(PhantomData<T>);

impl<T: OptionValue> WordVisitor<T> {
    fn parse<E: de::Error>(text: &str) -> Result<T, E> {
        T::parse(text).map_err(E::custom)
    }
}

impl<T: OptionValue> Visitor<'_> for WordVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        Self::parse(text)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        Self::parse(&number.to_string())
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        Self::parse(&number.to_string())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        Self::parse(&number.to_string())
    }
}
