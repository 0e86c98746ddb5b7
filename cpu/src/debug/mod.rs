//! Debug registers: MOV DR, breakpoint matching, and the effect of a #DB.
//!
//! SDM Vol. 3B, "Debug Registers" and "Debug Exceptions". Without RTM, DR7\[11\] reads 0 and
//! DR6\[16\] reads 1.

use hindsight_regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};

#[cfg(test)]
mod tests;

/// DR0 to DR3, DR6 and DR7 of one logical processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DebugRegisters {
    /// DR0 to DR3: linear addresses or ports; any value is legal.
    pub addresses: [u64; 4],
    /// DR6, with its fixed bits.
    pub status: u64,
    /// DR7, with its fixed bits.
    pub control: u64,
}

/// The processor state that decides whether and how MOV DR executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovDrContext {
    /// The privilege level; 3 in virtual-8086 mode, 0 in real mode.
    pub cpl: u8,
    /// CR4.DE: DR4 and DR5 are not aliases of DR6 and DR7.
    pub cr4_de: bool,
    /// 64-bit mode.
    pub long: bool,
    /// The processor has RTM.
    pub rtm: bool,
}

/// The exception that MOV DR raises, in the order of the checks (rule DR-16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MovDrFault {
    /// #UD: no such register.
    Undefined,
    /// #GP(0): CPL is not 0, or an upper half is not zero.
    Protection,
    /// #DB with DR6.BD: general detect.
    Detected,
}

impl Default for DebugRegisters {
    fn default() -> Self {
        Self::RESET
    }
}

impl DebugRegisters {
    /// The values after RESET and INIT.
    pub const RESET: Self = Self {
        addresses: [0; 4],
        status: Dr6::RESET,
        control: Dr7::RESET.0,
    };

    /// Checks an access to DR`number`. Returns the number without the aliases 4 and 5.
    fn check(&self, number: u8, context: MovDrContext) -> Result<u8, MovDrFault> {
        let alias = matches!(number, 4 | 5);
        if number > 7 || (alias && context.cr4_de) {
            return Err(MovDrFault::Undefined);
        }
        if context.cpl != 0 {
            return Err(MovDrFault::Protection);
        }
        if self.control & Dr7::GD != 0 {
            return Err(MovDrFault::Detected);
        }
        Ok(if alias { number + 2 } else { number })
    }

    /// MOV from DR`number`. Outside 64-bit mode the caller takes the low half.
    ///
    /// # Errors
    ///
    /// The exception to raise.
    pub fn read(&self, number: u8, context: MovDrContext) -> Result<u64, MovDrFault> {
        Ok(match self.check(number, context)? {
            6 => self.status,
            7 => self.control,
            n => self.addresses[usize::from(n & 3)],
        })
    }

    /// MOV to DR`number`. After an error nothing has changed.
    ///
    /// # Errors
    ///
    /// The exception to raise.
    pub fn write(
        &mut self,
        number: u8,
        value: u64,
        context: MovDrContext,
    ) -> Result<(), MovDrFault> {
        let number = self.check(number, context)?;
        let value = if context.long {
            value
        } else {
            value & 0xffff_ffff
        };
        if number >= 6 && value >> 32 != 0 {
            return Err(MovDrFault::Protection);
        }
        let (status_rtm, control_rtm) = if context.rtm {
            (Dr6::RTM.bits(), Dr7::RTM)
        } else {
            (0, 0)
        };
        match number {
            6 => {
                self.status = value & (Dr6::WRITABLE | status_rtm) | Dr6::RESET & !status_rtm;
            }
            7 => self.control = value & (Dr7::WRITABLE | control_rtm) | Dr7::RESET.0,
            n => self.addresses[usize::from(n & 3)] = value,
        }
        Ok(())
    }

    /// The enabled breakpoints that `matches` holds for, as bits B3:0.
    fn hits(&self, matches: impl Fn(Condition, Length, u64) -> bool) -> u64 {
        debug_assert!(
            self.control & Dr7::RESET.0 != 0,
            "DR7[10] always reads as 1"
        );
        let control = Dr7(self.control);
        let hit = |&(index, address): &(BreakpointIndex, u64)| {
            control.is_enabled(index)
                && matches(control.condition(index), control.length(index), address)
        };
        BreakpointIndex::ALL
            .into_iter()
            .zip(self.addresses)
            .filter(hit)
            .map(|(BreakpointIndex(n), _)| 1 << n)
            .sum()
    }

    /// The instruction breakpoints on an instruction, as bits B3:0.
    ///
    /// `linear` is the address of its first byte. A breakpoint with another length than 1 never
    /// matches (rule DR-25).
    pub fn instruction_hits(&self, linear: u64) -> u64 {
        self.hits(|condition, length, address| {
            condition == Condition::Execute && length == Length::One && address == linear
        })
    }

    /// The data breakpoints that an access to `len` bytes meets, as bits B3:0.
    pub fn data_hits(&self, linear: u64, len: u64, write: bool) -> u64 {
        debug_assert!(len != 0, "an access has at least one byte");
        self.hits(|condition, length, address| {
            let kind =
                condition == Condition::ReadWrite || (condition == Condition::Write && write);
            kind && overlaps(address, length, linear, len)
        })
    }

    /// The I/O breakpoints that an access to `len` ports meets, as bits B3:0.
    pub fn io_hits(&self, port: u16, len: u64, cr4_de: bool) -> u64 {
        debug_assert!(len != 0, "an access has at least one port");
        self.hits(|condition, length, address| {
            cr4_de && condition == Condition::Io && overlaps(address, length, port.into(), len)
        })
    }

    /// Whether an enabled breakpoint has one of these conditions.
    pub fn has_enabled(&self, conditions: &[Condition]) -> bool {
        self.hits(|condition, _, _| conditions.contains(&condition)) != 0
    }

    /// Whether an enabled data breakpoint is on the 4-KiB page of `linear`.
    pub fn has_data_breakpoint_on_page(&self, linear: u64) -> bool {
        let data = [Condition::Write, Condition::ReadWrite];
        self.hits(|condition, _, address| {
            data.contains(&condition) && (address ^ linear) >> 12 == 0
        }) != 0
    }

    /// Records the conditions of a #DB in DR6, before its delivery begins.
    ///
    /// B3:0 are replaced (rule D6-04); BD, BS and BT accumulate until software clears them. INT1
    /// has no conditions, and does not call this.
    pub fn record_conditions(&mut self, conditions: u64) {
        self.status =
            self.status & !Dr6::BREAKPOINTS | conditions & Dr6::WRITABLE | Dr6::RTM.bits();
    }

    /// Applies the delivery of a #DB, also by INT1: clears general detect.
    ///
    /// DR6.RTM says whether the #DB occurred in a transaction (rule D6-07).
    pub fn deliver(&mut self, in_transaction: bool) {
        if in_transaction {
            self.status &= !Dr6::RTM.bits();
        } else {
            self.status |= Dr6::RTM.bits();
        }
        self.control &= !Dr7::GD;
    }

    /// Applies a hardware task switch: clears the local enables.
    pub fn switch_task(&mut self) {
        self.control &= !Dr7::LOCAL_ENABLES;
    }
}

/// Whether `len` bytes from `from` touch the aligned block of a breakpoint.
///
/// The block has the breakpoint's length and contains its address.
fn overlaps(address: u64, length: Length, from: u64, len: u64) -> bool {
    let size = length.bytes();
    // The last bytes and not the ends: an end may be beyond the last address.
    let (first, last) = (address & !(size - 1), address | (size - 1));
    from <= last && first <= from.saturating_add(len.saturating_sub(1))
}
