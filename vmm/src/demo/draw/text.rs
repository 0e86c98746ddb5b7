//! Lines of coloured text, and what the terminal can show.

use std::fmt;

use anstyle::{Ansi256Color, AnsiColor, Style};

/// What the output can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Escape sequences for colours.
    pub colour: bool,
    /// Characters beyond ASCII.
    pub unicode: bool,
    /// Columns.
    pub width: usize,
}

impl Look {
    /// `fine` where the terminal has it, else `plain`.
    pub const fn pick(&self, fine: char, plain: char) -> char {
        if self.unicode { fine } else { plain }
    }
}

/// What a piece of text is, which decides its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    /// As the terminal has it.
    Plain,
    /// A heading.
    Title,
    /// Of less interest.
    Dim,
    /// What matters in its line.
    Strong,
    /// Work at ring 0.
    Ring0,
    /// Work at ring 3.
    Ring3,
    /// Accepted.
    Good,
    /// Refused, or an exception.
    Bad,
    /// A symbol of the guest.
    Symbol,
    /// The timer.
    Timer,
    /// A foreground and a background of the 256-colour palette.
    Pixels(u8, u8),
}

impl Paint {
    fn style(self) -> Style {
        let plain = Style::new();
        let fg = |colour: AnsiColor| plain.fg_color(Some(colour.into()));
        let palette = |n| Ansi256Color(n).into();
        match self {
            Self::Plain => plain,
            Self::Title => plain.bold(),
            Self::Dim => plain.dimmed(),
            Self::Strong => plain.bold(),
            Self::Ring0 => plain.fg_color(Some(palette(208))),
            Self::Ring3 => plain.fg_color(Some(palette(39))),
            Self::Good => fg(AnsiColor::Green),
            Self::Bad => fg(AnsiColor::Red),
            Self::Symbol => fg(AnsiColor::Cyan),
            Self::Timer => fg(AnsiColor::Magenta),
            Self::Pixels(front, back) => plain
                .fg_color(Some(palette(front)))
                .bg_color(Some(palette(back))),
        }
    }
}

/// A line, piece by piece. Every character is one column wide.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Line(Vec<(String, Paint)>);

impl Line {
    /// An empty line.
    pub fn new() -> Self {
        Self::default()
    }

    /// With more text.
    pub fn with(mut self, text: impl Into<String>, paint: Paint) -> Self {
        self.push(text, paint);
        self
    }

    /// Adds text.
    pub fn push(&mut self, text: impl Into<String>, paint: Paint) {
        let text = text.into();
        match self.0.last_mut() {
            Some((last, same)) if *same == paint => last.push_str(&text),
            _ => self.0.push((text, paint)),
        }
    }

    /// Adds text that fills up `columns`, or is cut to them; one space follows.
    pub fn column(mut self, text: &str, columns: usize, paint: Paint) -> Self {
        let kept: String = text.chars().take(columns).collect();
        let room = columns - kept.chars().count();
        self.push(kept, paint);
        self.push(" ".repeat(room + 1), Paint::Plain);
        self
    }

    /// As [`Line::column`], to the right.
    pub fn right(mut self, text: &str, columns: usize, paint: Paint) -> Self {
        let kept: String = text.chars().take(columns).collect();
        self.push(" ".repeat(columns - kept.chars().count()), Paint::Plain);
        self.push(kept, paint);
        self.push(" ", Paint::Plain);
        self
    }

    /// Adds all of another line.
    pub fn append(&mut self, other: Self) {
        other
            .0
            .into_iter()
            .for_each(|(text, paint)| self.push(text, paint));
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.0.iter().map(|(text, _)| text.chars().count()).sum()
    }

    /// Cut to `columns`, with no blanks at its end.
    pub fn fit(mut self, columns: usize) -> Self {
        let mut room = columns;
        for (text, _) in &mut self.0 {
            let kept: String = text.chars().take(room).collect();
            room -= kept.chars().count();
            *text = kept;
        }
        while let Some((text, paint)) = self.0.last_mut() {
            if !matches!(paint, Paint::Pixels(..)) {
                text.truncate(text.trim_end().len());
            }
            if !text.is_empty() {
                break;
            }
            self.0.pop();
        }
        self
    }

    /// The line as it is sent to the terminal.
    pub fn show(&self, look: Look) -> impl fmt::Display + '_ {
        Shown(self, look.colour)
    }
}

struct Shown<'a>(&'a Line, bool);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (text, paint) in &self.0.0 {
            let style = paint.style();
            if self.1 && *paint != Paint::Plain {
                write!(f, "{style}{text}{style:#}")?;
            } else {
                f.write_str(text)?;
            }
        }
        Ok(())
    }
}

/// A time in a unit that suits it, such as `12.3 us`.
pub fn time(ns: u64) -> String {
    let (unit, name) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (1_000, "us"),
        1_000_000..1_000_000_000 => (1_000_000, "ms"),
        _ => (1_000_000_000, "s"),
    };
    let tenths = ns / (unit / 10);
    if tenths >= 1000 {
        format!("{} {name}", tenths / 10)
    } else {
        format!("{}.{} {name}", tenths / 10, tenths % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Look = Look {
        colour: true,
        unicode: true,
        width: 80,
    };

    #[test]
    fn colours_end_with_their_text() {
        let line = Line::new().with("a", Paint::Plain).with("b", Paint::Bad);
        assert_eq!(line.show(LOOK).to_string(), "a\x1b[31mb\x1b[0m");
        let plain = Look {
            colour: false,
            ..LOOK
        };
        assert_eq!(line.show(plain).to_string(), "ab");
    }

    #[test]
    fn fit_cuts_and_drops_spaces_at_the_end() {
        let line = Line::new()
            .column("ab", 4, Paint::Bad)
            .with("cdef", Paint::Good);
        assert_eq!(line.width(), 9);
        let plain = Look {
            colour: false,
            ..LOOK
        };
        let text = |columns| line.clone().fit(columns).show(plain).to_string();
        assert_eq!(text(7), "ab   cd");
        assert_eq!(text(4), "ab");
        assert_eq!(text(0), "");
    }

    #[test]
    fn times_have_three_digits() {
        for (ns, text) in [
            (7, "7 ns"),
            (1_250, "1.2 us"),
            (150_000, "150 us"),
            (12_340_000, "12.3 ms"),
            (2_000_000_000, "2.0 s"),
        ] {
            assert_eq!(time(ns), text);
        }
    }
}
