use std::fs;
use std::path::Path;

use clap::{CommandFactory, Parser, ValueHint};
use proptest::prelude::*;
use toml::Table;

use super::file::read;
use super::*;

#[derive(Debug, Parser)]
struct TestCommand {
    #[command(flatten)]
    config: ConfigArgs,
}

/// The configuration of a command line, or the message of the error.
fn load(args: &[&str]) -> Result<RunConfig, String> {
    let words = ["hindsight"].iter().chain(args);
    let command = TestCommand::try_parse_from(words).map_err(|error| error.to_string())?;
    let config = command.config.load().map_err(|error| error.to_string())?;
    config.check().map_err(|error| error.to_string())?;
    Ok(config.with_defaults())
}

/// A folder with a file of this content, and the path of the file.
fn file(content: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("machine.toml");
    fs::write(&path, content).expect("the file can be written");
    let path = path.to_str().expect("temporary names are UTF-8").to_owned();
    (folder, path)
}

#[test]
fn options_of_the_command_line_are_the_keys_of_the_file() {
    let options = options();
    for option in &options {
        // An inline table is no value of any option, which shows that the key is known.
        let (_folder, path) = file(&format!(
            "version = 1\n[{}]\n{} = {{}}\n",
            option.table, option.key
        ));
        let error = read(Path::new(&path)).unwrap_err().to_string();
        assert!(!error.contains("unknown key"), "{error}");
    }
    let mut tables: Vec<&str> = options.iter().map(|o| o.table.as_str()).collect();
    tables.dedup();
    for table in tables {
        let text = format!("[{table}]\nno-such-key = 1\n");
        let error = toml::from_str::<RunConfig>(&text).unwrap_err();
        let (_, known) = error.message().split_once("expected").unwrap();
        let of_table = options.iter().filter(|o| o.table == table);
        let mut keys: Vec<_> = of_table.map(|o| o.key.as_str()).collect();
        let mut known: Vec<_> = known.split('`').skip(1).step_by(2).collect();
        keys.sort_unstable();
        known.sort_unstable();
        assert_eq!(keys, known, "[{table}]");
    }
}

#[test]
fn help_shows_the_defaults() {
    let help = TestCommand::command().render_help().to_string();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "1M is 1 MiB) [default: 128M]",
        "1 to 64 [default: 1]",
        "[default: stdio]",
        "[default: warn]",
        "from the image [default: auto]",
    ] {
        assert!(help.contains(part), "{part:?} in {help}");
    }
}

#[test]
fn command_line_overrides_the_file_and_the_file_the_defaults() {
    let (folder, path) = file(
        "version = 1\n[boot]\nimage = \"kernel\"\nmodule = [\"a\", \"b=c\"]\n\
         [machine]\nmemory = \"1GiB\"\ncpus = 3\nhugepages = true\nengine = \"interp\"\n\
         [run]\ntimeout = 0.5\nstats = true\n",
    );
    let kernel = folder.path().join("kernel");
    let from_file = load(&["--config", &path]).unwrap();
    assert_eq!(from_file.boot.image.as_deref(), Some(&*kernel));
    assert_eq!(from_file.boot.module.len(), 2);
    assert_eq!(from_file.machine.memory, OptionWord(Size::mib(1024)));
    assert_eq!(from_file.machine.engine, EngineArg::Interp);
    assert_eq!(from_file.machine.models, ModelsArg::On);
    assert!(from_file.machine.hugepages && from_file.run.stats);

    let args = [
        "--config",
        &path,
        "other",
        "-m",
        "2G",
        "--module",
        "d",
        "--hugepages=false",
        "--cpus",
        "3",
    ];
    let mut expected = from_file;
    expected.boot.image = Some(std::ffi::OsString::from("other").into());
    expected.boot.module = vec!["d".parse().unwrap()];
    expected.machine.memory = OptionWord(Size::mib(2048));
    expected.machine.hugepages = false;
    assert_eq!(load(&args).unwrap(), expected);
}

#[test]
fn defaults_follow_the_kind_of_the_run() {
    let live = load(&["x"]).unwrap();
    assert_eq!(live.cpu().to_string(), "skylake-server");
    assert_eq!(live.deterministic_seed(), None);
    let same = load(&["x", "--deterministic", "--gdb", "tcp::1"]).unwrap();
    assert_eq!(same.cpu().to_string(), "portable-v2");
    assert_eq!(same.deterministic_seed(), Some(0));
    assert_eq!(
        same.debugging.checkpoint_memory,
        Some(OptionWord(Size::mib(1024)))
    );
}

