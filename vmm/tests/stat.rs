//! `hindsight stat` as a user meets it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// Writes 32-bit code for `--mode protected` to `name` in `folder`.
fn image(
    folder: &Path,
    name: &str,
    code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) {
    let mut assembler = CodeAssembler::new(32).expect("a possible width");
    code(&mut assembler).expect("the code is valid");
    let image = assembler.assemble(0x10_0000).expect("the code fits");
    fs::write(folder.join(name), image).expect("the image can be written");
}

/// A guest that calls a function at 0x100021 twice, which loops `rounds` times with a load and a store,
/// and writes region 9 to port 0x3f0 around the second call.
fn guest(a: &mut CodeAssembler, rounds: u32) -> Result<(), IcedError> {
    let (mut function, mut again) = (a.create_label(), a.create_label());
    a.mov(esp, 0x8000)?; // 100000
    a.mov(dx, 0x3f0)?; // 100005
    a.call(function)?; // 100009
    a.mov(al, 9)?; // 10000e
    a.out(dx, al)?; // 100010
    a.call(function)?; // 100011
    a.mov(al, 0)?; // 100016
    a.out(dx, al)?; // 100018
    a.mov(eax, 5)?; // 100019
    a.out(0xf4, al)?; // 10001e
    a.hlt()?; // 100020
    a.set_label(&mut function)?;
    a.mov(ecx, rounds)?; // 100021
    a.set_label(&mut again)?;
    a.inc(dword_ptr(0x9000))?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.ret()
}

fn stat(folder: &Path, arguments: &[&str]) -> Output {
    let fixed = ["stat", "--mode", "protected"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_hindsight"));
    let all = [&fixed, arguments].concat();
    command
        .args(all)
        .current_dir(folder)
        .env_remove("HINDSIGHT_LOG");
    command.stdin(Stdio::null()).output().expect("it starts")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const REGIONS: [&str; 4] = ["--region", "0x100021", "--region-port", "0x3f0"];

/// The counts that are written as JSON.
fn figures(folder: &Path, name: &str, more: &[&str]) -> serde_json::Value {
    let arguments = [&[name, "-o", "stat.json"], REGIONS.as_slice(), more].concat();
    let output = stat(folder, &arguments);
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    let text = fs::read(folder.join("stat.json")).expect("it was written");
    serde_json::from_slice(&text).expect("JSON")
}

#[test]
fn counts_of_run_and_regions_are_exact() {
    let folder = tempfile::tempdir().expect("a folder");
    image(folder.path(), "guest", |a| guest(a, 10));
    let figures = figures(folder.path(), "guest", &["--caches"]);
    let count = |name: &str| figures["counts"][name].as_u64().expect("a count");
    // 10 instructions outside; 2 * (1 + 3 * 10 + 1) in the function.
    assert_eq!(count("instructions"), 10 + 2 * 32);
    assert_eq!(
        (count("branches.taken"), count("branches.not-taken")),
        (18, 2)
    );
    assert_eq!((count("branches.call"), count("branches.return")), (2, 2));
    // An increment is both; a call stores, a return loads.
    assert_eq!((count("loads"), count("stores")), (22, 22));
    assert_eq!((count("device-accesses"), count("exceptions")), (3, 0));
    let function = &figures["regions"]["0x100021"];
    assert_eq!(
        (&function["entries"], &function["counts"]["instructions"]),
        (&2.into(), &64.into())
    );
    assert_eq!(function["counts"]["branches.taken"], 18);
    let port = &figures["regions"]["9"];
    assert_eq!(
        (&port["entries"], &port["counts"]["branches.call"]),
        (&1.into(), &1.into())
    );
    // OUT, CALL, the function and MOV.
    assert_eq!(port["counts"]["instructions"], 1 + 1 + 32 + 1);
}

#[test]
fn counts_are_the_same_in_every_run() {
    let folder = tempfile::tempdir().expect("a folder");
    image(folder.path(), "guest", |a| guest(a, 5000));
    let first = figures(folder.path(), "guest", &["--caches"]);
    for _ in 0..10 {
        assert_eq!(figures(folder.path(), "guest", &["--caches"]), first);
    }
    let fast = figures(folder.path(), "guest", &[]);
    assert_eq!(
        fast["counts"]["instructions"],
        first["counts"]["instructions"]
    );
    assert!(fast["counts"]["loads"].is_null());
}

#[test]
fn baseline_catches_an_increase_of_a_thousandth() {
    let folder = tempfile::tempdir().expect("a folder");
    image(folder.path(), "before", |a| guest(a, 10_000));
    image(folder.path(), "after", |a| guest(a, 10_010));
    figures(folder.path(), "before", &[]);
    let judge = |name: &str, limit: &str| {
        let compared = [name, "--baseline", "stat.json", "--max-increase", limit];
        let output = stat(folder.path(), &[&compared, REGIONS.as_slice()].concat());
        (output.status.code(), errors(&output))
    };
    let (status, text) = judge("before", "0%");
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.contains("passed: nothing increased by more than 0%"),
        "{text}"
    );
    let (status, text) = judge("after", "0.09%");
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("FAIL: instructions 60 014 -> 60 074, +60 (+0.100 %)"),
        "{text}"
    );
    assert!(text.contains("FAIL: 0x100021: instructions"), "{text}");
    assert_eq!(judge("after", "0.11%").0, Some(0));
}

#[test]
fn statistics_do_not_change_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    image(folder.path(), "guest", |a| guest(a, 100));
    let hash = |output: &Output| {
        let text = errors(output);
        let line = text
            .lines()
            .find(|line| line.starts_with("hindsight: hash"));
        line.map(str::to_owned)
    };
    let counted = stat(
        folder.path(),
        &[&["guest", "--stats", "--caches"], REGIONS.as_slice()].concat(),
    );
    let mut plain = Command::new(env!("CARGO_BIN_EXE_hindsight"));
    plain.args([
        "run",
        "guest",
        "--mode",
        "protected",
        "--deterministic",
        "--stats",
    ]);
    let plain = plain
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    assert!(hash(&plain).is_some(), "{plain:?}");
    assert_eq!(hash(&counted), hash(&plain));
}

#[test]
fn bad_options_of_stat_are_refused_in_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    image(folder.path(), "guest", |a| guest(a, 1));
    fs::write(folder.path().join("other.json"), "no JSON").expect("it can be written");
    let rows: [(&[&str], &str); 6] = [
        (
            &["guest", "--region", "main"],
            "neither an address nor a symbol",
        ),
        (
            &["guest", "--compare", "misses", "--baseline", "other.json"],
            "the counts are instructions",
        ),
        (
            &["guest", "--baseline", "other.json"],
            "was not written by hindsight stat",
        ),
        (&["guest", "--baseline", "missing"], "baseline missing"),
        (&["guest", "--engine", "kvm"], "drop --engine kvm"),
        (&["guest", "--max-increase", "1%"], "--baseline"),
    ];
    for (arguments, expected) in rows {
        let output = stat(folder.path(), arguments);
        let text = errors(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(
            text.contains(expected) && text.lines().count() == 1,
            "{text}"
        );
    }
}
