//! A request to load an image: its files, its options and its protocol.

use std::fmt;

use crate::boot::BootError;

/// The boot protocol: how an image is loaded and entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// A flat image, loaded unchanged at a given address.
    Flat,
    /// ELF with the Xen PVH note: 32-bit entry, start info in EBX.
    Pvh,
    /// Plain static ELF: 64-bit or 32-bit entry, depending on its class.
    Elf,
    /// Multiboot 1: ELF, or addresses in the multiboot header.
    Multiboot,
    /// Multiboot 2: ELF, or addresses in a tag of the multiboot header.
    Multiboot2,
    /// Linux bzImage: 64-bit entry, or 32-bit entry if it has no 64-bit one.
    Linux,
    /// Firmware in a flash chip that ends at 4 GiB, entered at the reset vector.
    Firmware,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flat => "flat",
            Self::Pvh => "pvh",
            Self::Elf => "elf",
            Self::Multiboot => "multiboot",
            Self::Multiboot2 => "multiboot2",
            Self::Linux => "linux",
            Self::Firmware => "firmware",
        })
    }
}

/// The processor mode in which a flat image is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryMode {
    /// 16-bit real mode, as a BIOS enters a boot sector.
    Real,
    /// 32-bit protected mode with flat segments, paging off.
    Protected,
    /// 64-bit mode with the first 4 GiB mapped one to one.
    Long,
}

/// A file that is loaded with the image, if the protocol has modules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootModule<'a> {
    /// The file's bytes.
    pub data: &'a [u8],
    /// The module's own command line, without a final NUL; may be empty.
    pub args: Vec<u8>,
    /// The file's name, for protocols whose command lines start with it; may be empty.
    pub name: Vec<u8>,
}

/// A request to load an image. The image and all options are untrusted.
#[derive(Clone, Debug, Default)]
pub struct LoadRequest<'a> {
    /// The image's bytes.
    pub image: &'a [u8],
    /// The protocol; `None` detects it, see [`crate::boot::detect`].
    pub protocol: Option<Protocol>,
    /// The image's file name, for protocols whose command lines start with it; may be empty.
    pub name: Vec<u8>,
    /// The initrd's file name, likewise.
    pub initrd_name: Vec<u8>,
    /// The initial RAM disk of Linux; the first module of PVH, ELF and multiboot images.
    pub initrd: Option<&'a [u8]>,
    /// Modules of PVH, ELF and multiboot images.
    pub modules: Vec<BootModule<'a>>,
    /// The machine has a screen, in text mode 3.
    pub text_screen: bool,
    /// The option ROM of the screen, which firmware runs.
    pub vga_bios: Option<&'a [u8]>,
    /// The command line, without a final NUL; empty if there is none.
    pub cmdline: Vec<u8>,
    /// Flat images: the load address. Default: 0x7c00 in real mode, otherwise 0x100000.
    pub load_address: Option<u64>,
    /// Flat images: the entry point. Default: the load address.
    pub entry: Option<u64>,
    /// Flat images: the mode at the entry. Default: real mode.
    pub mode: Option<EntryMode>,
}

impl<'a> LoadRequest<'a> {
    /// The command line with a final NUL.
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

/// A module, or the initrd as one.
pub(super) struct NamedModule<'a, 'p> {
    /// The name for messages.
    pub(super) name: String,
    pub(super) data: &'a [u8],
    pub(super) args: &'p [u8],
    pub(super) file: &'p [u8],
}

/// Adds a final NUL to `text`, which `name` describes in messages.
pub(super) fn c_string(name: &str, text: &[u8]) -> Result<Vec<u8>, BootError> {
    if let Some(at) = text.iter().position(|&byte| byte == 0) {
        return Err(BootError::Nul {
            name: name.to_owned(),
            at,
        });
    }
    Ok([text, b"\0"].concat())
}
