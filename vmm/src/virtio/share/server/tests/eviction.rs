//! A share whose files are evicted all the time answers as one that keeps all descriptors.

use proptest::prelude::*;

use super::*;

const CREATE: u32 = 35;
const RMDIR: u32 = 11;
const LINK: u32 = 13;
const RENAME2: u32 = 45;
const FORGET: u32 = 2;
/// Folders of the tree, and files in each.
const FOLDERS: usize = 12;
const FILES: usize = 12;

/// A request of a guest. Numbers select one of the nodes that it knows, or a name.
#[derive(Clone, Debug)]
enum Step {
    Lookup(usize, usize),
    Create(usize, usize),
    Mkdir(usize, usize),
    Unlink(usize, usize),
    Rmdir(usize, usize),
    Rename(usize, usize, usize, usize, bool),
    Link(usize, usize, usize),
    Getattr(usize),
    Read(usize),
    Open(usize),
    Close(usize),
    Forget(usize),
    /// Looks up every file that was there at the start, which evicts all others.
    Scan,
}

fn step() -> impl Strategy<Value = Step> {
    let n = || 0_usize..1 << 16;
    prop_oneof![
        6 => (n(), n()).prop_map(|(folder, name)| Step::Lookup(folder, name)),
        2 => (n(), n()).prop_map(|(folder, name)| Step::Create(folder, name)),
        1 => (n(), n()).prop_map(|(folder, name)| Step::Mkdir(folder, name)),
        3 => (n(), n()).prop_map(|(folder, name)| Step::Unlink(folder, name)),
        1 => (n(), n()).prop_map(|(folder, name)| Step::Rmdir(folder, name)),
        3 => (n(), n(), n(), n(), any::<bool>())
            .prop_map(|(from, old, to, new, exchange)| Step::Rename(from, old, to, new, exchange)),
        1 => (n(), n(), n()).prop_map(|(file, folder, name)| Step::Link(file, folder, name)),
        4 => n().prop_map(Step::Getattr),
        4 => n().prop_map(Step::Read),
        1 => n().prop_map(Step::Open),
        1 => n().prop_map(Step::Close),
        1 => n().prop_map(Step::Forget),
        2 => Just(Step::Scan),
    ]
}

/// A guest, the nodes that it knows with the number of their lookups, and its open files.
struct ShareGuest {
    share: Share,
    nodes: Vec<(u64, u64)>,
    open: Vec<(u64, Vec<u8>)>,
    _folder: tempfile::TempDir,
}

/// One of the names that files and folders have.
fn name_of(n: usize) -> String {
    match n % (FOLDERS + FILES) {
        folder @ 0..FOLDERS => format!("folder{folder}"),
        file => format!("file{}", file - FOLDERS),
    }
}

impl ShareGuest {
    fn new(budget: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for sub in 0..FOLDERS {
            let sub = folder.path().join(format!("folder{sub}"));
            fs::create_dir(&sub).unwrap();
            for file in 0..FILES {
                let file = sub.join(format!("file{file}"));
                let name = file.strip_prefix(folder.path()).unwrap();
                fs::write(&file, name.to_str().unwrap()).unwrap();
            }
        }
        let share = Share::with_budget(folder.path(), true, Budget::of(budget));
        Self {
            share,
            nodes: vec![(ROOT, 1)],
            open: Vec::new(),
            _folder: folder,
        }
    }

    fn node(&self, n: usize) -> u64 {
        self.nodes[n % self.nodes.len()].0
    }

    /// Adds the node of an entry. Returns its index, the type and permissions, and the size.
    fn entry(&mut self, reply: Result<Vec<u8>, i32>) -> Result<Vec<u64>, i32> {
        let entry = reply?;
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        let node = u64::from_le_bytes(entry[..8].try_into().unwrap());
        let known = self.nodes.iter().position(|(known, _)| *known == node);
        let index = known.unwrap_or_else(|| {
            self.nodes.push((node, 0));
            self.nodes.len() - 1
        });
        self.nodes[index].1 += 1;
        let is_folder = word(40 + 60) & 0o170_000 == 0o040_000;
        // The sizes of folders are those of the host's file system.
        let size = if is_folder { 0 } else { word(40 + 8) };
        Ok(vec![index as u64, word(40 + 60).into(), size.into()])
    }

    fn close(&mut self, n: usize) {
        if !self.open.is_empty() {
            let (node, handle) = self.open.remove(n % self.open.len());
            let body = [&handle[..], &[0; 16]].concat();
            self.share.request(RELEASE, node, &body).unwrap();
        }
    }

    fn forget(&mut self, index: usize) {
        let (node, lookups) = self.nodes[index];
        if node == ROOT || self.open.iter().any(|(open, _)| *open == node) {
            return;
        }
        self.nodes.remove(index);
        let mut forget = [48, FORGET].map(u32::to_le_bytes).concat();
        forget.extend([0; 8]);
        forget.extend(node.to_le_bytes());
        forget.resize(40, 0);
        forget.extend(lookups.to_le_bytes());
        assert_eq!(self.share.server.answer(&forget, &mut []), 0);
    }

