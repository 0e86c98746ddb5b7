//! Draws the time line: a bar for each phase, and a row for each kind of event.

use hindsight_devices::clock::Ticks;

use crate::demo::draw::text::{Paint, TerminalStyle, TextLine, time};
use crate::demo::story::{Story, StoryPhase, nanoseconds};

/// Columns for the names on the left.
const NAME: usize = 19;
/// Columns for the numbers on the right.
const NUMBER: usize = 8;

/// A scale from time to columns.
#[derive(Clone, Copy)]
struct Axis {
    columns: usize,
    end: Ticks,
}

impl Axis {
    /// The column of a time.
    fn column(self, at: Ticks) -> usize {
        let scaled = u128::from(at) * self.columns as u128 / u128::from(self.end.max(1));
        usize::try_from(scaled)
            .unwrap_or(self.columns)
            .min(self.columns - 1)
    }
}

/// The time line of a story.
pub fn draw(story: &Story, style: TerminalStyle) -> Vec<TextLine> {
    let axis = Axis {
        columns: style.width.saturating_sub(NAME + NUMBER + 5).max(10),
        end: story.end,
    };
    let mut lines: Vec<_> = story
        .phases
        .iter()
        .map(|phase| bar(phase, story.hz, axis, style))
        .collect();
    lines.push(ruler(story, axis, style));
    let exceptions: Vec<_> = story.exceptions.iter().map(|row| row.at).collect();
    let msrs: Vec<_> = story.msrs.iter().map(|row| row.at).collect();
    for (name, times, paint) in [
        ("timer interrupts", &story.ticks, Paint::Timer),
        ("exceptions", &exceptions, Paint::Bad),
        ("MSR accesses", &msrs, Paint::Good),
        ("exits", &story.exits, Paint::Strong),
    ] {
        lines.push(density(name, times, axis, style, paint));
    }
    lines.extend(emulated(story));
    lines
}

/// Explains why ring 0 is slow, if it is.
///
/// The guest does the same work at both rings, first at ring 0. Cold memory there costs at most a
/// factor of ten.
fn emulated(story: &Story) -> Option<TextLine> {
    const SLOW: u64 = 50;
    let ratio = story.ring0_slower.filter(|ratio| *ratio >= SLOW)?;
    // On a busy host, only about two digits are significant.
    let unit = 10_u64.pow(ratio.ilog10() - 1);
    let line = TextLine::new()
        .with(" ", Paint::Plain)
        .with("Ring 0", Paint::Ring0)
        .with(
            format!(" takes {} times as long as ", ratio / unit * unit),
            Paint::Plain,
        )
        .with("ring 3", Paint::Ring3)
        .with(" for these primes: KVM emulates it.", Paint::Plain);
    Some(line)
}

fn bar(phase: &StoryPhase, hz: u64, axis: Axis, style: TerminalStyle) -> TextLine {
    let (first, last) = (axis.column(phase.time.start), axis.column(phase.time.end));
    // Even the shortest phase has one column.
    let len = (last - first).max(1);
    let (glyph, paint) = match phase.cpl {
        0 => (style.pick('▒', '='), Paint::Ring0),
        _ => (style.pick('█', '#'), Paint::Ring3),
    };
    let took = phase.time.end.saturating_sub(phase.time.start);
    let mut line = TextLine::new()
        .with(" ", Paint::Plain)
        .column(&phase.name, NAME, Paint::Plain);
    line.push(" ".repeat(first), Paint::Plain);
    line.push(glyph.to_string().repeat(len), paint);
    line.push(" ".repeat(axis.columns - first - len + 1), Paint::Plain);
    line.right(&time(nanoseconds(took, hz)), NUMBER, Paint::Plain)
}

