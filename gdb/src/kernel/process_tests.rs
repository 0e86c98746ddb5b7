//! Structures of a kernel that are made here, right and wrong ones.

use hindsight_cpu::state::CpuState;

use super::kallsyms::KernelSymbol;
use super::layout::{
    FileLayout, KernelLayout, ModuleLayout, PageCacheLayout, TaskLayout, VmaLayout,
};
use super::processes::LinuxKernel;
use crate::memory::LinearMemory;
use crate::test_ram::FlatRam;

/// Where all RAM is mapped.
const MAP: u64 = 0xffff_8880_0000_0000;
/// Where the kernel has its `struct page`: page N at 64 * N.
const PAGES: u64 = MAP + 0x4_0000;

/// RAM with page tables that map it at [`MAP`].
fn ram() -> (FlatRam, CpuState) {
    let mut ram = FlatRam::new(vec![0; 0x10_0000]);
    ram.write(0x1000 + 8 * 273, &0x2003_u64.to_le_bytes());
    ram.write(0x2000, &0x83_u64.to_le_bytes());
    let mut state = CpuState::reset();
    (state.cr0, state.cr3, state.cr4) = (0x8000_0011, 0x1000, 0x20);
    state.efer = 0x500;
    (ram, state)
}

fn kernel() -> LinuxKernel {
    let file = FileLayout {
        vfsmount: 0,
        dentry: 8,
        mapping: 16,
        dentry_parent: 0,
        dentry_name: 8,
        dentry_name_len: 16,
        mount_vfsmount: 32,
        mount_parent: 0,
        mount_point: 8,
        vfsmount_root: 0,
    };
    let layout = KernelLayout {
        task: TaskLayout {
            comm: 0,
            pid: 16,
            tgid: 20,
            parent: 24,
        },
        vma: VmaLayout {
            start: 0,
            end: 8,
            flags: 16,
            page_offset: 24,
            file: 32,
        },
        file,
        hot_current: None,
        cache: Some(PageCacheLayout {
            host: 0,
            pages_head: 8,
            inode_size: 0,
            node_shift: 0,
            node_entries: 8,
            page_index: 8,
            page_size: 64,
        }),
        module: Some(ModuleLayout {
            name: 0,
            code: 0x40,
            code_size: 0x48,
            symbols: 0x50,
            symbol_table: 0,
            symbol_count: 8,
            names: 16,
        }),
    };
    let symbol = |address, name: &str| KernelSymbol {
        address,
        kind: b'D',
        name: name.as_bytes().to_vec(),
    };
    let symbols = vec![
        symbol(MAP + 0x100, "page_offset_base"),
        symbol(MAP + 0x108, "vmemmap_base"),
    ];
    LinuxKernel::from_parts(symbols, layout)
}

fn put(ram: &mut FlatRam, at: usize, words: &[u64]) {
    for (n, word) in words.iter().enumerate() {
        ram.write(at + 8 * n, &word.to_le_bytes());
    }
}

/// A dentry with a name at `at`.
fn dentry(ram: &mut FlatRam, at: u64, parent: u64, name: &str) -> u64 {
    let offset = usize::try_from(at).unwrap();
    put(ram, offset, &[parent, MAP + at + 64, name.len() as u64]);
    ram.write(offset + 64, name.as_bytes());
    MAP + at
}

#[test]
fn task_with_impossible_numbers_is_not_known() {
    let (mut ram, state) = ram();
    ram.write(0x3000, b"worker\0\0\0\0\0\0\0\0\0\0");
    put(&mut ram, 0x3010, &[0x7_0000_0009]);
    put(&mut ram, 0x3110, &[0x7_0040_0000]);
    ram.write(0x3200, b"a name without 0");
    let linear = LinearMemory {
        memory: &ram,
        state: &state,
    };
    let task = kernel().task(&linear, MAP + 0x3000).unwrap();
    assert_eq!(
        (task.pid, task.tgid, &task.comm[..7]),
        (9, 7, &b"worker\0"[..])
    );
    for at in [MAP + 0x3100, MAP + 0x3200, 0, u64::MAX, MAP + 0xf_fff8] {
        assert_eq!(kernel().task(&linear, at), None, "{at:#x}");
    }
}

