"""The monitor: notices that a rank makes no progress and has the job explain itself.

A daemon thread per rank. It keeps the header page alive, looks for completions nobody
waits for, and raises an alarm when ops have been pending without progress for
``hang_after``, when the watchdog's ``exception_dump`` key appears, or when an
exception leaves ``step``. On an alarm every rank puts the tail of its black box into
the job's own store (the process groups may be hung); the rank that raised it collects
the tails, prints the report once for the whole job and writes it beside the black
boxes. It never stops the job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pptrace import blackbox
from pptrace.errors import PptraceError
from pptrace.hooks import torch_compat
from pptrace.hooks.state import Active
from pptrace.records import Kind, RankLog
from pptrace.report import Report

__all__ = ["Monitor"]

logger = logging.getLogger("pptrace")

_TICK_S = 0.25
_GATHER_S = 4.0
"""How long the collecting rank waits for the tails of the others."""
_ANSWER_S = 12.0
"""How long the others wait for the report before they say where their file is."""
_TAIL_RECORDS = 512
_ECHO_S = 60.0
"""For how long exceptions of other ranks count as echoes of what was explained."""
_WATCHDOG_KEYS = ("exception_dump",)


class Monitor(threading.Thread):
    """The monitor thread of one rank; see the module's docstring."""

    def __init__(
        self, on: Active, folder: Path, render: Callable[[Report], str], stacks: Any
    ) -> None:
        super().__init__(name="pptrace-monitor", daemon=True)
        self._on = on
        self._box = on.recorder.box
        self._folder = folder
        self._render = render
        self._stacks = stacks
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._stopping = False
        self._joined = False
        self._store: Any = None
        self._world_size = 1
        self._round = 0
        self._reason = ""
        self._quiet_until_progress_after = 0
        self._patience = 1.0
        self._hinted = False
        self._watchdog_seen = False
        self._next_store_check = 0.0
        self._next_look = 0.0
        self._reported: set[int] = set()
        self._explained_at = float("-inf")

    # -- called by other threads ---------------------------------------------------

    def join_job(self) -> None:
        """The process group exists: its store can be used from now on."""
        self._joined = True

    def exception_left_step(self, error: BaseException) -> None:
        """Have the job explain itself: an exception left a schedule's step."""
        if isinstance(error, Exception):
            self._idle.clear()
            self._reason = (
                f"{type(error).__name__} left a step of rank {self._box.rank}"
            )
            self._wake.set()

    def finish(self, timeout: float) -> None:
        """Let an alarm that is being handled come to its end, then stop."""
        self._idle.wait(timeout)
        self.stop()

    def stop(self) -> None:
        """Stop the thread; returns at once if it is stuck in a store call."""
        self._stopping = True
        self._wake.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout=1.0)

    # -- the thread ------------------------------------------------------------------

    def run(self) -> None:
        """Tick until stopped; nothing that goes wrong here reaches the user."""
        while not self._stopping:
            self._wake.wait(_TICK_S)
            self._wake.clear()
            if self._stopping:
                return
            try:
                self._tick()
            except Exception as error:
                logger.debug("pptrace: monitor: %s", error, exc_info=error)
                self._idle.set()

    def _tick(self) -> None:
        recorder = self._on.recorder
        recorder.poll_works()
        recorder.heartbeat()
        self._on.preflight.work()
        self._open_store()
        reason, self._reason = self._reason, ""
        if reason and time.monotonic() - self._explained_at < _ECHO_S:
            # The job has just been explained: what other ranks raise now follows from it.
            reason = ""
        reason = reason or self._stalled() or self._blocked_beside_progress()
        try:
            if self._store is not None:
                if reason:
                    self._raise_alarm(reason)
                self._follow_alarms()
        except RuntimeError as error:
            # torch's store errors: the process that holds the store is gone.
            logger.debug("pptrace: store: %s", error)
            self._store, self._joined = None, False
        if self._store is None:
            if reason:
                self._explain_alone(reason)
            self._idle.set()

    def _open_store(self) -> None:
        if self._store is None and self._joined:
            import torch.distributed as dist

            self._store = torch_compat.open_root_store()
            self._world_size = dist.get_world_size()

    # -- detection -------------------------------------------------------------------

    def hang_after(self) -> float:
        """Seconds without progress that count as a hang (times the patience).

        As given, else ten times the slowest recent step, between 30 and 300 s, and
        120 s before the first step has ended; NCCL's own watchdog waits 600 s.
        """
        given = self._on.settings.hang_after
        if given is not None:
            return given * self._patience
        steps = self._on.recorder.step_ns
        if not steps:
            return 120.0 * self._patience
        return min(max(10 * max(steps) / 1e9, 30.0), 300.0) * self._patience

    def _stalled(self) -> str:
        """Why this rank thinks that the job hangs; empty if it does not."""
        progress = self._box.progress_ns
        still_ns = time.monotonic_ns() - progress
        if still_ns < self.hang_after() * 1e9:
            return ""
        if progress <= self._quiet_until_progress_after:
            return ""  # this standstill has been reported already
        if not self._has_pending():
            return ""
        self._idle.clear()
        return f"no progress for {still_ns / 1e9:.0f} s on rank {self._box.rank}"

    def _blocked_beside_progress(self) -> str:
        """A host thread stuck in a call or a wait while another thread goes on."""
        now = time.monotonic()
        patience = self.hang_after()
        if now < self._next_look:
            return ""
        self._next_look = now + max(1.0, patience / 4)
        log = blackbox.read_bytes(self._box.snapshot(256))
        for record in log.records:
            if record.kind not in (Kind.OP, Kind.COLLECTIVE) or record.done_ns:
                continue
            since = record.wait_ns if record.in_wait else record.posted_ns
            is_held = record.in_wait or record.in_call
            waited_s = (time.monotonic_ns() - since) / 1e9
            if is_held and waited_s > patience and record.seq not in self._reported:
                self._reported.add(record.seq)
                self._idle.clear()
                return (
                    f"rank {self._box.rank} held for {waited_s:.0f} s in one thread"
                    " while another goes on"
                )
        return ""

    def _has_pending(self) -> bool:
        log = blackbox.read_bytes(self._box.snapshot(256))
        return any(
            record.kind in (Kind.OP, Kind.COLLECTIVE) and record.is_open
            for record in log.records
        )

    # -- alarms through the store ----------------------------------------------------

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("pptrace", self._box.run, *parts)))

    def _raise_alarm(self, reason: str) -> None:
        """Raise the alarm of the current round unless somebody else has."""
        mine = f"{self._box.rank} {reason}"
        first = self._store.compare_set(self._key("alarm", self._round), "", mine)
        if first.decode() == mine:
            self._handle(reason, collector=self._box.rank)

    def _follow_alarms(self) -> None:
        now = time.monotonic()
        if now < self._next_store_check:
            return
        # Thousands of ranks share one store: ask it less often there.
        self._next_store_check = now + max(_TICK_S, self._world_size / 4096) * 0.9
        key = self._key("alarm", self._round)
        if self._store.check([key]):
            rank, _, reason = self._store.get(key).decode().partition(" ")
            self._handle(reason, collector=int(rank))
        elif not self._watchdog_seen:
            for name in _WATCHDOG_KEYS:
                if self._store.check([name]):
                    self._watchdog_seen = True
                    self._raise_alarm("a NCCL watchdog has timed out")
                    return

    def _handle(self, reason: str, collector: int) -> None:
        """Answer an alarm: dump, and collect if it is on us."""
        round_, self._round = self._round, self._round + 1
        self._idle.clear()
        try:
            self._quiet_until_progress_after = self._box.progress_ns
            self._dump_stacks(reason)
            self._on.recorder.heartbeat()
            tail = zlib.compress(self._box.snapshot(_TAIL_RECORDS), 1)
            self._store.set(self._key("tail", round_, self._box.rank), tail)
            self._store.add(self._key("count", round_), 1)
            if collector == self._box.rank:
                self._collect(round_, reason)
            else:
                self._await_report(round_)
        finally:
            self._idle.set()

    def _collect(self, round_: int, reason: str) -> None:
        deadline = time.monotonic() + _GATHER_S
        while time.monotonic() < deadline:
            if self._store.add(self._key("count", round_), 0) >= self._world_size:
                break
            time.sleep(0.05)
        try:
            report = self._explain(self._read_tails(round_), reason)
            if report is not None:
                self._publish(report)
        except Exception as error:
            logger.warning("pptrace: no report: %s", error, exc_info=error)
            self._hint()
        finally:
            is_explained = time.monotonic() - self._explained_at < _ECHO_S
            self._store.set(self._key("reported", round_), "2" if is_explained else "1")

    def _read_tails(self, round_: int) -> dict[int, RankLog]:
        """The tails that arrived; for ranks that did not answer, their files."""
        logs: dict[int, RankLog] = {}
        for rank in range(self._world_size):
            key = self._key("tail", round_, rank)
            if not self._store.check([key]):
                continue
            with contextlib.suppress(PptraceError, zlib.error):
                data = zlib.decompress(self._store.get(key))
                log = blackbox.read_bytes(data, path=f"rank {rank}")
                log.alive = True
                log.stacks = self._read_stacks(rank)
                logs[rank] = log
        silent = [r for r in range(self._world_size) if r not in logs]
        return logs | self._read_files(silent)

    def _read_stacks(self, rank: int) -> str:
        """The Python stacks a rank has just saved, if its folder is visible here."""
        path = self._folder / blackbox.file_name(rank)
        try:
            return path.with_suffix(".stacks.txt").read_text("utf-8", "replace")
        except OSError:
            return ""

    def _await_report(self, round_: int) -> None:
        """Wait for the collecting rank; if it is gone, say where our file is."""
        key = self._key("reported", round_)
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and not self._stopping:
            if self._store.check([key]):
                if self._store.get(key) == b"2":
                    self._explained_at = time.monotonic()
                return
            time.sleep(0.1)
        self._hint()

    # -- the report --------------------------------------------------------------------

    def _explain(self, logs: dict[int, RankLog], reason: str) -> Report | None:
        from pptrace.diagnosis import diagnose
        from pptrace.progress import add_progress

        report = diagnose(logs, run=str(self._folder), trigger=reason)
        report = add_progress(report, logs, self._folder)
        if any(f.severity == "error" for f in report.findings):
            self._explained_at = time.monotonic()
        if report.exit_code == 0:
            # A straggler, or nothing at all: look again later, less eagerly.
            self._patience = min(self._patience * 2, 16.0)
            self._quiet_until_progress_after = 0
        return report if report.findings else None

    def _publish(self, report: Report) -> None:
        """Print the report once for the job and leave it beside the black boxes."""
        with contextlib.suppress(OSError):
            (self._folder / "report.json").write_text(report.to_json(), "utf-8")
        if self._on.settings.report:
            sys.stderr.write("\n" + self._render(report).rstrip("\n") + "\n")
            sys.stderr.flush()

    def _explain_alone(self, reason: str) -> None:
        """No store to gather through: use the files in the folder.

        They are all there on one host or a shared file system. The rank that makes the
        lock file first reports; the others say where to look if it finds nothing.
        """
        self._quiet_until_progress_after = self._box.progress_ns
        self._on.recorder.heartbeat()
        self._dump_stacks(reason)
        try:
            self._folder.joinpath("report.lock").touch(exist_ok=False)
        except OSError:
            return
        time.sleep(min(_GATHER_S / 4, 1.0))  # let the others write their last state
        logs = self._read_files(range(self._world_size))
        report = self._explain(logs, reason)
        if report is not None:
            self._publish(report)
        if report is None or report.exit_code == 0:
            # A straggler: the next standstill may be more.
            self._folder.joinpath("report.lock").unlink(missing_ok=True)
        if len(logs) < self._world_size:
            self._hint()

    def _read_files(self, ranks: Iterable[int]) -> dict[int, RankLog]:
        logs: dict[int, RankLog] = {}
        for rank in ranks:
            path = self._folder / blackbox.file_name(rank)
            with contextlib.suppress(PptraceError):  # not here: reported as missing
                logs[rank] = blackbox.read(path, tail=_TAIL_RECORDS)
        return logs

    def _hint(self) -> None:
        if not self._hinted:
            self._hinted = True
            sys.stderr.write(
                f"pptrace: rank {self._box.rank} makes no progress and no rank could "
                f"collect the others; read them with: pptrace report {self._folder}\n"
            )
            sys.stderr.flush()

    def _dump_stacks(self, reason: str) -> None:
        if self._stacks is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._stacks.write(
                f"pptrace: {reason}; Python stacks at {time.time():.3f}\n"
            )
            self._stacks.flush()
            faulthandler.dump_traceback(self._stacks, all_threads=True)
            self._stacks.write(blackbox.STACKS_END)
            self._stacks.flush()
