//! `hindsight test` from its arguments to its report, with a shell script instead of the VMM.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use hindsight_vmm::cli::test::{HarnessHost, TestArgs, run_with};
use hindsight_vmm::harness::needs::Capabilities;

#[derive(Parser)]
struct TestCommand {
    #[command(flatten)]
    test: TestArgs,
}

/// A host that meets every need but one.
struct NoSmi;

impl Capabilities for NoSmi {
    fn unmet(&self, need: &str) -> Option<String> {
        (need == "smi").then(|| "ENOTTY".to_owned())
    }
}

/// Writes an ELF64 file that has only a case section.
fn write_image(dir: &Path, name: &str, records: &str) -> PathBuf {
    let names = b"\0.shstrtab\0.hindsight.cases\0";
    let (names_at, cases_at) = (64, 64 + names.len());
    let table = cases_at + records.len();
    let mut elf = vec![0u8; 64];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    elf[0x28..0x30].copy_from_slice(&table.to_le_bytes());
    (elf[0x3a], elf[0x3c], elf[0x3e]) = (64, 3, 1);
    elf.extend_from_slice(names);
    elf.extend_from_slice(records.as_bytes());
    let sections = [
        (0u8, 0, 0),
        (1, names_at, names.len()),
        (11, cases_at, records.len()),
    ];
    for (name, offset, size) in sections {
        let mut section = [0u8; 64];
        (section[0], section[4]) = (name, 1);
        section[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
        section[0x20..0x28].copy_from_slice(&size.to_le_bytes());
        elf.extend_from_slice(&section);
    }
    let path = dir.join(name);
    fs::write(&path, elf).expect("a temporary folder can be written");
    path
}

/// A script that acts as the VMM and its guest. The name of the case selects what it does.
const VMM: &str = r#"
case=${1%% *}; case=${case#case=}; cpl=${1##*cpl=}
echo "run $case cpl=$cpl"
case $case in
    good) sleep 0.1; echo "ok $case cpl=$cpl"; exit 1 ;;
    bad) echo "fail $case cpl=$cpl src/bad.rs:3 RIP expected=0x1 found=0x2"; exit 3 ;;
    absent) echo "skip $case cpl=$cpl no such unit"; exit 1 ;;
    silent) exit 1 ;;
    hang) exec sleep 1000 ;;
    flood) exec yes ;;
    crash) echo "panicked at x" >&2; kill -ABRT $$ ;;
    binary) printf 'no newline \033\377'; exit 3 ;;
esac
"#;

struct HarnessRun {
    status: u8,
    lines: String,
}

fn run_in(dir: &Path, problem: Option<&str>, args: &[&str]) -> anyhow::Result<HarnessRun> {
    let vmm = dir.join("vmm.sh");
    fs::write(&vmm, VMM)?;
    let runner = format!("/bin/sh {} {{cmdline}} {{image}}", vmm.display());
    let mut words = vec!["test", "--runner", &runner];
    words.extend(args);
    let args = TestCommand::try_parse_from(words)?.test;
    let mut out = Vec::new();
    let host = HarnessHost {
        capabilities: &NoSmi,
        problem: problem.map(str::to_owned),
        interrupt: &AtomicBool::new(false),
        columns: None,
        out: &mut out,
    };
    let status = run_with(&args, host)?;
    Ok(HarnessRun {
        status,
        lines: String::from_utf8(out)?,
    })
}

/// Runs one image with the given case records.
fn run_records(records: &str, args: &[&str]) -> anyhow::Result<HarnessRun> {
    let dir = tempfile::tempdir()?;
    let image = write_image(dir.path(), "img", records);
    let mut all = vec![image.to_str().expect("temporary names are UTF-8")];
    all.extend(args);
    run_in(dir.path(), None, &all)
}

