//! Lines of coloured text, and the capabilities of the terminal.

use std::fmt;

use anstyle::{Ansi256Color, AnsiColor, Style};

/// What the terminal can display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalStyle {
    /// The terminal displays escape sequences for colours.
    pub colour: bool,
    /// The terminal displays characters other than ASCII.
    pub unicode: bool,
    /// Number of columns.
    pub width: usize,
}

impl TerminalStyle {
    /// `unicode` if the terminal displays it, otherwise `ascii`.
    pub const fn pick(&self, unicode: char, ascii: char) -> char {
        if self.unicode { unicode } else { ascii }
    }
}

/// The meaning of a piece of text, which determines its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    /// Ordinary text.
    Plain,
    /// A heading.
    Title,
    /// Text of less importance.
    Dim,
    /// The most important text of its line.
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

/// A line of pieces of text. Every character is one column wide.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextLine(Vec<(String, Paint)>);

impl TextLine {
    /// An empty line.
    pub fn new() -> Self {
        Self::default()
    }

    /// The line with more text.
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

    /// Adds text, padded or truncated to `columns`, and a space.
    pub fn column(mut self, text: &str, columns: usize, paint: Paint) -> Self {
        let fitting: String = text.chars().take(columns).collect();
        let padding = columns - fitting.chars().count();
        self.push(fitting, paint);
        self.push(" ".repeat(padding + 1), Paint::Plain);
        self
    }

    /// Like [`TextLine::column`], aligned to the right.
    pub fn right(mut self, text: &str, columns: usize, paint: Paint) -> Self {
        let fitting: String = text.chars().take(columns).collect();
        self.push(" ".repeat(columns - fitting.chars().count()), Paint::Plain);
        self.push(fitting, paint);
        self.push(" ", Paint::Plain);
        self
    }

    /// Adds the text of another line.
    pub fn append(&mut self, other: Self) {
        other
            .0
            .into_iter()
            .for_each(|(text, paint)| self.push(text, paint));
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.0.iter().map(|(text, _)| text.chars().count()).sum()
    }

    /// The line truncated to `columns`, without trailing spaces.
    pub fn fit(mut self, columns: usize) -> Self {
        let mut left = columns;
        for (text, _) in &mut self.0 {
            let fitting: String = text.chars().take(left).collect();
            left -= fitting.chars().count();
            *text = fitting;
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

    /// The line as it is written to the terminal.
    pub fn render(&self, style: TerminalStyle) -> impl fmt::Display + '_ {
        RenderedLine {
            line: self,
            colour: style.colour,
        }
    }
}

struct RenderedLine<'a> {
    line: &'a TextLine,
    colour: bool,
}

impl fmt::Display for RenderedLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (text, paint) in &self.line.0 {
            let style = paint.style();
            if self.colour && *paint != Paint::Plain {
                write!(f, "{style}{text}{style:#}")?;
            } else {
                f.write_str(text)?;
            }
        }
        Ok(())
    }
}

/// Formats a time with about three digits: `12.3 us`.
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

    const STYLE: TerminalStyle = TerminalStyle {
        colour: true,
        unicode: true,
        width: 80,
    };

    #[test]
    fn colours_end_with_their_text() {
        let line = TextLine::new()
            .with("a", Paint::Plain)
            .with("b", Paint::Bad);
        assert_eq!(line.render(STYLE).to_string(), "a\x1b[31mb\x1b[0m");
        let plain = TerminalStyle {
            colour: false,
            ..STYLE
        };
        assert_eq!(line.render(plain).to_string(), "ab");
    }

    #[test]
    fn fit_truncates_and_drops_trailing_spaces() {
        let line = TextLine::new()
            .column("ab", 4, Paint::Bad)
            .with("cdef", Paint::Good);
        assert_eq!(line.width(), 9);
        let plain = TerminalStyle {
            colour: false,
            ..STYLE
        };
        let text = |columns| line.clone().fit(columns).render(plain).to_string();
        assert_eq!(text(7), "ab   cd");
        assert_eq!(text(4), "ab");
        assert_eq!(text(0), "");
    }

    #[test]
    fn time_has_about_three_digits() {
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
