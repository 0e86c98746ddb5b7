use super::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

const ROOT: u64 = 1;
const LOOKUP: u32 = 1;
const OPEN: u32 = 14;
const READ: u32 = 15;
const MKDIR: u32 = 9;
const INIT: u32 = 26;
const GETATTR: u32 = 3;
const UNLINK: u32 = 10;
const RENAME: u32 = 12;
const RELEASE: u32 = 18;
const CREATE: u32 = 35;

struct Share {
    server: FolderServer,
    unique: u64,
}

impl Share {
    fn new(folder: &Path, writable: bool) -> Self {
        Self::with_budget(folder, writable, Budget::of(0))
    }

    fn with_budget(folder: &Path, writable: bool, budget: Budget) -> Self {
        let spec = ShareSpec {
            folder: folder.to_owned(),
            tag: "t".to_owned(),
            writable,
        };
        let mut share = Self {
            server: FolderServer::new(&spec, budget).unwrap(),
            unique: 0,
        };
        share.init();
        share
    }

    fn init(&mut self) {
        let mut init = [7_u32, 31, 0x2_0000, 0].map(u32::to_le_bytes).concat();
        init.resize(64, 0);
        self.request(INIT, 0, &init).unwrap();
    }

    /// Makes a request; returns the reply without its header, or the error number.
    fn request(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.unique += 1;
        let len = u32::try_from(40 + body.len()).unwrap();
        let mut request = [len, opcode].map(u32::to_le_bytes).concat();
        request.extend(self.unique.to_le_bytes());
        request.extend(node.to_le_bytes());
        request.extend([0; 16]);
        request.extend(body);
        let mut reply = vec![0; 0x2000];
        let len = self.server.answer(&request, &mut reply);
        assert!(len >= 16, "a reply");
        assert_eq!(reply[..4], u32::try_from(len).unwrap().to_le_bytes());
        assert_eq!(reply[8..16], self.unique.to_le_bytes());
        match i32::from_le_bytes(reply[4..8].try_into().unwrap()) {
            0 => Ok(reply[16..len].to_vec()),
            error => Err(-error),
        }
    }

    /// The node of a name.
    fn lookup(&mut self, node: u64, name: &str) -> Result<u64, i32> {
        let entry = self.request(LOOKUP, node, format!("{name}\0").as_bytes())?;
        Ok(u64::from_le_bytes(entry[..8].try_into().unwrap()))
    }

    fn read(&mut self, node: u64, len: u32) -> Result<Vec<u8>, i32> {
        let handle = self.request(OPEN, node, &[0; 8])?;
        let mut body = handle[..8].to_vec();
        body.extend(0_u64.to_le_bytes());
        body.extend(len.to_le_bytes());
        body.resize(40, 0);
        self.request(READ, node, &body)
    }
}

#[test]
fn files_of_the_folder_are_read() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("sub")).unwrap();
    fs::write(folder.path().join("sub/file"), "contents").unwrap();
    let mut share = Share::new(folder.path(), false);
    let sub = share.lookup(ROOT, "sub").unwrap();
    let file = share.lookup(sub, "file").unwrap();
    assert_eq!(share.read(file, 100).unwrap(), b"contents");
    assert_eq!(share.lookup(ROOT, "none"), Err(libc::ENOENT));
    share.server.reset();
    assert!(
        share.lookup(sub, "file").is_err(),
        "nodes are gone after a reset"
    );
}

#[test]
fn read_only_share_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "contents").unwrap();
    let mut share = Share::new(folder.path(), false);
    let body = [&0o755_u32.to_le_bytes()[..], &[0; 4], b"new\0"].concat();
    assert_eq!(share.request(MKDIR, ROOT, &body), Err(libc::EROFS));
    assert!(!folder.path().join("new").exists());
    let mut share = Share::new(folder.path(), true);
    share.request(MKDIR, ROOT, &body).unwrap();
    assert!(folder.path().join("new").is_dir());
}

#[test]
fn nothing_outside_of_the_folder_can_be_reached() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inside");
    fs::create_dir(&inside).unwrap();
    fs::write(folder.path().join("secret"), "secret").unwrap();
    symlink("../secret", inside.join("link")).unwrap();
    symlink("/", inside.join("root")).unwrap();
    let mut share = Share::new(&inside, true);
    assert!(share.lookup(ROOT, "..").is_err());
    assert!(share.lookup(ROOT, "../secret").is_err());
    // A link is a node of its own, which the guest resolves in its own tree.
    for name in ["link", "root"] {
        let link = share.lookup(ROOT, name).unwrap();
        assert!(share.read(link, 10).is_err(), "{name}");
        assert!(share.lookup(link, "etc").is_err(), "{name}");
    }
    assert!(share.lookup(ROOT, "root/etc").is_err());
}

