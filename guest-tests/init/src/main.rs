//! The first program of a Linux guest of `hindsight exec`.
//!
//! It loads the modules of the initramfs, mounts the host's root below an overlay in memory, runs the
//! command with the user, folder and environment of the host, passes its input and output through the
//! ports of a virtio console, and reports how it ended.

#![no_std]
#![no_main]

mod ports;
mod request;
mod sys;
mod text;

use core::arch::global_asm;
use core::ffi::CStr;

use ports::{Port, find_port, pump};
use request::Request;
use text::{Text, decimal};

global_asm!(
    ".globl _start",
    "_start:",
    "xor %ebp, %ebp",
    "and $-16, %rsp",
    "call {main}",
    "ud2",
    main = sym main,
    options(att_syntax)
);

/// The largest list of modules, and the largest request.
const FILE_MAX: usize = 1 << 21;

/// Memory that a file is read to, once.
struct FileBuffer(core::cell::UnsafeCell<[u8; FILE_MAX]>);

// SAFETY: init has one thread, and takes each buffer once.
unsafe impl Sync for FileBuffer {}

static REQUEST: FileBuffer = FileBuffer(core::cell::UnsafeCell::new([0; FILE_MAX]));
static MODULES: FileBuffer = FileBuffer(core::cell::UnsafeCell::new([0; FILE_MAX]));

/// Reads a file into a buffer that no other call uses.
fn read_file(path: &CStr, buffer: &'static FileBuffer) -> &'static [u8] {
    // SAFETY: each buffer is named by one call, which is made once.
    let bytes = unsafe { &mut *buffer.0.get() };
    let mut len = 0;
    if let Ok(file) = sys::open(path, sys::O_RDONLY) {
        while let Ok(count) = sys::read(file, &mut bytes[len..]) {
            if count == 0 {
                break;
            }
            len += count;
        }
        sys::close(file);
    }
    &bytes[..len]
}

fn write_file(path: &CStr, bytes: &[u8]) {
    if let Ok(file) = sys::open(path, sys::O_WRONLY) {
        let _ = sys::write(file, bytes);
        sys::close(file);
    }
}

/// Writes a message to the console, and with a port also there.
fn complain(action: &[u8], name: &[u8], error: i32) {
    let mut digits = [0; 10];
    let number = decimal(error.unsigned_abs(), &mut digits);
    let line = Text::of(&[
        b"hindsight-init: ",
        action,
        b" ",
        name,
        b": error ",
        number,
        b"\n",
    ]);
    write_file(c"/dev/console", line.as_bytes());
}

/// Mounts a file system at a directory that it makes.
fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: usize, data: &CStr) -> bool {
    sys::mkdir(target);
    let mounted = sys::mount(source, target, kind, flags, data);
    if let Err(error) = mounted {
        complain(b"cannot mount", target.to_bytes(), error);
    }
    mounted.is_ok()
}

fn load_modules() {
    for name in read_file(c"/modules/list", &MODULES).split(|byte| *byte == b'\n') {
        if name.is_empty() {
            continue;
        }
        let path = Text::of(&[b"/modules/", name]);
        let loaded = sys::open(path.as_c(), sys::O_RDONLY | sys::O_CLOEXEC).and_then(|file| {
            let loaded = sys::load_module(file);
            sys::close(file);
            loaded
        });
        if let Err(error) = loaded
            && error != sys::EEXIST
        {
            complain(b"cannot load module", name, error);
        }
    }
}

