//! Draws profiles, branches, exceptions, MSR accesses and exits as tables.

use crate::demo::draw::text::{Paint, TerminalStyle, TextLine, time};
use crate::demo::story::{BranchRow, ExitRow, SampleProfile, Story};

/// Maximum number of rows of a profile; the other symbols share one more row.
const PROFILE_ROWS: usize = 6;

/// The length of a bar for `part` of `whole`, at most `columns`.
fn bar(part: u64, whole: u64, columns: usize) -> usize {
    let scaled = u128::from(part) * columns as u128;
    usize::try_from(scaled.div_ceil(u128::from(whole.max(1))))
        .unwrap_or(columns)
        .min(columns)
}

fn ring(cpl: u8) -> Paint {
    if cpl == 0 { Paint::Ring0 } else { Paint::Ring3 }
}

/// A profile: the symbols with the most samples.
pub fn profile(profile: &SampleProfile, style: TerminalStyle) -> Vec<TextLine> {
    const NAME: usize = 19;
    let total = profile.total();
    let (first, rest) = profile.hits.split_at(profile.hits.len().min(PROFILE_ROWS));
    let rest: usize = rest.iter().map(|hit| hit.1).sum();
    let mut rows = first.to_vec();
    if rest > 0 {
        rows.push(("others".to_owned(), rest));
    }
    let columns = style.width.saturating_sub(NAME + 18).max(8);
    let most = rows.iter().map(|row| row.1).max().unwrap_or(1);
    let glyph = style.pick('█', '#').to_string();
    rows.iter()
        .map(|(name, count)| {
            let len = bar(*count as u64, most as u64, columns);
            let mut line =
                TextLine::new()
                    .with(" ", Paint::Plain)
                    .column(name, NAME, Paint::Symbol);
            line.push(glyph.repeat(len), Paint::Ring3);
            line.push(" ".repeat(columns - len), Paint::Plain);
            line.right(
                &format!("{} %", count * 100 / total.max(1)),
                6,
                Paint::Strong,
            )
            .right(&count.to_string(), 6, Paint::Dim)
        })
        .collect()
}

/// The branches before a fault, and the fault.
pub fn fault_path(story: &Story, style: TerminalStyle) -> Vec<TextLine> {
    let location_width = if style.width >= 100 { 34 } else { 24 };
    let arrow = style.pick('→', '>').to_string();
    let row = |row: &BranchRow| {
        TextLine::new()
            .with(" ", Paint::Plain)
            .column(&row.from, location_width, Paint::Symbol)
            .column(&row.instruction, 6, Paint::Plain)
            .column(&arrow, 1, Paint::Dim)
            .with(row.to.clone(), Paint::Symbol)
    };
    let fault = story.fault.as_ref().map(|fault| {
        TextLine::new()
            .with(" ", Paint::Plain)
            .column(&fault.location, location_width, Paint::Symbol)
            .column(&fault.mnemonic, 6, Paint::Bad)
            .with(fault.instruction.clone(), Paint::Plain)
    });
    story.branches.iter().map(row).chain(fault).collect()
}

/// The exceptions.
pub fn exceptions(story: &Story, style: TerminalStyle) -> Vec<TextLine> {
    let location_width = if style.width >= 100 { 30 } else { 22 };
    let rows = story.exceptions.iter().map(|row| {
        TextLine::new()
            .with(" ", Paint::Plain)
            .column(&format!("ring {}", row.cpl), 6, ring(row.cpl))
            .column(&row.mnemonic, 3, Paint::Bad)
            .column(&row.location, location_width, Paint::Symbol)
            .column(&row.instruction, 15, Paint::Plain)
            .with(row.reason.clone(), Paint::Dim)
    });
    rows.collect()
}

/// The MSR accesses, with their outcomes.
pub fn msrs(story: &Story, _style: TerminalStyle) -> Vec<TextLine> {
    let rows = story.msrs.iter().map(|row| {
        let access = row.access;
        let name = row.name.strip_prefix("IA32_").unwrap_or(&row.name);
        let (value, arrow) = match (access.written, access.answer) {
            (Some(value), _) => (format!("{value:#x}"), "<-"),
            (None, Some(value)) => (format!("{value:#x}"), "->"),
            (None, None) => (String::new(), "  "),
        };
        let (answer, paint) = match access.answer {
            Some(_) => ("ok", Paint::Good),
            None => ("#GP", Paint::Bad),
        };
        let kind = if access.written.is_some() {
            "WRMSR"
        } else {
            "RDMSR"
        };
        TextLine::new()
            .with(" ", Paint::Plain)
            .column(kind, 5, Paint::Plain)
            .right(&format!("{:x}", access.index), 8, Paint::Dim)
            .column(name, 18, Paint::Symbol)
            .column(arrow, 2, Paint::Dim)
            .column(&value, 12, Paint::Strong)
            .column(answer, 3, paint)
            .with(row.reason.clone(), Paint::Dim)
    });
    rows.collect()
}

