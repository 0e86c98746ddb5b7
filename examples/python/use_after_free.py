"""Find uses of freed memory by the log of accesses: use_after_free.py GUEST."""

import sys

import hindsight

machine = hindsight.Machine(sys.argv[1], protocol="elf", memory="16M")
machine.start_trace("branches,accesses")
print(machine.run())
trace = machine.stop_trace()
branches, accesses = trace.branches(), trace.accesses()
events = [(int(access["at"]), "use", int(access["address"])) for access in accesses]
for call in branches[branches["to"] == machine.symbol("heap_free")]:
    machine.seek(int(call["at"]))
    events.append((machine.count, "free", machine.register("rdi")))
for call in branches[branches["to"] == machine.symbol("heap_alloc")]:
    machine.seek(int(call["at"]))
    machine.run_until(machine.read_int(machine.register("rsp")))  # the return address
    events.append((machine.count, "alloc", machine.register("rax")))
freed: dict[int, int] = {}  # address of a block: when it was freed
for count, what, address in sorted(events):
    if what == "alloc":
        freed.pop(address, None)
    elif what == "free":
        freed[address] = count
    elif block := next((b for b in freed if b <= address < b + 32), None):
        machine.seek(count)
        user = machine.name_of(machine.register("rip"))
        if not user.startswith("heap_"):
            print(f"{user} uses {block:#x} at {count}, which was freed at {freed[block]}")
