//! A hash of what a deterministic run depends on besides its image, processor and seed.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use toml::{Table, Value};
use xxhash_rust::xxh3::Xxh3;

use crate::cli::config::RunConfig;

/// Options whose values do not change what a guest does, or are hashed by the files that they name.
const OTHER_OPTIONS: [(&str, &[&str]); 4] = [
    ("boot", &["image", "firmware", "initrd", "module"]),
    (
        "machine",
        &[
            "hugepages",
            "engine",
            "prefer",
            "translate",
            "translate-memory",
        ],
    ),
    ("devices", &["disk", "cdrom"]),
    ("determinism", &["record-input", "replay-input"]),
];

/// The hash of the options and files that a run depends on.
///
/// Files count by their contents and not by their paths, except shared folders and what is no
/// regular file.
pub(super) fn inputs_hash(config: &RunConfig) -> anyhow::Result<String> {
    let mut hash = Xxh3::new();
    let values = Table::try_from(config)?;
    for (table, left_out) in OTHER_OPTIONS {
        let options = values.get(table).and_then(Value::as_table);
        for (key, value) in options.into_iter().flatten() {
            if !left_out.contains(&key.as_str()) {
                hash.update(format!("{table}.{key}={value}\n").as_bytes());
            }
        }
    }
    let (boot, devices) = (&config.boot, &config.devices);
    let files = [
        &boot.firmware,
        &boot.initrd,
        &devices.cdrom,
        &config.determinism.replay_input,
    ];
    for path in files {
        add_file(&mut hash, path.as_deref());
    }
    for module in &boot.module {
        hash.update(module.0.args.as_bytes());
        add_file(&mut hash, Some(&module.0.path));
    }
    for disk in &devices.disk {
        let disk = &disk.0;
        hash.update(&[disk.read_only.into(), disk.snapshot.into()]);
        add_file(&mut hash, Some(&disk.path));
    }
    Ok(format!("{:016x}", hash.digest()))
}

/// Adds the contents of a file and their length, or its path if it is no regular file.
fn add_file(hash: &mut Xxh3, path: Option<&Path>) {
    let Some(path) = path else {
        return hash.update(b"\0none");
    };
    if !path.is_file() || add_contents(hash, path).is_err() {
        hash.update(path.as_os_str().as_encoded_bytes());
    }
}

fn add_contents(hash: &mut Xxh3, path: &Path) -> std::io::Result<()> {
    let mut file = BufReader::with_capacity(1 << 16, File::open(path)?);
    let mut len = 0_u64;
    loop {
        let bytes = file.fill_buf()?;
        if bytes.is_empty() {
            break;
        }
        let count = bytes.len();
        hash.update(bytes);
        file.consume(count);
        len += count as u64;
    }
    hash.update(&len.to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::config::ConfigArgs;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct TestCommand {
        #[command(flatten)]
        config: ConfigArgs,
    }

    fn hash(words: &[&str]) -> String {
        let words = ["hindsight", "image"].iter().chain(words);
        let config = TestCommand::try_parse_from(words).unwrap().config;
        inputs_hash(&config.load().unwrap()).unwrap()
    }

    #[test]
    fn hash_depends_on_what_the_guest_can_observe() {
        let base = hash(&[]);
        for other in [
            &["--memory", "256M"][..],
            &["--cpus", "2"],
            &["--cmdline", "quiet"],
            &["--models", "off"],
            &["--rng"],
        ] {
            assert_ne!(hash(other), base, "{other:?}");
        }
        for same in [&["--engine", "interp"][..], &["--translate", "off"]] {
            assert_eq!(hash(same), base, "{same:?}");
        }
    }

    #[test]
    fn hash_has_the_contents_of_files_and_not_their_paths() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, contents: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, contents).unwrap();
            path.display().to_string()
        };
        let (a, b, same) = (file("a", "one"), file("b", "two"), file("c", "one"));
        let of = |path: &str| hash(&["--initrd", path]);
        assert_ne!(of(&a), of(&b));
        assert_eq!(of(&a), of(&same));
        let disk = |path: &str| hash(&["--disk", path]);
        assert_ne!(disk(&a), disk(&b));
        assert_ne!(disk(&a), of(&a));
    }
}
