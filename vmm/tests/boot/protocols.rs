//! Runs the program with images of each protocol, in the interpreter and in KVM.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use hindsight_vmm::kvm;

use super::guest::{
    Code, assemble, check_eax, cpuid, exit, flat, linux, multiboot, print, start_info,
};
use super::images::{ElfImage, Load, bzimage, multiboot_header};
use iced_x86::code_asm::*;

/// The load address of images except for boot sectors.
const LOAD_ADDRESS: u64 = 0x10_0000;

const REAL: &str = "flags=00000002 cr0=00000010 cs=00000000 ds=00000000\n";
const PROTECTED: &str = "flags=00000002 cr0=00000011 cs=00000010 ds=00000018\n";
const LONG: &str = "flags=00000002 cr0=80000011 cs=00000010 ds=00000018 efer=00000500\n";

/// The engines that this host can run.
pub fn engines() -> Vec<&'static str> {
    let usable = kvm::open_device().is_ok_and(|kvm| kvm.create_vm().is_ok());
    if usable {
        return vec!["interp", "kvm"];
    }
    eprintln!("skipped in KVM: /dev/kvm cannot be used here");
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

/// Runs the image in each engine: it must print exactly `text` and exit with the verdict.
fn assert_boots(image: &[u8], arguments: &[&str], verdict: i32, text: &str) {
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
    assemble(bits, LOAD_ADDRESS, code)
}

#[test]
fn boot_sector_is_entered_in_real_mode() {
    let mut sector = assemble(16, 0x7c00, flat);
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    let text = format!("{REAL}edx=00000080\n");
    assert_boots(&sector, &["--mode", "real"], 0, &text);
    assert_boots(&sector, &["--protocol", "flat"], 0, &text);
}

#[test]
fn flat_image_is_entered_at_the_requested_entry() {
    let mut image = vec![0xcc; 0x20];
    image.extend(assemble(16, 0x3_0020, flat));
    let arguments = ["--load-address", "0x30000", "--entry", "0x30020"];
    let state = REAL.replace(" cs=00000000", " cs=00003002");
    assert_boots(&image, &arguments, 0, &format!("{state}edx=00000080\n"));
}

#[test]
fn flat_image_is_entered_in_protected_mode() {
    let text = format!("{PROTECTED}edx=00000000\n");
    assert_boots(&code(32, flat), &["--mode", "protected"], 0, &text);
}

#[test]
fn flat_image_is_entered_in_long_mode() {
    let text = format!("{LONG}edx=00000000\n");
    assert_boots(&code(64, flat), &["--mode", "long"], 0, &text);
}

/// Options for images that take a command line and modules.
const ALL_OPTIONS: [&str; 8] = [
    "--cmdline",
    "console=ttyS0 a=\"b c\"",
    "--initrd",
    "initrd",
    "--module",
    "module=key=value x",
    "--module",
    "module",
];
/// The output of a guest with [`ALL_OPTIONS`].
const ALL_TEXT: &str = "cmdline=console=ttyS0 a=\"b c\"\n\
    module=first file args=\n\
    module=second file args=key=value x\n\
    module=second file args=\n";

/// Boots an image that receives start info, without and with [`ALL_OPTIONS`].
fn assert_boots_with_start_info(image: &[u8], state: &str) {
    let info = "version=00000001 ranges=00000003\n";
    assert_boots(image, &[], 0, &format!("{state}{info}cmdline=\n"));
    assert_boots(image, &ALL_OPTIONS, 0, &format!("{state}{info}{ALL_TEXT}"));
}

#[test]
fn elf32_is_entered_in_protected_mode_with_start_info() {
    let image = ElfImage::new(false, LOAD_ADDRESS, &code(32, start_info)).build();
    assert_boots_with_start_info(&image, PROTECTED);
}

#[test]
fn elf64_is_entered_in_long_mode_with_start_info() {
    let image = ElfImage::new(true, LOAD_ADDRESS, &code(64, start_info)).build();
    assert_boots_with_start_info(&image, LONG);
}

#[test]
fn pvh_is_entered_in_protected_mode_with_start_info() {
    for bits64 in [false, true] {
        let image = ElfImage::pvh(bits64, LOAD_ADDRESS, &code(32, start_info)).build();
        assert_boots_with_start_info(&image, PROTECTED);
    }
}

#[test]
fn pvh_image_booted_as_elf_is_entered_at_its_elf_entry() {
    let mut elf = ElfImage::pvh(true, LOAD_ADDRESS, &code(32, start_info));
    let plain = code(64, |a| {
        print(a, "plain\n")?;
        exit(a, 7)
    });
    elf.loads.push(Load::at(2 * LOAD_ADDRESS, &plain));
    elf.entry = 2 * LOAD_ADDRESS;
    assert_boots(&elf.build(), &["--protocol", "elf"], 7, "plain\n");
}