#[test]
fn mapping_must_be_code_of_a_process() {
    let (mut ram, state) = ram();
    let file = MAP + 0x5000;
    put(&mut ram, 0x3000, &[0x40_0000, 0x40_2000, 4, 3, file]);
    put(&mut ram, 0x3100, &[0x40_0000, 0x40_2000, 3, 3, file]);
    put(&mut ram, 0x3200, &[0x40_2000, 0x40_0000, 4, 3, file]);
    put(&mut ram, 0x3300, &[MAP, MAP + 0x2000, 4, 3, file]);
    put(&mut ram, 0x3400, &[0x40_0000, 0x40_2000, 4, u64::MAX, file]);
    let linear = LinearMemory {
        memory: &ram,
        state: &state,
    };
    let mapping = kernel().code_mapping(&linear, MAP + 0x3000).unwrap();
    assert_eq!((mapping.start, mapping.len), (0x40_0000, 0x2000));
    assert_eq!((mapping.offset, mapping.file), (0x3000, Some(file)));
    for at in [0x3100, 0x3200, 0x3300, 0x3400] {
        assert_eq!(kernel().code_mapping(&linear, MAP + at), None, "{at:#x}");
    }
}

#[test]
fn path_goes_through_mounts_and_ends() {
    let (mut ram, state) = ram();
    let root = dentry(&mut ram, 0x3000, MAP + 0x3000, "/");
    let mnt = dentry(&mut ram, 0x3100, root, "mnt");
    let inner_root = dentry(&mut ram, 0x3200, MAP + 0x3200, "/");
    let bin = dentry(&mut ram, 0x3300, inner_root, "bin");
    let program = dentry(&mut ram, 0x3400, bin, "program");
    let looping = dentry(&mut ram, 0x3500, MAP + 0x3600, "a");
    dentry(&mut ram, 0x3600, looping, "b");
    let long = dentry(&mut ram, 0x3700, root, "x");
    put(&mut ram, 0x3710, &[0xffff]);
    // Mounts: parent, mount point, and the root at 32.
    let (outer, inner) = (MAP + 0x4000, MAP + 0x4100);
    put(&mut ram, 0x4000, &[outer, root, 0, 0, root]);
    put(&mut ram, 0x4100, &[outer, mnt, 0, 0, inner_root]);
    put(&mut ram, 0x5000, &[inner + 32, program]);
    put(&mut ram, 0x5100, &[outer + 32, looping]);
    put(&mut ram, 0x5200, &[outer + 32, long]);
    put(&mut ram, 0x5300, &[outer + 32, root]);
    let linear = LinearMemory {
        memory: &ram,
        state: &state,
    };
    let path = |at: u64| kernel().path(&linear, MAP + at);
    assert_eq!(path(0x5000).as_deref(), Some("/mnt/bin/program"));
    assert_eq!(path(0x5300).as_deref(), Some("/"));
    assert_eq!(path(0x5100), None, "a directory that contains itself");
    assert_eq!(path(0x5200), None, "a name that is too long");
    assert_eq!(path(0x9000), None);
}

