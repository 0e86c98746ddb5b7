//! Debug registers: what may be read and written, what matches, and what a #DB does to them. SDM Vol. 3B,
//! "Debug Registers" and "Debug Exceptions".
//!
//! Without RTM, DR7\[11\] reads 0 and DR6\[16\] reads 1.

use hindsight_regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use serde::{Deserialize, Serialize};

#[cfg(test)]
mod tests;

/// Bits 3:0, of which bit n stands for breakpoint n.
const BREAKPOINTS: u64 = 0xf;
/// The bits of DR6 that are stored: B0-B3, BD, BS, BT.
const STATUS_STORED: u64 = 0xe00f;
/// The bits of DR7 that are stored.
const CONTROL_STORED: u64 = 0xffff_23ff;
/// L0-L3 and LE, which belong to a task.
const LOCAL: u64 = 0x155;
const SLOTS: [BreakpointIndex; 4] = [
    BreakpointIndex(0),
    BreakpointIndex(1),
    BreakpointIndex(2),
    BreakpointIndex(3),
];

/// DR0 to DR3, DR6 and DR7 of one logical processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registers {
    /// DR0 to DR3: any value.
    pub addresses: [u64; 4],
    /// DR6, with its fixed bits.
    pub status: u64,
    /// DR7, with its fixed bits.
    pub control: u64,
}

/// How MOV DR is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The privilege level; 3 in virtual-8086 mode, 0 in real mode.
    pub cpl: u8,
    /// CR4.DE.
    pub extensions: bool,
    /// 64-bit mode.
    pub long: bool,
    /// The processor has RTM.
    pub rtm: bool,
}

/// Why MOV DR is not executed, in the order in which it is checked (rule DR-16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// #UD: no such register.
    Undefined,
    /// #GP(0): the privilege level, or an upper half that is not zero.
    Protection,
    /// #DB with BD.
    Detected,
}

impl Default for Registers {
    fn default() -> Self {
        Self::RESET
    }
}

impl Registers {
    /// The values after RESET and INIT.
    pub const RESET: Self = Self {
        addresses: [0; 4],
        status: Dr6::RESET,
        control: Dr7::RESET.0,
    };

    /// The number of a register without the aliases, once the access to it is allowed.
    fn check(&self, number: u8, access: Access) -> Result<u8, Refusal> {
        let alias = matches!(number, 4 | 5);
        if number > 7 || (alias && access.extensions) {
            return Err(Refusal::Undefined);
        }
        if access.cpl != 0 {
            return Err(Refusal::Protection);
        }
        if self.control & Dr7::GD != 0 {
            return Err(Refusal::Detected);
        }
        Ok(if alias { number + 2 } else { number })
    }

    /// MOV from DR`number`. Outside 64-bit mode the caller takes the low half.
    ///
    /// # Errors
    ///
    /// The exception to raise.
    pub fn read(&self, number: u8, access: Access) -> Result<u64, Refusal> {
        Ok(match self.check(number, access)? {
            6 => self.status,
            7 => self.control,
            n => self.addresses[usize::from(n & 3)],
        })
    }

    /// MOV to DR`number`. Nothing changes when it is refused.
    ///
    /// # Errors
    ///
    /// The exception to raise.
    pub fn write(&mut self, number: u8, value: u64, access: Access) -> Result<(), Refusal> {
        let number = self.check(number, access)?;
        let value = if access.long {
            value
        } else {
            value & 0xffff_ffff
        };
        if number >= 6 && value >> 32 != 0 {
            return Err(Refusal::Protection);
        }
        let (rtm, enable) = if access.rtm {
            (Dr6::RTM.bits(), Dr7::RTM)
        } else {
            (0, 0)
        };
        match number {
            6 => self.status = value & (STATUS_STORED | rtm) | Dr6::RESET & !rtm,
            7 => self.control = value & (CONTROL_STORED | enable) | Dr7::RESET.0,
            n => self.addresses[usize::from(n & 3)] = value,
        }
        Ok(())
    }

    /// The breakpoints that `matches` holds for, as B3:0, of those that are enabled.
    fn hits(&self, matches: impl Fn(Condition, Length, u64) -> bool) -> u64 {
        let control = Dr7(self.control);
        let hit = |&(slot, address): &(BreakpointIndex, u64)| {
            control.is_enabled(slot)
                && matches(control.condition(slot), control.length(slot), address)
        };
        SLOTS
            .into_iter()
            .zip(self.addresses)
            .filter(hit)
            .map(|(BreakpointIndex(n), _)| 1 << n)
            .sum()
    }

    /// The instruction breakpoints on the linear address of an instruction's first byte. One with another length
    /// than 1 never matches (rule DR-25).
    pub fn executed(&self, linear: u64) -> u64 {
        self.hits(|condition, length, address| {
            condition == Condition::Execute && length == Length::One && address == linear
        })
    }

    /// The data breakpoints that an access to `len` bytes meets.
    pub fn accessed(&self, linear: u64, len: u64, write: bool) -> u64 {
        self.hits(|condition, length, address| {
            let kind =
                condition == Condition::ReadWrite || (condition == Condition::Write && write);
            kind && overlaps(address, length, linear, len)
        })
    }

    /// The I/O breakpoints that an access to `len` ports meets; `extensions` is CR4.DE.
    pub fn port(&self, port: u16, len: u64, extensions: bool) -> u64 {
        self.hits(|condition, length, address| {
            extensions && condition == Condition::Io && overlaps(address, length, port.into(), len)
        })
    }

    /// Whether some enabled breakpoint has one of these conditions.
    pub fn watches(&self, conditions: &[Condition]) -> bool {
        self.hits(|condition, _, _| conditions.contains(&condition)) != 0
    }

    /// Whether a data breakpoint is on the 4 KiB page of `linear`.
    pub fn watches_page(&self, linear: u64) -> bool {
        let data = [Condition::Write, Condition::ReadWrite];
        self.hits(|condition, _, address| {
            data.contains(&condition) && (address ^ linear) >> 12 == 0
        }) != 0
    }

    /// DR6 takes in the conditions of a #DB, before its delivery begins. B3:0 are replaced by its own (rule D6-04);
    /// BD, BS and BT stay until software clears them. INT1 has no conditions to report.
    pub fn report(&mut self, conditions: u64) {
        self.status = self.status & !BREAKPOINTS | conditions & STATUS_STORED | Dr6::RTM.bits();
    }

    /// A #DB, of INT1 too, is delivered: general detect is switched off. DR6 tells whether it is about a
    /// transaction (rule D6-07).
    pub fn enter(&mut self, in_transaction: bool) {
        if in_transaction {
            self.status &= !Dr6::RTM.bits();
        } else {
            self.status |= Dr6::RTM.bits();
        }
        self.control &= !Dr7::GD;
    }

    /// A hardware task switch: the local enables end.
    pub fn switch_task(&mut self) {
        self.control &= !LOCAL;
    }
}

/// Whether an access touches a byte of what a breakpoint watches: the block of its length that holds its address.
fn overlaps(address: u64, length: Length, from: u64, len: u64) -> bool {
    let size = match length {
        Length::One => 1,
        Length::Two => 2,
        Length::Four => 4,
        Length::Eight => 8,
    };
    // The last bytes and not the ends: those may be beyond the last address.
    let (first, last) = (address & !(size - 1), address | (size - 1));
    from <= last && first <= from.saturating_add(len.saturating_sub(1))
}