#[test]
fn malformed_requests_are_answered_with_errors() {
    let folder = tempfile::tempdir().unwrap();
    let mut share = Share::new(folder.path(), true);
    for opcode in 1..60 {
        if matches!(opcode, 2 | 26 | 38 | 42) {
            continue;
        }
        let _ = share.request(opcode, 0xdead, &[0xff; 3]);
        let _ = share.request(opcode, ROOT, &[]);
    }
    assert!(share.lookup(ROOT, "none").is_err());
}

#[test]
fn folders_that_cannot_be_shared_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [file, folder.path().join("none")] {
        let spec = ShareSpec {
            folder: path,
            tag: "t".to_owned(),
            writable: false,
        };
        assert!(matches!(open(&spec), Err(ShareError::Open(..))));
    }
}

/// How many descriptors of this process are files in `folder`.
fn descriptors_in(folder: &Path) -> usize {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| target.starts_with(folder)).count()
}

/// A share of a folder with 20 folders of 20 files, all of which the guest has looked up. Each file
/// contains its name.
fn known_files(folder: &Path) -> (Share, Vec<(String, u64)>) {
    for sub in 0..20 {
        fs::create_dir(folder.join(format!("sub{sub}"))).unwrap();
        for file in 0..20 {
            let name = format!("sub{sub}/{file}");
            fs::write(folder.join(&name), &name).unwrap();
        }
    }
    let mut share = Share::new(folder, true);
    let mut files = Vec::new();
    for sub in 0..20 {
        let node = share.lookup(ROOT, &format!("sub{sub}")).unwrap();
        for file in 0..20 {
            let found = share.lookup(node, &file.to_string()).unwrap();
            files.push((format!("sub{sub}/{file}"), found));
        }
    }
    (share, files)
}

#[test]
fn descriptors_are_bounded_and_every_known_file_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let (mut share, files) = known_files(folder.path());
    assert!(descriptors_in(folder.path()) <= 66, "the root and one more");
    for (name, node) in &files {
        let handle = share.request(OPEN, *node, &[0; 8]).unwrap();
        let mut read = handle[..8].to_vec();
        read.resize(16, 0);
        read.extend(100_u32.to_le_bytes());
        read.resize(40, 0);
        assert_eq!(share.request(READ, *node, &read).unwrap(), name.as_bytes());
        let mut release = handle[..8].to_vec();
        release.resize(24, 0);
        share.request(RELEASE, *node, &release).unwrap();
    }
    assert!(descriptors_in(folder.path()) <= 66);
    let (_, first) = files[0];
    let sub = share.lookup(ROOT, "sub0").unwrap();
    assert_eq!(share.lookup(sub, "0").unwrap(), first, "the same node");
}

#[test]
fn open_files_keep_their_descriptors_and_others_fail_until_one_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let (mut share, files) = known_files(folder.path());
    let mut handles = Vec::new();
    let error = loop {
        let (_, node) = files[handles.len()];
        match share.request(OPEN, node, &[0; 8]) {
            Ok(handle) => handles.push((node, handle[..8].to_vec())),
            Err(error) => break error,
        }
    };
    assert_eq!(error, libc::EMFILE);
    assert!(handles.len() >= 30, "{}", handles.len());
    assert!(descriptors_in(folder.path()) <= 66);
    for (node, handle) in handles.iter().take(4) {
        let mut release = handle.clone();
        release.resize(24, 0);
        share.request(RELEASE, *node, &release).unwrap();
    }
    share.request(OPEN, files[399].1, &[0; 8]).unwrap();
}

#[test]
fn renamed_and_removed_files_stay_the_guests() {
    let folder = tempfile::tempdir().unwrap();
    let (mut share, files) = known_files(folder.path());
    let rename = [
        &folder_node(&mut share, "sub1").to_le_bytes()[..],
        b"0\0moved\0",
    ]
    .concat();
    let sub0 = folder_node(&mut share, "sub0");
    share.request(RENAME, sub0, &rename).unwrap();
    share.request(UNLINK, sub0, b"1\0").unwrap();
    for _ in 0..2 {
        for (_, node) in &files[2..] {
            share.request(GETATTR, *node, &[0; 16]).unwrap();
        }
    }
    share.request(GETATTR, files[0].1, &[0; 16]).unwrap();
    assert_eq!(share.read(files[0].1, 100).unwrap(), b"sub0/0");
    assert_eq!(share.read(files[1].1, 100).unwrap(), b"sub0/1");
}

