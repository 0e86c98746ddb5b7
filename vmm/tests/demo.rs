//! Runs `hindsight demo` as a user does.

use std::process::{Command, Output};

fn demo(setup: impl FnOnce(&mut Command)) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hindsight"));
    command.arg("demo").env_remove("COLUMNS");
    setup(&mut command);
    command.output().expect("the program runs")
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// Whether KVM cannot be used here. Prints why the tests that need it are skipped.
fn skipped() -> bool {
    let problem = hindsight_vmm::harness::needs::kvm_problem();
    if let Some(problem) = &problem {
        println!("skipped: {problem}");
    }
    problem.is_some()
}

/// The first line that starts with `start`, with runs of spaces replaced by one.
fn line(text: &str, start: &str) -> String {
    let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut lines = text.lines().map(squeezed);
    lines
        .find(|line| line.starts_with(start))
        .unwrap_or_else(|| panic!("no line {start:?} in:\n{text}"))
}

#[test]
fn demo_prints_results_exceptions_msrs_and_timer_interrupts() {
    if skipped() {
        return;
    }
    let output = demo(|command| {
        command.arg("--plain");
    });
    let text = text(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(output.stderr.is_empty(), "{output:?}");
    for fact in [
        "95 primes below 500",
        "35655 best Collatz start",
        "30000 numbers sorted",
    ] {
        assert!(text.contains(fact), "no {fact:?} in:\n{text}");
    }
    for (start, rest) in [
        ("ring 0 #UD undefined_instruction", "ud2 invalid opcode"),
        ("ring 0 #DE divide_by_zero", "div %ecx divide error"),
        (
            "ring 0 #PF read_absent_page",
            "read at 0x140000123: no page",
        ),
        ("ring 0 #GP read_non_canonical", "non-canonical address"),
        (
            "ring 3 #PF write_absent_page",
            "write at 0x140000456: no page",
        ),
        ("ring 3 #GP read_msr", "rdmsr privileged, at ring 3"),
        ("WRMSR 3b TSC_ADJUST", "ok TSC model; TSC moves too"),
        ("WRMSR 1b APIC_BASE", "#GP local APIC: reserved bit"),
        ("WRMSR c0000084 FMASK", "#GP bit 32 is reserved"),
        // The outcome depends on whether the processor has an LBR stack.
        ("RDMSR 680 ", ""),
    ] {
        let line = line(&text, start);
        assert!(line.ends_with(rest), "{line:?} should end with {rest:?}");
    }
    let ticks = line(&text, "timer interrupts");
    let count: usize = ticks.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(count >= 3, "{ticks}");
}

#[test]
fn output_to_a_pipe_is_plain_and_fits_the_columns_variable() {
    if skipped() {
        return;
    }
    for columns in ["60", "100"] {
        let output = demo(|command| {
            command.env("COLUMNS", columns);
        });
        let width: usize = columns.parse().unwrap();
        for line in text(&output).lines() {
            assert!(
                line.is_ascii() && line.len() <= width,
                "{columns}: {line:?}"
            );
        }
    }
}

#[test]
fn demo_without_kvm_prints_one_line_with_the_reason() {
    if !skipped() {
        return;
    }
    let output = demo(|_| {});
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.starts_with("hindsight: /dev/kvm ") && stderr.lines().count() == 1,
        "{stderr}"
    );
}
