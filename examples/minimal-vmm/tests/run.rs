//! Runs the monitor, under KVM first if this host has it, and from the start in the interpreter.

use std::process::Command;

/// The lines on standard output; the program must succeed.
fn output(arguments: &[&str]) -> Vec<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_minimal-vmm"))
        .args(arguments)
        .output()
        .expect("the program starts");
    let text = String::from_utf8(output.stdout).expect("its output is UTF-8");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    text.lines().map(str::to_owned).collect()
}

#[test]
fn guest_counts_and_records_its_branches() {
    let lines = output(&["interp"]);
    assert!(lines[0].starts_with("interpreter: the guest starts here"));
    assert_eq!(lines[1], "interpreter: the guest halted");
    // CALL, JBE and RET of four activations; JBE is taken in the last one only.
    assert_eq!(lines[2], "PMU: 40 instructions, 12 branches");
    let stored = lines.iter().filter(|line| line.starts_with("BTS")).count();
    assert_eq!(stored, 9);
    // The last return leads behind the first call.
    let lbr = lines.iter().rfind(|line| line.starts_with("LBR")).unwrap();
    assert_eq!(lbr, "LBR: guest+0xac -> guest+0x58");
    assert_eq!(lines.last().unwrap(), "BTS: guest+0xac -> guest+0x58");
}

#[test]
fn records_are_the_same_wherever_the_guest_starts() {
    let (first, interp) = (output(&[]), output(&["interp"]));
    assert_eq!(first[1..], interp[1..]);
}
