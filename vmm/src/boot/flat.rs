//! Flat images: loaded as they are, at the address and in the mode that the user names.
//!
//! In real mode the default is what a BIOS does with a boot sector: load it to 0x7c00 and enter it
//! there with DL = 0x80, the first hard disk (there is no BIOS to call, though).

use hindsight_cpu::state::{CpuState, gpr};

use crate::boot::place::Places;
use crate::boot::{BootError, Mode, Plan, entry};

const BOOT_SECTOR: u64 = 0x7c00;
const DISK: u64 = 0x80;

/// Places the image and what the mode needs.
pub(super) fn place<'a>(places: &mut Places<'a>, plan: &Plan<'a>) -> Result<CpuState, BootError> {
    let mode = plan.mode.unwrap_or(Mode::Real);
    let default = match mode {
        Mode::Real => BOOT_SECTOR,
        Mode::Protected | Mode::Long => 0x10_0000,
    };
    let load = plan.load_address.unwrap_or(default);
    let size = plan.image.len() as u64;
    places.fixed("image", load, size, plan.image)?;
    let at = plan.entry.unwrap_or(load);
    if !places.covers(at) || at < load {
        return Err(BootError::EntryOutside { entry: at });
    }
    match mode {
        Mode::Real => {
            let mut state = entry::real(places, at)?;
            state.gpr[gpr::RDX] = DISK;
            Ok(state)
        }
        Mode::Protected => entry::protected(places, at),
        Mode::Long => entry::long(places, at),
    }
}
