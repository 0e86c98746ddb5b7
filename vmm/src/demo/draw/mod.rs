//! Draws a story as lines of text.
//!
//! A panel is a function from the story and the [`TerminalStyle`] to lines, and a call in [`draw`].

mod picture;
mod tables;
mod text;
mod timeline;

pub use text::{Paint, TerminalStyle, TextLine, time};

use crate::demo::story::Story;

/// The subject of a fact, and the fact.
pub type Fact = (&'static str, String);

/// Draws all panels, from top to bottom. `facts` are beside the picture.
pub fn draw(story: &Story, facts: &[Fact], style: TerminalStyle) -> Vec<TextLine> {
    let mut lines = head(story, facts, style);
    let mut panel = |title: &str, about: TextLine, content: Vec<TextLine>| {
        if !content.is_empty() {
            lines.push(TextLine::new());
            lines.push(heading(title, about));
            lines.extend(content);
        }
    };
    let dim = |text: &str| TextLine::new().with(text, Paint::Dim);
    let rings = dim("its phases, at ")
        .with(format!("{} ring 0", style.pick('▒', '=')), Paint::Ring0)
        .with(" and ", Paint::Dim)
        .with(format!("{} ring 3", style.pick('█', '#')), Paint::Ring3)
        .with(", and when things happened", Paint::Dim);
    panel("TIME", rings, timeline::draw(story, style));
    for profile in &story.profiles {
        let about = format!("{} {}", profile.total(), profile.about);
        panel("PROFILE", dim(&about), tables::profile(profile, style));
    }
    panel(
        "HOW IT CAME TO THIS",
        dim("the last branches before a fault, by its own LBR stack"),
        tables::fault_path(story, style),
    );
    panel(
        "EXCEPTIONS",
        dim("as the guest's own handlers saw them; none needs an exit"),
        tables::exceptions(story, style),
    );
    panel(
        "MSRs",
        dim("what the guest asked for, what it got, and why"),
        tables::msrs(story, style),
    );
    let share = dim("and the median time of one; ")
        .with(style.pick('█', '#').to_string(), Paint::Strong)
        .with(" is Hindsight's share of it", Paint::Dim);
    panel("EXITS", share, tables::exits(story, style));
    lines.extend(closing(story));
    lines
        .into_iter()
        .map(|line| line.fit(style.width))
        .collect()
}

fn heading(title: &str, about: TextLine) -> TextLine {
    let mut line = TextLine::new()
        .with(title, Paint::Title)
        .with("  ", Paint::Plain);
    line.append(about);
    line
}

/// The picture with the facts beside it, or below it on a narrow terminal.
fn head(story: &Story, facts: &[Fact], style: TerminalStyle) -> Vec<TextLine> {
    const FACTS_MIN: usize = 28;
    let mut right = vec![
        TextLine::new()
            .with("hindsight demo", Paint::Title)
            .with(concat!(" ", env!("CARGO_PKG_VERSION")), Paint::Dim),
        TextLine::new(),
    ];
    let mut before = "";
    right.extend(facts.iter().map(|(name, fact)| {
        let same = std::mem::replace(&mut before, name) == *name;
        TextLine::new()
            .column(if same { "" } else { name }, 8, Paint::Dim)
            .with(fact.clone(), Paint::Plain)
    }));
    let Some(picture) = &story.picture else {
        return right;
    };
    let left = picture::draw(picture, style);
    let width = picture.width + 3;
    if style.width < width + FACTS_MIN {
        return left
            .into_iter()
            .chain([TextLine::new()])
            .chain(right)
            .collect();
    }
    let rows = left.len().max(right.len());
    let (mut left, mut right) = (left.into_iter(), right.into_iter());
    (0..rows)
        .map(|_| {
            let mut line = left.next().unwrap_or_default();
            let padding = width.saturating_sub(line.width());
            line.push(" ".repeat(padding), Paint::Plain);
            line.append(right.next().unwrap_or_default());
            line
        })
        .collect()
}

fn closing(story: &Story) -> Vec<TextLine> {
    let mut lines = vec![TextLine::new()];
    if let Some(problem) = &story.problem {
        let line = TextLine::new().with("It did not come to its end: ", Paint::Bad);
        lines.push(line.with(problem.clone(), Paint::Plain));
        lines.push(TextLine::new());
    }
    lines.push(heading(
        "NEXT",
        TextLine::new().with("what to try", Paint::Dim),
    ));
    for (command, about) in [
        ("hindsight doctor", "what this host's KVM really does"),
        ("hindsight test", "assert the processor's rules, one by one"),
        (
            "hindsight run IMAGE",
            "a guest of your own; --trace all tells what it does",
        ),
    ] {
        lines.push(
            TextLine::new()
                .with(" ", Paint::Plain)
                .column(command, 20, Paint::Strong)
                .with(about, Paint::Dim),
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::log::DemoPicture;

    fn style(width: usize) -> TerminalStyle {
        TerminalStyle {
            colour: false,
            unicode: false,
            width,
        }
    }

    fn text(story: &Story, style: TerminalStyle) -> String {
        let facts = [("host", "a processor".to_owned())];
        let lines = draw(story, &facts, style);
        lines
            .iter()
            .map(|l| format!("{}\n", l.render(style)))
            .collect()
    }

    fn story() -> Story {
        Story {
            picture: Some(DemoPicture {
                width: 44,
                height: 2,
                pixels: vec![1000; 88],
                samples: 1,
            }),
            ..Story::default()
        }
    }

    #[test]
    fn facts_are_beside_the_picture_on_a_wide_terminal_and_below_on_a_narrow_one() {
        let wide = text(&story(), style(80));
        assert!(wide.starts_with(&format!("{}   hindsight demo", "@".repeat(44))));
        let narrow = text(&story(), style(60));
        assert!(narrow.starts_with(&format!("{}\n\nhindsight demo", "@".repeat(44))));
        assert!(narrow.contains("\nhost     a processor\n"));
    }

    #[test]
    fn plain_lines_are_ascii_and_fit_the_terminal() {
        for width in [20, 40, 80, 200] {
            for line in text(&story(), style(width)).lines() {
                assert!(line.len() <= width && line.is_ascii(), "{width}: {line:?}");
            }
        }
    }

    #[test]
    fn problem_is_drawn_before_the_closing_lines() {
        let story = Story {
            problem: Some("a triple fault".to_owned()),
            ..Story::default()
        };
        let text = text(&story, style(80));
        assert!(text.contains("It did not come to its end: a triple fault\n"));
    }
}
