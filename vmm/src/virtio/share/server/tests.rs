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

struct Share {
    server: FolderServer,
    unique: u64,
}

impl Share {
    fn new(folder: &Path, writable: bool) -> Self {
        let spec = ShareSpec {
            folder: folder.to_owned(),
            tag: "t".to_owned(),
            writable,
        };
        let mut share = Self {
            server: FolderServer::new(&spec).unwrap(),
            unique: 0,
        };
        let mut init = [7_u32, 31, 0x2_0000, 0].map(u32::to_le_bytes).concat();
        init.resize(64, 0);
        share.request(INIT, 0, &init).unwrap();
        share
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
