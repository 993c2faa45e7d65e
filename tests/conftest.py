"""What holds for every test: it leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__: list[str] = []

_GRACE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36

# Ranks whose torchrun was killed become children of this process, not of init: so a
# test that kills the launcher alone is caught as well.
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> dict[int, str]:
    """The children of this process that still run: pid and command line."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) != os.getpid() or state in "ZX":
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            # multiprocessing's helpers live as long as the interpreter, by design.
            if "multiprocessing.resource_tracker" not in command:
                found[int(entry.name)] = command.strip()
    return found


def _ended(pid: int, deadline: float) -> bool:
    """Wait for the end of a process that may be on its way out."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        wait_s = max(0.0, deadline - time.monotonic())
        return bool(select.select([descriptor], [], [], wait_s)[0])
    finally:
        os.close(descriptor)


@pytest.fixture(autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process running, and end that process.

    Processes of wider fixtures do not count: they start before this one. A process that
    is just going down has five seconds to do so.
    """
    before = _children()
    yield
    deadline = time.monotonic() + _GRACE_S
    left = {
        pid: command
        for pid, command in _children().items()
        if pid not in before and not _ended(pid, deadline)
    }
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        lines = "\n".join(f"  {pid}: {command}" for pid, command in left.items())
        pytest.fail(f"the test left processes running:\n{lines}", pytrace=False)
