//! Help, completions and man pages.

use std::fs;
use std::path::Path;

use crate::rig::*;

const COMMANDS: [&str; 14] = [
    "run",
    "trace",
    "exec",
    "export",
    "report",
    "stat",
    "merge",
    "dump",
    "diff",
    "cpu",
    "doctor",
    "test",
    "demo",
    "completions",
];

fn stdout(arguments: &[&str]) -> String {
    let output = command(Path::new("/"), arguments)
        .output()
        .expect("it starts");
    assert_eq!(
        output.status.code(),
        Some(0),
        "{arguments:?}: {}",
        text(&output)
    );
    assert!(output.stderr.is_empty(), "{arguments:?}");
    String::from_utf8(output.stdout).expect("help is UTF-8")
}

#[test]
fn help_of_every_command_has_examples_and_fits_a_terminal() {
    for name in COMMANDS {
        for flag in ["--help", "-h"] {
            let help = stdout(&[name, flag]);
            assert!(help.contains("\nExamples:\n  hindsight "), "{name}: {help}");
            for line in help.lines() {
                assert!(line.chars().count() <= 100, "{name}: {line}");
            }
        }
    }
}

#[test]
fn reader_that_has_read_enough_is_no_error() {
    let printing: [&[&str]; 6] = [
        &["--help"],
        &["test", "--help"],
        &["test", "--list"],
        &["cpu", "list"],
        &["cpu", "show", "core2"],
        &["completions", "bash"],
    ];
    for arguments in printing {
        let (reader, writer) = std::io::pipe().expect("the host has pipes");
        drop(reader);
        let output = command(Path::new("/"), arguments)
            .stdout(writer)
            .output()
            .expect("it starts");
        assert_eq!(text(&output), "", "{arguments:?}");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
    }
}

#[test]
fn completions_name_commands_and_options_in_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&["completions", shell]);
        for word in [
            "completions",
            "deterministic",
            "dump-config",
            "log-file",
            "ignore-needs",
        ] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn bash_accepts_its_completions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hindsight");
    fs::write(&path, stdout(&["completions", "bash"])).unwrap();
    let script = "source ./hindsight; COMP_WORDS=(hindsight run --dump); COMP_CWORD=2; \
                  _hindsight hindsight --dump run; echo \"${COMPREPLY[*]}\"";
    let bash = std::process::Command::new("bash")
        .args(["-c", script])
        .current_dir(folder.path())
        .output();
    let Ok(output) = bash else {
        eprintln!("skipped: bash is not installed");
        return;
    };
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "--dump-config\n",
        "{}",
        text(&output)
    );
}

#[test]
fn each_command_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("new/man1");
    stdout(&["man", pages.to_str().unwrap()]);
    let mut names: Vec<_> = COMMANDS.map(|name| format!("hindsight-{name}.1")).into();
    names.push("hindsight.1".to_owned());
    let nested = ["list", "show", "diff"].map(|name| format!("hindsight-cpu-{name}.1"));
    names.extend(nested);
    names.sort();
    let found: Vec<_> = listing(&pages).into_iter().map(|(name, _)| name).collect();
    assert_eq!(found, names);
    let run = fs::read_to_string(pages.join("hindsight-run.1")).unwrap();
    for part in [
        ".TH",
        ".SH OPTIONS",
        "\\-\\-dump\\-config",
        "\\-\\-cpus",
        ".SH NOTES",
        "Examples",
    ] {
        assert!(run.contains(part), "{part} in {run}");
    }
}
