//! System calls of Linux on x86-64.

use core::arch::asm;
use core::ffi::CStr;

/// A system call's result: a value, or the number of an error.
pub type SysResult = Result<usize, i32>;

/// Calls Linux.
///
/// # Safety
/// The arguments must be those of the system call: pointers are valid for what it reads and writes.
unsafe fn syscall(number: usize, args: [usize; 5]) -> SysResult {
    let result: isize;
    // SAFETY: by the contract of this function; the kernel changes RAX, RCX, R11 and memory.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    match usize::try_from(result) {
        Ok(value) => Ok(value),
        Err(_) => Err(i32::try_from(-result).unwrap_or(i32::MAX)),
    }
}

/// Calls Linux with arguments that are numbers, or pointers that outlive the call.
macro_rules! call {
    ($number:expr $(, $arg:expr)*) => {{
        let given: &[usize] = &[$($arg),*];
        let mut args = [0; 5];
        args[..given.len()].copy_from_slice(given);
        // SAFETY: each caller passes what its system call expects, by references that it holds.
        unsafe { syscall($number, args) }
    }};
}

fn text(text: &CStr) -> usize {
    text.as_ptr().expose_provenance()
}

/// Opens a file.
pub fn open(path: &CStr, flags: usize) -> SysResult {
    call!(2, text(path), flags, 0o600)
}

/// Closes a file.
pub fn close(file: usize) {
    let _ = call!(3, file);
}

/// Reads from a file.
pub fn read(file: usize, buffer: &mut [u8]) -> SysResult {
    call!(
        0,
        file,
        buffer.as_mut_ptr().expose_provenance(),
        buffer.len()
    )
}

/// Writes to a file.
pub fn write(file: usize, buffer: &[u8]) -> SysResult {
    call!(1, file, buffer.as_ptr().expose_provenance(), buffer.len())
}

/// Writes all bytes to a file.
pub fn write_all(file: usize, mut buffer: &[u8]) -> Result<(), i32> {
    while !buffer.is_empty() {
        match write(file, buffer) {
            Ok(count) => buffer = &buffer[count..],
            Err(EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Makes a pipe; returns its reading and its writing end.
pub fn pipe() -> Result<(usize, usize), i32> {
    let mut ends = [0_i32; 2];
    call!(22, ends.as_mut_ptr().expose_provenance())?;
    let end = |file| usize::try_from(file).unwrap_or(0);
    Ok((end(ends[0]), end(ends[1])))
}

/// Makes `to` another number of the open file `from`.
pub fn dup2(from: usize, to: usize) -> SysResult {
    call!(33, from, to)
}

/// Sleeps.
pub fn sleep_ms(ms: usize) {
    let time = [ms / 1000, ms % 1000 * 1_000_000];
    let _ = call!(35, time.as_ptr().expose_provenance(), 0);
}

/// Makes a process; returns 0 in the new one.
pub fn fork() -> SysResult {
    call!(57)
}

/// Executes a program. Returns only with an error.
pub fn execve(path: &CStr, args: &[*const u8], environment: &[*const u8]) -> i32 {
    debug_assert!(args.ends_with(&[core::ptr::null()]));
    debug_assert!(environment.ends_with(&[core::ptr::null()]));
    let args = args.as_ptr().expose_provenance();
    let environment = environment.as_ptr().expose_provenance();
    call!(59, text(path), args, environment).err().unwrap_or(0)
}

/// Ends this process.
pub fn exit(status: usize) -> ! {
    loop {
        let _ = call!(231, status);
    }
}

/// Waits for any child; returns its number and how it ended.
pub fn wait(options: usize) -> Result<(usize, u32), i32> {
    let mut status = 0_u32;
    let pid = call!(
        61,
        usize::MAX,
        (&raw mut status).expose_provenance(),
        options,
        0
    )?;
    Ok((pid, status))
}

/// Sends a signal to a process group.
pub fn kill_group(leader: usize, signal: usize) {
    let _ = call!(62, leader.wrapping_neg(), signal);
}

/// Changes the current directory.
pub fn chdir(path: &CStr) -> SysResult {
    call!(80, text(path))
}

/// Makes a directory.
pub fn mkdir(path: &CStr) {
    let _ = call!(83, text(path), 0o755);
}

/// Sets the mask of file modes.
pub fn umask(mask: usize) {
    let _ = call!(95, mask);
}

/// Sets groups, group and user.
pub fn set_user(user: u32, group: u32, groups: &[u32]) -> Result<(), i32> {
    call!(116, groups.len(), groups.as_ptr().expose_provenance())?;
    call!(119, group as usize, group as usize, group as usize)?;
    call!(117, user as usize, user as usize, user as usize)?;
    Ok(())
}

/// Begins a session.
pub fn setsid() {
    let _ = call!(112);
}

/// Makes a file the controlling terminal of the session.
pub fn set_terminal(file: usize) {
    let _ = call!(16, file, 0x540e, 0);
}

/// Mounts a file system.
pub fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: usize, data: &CStr) -> SysResult {
    call!(
        165,
        text(source),
        text(target),
        text(kind),
        flags,
        text(data)
    )
}

/// Changes the root directory.
pub fn chroot(path: &CStr) -> SysResult {
    call!(161, text(path))
}

/// Writes out all files.
pub fn sync() {
    let _ = call!(162);
}

/// Switches the machine off.
pub fn power_off() {
    let _ = call!(169, 0xfee1_dead, 0x2812_1969, 0x4321_fedc, 0);
}

/// Loads a kernel module.
pub fn load_module(file: usize) -> SysResult {
    call!(313, file, text(c""), 0)
}

/// Sets the host name.
pub fn set_host_name(name: &[u8]) {
    let _ = call!(170, name.as_ptr().expose_provenance(), name.len());
}

/// Open for reading.
pub const O_RDONLY: usize = 0;
/// Open for writing.
pub const O_WRONLY: usize = 1;
/// Open for reading and writing.
pub const O_RDWR: usize = 2;
/// Close when a program is executed.
pub const O_CLOEXEC: usize = 0o2_000_000;

/// Mount flags: read-only, move.
pub const MS_RDONLY: usize = 1;
/// Moves a mount.
pub const MS_MOVE: usize = 1 << 13;

/// Wait only for children that have ended.
pub const WNOHANG: usize = 1;

/// A signal interrupted the call.
pub const EINTR: i32 = 4;
/// No such file.
pub const ENOENT: i32 = 2;
/// Not a directory.
pub const ENOTDIR: i32 = 20;
/// The file exists already.
pub const EEXIST: i32 = 17;
