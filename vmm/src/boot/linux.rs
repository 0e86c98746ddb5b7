//! Linux bzImage, by the 64-bit boot protocol if the kernel has that entry, otherwise by the 32-bit
//! one.
//!
//! The kernel is entered in 64-bit mode at its load address plus 0x200, or in protected mode at the
//! load address, with the boot parameters ("zero page") in RSI. Linux, "The Linux/x86 Boot
//! Protocol", "64-bit Boot Protocol" and "32-bit Boot Protocol"; "Zero Page" for the offsets.
//!
//! Of the file's real-mode part, only the setup header is used. The command line and the boot
//! parameters go to conventional memory, the initrd to the highest address that the kernel allows.

use hindsight_cpu::state::{CpuState, gpr};

use crate::boot::bytes::{address32, put, u16_at, u32_at, u64_at};
use crate::boot::placement::{Fit, Placement};
use crate::boot::{BootError, LoadRequest, entry};
use crate::memory::layout::{EXTENDED_START, Layout, to_usize};

/// Offsets in the file and, from `HEADER` on, in the boot parameters.
mod offset {
    pub(super) const ACPI_RSDP_ADDR: usize = 0x070;
    pub(super) const E820_ENTRIES: usize = 0x1e8;
    pub(super) const HEADER: usize = 0x1f1;
    pub(super) const SETUP_SECTS: usize = 0x1f1;
    pub(super) const SYSSIZE: usize = 0x1f4;
    pub(super) const VID_MODE: usize = 0x1fa;
    pub(super) const BOOT_FLAG: usize = 0x1fe;
    /// The second byte of a short jump over the header: the offset of its end from 0x202.
    pub(super) const JUMP: usize = 0x201;
    pub(super) const MAGIC: usize = 0x202;
    pub(super) const ORIG_VIDEO_MODE: usize = 0x06;
    pub(super) const ORIG_VIDEO_COLS: usize = 0x07;
    pub(super) const ORIG_VIDEO_EGA_BX: usize = 0x0a;
    pub(super) const ORIG_VIDEO_LINES: usize = 0x0e;
    pub(super) const ORIG_VIDEO_IS_VGA: usize = 0x0f;
    pub(super) const ORIG_VIDEO_POINTS: usize = 0x10;
    pub(super) const VERSION: usize = 0x206;
    pub(super) const TYPE_OF_LOADER: usize = 0x210;
    pub(super) const LOADFLAGS: usize = 0x211;
    pub(super) const CODE32_START: usize = 0x214;
    pub(super) const RAMDISK_IMAGE: usize = 0x218;
    pub(super) const RAMDISK_SIZE: usize = 0x21c;
    /// bootsect_kludge, heap_end_ptr, ext_loader_ver, ext_loader_type: the loader clears them.
    pub(super) const BOOTSECT_KLUDGE: usize = 0x220;
    pub(super) const CMD_LINE_PTR: usize = 0x228;
    pub(super) const INITRD_ADDR_MAX: usize = 0x22c;
    pub(super) const KERNEL_ALIGNMENT: usize = 0x230;
    pub(super) const RELOCATABLE_KERNEL: usize = 0x234;
    pub(super) const XLOADFLAGS: usize = 0x236;
    pub(super) const CMDLINE_SIZE: usize = 0x238;
    pub(super) const SETUP_DATA: usize = 0x250;
    pub(super) const PREF_ADDRESS: usize = 0x258;
    pub(super) const INIT_SIZE: usize = 0x260;
    /// End of the header of version 2.10.
    pub(super) const HEADER_END: usize = 0x264;
    /// The end of the largest header in the boot parameters.
    pub(super) const HEADER_LIMIT: usize = 0x290;
    pub(super) const E820_TABLE: usize = 0x2d0;
}

/// Size of the boot parameters in bytes.
const PARAMS_SIZE: usize = 0x1000;
const SECTOR: usize = 0x200;
/// The offset of the 64-bit entry point from the load address.
const ENTRY_64: u64 = 0x200;
/// The first version with `pref_address` and `init_size` (Linux 2.6.31).
const VERSION_OLDEST: u16 = 0x20a;
/// The first version with `xloadflags`.
const VERSION_64: u16 = 0x20c;
const XLF_KERNEL_64: u16 = 1;
const LOADED_HIGH: u8 = 1;
const CAN_USE_HEAP: u8 = 1 << 7;
/// The type of a loader without an assigned number.
const LOADER_UNKNOWN: u8 = 0xff;
const VIDEO_NORMAL: u16 = 0xffff;
const PAGE: u64 = 0x1000;