#[test]
fn elf_segments_are_extended_with_zeros() {
    let kernel = code(32, |a| {
        a.mov(eax, dword_ptr(0x30_0000))?;
        check_eax(a, 0x1122_3344, 2)?;
        a.mov(eax, dword_ptr(0x30_0004))?;
        check_eax(a, 0, 3)?;
        exit(a, 0)
    });
    let mut elf = ElfImage::new(false, LOAD_ADDRESS, &kernel);
    elf.loads.push(Load {
        memory_size: 0x2000,
        ..Load::at(0x30_0000, &0x1122_3344_u32.to_le_bytes())
    });
    assert_boots(&elf.build(), &[], 0, "");
}

/// A multiboot kernel as ELF: the header with `flags`, then the code.
fn multiboot_elf(bits64: bool, flags: u32) -> Vec<u8> {
    let mut data = multiboot_header(flags, &[]);
    let entry = LOAD_ADDRESS + data.len() as u64;
    data.extend(assemble(32, entry, multiboot));
    let mut elf = ElfImage::new(bits64, LOAD_ADDRESS, &data);
    elf.entry = entry;
    elf.build()
}

/// Boots a multiboot kernel, without and with [`ALL_OPTIONS`].
fn assert_boots_by_multiboot(image: &[u8]) {
    let memory = "lower=0000027f upper=0000fc00\n";
    // The command line starts with the name of the file.
    let without_options = format!("{PROTECTED}info=00000245 {memory}cmdline=image\n");
    assert_boots(image, &[], 0, &without_options);
    let text = "cmdline=image console=ttyS0 a=\"b c\"\n\
        module=first file args=initrd\n\
        module=second file args=module key=value x\n\
        module=second file args=module\n";
    let all = format!("{PROTECTED}info=0000024d {memory}{text}");
    assert_boots(image, &ALL_OPTIONS, 0, &all);
}

#[test]
fn multiboot_elf_receives_the_multiboot_information() {
    assert_boots_by_multiboot(&multiboot_elf(false, 0));
    assert_boots_by_multiboot(&multiboot_elf(false, 3));
    assert_boots_by_multiboot(&multiboot_elf(true, 3));
}

#[test]
fn multiboot_image_with_addresses_is_loaded_at_them() {
    // The image has bytes that are not loaded, the header, the code, and a BSS.
    const SKIPPED: u32 = 0x40;
    const HEADER: u32 = 0x10_0000;
    const ENTRY: u32 = HEADER + 32;
    let kernel = assemble(32, ENTRY.into(), multiboot);
    let end = ENTRY + u32::try_from(kernel.len()).unwrap();
    let mut image = vec![0xcc; SKIPPED as usize];
    let addresses = [HEADER, HEADER, end, end + 0x1000, ENTRY];
    image.extend(multiboot_header(0x1_0003, &addresses));
    image.extend(kernel);
    assert_boots_by_multiboot(&image);
}

#[test]
fn multiboot_kernel_booted_as_elf_does_not_receive_the_magic() {
    assert_boots(&multiboot_elf(false, 0), &["--protocol", "elf"], 2, "");
}

#[test]
fn linux_is_entered_in_long_mode_with_boot_parameters() {
    // The kernel follows 0x600 bytes of setup code; its 64-bit entry point is at offset 0x200.
    let kernel = assemble(64, 0x100_0200, linux);
    let mut image = bzimage();
    assert!(kernel.len() <= image.len() - 0x800);
    image[0x800..0x800 + kernel.len()].copy_from_slice(&kernel);
    let params = "loader=000000ff ranges=00000003\n";
    let text = format!("{LONG}{params}cmdline=\ninitrd=\n");
    assert_boots(&image, &[], 0, &text);
    let arguments = ["--cmdline", "quiet", "--initrd", "initrd"];
    let text = format!("{LONG}{params}cmdline=quiet\ninitrd=first file\n");
    assert_boots(&image, &arguments, 0, &text);
}

#[test]
fn wrong_protocol_is_rejected_with_a_reason() {
    let flat = code(32, flat);
    let elf = ElfImage::new(false, LOAD_ADDRESS, &code(32, start_info)).build();
    let rows: [(&[u8], &str, &str); 9] = [
        (&flat, "elf", "the image is not ELF"),
        (&flat, "pvh", "the image is not ELF"),
        (&flat, "multiboot", "no multiboot header"),
        (&flat, "linux", "has no boot header"),
        (&elf, "pvh", "has no PVH note"),
        (&elf, "multiboot", "no multiboot header"),
        (&elf, "linux", "has no boot header"),
        (&elf, "multiboot2", "no multiboot 2 header"),
        (&elf, "multiboot3", "invalid value 'multiboot3'"),
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
fn guest_sees_the_requested_cpu_model() {
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
    assert_boots(&code(64, cpuid), &arguments, 0, &text);
    let arguments = ["--mode", "long", "--cpu", "skylake-server"];
    let text = "vendor=GenuineIntel signature=00050654\n";
    assert_boots(&code(64, cpuid), &arguments, 0, text);
}
