"""Memory that a replaced bundle leaves goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Blocks that go lie between some that stay, as what a bundle leaves does.
PROGRAM = """
import time
from service import memory


class Held:
    pass


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


memory._AFTER_S = 0.05
before = resident()
held, stay = Held(), []
held.blocks = []
for number in range(100_000):
    (stay if number % 100 == 0 else held.blocks).append(bytes(2000))
full = resident()
memory.give_back_after(held)
time.sleep(0.3)
assert resident() > before + 0.9 * (full - before), "what is held stays"
del held
until = time.monotonic() + 20
while resident() > before + 0.5 * (full - before) and time.monotonic() < until:
    time.sleep(0.02)
print((resident() - before) / (full - before))
"""


def test_what_an_object_leaves_is_given_back_when_it_is_gone() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library is not glibc: nothing is given back")
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.5
