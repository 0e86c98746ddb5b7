//! The binary, run on images made here, in the interpreter and under KVM.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use hindsight_vmm::kvm;

use super::guest::{
    Code, assemble, check_eax, cpuid, exit, flat, linux, multiboot, say, start_info,
};
use super::images::{ElfImage, Load, bzimage, multiboot_header};
use iced_x86::code_asm::*;

/// Where images are loaded, but for boot sectors.
const AT: u64 = 0x10_0000;

const REAL: &str = "flags=00000002 cr0=00000010 cs=00000000 ds=00000000\n";
const PROTECTED: &str = "flags=00000002 cr0=00000011 cs=00000010 ds=00000018\n";
const LONG: &str = "flags=00000002 cr0=80000011 cs=00000010 ds=00000018 efer=00000500\n";

/// The engines that can run here.
fn engines() -> Vec<&'static str> {
    let usable = kvm::open_device().is_ok_and(|kvm| kvm.create_vm().is_ok());
    if usable {
        return vec!["interp", "kvm"];
    }
    eprintln!("only in the interpreter: /dev/kvm cannot be used here");
    vec!["interp"]
}

/// A folder with an initrd and a module.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("initrd"), b"first file").unwrap();
    fs::write(folder.path().join("module"), b"second file").unwrap();
    folder
}