/// The exits by kind, with their times.
pub fn exits(story: &Story, style: TerminalStyle) -> Vec<TextLine> {
    let head = TextLine::new()
        .with(" ", Paint::Plain)
        .column("", 16, Paint::Dim)
        .right("count", 6, Paint::Dim)
        .right("Hindsight", 10, Paint::Dim)
        .right("the guest", 10, Paint::Dim);
    let most = story
        .exit_rows
        .iter()
        .filter_map(|row| row.guest_ns)
        .max()
        .unwrap_or(1);
    let mut lines = vec![head];
    lines.extend(story.exit_rows.iter().map(|row| exit(row, most, style)));
    lines
}

fn exit(row: &ExitRow, most: u64, style: TerminalStyle) -> TextLine {
    let text = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), time);
    let count = match row.count {
        0 => "none".to_owned(),
        count => count.to_string(),
    };
    let mut line = TextLine::new()
        .with(" ", Paint::Plain)
        .column(&row.name, 16, Paint::Plain)
        .right(&count, 6, Paint::Strong)
        .right(&text(row.monitor_ns), 10, Paint::Plain)
        .right(&text(row.guest_ns), 10, Paint::Plain);
    if let Some(guest) = row.guest_ns {
        let columns = style.width.saturating_sub(50).max(8);
        let all = bar(guest, most, columns);
        let monitor = bar(row.monitor_ns.unwrap_or(0), most, columns).min(all);
        line.push(" ", Paint::Plain);
        line.push(
            style.pick('█', '#').to_string().repeat(monitor),
            Paint::Strong,
        );
        line.push(
            style.pick('░', '.').to_string().repeat(all - monitor),
            Paint::Dim,
        );
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::explain::MsrAccess;
    use crate::demo::story::{ExceptionRow, FaultRow, MsrRow};

    const STYLE: TerminalStyle = TerminalStyle {
        colour: false,
        unicode: false,
        width: 60,
    };

    fn text(lines: &[TextLine]) -> Vec<String> {
        let fit = |line: &TextLine| line.clone().fit(STYLE.width).render(STYLE).to_string();
        lines.iter().map(fit).collect()
    }

    #[test]
    fn profile_has_bars_percentages_and_a_row_for_the_rest() {
        let hits = (0..8).map(|n| (format!("f{n}"), 10 - n)).collect();
        let lines = text(&super::profile(
            &SampleProfile {
                about: "test".to_owned(),
                hits,
            },
            STYLE,
        ));
        assert_eq!(lines.len(), PROFILE_ROWS + 1);
        assert_eq!(
            lines[0],
            " f0                  #######################  19 %     10"
        );
        assert!(lines[6].starts_with(" others "), "{}", lines[6]);
    }

    #[test]
    fn fault_path_ends_with_the_fault() {
        let story = Story {
            branches: vec![BranchRow {
                from: "f+0x4".to_owned(),
                instruction: "call".to_owned(),
                to: "g".to_owned(),
            }],
            fault: Some(FaultRow {
                mnemonic: "#DE".to_owned(),
                location: "g+0x2".to_owned(),
                instruction: "div %rcx".to_owned(),
            }),
            ..Story::default()
        };
        assert_eq!(
            text(&fault_path(&story, STYLE)),
            [
                " f+0x4                    call   > g",
                " g+0x2                    #DE    div %rcx"
            ]
        );
    }

    #[test]
    fn exception_row_has_level_vector_location_and_reason() {
        let story = Story {
            exceptions: vec![ExceptionRow {
                at: 0,
                cpl: 3,
                mnemonic: "#UD".to_owned(),
                location: "f+0x2".to_owned(),
                instruction: "ud2".to_owned(),
                reason: "invalid opcode".to_owned(),
            }],
            ..Story::default()
        };
        assert_eq!(
            text(&exceptions(&story, STYLE)),
            [" ring 3 #UD f+0x2                  ud2             invalid o"]
        );
    }

    #[test]
    fn refused_wrmsr_row_has_its_value_and_reason() {
        let story = Story {
            msrs: vec![MsrRow {
                at: 0,
                access: MsrAccess {
                    index: 0x1d9,
                    written: Some(4),
                    answer: None,
                },
                name: "IA32_DEBUGCTL".to_owned(),
                reason: "bit 2".to_owned(),
            }],
            ..Story::default()
        };
        assert_eq!(
            text(&msrs(&story, STYLE)),
            [" WRMSR      1d9 DEBUGCTL           <- 0x4          #GP bit 2"]
        );
    }

    #[test]
    fn exit_row_draws_the_share_of_the_monitor() {
        let row = ExitRow {
            name: "RDMSR".to_owned(),
            count: 3,
            monitor_ns: Some(1_000),
            guest_ns: Some(4_000),
        };
        assert_eq!(
            exit(&row, 8_000, STYLE).fit(60).render(STYLE).to_string(),
            " RDMSR                 3     1.0 us     4.0 us  ##..."
        );
    }

    #[test]
    fn operation_without_exits_has_no_share_of_the_monitor() {
        let row = ExitRow {
            name: "CPUID".to_owned(),
            guest_ns: Some(8_000),
            ..ExitRow::default()
        };
        let line = exit(&row, 8_000, STYLE).render(STYLE).to_string();
        assert!(
            line.contains("none") && line.ends_with(".........."),
            "{line}"
        );
    }
}
