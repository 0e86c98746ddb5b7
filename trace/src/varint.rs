//! Numbers of variable length: seven bits a byte, the least significant first (LEB128).

/// Appends `value`.
pub(crate) fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(u8::try_from(value & 0x7f).unwrap_or(0) | 0x80);
        value >>= 7;
    }
    out.push(u8::try_from(value).unwrap_or(0));
}

/// Appends the difference of two values, which is short if they are near.
pub(crate) fn put_difference(out: &mut Vec<u8>, value: u64, base: u64) {
    let difference = value.wrapping_sub(base).cast_signed();
    put(
        out,
        ((difference << 1) ^ (difference >> 63)).cast_unsigned(),
    );
}

/// Takes a number off the front of `input`; `None` if it is cut off or too long.
pub(crate) fn take(input: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = take_byte(input)?;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

/// Takes what [`put_difference`] appended.
pub(crate) fn take_difference(input: &mut &[u8], base: u64) -> Option<u64> {
    let coded = take(input)?;
    Some(base.wrapping_add((coded >> 1) ^ (coded & 1).wrapping_neg()))
}

/// Takes a byte off the front of `input`.
pub(crate) fn take_byte(input: &mut &[u8]) -> Option<u8> {
    let (&byte, rest) = input.split_first()?;
    *input = rest;
    Some(byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_are_taken_as_they_were_put(value: u64, base: u64) {
            let mut bytes = Vec::new();
            put(&mut bytes, value);
            put_difference(&mut bytes, value, base);
            let mut rest = bytes.as_slice();
            prop_assert_eq!(take(&mut rest), Some(value));
            prop_assert_eq!(take_difference(&mut rest, base), Some(value));
            prop_assert!(rest.is_empty());
        }
    }

    #[test]
    fn number_that_is_cut_off_or_too_long_is_none() {
        assert_eq!(take(&mut [0x80].as_slice()), None);
        assert_eq!(take(&mut [0xff; 11].as_slice()), None);
        let too_large = [[0xff; 9].as_slice(), &[2]].concat();
        assert_eq!(take(&mut too_large.as_slice()), None);
    }
}
