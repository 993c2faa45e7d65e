"""Run a program as a job of real processes, until it ends or nothing can move.

A hang is not a time-out here: the emulator's counters in the black boxes, and the
runners' own, say that every host thread is blocked and no message is on its way.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pptrace import runs
from pptrace.errors import InputError
from pptrace.program_runner import HostCounts, check_eager
from pptrace.report import Report
from pptrace.statements import Program

__all__ = ["ProgramRun", "run_program"]

_LOOK_S = 0.1
_STILL_S = 2.5
"""All counters unchanged for so long: many heartbeats of every monitor, which publish
them, and what the diagnosis asks for before it calls a rank idle. Messages to ranks
that have ended are never received, so sent and received need not balance."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """What became of the job: its folder, the report, and whether it came to an end."""

    folder: Path
    report: Report
    is_hung: bool


def run_program(
    file: Path, program: Program, out: Path, *, limit_s: float = 120.0
) -> ProgramRun:
    """Start one process per rank; none is left when this returns.

    Raises:
        InputError: the job did not start, or neither ended nor stood still in time.
    """
    check_eager(program)
    out.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f"{file.stem}-", dir=out))
    with _processes(file, program, place) as processes:
        job = _Job(processes, place)
        is_hung = job.wait(limit_s)
        run = runs.load_run(place)
        report = _diagnose(run, is_hung=is_hung)
    return ProgramRun(run.path, report, is_hung)


def _diagnose(run: runs.Run, *, is_hung: bool) -> Report:
    from pptrace.diagnosis import diagnose

    return diagnose(
        run.logs,
        now_wall_ns=time.time_ns(),
        run=str(run.path),
        problems=run.problems,
        trigger="nothing can move any more" if is_hung else "",
    )


@contextlib.contextmanager
def _processes(
    file: Path, program: Program, place: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks, with torchrun's variables; killed at the end."""
    command = [sys.executable, "-m", "pptrace.program_runner", str(file.resolve())]
    command += ["--out", str(place), "--counts", str(place)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PPTRACE")}
    common = clean | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(program.world_size),
        "OMP_NUM_THREADS": "1",
        "PPTRACE_HANG_AFTER": "100000",  # the job is watched from here
        "PPTRACE_REPORT": "0",
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(program.world_size):
            with (place / f"rank{rank:05d}.log").open("wb") as log:
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class _Job:
    """The processes of a job, and what they say of themselves."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], place: Path) -> None:
        self._processes = processes
        self._place = place

    def wait(self, limit_s: float) -> bool:
        """Whether it stands still; False if all ranks have ended."""
        deadline = time.monotonic() + limit_s
        seen: object = None
        since = time.monotonic()
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in self._processes):
                self._check_started()
                return False
            state = self._state()
            if state is None or state != seen:
                seen, since = state, time.monotonic()
            elif time.monotonic() - since >= _STILL_S:
                return True
            time.sleep(_LOOK_S)
        raise InputError(
            self._place, f"neither ended nor stood still within {limit_s:g} s"
        )

    def _state(self) -> list[object] | None:
        """All counters; None while a host thread can move."""
        try:
            logs = runs.load_run(self._place, tail=0).logs
        except InputError:
            return None
        counts: list[object] = []
        for rank, process in enumerate(self._processes):
            log = logs.get(rank)
            hosts = HostCounts.read(self._place / f"rank{rank:05d}.hosts")
            if process.poll() is not None:
                counts.append("over")
            elif (
                log is None
                or hosts is None
                or log.emulation[0] + hosts[1] + hosts[2] < hosts[0]
                or not hosts[0]
            ):
                return None
            if log is not None:
                counts.append((log.emulation, hosts))
        return counts

    def _check_started(self) -> None:
        """If no rank left a black box, say what the first one printed."""
        try:
            runs.load_run(self._place, tail=0)
        except InputError as error:
            log = (self._place / "rank00000.log").read_text(errors="replace")
            last = (log.strip().splitlines() or ["it printed nothing"])[-1]
            raise InputError("run-program", f"did not start: {last}") from error
