//! Traces that a debugger starts and stops.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use crate::rig::{Guest, Run, hindsight, in_order};

/// A folder for traces, and the path of a trace in it.
fn trace_file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("t");
    (folder, trace)
}

/// Starts the sample guest, which waits for gdb and may be traced to `trace`.
fn sample(trace: &Path, more: &[&str]) -> Run {
    let trace = ["--trace-out", trace.to_str().unwrap()];
    Run::waiting(Guest::Sample, &[&trace, more].concat())
}

/// The records of a trace as text, a line each.
pub fn records(trace: &Path) -> Vec<String> {
    let output = hindsight().args(["export", "text"]).arg(trace).output();
    let output = output.unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// The sources and the targets of the branches of a trace.
fn edges(trace: &Path) -> Vec<(String, String)> {
    let records = records(trace);
    let fields = records
        .iter()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    fields
        .map(|fields| (fields[3].to_owned(), fields[4].to_owned()))
        .collect()
}

/// The address in a line that gdb's `x/i` prints.
fn address(line: &str) -> Option<String> {
    let words = line.trim_start_matches("=>").split_whitespace();
    let first = words.take(1).find(|word| word.starts_with("0x"))?;
    Some(first.trim_end_matches(':').to_owned())
}

#[test]
fn trace_between_breakpoints_has_exactly_the_calls_of_the_program() {
    let (folder, trace) = trace_file();
    let report = folder.path().join("report.html");
    let program = hindsight().get_program().to_str().unwrap().to_owned();
    let run = sample(&trace, &["--sandbox=strict"]);
    let text = run.gdb(&format!(
        "break work
        break print
        continue
        monitor trace status
        monitor trace start calls
        monitor trace status
        continue
        monitor trace stop
        monitor trace status
        shell {program} report {0} -o {1} && echo reported
        continue
        ",
        trace.display(),
        report.display()
    ));
    let path = trace.display();
    in_order(
        &text,
        &[
            &format!("no trace runs; `monitor trace start` replaces {path}"),
            &format!("calls are traced to {path}"),
            &format!("calls are traced to {path}"),
            "Breakpoint 2, print",
            &format!("trace {path}: 60 records, 60 branches, "),
            "no trace runs",
            "reported",
            "exited with code 03",
        ],
    );
    let kinds = records(&trace);
    let kinds = kinds.iter().map(|line| {
        let (_, names) = line.split_once(" cpl 0 ").unwrap();
        let (from, to) = names.split_once(" -> ").unwrap();
        let function = |name: &str| name.split('+').next().unwrap().to_owned();
        let class = line.split(' ').nth(2).unwrap().to_owned();
        (class, function(from), function(to))
    });
    // The compiler puts `work` and `print` into `main`.
    let (main, put, take) = ("main", "queue_put", "queue_take");
    let mut expected = Vec::new();
    for job in 1..=20 {
        expected.extend([("call", main, put), ("ret", put, main)]);
        if job % 2 == 0 {
            expected.extend([("call", main, take), ("ret", take, main)]);
        }
    }
    let expected = expected.into_iter();
    let expected = expected.map(|(class, from, to)| (class.into(), from.into(), to.into()));
    let found: Vec<(String, String, String)> = kinds.collect();
    assert_eq!(found, expected.collect::<Vec<_>>());
}

#[test]
fn trace_has_the_branches_that_single_steps_show() {
    let (folder, trace) = trace_file();
    let script = folder.path().join("steps");
    fs::write(
        &script,
        "set $n = 0\nwhile $n < 400\nx/2i $pc\nstepi\nset $n = $n + 1\nend\nx/2i $pc\n",
    )
    .unwrap();
    let run = sample(&trace, &[]);
    let text = run.gdb(&format!(
        "break work
        continue
        delete
        monitor trace start branches
        source {}
        monitor trace stop
        kill
        ",
        script.display()
    ));
    in_order(&text, &["branches are traced", "=> ", " records, "]);
    let lines: Vec<_> = text.lines().collect();
    let at = lines.iter().position(|line| line.starts_with("=>"));
    // Each instruction, and the one that follows it in memory.
    let steps: Vec<_> = lines[at.unwrap()..]
        .windows(2)
        .filter(|lines| lines[0].starts_with("=>"))
        .filter_map(|lines| Some((address(lines[0])?, address(lines[1])?)))
        .collect();
    assert_eq!(steps.len(), 401, "{text}");
    let mut stepped = Vec::new();
    for pair in steps.windows(2) {
        let ((from, next), (to, _)) = (&pair[0], &pair[1]);
        if next != to {
            stepped.push((from.clone(), to.clone()));
        }
    }
    let traced = edges(&trace);
    assert!(stepped.len() > 40, "{text}");
    assert_eq!(traced, stepped);

    let (_folder, whole) = trace_file();
    let run = sample(&whole, &[]);
    run.gdb(
        "break work
        continue
        monitor trace start branches
        break print
        continue
        monitor trace stop
        kill
        ",
    );
    let begun = edges(&whole);
    assert!(begun.len() > traced.len());
    assert_eq!(begun[..traced.len()], traced, "without steps");
}

#[test]
fn traced_run_goes_back_only_after_the_trace() {
    let (folder, trace) = trace_file();
    let first = folder.path().join("first");
    let run = sample(&trace, &["--deterministic", "--sandbox=strict"]);
    let text = run.gdb(&format!(
        "break work
        break print
        continue
        monitor trace start
        continue
        reverse-stepi
        reverse-continue
        monitor goto 5
        info symbol $pc
        monitor trace stop
        shell cp {0} {1}
        reverse-continue
        monitor trace start
        continue
        monitor trace stop
        kill
        ",
        trace.display(),
        first.display()
    ));
    let refused = "the machine is traced, and a trace has no way back: `monitor trace stop` first";
    in_order(
        &text,
        &[
            "work (count=20)",
            "Breakpoint 2, print",
            refused,
            refused,
            refused,
            "main + ",
            " records, ",
            "work (count=20)",
            "are traced to",
            "Breakpoint 2, print",
            " records, ",
        ],
    );
    let again = fs::read(&trace).unwrap();
    assert!(!again.is_empty());
    assert_eq!(
        fs::read(first).unwrap(),
        again,
        "the same part of the same run"
    );
}

#[test]
fn every_vcpu_is_traced_and_a_second_trace_replaces_the_first() {
    let (folder, trace) = trace_file();
    let first = folder.path().join("first");
    let options = ["--cpus", "2", "--trace-out", trace.to_str().unwrap()];
    let run = Run::waiting(Guest::Long("two"), &options);
    let text = run.gdb(&format!(
        "monitor trace start
        monitor trace start
        advance two.S:10
        advance two.S:11
        advance two.S:12
        advance two.S:14
        advance two.S:15
        advance two.S:16
        advance two.S:17
        break spin0
        continue
        monitor trace stop
        shell cp {0} {1}
        monitor trace start io
        delete
        stepi 10
        monitor trace stop
        kill
        ",
        trace.display(),
        first.display()
    ));
    in_order(
        &text,
        &[
            "branches,exceptions,interrupts,msr,io,mode are traced to",
            "`monitor trace stop` ends that",
            " records, ",
            "io are traced to",
            "0 records, 0 branches",
        ],
    );
    let lines = records(&first);
    let first_of = |cpu: &str| lines.iter().filter(|line| line.starts_with(cpu)).collect();
    let (boot, second): (Vec<&String>, Vec<&String>) = (first_of("0 "), first_of("1 "));
    assert!(boot.iter().any(|line| line.contains("wrmsr 0x1b")));
    // It waits from the start, and again after the INIT, however often the debugger pauses it.
    let waits = second.iter().filter(|line| line.ends_with(" hlt")).count();
    assert!(waits <= 2, "{waits}");
    let jump = "jmp 0x800a 0x8005 cpl 0";
    assert!(second.len() > waits);
    assert!(second[waits..].iter().all(|line| line.contains(jump)));
    assert!(records(&trace).is_empty());
}

#[test]
fn trace_that_is_not_stopped_ends_with_the_run() {
    let (_folder, trace) = trace_file();
    let run = sample(&trace, &["--sandbox=strict"]);
    let text = run.gdb(
        "break print
        continue
        monitor trace start io
        delete
        detach
        ",
    );
    in_order(&text, &["io are traced to", "detached"]);
    let summary = format!("hindsight: trace {}: ", trace.display());
    run.wait_for("the end of the trace", || run.stderr().contains(&summary));
    let lines = records(&trace);
    // "the guard is broken", and the exit.
    assert_eq!(lines.len(), 21, "{lines:?}");
    assert!(lines[0].contains("out 0x3f8 1 = 0x74"), "{lines:?}");
    assert!(lines[20].contains("out 0xf4 1 = 0x1"), "{lines:?}");
    assert_eq!(run.finish().0, Some(3));
}

#[test]
fn trace_command_says_what_is_wrong() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb("monitor trace start\nkill\n");
    in_order(
        &text,
        &["trace: the run has no file for traces: --trace-out FILE"],
    );
    let (_folder, trace) = trace_file();
    let run = sample(&trace, &[]);
    let text = run.gdb(
        "monitor trace stop
        monitor trace
        monitor trace start branches calls
        monitor trace start pages
        monitor trace start msr,processes
        monitor trace status
        kill
        ",
    );
    in_order(
        &text,
        &[
            "trace: no trace runs; `monitor trace start` begins one",
            "usage: monitor trace start [EVENTS]|stop|status",
            "usage: monitor trace start [EVENTS]|stop|status",
            "trace: pages: the kinds are branches, calls,",
            "trace: processes are traced by `hindsight trace` only",
            "no trace runs",
        ],
    );
    let run = sample(Path::new("/dev/full"), &["--sandbox=strict"]);
    let text = run.gdb("monitor trace start\nmonitor trace status\ncontinue\n");
    in_order(
        &text,
        &[
            "trace: --trace-out: ",
            "No space left on device",
            "no trace runs",
            "exited with code 03",
        ],
    );
}

