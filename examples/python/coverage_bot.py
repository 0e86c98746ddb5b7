"""Look for commands that reach new functions of the kernel: coverage_bot.py VMLINUZ INITRAMFS."""

import random
import sys

import hindsight
import numpy as np

machine = hindsight.Machine(
    sys.argv[1], initrd=sys.argv[2], cmdline="console=ttyS0 nokaslr", memory="256M"
)
machine.run_until(prints="hindsight-guest: ready")
booted = machine.snapshot()
functions, covered = sorted(machine.functions()), set[int]()
starts = np.array([address for address, _, _ in functions], dtype=np.uint64)
verbs = ["cat", "ls -l", "stat", "touch", "mkdir", "rm", "ln -s /tmp", "mount -t tmpfs x"]
objects = ["/proc/meminfo", "/proc/self/maps", "/sys/kernel", "/tmp/a", "/dev/null", "/tmp"]
random.seed(1)
for _ in range(12):
    command = f"{random.choice(verbs)} {random.choice(objects)}"
    machine.restore(booted)
    machine.start_trace("branches", cpls=[0])
    machine.send(f"{command}; echo fin''ished\n")
    machine.run_until(prints="finished", within=50_000_000)
    branches = machine.stop_trace().branches()
    to = branches["to"][branches["to_cpl"] == 0]
    new = set((np.searchsorted(starts, np.unique(to), side="right") - 1).tolist()) - covered
    covered |= new
    names = [functions[index][2] for index in sorted(new)[:3]]
    print(f"{len(new):5} new in {len(to)} branches: {command}", *names, sep=", ")