/// The scale of the time line: `0 ----- 12 ms ----- 24 ms`.
fn ruler(story: &Story, axis: Axis, style: TerminalStyle) -> TextLine {
    let dash = style.pick('─', '-').to_string();
    let half = time(nanoseconds(story.end / 2, story.hz));
    let all = time(nanoseconds(story.end, story.hz));
    let middle = (axis.columns / 2).saturating_sub(half.len() / 2 + 3);
    let rest = (axis.columns + 1 + NUMBER).saturating_sub(middle + half.len() + all.len() + 5);
    TextLine::new()
        .with(" ".repeat(NAME + 2), Paint::Plain)
        .with(
            format!(
                "0 {} {half} {} {all}",
                dash.repeat(middle),
                dash.repeat(rest)
            ),
            Paint::Dim,
        )
}

/// The number of events in the time of each column, as a row of glyphs.
fn density(
    name: &str,
    times: &[Ticks],
    axis: Axis,
    style: TerminalStyle,
    paint: Paint,
) -> TextLine {
    const FINE: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    const PLAIN: [char; 8] = ['.', ':', '-', '=', '+', '*', '%', '@'];
    let mut counts = vec![0_usize; axis.columns];
    for &at in times {
        counts[axis.column(at)] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or(0).max(1);
    let steps = if style.unicode { FINE } else { PLAIN };
    let glyph = |count: usize| match count {
        0 => ' ',
        _ if most == 1 => style.pick('▌', '|'),
        _ => steps[((count * 8).div_ceil(most) - 1).min(7)],
    };
    let mut line = TextLine::new()
        .with(" ", Paint::Plain)
        .column(name, NAME, Paint::Plain);
    line.push(counts.into_iter().map(glyph).collect::<String>(), paint);
    line.push(" ", Paint::Plain);
    line.right(&times.len().to_string(), NUMBER, Paint::Plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STYLE: TerminalStyle = TerminalStyle {
        colour: false,
        unicode: false,
        width: 52,
    };

    fn text(lines: &[TextLine]) -> Vec<String> {
        let fit = |line: &TextLine| line.clone().fit(STYLE.width).render(STYLE).to_string();
        lines.iter().map(fit).collect()
    }

    fn story() -> Story {
        let phase = |name: &str, cpl, time| StoryPhase {
            name: name.to_owned(),
            cpl,
            time,
        };
        Story {
            hz: 1000,
            end: 1000,
            phases: vec![
                phase("boot", 0, 0..500),
                phase("compute", 3, 500..999),
                phase("late", 0, 999..1000),
            ],
            ticks: vec![0, 550, 551, 552, 553, 554, 555, 999],
            exits: vec![500],
            ..Story::default()
        }
    }

    #[test]
    fn phases_share_an_axis_and_the_shortest_has_one_column() {
        let lines = text(&draw(&story(), STYLE));
        assert_eq!(
            lines[0],
            " boot                ==========             500 ms"
        );
        assert_eq!(
            lines[1],
            " compute                       #########    499 ms"
        );
        assert_eq!(
            lines[2],
            " late                                   =   1.0 ms"
        );
    }

    #[test]
    fn event_rows_have_density_and_count() {
        let lines = text(&draw(&story(), STYLE));
        assert_eq!(
            lines[4],
            " timer interrupts    :          @       :        8"
        );
        assert_eq!(
            lines[5],
            " exceptions                                      0"
        );
        assert_eq!(
            lines[7],
            " exits                         |                 1"
        );
    }

    #[test]
    fn slow_ring_0_is_explained_and_a_fast_one_is_not() {
        let lines = |ratio| {
            let ring0_slower = Some(ratio);
            text(&draw(
                &Story {
                    ring0_slower,
                    ..story()
                },
                STYLE,
            ))
        };
        assert_eq!(lines(49).len(), 8);
        let slow = lines(14_724);
        assert!(
            slow[8].starts_with(" Ring 0 takes 14000 times as"),
            "{}",
            slow[8]
        );
    }

    #[test]
    fn empty_story_is_drawn() {
        let lines = draw(&Story::default(), STYLE);
        assert_eq!(lines.len(), 5);
    }
}