/// Removes the times, which differ from run to run.
fn without_times(lines: &str) -> String {
    let mut out = String::new();
    for line in lines.lines() {
        match line.split_once(" (") {
            Some((start, rest)) => {
                let after = rest.split_once(" ms)").map_or(rest, |(_, after)| after);
                out.push_str(start);
                out.push_str(after);
            }
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

#[test]
fn results_are_reported_in_the_order_of_the_cases() {
    let records = "case good cpl=0,3\ncase bad cpl=3\ncase absent\ncase smi needs=smi\n";
    let run = run_records(records, &["--jobs", "4"]).unwrap();
    let expected = "\
pass img/good cpl=0
pass img/good cpl=3
fail img/bad cpl=3: 1 assertion failed
    src/bad.rs:3: RIP
        expected 0x1
        found    0x2
skip img/absent cpl=0: guest: no such unit
skip img/smi cpl=0: this KVM: smi: ENOTTY
2 passed, 1 failed, 2 skipped
";
    assert_eq!(without_times(&run.lines), expected);
    assert_eq!(run.status, 1);
}

#[test]
fn run_without_failures_has_status_zero() {
    let run = run_records("case good\ncase absent\n", &[]).unwrap();
    assert_eq!(run.status, 0);
    assert!(run.lines.ends_with("\n1 passed, 0 failed, 1 skipped\n"));
}

#[test]
fn child_that_hangs_floods_or_crashes_costs_only_its_line() {
    let start = Instant::now();
    let records = "case hang\ncase flood\ncase crash\ncase binary\ncase silent\ncase good\n";
    let run = run_records(records, &["--timeout", "0.2", "--jobs", "6"]).unwrap();
    assert!(start.elapsed() < Duration::from_secs(30));
    let lines = without_times(&run.lines);
    for part in [
        "fail img/hang cpl=0: timed out after 0.2 s; the VMM did not end by itself\n",
        "fail img/flood cpl=0: timed out after 0.2 s",
        "fail img/crash cpl=0: signal 6 terminated the VMM\n",
        "    the VMM's last lines:\n    | panicked at x\n",
        "    | no newline \\x1b\\xff\n",
        "fail img/silent cpl=0: the guest wrote code 0 but did not report the case\n",
        "pass img/good cpl=0\n",
        "\n1 passed, 5 failed, 0 skipped\n",
    ] {
        assert!(lines.contains(part), "{part:?} is not in {lines}");
    }
}

#[test]
fn tap_and_junit_reports_are_written_in_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let junit = dir.path().join("out.xml");
    let args = ["--tap", "--junit", junit.to_str().unwrap()];
    let run = run_records("case good\ncase bad rules=R-1\n", &args).unwrap();
    assert!(
        run.lines
            .starts_with("TAP version 14\n1..2\nok 1 - img/good cpl=0\n")
    );
    assert!(run.lines.ends_with("\n# 1 passed, 1 failed, 0 skipped\n"));
    let xml = fs::read_to_string(junit).unwrap();
    assert!(
        xml.contains(r#"tests="2" skipped="0" failures="1""#),
        "{xml}"
    );
}

#[test]
fn list_prints_the_cases_and_runs_none() {
    let run = run_records(
        "case hang rules=R-1 about=waits\ncase x needs=smi\n",
        &["--list"],
    );
    let run = run.unwrap();
    let expected = "img/hang cpl=0 vcpus=1 rules=R-1 about=waits\n\
        img/x cpl=0 vcpus=1 [skip: this KVM: smi: ENOTTY]\n";
    assert_eq!((run.status, run.lines.as_str()), (0, expected));
}

#[test]
fn host_without_kvm_skips_all_cases_with_status_two() {
    let dir = tempfile::tempdir().unwrap();
    let image = write_image(dir.path(), "img", "case good\ncase bad\n");
    let run = run_in(
        dir.path(),
        Some("/dev/kvm is missing"),
        &[image.to_str().unwrap()],
    )
    .unwrap();
    let expected = "skip img/good cpl=0: /dev/kvm is missing\n\
        skip img/bad cpl=0: /dev/kvm is missing\n0 passed, 0 failed, 2 skipped\n";
    assert_eq!((run.status, run.lines.as_str()), (2, expected));
}

#[test]
fn rules_filter_shard_and_repeat_can_be_combined() {
    let records = "case good cpl=0,3 rules=R-1\ncase bad rules=R-1\ncase hang rules=R-2\n";
    let args = [
        "--rules", "R-1", "--filter", "good", "--shard", "2/2", "--repeat", "2",
    ];
    let run = run_records(records, &args).unwrap();
    let expected = "pass img/good cpl=3 run 1/2\npass img/good cpl=3 run 2/2\n\
        2 passed, 0 failed, 0 skipped\n";
    assert_eq!(without_times(&run.lines), expected);
}

#[test]
fn bad_arguments_and_images_are_refused_with_a_reason() {
    let rows: [(&str, &[&str], &str); 8] = [
        ("case a", &["--filter", "zz"], "nothing matches"),
        ("case a needs=magic", &[], "unknown need `magic`"),
        ("case a vcpus=9999", &[], "bad value of `vcpus`"),
        ("case a", &["--shard", "3/2"], "a shard is i/n"),
        ("case a", &["--timeout=-1"], "a number of seconds"),
        ("case a", &["--timeout", "1e99"], "a number of seconds"),
        ("case a", &["--jobs", "0"], "--jobs"),
        (
            "case a",
            &["/no/such/image"],
            "cannot read image /no/such/image",
        ),
    ];
    for (records, args, part) in rows {
        let error = run_records(records, args).err().unwrap();
        assert!(
            format!("{error:#}").contains(part),
            "row {args:?}: {error:#}"
        );
    }
}

#[test]
fn missing_runner_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let image = write_image(dir.path(), "img", "case a\ncase b\n");
    let words = [
        "test",
        "--runner",
        "/no/such/vmm {image}",
        image.to_str().unwrap(),
    ];
    let args = TestCommand::try_parse_from(words).unwrap().test;
    let host = HarnessHost {
        capabilities: &NoSmi,
        problem: None,
        interrupt: &AtomicBool::new(false),
        columns: None,
        out: &mut Vec::new(),
    };
    let error = run_with(&args, host).unwrap_err();
    assert!(format!("{error:#}").contains("cannot run /no/such/vmm"));
}

#[test]
fn interrupt_kills_the_children_and_reports_cases_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let image = write_image(dir.path(), "img", "case good\ncase hang\ncase good2\n");
    let vmm = dir.path().join("vmm.sh");
    fs::write(&vmm, VMM).unwrap();
    let runner = format!("/bin/sh {} {{cmdline}} {{image}}", vmm.display());
    let words = [
        "test",
        "--jobs",
        "1",
        "--runner",
        &runner,
        image.to_str().unwrap(),
    ];
    let args = TestCommand::try_parse_from(words).unwrap().test;
    let interrupt = AtomicBool::new(false);
    let mut out = Vec::new();
    let status = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(1));
            interrupt.store(true, Ordering::Relaxed);
        });
        let host = HarnessHost {
            capabilities: &NoSmi,
            problem: None,
            interrupt: &interrupt,
            columns: None,
            out: &mut out,
        };
        run_with(&args, host).unwrap()
    });
    let lines = without_times(&String::from_utf8(out).unwrap());
    assert_eq!(status, 130);
    assert_eq!(
        lines,
        "pass img/good cpl=0\ninterrupted: 2 cases not run\n1 passed, 0 failed, 0 skipped\n"
    );
}
