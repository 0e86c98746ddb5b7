//! The files that a guest boots from, read before the machine exists.

use std::path::Path;
use std::time::Instant;

use crate::boot::{BootModule, LoadRequest, Protocol};
use crate::cli::config::{BootOptions, ConflictError, OptionWord};
use crate::cli::read::read_until;

/// The largest image, initrd or module that is read, in bytes.
const BOOT_FILE_MAX: u64 = 4 << 30;

/// The largest option ROM: it runs between 0xc0000 and the copy of the firmware.
const OPTION_ROM_MAX: u64 = 0x2_0000;

/// The contents of the files that [`BootOptions`] name.
pub(super) struct BootFiles<'a> {
    options: &'a BootOptions,
    image_path: &'a Path,
    image: Vec<u8>,
    initrd: Option<Vec<u8>>,
    modules: Vec<Vec<u8>>,
    vga_bios: Option<Vec<u8>>,
}

/// The name by which the guest knows a file: without its folder.
fn file_name(path: &Path) -> Vec<u8> {
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes().to_vec()
}

impl<'a> BootFiles<'a> {
    /// Reads the files.
    ///
    /// # Errors
    ///
    /// When one cannot be read or is too large.
    ///
    /// When `deadline` passes before a pipe was read, too.
    pub(super) fn read(
        options: &'a BootOptions,
        deadline: Option<Instant>,
    ) -> anyhow::Result<Self> {
        let read = |role, path: &Path, limit| read_until(role, path, limit, deadline);
        let (role, image_path) = match (&options.firmware, &options.image) {
            (Some(firmware), _) => ("firmware", firmware),
            (None, Some(image)) => ("image", image),
            (None, None) => return Err(ConflictError::NoImage.into()),
        };
        let image = read(role, image_path, BOOT_FILE_MAX)?;
        let initrd = options.initrd.as_deref();
        let initrd = initrd.map(|path| read("initrd", path, BOOT_FILE_MAX));
        let modules = options.module.iter();
        let modules = modules.map(|OptionWord(module)| read("module", &module.path, BOOT_FILE_MAX));
        let vga_bios = options.vga_bios.as_deref();
        let vga_bios = vga_bios.map(|path| read("option ROM", path, OPTION_ROM_MAX));
        Ok(Self {
            options,
            image_path,
            image,
            initrd: initrd.transpose()?,
            modules: modules.collect::<anyhow::Result<_>>()?,
            vga_bios: vga_bios.transpose()?,
        })
    }

    /// The path of the image, as the user named it.
    pub(super) const fn image_path(&self) -> &Path {
        self.image_path
    }

    /// The path of the image, and its contents.
    pub(super) fn image(&self) -> (&Path, &[u8]) {
        (self.image_path, &self.image)
    }

    /// The request for the loaders.
    pub(super) fn load_request(&self) -> LoadRequest<'_> {
        let options = self.options;
        let modules = options.module.iter().zip(&self.modules);
        LoadRequest {
            image: &self.image,
            protocol: match options.firmware {
                Some(_) => Some(Protocol::Firmware),
                None => options.protocol.protocol(),
            },
            name: file_name(self.image_path),
            initrd_name: options.initrd.as_deref().map_or_else(Vec::new, file_name),
            initrd: self.initrd.as_deref(),
            modules: modules
                .map(|(OptionWord(module), data)| BootModule {
                    data,
                    args: module.args.clone().into_bytes(),
                    name: file_name(&module.path),
                })
                .collect(),
            text_screen: false,
            vga_bios: self.vga_bios.as_deref(),
            cmdline: options.cmdline.clone().into_bytes(),
            load_address: options.load_address.map(|address| address.0.0),
            entry: options.entry.map(|address| address.0.0),
            mode: options.mode.map(Into::into),
        }
    }
}