/// Command lines that give every option a value other than its default, between them.
const FULL: [&[&str]; 2] = [
    &[
        "image",
        "--protocol",
        "multiboot",
        "--initrd",
        "i",
        "--cmdline",
        "-a 'b' \"c\" \\ \u{e4}",
        "--module",
        "m=-x",
        "--module",
        "/n",
        "--load-address",
        "0x1000",
        "--entry",
        "4096",
        "--mode",
        "real",
        "-m",
        "3073M",
        "--hugepages",
        "--cpus",
        "64",
        "--cpu",
        "host,-lbr,pmu=8",
        "--engine",
        "kvm",
        "--prefer",
        "speed",
        "--translate",
        "20",
        "--translate-memory",
        "1M",
        "--models",
        "off",
        "--disk",
        "d.img,ro",
        "--disk",
        "/e,f,snapshot,format=qcow2",
        "--cdrom",
        "cd.iso",
        "--share",
        "dir=tag,rw",
        "--net",
        "user,hostfwd=tcp::2222-:22",
        "--vsock",
        "cid=3,socket=v",
        "--rng",
        "--serial",
        "file:s",
        "--debugcon",
        "unix:../d",
        "--btm",
        "b",
        "--display",
        "d.png",
        "--gdb",
        "unix:g",
        "--gdb-wait",
        "--gdb-allow-remote",
        "--record",
        "branches=5",
        "--trace-out",
        "t",
        "--timeout",
        "1.5m",
        "--exit-on-halt",
        "--no-reboot",
        "--sandbox",
        "strict",
        "--max-output",
        "1G",
        "--stats",
        "--switch-every",
        "5ms",
        "--log",
        "warn,msr=debug",
        "--log-file",
        "l",
        "--trace",
        "exit,io=t",
    ],
    &[
        "--firmware",
        "f",
        "--firmware-vars",
        "v",
        "--vga-bios",
        "r",
        "--display",
        "text",
        "--deterministic",
        "--seed",
        "0xffffffffffffffff",
        "--record-input",
        "r",
        "--gdb",
        "tcp::1",
        "--checkpoint-memory",
        "2G",
        "--btm",
        "-",
    ],
];

#[test]
fn dumped_configuration_reads_back_the_same() {
    let replay: &[&str] = &["image", "--deterministic", "--replay-input", "r"];
    for args in FULL.iter().copied().chain([replay, &["image"]]) {
        let config = load(args).unwrap();
        let text = dump(&config).unwrap();
        let (_folder, path) = file(&text);
        let again = load(&["--config", &path]).unwrap();
        // Its paths are absolute now: compare what both write.
        assert_eq!(dump(&again).unwrap(), text, "{args:?}");
        assert!(
            text.lines().all(|line| line.chars().count() <= 100),
            "{text}"
        );
    }
}

#[test]
fn full_command_lines_differ_from_every_default() {
    let defaults = Table::try_from(RunConfig::default()).unwrap();
    let full = FULL.map(|args| Table::try_from(load(args).unwrap()).unwrap());
    for option in options() {
        let get = |table: &Table| table.get(&option.table)?.get(&option.key).cloned();
        let differs = full.iter().any(|table| get(table) != get(&defaults));
        assert!(
            differs || option.key == "replay-input",
            "--{0}: no command line of FULL gives it a value other than its default; add it to one",
            option.key
        );
    }
}

#[test]
fn file_paths_are_relative_to_the_file() {
    // Words with a path in them, by key; the others are the path.
    let words = [
        ("module", "p=args"),
        ("trace", "io=p"),
        ("display", "p.png"),
        ("vsock", "cid=3,socket=p"),
    ];
    let hinted = |arg: &&clap::Arg| arg.get_value_hint() == ValueHint::FilePath;
    let declared = schema::declared();
    for arg in declared.iter().filter(hinted) {
        let (table, key) = (schema::table(arg), schema::key(arg));
        if key == "cpu" {
            continue;
        }
        let word = words
            .iter()
            .find(|(name, _)| *name == key)
            .map_or("p", |w| w.1);
        let value = match key.as_str() {
            "module" | "disk" => format!("[\"{word}\"]"),
            _ => format!("\"{word}\""),
        };
        let (folder, path) = file(&format!("version = 1\n[{table}]\n{key} = {value}\n"));
        let config = Table::try_from(read(Path::new(&path)).unwrap()).unwrap();
        let resolved = config[&table][&key].to_string();
        let expected = folder.path().join("p");
        assert!(
            resolved.contains(expected.to_str().unwrap()),
            "{key}: {resolved}"
        );
    }
    for (table, key, word) in [
        ("console", "serial", "file:p"),
        ("console", "debugcon", "unix:p"),
        ("debugging", "gdb", "unix:p"),
    ] {
        let (folder, path) = file(&format!("version = 1\n[{table}]\n{key} = \"{word}\"\n"));
        let config = Table::try_from(read(Path::new(&path)).unwrap()).unwrap();
        let expected = folder.path().join("p");
        let resolved = config[table][key].as_str().unwrap();
        assert_eq!(resolved, word.replace('p', expected.to_str().unwrap()));
    }
}

