//! Exported traces, read by the tools that they are for. A tool that is missing is named and skipped.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A guest in C that is also a program of this host, for gcov.
const SOURCE: &str = r#"
static int leaf(int n) {
    if (n & 1)
        return n * 3;
    return n / 2;
}
static int never(void) {
    return 7;
}
int work(int rounds) {
    int sum = 0;
    for (int i = 0; i < rounds; i++) {
        sum += leaf(i);
        if (sum > 1000)
            sum -= never();
    }
    while (sum > 20)
        sum = leaf(sum) - 1;
    return sum;
}
#ifdef HOSTED
int main(void) {
    return work(9) & 0;
}
#else
void _start(void) {
    work(9);
    __asm__ volatile("outb %%al, $0xf4; hlt" : : "a"(5));
}
#endif
"#;

fn output(folder: &Path, program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null());
    command
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"))
}

/// Standard output of a program that must succeed.
fn run(folder: &Path, program: &str, arguments: &[&str]) -> String {
    let output = output(folder, program, arguments);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether a tool can be used; prints why `test` is skipped if not.
fn has(tool: &str, test: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: {test}: there is no {tool}");
    }
    found
}

const HINDSIGHT: &str = env!("CARGO_BIN_EXE_hindsight");

/// A folder with `guest.c`, the image `guest` and its trace `t`; `None` without a compiler.
fn traced(test: &str) -> Option<tempfile::TempDir> {
    if !has("cc", test) {
        return None;
    }
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("guest.c"), SOURCE).expect("the source can be written");
    let flags = "-g -O0 -ffreestanding -nostdlib -static -no-pie -fno-stack-protector -fcf-protection=none \
                 -fno-asynchronous-unwind-tables -Wl,-Ttext=0x100000 -Wl,--build-id=none";
    let mut arguments: Vec<_> = flags.split_whitespace().collect();
    arguments.extend(["guest.c", "-o", "guest"]);
    run(folder.path(), "cc", &arguments);
    let output = output(
        folder.path(),
        HINDSIGHT,
        &["trace", "guest", "-o", "t", "--deterministic"],
    );
    assert_eq!(output.status.code(), Some(11), "{output:?}");
    Some(folder)
}

fn export(folder: &Path, format: &str, file: &str) {
    run(folder, HINDSIGHT, &["export", format, "t", "-o", file]);
}

/// Source and target of all branches, from the text.
fn branches(folder: &Path) -> Vec<(u64, u64)> {
    let text = run(folder, HINDSIGHT, &["export", "text", "t"]);
    let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let lines = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(3);
        Some((hex(words.next()?)?, hex(words.next()?)?))
    });
    lines.collect()
}

/// Instructions up to the last branch.
fn instructions(folder: &Path) -> u64 {
    let text = run(folder, HINDSIGHT, &["export", "text", "t"]);
    let branches = text.lines().filter(|line| line.contains(" cpl "));
    let at = branches.filter_map(|line| line.split_whitespace().nth(1)?.parse().ok());
    at.max().expect("there are branches")
}

#[test]
fn perf_script_lists_the_branches_of_the_trace() {
    let test = "perf_script_lists_the_branches_of_the_trace";
    let Some(folder) = traced(test).filter(|_| has("perf", test)) else {
        return;
    };
    let folder = folder.path();
    run(
        folder,
        HINDSIGHT,
        &["export", "perf", "t", "-o", "perf.data", "--every", "1"],
    );
    let script = run(
        folder,
        "perf",
        &["script", "-i", "perf.data", "-F", "brstack"],
    );
    // With a sample at each branch, the first entry of each sample is that branch.
    let listed = script.lines().filter_map(|line| {
        let mut parts = line.split_whitespace().next()?.split('/');
        let mut hex = || u64::from_str_radix(parts.next()?.strip_prefix("0x")?, 16).ok();
        Some((hex()?, hex()?))
    });
    assert_eq!(listed.collect::<Vec<_>>(), branches(folder));
    let report = run(
        folder,
        "perf",
        &[
            "report",
            "-i",
            "perf.data",
            "--stdio",
            "--sort",
            "symbol_to",
        ],
    );
    assert!(report.contains("leaf"), "{report}");
}

/// The counts of lines that gcov finds for the same code.
fn gcov(folder: &Path) -> BTreeMap<u32, u64> {
    let hosted = ["-O0", "--coverage", "-DHOSTED", "guest.c", "-o", "hosted"];
    run(folder, "cc", &hosted);
    run(folder, "./hosted", &[]);
    run(folder, "gcov", &["hosted-guest.c"]);
    let text = fs::read_to_string(folder.join("guest.c.gcov")).expect("gcov wrote it");
    let lines = text.lines().filter_map(|line| {
        let mut parts = line.split(':').map(str::trim);
        let (count, line) = (parts.next()?, parts.next()?.parse().ok()?);
        let count = count.trim_end_matches('*');
        let count = if count == "#####" {
            0
        } else {
            count.parse().ok()?
        };
        Some((line, count))
    });
    lines.collect()
}

#[test]
fn line_coverage_is_that_of_gcov() {
    let test = "line_coverage_is_that_of_gcov";
    let Some(folder) = traced(test).filter(|_| has("gcov", test)) else {
        return;
    };
    let folder = folder.path();
    export(folder, "lcov", "t.info");
    let info = fs::read_to_string(folder.join("t.info")).expect("it was written");
    let own = info.lines().filter_map(|line| {
        let (line, count) = line.strip_prefix("DA:")?.split_once(',')?;
        Some((line.parse().ok()?, count.parse().ok()?))
    });
    let own: BTreeMap<u32, u64> = own.collect();
    let common = gcov(folder).into_iter().filter(|&(line, _)| line < 21);
    for (line, count) in common {
        assert_eq!(
            own.get(&line),
            Some(&count),
            "line {line} of {SOURCE}\n{info}"
        );
    }
    assert!(
        info.contains("FNDA:9,leaf") || info.contains(",leaf"),
        "{info}"
    );
    assert!(info.contains("FNDA:0,never"), "{info}");
    assert!(info.contains("BRDA:3,0,"), "{info}");
    if has("genhtml", test) {
        run(
            folder,
            "genhtml",
            &["t.info", "-o", "html", "--branch-coverage"],
        );
    }
}

