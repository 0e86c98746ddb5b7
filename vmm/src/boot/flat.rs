//! Flat images: loaded unchanged, at the requested address, and entered in the requested mode.
//!
//! Real mode is the default, and follows a BIOS that loads a boot sector: the image is loaded at
//! 0x7c00 and entered there with DL = 0x80, the first hard disk. There is no BIOS to call.

use hindsight_cpu::state::{CpuState, gpr};

use crate::boot::placement::Placement;
use crate::boot::{BootError, EntryMode, LoadRequest, entry};

const BOOT_SECTOR: u64 = 0x7c00;
const DISK: u64 = 0x80;

/// Places the image and the structures of the mode.
pub(super) fn load<'a>(
    placement: &mut Placement<'a>,
    request: &LoadRequest<'a>,
) -> Result<CpuState, BootError> {
    let mode = request.mode.unwrap_or(EntryMode::Real);
    let default = match mode {
        EntryMode::Real => BOOT_SECTOR,
        EntryMode::Protected | EntryMode::Long => 0x10_0000,
    };
    let load = request.load_address.unwrap_or(default);
    let size = request.image.len() as u64;
    placement.fixed("image", load, size, request.image)?;
    let at = request.entry.unwrap_or(load);
    if !placement.covers(at) || at < load {
        return Err(BootError::EntryOutside { entry: at });
    }
    match mode {
        EntryMode::Real => {
            let mut state = entry::real(placement, at)?;
            state.gpr[gpr::RDX] = DISK;
            Ok(state)
        }
        EntryMode::Protected => entry::protected(placement, at),
        EntryMode::Long => entry::long(placement, at),
    }
}
