//! Guest memory that resembles the tasks, files and modules of a Linux kernel.

use hindsight_cpu::state::CpuState;
use hindsight_gdb::kernel::{BtfTypes, KernelSymbol, LinuxKernel};
use hindsight_gdb::memory::LinearMemory;

use crate::kernel::Ram;

/// Where all RAM is mapped.
const MAP: u64 = 0xffff_8880_0000_0000;
/// Bytes of RAM. The page tables are below [`STRUCTURES`].
const MEMORY: usize = 0x1_0000;
const STRUCTURES: usize = 0x3000;
/// The most bytes of a file that are read.
const FILE_MAX: usize = 64 << 20;

/// Bytes of a path, in which each byte may have been replaced by a character of three.
const PATH_MAX: usize = 3 * 4096;

/// A structure of the kernel: name, size, and the name, type and offset of its members. The types are
/// numbered from 1.
type Structure = (&'static str, u32, &'static [(&'static str, u32, u32)]);

/// The types of members that are structures: `path`, `qstr`, `xarray`. For others it does not matter.
const TYPES: [Structure; 16] = [
    ("path", 16, &[("mnt", 0, 0), ("dentry", 0, 8)]),
    ("qstr", 16, &[("name", 0, 0), ("len", 0, 8)]),
    ("xarray", 16, &[("xa_head", 0, 0)]),
    (
        "task_struct",
        32,
        &[
            ("comm", 0, 0),
            ("pid", 0, 16),
            ("tgid", 0, 20),
            ("real_parent", 0, 24),
        ],
    ),
    (
        "vm_area_struct",
        40,
        &[
            ("vm_start", 0, 0),
            ("vm_end", 0, 8),
            ("vm_flags", 0, 16),
            ("vm_pgoff", 0, 24),
            ("vm_file", 0, 32),
        ],
    ),
    ("file", 24, &[("f_path", 1, 0), ("f_mapping", 0, 16)]),
    ("dentry", 24, &[("d_parent", 0, 0), ("d_name", 2, 8)]),
    (
        "mount",
        64,
        &[
            ("mnt_parent", 0, 0),
            ("mnt_mountpoint", 0, 8),
            ("mnt", 0, 32),
        ],
    ),
    ("vfsmount", 16, &[("mnt_root", 0, 0)]),
    ("address_space", 24, &[("host", 0, 0), ("i_pages", 3, 8)]),
    ("inode", 16, &[("i_size", 0, 0)]),
    ("xa_node", 520, &[("shift", 0, 0), ("slots", 0, 8)]),
    ("page", 64, &[("index", 0, 8)]),
    (
        "module",
        128,
        &[("name", 0, 0), ("mem", 0, 0x40), ("kallsyms", 0, 0x50)],
    ),
    ("module_memory", 16, &[("base", 0, 0), ("size", 0, 8)]),
    (
        "mod_kallsyms",
        24,
        &[("symtab", 0, 0), ("num_symtab", 0, 8), ("strtab", 0, 16)],
    ),
];

/// [`TYPES`] as a kernel has them: a header of 24 bytes, the types, and their names.
fn types() -> Option<BtfTypes> {
    let mut names = vec![0];
    let mut add_name = |name: &str| {
        let at = u32::try_from(names.len()).unwrap_or(u32::MAX);
        names.extend(name.bytes());
        names.push(0);
        at
    };
    let mut types = Vec::new();
    for (name, size, members) in TYPES {
        let count = u32::try_from(members.len()).ok()?;
        types.extend([add_name(name), 4 << 24 | count, size]);
        for (name, of_type, offset) in members {
            types.extend([add_name(name), *of_type, 8 * offset]);
        }
    }
    let (len, names_len) = (
        4 * u32::try_from(types.len()).ok()?,
        u32::try_from(names.len()).ok()?,
    );
    let header = [0x1_eb9f, 24, 0, len, len, names_len];
    let words = header.into_iter().chain(types);
    let mut bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    bytes.extend(names);
    BtfTypes::parse(bytes)
}

/// Reads `bytes` as each of the structures that the process tracker reads, at several addresses.
pub fn check(bytes: &[u8]) {
    let symbol = |address, name: &str| KernelSymbol {
        address,
        kind: b'D',
        name: name.as_bytes().to_vec(),
    };
    let symbols = vec![
        symbol(MAP + 0x3000, "page_offset_base"),
        symbol(MAP + 0x3008, "vmemmap_base"),
        symbol(0x10, "current_task"),
    ];
    let types = types().expect("the types are well-formed");
    let kernel = LinuxKernel::with_types(symbols, &types).expect("no member is missing");
    let mut ram = vec![0; MEMORY];
    ram[0x1000 + 8 * 273..][..8].copy_from_slice(&0x2003_u64.to_le_bytes());
    ram[0x2000..0x2008].copy_from_slice(&0x83_u64.to_le_bytes());
    let len = bytes.len().min(MEMORY - STRUCTURES);
    ram[STRUCTURES..][..len].copy_from_slice(&bytes[..len]);
    let memory = Ram::new(ram);
    let mut state = CpuState::reset();
    (state.cr0, state.cr3, state.cr4) = (0x8000_0011, 0x1000, 0x20);
    state.efer = 0x500;
    let linear = LinearMemory {
        memory: &memory,
        state: &state,
    };
    let _ = kernel.current(&linear);
    for at in (MAP + 0x3000..MAP + 0x4000).step_by(0x100) {
        let _ = (kernel.task(&linear, at), kernel.parent(&linear, at));
        let _ = kernel.code_mapping(&linear, at);
        let path = kernel.path(&linear, at);
        assert!(path.is_none_or(|path| path.len() <= PATH_MAX));
        let _ = kernel.file_identity(&linear, at);
        let contents = kernel.file_contents(&linear, at);
        assert!(contents.is_none_or(|contents| contents.len() <= FILE_MAX));
        let _ = kernel.file_start(&linear, at, 64);
        if let Some(module) = kernel.module(&linear, at) {
            let inside = |address: u64| address.wrapping_sub(module.start) < module.len;
            assert!(module.functions.iter().all(|f| inside(f.address)));
        }
    }
}
