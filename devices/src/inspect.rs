//! Inspection of a running device: its registers as names and values for a person.

use std::fmt::{self, LowerHex, Write as _};

/// A register or property of a device, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InspectField {
    /// The data sheet's name, or a short description.
    pub name: String,
    /// The value, decoded for a person.
    pub value: String,
}

/// A device that can describe its state to a person.
///
/// The text may change at any time; programs use the saved states instead.
pub trait Inspect {
    /// The registers, in the order of the data sheet.
    fn inspect(&self) -> Vec<InspectField>;
}

/// A list of fields under construction.
#[derive(Debug, Default)]
pub(crate) struct FieldList(Vec<InspectField>);

impl FieldList {
    /// Adds a field with any value.
    pub(crate) fn push(&mut self, name: impl Into<String>, value: impl fmt::Display) {
        self.0.push(InspectField {
            name: name.into(),
            value: value.to_string(),
        });
    }

    /// Adds a number in hexadecimal, with two digits for each byte of its type.
    pub(crate) fn hex<T: LowerHex>(&mut self, name: impl Into<String>, value: T) {
        let width = 2 + 2 * size_of::<T>();
        self.push(name, format_args!("{value:#0width$x}"));
    }

    /// Adds "yes" or "no".
    pub(crate) fn flag(&mut self, name: impl Into<String>, value: bool) {
        self.push(name, if value { "yes" } else { "no" });
    }

    /// Adds the names of the flags that are set.
    pub(crate) fn flags<T: bitflags::Flags>(&mut self, name: impl Into<String>, flags: T) {
        self.push(
            name,
            list(flags.iter_names().map(|(name, _)| name.to_owned())),
        );
    }

    /// Adds the names whose conditions hold.
    pub(crate) fn names(&mut self, name: impl Into<String>, names: &[(bool, &str)]) {
        let held = names.iter().filter(|(holds, _)| *holds);
        self.push(name, list(held.map(|(_, name)| (*name).to_owned())));
    }

    /// Adds the numbers of the bits that are set in `bits`.
    pub(crate) fn bits(&mut self, name: impl Into<String>, bits: u32) {
        let set = (0..32).filter(|bit| bits >> bit & 1 != 0);
        self.push(name, list(set.map(|bit: u32| bit.to_string())));
    }

    /// Adds the vectors whose bits are set.
    pub(crate) fn vectors(&mut self, name: impl Into<String>, bits: &[u32; 8]) {
        let set = (0..256).filter(|&vector| bits[vector / 32] >> (vector % 32) & 1 != 0);
        self.push(name, list(set.map(|vector| format!("{vector:#04x}"))));
    }

    /// Returns the list of fields.
    pub(crate) fn finish(self) -> Vec<InspectField> {
        self.0
    }
}

/// The items, separated by spaces; "none" if there are none.
fn list(items: impl Iterator<Item = String>) -> String {
    let mut text = String::new();
    for item in items {
        let separator = if text.is_empty() { "" } else { " " };
        let _ = write!(text, "{separator}{item}");
    }
    if text.is_empty() {
        text.push_str("none");
    }
    text
}

#[cfg(test)]
pub(crate) mod test {
    //! A lookup for the tests of devices.

    use super::Inspect;

    /// The value of the field `name`.
    pub fn field(device: &impl Inspect, name: &str) -> String {
        let fields = device.inspect();
        let found = fields.iter().find(|field| field.name == name);
        found
            .unwrap_or_else(|| panic!("no field {name} in {fields:?}"))
            .value
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    bitflags::bitflags! {
        struct Sample: u8 {
            const ONE = 1;
            const TWO = 2;
        }
    }

    #[test]
    fn fields_are_decoded_for_a_person() {
        let mut fields = FieldList::default();
        fields.hex("byte", 7_u8);
        fields.hex("double word", 0x1_0000_u32);
        fields.flag("on", true);
        fields.flags("flags", Sample::all());
        fields.flags("no flags", Sample::empty());
        fields.names("modes", &[(true, "a"), (false, "b"), (true, "c")]);
        fields.bits("lines", 0b1_0010);
        fields.vectors("vectors", &[0, 1 << 16, 0, 0, 0, 0, 0, 1 << 15]);
        let values: Vec<_> = fields.finish().into_iter().map(|f| f.value).collect();
        let expected = [
            "0x07",
            "0x00010000",
            "yes",
            "ONE TWO",
            "none",
            "a c",
            "1 4",
            "0x30 0xef",
        ];
        assert_eq!(values, expected);
    }
}
