//! Draws the guest's picture with two pixels in a character, one above the other.

use crate::demo::draw::text::{Paint, TerminalStyle, TextLine};
use crate::demo::log::DemoPicture;

/// From far outside of the set to its edge, in the 256-colour palette.
const PALETTE: [u8; 24] = [
    16, 17, 17, 18, 18, 19, 20, 26, 32, 38, 44, 50, 86, 122, 158, 194, 230, 229, 222, 215, 208,
    202, 160, 88,
];
/// Inside of the set.
const INSIDE: u8 = 16;
/// From bright to dark, so that the set is also dark on a white page.
const RAMP: &[u8] = b" .,:;-=+*oxO#@";

/// The distance of a pixel from the outside to the set, in 0 to `steps - 1`. The scale is
/// logarithmic, which spreads the edge of the set.
fn step(pixel: u16, steps: usize) -> usize {
    // log2 with four fraction bits, of 1 to 1000.
    let value = u32::from(pixel.max(1));
    let log = value.ilog2();
    let fraction = (value << 4 >> log) & 15;
    let scaled = usize::try_from(log * 16 + fraction).unwrap_or(0);
    (scaled * steps / 160).min(steps - 1)
}

fn colour(pixel: u16) -> u8 {
    if pixel >= 950 {
        INSIDE
    } else {
        PALETTE[step(pixel, PALETTE.len())]
    }
}

/// Draws the picture with two of its rows in each line.
pub fn draw(picture: &DemoPicture, style: TerminalStyle) -> Vec<TextLine> {
    let row = |y: usize| {
        picture
            .pixels
            .get(y * picture.width..(y + 1) * picture.width)
    };
    let pair = |y: usize| {
        let above = row(y)?;
        Some((above, row(y + 1).unwrap_or(above)))
    };
    (0..picture.height)
        .step_by(2)
        .filter_map(pair)
        .map(|(above, below)| {
            let mut line = TextLine::new();
            for (&a, &b) in above.iter().zip(below) {
                let mean = a.midpoint(b);
                match (style.colour, style.unicode) {
                    (true, true) => line.push("▀", Paint::Pixels(colour(a), colour(b))),
                    (true, false) => line.push(" ", Paint::Pixels(INSIDE, colour(mean))),
                    _ => {
                        let shade = RAMP[step(mean, RAMP.len())];
                        line.push(char::from(shade), Paint::Plain);
                    }
                }
            }
            line
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> DemoPicture {
        DemoPicture {
            width: 3,
            height: 3,
            pixels: vec![0, 500, 1000, 0, 500, 1000, 0, 0, 0],
            samples: 1,
        }
    }

    #[test]
    fn plain_picture_consists_of_ascii_shades() {
        let style = TerminalStyle {
            colour: false,
            unicode: false,
            width: 80,
        };
        let lines = draw(&picture(), style);
        let text: Vec<_> = lines.iter().map(|l| l.render(style).to_string()).collect();
        assert_eq!(text, [" #@", "   "]);
    }

    #[test]
    fn coloured_picture_has_two_pixels_in_a_character() {
        let style = TerminalStyle {
            colour: true,
            unicode: true,
            width: 80,
        };
        let line = draw(&picture(), style)[0].render(style).to_string();
        assert_eq!(line.matches('▀').count(), 3);
        assert!(line.contains("\x1b[38;5;16m\x1b[48;5;16m▀"), "{line:?}");
    }

    #[test]
    fn coloured_ascii_picture_consists_of_backgrounds() {
        let style = TerminalStyle {
            colour: true,
            unicode: false,
            width: 80,
        };
        let line = draw(&picture(), style)[0].clone().fit(80);
        assert_eq!(line.width(), 3, "its trailing spaces are kept");
        assert!(line.render(style).to_string().is_ascii());
    }

    #[test]
    fn steps_rise_with_brightness_and_stay_in_bounds() {
        let steps: Vec<_> = (0..=1000).map(|pixel| step(pixel, 24)).collect();
        assert!(steps.is_sorted());
        assert_eq!((steps[0], steps[1000]), (0, 23));
    }
}
