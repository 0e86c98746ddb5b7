//! The tasks and mapped files of a Linux kernel, read from guest memory. A guest can write anything
//! there: every walk is bounded, and what cannot be read is `None` and not a guess.

use hindsight_cpu::state::seg;

use super::btf::{BTF_BYTES_MAX, BtfTypes};
use super::kallsyms::KernelSymbol;
use super::layout::KernelLayout;
use super::search::find_symbols;
use crate::memory::LinearMemory;

/// The highest number that Linux gives a thread, and one more.
const PID_END: u32 = 1 << 22;
/// Components of a path, and mounts on it.
const COMPONENTS_MAX: usize = 256;
/// Bytes of a path: PATH_MAX of Linux.
const PATH_MAX: usize = 4096;
/// Bytes of one component.
const NAME_MAX: u32 = 255;
/// Bytes of a file that are read from the page cache.
const FILE_MAX: u64 = 64 << 20;
/// Entries of a node of an XArray.
const NODE_ENTRIES: u64 = 64;
const PAGE: u64 = 4096;
/// VM_EXEC of `vm_flags`.
const VM_EXEC: u64 = 4;

/// A thread, as its `struct task_struct` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelTask {
    /// The thread's number; 0 for the idle threads.
    pub pid: u32,
    /// The number of its process.
    pub tgid: u32,
    /// The thread's name, filled up with zeros.
    pub comm: [u8; 16],
}

/// A part of a process's memory that is code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedCode {
    /// Linear address of the first byte.
    pub start: u64,
    /// Number of bytes.
    pub len: u64,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// The address of the kernel's `struct file`; `None` for memory without a file.
    pub file: Option<u64>,
}

/// A kernel whose symbols and types are known.
#[derive(Debug)]
pub struct LinuxKernel {
    symbols: Vec<KernelSymbol>,
    layout: KernelLayout,
    variables: KernelVariables,
}

/// The addresses of variables that are read often.
#[derive(Debug)]
struct KernelVariables {
    /// The running task, relative to the base of a processor's variables.
    current: Option<u64>,
    /// The pointers to the direct map and to the array of `struct page`.
    direct_map: Option<u64>,
    page_map: Option<u64>,
}

impl KernelVariables {
    fn new(symbols: &[KernelSymbol], layout: &KernelLayout) -> Self {
        let hot = address(symbols, "pcpu_hot").zip(layout.hot_current);
        let current = match hot {
            Some((hot, offset)) => hot.checked_add(offset),
            None => address(symbols, "current_task"),
        };
        Self {
            current,
            direct_map: address(symbols, "page_offset_base"),
            page_map: address(symbols, "vmemmap_base"),
        }
    }
}

/// The address of the symbol with this name.
fn address(symbols: &[KernelSymbol], name: &str) -> Option<u64> {
    let found = symbols.iter().find(|symbol| symbol.name == name.as_bytes());
    found.map(|symbol| symbol.address)
}

fn read_array<const N: usize>(linear: &LinearMemory<'_>, at: u64) -> Option<[u8; N]> {
    linear.read(at, N).try_into().ok()
}

pub(super) fn read_u32(linear: &LinearMemory<'_>, at: u64) -> Option<u32> {
    read_array(linear, at).map(u32::from_le_bytes)
}

pub(super) fn read_u64(linear: &LinearMemory<'_>, at: u64) -> Option<u64> {
    read_array(linear, at).map(u64::from_le_bytes)
}

/// Reads a pointer to the kernel's half of the addresses.
pub(super) fn read_pointer(linear: &LinearMemory<'_>, at: u64) -> Option<u64> {
    read_u64(linear, at).filter(|&pointer| pointer >> 47 == 0x1_ffff)
}

impl LinuxKernel {
    /// The kernel that is mapped; `None` if there is none, or it lacks symbols or types.
    ///
    /// The search ends early, without a result, when `cancelled` returns true.
    pub fn find(linear: &LinearMemory<'_>, cancelled: &dyn Fn() -> bool) -> Option<Self> {
        let symbols = find_symbols(linear, cancelled)?;
        let start = address(&symbols, "__start_BTF")?;
        let len = address(&symbols, "__stop_BTF")?.checked_sub(start)?;
        let len = usize::try_from(len)
            .ok()
            .filter(|&len| len <= BTF_BYTES_MAX)?;
        let types = BtfTypes::parse(linear.read(start, len))?;
        Self::with_types(symbols, &types)
    }

