"""Times a payload in Bochs, which boots it from a CD."""

from __future__ import annotations

import os
import pathlib
import pty
import re
import select
import signal
import struct
import tempfile
import time

from hindsight_ci.project import RunError, run

# What GRUB starts in Bochs: a multiboot header, and the jump to a payload's PVH entry. The header
# must be at the front of the file, so the payload follows it and is copied to its address. The
# loader writes an S to port E9H, where the payload writes its 16 digits at the end.
LOADER = """
    .text
    .code32
    .long 0x1badb002, 0, -0x1badb002
    .globl _start
_start:
    movl $payload, %esi
    movl $0x100000, %edi
    movl $end - payload, %ecx
    rep movsb
    movb $'S', %al
    outb %al, $0xe9
    movl $info, %ebx
    movl $ENTRY, %eax
    jmp *%eax
    .balign 8
info:
    .long 0x336ec578, 1, 0, 0, 0, 0, line, 0
    .quad 0, 0, 0
line:
    .byte 0
payload:
    .incbin "payload"
end:
"""

BOCHS = """
megs: 256
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=corei7_skylake_x, count=1, ips=50000000, reset_on_triple_fault=0, ignore_bad_msrs=1
ata0-master: type=cdrom, path="cd.iso", status=inserted
boot: cdrom
display_library: term
clock: sync=none, time0=local
port_e9_hack: enabled=1
speaker: enabled=0
panic: action=fatal
error: action=ignore
info: action=ignore
log: bochs.log
"""


def make_cd(payload: pathlib.Path, folder: pathlib.Path) -> None:
    """Makes a CD that boots the payload, and the configuration of Bochs."""
    entry = struct.unpack_from("<Q", payload.read_bytes(), 24)[0]
    # The payload as it is in memory, with the zeros of .bss.
    sections = ["--set-section-flags", ".bss=alloc,load,contents"]
    run(["objcopy", "-O", "binary", *sections, payload, folder / "payload"])
    (folder / "loader.s").write_text(LOADER.replace("ENTRY", hex(entry)), encoding="utf-8")
    run(["as", "--32", "-I", folder, "-o", folder / "loader.o", folder / "loader.s"])
    link = ["ld", "-m", "elf_i386", "-Ttext", "0x1000000"]
    run([*link, "-o", folder / "kernel", folder / "loader.o"])
    grub = folder / "cd/boot/grub"
    grub.mkdir(parents=True)
    (folder / "kernel").rename(folder / "cd/boot/kernel")
    menu = "set timeout=0\nmultiboot /boot/kernel\nboot\n"
    (grub / "grub.cfg").write_text(menu, encoding="utf-8")
    platform = "/usr/lib/grub/i386-pc"
    run(["grub-mkrescue", "-d", platform, "-o", folder / "cd.iso", folder / "cd"])
    (folder / "bochsrc").write_text(BOCHS, encoding="utf-8")
    # Debian's build waits for its debugger's "c".
    (folder / "rc").write_text("c\n", encoding="utf-8")


def seconds(payload: pathlib.Path, limit: float = 600) -> float:
    """The time that Bochs takes from the payload's entry until it writes 16 digits to port E9H."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_cd(payload, folder)
        # Its display requires a terminal.
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            os.environ["TERM"] = "xterm"
            os.execvp("bochs", ["bochs", "-q", "-f", "bochsrc", "-rc", "rc"])
        try:
            return between(terminal, time.monotonic() + limit)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(terminal)


def between(terminal: int, deadline: float) -> float:
    """Seconds from the S to the digits in the output of a terminal."""
    text = b""
    begin: float | None = None
    screen: int | None = None
    while True:
        sources = [source for source in (terminal, screen) if source is not None]
        ready = select.select(sources, [], [], max(0, deadline - time.monotonic()))[0]
        if not ready:
            break
        try:
            if screen in ready:
                os.read(ready[ready.index(screen)], 65536)
                continue
            output = os.read(terminal, 4096)
        except OSError:
            break
        text = (text + output)[-65536:]
        now = time.monotonic()
        found = re.search(rb'connected to screen "(/dev/pts/\d+)"', text)
        if screen is None and found:
            # The display writes there, and Bochs stops when nobody reads it.
            screen = os.open(found[1], os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        if begin is None and re.search(rb"S[^A-Za-z]*$", text):
            begin, text = now, b""
        elif begin is not None and re.search(rb"[0-9a-f]{16}", text):
            return now - begin
    raise RunError("Bochs did not finish the payload")