/// Whether `image` has the boot flag and the setup header's magic.
pub fn has_header(image: &[u8]) -> bool {
    u16_at(image, offset::BOOT_FLAG) == Some(0xaa55)
        && image
            .get(offset::MAGIC..)
            .is_some_and(|rest| rest.starts_with(b"HdrS"))
}

/// The fields of the setup header that the loader uses.
#[derive(Clone, Copy, Debug)]
struct SetupHeader {
    /// Offset of the protected-mode kernel in the file.
    kernel_offset: usize,
    /// Size of the protected-mode kernel in bytes.
    kernel_size: usize,
    /// End of the setup header in the file.
    end: usize,
    /// The kernel has a 64-bit entry.
    long: bool,
    loadflags: u8,
    initrd_last: u32,
    alignment: u32,
    relocatable: bool,
    cmdline_max: u32,
    preferred: u64,
    init_size: u32,
}

impl SetupHeader {
    fn parse(image: &[u8]) -> Result<Self, BootError> {
        if !has_header(image) {
            return Err(BootError::LinuxNoHeader);
        }
        let truncated = |needed: usize| BootError::LinuxTruncated {
            needed: needed as u64,
            len: image.len() as u64,
        };
        let short = || truncated(offset::HEADER_END);
        let byte = |at: usize| image.get(at).copied().ok_or_else(short);
        let half = |at| u16_at(image, at).ok_or_else(short);
        let word = |at| u32_at(image, at).ok_or_else(short);
        let version = half(offset::VERSION)?;
        if version < VERSION_OLDEST {
            return Err(BootError::LinuxVersion(version));
        }
        let loadflags = byte(offset::LOADFLAGS)?;
        if loadflags & LOADED_HIGH == 0 {
            return Err(BootError::LinuxLow);
        }
        // 0 means 4, for very old kernels. The boot sector is not counted.
        let sectors = match byte(offset::SETUP_SECTS)? {
            0 => 4,
            sectors => usize::from(sectors),
        };
        let kernel_offset = (sectors + 1) * SECTOR;
        let paragraphs = u64::from(word(offset::SYSSIZE)?);
        let kernel_size = kernel_size(image, kernel_offset, paragraphs)?;
        Ok(Self {
            kernel_offset,
            kernel_size,
            end: (offset::MAGIC + usize::from(byte(offset::JUMP)?))
                .clamp(offset::HEADER_END, offset::HEADER_LIMIT)
                .min(image.len()),
            long: version >= VERSION_64 && half(offset::XLOADFLAGS)? & XLF_KERNEL_64 != 0,
            loadflags,
            initrd_last: word(offset::INITRD_ADDR_MAX)?,
            alignment: word(offset::KERNEL_ALIGNMENT)?,
            relocatable: byte(offset::RELOCATABLE_KERNEL)? != 0,
            cmdline_max: word(offset::CMDLINE_SIZE)?,
            preferred: u64_at(image, offset::PREF_ADDRESS).ok_or_else(short)?,
            init_size: word(offset::INIT_SIZE)?,
        })
    }
}

/// Size of the protected-mode kernel.
///
/// The header has it in paragraphs of 16 bytes, the last of which may be truncated. Anything that
/// follows in the file (a signature) is not loaded.
fn kernel_size(image: &[u8], at: usize, paragraphs: u64) -> Result<usize, BootError> {
    let size = paragraphs * 16;
    let available = image.len().saturating_sub(at) as u64;
    let needed = size.saturating_sub(15).max(ENTRY_64 + 1);
    if available < needed {
        return Err(BootError::LinuxTruncated {
            needed: at as u64 + needed,
            len: image.len() as u64,
        });
    }
    // Size 0 in the header means the rest of the file.
    let size = if size == 0 { available } else { size };
    Ok(to_usize(size.min(available)))
}

