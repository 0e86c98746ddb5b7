//! What to load, by which protocol, and with what result.

use std::fmt;

use clap::ValueEnum;
use hindsight_cpu::state::CpuState;
use vm_memory::GuestMemoryMmap;

use crate::boot::elf::Elf;
use crate::boot::place::{Placed, Places};
use crate::boot::{BootError, bios, elf, flat, linux, multiboot, pvh};
use crate::memory::layout::Layout;

/// How the image wants to be loaded and entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Protocol {
    /// As it is, at an address that the user names.
    Flat,
    /// ELF with the Xen PVH note: 32-bit entry, start info in EBX.
    Pvh,
    /// Plain static ELF: 64-bit or 32-bit entry by its class.
    Elf,
    /// Multiboot 1: ELF, or addresses in the multiboot header.
    Multiboot,
    /// Linux bzImage, entered by the 64-bit boot protocol, or the 32-bit one if it has no 64-bit entry.
    Linux,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flat => "flat",
            Self::Pvh => "pvh",
            Self::Elf => "elf",
            Self::Multiboot => "multiboot",
            Self::Linux => "linux",
        })
    }
}

/// The processor mode in which a flat image is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// 16-bit real mode, as a BIOS enters a boot sector.
    Real,
    /// 32-bit protected mode with flat segments, paging off.
    Protected,
    /// 64-bit mode with the first 4 GiB mapped one to one.
    Long,
}

/// A file beside the image, for protocols that take such.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module<'a> {
    /// The file's bytes.
    pub data: &'a [u8],
    /// The module's own command line, without a NUL at its end; may be empty.
    pub args: Vec<u8>,
    /// The file's name, for protocols that put it in front of the command line; may be empty.
    pub name: Vec<u8>,
}

/// What to load. The image is untrusted; so is all else, as far as memory safety goes.
#[derive(Clone, Debug, Default)]
pub struct Plan<'a> {
    /// The image's bytes.
    pub image: &'a [u8],
    /// The protocol; `None` looks at the image, see [`detect`].
    pub protocol: Option<Protocol>,
    /// The image's file name, for protocols that put it in front of the command line; may be empty.
    pub name: Vec<u8>,
    /// The same of the initrd.
    pub initrd_name: Vec<u8>,
    /// The initial RAM disk: Linux; the first module of PVH, ELF and multiboot images.
    pub initrd: Option<&'a [u8]>,
    /// Modules of PVH, ELF and multiboot images.
    pub modules: Vec<Module<'a>>,
    /// The command line, without a NUL at its end; empty if there is none.
    pub cmdline: Vec<u8>,
    /// Flat images: where to load. Default 0x7c00 in real mode, 0x100000 else.
    pub load_address: Option<u64>,
    /// Flat images: where to enter. Default: the load address.
    pub entry: Option<u64>,
    /// Flat images: the mode; default real.
    pub mode: Option<Mode>,
}

/// An image in guest memory, ready to run.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The protocol that was chosen.
    pub protocol: Protocol,
    /// The first processor's state at the entry; all other processors wait for INIT and SIPI.
    pub state: CpuState,
    /// What was placed where, in ascending order and without overlaps.
    pub placed: Vec<Placed>,
}

/// The most modules, the initrd included.
const MODULES_MAX: usize = 256;

/// Finds out what `image` is: a multiboot header in the first 8 KiB, then a PVH note, then a Linux
/// boot header, then ELF. `None`: none of these. What is found may still be refused by [`load`].
pub fn detect(image: &[u8]) -> Option<Protocol> {
    if multiboot::find_header(image).is_some() {
        Some(Protocol::Multiboot)
    } else if Elf::parse(image).is_ok_and(|elf| elf.pvh_entry.is_some()) {
        Some(Protocol::Pvh)
    } else if linux::has_header(image) {
        Some(Protocol::Linux)
    } else if elf::is_elf(image) {
        Some(Protocol::Elf)
    } else {
        None
    }
}

/// Loads the image, and all that goes with it, into `memory`.
///
/// `memory` has the RAM that `layout` says, and is zero. On an error nothing was written (but for
/// [`BootError::Write`], which only memory unlike the layout can cause).
///
/// # Errors
///
/// An image that cannot be recognised, is malformed or truncated, does not fit in memory, or lies
/// where something else has to be; options that do not go with the protocol.
pub fn load(
    memory: &GuestMemoryMmap,
    layout: &Layout,
    plan: &Plan<'_>,
) -> Result<Loaded, BootError> {
    let protocol = plan.resolve()?;
    plan.check(protocol)?;
    let mut places = Places::new(layout);
    let state = match protocol {
        Protocol::Flat => flat::place(&mut places, plan)?,
        Protocol::Pvh => pvh::place(&mut places, layout, plan)?,
        Protocol::Elf => elf::place(&mut places, layout, plan)?,
        Protocol::Multiboot => multiboot::place(&mut places, layout, plan)?,
        Protocol::Linux => linux::place(&mut places, layout, plan)?,
    };
    if protocol != Protocol::Flat {
        bios::place(&mut places);
    }
    let placed = places.write(memory)?;
    Ok(Loaded {
        protocol,
        state,
        placed,
    })
}

impl<'a> Plan<'a> {
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

    /// Refuses what the protocol has no use for, rather than ignore it.
    fn check(&self, protocol: Protocol) -> Result<(), BootError> {
        const AS_IT_IS: &str = "name --protocol flat if the image is to be loaded as it is";
        const NO_PLACE: &str = "there is no way to pass it on";
        const INITRD: &str = "a Linux kernel takes an initrd";
        let flat = protocol == Protocol::Flat;
        let checks = [
            (
                !flat && self.load_address.is_some(),
                "--load-address",
                AS_IT_IS,
            ),
            (!flat && self.entry.is_some(), "--entry", AS_IT_IS),
            (!flat && self.mode.is_some(), "--mode", AS_IT_IS),
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

    /// The command line with a NUL at its end.
    pub(super) fn cmdline_string(&self) -> Result<Vec<u8>, BootError> {
        c_string("the command line", &self.cmdline)
    }

    /// The initrd, if any, and the modules.
    pub(super) fn all_modules(&self) -> impl Iterator<Item = NamedModule<'a, '_>> {
        let initrd = self.initrd.map(|data| NamedModule {
            name: "initrd".to_owned(),
            data,
            args: &[],
            file: &self.initrd_name,
        });
        let modules = self.modules.iter().enumerate();
        initrd
            .into_iter()
            .chain(modules.map(|(index, module)| NamedModule {
                name: format!("module {index}"),
                data: module.data,
                args: &module.args,
                file: &module.name,
            }))
    }
}

/// A module with its name in messages.
pub(super) struct NamedModule<'a, 'p> {
    pub(super) name: String,
    pub(super) data: &'a [u8],
    pub(super) args: &'p [u8],
    pub(super) file: &'p [u8],
}

/// `text` with a NUL at its end.
pub(super) fn c_string(name: &str, text: &[u8]) -> Result<Vec<u8>, BootError> {
    if let Some(at) = text.iter().position(|&byte| byte == 0) {
        return Err(BootError::Nul {
            name: name.to_owned(),
            at,
        });
    }
    Ok([text, b"\0"].concat())
}

/// The name of a compression whose magic `image` starts with.
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
