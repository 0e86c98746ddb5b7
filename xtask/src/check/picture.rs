//! The picture of the house, docs/images/house.svg, against the imports of the monitor.
//!
//! Each folder of `vmm/src` is a box with its name in the class `m`. A folder imports only from boxes
//! below its own, or to the right of it in the same row.

use std::collections::BTreeMap;

/// The picture.
pub const PICTURE: &str = "docs/images/house.svg";

/// The names of boxes in the same row differ in height by less than this.
const ROW: f64 = 20.0;

/// The positions of the names in the boxes.
fn boxes(svg: &str) -> BTreeMap<&str, (f64, f64)> {
    let texts = svg.lines().filter(|line| line.starts_with("<text "));
    let names = texts.filter(|line| line.contains(r#"class="m""#));
    names
        .filter_map(|line| {
            let (_, name) = line.strip_suffix("</text>")?.rsplit_once('>')?;
            Some((name, (attribute(line, "x")?, attribute(line, "y")?)))
        })
        .collect()
}

fn attribute(line: &str, name: &str) -> Option<f64> {
    let (_, rest) = line.split_once(&format!(" {name}=\""))?;
    rest.split('"').next()?.parse().ok()
}

/// Folders without a box, and imports that point up or to the left. `units` has the imports of each
/// folder.
pub fn compare(svg: &str, units: &BTreeMap<String, BTreeMap<String, String>>) -> Vec<String> {
    let boxes = boxes(svg);
    let mut findings = Vec::new();
    for (unit, imports) in units {
        let Some((x, y)) = boxes.get(unit.as_str()) else {
            findings.push(format!("{PICTURE}: {unit} has no box"));
            continue;
        };
        for import in imports.keys() {
            let Some((to_x, to_y)) = boxes.get(import.as_str()) else {
                continue;
            };
            let below = *to_y > y + ROW;
            let right = (to_y - y).abs() < ROW && to_x > x;
            if !below && !right {
                findings.push(format!(
                    "{PICTURE}: {unit} imports {import}, which is neither below nor right of it"
                ));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const SVG: &str = r#"
<text x="10" y="20" text-anchor="middle" class="m">high</text>
<text x="10" y="70" text-anchor="middle" class="m">left</text>
<text x="90" y="75" text-anchor="middle" class="m">right</text>
<text x="10" y="90" text-anchor="middle" class="s">not a box</text>
"#;

    fn units(list: &[(&str, &str)]) -> BTreeMap<String, BTreeMap<String, String>> {
        let mut units: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for (unit, import) in list {
            let imports = units.entry((*unit).to_owned()).or_default();
            imports.insert((*import).to_owned(), String::new());
        }
        units
    }

    #[test]
    fn imports_that_point_down_or_right_are_accepted() {
        let units = units(&[("high", "left"), ("high", "right"), ("left", "right")]);
        assert_eq!(compare(SVG, &units), Vec::<String>::new());
    }

    #[test]
    fn imports_that_point_up_or_left_and_missing_boxes_are_found() {
        let units = units(&[("left", "high"), ("new", "high"), ("right", "left")]);
        assert_eq!(
            compare(SVG, &units),
            [
                "docs/images/house.svg: left imports high, which is neither below nor right of it",
                "docs/images/house.svg: new has no box",
                "docs/images/house.svg: right imports left, which is neither below nor right of it"
            ]
        );
    }
}