    /// A kernel with these symbols and types; `None` if the types lack a member that is needed.
    pub fn with_types(symbols: Vec<KernelSymbol>, types: &BtfTypes) -> Option<Self> {
        let layout = KernelLayout::new(types)?;
        Some(Self::from_parts(symbols, layout))
    }

    pub(super) fn from_parts(symbols: Vec<KernelSymbol>, layout: KernelLayout) -> Self {
        Self {
            variables: KernelVariables::new(&symbols, &layout),
            symbols,
            layout,
        }
    }

    pub(super) const fn layout(&self) -> &KernelLayout {
        &self.layout
    }

    /// The kernel's symbols.
    pub fn symbols(&self) -> &[KernelSymbol] {
        &self.symbols
    }

    /// The address of the symbol with this name.
    pub fn address(&self, name: &str) -> Option<u64> {
        address(&self.symbols, name)
    }

    /// The task whose `struct task_struct` is at `at`.
    pub fn task(&self, linear: &LinearMemory<'_>, at: u64) -> Option<KernelTask> {
        let layout = &self.layout.task;
        let number = |offset| read_u32(linear, at.wrapping_add(offset)).filter(|&n| n < PID_END);
        let comm: [u8; 16] = read_array(linear, at.wrapping_add(layout.comm))?;
        comm.contains(&0).then_some(KernelTask {
            pid: number(layout.pid)?,
            tgid: number(layout.tgid)?,
            comm,
        })
    }

    /// The `struct task_struct` of the task that runs on the vCPU, which is in the kernel.
    pub fn current(&self, linear: &LinearMemory<'_>) -> Option<u64> {
        let gs = linear.state.seg[seg::GS].base;
        read_pointer(linear, gs.wrapping_add(self.variables.current?))
    }

    /// The task that began the task at `at`.
    pub fn parent(&self, linear: &LinearMemory<'_>, at: u64) -> Option<KernelTask> {
        let parent = read_pointer(linear, at.wrapping_add(self.layout.task.parent))?;
        self.task(linear, parent)
    }

    /// The mapping whose `struct vm_area_struct` is at `at`; `None` if it is not code.
    pub fn code_mapping(&self, linear: &LinearMemory<'_>, at: u64) -> Option<MappedCode> {
        let layout = &self.layout.vma;
        let field = |offset| read_u64(linear, at.wrapping_add(offset));
        let (start, end) = (field(layout.start)?, field(layout.end)?);
        let is_code = field(layout.flags)? & VM_EXEC != 0;
        if !is_code || start >= end || end >> 47 != 0 || start % PAGE != 0 {
            return None;
        }
        let file = read_pointer(linear, at.wrapping_add(layout.file));
        let page = if file.is_some() {
            field(layout.page_offset)?
        } else {
            0
        };
        Some(MappedCode {
            start,
            len: end - start,
            offset: page.checked_mul(PAGE)?,
            file,
        })
    }

    /// The path of the file whose `struct file` is at `file`, from the root of all mounts.
    pub fn path(&self, linear: &LinearMemory<'_>, file: u64) -> Option<String> {
        let layout = &self.layout.file;
        let pointer = |at: u64, offset| read_pointer(linear, at.wrapping_add(offset));
        let mut dentry = pointer(file, layout.dentry)?;
        let mut mount = pointer(file, layout.vfsmount)?.wrapping_sub(layout.mount_vfsmount);
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut len = 0;
        for _ in 0..COMPONENTS_MAX {
            let root = pointer(mount, layout.mount_vfsmount + layout.vfsmount_root)?;
            if dentry == root {
                let parent = pointer(mount, layout.mount_parent)?;
                if parent == mount {
                    return Some(joined(&names));
                }
                dentry = pointer(mount, layout.mount_point)?;
                mount = parent;
                continue;
            }
            let parent = pointer(dentry, layout.dentry_parent)?;
            let name_len = read_u32(linear, dentry.wrapping_add(layout.dentry_name_len))?;
            if name_len > NAME_MAX {
                return None;
            }
            let name = pointer(dentry, layout.dentry_name)?;
            let name = linear.read(name, usize::try_from(name_len).ok()?);
            len += name.len() + 1;
            if len > PATH_MAX || name.len() as u64 != u64::from(name_len) {
                return None;
            }
            names.push(name);
            if parent == dentry {
                // A file without a place in a directory, such as that of memfd_create().
                return Some(joined(&names));
            }
            dentry = parent;
        }
        None
    }

