"""Times what gdb does with a guest through a stub, ours or QEMU's."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import time

from hindsight_ci.bench.process import spawn
from hindsight_ci.project import RunError, Word, words

# What gdb does; the seconds of each part are printed on standard output.
SCRIPT = """
import gdb, json, time
settings = ("set pagination off", "set confirm off", "set remotetimeout 60")
for line in (*settings, "target remote %(socket)s"):
    gdb.execute(line, to_string=True)
times = {}
def timed(name, line):
    start = time.perf_counter()
    gdb.execute(line, to_string=True)
    times[name] = time.perf_counter() - start
def reach(location, name="reach"):
    gdb.execute("tbreak *" + location, to_string=True)
    timed(name, "continue")
    if int(gdb.parse_and_eval("$pc == (long)&" + location.lstrip("&"))) != 1:
        raise gdb.GdbError("not at " + location)
if int(gdb.parse_and_eval("$pc != (long)&_start")):
    # QEMU begins in its firmware, which would overwrite a breakpoint of another kind.
    gdb.execute("thbreak *&_start", to_string=True)
    gdb.execute("continue", to_string=True)
%(body)s
print("times " + json.dumps(times))
gdb.execute("kill", to_string=True)
"""

STEPS = 1000
HITS = 2000
BY_STUB = f"""
timed("step", "stepi {STEPS}")
reach("&called")
gdb.execute("break *&called if $ecx == 1")
timed("condition", "continue")
start = time.perf_counter()
if len(gdb.selected_inferior().read_memory(0x100000, 1 << 20)) != 1 << 20:
    raise gdb.GdbError("memory")
times["read"] = time.perf_counter() - start
"""
FORWARDS = """
reach("&work")
reach("&done", "plain")
"""
WATCHED = """
reach("&work")
gdb.execute("watch *(int *)&untouched")
reach("&done", "watched")
"""
BACK = """
gdb.execute("watch *(int *)&early")
gdb.execute("continue", to_string=True)
reach("&done", "forwards")
timed("back", "reverse-continue")
if int(gdb.parse_and_eval("*(int *)&early")) != 0:
    raise gdb.GdbError("not before the write")
"""


def session(
    command: list[Word],
    guest: pathlib.Path,
    socket: pathlib.Path,
    body: str,
    limit: float = 600,
) -> dict[str, float]:
    """The seconds of each part of a gdb session with a guest that waits at its start."""
    socket.unlink(missing_ok=True)
    script = socket.with_suffix(".py")
    script.write_text(SCRIPT % {"socket": socket, "body": body}, encoding="utf-8")
    pid = spawn(command)
    try:
        for _ in range(500):
            if socket.exists():
                break
            time.sleep(0.02)
        done = subprocess.run(
            words(["gdb", "-nx", "-batch", "-x", script, guest]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"gdb with {command[0]} took too long") from error
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith("times "):
            times: dict[str, float] = json.loads(line.removeprefix("times "))
            return times
    raise RunError(f"gdb with {command[0]}: {done.stderr.decode(errors='replace').strip()[-200:]}")