#[test]
fn guest_continues_when_its_trace_cannot_be_written() {
    let (_folder, pipe) = trace_file();
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let reader = {
        let pipe = pipe.clone();
        thread::spawn(move || File::open(pipe).unwrap())
    };
    let options = ["--trace-out", pipe.to_str().unwrap(), "--trace", "gdb"];
    let run = Run::waiting(Guest::Long("spin"), &options);
    let reader = reader.join().unwrap();
    let gdb = run.spawn_gdb(
        "monitor trace start
        continue
        monitor trace status
        monitor trace stop
        monitor trace status
        print $before = *(long *)&count
        stepi 6
        print *(long *)&count > $before
        kill
        ",
    );
    run.wait_for("the guest to run", || run.stderr().contains("<- vCont;c"));
    drop(reader);
    let ends = "the trace ends, the guest continues: ";
    run.wait_for("the end of the trace", || run.stderr().contains(ends));
    gdb.interrupt();
    let text = gdb.wait();
    in_order(
        &text,
        &[
            "are traced to",
            "SIGINT",
            "could not be written: `monitor trace stop` says why",
            "is not complete: ",
            "Broken pipe",
            "no trace runs",
            "= 1",
        ],
    );
    assert_eq!(run.stderr().matches(ends).count(), 1);
    assert_eq!(run.finish().0, Some(0));
}
