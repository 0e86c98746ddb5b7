//! The layout of a Linux kernel's structures, from the BTF that it keeps in its own memory. See
//! `Documentation/bpf/btf.rst` of Linux. The bytes are untrusted.

/// The longest section of types that is read; a kernel has some megabytes.
pub(super) const BTF_BYTES_MAX: usize = 64 << 20;
/// The first two bytes of the section.
const MAGIC: u16 = 0xeb9f;
/// Bytes of a type without what its kind adds.
const TYPE_LEN: usize = 12;
/// Structures and unions without a name that may contain each other.
const DEPTH_MAX: usize = 8;
/// Members that are examined for one path.
const MEMBERS_MAX: usize = 100_000;
/// No member of the structures that are read is further from their start.
const OFFSET_MAX: u64 = 1 << 20;

/// Kinds of types.
mod kind {
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const TYPE_TAG: u32 = 18;
}

/// A structure's member: where it is, and the number of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Member {
    /// Bytes from the start of the structure.
    offset: u64,
    of_type: u32,
}

/// A type of the section.
#[derive(Clone, Copy, Debug)]
struct BtfType<'a> {
    name: u32,
    kind: u32,
    /// Members have the size of bit fields in the upper bits of their offset.
    has_bit_fields: bool,
    /// Size or type, by its kind.
    size_or_type: u32,
    members: &'a [u8],
}

/// The types of a kernel.
#[derive(Debug)]
pub struct BtfTypes {
    bytes: Vec<u8>,
    /// Where each type begins. Types are numbered from 1.
    types: Vec<u32>,
    /// Where the strings begin.
    strings: usize,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}

/// Bytes that a kind adds to a type with `count` members.
const fn extra_bytes(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        // Pointers, forward declarations, typedefs, qualifiers, functions, floats, tags.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structures, unions, sections of data, enumerations of 64 bits.
        4 | 5 | 15 | 19 => 12 * count,
        // Enumerations, prototypes of functions.
        6 | 13 => 8 * count,
        _ => return None,
    })
}

impl BtfTypes {
    /// Parses a section; `None` if it is malformed or has a kind of types that is not known.
    pub fn parse(bytes: Vec<u8>) -> Option<Self> {
        let word = |at| word(&bytes, at);
        let size = |at| word(at).and_then(|word| usize::try_from(word).ok());
        if word(0)? & 0xffff != u32::from(MAGIC) || bytes.len() > BTF_BYTES_MAX {
            return None;
        }
        let header = size(4)?;
        let mut at = header.checked_add(size(8)?)?;
        let end = at.checked_add(size(12)?)?;
        let strings = header.checked_add(size(16)?)?;
        if end > bytes.len() || strings > bytes.len() {
            return None;
        }
        let mut types = Vec::new();
        while at < end {
            types.push(u32::try_from(at).ok()?);
            let info = word(at.checked_add(4)?)?;
            let count = usize::try_from(info & 0xffff).ok()?;
            at += TYPE_LEN + extra_bytes(info >> 24 & 0x1f, count)?;
        }
        (at == end).then_some(())?;
        Some(Self {
            bytes,
            types,
            strings,
        })
    }

    /// Whether the string at `offset` is `name`. Takes no longer for strings that are longer.
    fn is_named(&self, offset: u32, name: &[u8]) -> bool {
        let start = usize::try_from(offset).ok();
        let start = start.and_then(|offset| self.strings.checked_add(offset));
        let rest = start.and_then(|start| self.bytes.get(start..));
        let rest = rest.and_then(|rest| rest.strip_prefix(name));
        rest.is_some_and(|rest| rest.first() == Some(&0))
    }

