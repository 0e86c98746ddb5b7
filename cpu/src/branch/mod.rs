//! Branch recording: IA32_DEBUGCTL, the LBR stack with its filter and call-stack mode, the last
//! exception record, and what the branch trace store needs. SDM Vol. 3B, "Last Branch, Interrupt,
//! and Exception Recording".
//!
//! An engine asks [`BranchUnit::observe`] what to report, and gives each taken branch, interrupt
//! and exception to [`BranchUnit::record`], in order. BTS records it stores itself, with
//! [`bts::store`], because the guest may look at them at once.

pub mod bts;
mod lbr;
mod unit;

pub use unit::{BranchState, BranchStateError, BranchUnit};

/// The kind of a change of the instruction flow.
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
    /// CALL rel to the next instruction: a way to learn RIP, and no call as far as call stacks go.
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
    /// A transaction was aborted; `to` is where it goes on.
    Abort,
    /// A conditional branch that was not taken; `to` is the next instruction. Only told when
    /// [`Observe::not_taken`] asks for it, and never recorded.
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

    /// It stays in its code segment.
    pub const fn is_near(self) -> bool {
        self.is_instruction() && !matches!(self, Self::Far | Self::SoftwareInterrupt)
    }

    /// It is a branch of an instruction, not the delivery of an event.
    pub const fn is_instruction(self) -> bool {
        !matches!(
            self,
            Self::Exception | Self::Debug | Self::Interrupt | Self::Abort
        )
    }
}

/// One taken branch, interrupt or exception. The layout is fixed: an engine may fill it in a few stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Branch {
    /// RIP of the branch; of the interrupted instruction for exceptions and interrupts.
    pub from: u64,
    /// RIP of the target.
    pub to: u64,
    /// Instructions retired up to and with the branch, modulo 2^32: the clock of CYC_CNT.
    pub at: u32,
    /// What kind of branch.
    pub class: BranchClass,
    /// Privilege level before the branch.
    pub cpl: u8,
    /// Privilege level after it.
    pub to_cpl: u8,
    /// The model of a predictor was wrong about it; engines leave this clear.
    pub mispredicted: bool,
}

/// How records are stored in the BTS buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// IA32_DS_AREA.
    pub area: u64,
    /// DEBUGCTL.BTINT: an interrupt at the threshold, no wrap.
    pub interrupt: bool,
    /// DEBUGCTL.BTS_OFF_OS: not at CPL 0.
    pub off_os: bool,
    /// DEBUGCTL.BTS_OFF_USR: not at CPL 1 to 3.
    pub off_usr: bool,
}

impl Store {
    /// Whether a branch that starts at this privilege level is stored (rules BTS-13, BTS-14).
    pub const fn wants(&self, cpl: u8) -> bool {
        if cpl == 0 {
            !self.off_os
        } else {
            !self.off_usr
        }
    }
}

/// What an engine must report and do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observe {
    /// Tell taken branches, interrupts and exceptions.
    pub branches: bool,
    /// Tell conditional branches that are not taken as well.
    pub not_taken: bool,
    /// Tell after so many branches, at that instruction's end; 0: whenever it suits.
    pub every: u32,
    /// Store them in the BTS buffer.
    pub store: Option<Store>,
    /// TF traps after taken branches only: DEBUGCTL.BTF.
    pub step_on_branch: bool,
    /// Delivery of a #DB changes a model ([`BranchUnit::debug_exception`]): tell before it.
    pub debug_exceptions: bool,
    /// Debug conditions in transactions raise #DB where DR7.RTM is set too: DEBUGCTL.RTM.
    pub debugs_transactions: bool,
}

impl Observe {
    /// Branches must be noticed at all.
    pub const fn notices(&self) -> bool {
        self.branches || self.store.is_some() || self.step_on_branch
    }
}
