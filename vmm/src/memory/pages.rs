//! The pages of guest memory that hold data, found through the memory file.

use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Calls `each` for every 4-KiB page that is not all zero, in order of its offset in the memory
/// file.
///
/// It passes the offset and the bytes. Holes of the file are not read. No vCPU may run meanwhile.
///
/// # Errors
///
/// The memory file cannot be read.
pub fn nonzero_pages(memory: &GuestMemoryMmap, mut each: impl FnMut(u64, &[u8])) -> io::Result<()> {
    const PAGE: usize = 4096;
    let Some(file) = memory.iter().find_map(|region| region.file_offset()) else {
        return Ok(());
    };
    let file = file.file();
    let mut buffer = vec![0; 256 * PAGE];
    let mut at = 0;
    loop {
        at = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data / PAGE as u64 * PAGE as u64,
            // The rest of the file is a hole.
            Err(Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let hole = seek(file, SeekFrom::Hole(at))?;
        while at < hole {
            let len = usize::try_from(hole - at).map_or(buffer.len(), |n| n.min(buffer.len()));
            file.read_exact_at(&mut buffer[..len], at)?;
            for page in buffer[..len].chunks(PAGE) {
                if page.iter().any(|&byte| byte != 0) {
                    each(at, page);
                }
                at += page.len() as u64;
            }
        }
    }
}

/// The guest-physical address of an offset in the memory file.
pub fn offset_to_address(memory: &GuestMemoryMmap, offset: u64) -> Option<u64> {
    memory.iter().find_map(|region| {
        let within = offset.checked_sub(region.file_offset()?.start())?;
        (within < region.len()).then(|| region.start_addr().0 + within)
    })
}
