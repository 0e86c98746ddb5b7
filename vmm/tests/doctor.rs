//! Runs `hindsight doctor` as a user does.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use hindsight_vmm::probe::report::DoctorReport;
use hindsight_vmm::probe::{ProbeVerdict, probes};

fn doctor(arguments: &[&str], cache: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hindsight"))
        .arg("doctor")
        .args(arguments)
        .env("XDG_CACHE_HOME", cache)
        .output()
        .expect("the command starts")
}

/// Whether KVM can be used here. If not, it prints that the test is skipped.
fn has_kvm(test: &str) -> bool {
    let usable = hindsight_vmm::kvm::open_device().is_ok_and(|kvm| kvm.create_vm().is_ok());
    if !usable {
        eprintln!("skipped: {test}: /dev/kvm cannot be used here");
    }
    usable
}

#[test]
fn report_has_a_well_formed_row_for_every_probe() {
    if !has_kvm("report_has_a_well_formed_row_for_every_probe") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("report.json");
    let arguments = [
        "--json",
        "--skip",
        "guestbp-data",
        "--save",
        saved.to_str().unwrap(),
    ];
    let output = doctor(&arguments, folder.path());
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );

    let report: DoctorReport = serde_json::from_slice(&output.stdout).unwrap();
    let names: BTreeSet<&str> = report.probes.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, probes().map(|probe| probe.name).collect());
    for row in &report.probes {
        assert!(!row.finding.detail.is_empty(), "{}", row.name);
        let skipped = row.finding.verdict == ProbeVerdict::Skipped;
        assert_eq!(skipped, row.name == "guestbp-data", "{}", row.name);
    }
    // Every KVM passes these.
    for name in ["io-exit", "hlt-exit", "mmio-exit", "msr-exit"] {
        let row = report.probes.iter().find(|row| row.name == name).unwrap();
        assert_eq!(
            row.finding.verdict,
            ProbeVerdict::Works,
            "{name}: {}",
            row.finding.detail
        );
    }
    assert_eq!(std::fs::read(saved).unwrap(), output.stdout);
}

#[test]
fn unknown_probe_is_refused_with_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let output = doctor(&["--only", "no-such-probe"], folder.path());
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(output.stdout, b"");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("no-such-probe"), "{stderr}");
}

#[test]
fn list_names_every_probe_without_measuring() {
    let folder = tempfile::tempdir().unwrap();
    let output = doctor(&["--list"], folder.path());
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        String::from_utf8(output.stdout).unwrap().lines().count(),
        probes().count()
    );
    assert!(!folder.path().join("hindsight").exists());
}

#[test]
fn findings_are_stored_for_the_next_run() {
    if !has_kvm("findings_are_stored_for_the_next_run") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = doctor(&["--only", "hlt-exit"], folder.path());
    assert_eq!(output.status.code(), Some(0));
    let stored = std::fs::read_to_string(folder.path().join("hindsight/doctor.json")).unwrap();
    assert!(stored.contains("\"hlt-exit\""), "{stored}");
}
