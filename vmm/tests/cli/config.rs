//! `hindsight run --config` and `--dump-config`.

use std::fs;
use std::path::Path;

use iced_x86::code_asm::*;

use crate::rig::*;

/// A guest that ends with a code that depends on its random numbers and on the time.
fn gamble(path: &Path) {
    real(path, |a| {
        let mut again = a.create_label();
        a.mov(cx, 1000)?;
        a.set_label(&mut again)?;
        a.rdrand(ax)?;
        a.xor(bx, ax)?;
        a.dec(cx)?;
        a.jnz(again)?;
        a.rdtsc()?;
        a.xor(eax, ebx)?;
        a.out(0xf4, al)
    });
}

/// The hash that `--stats` prints, and the status.
fn hash(folder: &Path, arguments: &[&str]) -> (String, Option<i32>) {
    let output = command(folder, arguments).output().expect("it starts");
    let stderr = text(&output);
    let line = stderr.lines().find(|line| line.contains(" hash "));
    let hash = line.unwrap_or_else(|| panic!("no hash in {stderr}"));
    (hash.to_owned(), output.status.code())
}

#[test]
fn run_of_a_dumped_configuration_is_the_same_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    gamble(&folder.join("image"));
    let options = [
        "run",
        "image",
        "--mode",
        "real",
        "--deterministic",
        "--seed",
        "7",
        "--memory",
        "8M",
        "--stats",
    ];
    let expected = hash(folder, &options);
    let dump = [&options[..], &["--dump-config"]].concat();
    let dumped = command(folder, &dump).output().unwrap();
    assert_eq!(dumped.status.code(), Some(0), "{}", text(&dumped));
    let elsewhere = folder.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("machine.toml"), &dumped.stdout).unwrap();
    let from_file = ["run", "--config", "elsewhere/machine.toml"];
    assert_eq!(hash(folder, &from_file), expected);
    let other_seed = [&from_file[..], &["--seed", "8"]].concat();
    assert_ne!(hash(folder, &other_seed), expected);
}

#[test]
fn relative_paths_refer_to_the_folder_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::create_dir(folder.join("vm")).unwrap();
    real(&folder.join("vm/image"), |a| {
        a.mov(dx, 0x3f8)?;
        a.mov(al, u32::from(b'!'))?;
        a.out(dx, al)?;
        a.out(0xf4, al)
    });
    let content = "version = 1\n[boot]\nimage = \"image\"\nmode = \"real\"\n\
                   [machine]\nengine = \"interp\"\n[console]\nserial = \"file:serial.txt\"\n";
    fs::write(folder.join("vm/machine.toml"), content).unwrap();
    let arguments = ["run", "--config", "vm/machine.toml"];
    let output = command(folder, &arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0x43), "{}", text(&output));
    assert_eq!(fs::read(folder.join("vm/serial.txt")).unwrap(), b"!");
}

#[test]
fn bad_file_is_one_line_and_status_two() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(
        folder.join("bad.toml"),
        "version = 1\n[machine]\ncpuss = 2\n",
    )
    .unwrap();
    let rows: [(&[&str], &str); 4] = [
        (
            &["run", "--config", "bad.toml", "x"],
            "hindsight: bad.toml:3: [machine] cpuss: unknown key; did you mean [machine] cpus?",
        ),
        (
            &["diff", "--config", "bad.toml", "x"],
            "hindsight: bad.toml:3: [machine] cpuss: unknown key",
        ),
        (
            &["test", "--run-arg=--config", "--run-arg=bad.toml"],
            "hindsight: --run-arg: bad.toml:3: ",
        ),
        (
            &["run", "--config", "none.toml"],
            "hindsight: --config: configuration none.toml cannot be opened: No such file",
        ),
    ];
    for (arguments, expected) in rows {
        let output = command(folder, arguments).output().unwrap();
        let stderr = text(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.starts_with(expected), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
    }
}

#[test]
fn diff_takes_a_file_for_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    gamble(&folder.join("image"));
    let content =
        "version = 1\n[boot]\nimage = \"image\"\nmode = \"real\"\n[machine]\nmemory = \"8M\"\n";
    fs::write(folder.join("machine.toml"), content).unwrap();
    let same = [
        "diff",
        "--config",
        "machine.toml",
        "--a",
        "--seed 1",
        "--b",
        "--seed 1",
    ];
    let output = command(folder, &same).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let different = ["diff", "--config", "machine.toml", "--b", "--seed 1"];
    let output = command(folder, &different).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
}