    fn get(&self, index: u32) -> Option<BtfType<'_>> {
        let index = usize::try_from(index).ok()?.checked_sub(1)?;
        let at = usize::try_from(*self.types.get(index)?).ok()?;
        let info = word(&self.bytes, at + 4)?;
        let (kind, count) = (info >> 24 & 0x1f, usize::try_from(info & 0xffff).ok()?);
        let members = at + TYPE_LEN;
        let extra = extra_bytes(kind, count)?;
        Some(BtfType {
            name: word(&self.bytes, at)?,
            kind,
            has_bit_fields: info >> 31 != 0,
            size_or_type: word(&self.bytes, at + 8)?,
            members: self.bytes.get(members..members + extra)?,
        })
    }

    /// The type behind typedefs and qualifiers.
    fn resolve(&self, mut index: u32) -> Option<BtfType<'_>> {
        for _ in 0..DEPTH_MAX {
            let found = self.get(index)?;
            match found.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::TYPE_TAG => {
                    index = found.size_or_type;
                }
                _ => return Some(found),
            }
        }
        None
    }

    /// The member of a structure, also of one without a name in it.
    fn member(
        &self,
        structure: &BtfType<'_>,
        name: &[u8],
        depth: usize,
        budget: &mut usize,
    ) -> Option<Member> {
        if depth > DEPTH_MAX || !matches!(structure.kind, kind::STRUCT | kind::UNION) {
            return None;
        }
        for row in structure.members.chunks_exact(12) {
            *budget = budget.checked_sub(1)?;
            let (name_at, of_type) = (word(row, 0)?, word(row, 4)?);
            let bits = match word(row, 8)? {
                bits if structure.has_bit_fields => bits & 0xff_ffff,
                bits => bits,
            };
            let offset = u64::from(bits / 8);
            if self.is_named(name_at, name) {
                return Some(Member { offset, of_type });
            }
            if self.is_named(name_at, b"")
                && let Some(inner) = self.resolve(of_type)
                && let Some(member) = self.member(&inner, name, depth + 1, budget)
            {
                return Some(Member {
                    offset: member.offset.checked_add(offset)?,
                    ..member
                });
            }
        }
        None
    }

    /// The structure with this name. Names without members are forward declarations.
    fn structure(&self, name: &[u8]) -> Option<BtfType<'_>> {
        let numbers = 1..=u32::try_from(self.types.len()).ok()?;
        let mut all = numbers.filter_map(|index| self.get(index));
        all.find(|found| {
            let is_structure = found.kind == kind::STRUCT && !found.members.is_empty();
            is_structure && self.is_named(found.name, name)
        })
    }

    /// Bytes of a structure.
    pub fn size(&self, structure: &str) -> Option<u64> {
        let found = self.structure(structure.as_bytes())?;
        Some(u64::from(found.size_or_type))
    }

    /// Bytes from the start of a structure to a member of it, such as `f_path.dentry` of `file`.
    pub fn offset(&self, structure: &str, path: &str) -> Option<u64> {
        let mut current = self.structure(structure.as_bytes())?;
        let (mut offset, mut budget) = (0_u64, MEMBERS_MAX);
        let mut names = path.split('.').peekable();
        while let Some(name) = names.next() {
            let member = self.member(&current, name.as_bytes(), 0, &mut budget)?;
            offset = offset.checked_add(member.offset)?;
            if names.peek().is_some() {
                current = self.resolve(member.of_type)?;
            }
        }
        (offset <= OFFSET_MAX).then_some(offset)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Makes a section of types.
    #[derive(Default)]
    pub(in crate::kernel) struct BtfBuilder {
        types: Vec<u8>,
        strings: Vec<u8>,
        count: u32,
    }

    impl BtfBuilder {
        fn text(&mut self, text: &str) -> u32 {
            if self.strings.is_empty() {
                self.strings.push(0);
            }
            if text.is_empty() {
                return 0;
            }
            let at = u32::try_from(self.strings.len()).unwrap();
            self.strings.extend(text.bytes());
            self.strings.push(0);
            at
        }

        /// Adds a structure or union with members: name, type and byte offset. Returns its number.
        pub(in crate::kernel) fn add(
            &mut self,
            kind: u32,
            name: &str,
            members: &[(&str, u32, u32)],
        ) -> u32 {
            let count = u32::try_from(members.len()).unwrap();
            let mut words = vec![self.text(name), kind << 24 | count, 64];
            for &(name, of_type, offset) in members {
                words.extend([self.text(name), of_type, offset * 8]);
            }
            self.types
                .extend(words.iter().flat_map(|word| word.to_le_bytes()));
            self.count += 1;
            self.count
        }

        pub(in crate::kernel) fn bytes(mut self) -> Vec<u8> {
            self.text("");
            let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap();
            let types = len(&self.types);
            let header = [0x1_eb9f, 24, 0, types, types, len(&self.strings)];
            let mut bytes: Vec<u8> = header
                .iter()
                .flat_map(|word: &u32| word.to_le_bytes())
                .collect();
            bytes.extend(self.types);
            bytes.extend(self.strings);
            bytes
        }
    }

    #[test]
    fn member_is_found_also_in_structures_without_a_name() {
        let mut builder = BtfBuilder::default();
        let path = builder.add(kind::STRUCT, "path", &[("mnt", 0, 0), ("dentry", 0, 8)]);
        let inner = builder.add(kind::STRUCT, "", &[("vm_start", 0, 0), ("vm_end", 0, 8)]);
        let both = builder.add(kind::UNION, "", &[("", inner, 0), ("vm_rcu", 0, 0)]);
        builder.add(
            kind::STRUCT,
            "file",
            &[("f_mode", 0, 0), ("f_path", path, 0x18)],
        );
        builder.add(kind::STRUCT, "vm_area_struct", &[("", both, 0x10)]);
        let types = BtfTypes::parse(builder.bytes()).unwrap();
        assert_eq!(types.offset("file", "f_path.dentry"), Some(0x20));
        assert_eq!(types.offset("vm_area_struct", "vm_end"), Some(0x18));
        assert_eq!(types.offset("file", "f_pos"), None);
        assert_eq!(types.offset("inode", "i_ino"), None);
        assert_eq!(types.size("file"), Some(64));
    }

    #[test]
    fn structure_that_contains_itself_is_not_followed_forever() {
        let mut builder = BtfBuilder::default();
        builder.add(kind::STRUCT, "", &[("", 1, 0), ("", 1, 0), ("", 2, 0)]);
        builder.add(kind::STRUCT, "loop", &[("", 1, 8), ("", 2, 8)]);
        let types = BtfTypes::parse(builder.bytes()).unwrap();
        assert_eq!(types.offset("loop", "missing"), None);
    }

    #[test]
    fn names_without_an_end_are_not_searched_for_it() {
        let mut builder = BtfBuilder::default();
        let long = "x".repeat(4 << 20);
        let mut at = builder.add(kind::STRUCT, &long, &[("a", 0, 0)]);
        for _ in 0..30_000 {
            at = builder.add(kind::STRUCT, "", &[("b", 0, 0)]);
        }
        builder.add(kind::STRUCT, "file", &[("f_mode", 0, 8)]);
        let mut bytes = builder.bytes();
        for n in 0..usize::try_from(at).unwrap() {
            // All structures but the last have the long name, which is the first string.
            bytes[24 + 24 * n] = 1;
        }
        let types = BtfTypes::parse(bytes).unwrap();
        let start = std::time::Instant::now();
        assert_eq!(types.offset("file", "f_mode"), Some(8));
        assert_eq!(types.offset("missing", "f_mode"), None);
        assert!(start.elapsed().as_secs() < 10);
    }

    #[test]
    fn malformed_section_is_refused() {
        let mut builder = BtfBuilder::default();
        builder.add(kind::STRUCT, "file", &[("f_mode", 0, 0)]);
        let good = builder.bytes();
        assert!(BtfTypes::parse(good.clone()).is_some());
        for len in 0..24 {
            assert!(BtfTypes::parse(good[..len].to_vec()).is_none());
        }
        for at in [0, 12, 13, 14, 15, 31] {
            let mut bad = good.clone();
            bad[at] ^= 0x7f;
            assert!(BtfTypes::parse(bad).is_none(), "byte {at}");
        }
    }
}