    /// Makes a request that changes names. Returns what the guest sees of its reply.
    fn change(&mut self, step: &Step) -> Result<Vec<u64>, i32> {
        let named = |before: &[u8], n: usize| [before, name_of(n).as_bytes(), b"\0"].concat();
        let (opcode, node, body) = match *step {
            Step::Create(folder, name) => {
                let options = [2_u32, 0o100_644, 0, 0].map(u32::to_le_bytes).concat();
                (CREATE, self.node(folder), named(&options, name))
            }
            Step::Mkdir(folder, name) => {
                let mode = [0xed, 1, 0, 0, 0, 0, 0, 0];
                (MKDIR, self.node(folder), named(&mode, name))
            }
            Step::Link(file, folder, name) => {
                let file = self.node(file).to_le_bytes();
                (LINK, self.node(folder), named(&file, name))
            }
            Step::Unlink(folder, name) => (UNLINK, self.node(folder), named(&[], name)),
            Step::Rmdir(folder, name) => (RMDIR, self.node(folder), named(&[], name)),
            Step::Rename(from, old, to, new, exchange) => {
                let mut body = self.node(to).to_le_bytes().to_vec();
                body.extend([u8::from(exchange) * 2, 0, 0, 0, 0, 0, 0, 0]);
                let body = [named(&body, old), named(&[], new)].concat();
                (RENAME2, self.node(from), body)
            }
            _ => return Ok(Vec::new()),
        };
        let reply = self.share.request(opcode, node, &body)?;
        match opcode {
            CREATE => {
                let node = u64::from_le_bytes(reply[..8].try_into().unwrap());
                self.open.push((node, reply[128..136].to_vec()));
                self.entry(Ok(reply))
            }
            MKDIR | LINK => self.entry(Ok(reply)),
            _ => Ok(Vec::new()),
        }
    }

    /// Looks up all files of the start. The guest knows afterwards only those that it knew before.
    fn scan(&mut self) -> Vec<u64> {
        let mut found = Vec::new();
        for folder in 0..FOLDERS {
            let folder = self.share.lookup(ROOT, &format!("folder{folder}"));
            let Ok(folder) = folder else { continue };
            for file in 0..FILES {
                let file = self.share.lookup(folder, &format!("file{file}"));
                found.extend(file);
            }
            found.push(folder);
        }
        for &node in &found {
            match self.nodes.iter_mut().find(|(known, _)| *known == node) {
                Some((_, lookups)) => *lookups += 1,
                None => {
                    self.nodes.push((node, 1));
                    self.forget(self.nodes.len() - 1);
                }
            }
        }
        vec![found.len() as u64]
    }

    fn open(&mut self, node: u64) -> Result<(), i32> {
        let handle = self.share.request(OPEN, node, &[0; 8])?;
        self.open.push((node, handle[..8].to_vec()));
        Ok(())
    }

    /// Makes the request. Returns what the guest sees of its reply.
    fn apply(&mut self, step: &Step) -> Result<Vec<u64>, i32> {
        match *step {
            Step::Lookup(folder, name) => {
                let name = format!("{}\0", name_of(name));
                let reply = self
                    .share
                    .request(LOOKUP, self.node(folder), name.as_bytes());
                return self.entry(reply);
            }
            Step::Getattr(node) => {
                let reply = self.share.request(GETATTR, self.node(node), &[0; 16])?;
                let mode = u32::from_le_bytes(reply[76..80].try_into().unwrap());
                let links = u32::from_le_bytes(reply[80..84].try_into().unwrap());
                let is_folder = mode & 0o170_000 == 0o040_000;
                return Ok(vec![mode.into(), if is_folder { 0 } else { links.into() }]);
            }
            Step::Read(node) => {
                let node = self.node(node);
                self.open(node)?;
                let (_, handle) = &self.open[self.open.len() - 1];
                let body = [&handle[..], &[0; 8], &[100, 0, 0, 0], &[0; 20]].concat();
                let read = self.share.request(READ, node, &body);
                self.close(self.open.len() - 1);
                return Ok(read?.into_iter().map(u64::from).collect());
            }
            Step::Open(node) if self.open.len() < 20 => self.open(self.node(node))?,
            Step::Close(n) => self.close(n),
            Step::Forget(n) => self.forget(n % self.nodes.len()),
            Step::Scan => return Ok(self.scan()),
            _ => return self.change(step),
        }
        Ok(Vec::new())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn evicted_files_are_the_same_to_the_guest(steps in prop::collection::vec(step(), 1..120)) {
        let (mut evicting, mut keeping) = (ShareGuest::new(0), ShareGuest::new(1 << 16));
        for step in &steps {
            let (one, other) = (evicting.apply(step), keeping.apply(step));
            prop_assert_eq!(one, other, "{:?}", step);
        }
        let held = evicting.share.server.nodes.descriptors();
        prop_assert!(held <= 64, "{held}");
    }
}
