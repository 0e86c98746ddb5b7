#!/usr/bin/env python3
"""Makes the pictures of terminals again from real sessions: docs/images/make.py HINDSIGHT

HINDSIGHT is the program, such as target/release/hindsight. gdb must be installed.
"""

import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from xml.sax.saxutils import escape

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent

COLUMNS = 100
FONT_SIZE = 13
CELL_WIDTH = 7.8
CELL_HEIGHT = 16
MARGIN = 14
BACKGROUND = "#0d1117"
FOREGROUND = "#e6edf3"
COLOURS = """#484f58 #ff7b72 #3fb950 #d29922 #58a6ff #bc8cff #39c5cf #b1bac4
#6e7681 #ffa198 #56d364 #e3b341 #79c0ff #d2a8ff #56d4dd #ffffff""".split()


def colour(index):
    """The colour of a number of 0 to 255."""
    if index < 16:
        return COLOURS[index]
    if index < 232:
        levels = [0, 95, 135, 175, 215, 255]
        index -= 16
        return "#{:02x}{:02x}{:02x}".format(
            levels[index // 36], levels[index // 6 % 6], levels[index % 6]
        )
    return "#{0:02x}{0:02x}{0:02x}".format(8 + 10 * (index - 232))


class Style:
    """The attributes of a cell."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.fg, self.bg, self.bold, self.dim = None, None, False, False

    def key(self):
        return self.fg, self.bg, self.bold, self.dim

    def apply(self, text):
        """Applies the parameters of one SGR sequence."""
        codes = [int(code or 0) for code in text.split(";")]
        while codes:
            code = codes.pop(0)
            if code in (38, 48):
                if codes.pop(0) == 5:
                    value = colour(codes.pop(0))
                else:
                    value = "#{:02x}{:02x}{:02x}".format(*codes[:3])
                    del codes[:3]
                if code == 38:
                    self.fg = value
                else:
                    self.bg = value
            elif code == 0:
                self.reset()
            elif code == 1:
                self.bold = True
            elif code == 2:
                self.dim = True
            elif code == 22:
                self.bold = self.dim = False
            elif code == 39:
                self.fg = None
            elif code == 49:
                self.bg = None
            elif 30 <= code <= 37:
                self.fg = colour(code - 30)
            elif 40 <= code <= 47:
                self.bg = colour(code - 40)
            elif 90 <= code <= 97:
                self.fg = colour(code - 82)


def cells(line):
    """The runs of a line: text and style."""
    style, runs = Style(), []
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if part.startswith("\x1b"):
            style.apply(part[2:-1])
        elif part:
            runs.append((part, style.key()))
    return runs


def svg(text, title):
    """A picture of a terminal with this text."""
    lines = text.rstrip("\n").split("\n")
    width = round(2 * MARGIN + COLUMNS * CELL_WIDTH)
    height = 2 * MARGIN + len(lines) * CELL_HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>text{font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"font-size:{FONT_SIZE}px;white-space:pre;fill:{FOREGROUND}}}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
    ]
    for row, line in enumerate(lines):
        column, top = 0, MARGIN + row * CELL_HEIGHT
        for part, (fg, bg, bold, dim) in cells(line):
            left, length = MARGIN + column * CELL_WIDTH, len(part) * CELL_WIDTH
            if bg:
                out.append(
                    f'<rect x="{left:.1f}" y="{top}" width="{length:.1f}" '
                    f'height="{CELL_HEIGHT}" fill="{bg}"/>'
                )
            if part.strip():
                style = f' fill="{fg}" style="fill:{fg}"' if fg else ""
                style += ' font-weight="bold"' if bold else ""
                style += ' opacity="0.7"' if dim else ""
                out.append(
                    f'<text x="{left:.1f}" y="{top + 12}" textLength="{length:.1f}" '
                    f'xml:space="preserve"{style}>{escape(part)}</text>'
                )
            column += len(part)
    return "\n".join([*out, "</svg>"]) + "\n"


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command, **variables):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            environment = {
                **os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8",
                "COLUMNS": str(COLUMNS), **variables,
            }
            os.execvpe(command[0], command, environment)

    def read(self, until=None, seconds=120):
        """What the program writes up to its end, or up to the text `until` at the end."""
        data, end = "", time.monotonic() + seconds
        while time.monotonic() < end and not (until and data.endswith(until)):
            if not select.select([self.fd], [], [], 0.2)[0]:
                continue
            try:
                piece = os.read(self.fd, 65536)
            except OSError:
                break
            if not piece:
                break
            data += piece.decode(errors="replace")
        return data

    def write(self, text):
        os.write(self.fd, text.encode())


def clean(text):
    """The text without carriage returns and sequences other than SGR."""
    text = re.sub(r"\x1b\[\?[0-9;]*[a-z]|\x1b[=>]|\x1b\[[0-9;]*[A-KS-Tf-lnp-z]", "", text)
    return text.replace("\r", "")


def demo(program):
    return "$ hindsight demo\n" + clean(Terminal([program, "demo", "--engine", "interp"]).read())


def reverse(program):
    """A session that goes back from the end of a run to the write that broke it."""
    with tempfile.TemporaryDirectory() as folder:
        guest, socket = os.path.join(folder, "debuggee"), os.path.join(folder, "gdb")
        subprocess.run([ROOT / "ci/make-debuggee", guest], check=True, stdout=subprocess.DEVNULL)
        run = [program, "run", "--protocol", "elf", "--deterministic", "--serial", "none"]
        server = subprocess.Popen([*run, "--gdb", f"unix:{socket}", "--gdb-wait", guest])
        while not os.path.exists(socket):
            time.sleep(0.05)
        setup = ["set confirm off", "set pagination off", "set width 0", "set style enabled on",
                 "set debuginfod enabled off"]
        options = [word for line in setup for word in ("-ex", line)]
        gdb = Terminal(["gdb", "-q", "-nx", *options, guest], TERM="dumb", INPUTRC="/dev/null")
        gdb.read("(gdb) ")
        text = ("$ hindsight run --deterministic --gdb tcp::1234 --gdb-wait --protocol elf debuggee &\n"
                "$ gdb debuggee\n")
        commands = [
            f"target remote {socket}", "break print", "continue", "watch jobs.guard",
            "reverse-continue", "print queue->put", "reverse-stepi", "print jobs.guard",
        ]
        for command in commands:
            gdb.write(command + "\n")
            answer = clean(gdb.read("(gdb) "))
            answer = answer[answer.index("\n") + 1 : answer.rindex("(gdb) ")]
            text += f"\x1b[1m(gdb) {command}\x1b[0m\n{answer}"
        gdb.write("kill\nquit\n")
        gdb.read(seconds=5)
        server.wait(10)
        return text.replace(socket, ":1234")


def main():
    program = os.path.abspath(sys.argv[1])
    text = demo(program)
    (FOLDER / "demo.svg").write_text(svg(text, "hindsight demo in a terminal"))
    first, _ = text.split("\n\n\x1b[1mPROFILE", 1)
    (FOLDER / "demo-top.svg").write_text(svg(first, "The first part of hindsight demo"))
    title = "A gdb session that goes back from a failure to the write that caused it"
    (FOLDER / "gdb.svg").write_text(svg(reverse(program), title))


if __name__ == "__main__":
    main()
