//! A story as lines for the terminal. A further panel is a function from the story and the [`Look`]
//! to lines, and a row in [`draw`].

mod picture;
mod tables;
mod text;
mod timeline;

pub use text::{Line, Look, Paint, time};

use crate::demo::story::Story;

/// What a fact is about, and the fact.
pub type Fact = (&'static str, String);

/// Everything, from top to bottom. `facts` stand beside the picture.
pub fn draw(story: &Story, facts: &[Fact], look: Look) -> Vec<Line> {
    let mut lines = head(story, facts, look);
    let mut panel = |title: &str, about: Line, content: Vec<Line>| {
        if !content.is_empty() {
            lines.push(Line::new());
            lines.push(heading(title, about));
            lines.extend(content);
        }
    };
    let dim = |text: &str| Line::new().with(text, Paint::Dim);
    let rings = dim("its phases, at ")
        .with(format!("{} ring 0", look.pick('▒', '=')), Paint::Ring0)
        .with(" and ", Paint::Dim)
        .with(format!("{} ring 3", look.pick('█', '#')), Paint::Ring3)
        .with(", and when things happened", Paint::Dim);
    panel("TIME", rings, timeline::draw(story, look));
    for profile in &story.profiles {
        let about = format!("{} {}", profile.total(), profile.about);
        panel("PROFILE", dim(&about), tables::profile(profile, look));
    }
    panel(
        "HOW IT CAME TO THIS",
        dim("the last branches before a fault, by its own LBR stack"),
        tables::way(story, look),
    );
    panel(
        "EXCEPTIONS",
        dim("as the guest's own handlers saw them; none needs an exit"),
        tables::exceptions(story, look),
    );
    panel(
        "MSRs",
        dim("what the guest asked for, what it got, and why"),
        tables::msrs(story, look),
    );
    let share = dim("and the median time of one; ")
        .with(look.pick('█', '#').to_string(), Paint::Strong)
        .with(" is Hindsight's share of it", Paint::Dim);
    panel("EXITS", share, tables::exits(story, look));
    lines.extend(closing(story));
    lines.into_iter().map(|line| line.fit(look.width)).collect()
}

fn heading(title: &str, about: Line) -> Line {
    let mut line = Line::new()
        .with(title, Paint::Title)
        .with("  ", Paint::Plain);
    line.append(about);
    line
}

/// The picture, and the facts beside it, or below where there is no room.
fn head(story: &Story, facts: &[Fact], look: Look) -> Vec<Line> {
    const FACTS_MIN: usize = 28;
    let mut right = vec![
        Line::new()
            .with("hindsight demo", Paint::Title)
            .with(concat!(" ", env!("CARGO_PKG_VERSION")), Paint::Dim),
        Line::new(),
    ];
    let mut before = "";
    right.extend(facts.iter().map(|(name, fact)| {
        let same = std::mem::replace(&mut before, name) == *name;
        Line::new()
            .column(if same { "" } else { name }, 8, Paint::Dim)
            .with(fact.clone(), Paint::Plain)
    }));
    let Some(picture) = &story.picture else {
        return right;
    };
    let left = picture::draw(picture, look);
    let width = picture.width + 3;
    if look.width < width + FACTS_MIN {
        return left.into_iter().chain([Line::new()]).chain(right).collect();
    }
    let rows = left.len().max(right.len());
    let (mut left, mut right) = (left.into_iter(), right.into_iter());
    (0..rows)
        .map(|_| {
            let mut line = left.next().unwrap_or_default();
            let room = width.saturating_sub(line.width());
            line.push(" ".repeat(room), Paint::Plain);
            line.append(right.next().unwrap_or_default());
            line
        })
        .collect()
}

fn closing(story: &Story) -> Vec<Line> {
    let mut lines = vec![Line::new()];
    if let Some(problem) = &story.problem {
        let line = Line::new().with("It did not come to its end: ", Paint::Bad);
        lines.push(line.with(problem.clone(), Paint::Plain));
        lines.push(Line::new());
    }
    lines.push(heading("NEXT", Line::new().with("what to try", Paint::Dim)));
    for (command, about) in [
        ("hindsight doctor", "what this host's KVM really does"),
        ("hindsight test", "assert the processor's rules, one by one"),
        (
            "hindsight run IMAGE",
            "a guest of your own; --trace all tells what it does",
        ),
    ] {
        lines.push(
            Line::new()
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
    use crate::demo::log::Picture;

    fn look(width: usize) -> Look {
        Look {
            colour: false,
            unicode: false,
            width,
        }
    }

    fn text(story: &Story, look: Look) -> String {
        let facts = [("host", "a processor".to_owned())];
        let lines = draw(story, &facts, look);
        lines
            .iter()
            .map(|l| format!("{}\n", l.show(look)))
            .collect()
    }

    fn story() -> Story {
        Story {
            picture: Some(Picture {
                width: 44,
                height: 2,
                pixels: vec![1000; 88],
                samples: 1,
            }),
            ..Story::default()
        }
    }

    #[test]
    fn facts_stand_beside_the_picture_if_there_is_room() {
        let wide = text(&story(), look(80));
        assert!(wide.starts_with(&format!("{}   hindsight demo", "@".repeat(44))));
        let narrow = text(&story(), look(60));
        assert!(narrow.starts_with(&format!("{}\n\nhindsight demo", "@".repeat(44))));
        assert!(narrow.contains("\nhost     a processor\n"));
    }

    #[test]
    fn no_line_is_wider_than_the_terminal_or_beyond_ascii() {
        for width in [20, 40, 80, 200] {
            for line in text(&story(), look(width)).lines() {
                assert!(line.len() <= width && line.is_ascii(), "{width}: {line:?}");
            }
        }
    }

    #[test]
    fn problem_is_told_before_the_end() {
        let story = Story {
            problem: Some("a triple fault".to_owned()),
            ..Story::default()
        };
        let text = text(&story, look(80));
        assert!(text.contains("It did not come to its end: a triple fault\n"));
    }
}