#[test]
fn profile_file_is_found_beside_the_configuration() {
    let (folder, path) =
        file("version = 1\n[boot]\nimage = \"x\"\n[machine]\ncpu = \"small.toml\"\n");
    fs::write(folder.path().join("small.toml"), "without = [\"lbr\"]\n").unwrap();
    let config = load(&["--config", &path]).unwrap();
    assert_eq!(config.cpu().to_string(), "skylake-server,-lbr");
}

#[test]
fn bad_files_are_refused_with_line_key_and_way_out() {
    let rows = [
        ("", "no version: begin the file with `version = 1`"),
        ("[boot]", "no version: begin"),
        ("version = 2", "version 2 is unknown; hindsight "),
        ("version = 'x'\n", "version (string) is unknown"),
        ("version = 1\n[machine", ":2: not TOML: unclosed table"),
        ("version = 1\n= =", ":2: not TOML: "),
        (
            "version = 1\n[run]\nstats = true\nstats = true",
            ":4: not TOML: duplicate key",
        ),
        (
            "version = 1\n\n[machine]\nmemroy = 1",
            ":4: [machine] memroy: unknown key; did you mean [machine] memory?",
        ),
        (
            "version = 1\nmemory = 1",
            ":2: memory: unknown key; did you mean [machine] memory?",
        ),
        (
            "version = 1\n[boot]\ntimeout = 1",
            ":3: [boot] timeout: unknown key; did you mean [run] timeout?",
        ),
        (
            "version = 1\n[machin]",
            ":2: machin: unknown key; did you mean [machine]?",
        ),
        (
            "version = 1\n[run]\nxyzzy = 1",
            ":3: [run] xyzzy: unknown key; `hindsight run --dump-config` lists all keys",
        ),
        (
            "version = 1\nmachine = 3",
            ":2: machine: invalid type: integer `3`, expected a table",
        ),
        (
            "version = 1\n[machine]\nmemory = 'lots'",
            ":3: [machine] memory: not a size such as 128M",
        ),
        (
            "version = 1\n[machine]\nmemory = true",
            ":3: [machine] memory: invalid type: boolean `true`, expected a size such as \"512M\"",
        ),
        (
            "version = 1\n[machine]\nmemory = -1",
            ":3: [machine] memory: not a size",
        ),
        (
            "version = 1\n[machine]\ncpus = -1",
            "expected a number, at least 0",
        ),
        (
            "version = 1\n[machine]\nhugepages = 1",
            "expected true or false",
        ),
        (
            "version = 1\n[machine]\nengine = 'qemu'",
            ":3: [machine] engine: unknown variant `qemu`, expected one of `auto`, `kvm`, `interp`",
        ),
        (
            "version = 1\n[machine]\ncpu = 'z80'",
            "no processor model `z80`",
        ),
        (
            "version = 1\n[machine]\ncpu = 'no.toml'",
            "no.toml cannot be opened",
        ),
        ("version = 1\n[boot]\nmodule = 'm'", "expected a list"),
        (
            "version = 1\n[boot]\nmodule = ['m',\n[]]",
            "[boot] module[1]: ",
        ),
        (
            "version = 1\n[boot]\nimage = 1",
            "expected a path, as a string",
        ),
        (
            "version = 1\n[boot]\nentry = 'x'",
            ":3: [boot] entry: not a number",
        ),
        (
            "version = 1\n[console]\nserial = 'tcp:1'",
            "use stdio, none, file:PATH or unix:PATH",
        ),
        (
            "version = 1\n[run]\ntimeout = '1 day'",
            "such as 500ms, 10s, 5m or 1h",
        ),
        (
            "version = 1\n[run]\ntimeout = nan",
            "not a possible number of seconds",
        ),
        (
            "version = 1\n[run]\nswitch-every = 0",
            "such as 10, nor a time such as 5ms",
        ),
        (
            "version = 1\n[debugging]\nrecord = 'all'",
            "branches or branches=N",
        ),
        (
            "version = 1\n[debugging]\ngdb = 'udp:1'",
            "an address has the form tcp:HOST:PORT or unix:PATH",
        ),
        (
            "version = 1\n[log]\nlog = 'wran'",
            "\"wran\" is neither a level nor a target",
        ),
        (
            "version = 1\n[log]\ntrace = 'x'",
            "\"x\" is not one of exit, msr",
        ),
    ];
    for (content, expected) in rows {
        let (_folder, path) = file(content);
        let error = read(Path::new(&path)).unwrap_err();
        let line = format!("{:#}", anyhow::Error::from(error));
        assert!(line.starts_with(&path), "{content:?}: {line}");
        assert!(line.contains(expected), "{content:?}: {line}");
        assert!(!line.contains('\n'), "{content:?}: {line}");
    }
}

