"""Run deterministic virtual machines: stop them anywhere, inspect and trace them, go back.

>>> import hindsight
>>> machine = hindsight.Machine("kernel.elf", memory="64M")
>>> machine.run_until("main")
<hindsight.Stop reached: cpu 0 reached 0x200013>
>>> machine.start_trace("branches")
>>> machine.run_for(1_000_000)
<hindsight.Stop count: the instruction count is reached>
>>> machine.stop_trace().branches()["to"]
array([2097207, 2097182, ...], dtype=uint64)
>>> machine.back(1)
<hindsight.Stop count: the instruction count is reached>

Instructions are counted from the start of the run, over all processors. The same count is the same
state in every run with the same input.
"""

from ._hindsight import KINDS, REGISTERS, Error, Machine, Snapshot, Stop, Trace

__all__ = ["KINDS", "REGISTERS", "Error", "Machine", "Snapshot", "Stop", "Trace"]
