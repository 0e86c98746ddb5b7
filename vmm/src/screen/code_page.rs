//! Code page 437, the characters of a VGA.

/// The characters 0 to 31, and 128 to 255. The font has pictures for control characters.
const LOW: &str = " ☺☻♥♦♣♠•◘○◙♂♀♪♫☼►◄↕‼¶§▬↨↑↓→←∟↔▲▼";
const HIGH: &str = "ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜ¢£¥₧ƒáíóúñÑªº¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀\
                    αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■ ";

/// The character of a byte.
pub(super) fn character(byte: u8) -> char {
    let nth = |text: &str, index: u8| text.chars().nth(index.into()).unwrap_or(' ');
    match byte {
        0..0x20 => nth(LOW, byte),
        0x7f => '⌂',
        0x80.. => nth(HIGH, byte - 0x80),
        _ => byte.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_byte_but_spaces_has_a_character_of_its_own() {
        assert_eq!(LOW.chars().count(), 32);
        assert_eq!(HIGH.chars().count(), 128);
        let all: BTreeSet<char> = (0..=255).map(character).collect();
        // 0, 32 and 255 are spaces.
        assert_eq!(all.len(), 254);
        assert_eq!(
            (character(b'A'), character(0xdb), character(0xe1)),
            ('A', '█', 'ß')
        );
    }
}