    /// A number that is the same for all `struct file` of one file.
    pub fn file_identity(&self, linear: &LinearMemory<'_>, file: u64) -> Option<u64> {
        read_pointer(linear, file.wrapping_add(self.layout.file.mapping))
    }

    /// The contents of a file, as far as they are in the page cache from the start on.
    ///
    /// Fewer bytes than the file has if a page is missing; `None` if the cache cannot be read.
    pub fn file_contents(&self, linear: &LinearMemory<'_>, file: u64) -> Option<Vec<u8>> {
        let (contents, _) = self.file_start(linear, file, FILE_MAX)?;
        Some(contents)
    }

    /// At most `max` bytes from the start of a file, as far as they are in the page cache, and the
    /// file's size in bytes.
    pub fn file_start(
        &self,
        linear: &LinearMemory<'_>,
        file: u64,
        max: u64,
    ) -> Option<(Vec<u8>, u64)> {
        let layout = self.layout.cache.as_ref()?;
        let pointer = |at: u64, offset| read_pointer(linear, at.wrapping_add(offset));
        let direct_map = read_pointer(linear, self.variables.direct_map?)?;
        let page_map = read_pointer(linear, self.variables.page_map?)?;
        let mapping = pointer(file, self.layout.file.mapping)?;
        let inode = pointer(mapping, layout.host)?;
        let whole = read_u64(linear, inode.wrapping_add(layout.inode_size))?;
        let size = whole.min(max);
        let head = read_u64(linear, mapping.wrapping_add(layout.pages_head))?;
        let mut contents = Vec::new();
        for index in 0..size.div_ceil(PAGE) {
            let Some(page) = self.cached_page(linear, head, index) else {
                break;
            };
            let Some(number) = page.checked_sub(page_map).map(|at| at / layout.page_size) else {
                break;
            };
            let bytes = linear.read(direct_map.wrapping_add(number.wrapping_mul(PAGE)), 4096);
            if bytes.len() != 4096 {
                break;
            }
            contents.extend(bytes);
        }
        contents.truncate(usize::try_from(size).ok()?);
        Some((contents, whole))
    }

    /// The `struct page` of a page of a file, from the XArray with this head.
    fn cached_page(&self, linear: &LinearMemory<'_>, head: u64, index: u64) -> Option<u64> {
        let layout = self.layout.cache.as_ref()?;
        let (mut entry, mut shift, mut is_many) = (head, 64, false);
        // Nodes are marked by the two lowest bits.
        while entry & 3 == 2 && entry > 4096 {
            let node = entry - 2;
            let below = linear.read(node.wrapping_add(layout.node_shift), 1);
            let below = u64::from(*below.first()?);
            if below >= shift {
                return None;
            }
            if shift == 64 && index >> below >= NODE_ENTRIES {
                return None;
            }
            shift = below;
            let entry_at =
                |n: u64| read_u64(linear, node.wrapping_add(layout.node_entries + 8 * n));
            entry = entry_at(index >> shift & (NODE_ENTRIES - 1))?;
            if entry & 3 == 2 && entry < 4096 {
                // A sibling: the entry is elsewhere in the node.
                entry = entry_at((entry >> 2) & (NODE_ENTRIES - 1))?;
                is_many = true;
            }
            is_many |= shift != 0;
        }
        // The low bits mark values that are no pages.
        let page = (entry != 0 && entry & 3 == 0).then_some(entry)?;
        // An entry for several pages has the first of them.
        let first = read_u64(linear, page.wrapping_add(layout.page_index))?;
        let pages_after = index
            .checked_sub(first)
            .filter(|&n| n == 0 || is_many && n < 512)?;
        page.checked_add(pages_after.checked_mul(layout.page_size)?)
    }
}

/// A path of components, the last one first.
fn joined(names: &[Vec<u8>]) -> String {
    let mut path = String::new();
    for name in names.iter().rev() {
        path.push('/');
        path.push_str(&String::from_utf8_lossy(name));
    }
    if path.is_empty() {
        "/".to_owned()
    } else {
        path
    }
}