/// Mounts the host's root below an overlay, with the folders that may be changed, and makes it the
/// root.
fn enter_root(request: &Request) -> bool {
    let ready = mount(c"root", c"/host", c"virtiofs", sys::MS_RDONLY, c"")
        && mount(c"overlay", c"/changes", c"tmpfs", 0, c"size=80%");
    if !ready {
        return false;
    }
    sys::mkdir(c"/changes/upper");
    sys::mkdir(c"/changes/work");
    let layers = c"lowerdir=/host,upperdir=/changes/upper,workdir=/changes/work";
    if !mount(c"overlay", c"/new", c"overlay", 0, layers) {
        return false;
    }
    for (index, folder) in (0_u32..).zip(request.writable.iter().flatten()) {
        let mut digits = [0; 10];
        let tag = Text::of(&[b"rw", decimal(index, &mut digits)]);
        let target = Text::of(&[b"/new", folder.to_bytes()]);
        if !mount(tag.as_c(), target.as_c(), c"virtiofs", 0, c"") {
            return false;
        }
    }
    mount(c"proc", c"/new/proc", c"proc", 0, c"");
    mount(c"sysfs", c"/new/sys", c"sysfs", 0, c"");
    mount(c"devtmpfs", c"/new/dev", c"devtmpfs", 0, c"");
    mount(
        c"devpts",
        c"/new/dev/pts",
        c"devpts",
        0,
        c"gid=5,mode=620,ptmxmode=666",
    );
    mount(c"tmpfs", c"/new/dev/shm", c"tmpfs", 0, c"mode=1777");
    let _ = sys::mount(c"tracefs", c"/new/sys/kernel/tracing", c"tracefs", 0, c"");
    sys::chdir(c"/new").is_ok()
        && sys::mount(c".", c"/", c"", sys::MS_MOVE, c"").is_ok()
        && sys::chroot(c".").is_ok()
}

/// Lets every user measure: this machine has nothing to hide from its one command.
fn allow_measuring() {
    write_file(c"/proc/sys/kernel/perf_event_paranoid", b"-1");
    write_file(c"/proc/sys/kernel/kptr_restrict", b"0");
    write_file(c"/proc/sys/kernel/yama/ptrace_scope", b"0");
}

/// Executes the command in this process.
fn execute(request: &Request) -> ! {
    let Some(program) = request.program else {
        sys::exit(127)
    };
    sys::umask(request.umask);
    if let Err(error) = sys::set_user(request.user.0, request.user.1, request.groups()) {
        complain(b"cannot become", b"the user", error);
    }
    let name = program.to_bytes();
    let mut error = sys::ENOENT;
    if sys::chdir(request.folder).is_err() {
        let line = [
            b"hindsight: the guest cannot enter ",
            request.folder.to_bytes(),
            b"\n",
        ];
        let _ = sys::write_all(2, Text::of(&[line[0], line[1], line[2]]).as_bytes());
        sys::exit(126);
    }
    let (args, environment) = (request.args.pointers(), request.environment.pointers());
    if name.contains(&b'/') {
        error = sys::execve(program, args, environment);
    } else {
        for folder in request.search_path.split(|byte| *byte == b':') {
            let path = Text::of(&[folder, b"/", name]);
            match sys::execve(path.as_c(), args, environment) {
                sys::ENOENT | sys::ENOTDIR => {}
                other => error = other,
            }
        }
    }
    let mut digits = [0; 10];
    let number = decimal(error.unsigned_abs(), &mut digits);
    let line: &[&[u8]] = if error == sys::ENOENT {
        &[b"hindsight: ", name, b": command not found\n"]
    } else {
        &[
            b"hindsight: ",
            name,
            b": cannot be executed: error ",
            number,
            b"\n",
        ]
    };
    let _ = sys::write_all(2, Text::of(line).as_bytes());
    sys::exit(if error == sys::ENOENT { 127 } else { 126 })
}

/// Starts the command on the console's terminal.
fn start_on_terminal(request: &Request) -> Option<usize> {
    let child = sys::fork().ok()?;
    if child != 0 {
        return Some(child);
    }
    sys::setsid();
    // The terminal appears soon after its port.
    let mut terminal = sys::open(c"/dev/hvc0", sys::O_RDWR);
    for _ in 0..1000 {
        if terminal.is_ok() {
            break;
        }
        sys::sleep_ms(2);
        terminal = sys::open(c"/dev/hvc0", sys::O_RDWR);
    }
    if let Ok(file) = terminal {
        sys::set_terminal(file);
        for standard in 0..3 {
            let _ = sys::dup2(file, standard);
        }
    }
    execute(request)
}

/// The processes that pass standard output and standard error on.
type Pumps = [usize; 2];

