"""Profile the boot of a Linux kernel: boot_profile.py VMLINUZ INITRAMFS."""

import sys
from collections import Counter

import hindsight

EVERY = 100_000  # instructions between two samples

machine = hindsight.Machine(
    sys.argv[1], initrd=sys.argv[2], cmdline="console=ttyS0 nokaslr", memory="256M"
)
functions: Counter[str] = Counter()
lines: Counter[str] = Counter()


def sample(machine: hindsight.Machine) -> bool:
    """Count the current function, and the line of output after which it runs."""
    name = machine.name_of(machine.register("rip")).split("+")[0]
    functions["(unpacking)" if name.startswith("0x") else name] += 1
    lines[(machine.output.splitlines() or ["(before any output)"])[-1][:70]] += 1
    return "hindsight-guest: ready" in machine.output


print(machine.run_until_true(sample, every=EVERY), "after", machine.count, "instructions")
for title, counts in [("function", functions), ("after the line", lines)]:
    print(f"\n    %  {title}")
    for name, count in counts.most_common(8):
        print(f"{100 * count / counts.total():5.1f}  {name}")
