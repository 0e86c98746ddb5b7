//! A batch of system cases: code, tables, and the kernel that it needs.

/// First selector of random descriptors in the GDT.
pub(super) const RANDOM: u16 = 0x100;
/// First vector of random gates.
pub(super) const GATES: u8 = 0x90;
/// How many random gates there are.
pub(super) const GATE_COUNT: u8 = 32;
/// Vector that ends a slot.
pub(super) const RESET: u8 = 0x81;
/// Linear address of the window: pages whose entries are random.
pub(super) const WINDOW: u32 = 0xb_0000;
/// How many pages the window has.
pub(super) const WINDOW_PAGES: u32 = 16;

/// The kernel that a batch runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelMode {
    /// 64-bit mode.
    Long,
    /// Protected mode of 16 and 32 bits, and virtual-8086 mode.
    Protected,
}

/// Control registers at the start of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ControlRegisters {
    pub(super) cr0: u64,
    pub(super) cr3: u64,
    pub(super) cr4: u64,
}

/// One case.
#[derive(Clone, Debug)]
pub(super) struct SystemSlot {
    /// A description of the instruction.
    pub(super) text: String,
}

impl SystemSlot {
    /// The instruction without operands, or its bytes: the name under which it is counted.
    pub(super) fn code(&self) -> &str {
        match self.text.strip_prefix('[') {
            Some(bytes) => bytes.split(']').next().unwrap_or_default(),
            None => self.text.split_whitespace().next().unwrap_or_default(),
        }
    }
}

/// Code and tables of many cases.
#[derive(Debug)]
pub(super) struct SystemBatch {
    /// The cases.
    pub(super) slots: Vec<SystemSlot>,
    /// The code, from [`crate::layout::CODE`].
    pub(super) code: Vec<u8>,
    /// Random descriptors, from [`RANDOM`].
    pub(super) descriptors: Vec<u64>,
    /// Random gates, from [`GATES`].
    pub(super) gates: Vec<u64>,
    /// Page-table entries of the window.
    pub(super) entries: Vec<u64>,
    /// For each slot, the linear address at which the next one starts.
    pub(super) post: Vec<u32>,
    /// End of the results.
    pub(super) log_end: u32,
    /// The cases access the window.
    pub(super) uses_window: bool,
    /// The cases switch tasks.
    pub(super) switches_tasks: bool,
    /// The kernel that it runs under.
    pub(super) kernel: KernelMode,
    /// For [`KernelMode::Protected`]: what else to write to guest memory, by address.
    pub(super) patches: Vec<(usize, Vec<u8>)>,
    /// For [`KernelMode::Protected`]: the control registers at the start.
    pub(super) control: ControlRegisters,
}