/// `hindsight run image`, with 64 MiB of memory.
fn run(folder: &Path, engine: &str, image: &[u8], arguments: &[&str]) -> Output {
    fs::write(folder.join("image"), image).unwrap();
    Command::new(env!("CARGO_BIN_EXE_hindsight"))
        .args(["run", "image", "--engine", engine])
        .args(["--memory", "64M", "--timeout", "60"])
        .args(arguments)
        .current_dir(folder)
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Runs the image with every engine: it must print exactly `text` and end with the verdict.
fn boots(image: &[u8], arguments: &[&str], verdict: i32, text: &str) {
    let folder = folder();
    for engine in engines() {
        let output = run(folder.path(), engine, image, arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(stdout, text, "{engine}: {stderr}");
        assert_eq!(stderr, "", "{engine}");
        assert_eq!(output.status.code(), Some(verdict << 1 | 1), "{engine}");
    }
}

fn code(bits: u32, code: impl FnOnce(&mut CodeAssembler) -> Code) -> Vec<u8> {
    assemble(bits, AT, code)
}

#[test]
fn boot_sector_is_entered_in_real_mode() {
    let mut sector = assemble(16, 0x7c00, flat);
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    let text = format!("{REAL}edx=00000080\n");
    boots(&sector, &["--mode", "real"], 0, &text);
    boots(&sector, &["--protocol", "flat"], 0, &text);
}

#[test]
fn flat_image_is_entered_where_the_user_says() {
    let mut image = vec![0xcc; 0x20];
    image.extend(assemble(16, 0x3_0020, flat));
    let arguments = ["--load-address", "0x30000", "--entry", "0x30020"];
    let state = REAL.replace(" cs=00000000", " cs=00003002");
    boots(&image, &arguments, 0, &format!("{state}edx=00000080\n"));
}

#[test]
fn flat_image_is_entered_in_protected_mode() {
    let text = format!("{PROTECTED}edx=00000000\n");
    boots(&code(32, flat), &["--mode", "protected"], 0, &text);
}

#[test]
fn flat_image_is_entered_in_long_mode() {
    let text = format!("{LONG}edx=00000000\n");
    boots(&code(64, flat), &["--mode", "long"], 0, &text);
}

/// What goes along with images that take it.
const ALL: [&str; 8] = [
    "--cmdline",
    "console=ttyS0 a=\"b c\"",
    "--initrd",
    "initrd",
    "--module",
    "module=key=value x",
    "--module",
    "module",
];
/// What a guest says to that.
const ALL_TEXT: &str = "cmdline=console=ttyS0 a=\"b c\"\n\
    module=first file args=\n\
    module=second file args=key=value x\n\
    module=second file args=\n";

/// Boots an image that is given start info, with nothing along and with everything.
fn boots_with_start_info(image: &[u8], state: &str) {
    let info = "version=00000001 ranges=00000003\n";
    boots(image, &[], 0, &format!("{state}{info}cmdline=\n"));
    boots(image, &ALL, 0, &format!("{state}{info}{ALL_TEXT}"));
}

#[test]
fn elf32_is_entered_in_protected_mode_with_start_info() {
    let image = ElfImage::new(false, AT, &code(32, start_info)).build();
    boots_with_start_info(&image, PROTECTED);
}

#[test]
fn elf64_is_entered_in_long_mode_with_start_info() {
    let image = ElfImage::new(true, AT, &code(64, start_info)).build();
    boots_with_start_info(&image, LONG);
}

#[test]
fn pvh_is_entered_in_protected_mode_with_start_info() {
    for bits64 in [false, true] {
        let image = ElfImage::pvh(bits64, AT, &code(32, start_info)).build();
        boots_with_start_info(&image, PROTECTED);
    }
}

#[test]
fn pvh_image_booted_as_plain_elf_is_entered_by_its_header() {
    let mut elf = ElfImage::pvh(true, AT, &code(32, start_info));
    let plain = code(64, |a| {
        say(a, "plain\n")?;
        exit(a, 7)
    });
    elf.loads.push(Load::at(2 * AT, &plain));
    elf.entry = 2 * AT;
    boots(&elf.build(), &["--protocol", "elf"], 7, "plain\n");
}

#[test]
fn elf_segments_are_loaded_with_zeros_behind_them() {
    let kernel = code(32, |a| {
        a.mov(eax, dword_ptr(0x30_0000))?;
        check_eax(a, 0x1122_3344, 2)?;
        a.mov(eax, dword_ptr(0x30_0004))?;
        check_eax(a, 0, 3)?;
        exit(a, 0)
    });
    let mut elf = ElfImage::new(false, AT, &kernel);
    elf.loads.push(Load {
        memory_size: 0x2000,
        ..Load::at(0x30_0000, &0x1122_3344_u32.to_le_bytes())
    });
    boots(&elf.build(), &[], 0, "");
}

/// A multiboot kernel as ELF: the header, with no flags but `flags`, and behind it the code.
fn multiboot_elf(bits64: bool, flags: u32) -> Vec<u8> {
    let mut data = multiboot_header(flags, &[]);
    let entry = AT + data.len() as u64;
    data.extend(assemble(32, entry, multiboot));
    let mut elf = ElfImage::new(bits64, AT, &data);
    elf.entry = entry;
    elf.build()
}

/// Boots a multiboot kernel, with nothing along and with everything.
fn boots_by_multiboot(image: &[u8]) {
    let memory = "lower=0000027f upper=0000fc00\n";
    // The name of the file comes first.
    let nothing = format!("{PROTECTED}info=00000245 {memory}cmdline=image\n");
    boots(image, &[], 0, &nothing);
    let text = "cmdline=image console=ttyS0 a=\"b c\"\n\
        module=first file args=initrd\n\
        module=second file args=module key=value x\n\
        module=second file args=module\n";
    let all = format!("{PROTECTED}info=0000024d {memory}{text}");
    boots(image, &ALL, 0, &all);
}

#[test]
fn multiboot_elf_is_entered_with_its_information() {
    boots_by_multiboot(&multiboot_elf(false, 0));
    boots_by_multiboot(&multiboot_elf(false, 3));
    boots_by_multiboot(&multiboot_elf(true, 3));
}

#[test]
fn multiboot_with_addresses_is_loaded_by_them() {
    // Bytes that are not loaded, the header, the code, and a BSS.
    const SKIPPED: u32 = 0x40;
    const HEADER: u32 = 0x10_0000;
    const ENTRY: u32 = HEADER + 32;
    let kernel = assemble(32, ENTRY.into(), multiboot);
    let end = ENTRY + u32::try_from(kernel.len()).unwrap();
    let mut image = vec![0xcc; SKIPPED as usize];
    let addresses = [HEADER, HEADER, end, end + 0x1000, ENTRY];
    image.extend(multiboot_header(0x1_0003, &addresses));
    image.extend(kernel);
    boots_by_multiboot(&image);
}

#[test]
fn multiboot_kernel_booted_as_plain_elf_misses_the_magic() {
    boots(&multiboot_elf(false, 0), &["--protocol", "elf"], 2, "");
}

#[test]
fn linux_is_entered_in_long_mode_with_boot_parameters() {
    // The kernel follows 0x600 bytes of setup, and its 64-bit entry point is 0x200 behind its
    // start.
    let kernel = assemble(64, 0x100_0200, linux);
    let mut image = bzimage();
    assert!(kernel.len() <= image.len() - 0x800);
    image[0x800..0x800 + kernel.len()].copy_from_slice(&kernel);
    let params = "loader=000000ff ranges=00000003\n";
    let text = format!("{LONG}{params}cmdline=\ninitrd=\n");
    boots(&image, &[], 0, &text);
    let arguments = ["--cmdline", "quiet", "--initrd", "initrd"];
    let text = format!("{LONG}{params}cmdline=quiet\ninitrd=first file\n");
    boots(&image, &arguments, 0, &text);
}

#[test]
fn wrongly_named_protocol_is_refused_with_a_reason() {
    let flat = code(32, flat);
    let elf = ElfImage::new(false, AT, &code(32, start_info)).build();
    let rows: [(&[u8], &str, &str); 8] = [
        (&flat, "elf", "the image is not ELF"),
        (&flat, "pvh", "the image is not ELF"),
        (&flat, "multiboot", "no multiboot header"),
        (&flat, "linux", "has no boot header"),
        (&elf, "pvh", "has no PVH note"),
        (&elf, "multiboot", "no multiboot header"),
        (&elf, "linux", "has no boot header"),
        (&elf, "multiboot2", "invalid value 'multiboot2'"),
    ];
    let folder = folder();
    for (image, protocol, reason) in rows {
        let arguments = ["--protocol", protocol];
        let output = run(folder.path(), "interp", image, &arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(reason), "{protocol}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{protocol}: {stderr}");
        assert_eq!(output.status.code(), Some(2), "{protocol}");
        assert_eq!(output.stdout, b"", "{protocol}");
    }
}

#[test]
fn host_processor_is_shown_to_the_guest() {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_once(": ").unwrap().1.to_owned()
    };
    let number = |name: &str| field(name).parse::<u32>().unwrap();
    let (family, model) = (number("cpu family"), number("model\t"));
    let signature = (family.saturating_sub(15) << 20)
        | ((model >> 4) << 16)
        | (family.min(15) << 8)
        | ((model & 0xf) << 4)
        | number("stepping");
    let text = format!("vendor={} signature={signature:08x}\n", field("vendor_id"));
    let arguments = ["--mode", "long", "--cpu", "host"];
    boots(&code(64, cpuid), &arguments, 0, &text);
    let arguments = ["--mode", "long", "--cpu", "skylake-server"];
    let text = "vendor=GenuineIntel signature=00050654\n";
    boots(&code(64, cpuid), &arguments, 0, text);
}
