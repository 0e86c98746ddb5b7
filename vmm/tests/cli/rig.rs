//! Guests of a few instructions, and `hindsight run` as a child process.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hindsight_vmm::kvm;
use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// Whether KVM can be used here; prints why `test` is skipped if not.
pub fn has_kvm(test: &str) -> bool {
    let usable = kvm::open_device().is_ok_and(|kvm| kvm.create_vm().is_ok());
    if !usable {
        eprintln!("skipped: {test}: /dev/kvm cannot be used here");
    }
    usable
}

/// Writes code of `bits` for the address `origin` to a file.
pub fn image(
    path: &Path,
    (bits, origin): (u32, u64),
    code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) {
    let mut assembler = CodeAssembler::new(bits).expect("a possible width");
    code(&mut assembler).expect("the code is valid");
    let image = assembler.assemble(origin).expect("the code fits");
    fs::write(path, image).expect("the image can be written");
}

/// Writes 16-bit code for `--mode real` to a file.
pub fn real(path: &Path, code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    image(path, (16, 0x7c00), code);
}

/// Writes 32-bit code for `--mode protected`.
pub fn protected(path: &Path, code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    image(path, (32, 0x10_0000), code);
}

/// Writes 32-bit code for `--mode protected` that faults without an IDT.
pub fn crash(path: &Path) {
    protected(path, |a| {
        a.mov(eax, 0x1234_5678)?;
        a.ud2()
    });
}

pub fn spin(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.jmp(again)
}

/// A guest that writes `count` bytes to COM1 and then exits with code 5; without a count, it writes
/// forever.
pub fn flood(a: &mut CodeAssembler, count: Option<u32>) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(ecx, count.unwrap_or(1))?;
    a.mov(dx, 0x3f8)?;
    a.mov(al, u32::from(b'x'))?;
    a.set_label(&mut again)?;
    a.out(dx, al)?;
    if count.is_some() {
        a.dec(ecx)?;
        a.jnz(again)?;
        a.mov(al, 5)?;
        return a.out(0xf4, al);
    }
    a.jmp(again)
}

/// `hindsight` in `folder`, with nothing on standard input.
pub fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hindsight"));
    command
        .args(arguments)
        .current_dir(folder)
        .env_remove("RUST_BACKTRACE")
        .env_remove("HINDSIGHT_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// `hindsight run --engine kvm` in `folder`, with nothing on standard input.
pub fn hindsight(folder: &Path, arguments: &[&str]) -> Command {
    command(folder, &[&["run", "--engine", "kvm"], arguments].concat())
}

/// Waits for the end of `child`; panics if that takes 30 seconds.
pub fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(30) {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            return status;
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    panic!("the process does not end");
}

pub fn output(folder: &Path, arguments: &[&str]) -> Output {
    let mut child = hindsight(folder, arguments).spawn().expect("it starts");
    let status = wait(&mut child);
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut pipes = (child.stdout.take(), child.stderr.take());
    if let (Some(out), Some(err)) = (&mut pipes.0, &mut pipes.1) {
        out.read_to_end(&mut stdout).expect("a pipe");
        err.read_to_end(&mut stderr).expect("a pipe");
    }
    Output {
        status,
        stdout,
        stderr,
    }
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn listing(folder: &Path) -> Vec<(String, u64)> {
    let entries = fs::read_dir(folder).expect("the folder exists");
    let mut names: Vec<_> = entries
        .flatten()
        .map(|entry| {
            let len = entry.metadata().map_or(0, |m| m.len());
            (entry.file_name().to_string_lossy().into_owned(), len)
        })
        .collect();
    names.sort();
    names
}

/// A multiboot image with the addresses in its header, whose code is never run.
pub fn multiboot(load_end: u32) -> Vec<u8> {
    const MAGIC: u32 = 0x1bad_b002;
    const ADDRESSES: u32 = 1 << 16;
    const LOAD: u32 = 0x10_0000;
    let checksum = 0_u32.wrapping_sub(MAGIC).wrapping_sub(ADDRESSES);
    let fields = [
        MAGIC,
        ADDRESSES,
        checksum,
        LOAD,
        LOAD,
        load_end,
        0,
        LOAD + 32,
    ];
    let mut image: Vec<u8> = fields.iter().flat_map(|f| f.to_le_bytes()).collect();
    image.resize(64, 0);
    image
}

/// Writes the images, good and bad, of the tests on bad input.
pub fn files(folder: &Path) {
    let put =
        |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).expect("it can be written");
    real(&folder.join("spin"), spin);
    put("empty", b"");
    put("text", b"this is not a kernel\n");
    put("bad.toml", b"model = 'host'\ncores = 9\n");
    put("elf-cut", b"\x7fELF\x02\x01\x01");
    let mut elf = vec![0; 64];
    elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    elf[32] = 0xff;
    elf[56] = 0xff;
    put("elf-bad", &elf);
    put("gzip", b"\x1f\x8b\x08\0\0\0\0\0");
    let mut linux = vec![0; 0x300];
    linux[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    linux[0x202..0x206].copy_from_slice(b"HdrS");
    put("linux-cut", &linux);
    put("multiboot", &multiboot(0x10_0040));
    put("multiboot-cut", &multiboot(0x20_0000));
    let big = File::create(folder.join("big")).expect("it can be made");
    big.set_len(16 << 20).expect("a sparse file takes no space");
}
