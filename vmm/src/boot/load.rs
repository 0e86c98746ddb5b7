//! Loads an image: chooses the protocol, places all parts, and writes them to guest memory.

use hindsight_cpu::state::CpuState;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::boot::elf_file::{self, Elf};
use crate::boot::placement::{PlacedPart, Placement};
use crate::boot::request::{EntryMode, LoadRequest, Protocol};
use crate::boot::{BootError, bios, elf, firmware, flat, linux, multiboot, multiboot2, pvh};
use crate::memory::layout::Layout;

/// An image in guest memory, ready to run.
#[derive(Clone, Debug)]
pub struct LoadedImage {
    /// The protocol by which it was loaded.
    pub protocol: Protocol,
    /// The first vCPU's state at the entry. All other vCPUs wait for INIT and SIPI.
    pub state: CpuState,
    /// The parts in guest memory, ascending and without overlaps.
    pub placed: Vec<PlacedPart>,
}

/// Maximum number of modules, including the initrd.
const MODULES_MAX: usize = 256;

/// Detects the protocol of `image`; `None` if its format is unknown.
///
/// It checks for a multiboot header in the first 8 KiB, for one of multiboot 2 in the first 32, then for a PVH note, a Linux boot header,
/// and ELF. [`load`] may still refuse the image.
pub fn detect(image: &[u8]) -> Option<Protocol> {
    if multiboot::find_header(image).is_some() {
        Some(Protocol::Multiboot)
    } else if multiboot2::find_header(image).is_some() {
        Some(Protocol::Multiboot2)
    } else if Elf::parse(image).is_ok_and(|elf| elf.pvh_entry.is_some()) {
        Some(Protocol::Pvh)
    } else if linux::has_header(image) {
        Some(Protocol::Linux)
    } else if elf_file::is_elf(image) {
        Some(Protocol::Elf)
    } else {
        None
    }
}

/// Loads the image, its modules and the structures of its protocol into `memory`.
///
/// `memory` has the RAM of `layout`, and is zero. After an error, nothing was written, except after
/// [`BootError::Write`], which only memory that differs from the layout can cause.
///
/// # Errors
///
/// The image's format is unknown, the image is malformed or truncated, does not fit in memory, or
/// overlaps something else; or an option cannot be used with the protocol.
pub fn load(
    memory: &GuestMemoryMmap,
    layout: &Layout,
    request: &LoadRequest<'_>,
) -> Result<LoadedImage, BootError> {
    let protocol = request.resolve()?;
    request.check(protocol)?;
    let mut placement = Placement::new(layout);
    let state = match protocol {
        Protocol::Flat => flat::load(&mut placement, request)?,
        Protocol::Pvh => pvh::load(&mut placement, layout, request)?,
        Protocol::Elf => elf::load(&mut placement, layout, request)?,
        Protocol::Multiboot => multiboot::load(&mut placement, layout, request)?,
        Protocol::Multiboot2 => {
            let rsdp = layout.rsdp().and_then(|at| {
                let mut rsdp = multiboot2::Rsdp::default();
                memory.read_slice(&mut rsdp.0, GuestAddress(at)).ok()?;
                Some(rsdp)
            });
            multiboot2::load(&mut placement, layout, request, rsdp)?
        }
        Protocol::Linux => linux::load(&mut placement, layout, request)?,
        Protocol::Firmware => {
            return Ok(LoadedImage {
                protocol,
                state: CpuState::reset(),
                placed: firmware::write(memory, request.image)?,
            });
        }
    };
    let mode = request.mode.unwrap_or(EntryMode::Real);
    if protocol != Protocol::Flat || mode == EntryMode::Real {
        bios::add_structures(&mut placement);
    }
    let placed = placement.write(memory)?;
    Ok(LoadedImage {
        protocol,
        state,
        placed,
    })
}

impl LoadRequest<'_> {
    /// The requested protocol, or else the image's.
    fn resolve(&self) -> Result<Protocol, BootError> {
        if self.image.is_empty() {
            return Err(BootError::Empty);
        }
        if let Some(protocol) = self.protocol {
            return Ok(protocol);
        }
        if let Some(protocol) = detect(self.image) {
            return Ok(protocol);
        }
        if self.load_address.is_some() || self.mode.is_some() {
            return Ok(Protocol::Flat);
        }
        Err(compression(self.image).map_or(BootError::Unrecognised, BootError::Compressed))
    }

    /// Refuses options that the protocol would ignore.
    fn check(&self, protocol: Protocol) -> Result<(), BootError> {
        const FLAT: &str = "use --protocol flat to load the image as a flat image";
        const NO_PLACE: &str = "a flat image has no place to pass it";
        const INITRD: &str = "use --initrd to pass a file to a Linux kernel";
        let flat = protocol == Protocol::Flat;
        let checks = [
            (!flat && self.load_address.is_some(), "--load-address", FLAT),
            (!flat && self.entry.is_some(), "--entry", FLAT),
            (!flat && self.mode.is_some(), "--mode", FLAT),
            (flat && self.initrd.is_some(), "--initrd", NO_PLACE),
            (flat && !self.modules.is_empty(), "--module", NO_PLACE),
            (flat && !self.cmdline.is_empty(), "--cmdline", NO_PLACE),
            (
                protocol == Protocol::Linux && !self.modules.is_empty(),
                "--module",
                INITRD,
            ),
        ];
        if let Some((_, option, hint)) = checks.into_iter().find(|check| check.0) {
            return Err(BootError::NotTaken {
                protocol,
                option,
                hint,
            });
        }
        let count = self.modules.len() + usize::from(self.initrd.is_some());
        if count > MODULES_MAX {
            return Err(BootError::TooManyModules {
                count,
                max: MODULES_MAX,
            });
        }
        Ok(())
    }
}

/// The name of the compression format whose magic `image` starts with.
fn compression(image: &[u8]) -> Option<&'static str> {
    const MAGICS: [(&[u8], &str); 4] = [
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\xfd7zXZ\0", "xz"),
        (b"BZh", "bzip2"),
    ];
    let found = MAGICS.iter().find(|(magic, _)| image.starts_with(magic))?;
    Some(found.1)
}
