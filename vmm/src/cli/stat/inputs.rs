//! A hash of what a deterministic run depends on besides its image, processor and seed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
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

/// Length of the longest file whose contents count as a whole, in bytes.
const WHOLE: u64 = 64 << 20;
/// Bytes that are read at a time.
const PART: u64 = 16 << 10;
/// Number of parts of a longer file that count, at equal distances.
const PARTS: u64 = 2048;

/// The hash of the options and files that a run depends on.
///
/// Files count by their contents and not by their paths, except shared folders and what is no
/// regular file. Of files longer than 64 MiB, the length and 2048 parts of 16 KiB count, so that
/// disks delay no run.
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

/// Adds the length of a file and its contents, or parts of them if it is longer than [`WHOLE`].
fn add_contents(hash: &mut Xxh3, path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    hash.update(&len.to_le_bytes());
    let (count, size) = if len <= WHOLE {
        (len.div_ceil(PART), PART)
    } else {
        (PARTS, len / PARTS)
    };
    let mut part = vec![0; usize::try_from(PART).unwrap_or(0)];
    for n in 0..count {
        let read = file.read_at(&mut part, n * size)?;
        hash.update(&part[..read]);
    }
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

    #[test]
    fn hash_of_a_long_file_has_parts_from_its_beginning_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let file = File::create(&path).unwrap();
        let path = path.display().to_string();
        file.set_len(1 << 40).unwrap();
        let of = || hash(&["--disk", &path]);
        let mut known = vec![of()];
        for at in [0, 1 << 30, (1 << 40) - (1 << 29)] {
            file.write_all_at(b"data", at).unwrap();
            known.push(of());
        }
        file.set_len((1 << 40) + 512).unwrap();
        known.push(of());
        for (n, one) in known.iter().enumerate() {
            assert!(!known[..n].contains(one), "{n}");
        }
    }
}