#[test]
fn callgrind_annotate_sums_all_instructions() {
    let test = "callgrind_annotate_sums_all_instructions";
    let Some(folder) = traced(test).filter(|_| has("callgrind_annotate", test)) else {
        return;
    };
    let folder = folder.path();
    export(folder, "callgrind", "t.callgrind");
    let text = run(
        folder,
        "callgrind_annotate",
        &["--inclusive=yes", "--threshold=100", "t.callgrind"],
    );
    let totals = text.lines().find(|line| line.contains("PROGRAM TOTALS"));
    let digits: String = totals
        .unwrap_or_default()
        .split('(')
        .next()
        .unwrap_or_default()
        .chars()
        .filter(char::is_ascii_digit)
        .collect();
    assert_eq!(digits.parse(), Ok(instructions(folder)), "{text}");
    assert!(text.contains("guest.c:work"), "{text}");
}

#[test]
fn stacks_of_the_flame_graph_have_all_instructions() {
    let Some(folder) = traced("stacks_of_the_flame_graph_have_all_instructions") else {
        return;
    };
    let folder = folder.path();
    export(folder, "folded", "t.folded");
    let folded = fs::read_to_string(folder.join("t.folded")).expect("it was written");
    let counts = folded
        .lines()
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
    assert_eq!(counts.sum::<u64>(), instructions(folder), "{folded}");
    assert!(folded.contains("_start;work;leaf "), "{folded}");
    export(folder, "flamegraph", "t.svg");
    let svg = fs::read_to_string(folder.join("t.svg")).expect("it was written");
    assert!(
        svg.starts_with("<svg") && svg.contains(">work</text>"),
        "{svg}"
    );
}

#[test]
fn drcov_blocks_are_the_code_that_was_executed() {
    let Some(folder) = traced("drcov_blocks_are_the_code_that_was_executed") else {
        return;
    };
    let folder = folder.path();
    export(folder, "drcov", "t.drcov");
    let bytes = fs::read(folder.join("t.drcov")).expect("it was written");
    let text = String::from_utf8_lossy(&bytes);
    assert!(
        text.starts_with("DRCOV VERSION: 2\nDRCOV FLAVOR: drcov\n"),
        "{text}"
    );
    let table = text
        .lines()
        .find_map(|line| line.strip_prefix("BB Table: ")?.strip_suffix(" bbs"));
    let count: usize = table.and_then(|count| count.parse().ok()).expect("a table");
    let begin = bytes
        .windows(5)
        .position(|bytes| bytes == b" bbs\n")
        .expect("its end")
        + 5;
    assert_eq!(bytes.len() - begin, count * 8);
    assert!(count > 5);
}

#[test]
fn firefox_profile_has_a_thread_with_weighted_samples() {
    let Some(folder) = traced("firefox_profile_has_a_thread_with_weighted_samples") else {
        return;
    };
    let folder = folder.path();
    export(folder, "firefox", "t.json");
    let text = fs::read_to_string(folder.join("t.json")).expect("it was written");
    let profile: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let thread = &profile["threads"][0];
    assert_eq!(thread["name"], "vCPU 0");
    assert!(thread["samples"]["length"].as_u64() > Some(1), "{thread}");
    assert!(text.contains("\"work\"") && text.contains("\"leaf\""));
}

#[test]
fn format_that_needs_all_branches_refuses_other_traces() {
    let Some(folder) = traced("format_that_needs_all_branches_refuses_other_traces") else {
        return;
    };
    let folder = folder.path();
    let options = [
        "trace",
        "guest",
        "-o",
        "t",
        "--deterministic",
        "--events",
        "calls",
    ];
    output(folder, HINDSIGHT, &options);
    let refused = output(folder, HINDSIGHT, &["export", "lcov", "t"]);
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{errors}");
    assert!(errors.contains("needs all branches"), "{errors}");
    fs::write(folder.join("guest"), "another").expect("the image can be changed");
    let refused = output(folder, HINDSIGHT, &["export", "text", "t"]);
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        errors.contains("is not the image that was traced"),
        "{errors}"
    );
}

#[test]
fn report_is_one_page_with_its_data() {
    let Some(folder) = traced("report_is_one_page_with_its_data") else {
        return;
    };
    let folder = folder.path();
    run(folder, HINDSIGHT, &["report", "t", "-o", "report.html"]);
    let page = fs::read_to_string(folder.join("report.html")).expect("it was written");
    let data = page
        .lines()
        .find_map(|line| line.strip_prefix("const data = ")?.strip_suffix(';'));
    let data: serde_json::Value = serde_json::from_str(data.expect("the data")).expect("JSON");
    assert_eq!(data["instructions"], instructions(folder));
    assert_eq!(data["branches"], branches(folder).len());
    let names = data["functions"].as_array().expect("rows").iter();
    assert!(
        names.map(|row| &row["name"]).any(|name| name == "leaf"),
        "{data}"
    );
    assert_eq!(data["files"][0]["lines"], 22, "{data}");
    for elsewhere in ["http:", "https:", "src="] {
        let places = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!places.contains(elsewhere), "{elsewhere}");
    }
}
