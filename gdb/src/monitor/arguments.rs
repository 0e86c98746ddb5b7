//! The arguments of commands.

use crate::target::CommandError;

/// Checks that a command got no arguments.
///
/// # Errors
///
/// [`CommandError::Usage`] when there are any.
pub fn no_arguments(arguments: &[&str]) -> Result<(), CommandError> {
    if arguments.is_empty() {
        Ok(())
    } else {
        Err(CommandError::Usage)
    }
}

/// Parses a number in decimal, or in hexadecimal with 0x.
///
/// # Errors
///
/// When it is not a number of 64 bits.
pub fn parse_number(text: &str) -> Result<u64, CommandError> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| {
        let reason = format!("{text} is not a number (decimal, or hexadecimal with 0x)");
        CommandError::Failed(reason)
    })
}

/// Parses `on` or `off`; `None` without arguments.
pub(super) fn parse_switch(arguments: &[&str]) -> Result<Option<bool>, CommandError> {
    match arguments {
        [] => Ok(None),
        ["on"] => Ok(Some(true)),
        ["off"] => Ok(Some(false)),
        _ => Err(CommandError::Usage),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_or_hexadecimal_with_prefix() {
        assert_eq!(parse_number("10"), Ok(10));
        assert_eq!(parse_number("0x10"), Ok(16));
        for bad in ["", "x", "ff", "0x", "-1", "0x1ffffffffffffffff"] {
            let error = parse_number(bad).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{bad} is not a number")),
                "{error}"
            );
        }
    }
}