/// Starts the command with pipes, which other processes connect to the ports.
fn start_on_pipes(request: &Request) -> Option<(usize, Pumps)> {
    let (input, output, errors) = (sys::pipe().ok()?, sys::pipe().ok()?, sys::pipe().ok()?);
    let child = sys::fork().ok()?;
    if child == 0 {
        sys::setsid();
        for (standard, file) in [input.0, output.1, errors.1].into_iter().enumerate() {
            let _ = sys::dup2(file, standard);
        }
        for file in [input.0, input.1, output.0, output.1, errors.0, errors.1] {
            if file > 2 {
                sys::close(file);
            }
        }
        execute(request)
    }
    for file in [input.0, output.1, errors.1] {
        sys::close(file);
    }
    let pass_input = || {
        for file in [output.0, errors.0] {
            sys::close(file);
        }
        if let Some(port) = find_port(b"stdin", Port::Reads) {
            pump(port, input.1);
        }
    };
    let pass_output = |name: &[u8], from, other| {
        for file in [input.1, other] {
            sys::close(file);
        }
        if let Some(port) = find_port(name, Port::Writes) {
            pump(from, port);
        }
    };
    if sys::fork().ok()? == 0 {
        pass_input();
        sys::exit(0)
    }
    let first = sys::fork().ok()?;
    if first == 0 {
        pass_output(b"stdout", output.0, errors.0);
        sys::exit(0)
    }
    let second = sys::fork().ok()?;
    if second == 0 {
        pass_output(b"stderr", errors.0, output.0);
        sys::exit(0)
    }
    for file in [input.1, output.0, errors.0] {
        sys::close(file);
    }
    Some((child, [first, second]))
}

/// Passes the host's signals, one byte each, to the command.
fn pass_signals(child: usize) {
    if sys::fork() != Ok(0) {
        return;
    }
    if let Some(port) = find_port(b"signals", Port::Reads) {
        let mut signal = [0];
        while let Ok(1) = sys::read(port, &mut signal) {
            sys::kill_group(child, signal[0].into());
        }
    }
    sys::exit(0)
}

/// Waits for the command, and then for its output, at most for a second. Returns how it ended.
fn wait_for(child: usize, pumps: Pumps) -> u32 {
    let mut running = pumps.map(|pump| pump != 0);
    let mut mark_end = |pid: usize| {
        for (pump, running) in pumps.iter().zip(&mut running) {
            *running &= *pump != pid;
        }
        running != [false; 2]
    };
    let status = loop {
        match sys::wait(0) {
            Ok((pid, status)) if pid == child => break status,
            Ok((pid, _)) => {
                mark_end(pid);
            }
            Err(sys::EINTR) => {}
            Err(_) => break 0,
        }
    };
    let mut more = mark_end(0);
    for _ in 0..1000 {
        if !more {
            break;
        }
        match sys::wait(sys::WNOHANG) {
            Ok((0, _)) => sys::sleep_ms(1),
            Ok((pid, _)) => more = mark_end(pid),
            Err(_) => break,
        }
    }
    status
}

/// Reports how the command ended, in one line, and switches the machine off.
fn finish(report: Option<usize>, kind: &[u8], value: u32) -> ! {
    sys::sync();
    let mut digits = [0; 10];
    let line = Text::of(&[kind, b" ", decimal(value, &mut digits), b"\n"]);
    if let Some(port) = report {
        let _ = sys::write_all(port, line.as_bytes());
    }
    loop {
        sys::power_off();
        sys::sleep_ms(1000);
    }
}

extern "C" fn main() -> ! {
    mount(c"proc", c"/proc", c"proc", 0, c"");
    mount(c"sysfs", c"/sys", c"sysfs", 0, c"");
    mount(c"devtmpfs", c"/dev", c"devtmpfs", 0, c"");
    // Without an initial console the first files would become standard input and output.
    if let Ok(console) = sys::open(c"/dev/console", sys::O_RDWR) {
        for standard in 0..3 {
            let _ = sys::dup2(console, standard);
        }
    }
    load_modules();
    let mut request = Request::new();
    request.parse(read_file(c"/exec", &REQUEST));
    sys::set_host_name(request.host_name.to_bytes());
    let report = find_port(b"report", Port::Writes);
    if !enter_root(&request) {
        finish(report, b"failed", 1);
    }
    allow_measuring();
    if let Some(port) = report {
        let _ = sys::write_all(port, b"started\n");
    }
    let started = if request.terminal {
        start_on_terminal(&request).map(|child| (child, [0; 2]))
    } else {
        start_on_pipes(&request)
    };
    let Some((child, pumps)) = started else {
        finish(report, b"failed", 2)
    };
    pass_signals(child);
    let status = wait_for(child, pumps);
    match status & 0x7f {
        0 => finish(report, b"exit", status >> 8 & 0xff),
        signal => finish(report, b"signal", signal),
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    write_file(c"/dev/console", b"hindsight-init: a bug\n");
    sys::exit(1)
}