#[test]
fn file_is_read_from_the_page_cache_up_to_a_page_that_is_missing() {
    let (mut ram, state) = ram();
    put(&mut ram, 0x100, &[MAP, PAGES]);
    // The inode has its size, the mapping its inode and the node of the pages.
    put(&mut ram, 0x3000, &[0x2801]);
    put(&mut ram, 0x3100, &[MAP + 0x3000, MAP + 0x3200 + 2]);
    put(&mut ram, 0x3210, &[0]);
    let page = |number: u64| PAGES + 64 * number;
    put(&mut ram, 0x3208, &[page(0x10), page(0x12), 0]);
    put(&mut ram, 0x4_0000 + 64 * 0x10 + 8, &[0]);
    put(&mut ram, 0x4_0000 + 64 * 0x12 + 8, &[1]);
    ram.write(0x1_0000, b"first");
    ram.write(0x1_2000, b"second");
    put(&mut ram, 0x5010, &[MAP + 0x3100]);
    let contents = |ram: &FlatRam| {
        let linear = LinearMemory {
            memory: ram,
            state: &state,
        };
        kernel().file_contents(&linear, MAP + 0x5000)
    };
    let bytes = contents(&ram).unwrap();
    assert_eq!(bytes.len(), 0x2000);
    assert!(bytes.starts_with(b"first") && bytes[0x1000..].starts_with(b"second"));
    let linear = LinearMemory {
        memory: &ram,
        state: &state,
    };
    let start = kernel().file_start(&linear, MAP + 0x5000, 5);
    assert_eq!(start, Some((b"first".to_vec(), 0x2801)));
    // A node that contains itself, and a page of another part of the file.
    put(&mut ram, 0x3208, &[MAP + 0x3200 + 2, page(0x12)]);
    assert_eq!(contents(&ram).unwrap(), []);
    put(&mut ram, 0x3208, &[page(0x12)]);
    assert_eq!(contents(&ram).unwrap(), []);
}

#[test]
fn module_has_the_functions_in_its_code() {
    let (mut ram, state) = ram();
    let code = 0xffff_ffff_c000_0000_u64;
    ram.write(0x3000, b"overlay\0");
    put(&mut ram, 0x3040, &[code, 0x1000, MAP + 0x3100]);
    put(&mut ram, 0x3100, &[MAP + 0x3200, 5, MAP + 0x3400]);
    // Name and type; address and size.
    let symbols = [
        [0x2_0000_0000, code, 0x10],
        [0x2_0000_0001, code + 0x10, 0x20],
        [0x1_0000_0001, code + 0x30, 0x20],
        [0x2_0000_0001, code + 0x1000, 0x20],
        [0x2_0000_0006, code + 0x40, 0x20],
    ];
    for (n, symbol) in symbols.iter().enumerate() {
        put(&mut ram, 0x3200 + 24 * n, symbol);
    }
    ram.write(0x3400, b"\0open\0close\0");
    let module = |ram: &FlatRam| {
        let linear = LinearMemory {
            memory: ram,
            state: &state,
        };
        kernel().module(&linear, MAP + 0x3000)
    };
    let found = module(&ram).unwrap();
    assert_eq!(
        (found.name.as_str(), found.start, found.len),
        ("overlay", code, 0x1000)
    );
    let names: Vec<_> = found
        .functions
        .iter()
        .map(|f| (f.address - code, f.name.as_str()))
        .collect();
    assert_eq!(
        names,
        [(0x10, "open"), (0x40, "close")],
        "a name is not empty"
    );
    // A megabyte that would wrap around the end of the addresses, with a function behind it.
    put(&mut ram, 0x3040, &[0xffff_ffff_fff0_0000, 0x20_0000]);
    put(&mut ram, 0x3200, &[0x2_0000_0001, 0x10, 0x20]);
    assert_eq!(module(&ram), None, "code that wraps around");
    put(&mut ram, 0x3040, &[code, 0x1000]);
    put(&mut ram, 0x3108, &[u64::MAX]);
    assert_eq!(module(&ram), None, "too many symbols");
    put(&mut ram, 0x3108, &[5]);
    ram.write(0x3000, &[b'x'; 56]);
    assert_eq!(module(&ram), None, "a name without an end");
    ram.write(0x3000, &[0]);
    assert_eq!(module(&ram), None, "a name of no bytes");
}
