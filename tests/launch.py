"""Start real multi-rank jobs for tests, with a time limit, leaving nothing behind.

Two ways: `torchrun`, as users do, and `ranks`, which starts the processes itself so
that a test can kill one of them without a launcher that ends the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job", "Rank", "ranks", "run_folder", "torchrun", "wait_for", "write_script"]


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    returncode: int
    output: str
    """Standard output and error of all ranks, interleaved."""


@dataclass
class Rank:
    """One process of a job that a test started itself."""

    rank: int
    process: subprocess.Popen[str]
    log: Path

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")


def write_script(folder: Path, body: str, name: str = "job.py") -> Path:
    """Write a job script; it may use torch, dist, torch.nn and pptrace right away."""
    path = folder / name
    path.write_text(
        "import os, sys, time\n"
        "import torch, torch.distributed as dist\n"
        "import torch.nn as nn\n"
        "import pptrace\n"
        "torch.set_num_threads(1)\n" + textwrap.dedent(body)
    )
    return path


def _environment(extra: dict[str, str]) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PPTRACE")}
    return clean | {"OMP_NUM_THREADS": "1"} | extra


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def torchrun(
    script: Path,
    nproc: int,
    *arguments: str,
    timeout: float = 90,
    until: Callable[[], bool] | None = None,
    **environment: str,
) -> Job:
    """Run a script under torchrun; end it after ``timeout`` or once ``until()`` holds.

    Every process of the job is gone when this returns. The return code is that of
    torchrun, or -15 if it was ended here.
    """
    log = script.with_suffix(".log")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), str(script), *arguments]
    with log.open("w") as out:
        job = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(environment),
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + timeout
            while job.poll() is None and time.monotonic() < deadline:
                if until is not None and until():
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(0.05)
            if job.poll() is None:
                # SIGTERM first: ranks note it, as when a launcher ends them.
                os.killpg(job.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(15)
        finally:
            _end(job.pid)
            job.wait()
    return Job(job.returncode, log.read_text(errors="replace"))


@contextlib.contextmanager
def ranks(
    script: Path, nproc: int, *arguments: str, **environment: str
) -> Iterator[list[Rank]]:
    """Start one process per rank; all are gone when the context ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started: list[Rank] = []
    try:
        for rank in range(nproc):
            log = script.with_name(f"{script.stem}.{rank}.log")
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(nproc),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            with log.open("w") as out:
                process = subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=_environment(own | environment),
                    start_new_session=True,
                    text=True,
                )
            started.append(Rank(rank, process, log))
        yield started
    finally:
        for rank_ in started:
            _end(rank_.process.pid)
            rank_.process.wait()


def wait_for(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Poll until ``condition()`` holds; AssertionError naming ``what`` after timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)


def run_folder(out: Path) -> Path:
    """The one run's folder in an output directory."""
    folders = [p for p in out.iterdir() if p.is_dir()]
    assert len(folders) == 1, folders
    return folders[0]