#[test]
fn evicted_file_that_the_host_has_replaced_is_stale() {
    let folder = tempfile::tempdir().unwrap();
    let (mut share, files) = known_files(folder.path());
    let path = folder.path().join("sub0/0");
    fs::rename(&path, folder.path().join("elsewhere")).unwrap();
    assert_eq!(
        share.request(GETATTR, files[0].1, &[0; 16]),
        Err(libc::ESTALE)
    );
    fs::write(&path, "another file").unwrap();
    assert_eq!(
        share.request(GETATTR, files[0].1, &[0; 16]),
        Err(libc::ESTALE)
    );
    let sub = share.lookup(ROOT, "sub0").unwrap();
    let new = share.lookup(sub, "0").unwrap();
    assert_eq!(share.read(new, 100).unwrap(), b"another file");
}

#[test]
fn forgotten_files_leave_no_descriptor() {
    let folder = tempfile::tempdir().unwrap();
    let (mut share, files) = known_files(folder.path());
    let subs: Vec<u64> = (0..20)
        .map(|sub| folder_node(&mut share, &format!("sub{sub}")))
        .collect();
    let nodes = files.iter().map(|(_, node)| *node).chain(subs);
    for node in nodes {
        let mut forget = [48_u32, 2].map(u32::to_le_bytes).concat();
        forget.extend([0; 8]);
        forget.extend(node.to_le_bytes());
        forget.resize(40, 0);
        forget.extend(2_u64.to_le_bytes());
        assert_eq!(share.server.answer(&forget, &mut []), 0);
    }
    assert_eq!(descriptors_in(folder.path()), 1, "the root");
    assert_eq!(share.server.nodes.descriptors(), 0);
}

#[test]
fn unmounted_share_leaves_no_descriptor_and_can_be_mounted_again() {
    let folder = tempfile::tempdir().unwrap();
    for n in 0..20 {
        fs::write(folder.path().join(format!("f{n}")), "x").unwrap();
    }
    let mut share = Share::with_budget(folder.path(), false, Budget::of(30));
    for _ in 0..5 {
        for n in 0..20 {
            let node = share.lookup(ROOT, &format!("f{n}")).unwrap();
            assert_eq!(share.read(node, 1).unwrap(), b"x");
        }
        share.server.answer(&destroy(), &mut [0; 64]);
        assert!(descriptors_in(folder.path()) <= 1);
        share.init();
    }
}

fn folder_node(share: &mut Share, name: &str) -> u64 {
    share.lookup(ROOT, name).unwrap()
}

mod eviction;

#[test]
fn failed_create_leaves_no_descriptor() {
    let folder = tempfile::tempdir().unwrap();
    let mut share = Share::new(folder.path(), true);
    let create = |name: &str| {
        let flags = [libc::O_WRONLY, 0o644, 0, 0].map(i32::to_le_bytes).concat();
        [&flags[..], name.as_bytes(), b"\0"].concat()
    };
    fs::create_dir(folder.path().join("known")).unwrap();
    let known = share.lookup(ROOT, "known").unwrap();
    for number in 0..100 {
        let name = format!("sub{number}");
        fs::create_dir(folder.path().join(&name)).unwrap();
        share.request(CREATE, ROOT, &create(&name)).unwrap_err();
    }
    share.request(CREATE, ROOT, &create("known")).unwrap_err();
    share.request(GETATTR, known, &[0; 16]).unwrap();
    assert!(
        descriptors_in(folder.path()) <= 3,
        "the root's and that of the known folder"
    );
}

#[test]
fn file_that_has_another_name_is_evicted_and_found_by_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut share = Share::new(folder.path(), true);
    let mut files = Vec::new();
    for number in 0..200 {
        let [one, two] = ["one", "two"].map(|name| format!("{name}{number}"));
        fs::write(folder.path().join(&one), &one).unwrap();
        fs::hard_link(folder.path().join(&one), folder.path().join(&two)).unwrap();
        let node = share.lookup(ROOT, &one).unwrap();
        assert_eq!(share.lookup(ROOT, &two), Ok(node));
        let unlinked = share.request(UNLINK, ROOT, format!("{two}\0").as_bytes());
        unlinked.unwrap();
        files.push((one, node));
    }
    assert!(descriptors_in(folder.path()) <= 66);
    for (name, node) in files {
        let handle = share.request(OPEN, node, &[0; 8]).unwrap();
        let mut release = handle[..8].to_vec();
        release.resize(24, 0);
        share.request(RELEASE, node, &release).unwrap();
        assert_eq!(share.lookup(ROOT, &name), Ok(node));
    }
}
