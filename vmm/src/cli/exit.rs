//! Exit statuses of the `hindsight` command.

use std::process::ExitCode;

/// The exit status of a command. Odd statuses are a guest's own; those of the monitor are even.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// 0: the command succeeded, or the guest powered its machine off.
    Success,
    /// 2: bad options, a bad image, or something that the host lacks.
    Usage,
    /// 4: the guest crashed: a triple fault, or something that this KVM cannot run.
    GuestCrash,
    /// 6: the monitor failed.
    Internal,
    /// 8: the guest requested a reset.
    Reset,
    /// 124: the time limit passed, as with timeout(1).
    Timeout,
    /// `(code << 1) | 1`, cut to 8 bits: the guest wrote `code` to the debug exit port, as with
    /// QEMU's isa-debug-exit.
    Guest(u32),
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        Self::from(match status {
            Status::Success => 0,
            Status::Usage => 2,
            Status::GuestCrash => 4,
            Status::Internal => 6,
            Status::Reset => 8,
            Status::Timeout => 124,
            Status::Guest(code) => code.to_le_bytes()[0] << 1 | 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The document with a row for each status.
    const DOCUMENT: &str = include_str!("../../../docs/reference/exit-status.md");

    #[test]
    fn exit_statuses_are_documented() {
        for status in [
            Status::Success,
            Status::Usage,
            Status::GuestCrash,
            Status::Internal,
            Status::Reset,
            Status::Timeout,
        ] {
            let code = ExitCode::from(status);
            let row = (0..=u8::MAX).find(|&number| ExitCode::from(number) == code);
            let row = format!("| {} | ", row.unwrap());
            assert!(DOCUMENT.contains(&row), "{status:?}: {row}");
        }
    }

    #[test]
    fn guest_code_follows_isa_debug_exit() {
        assert_eq!(ExitCode::from(Status::Guest(0)), ExitCode::from(1));
        assert_eq!(ExitCode::from(Status::Guest(0x10)), ExitCode::from(0x21));
    }
}
