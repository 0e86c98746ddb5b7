//! Profiles, exceptions, MSR accesses and exits, as tables.

use crate::demo::draw::text::{Line, Look, Paint, time};
use crate::demo::story::{BranchRow, KindRow, Profile, Story};

/// Rows of a profile; the rest is one row.
const PROFILE_ROWS: usize = 6;

/// A bar of `part` in `whole`, in at most `columns`.
fn bar(part: u64, whole: u64, columns: usize) -> usize {
    let scaled = u128::from(part) * columns as u128;
    usize::try_from(scaled.div_ceil(u128::from(whole.max(1))))
        .unwrap_or(columns)
        .min(columns)
}

fn ring(cpl: u8) -> Paint {
    if cpl == 0 { Paint::Ring0 } else { Paint::Ring3 }
}

/// Where samples found the guest.
pub fn profile(profile: &Profile, look: Look) -> Vec<Line> {
    const NAME: usize = 19;
    let total = profile.total();
    let (shown, rest) = profile.hits.split_at(profile.hits.len().min(PROFILE_ROWS));
    let rest: usize = rest.iter().map(|hit| hit.1).sum();
    let mut rows = shown.to_vec();
    if rest > 0 {
        rows.push(("others".to_owned(), rest));
    }
    let columns = look.width.saturating_sub(NAME + 18).max(8);
    let most = rows.iter().map(|row| row.1).max().unwrap_or(1);
    let glyph = look.pick('█', '#').to_string();
    rows.iter()
        .map(|(name, count)| {
            let len = bar(*count as u64, most as u64, columns);
            let mut line = Line::new()
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

/// The way to a fault, branch by branch.
pub fn way(story: &Story, look: Look) -> Vec<Line> {
    let place = if look.width >= 100 { 34 } else { 24 };
    let arrow = look.pick('→', '>').to_string();
    let row = |row: &BranchRow| {
        Line::new()
            .with(" ", Paint::Plain)
            .column(&row.from, place, Paint::Symbol)
            .column(&row.instruction, 6, Paint::Plain)
            .column(&arrow, 1, Paint::Dim)
            .with(row.to.clone(), Paint::Symbol)
    };
    let fault = story.fault.as_ref().map(|fault| {
        Line::new()
            .with(" ", Paint::Plain)
            .column(&fault.place, place, Paint::Symbol)
            .column(fault.mnemonic, 6, Paint::Bad)
            .with(fault.instruction.clone(), Paint::Plain)
    });
    story.way.iter().map(row).chain(fault).collect()
}

/// What each exception was.
pub fn exceptions(story: &Story, look: Look) -> Vec<Line> {
    let place = if look.width >= 100 { 30 } else { 22 };
    let rows = story.exceptions.iter().map(|row| {
        Line::new()
            .with(" ", Paint::Plain)
            .column(&format!("ring {}", row.cpl), 6, ring(row.cpl))
            .column(row.mnemonic, 3, Paint::Bad)
            .column(&row.place, place, Paint::Symbol)
            .column(&row.instruction, 15, Paint::Plain)
            .with(row.why.clone(), Paint::Dim)
    });
    rows.collect()
}

/// What each MSR access answered, and why.
pub fn msrs(story: &Story, _look: Look) -> Vec<Line> {
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
        Line::new()
            .with(" ", Paint::Plain)
            .column(kind, 5, Paint::Plain)
            .right(&format!("{:x}", access.index), 8, Paint::Dim)
            .column(name, 18, Paint::Symbol)
            .column(arrow, 2, Paint::Dim)
            .column(&value, 12, Paint::Strong)
            .column(answer, 3, paint)
            .with(row.why.clone(), Paint::Dim)
    });
    rows.collect()
}

/// What stopped the guest, and what that cost.
pub fn exits(story: &Story, look: Look) -> Vec<Line> {
    let head = Line::new()
        .with(" ", Paint::Plain)
        .column("", 16, Paint::Dim)
        .right("count", 6, Paint::Dim)
        .right("Hindsight", 10, Paint::Dim)
        .right("the guest", 10, Paint::Dim);
    let most = story
        .kinds
        .iter()
        .filter_map(|row| row.guest_ns)
        .max()
        .unwrap_or(1);
    let mut lines = vec![head];
    lines.extend(story.kinds.iter().map(|row| exit(row, most, look)));
    lines
}

fn exit(row: &KindRow, most: u64, look: Look) -> Line {
    let shown = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), time);
    let count = match row.count {
        0 => "none".to_owned(),
        count => count.to_string(),
    };
    let mut line = Line::new()
        .with(" ", Paint::Plain)
        .column(&row.name, 16, Paint::Plain)
        .right(&count, 6, Paint::Strong)
        .right(&shown(row.ours_ns), 10, Paint::Plain)
        .right(&shown(row.guest_ns), 10, Paint::Plain);
    if let Some(guest) = row.guest_ns {
        let columns = look.width.saturating_sub(50).max(8);
        let all = bar(guest, most, columns);
        let ours = bar(row.ours_ns.unwrap_or(0), most, columns).min(all);
        line.push(" ", Paint::Plain);
        line.push(look.pick('█', '#').to_string().repeat(ours), Paint::Strong);
        line.push(
            look.pick('░', '.').to_string().repeat(all - ours),
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

    const LOOK: Look = Look {
        colour: false,
        unicode: false,
        width: 60,
    };

    fn text(lines: &[Line]) -> Vec<String> {
        let fit = |line: &Line| line.clone().fit(LOOK.width).show(LOOK).to_string();
        lines.iter().map(fit).collect()
    }

    #[test]
    fn profile_has_bars_shares_and_a_row_for_the_rest() {
        let hits = (0..8).map(|n| (format!("f{n}"), 10 - n)).collect();
        let lines = text(&super::profile(
            &Profile {
                about: "test".to_owned(),
                hits,
            },
            LOOK,
        ));
        assert_eq!(lines.len(), PROFILE_ROWS + 1);
        assert_eq!(
            lines[0],
            " f0                  #######################  19 %     10"
        );
        assert!(lines[6].starts_with(" others "), "{}", lines[6]);
    }

    #[test]
    fn way_to_a_fault_ends_with_the_fault() {
        let story = Story {
            way: vec![BranchRow {
                from: "f+0x4".to_owned(),
                instruction: "call".to_owned(),
                to: "g".to_owned(),
            }],
            fault: Some(FaultRow {
                mnemonic: "#DE",
                place: "g+0x2".to_owned(),
                instruction: "div %rcx".to_owned(),
            }),
            ..Story::default()
        };
        assert_eq!(
            text(&way(&story, LOOK)),
            [
                " f+0x4                    call   > g",
                " g+0x2                    #DE    div %rcx"
            ]
        );
    }

    #[test]
    fn exception_row_says_level_vector_place_and_cause() {
        let story = Story {
            exceptions: vec![ExceptionRow {
                at: 0,
                cpl: 3,
                mnemonic: "#UD",
                place: "f+0x2".to_owned(),
                instruction: "ud2".to_owned(),
                why: "invalid opcode".to_owned(),
            }],
            ..Story::default()
        };
        assert_eq!(
            text(&exceptions(&story, LOOK)),
            [" ring 3 #UD f+0x2                  ud2             invalid o"]
        );
    }

    #[test]
    fn refused_msr_write_shows_its_value_and_reason() {
        let story = Story {
            msrs: vec![MsrRow {
                at: 0,
                access: MsrAccess {
                    index: 0x1d9,
                    written: Some(4),
                    answer: None,
                },
                name: "IA32_DEBUGCTL".to_owned(),
                why: "bit 2".to_owned(),
            }],
            ..Story::default()
        };
        assert_eq!(
            text(&msrs(&story, LOOK)),
            [" WRMSR      1d9 DEBUGCTL           <- 0x4          #GP bit 2"]
        );
    }

    #[test]
    fn exit_row_compares_our_share_with_the_whole() {
        let row = KindRow {
            name: "RDMSR".to_owned(),
            count: 3,
            ours_ns: Some(1_000),
            guest_ns: Some(4_000),
        };
        assert_eq!(
            exit(&row, 8_000, LOOK).fit(60).show(LOOK).to_string(),
            " RDMSR                 3     1.0 us     4.0 us  ##..."
        );
    }

    #[test]
    fn what_does_not_exit_has_no_share_of_ours() {
        let row = KindRow {
            name: "CPUID".to_owned(),
            guest_ns: Some(8_000),
            ..KindRow::default()
        };
        let line = exit(&row, 8_000, LOOK).show(LOOK).to_string();
        assert!(
            line.contains("none") && line.ends_with(".........."),
            "{line}"
        );
    }
}
