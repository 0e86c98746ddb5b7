//! Where a kernel's structures have the members that name what runs.

use super::btf::BtfTypes;

/// Byte offsets of members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KernelLayout {
    pub(super) task: TaskLayout,
    pub(super) vma: VmaLayout,
    pub(super) file: FileLayout,
    /// Of `struct pcpu_hot`, in kernels that have one: the task that runs.
    pub(super) hot_current: Option<u64>,
    /// Where the pages of files are; `None` if this kernel keeps them otherwise.
    pub(super) cache: Option<PageCacheLayout>,
    /// Of modules; `None` if this kernel keeps them otherwise.
    pub(super) module: Option<ModuleLayout>,
}

/// Of `struct task_struct`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TaskLayout {
    pub(super) comm: u64,
    pub(super) pid: u64,
    pub(super) tgid: u64,
    pub(super) parent: u64,
}

/// Of `struct vm_area_struct`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct VmaLayout {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) page_offset: u64,
    pub(super) flags: u64,
    pub(super) file: u64,
}

/// Of `struct file` and what it refers to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FileLayout {
    pub(super) dentry: u64,
    pub(super) vfsmount: u64,
    pub(super) mapping: u64,
    pub(super) dentry_parent: u64,
    pub(super) dentry_name: u64,
    pub(super) dentry_name_len: u64,
    /// From `struct mount` to the `struct vfsmount` in it.
    pub(super) mount_vfsmount: u64,
    pub(super) mount_parent: u64,
    pub(super) mount_point: u64,
    pub(super) vfsmount_root: u64,
}

/// Of `struct address_space`, the nodes of its pages, and `struct page`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PageCacheLayout {
    pub(super) pages_head: u64,
    pub(super) host: u64,
    pub(super) inode_size: u64,
    pub(super) node_shift: u64,
    pub(super) node_entries: u64,
    pub(super) page_index: u64,
    pub(super) page_size: u64,
}

/// Of `struct module` and its `struct mod_kallsyms`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ModuleLayout {
    pub(super) name: u64,
    pub(super) code: u64,
    pub(super) code_size: u64,
    pub(super) symbols: u64,
    pub(super) symbol_table: u64,
    pub(super) symbol_count: u64,
    pub(super) names: u64,
}

impl ModuleLayout {
    fn new(types: &BtfTypes) -> Option<Self> {
        let module = |path| types.offset("module", path);
        let symbols = |path| types.offset("mod_kallsyms", path);
        // Since Linux 6.4 the first of an array is the code.
        let memory = |path| Some(module("mem")? + types.offset("module_memory", path)?);
        Some(Self {
            name: module("name")?,
            code: module("core_layout.base").or_else(|| memory("base"))?,
            code_size: module("core_layout.text_size").or_else(|| memory("size"))?,
            symbols: module("kallsyms")?,
            symbol_table: symbols("symtab")?,
            symbol_count: symbols("num_symtab")?,
            names: symbols("strtab")?,
        })
    }
}

impl KernelLayout {
    /// The layout by a kernel's types; `None` if these lack a member.
    pub(super) fn new(types: &BtfTypes) -> Option<Self> {
        let task = |path| types.offset("task_struct", path);
        let vma = |path| types.offset("vm_area_struct", path);
        let file = |path| types.offset("file", path);
        let dentry = |path| types.offset("dentry", path);
        let mount = |path| types.offset("mount", path);
        Some(Self {
            task: TaskLayout {
                comm: task("comm")?,
                pid: task("pid")?,
                tgid: task("tgid")?,
                parent: task("real_parent")?,
            },
            vma: VmaLayout {
                start: vma("vm_start")?,
                end: vma("vm_end")?,
                page_offset: vma("vm_pgoff")?,
                flags: vma("vm_flags")?,
                file: vma("vm_file")?,
            },
            file: FileLayout {
                dentry: file("f_path.dentry")?,
                vfsmount: file("f_path.mnt")?,
                mapping: file("f_mapping")?,
                dentry_parent: dentry("d_parent")?,
                dentry_name: dentry("d_name.name")?,
                dentry_name_len: dentry("d_name.len")?,
                mount_vfsmount: mount("mnt")?,
                mount_parent: mount("mnt_parent")?,
                mount_point: mount("mnt_mountpoint")?,
                vfsmount_root: types.offset("vfsmount", "mnt_root")?,
            },
            hot_current: types.offset("pcpu_hot", "current_task"),
            cache: PageCacheLayout::new(types),
            module: ModuleLayout::new(types),
        })
    }
}

impl PageCacheLayout {
    fn new(types: &BtfTypes) -> Option<Self> {
        Some(Self {
            pages_head: types.offset("address_space", "i_pages.xa_head")?,
            host: types.offset("address_space", "host")?,
            inode_size: types.offset("inode", "i_size")?,
            node_shift: types.offset("xa_node", "shift")?,
            node_entries: types.offset("xa_node", "slots")?,
            page_index: types
                .offset("page", "index")
                .or_else(|| types.offset("page", "__folio_index"))?,
            page_size: types.size("page").filter(|&size| size != 0)?,
        })
    }
}