/// Places a Linux kernel.
pub(super) fn load<'a>(
    placement: &mut Placement<'a>,
    layout: &Layout,
    request: &LoadRequest<'a>,
) -> Result<CpuState, BootError> {
    let header = SetupHeader::parse(request.image)?;
    let cmdline = request.cmdline_string()?;
    if request.cmdline.len() as u64 > u64::from(header.cmdline_max) {
        return Err(BootError::CmdlineTooLong {
            len: request.cmdline.len(),
            max: header.cmdline_max,
        });
    }
    let kernel = place_kernel(placement, request.image, &header)?;
    let mut params = parameters(layout, request.image, &header);
    if request.text_screen {
        put_text_screen(&mut params);
    }
    put(&mut params, offset::CODE32_START, address32(kernel));
    if let Some(initrd) = request.initrd {
        let within = EXTENDED_START..u64::from(header.initrd_last) + 1;
        let at = placement.fit("initrd", initrd, PAGE, within, Fit::Highest)?;
        put(&mut params, offset::RAMDISK_IMAGE, address32(at));
        put(
            &mut params,
            offset::RAMDISK_SIZE,
            address32(initrd.len() as u64),
        );
    }
    let at = placement.structure("command line", cmdline, 16)?;
    put(&mut params, offset::CMD_LINE_PTR, address32(at));
    let params = placement.structure("boot parameters", params, PAGE)?;
    let mut state = if header.long {
        entry::long(placement, kernel + ENTRY_64)?
    } else {
        entry::protected(placement, kernel)?
    };
    state.gpr[gpr::RSI] = params;
    Ok(state)
}

/// Places the kernel with the memory that it needs before it reads the memory map.
///
/// It goes to its preferred address, or above if it is relocatable: if it were loaded below, it
/// would move itself to the preferred address.
fn place_kernel<'a>(
    placement: &mut Placement<'a>,
    image: &'a [u8],
    header: &SetupHeader,
) -> Result<u64, BootError> {
    let data = &image[header.kernel_offset..][..header.kernel_size];
    let size = u64::from(header.init_size).max(data.len() as u64);
    if !header.relocatable {
        if header.preferred < EXTENDED_START {
            return Err(BootError::LinuxAddress(header.preferred));
        }
        placement.fixed("kernel", header.preferred, size, data)?;
        return Ok(header.preferred);
    }
    let align = u64::from(header.alignment);
    if !align.is_power_of_two() || align < PAGE {
        return Err(BootError::LinuxAlignment(header.alignment));
    }
    let above = header.preferred.max(EXTENDED_START)..placement.ram_end();
    placement.fit_sized("kernel", size, data, align, above, Fit::Lowest)
}

/// The fields of `screen_info` that make a kernel use the text screen: mode 3 of a VGA.
fn put_text_screen(params: &mut [u8]) {
    let fields = [
        (offset::ORIG_VIDEO_MODE, 3),
        (offset::ORIG_VIDEO_COLS, 80),
        (offset::ORIG_VIDEO_EGA_BX, 3),
        (offset::ORIG_VIDEO_LINES, 25),
        (offset::ORIG_VIDEO_IS_VGA, 1),
        (offset::ORIG_VIDEO_POINTS, 16),
    ];
    for (at, value) in fields {
        put(params, at, [value]);
    }
}

/// The boot parameters: the file's setup header with the loader's fields, except addresses.
fn parameters(layout: &Layout, image: &[u8], header: &SetupHeader) -> Vec<u8> {
    let mut params = vec![0; PARAMS_SIZE];
    let setup = offset::HEADER..header.end;
    params[setup.clone()].copy_from_slice(&image[setup]);
    put(&mut params, offset::TYPE_OF_LOADER, [LOADER_UNKNOWN]);
    put(
        &mut params,
        offset::LOADFLAGS,
        [header.loadflags & !CAN_USE_HEAP],
    );
    put(&mut params, offset::VID_MODE, VIDEO_NORMAL.to_le_bytes());
    put(&mut params, offset::RAMDISK_IMAGE, [0; 8]);
    put(&mut params, offset::BOOTSECT_KLUDGE, [0; 8]);
    put(&mut params, offset::SETUP_DATA, [0; 8]);
    let rsdp = layout.rsdp().unwrap_or(0);
    put(&mut params, offset::ACPI_RSDP_ADDR, rsdp.to_le_bytes());
    let mut at = offset::E820_TABLE;
    for range in layout.memory_map() {
        put(&mut params, at, range.base.to_le_bytes());
        put(&mut params, at + 8, range.size.to_le_bytes());
        put(&mut params, at + 16, (range.kind as u32).to_le_bytes());
        at += 20;
        params[offset::E820_ENTRIES] += 1;
    }
    params
}
