//! Bad options, images and files: one line, status 2, and nothing left behind.

use std::os::unix::net::UnixListener;

use crate::rig::*;

#[test]
fn bad_input_prints_one_line_and_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    files(folder);
    let _listener = UnixListener::bind(folder.join("socket")).unwrap();
    let before = listing(folder);
    let rows: &[(&[&str], &str)] = &[
        (&["missing"], "missing cannot be opened: No such file"),
        (&["."], "is a directory"),
        (&["/dev/zero"], "is not a file"),
        (&["spin/x"], "Not a directory"),
        (&[], "<IMAGE>"),
        (&["spin", "--bogus"], "unexpected argument '--bogus'"),
        (&["empty"], "the image is empty"),
        (&["text"], "the image's format is unknown"),
        (&["elf-cut"], "ELF"),
        (&["elf-bad"], "ELF"),
        (&["gzip"], "decompress it first"),
        (&["linux-cut"], "Linux image"),
        (&["multiboot-cut"], "multiboot"),
        (&["spin", "--protocol", "pvh"], "not ELF"),
        (&["spin", "--protocol", "linux"], "no boot header"),
        (&["spin", "--protocol", "x"], "[possible values: auto"),
        (&["spin", "--mode", "x"], "real, protected, long"),
        (&["big", "--mode", "long", "-m", "8M"], "it needs 16 MiB"),
        (
            &["spin", "--mode", "long", "--load-address", "0xe0000"],
            "overlaps",
        ),
        (
            &["spin", "--load-address", "0xfffffffffffffff0"],
            "does not fit in guest memory",
        ),
        (&["spin", "--load-address", "x"], "not a number"),
        (
            &["spin", "--mode", "long", "--entry", "0"],
            "entry point 0x0",
        ),
        (
            &["spin", "--mode", "real", "--initrd", "big"],
            "--initrd cannot be used with",
        ),
        (
            &["multiboot", "--initrd", "missing"],
            "initrd missing cannot be opened",
        ),
        (
            &["multiboot", "-m", "8M", "--initrd", "big"],
            "it needs 16 MiB",
        ),
        (
            &["multiboot", "-m", "8M", "--module", "big=x"],
            "it needs 16 MiB",
        ),
        (
            &["multiboot", "--module", "missing"],
            "module missing cannot be opened",
        ),
        (&["multiboot", "--initrd", "empty"], "is empty"),
        (&["spin", "--mode", "real", "-m", "0"], "too little"),
        (&["spin", "--mode", "real", "-m", "1048575"], "too little"),
        (
            &["spin", "--mode", "real", "-m", "1048577"],
            "not whole pages",
        ),
        (&["spin", "--mode", "real", "-m", "32T"], "more than"),
        (&["spin", "--mode", "real", "-m", "33T"], "too much"),
        (&["spin", "--mode", "real", "-m", "99999999T"], "2^64"),
        (&["spin", "--mode", "real", "-m", "lots"], "not a size"),
        (
            &["spin", "--mode", "real", "-m", "3M", "--hugepages"],
            "huge page",
        ),
        (
            &["spin", "--mode", "real", "--cpus", "0"],
            "1 to 64 processors, not 0",
        ),
        (
            &["spin", "--mode", "real", "--cpus", "65"],
            "1 to 64 processors, not 65",
        ),
        (&["spin", "--mode", "real", "--cpus", "-1"], "-1"),
        (&["spin", "--mode", "real", "--cpus", "many"], "--cpus"),
        (
            &["spin", "--mode", "real", "--cpu", "z80"],
            "skylake-server",
        ),
        (&["spin", "--mode", "real", "--cpu", "pmu=9"], "4 or 8"),
        (
            &["spin", "--mode", "real", "--cpu", "+l2cat"],
            "the interpreter",
        ),
        (
            &["spin", "--mode", "real", "--cpu", "none.toml"],
            "No such file",
        ),
        (&["spin", "--mode", "real", "--cpu", "bad.toml"], "line 2: "),
        (
            &["spin", "--mode", "real", "--timeout", "x"],
            "not a number of seconds",
        ),
        (
            &["spin", "--mode", "real", "--timeout=-1"],
            "not a possible number",
        ),
        (
            &["spin", "--mode", "real", "--serial", "tcp:1"],
            "unknown console",
        ),
        (
            &["missing", "--serial", "file:made", "--trace", "io=made2"],
            "missing",
        ),
        (
            &["text", "--serial", "file:made", "--debugcon", "unix:made2"],
            "format is unknown",
        ),
    ];
    for (arguments, expected) in rows {
        let output = output(folder, arguments);
        let stderr = text(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("hindsight: "), "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert_eq!(listing(folder), before, "{arguments:?}");
    }
}

#[test]
fn bad_consoles_and_traces_print_one_line_and_leave_no_files() {
    if !has_kvm("bad_consoles_and_traces_print_one_line_and_leave_no_files") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    files(folder);
    let _listener = UnixListener::bind(folder.join("socket")).unwrap();
    let before = listing(folder);
    let rows: &[(&str, &str, &str)] = &[
        (
            "--serial",
            "unix:socket",
            "another process is listening there",
        ),
        ("--serial", "unix:spin", "it is not a socket"),
        ("--serial", "unix:nowhere/socket", "No such file"),
        ("--serial", "file:nowhere/file", "No such file"),
        (
            "--debugcon",
            "unix:socket",
            "another process is listening there",
        ),
        (
            "--trace",
            "bogus",
            "is not one of exit, msr, irq, exception, io, mode, gdb, all",
        ),
        ("--trace", "exit=nowhere/file", "cannot be written"),
    ];
    for (option, value, expected) in rows {
        let output = output(folder, &["spin", "--mode", "real", option, value]);
        let stderr = text(&output);
        assert_eq!(output.status.code(), Some(2), "{value}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{value}: {stderr}");
        assert!(stderr.contains(expected), "{value}: {stderr}");
        assert_eq!(listing(folder), before, "{value}");
    }
}
