//! Builds images field by field, from the definitions of their formats.

/// A PT_LOAD segment.
pub(super) struct Load {
    pub(super) virtual_: u64,
    pub(super) physical: u64,
    pub(super) data: Vec<u8>,
    pub(super) memory_size: u64,
}

impl Load {
    /// A segment of `data` at `address`, without BSS.
    pub(super) fn at(address: u64, data: &[u8]) -> Self {
        Self {
            virtual_: address,
            physical: address,
            data: data.to_vec(),
            memory_size: data.len() as u64,
        }
    }
}

/// An ELF executable to build.
pub(super) struct ElfImage {
    pub(super) bits64: bool,
    pub(super) kind: u16,
    pub(super) machine: u16,
    pub(super) entry: u64,
    pub(super) loads: Vec<Load>,
    /// Other program headers: type and content.
    pub(super) others: Vec<(u32, Vec<u8>)>,
}

impl ElfImage {
    /// A static executable of one segment, entered at its start.
    pub(super) fn new(bits64: bool, address: u64, data: &[u8]) -> Self {
        Self {
            bits64,
            kind: 2,
            machine: if bits64 { 62 } else { 3 },
            entry: address,
            loads: vec![Load::at(address, data)],
            others: vec![],
        }
    }

    /// Like [`Self::new`], with a PVH note that names the entry.
    pub(super) fn pvh(bits64: bool, address: u64, data: &[u8]) -> Self {
        let mut image = Self::new(bits64, address, data);
        let entry = u32::try_from(address).unwrap();
        image
            .others
            .push((4, note(b"Xen\0", 18, &entry.to_le_bytes())));
        image
    }

    /// The file: header, program headers, contents.
    pub(super) fn build(&self) -> Vec<u8> {
        let (header_size, program_size) = if self.bits64 { (64, 56) } else { (52, 32) };
        let count = self.loads.len() + self.others.len();
        let mut file = self.header(header_size, program_size, count);
        let mut contents: Vec<u8> = Vec::new();
        let start = header_size + program_size * count;
        let loads = self.loads.iter().map(|load| {
            (
                1,
                load.virtual_,
                load.physical,
                &load.data,
                load.memory_size,
            )
        });
        let others = self
            .others
            .iter()
            .map(|(kind, data)| (*kind, 0, 0, data, data.len() as u64));
        for (kind, virtual_, physical, data, memory_size) in loads.chain(others) {
            let at = (start + contents.len()) as u64;
            let fields = [at, virtual_, physical, data.len() as u64, memory_size];
            self.program(&mut file, kind, fields);
            contents.extend(data);
        }
        file.extend(contents);
        file
    }

    fn header(&self, header_size: usize, program_size: usize, count: usize) -> Vec<u8> {
        let mut file = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file[4] += u8::from(self.bits64);
        file.extend(self.kind.to_le_bytes());
        file.extend(self.machine.to_le_bytes());
        file.extend(1_u32.to_le_bytes());
        self.word(&mut file, self.entry);
        self.word(&mut file, header_size as u64);
        self.word(&mut file, 0);
        file.extend(0_u32.to_le_bytes());
        for half in [header_size, program_size, count, 0, 0, 0] {
            file.extend(u16::try_from(half).unwrap().to_le_bytes());
        }
        file
    }

    /// A program header; the fields are offset, virtual and physical address, file and memory size.
    fn program(&self, file: &mut Vec<u8>, kind: u32, fields: [u64; 5]) {
        file.extend(kind.to_le_bytes());
        if self.bits64 {
            file.extend(7_u32.to_le_bytes());
        }
        fields.into_iter().for_each(|field| self.word(file, field));
        if !self.bits64 {
            file.extend(7_u32.to_le_bytes());
        }
        self.word(file, 4);
    }

    fn word(&self, file: &mut Vec<u8>, value: u64) {
        let size = if self.bits64 { 8 } else { 4 };
        file.extend(&value.to_le_bytes()[..size]);
    }
}

/// An ELF note; name and content are multiples of four bytes long.
pub(super) fn note(name: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
    let mut note = Vec::new();
    for word in [
        u32::try_from(name.len()).unwrap(),
        u32::try_from(content.len()).unwrap(),
        kind,
    ] {
        note.extend(word.to_le_bytes());
    }
    note.extend(name);
    note.extend(content);
    note
}

/// A multiboot header: flags, and the fields after the checksum.
pub(super) fn multiboot_header(flags: u32, fields: &[u32]) -> Vec<u8> {
    let magic = 0x1bad_b002_u32;
    let sum = 0_u32.wrapping_sub(magic).wrapping_sub(flags);
    let words = [&[magic, flags, sum], fields].concat();
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A multiboot 2 header with tags, each a type, flags and words, and an end tag.
pub(super) fn multiboot2_header(tags: &[(u16, u16, &[u32])]) -> Vec<u8> {
    let mut body = Vec::new();
    for &(kind, flags, words) in tags.iter().chain(&[(0, 0, &[][..])]) {
        let size = u32::try_from(8 + 4 * words.len()).unwrap();
        body.extend(kind.to_le_bytes());
        body.extend(flags.to_le_bytes());
        body.extend(size.to_le_bytes());
        body.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        body.resize(body.len().next_multiple_of(8), 0);
    }
    let (magic, length) = (0xe852_50d6_u32, u32::try_from(16 + body.len()).unwrap());
    let sum = 0_u32.wrapping_sub(magic).wrapping_sub(length);
    let words = [magic, 0, length, sum];
    let mut header: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    header.extend(body);
    header
}

/// An image whose multiboot header, at offset 0x10, has the addresses: loaded at 0x100000, entered
/// after the header, with a BSS of 0x1000.
pub(super) fn multiboot_by_addresses() -> Vec<u8> {
    let mut image = vec![0xcc; 0x10];
    image.extend(multiboot_header(
        0x1_0003,
        &[0x10_0010, 0x10_0000, 0x10_0080, 0x10_1080, 0x10_0030],
    ));
    image.resize(0x100, 0x90);
    image
}

/// A bzImage: two setup sectors and 0x1000 bytes of kernel, version 2.15, relocatable, at 16 MiB.
pub(super) fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 0x600];
    image.extend((0..0x1000_u32).map(|i| i.to_le_bytes()[0]));
    let mut set = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    set(0x1f1, &[2]);
    set(0x1f4, &0x100_u32.to_le_bytes());
    set(0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    set(0x202, b"HdrS");
    set(0x206, &0x20f_u16.to_le_bytes());
    set(0x211, &[0x81]);
    set(0x22c, &0x7fff_ffff_u32.to_le_bytes());
    set(0x230, &0x20_0000_u32.to_le_bytes());
    set(0x234, &[1, 21]);
    set(0x236, &0x7f_u16.to_le_bytes());
    set(0x238, &0x7ff_u32.to_le_bytes());
    set(0x250, &0x5555_5555_u64.to_le_bytes());
    set(0x258, &0x100_0000_u64.to_le_bytes());
    set(0x260, &0x20_0000_u32.to_le_bytes());
    image
}
