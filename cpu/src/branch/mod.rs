//! Branch recording: IA32_DEBUGCTL, the LBR stack, the last exception record, and branch tracing.
//!
//! SDM Vol. 3B, "Last Branch, Interrupt, and Exception Recording". An engine asks
//! [`BranchUnit::observe`] what to report, and passes each taken branch, interrupt and exception to
//! [`BranchUnit::record`], in order. BTS records it stores itself, with [`bts::store`], because the
//! guest may read them at once.

pub mod bts;
mod lbr;
mod record_format;
mod unit;

pub use unit::{BranchState, BranchStateError, BranchUnit};

/// Kind of a change of the instruction flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum BranchClass {
    /// A taken Jcc, LOOPcc or JCXZ.
    Conditional,
    /// JMP rel.
    DirectJump,
    /// JMP reg or mem.
    IndirectJump,
    /// CALL rel.
    DirectCall,
    /// CALL rel to the next instruction, which reads RIP; call-stack mode ignores it.
    CallNext,
    /// CALL reg or mem.
    IndirectCall,
    /// Near RET.
    Return,
    /// Far JMP, CALL, RET; IRET, SYSCALL, SYSRET, SYSENTER, SYSEXIT; a task switch by these.
    Far,
    /// INT n, INT3, INTO, INT1.
    SoftwareInterrupt,
    /// Delivery of an exception other than #DB.
    Exception,
    /// Delivery of a #DB.
    Debug,
    /// Delivery of an external interrupt or NMI.
    Interrupt,
    /// A transactional abort; `to` is the fallback address.
    Abort,
    /// A conditional branch that was not taken; `to` is the next instruction.
    ///
    /// Reported only if [`Observe::not_taken`] is set, and never recorded.
    NotTaken,
}

impl BranchClass {
    /// All classes, in order.
    pub const ALL: [Self; 14] = [
        Self::Conditional,
        Self::DirectJump,
        Self::IndirectJump,
        Self::DirectCall,
        Self::CallNext,
        Self::IndirectCall,
        Self::Return,
        Self::Far,
        Self::SoftwareInterrupt,
        Self::Exception,
        Self::Debug,
        Self::Interrupt,
        Self::Abort,
        Self::NotTaken,
    ];

    /// The name of the class in branch trace messages and exported traces. Some classes share one.
    pub const fn short_name(self) -> &'static str {
        match self {
            Self::Conditional => "jcc",
            Self::DirectJump | Self::IndirectJump => "jmp",
            Self::DirectCall | Self::CallNext | Self::IndirectCall => "call",
            Self::Return => "ret",
            Self::Far => "far",
            Self::SoftwareInterrupt => "int",
            Self::Exception | Self::Debug => "exception",
            Self::Interrupt => "interrupt",
            Self::Abort => "abort",
            Self::NotTaken => "none",
        }
    }

    /// Whether the branch stays in its code segment.
    pub const fn is_near(self) -> bool {
        self.is_instruction() && !matches!(self, Self::Far | Self::SoftwareInterrupt)
    }

    /// Whether it is a branch instruction, and not the delivery of an event.
    pub const fn is_instruction(self) -> bool {
        !matches!(
            self,
            Self::Exception | Self::Debug | Self::Interrupt | Self::Abort
        )
    }
}

/// One taken branch, interrupt or exception.
///
/// The layout is fixed, so that an engine may fill it in a few stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Branch {
    /// RIP of the branch; for exceptions and interrupts, of the interrupted instruction.
    pub from: u64,
    /// RIP of the target.
    pub to: u64,
    /// Instructions retired up to and with the branch, modulo 2^32: the clock of CYC_CNT.
    pub at: u32,
    /// Kind of branch.
    pub class: BranchClass,
    /// Privilege level before the branch, 0 to 3.
    pub cpl: u8,
    /// Privilege level after the branch, 0 to 3.
    pub to_cpl: u8,
    /// The modelled predictor mispredicted it; engines leave this clear.
    pub mispredicted: bool,
}

impl Branch {
    /// Returns a predicted branch at CPL 0 of which no instruction is counted.
    #[must_use]
    pub const fn new(class: BranchClass, from: u64, to: u64) -> Self {
        Self {
            from,
            to,
            at: 0,
            class,
            cpl: 0,
            to_cpl: 0,
            mispredicted: false,
        }
    }
}

/// How branch trace store works now: IA32_DS_AREA and the BTS bits of IA32_DEBUGCTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BtsConfig {
    /// IA32_DS_AREA, a linear address.
    pub area: u64,
    /// IA32_DEBUGCTL.BTINT: the buffer interrupts at its threshold and does not wrap.
    pub interrupt: bool,
    /// IA32_DEBUGCTL.BTS_OFF_OS: branches at CPL 0 are not stored.
    pub off_os: bool,
    /// IA32_DEBUGCTL.BTS_OFF_USR: branches at CPL 1 to 3 are not stored.
    pub off_usr: bool,
}

impl BtsConfig {
    /// Whether a branch that starts at this privilege level is stored (rules BTS-13, BTS-14).
    pub const fn stores(&self, cpl: u8) -> bool {
        if cpl == 0 {
            !self.off_os
        } else {
            !self.off_usr
        }
    }
}

/// What an engine must report to the models, and do itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Observe {
    /// Report taken branches, interrupts and exceptions.
    pub branches: bool,
    /// Report conditional branches that are not taken as well.
    pub not_taken: bool,
    /// Report after this many branches, at the end of that instruction; 0: at any time.
    pub every: u32,
    /// Of successive near branches, report only this many of the newest, and the number of the others
    /// to [`BranchUnit::skip`]; 0: report all.
    pub newest: u32,
    /// Nobody needs more of near branches than how many there were of each class.
    pub counted: bool,
    /// Store branches in the BTS buffer.
    pub bts: Option<BtsConfig>,
    /// RFLAGS.TF traps after taken branches only: IA32_DEBUGCTL.BTF.
    pub step_on_branch: bool,
    /// Call [`BranchUnit::debug_exception`] before a #DB is delivered.
    pub debug_exceptions: bool,
    /// Debug conditions in transactions raise #DB if DR7.RTM is set too: IA32_DEBUGCTL.RTM.
    pub debugs_transactions: bool,
    /// Report writes to control registers, and accesses to MSRs that the engine holds itself.
    pub system_events: bool,
}

impl Observe {
    /// Report taken branches, interrupts and exceptions, and nothing else.
    pub const BRANCHES: Self = Self {
        branches: true,
        not_taken: false,
        every: 0,
        newest: 0,
        counted: false,
        bts: None,
        step_on_branch: false,
        debug_exceptions: false,
        debugs_transactions: false,
        system_events: false,
    };

    /// Whether the engine must detect taken branches at all.
    pub const fn needs_branches(&self) -> bool {
        self.branches || self.bts.is_some() || self.step_on_branch
    }
}
