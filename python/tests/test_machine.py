"""Machines are run, inspected, traced and brought back from Python."""

import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import hindsight

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the guests, compiled."""
    folder = tmp_path_factory.mktemp("guests")
    for name in ["heap", "echo"]:
        subprocess.run([ROOT / "ci/make-debuggee", folder / name, name], check=True)
    return folder


def machine(guests: Path, name: str = "heap") -> hindsight.Machine:
    return hindsight.Machine(guests / name, protocol="elf", memory="16M")


def test_machine_stops_at_a_symbol_and_at_the_end(guests: Path) -> None:
    heap = machine(guests)
    stop = heap.run_until("main")
    assert (stop.reason, stop.cpu, stop.address) == ("reached", 0, heap.symbol("main"))
    assert heap.register("rip") == heap.registers()["rip"] == heap.symbol("main")
    assert repr(heap) == f"<hindsight.Machine at {heap.count}: main>"
    stop = heap.run()
    assert (stop.reason, stop.exit_code, stop.is_end) == ("exit", 0, True)
    assert heap.output == heap.take_output() == "served\n"


def test_memory_and_registers_are_written_and_brought_back(guests: Path) -> None:
    heap = machine(guests)
    heap.run_until("main")
    before = heap.count
    heap.write("served", (5).to_bytes(8, "little"))
    stop = heap.run_until(writes="served")
    assert (stop.reason, stop.write) == ("accessed", True)
    assert heap.read_int("served") == 6
    heap.seek(before - 1)
    assert heap.read("served", 8) == bytes(8)
    assert heap.translate(heap.symbol("served")) == heap.symbol("served")
    heap.set_register("rax", 2**64 - 1)
    assert heap.register("rax") == 2**64 - 1


def test_trace_is_arrays_that_lead_to_instructions(guests: Path, tmp_path: Path) -> None:
    heap = machine(guests)
    heap.start_trace("branches,accesses")
    heap.run()
    trace = heap.stop_trace()
    branches, accesses = trace.branches(), trace.accesses()
    assert len(trace) >= len(branches) + len(accesses) > 1000
    calls = branches[branches["to"] == heap.symbol("session_open")]
    assert len(calls) == 20
    assert {hindsight.KINDS[kind] for kind in calls["kind"]} == {"direct-call"}
    assert set(branches["cpl"]) == {0}
    assert np.all(np.diff(branches["at"].astype(np.int64)) > 0)
    served = accesses[(accesses["address"] == heap.symbol("served")) & accesses["write"]]
    assert len(served) == 30
    assert set(served["size"]) == {8}
    heap.seek(int(served["at"][7]))
    heap.run_for(1)
    assert heap.read_int("served") == 8
    trace.save(tmp_path / "heap.trace")
    assert (tmp_path / "heap.trace").stat().st_size > 1000


def test_input_reaches_the_guest_and_a_snapshot_undoes_it(guests: Path, tmp_path: Path) -> None:
    echo = machine(guests, "echo")
    echo.run_for(1000)
    echo.save(tmp_path / "saved")
    snapshot = echo.snapshot()
    assert snapshot.count == echo.count == 1000
    for text in ["one", "two"]:
        echo.restore(snapshot)
        echo.send(text)
        assert echo.run_until(prints=text).reason == "printed"
    echo.load(tmp_path / "saved")
    echo.send(b"q")
    assert echo.run().exit_code == 7


def test_predicate_is_called_between_instructions(guests: Path) -> None:
    heap = machine(guests)
    stop = heap.run_until_true(lambda m: m.read_int("served") >= 10, every=20)
    assert stop.reason == "predicate"
    assert heap.read_int("served") >= 10
    with pytest.raises(ZeroDivisionError):
        heap.run_until_true(lambda m: 1 / 0, every=1)


def test_errors_are_exceptions_with_a_way_out(guests: Path) -> None:
    heap = machine(guests)
    with pytest.raises(hindsight.Error, match="neither an address nor a symbol"):
        heap.run_until("mian")
    with pytest.raises(hindsight.Error, match="no memory at 0x10000000000"):
        heap.read(1 << 40, 1)
    with pytest.raises(hindsight.Error, match="numbered from 0"):
        heap.registers(1)
    with pytest.raises(ValueError, match="the kinds are"):
        heap.start_trace("branchs")
    with pytest.raises(TypeError):
        heap.run_until(1.5)  # type: ignore[arg-type]
    with pytest.raises(hindsight.Error, match="--memory"):
        hindsight.Machine(guests / "heap", memory="1X")
    with pytest.raises(hindsight.Error, match="No such file"):
        hindsight.Machine(guests / "absent")


def test_signal_handler_that_uses_the_machine_gets_an_error(guests: Path) -> None:
    echo = machine(guests, "echo")
    signal.signal(signal.SIGALRM, lambda *_: print(echo.count))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(RuntimeError, match="signal handler"):
        echo.run()
    assert echo.run_for(10).reason == "count"


def test_keyboard_interrupt_stops_a_run_between_instructions(guests: Path) -> None:
    echo = machine(guests, "echo")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        echo.run()
    count = echo.count
    assert count > 0
    assert echo.run_for(10).reason == "count"
    assert echo.count == count + 10


def test_other_threads_run_meanwhile(guests: Path) -> None:
    echo = machine(guests, "echo")
    thread = threading.Thread(target=echo.run_for, args=(20_000_000,))
    thread.start()
    ticks = 0
    while thread.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 10
    assert echo.count == 20_000_000


def test_example_prints_what_its_page_shows(guests: Path) -> None:
    example = ROOT / "examples/python/use_after_free.py"
    command = [sys.executable, str(example), str(guests / "heap")]
    printed = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    page = (ROOT / "docs/guide/scripting.md").read_text()

    def numbers_of_any_compiler(text: str) -> str:
        return re.sub(r"0x[0-9a-f]+|\d+", "N", text)

    shown = numbers_of_any_compiler(textwrap.indent(printed, "    "))
    assert shown in numbers_of_any_compiler(page)


def test_examples_have_at_most_30_lines() -> None:
    for example in (ROOT / "examples/python").glob("*.py"):
        assert len(example.read_text().splitlines()) <= 30, example.name


def test_everything_is_documented_and_typed() -> None:
    stubs = (ROOT / "python/hindsight/_hindsight.pyi").read_text()
    for cls in (hindsight.Machine, hindsight.Stop, hindsight.Trace, hindsight.Snapshot):
        assert cls.__doc__
        for name, member in vars(cls).items():
            if not name.startswith("_"):
                assert inspect.getdoc(member), f"{cls.__name__}.{name}"
                assert re.search(rf"def {name}\(", stubs), f"{cls.__name__}.{name}"
