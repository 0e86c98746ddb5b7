use super::*;
use imago::FormatCreateBuilder;
use imago::StorageCreateOptions;
use std::fs;

const MIB: u64 = 1 << 20;

fn raw(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    let file = File::create(&path).unwrap();
    file.set_len(MIB).unwrap();
    path
}

fn spec(path: &Path, options: &str) -> DiskSpec {
    DiskSpec::parse(&format!("{}{options}", path.display())).unwrap()
}

/// A qcow2 image of 1 MiB, with a backing file if one is named.
fn qcow2(folder: &Path, name: &str, backing: Option<&Path>) -> PathBuf {
    let path = folder.join(name);
    let file = ImageFile::create_open(StorageCreateOptions::new().filename(&path)).unwrap();
    let mut builder = Qcow2::<ImageFile>::create_builder(file).size(MIB);
    if let Some(backing) = backing {
        builder = builder.backing(backing.to_str().unwrap().to_owned(), "raw".to_owned());
    }
    builder.create().unwrap();
    path
}

/// An image's backend, without a device around it.
fn backend(spec: &DiskSpec) -> DiskImage {
    let locks = Arc::default();
    let write = !spec.leaves_image();
    let options = StorageOpenOptions::new().filename(&spec.path).write(write);
    let file = ImageFile::open(options).unwrap();
    let gate = BackingGate {
        folder: None,
        locks: Arc::clone(&locks),
    };
    let access = match spec.format() {
        DiskFormat::Raw => FormatAccess::new(Raw::builder(file).write(write).open(gate).unwrap()),
        _ => FormatAccess::new(
            Qcow2::<ImageFile>::builder(file)
                .write(write)
                .open(gate)
                .unwrap(),
        ),
    };
    DiskImage {
        access,
        read_only: !write,
        _locks: locks,
    }
}

#[test]
fn second_writer_of_an_image_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = raw(folder.path(), "disk.img");
    let writer = open(&spec(&path, ""), 1).unwrap();
    for options in ["", ",ro", ",snapshot"] {
        let error = open(&spec(&path, options), 1).unwrap_err();
        assert!(matches!(error, DiskError::InUse(_)), "{options}: {error}");
    }
    drop(writer);
    let _reader = open(&spec(&path, ",ro"), 1).unwrap();
    let _other = open(&spec(&path, ",snapshot"), 1).unwrap();
    assert!(open(&spec(&path, ""), 1).is_err());
}

#[test]
fn written_image_has_the_data_after_a_flush() {
    let folder = tempfile::tempdir().unwrap();
    for path in [
        raw(folder.path(), "d.img"),
        qcow2(folder.path(), "d.qcow2", None),
    ] {
        let spec = spec(&path, "");
        let mut image = backend(&spec);
        assert_eq!(image.len(), MIB);
        image.write(70_000, b"data").unwrap();
        image.write_zeroes(70_002, 1, false).unwrap();
        image.flush().unwrap();
        let mut data = [1; 5];
        backend(&spec).read(69_999, &mut data).unwrap();
        assert_eq!(&data, b"\0da\0a", "{}", path.display());
    }
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zero() {
    let folder = tempfile::tempdir().unwrap();
    for path in [
        raw(folder.path(), "d.img"),
        qcow2(folder.path(), "d.qcow2", None),
    ] {
        let mut image = backend(&spec(&path, ""));
        image.write(0, &vec![7; 1 << 18]).unwrap();
        image.write_zeroes(4096, 1 << 16, true).unwrap();
        image.discard(1 << 17, 1 << 16).unwrap();
        let mut data = [1; 3];
        image.read(4095, &mut data).unwrap();
        assert_eq!(data, [7, 0, 0], "{}", path.display());
    }
}

#[test]
fn unwritten_part_of_an_image_is_that_of_its_backing_file() {
    let folder = tempfile::tempdir().unwrap();
    let base = raw(folder.path(), "base.img");
    fs::write(&base, vec![9; 1 << 20]).unwrap();
    let path = qcow2(folder.path(), "top.qcow2", Some(&base));
    let mut image = backend(&spec(&path, ""));
    image.write(0, &[1]).unwrap();
    let mut data = [0; 2];
    image.read(0, &mut data).unwrap();
    assert_eq!(data, [1, 9]);
    drop(image);
    assert!(fs::read(&base).unwrap().iter().all(|&byte| byte == 9));
    assert!(open(&spec(&path, ""), 1).is_ok(), "in the same folder");
}

#[test]
fn backing_file_in_another_folder_must_be_allowed() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let base = raw(other.path(), "base.img");
    let path = qcow2(folder.path(), "top.qcow2", Some(&base));
    let error = open(&spec(&path, ""), 1).unwrap_err();
    let text = format!("{:#}", anyhow::Error::from(error));
    assert!(text.contains("add `,backing`"), "{text}");
    assert!(open(&spec(&path, ",backing"), 1).is_ok());
}

#[test]
fn images_that_cannot_be_used_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small");
    fs::write(&path, [0; 100]).unwrap();
    assert!(matches!(
        open(&spec(&path, ""), 1),
        Err(DiskError::TooSmall(_, 100))
    ));
    let error = open(&spec(&path, ",format=qcow2"), 1).unwrap_err();
    assert!(matches!(error, DiskError::DiskImage { .. }), "{error}");
    let missing = open(&spec(&folder.path().join("none"), ""), 1).unwrap_err();
    assert!(matches!(missing, DiskError::Open(..)), "{missing}");
}

#[test]
fn disc_smaller_than_a_block_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disc.iso");
    fs::write(&path, [0; 2047]).unwrap();
    let error = open_disc(&path).unwrap_err();
    assert!(matches!(error, DiskError::DiscTooSmall(_, 2047)));
    assert!(
        error
            .to_string()
            .ends_with("less than a block of a disc, 2 KiB")
    );
    fs::write(&path, [0; 2049]).unwrap();
    assert!(open_disc(&path).is_ok());
}