#[test]
fn files_that_cannot_be_read_are_refused() {
    let (_folder, path) = file(&format!("version = 1\n# {}\n", "x".repeat(256 << 10)));
    let rows = [
        (path.as_str(), "is larger than 262144 bytes"),
        ("/dev/zero", "is not a file"),
        ("/", "is a directory"),
        ("/no/such/file", "cannot be opened: No such file"),
    ];
    for (path, expected) in rows {
        let error = read(Path::new(path)).unwrap_err();
        let line = format!("{:#}", anyhow::Error::from(error));
        assert!(line.starts_with("--config: configuration "), "{line}");
        assert!(line.contains(expected), "{line}");
    }
}

#[test]
fn options_that_conflict_are_refused_wherever_they_stand() {
    let rows: [(&[&str], &str); 14] = [
        (&[], "no guest image: give <IMAGE>"),
        (
            &["x", "--seed", "1"],
            "--seed has no effect without --deterministic",
        ),
        (
            &["x", "--record-input", "f"],
            "--record-input has no effect without --deterministic",
        ),
        (
            &["x", "--replay-input", "f"],
            "--replay-input has no effect without --deterministic",
        ),
        (
            &[
                "x",
                "--deterministic",
                "--record-input",
                "f",
                "--replay-input",
                "f",
            ],
            "exclude each other",
        ),
        (
            &["x", "--gdb-wait"],
            "--gdb-wait has no effect without --gdb",
        ),
        (&["x", "--gdb-allow-remote"], "without --gdb"),
        (&["x", "--trace-out", "t"], "without --gdb"),
        (&["x", "--checkpoint-memory", "1G"], "without --gdb"),
        (
            &["x", "--gdb", "tcp::1", "--checkpoint-memory", "1G"],
            "without --deterministic",
        ),
        (
            &["x", "--deterministic", "--switch-every", "1"],
            "exclude each other",
        ),
        (
            &["x", "--deterministic", "--engine", "kvm"],
            "--deterministic needs the interpreter",
        ),
        (
            &["x", "--deterministic", "--cpu", "host"],
            "needs --cpu portable-v2",
        ),
        (&["x", "--deterministic=maybe"], "invalid value 'maybe'"),
    ];
    for (args, expected) in rows {
        let error = load(args).unwrap_err();
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    let (_folder, path) = file("version = 1\n[determinism]\ndeterministic = true\n");
    assert!(load(&["x", "--config", &path, "--seed", "1"]).is_ok());
    let off = load(&[
        "x",
        "--config",
        &path,
        "--deterministic=false",
        "--seed",
        "1",
    ]);
    assert!(off.unwrap_err().contains("--seed has no effect"));
}

proptest! {
    #[test]
    fn any_file_is_read_or_refused_in_one_line(
        text in any::<String>(),
        table in "[a-z]{0,12}|boot|machine|console|determinism|debugging|run|log",
        key in "[a-z-]{0,12}|memory|cpus|cpu|engine|seed|serial|gdb|timeout|trace|module|image",
        value in "[ -~]{0,20}|\"[ -~]{0,20}\"|-?[0-9]{1,20}|\\[\"[a-z=]{0,5}\"\\]",
    ) {
        let content = format!("version = 1\n[{table}]\n{key} = {value}\n");
        for content in [text, content] {
            let (_folder, path) = file(&content);
            if let Err(error) = read(Path::new(&path)) {
                let line = format!("{:#}", anyhow::Error::from(error));
                prop_assert!(!line.contains('\n') && line.len() < 1000, "{line}");
            }
        }
    }
}

/// The document that shows the default file.
const DOCUMENT: &str = include_str!("../../../../docs/reference/configuration.md");

#[test]
fn document_shows_the_default_file() {
    let text = dump(&RunConfig::default().with_defaults()).unwrap();
    let block = format!("```toml\n{text}```\n");
    let missing = |line: &&str| !DOCUMENT.lines().any(|other| other == *line);
    let lines: Vec<&str> = text.lines().filter(missing).collect();
    assert!(
        DOCUMENT.contains(&block),
        "docs/reference/configuration.md must have the output of `hindsight run --dump-config`; \
         lines that it lacks:\n{}",
        lines.join("\n")
    );
}

#[test]
fn document_lists_no_command_that_fails() {
    let commands = DOCUMENT
        .lines()
        .filter_map(|line| line.strip_prefix("    $ hindsight run "));
    for command in commands {
        let words = shlex::split(command).unwrap();
        let words = words
            .iter()
            .map(String::as_str)
            .take_while(|word| *word != ">");
        let words = words.filter(|word| !matches!(*word, "--dump-config"));
        let words: Vec<&str> = ["hindsight"].into_iter().chain(words).collect();
        assert!(TestCommand::try_parse_from(words).is_ok(), "{command}");
    }
}
