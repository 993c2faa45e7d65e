"""Start and stop: makes the black box, installs the hooks, starts the monitor.

The rank is known from torchrun's environment or from the process group, whichever
comes first, so `start` may be called before or after ``init_process_group``.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pptrace.blackbox import BlackBox, file_name, process_start
from pptrace.hooks import collectives, p2p, pipelining, torch_compat
from pptrace.hooks.monitor import Monitor
from pptrace.hooks.patching import PatchList
from pptrace.hooks.recorder import Recorder, describe_environment
from pptrace.hooks.state import Active, in_forked_child, set_active
from pptrace.records import DISABLED, Status
from pptrace.report import Report
from pptrace.settings import Settings

__all__ = ["Session"]

logger = logging.getLogger("pptrace")


class Session:
    """One `pptrace.enable`, until `disable`."""

    def __init__(self, settings: Settings, render: Callable[[Report], str]) -> None:
        # The job may change its directory later; reports and hints name the path.
        self.settings = dataclasses.replace(settings, dir=settings.dir.absolute())
        self._pid = os.getpid()
        self.folder: Path | None = None
        self._render = render
        self._patches = PatchList()
        self._on: Active | None = None
        self._monitor: Monitor | None = None
        self._stacks: Any = None
        self._late = _used_before()

    def start(self) -> None:
        """Install the hooks; make the black box now if the rank is known."""
        rule = self.settings.rule or torch_compat.default_rule()
        self._rule = rule
        p2p.install(self._patches)
        pipelining.install(self._patches)
        collectives.install(self._patches)
        self._patches.replace_function(c10d, "init_process_group", self._on_init)
        atexit.register(self._at_exit)
        if dist.is_initialized():
            self._open(dist.get_rank(), dist.get_world_size())
        elif _OWNER not in os.environ and (known := _single_node_run()) is not None:
            self._open(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), known)

    def stop(self) -> None:
        """Undo everything; the file stays and says that recording ended."""
        set_active(None)
        if self._monitor is not None:
            self._monitor.stop()
        for left in self._patches.undo():
            logger.warning("pptrace: not restored: %s", left)
        atexit.unregister(self._at_exit)
        if self._on is not None:
            recorder = self._on.recorder
            recorder.box.set_incomplete(DISABLED)
            recorder.close(Status.DISABLED)
            if recorder.emulator is not None:
                recorder.emulator.close()
        self._release_signals()

    # -- opening -------------------------------------------------------------------

    def _on_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if current() is self:
                try:
                    self._open(dist.get_rank(), dist.get_world_size())
                except Exception as error:
                    logger.warning("pptrace: is off: %s", error, exc_info=error)
            return result

        return init_process_group

    def _open(self, rank: int, world_size: int, name: str | None = None) -> None:
        if self._on is not None:
            if self._on.recorder.box.rank == rank:
                self._join_job()
                return
            self._discard()  # the environment said another rank than the group
        run = name or _single_node_run() or _agree_on_run()
        folder = self.settings.dir / run
        box = self._make_box(folder, rank, world_size, run)
        if box is None:
            return
        folder = box.path.parent
        # Children of this process inherit RANK, but they are not the rank.
        os.environ[_OWNER] = str(os.getpid())
        recorder = Recorder(box, eager=self.settings.eager, rule=self._rule)
        on = Active(self.settings, self._patches, recorder)
        self.folder = folder
        self._on = on
        box.fact("environment", **describe_environment(self.settings, self._rule))
        if self._late:
            box.set_incomplete(self._late)
        self._register_signals(box)
        self._monitor = Monitor(on, folder, self._render, self._stacks)
        on.on_exception = self._monitor.exception_left_step
        box.set_status(Status.RUNNING)
        recorder.heartbeat()
        if dist.is_initialized():
            self._join_job()
        set_active(on)
        self._monitor.start()

    def _make_box(
        self, folder: Path, rank: int, world_size: int, run: str
    ) -> BlackBox | None:
        try:
            return self._new_box(folder, rank, world_size, run)
        except (OSError, ValueError) as error:
            logger.warning(
                "pptrace: no black box in %s: %s; training goes on untraced",
                folder,
                error,
            )
            return None

    def _new_box(self, folder: Path, rank: int, world_size: int, run: str) -> BlackBox:
        """A black box in the run's folder, or in ``<run>.2``, ``.3``, ... beside it.

        An earlier job of the same parent process may have had the name.
        """
        for again in itertools.count(1):
            name = run if again == 1 else f"{run}.{again}"
            path = folder.with_name(name) / file_name(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                return BlackBox(
                    path,
                    rank=rank,
                    world_size=world_size,
                    run=run,
                    attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                    slots=self.settings.ring_slots,
                )
        raise AssertionError  # the count has no end

    def _join_job(self) -> None:
        """What needs the process group: the emulator, the monitor's store."""
        assert self._on is not None
        assert self._monitor is not None
        recorder = self._on.recorder
        if self.settings.emulate == "nccl" and recorder.emulator is None:
            from pptrace.hooks.emulation import Emulator

            recorder.emulator = Emulator(
                torch_compat.open_root_store,
                dist.get_rank(),
                dist.get_world_size(),
                run=recorder.box.run,
                host=self.settings.host,
            )
        self._monitor.join_job()

    def _discard(self) -> None:
        assert self._on is not None
        assert self._monitor is not None
        set_active(None)
        self._monitor.stop()
        self._on.recorder.box.path.unlink(missing_ok=True)
        self._release_signals()
        self._on = None

    # -- the end -------------------------------------------------------------------

    def _register_signals(self, box: BlackBox) -> None:
        """Have C code write Python stacks when a signal ends the process.

        The main thread is often inside a C++ wait then, where no Python handler would
        run; `faulthandler` writes at once and passes the signal on.
        """
        in_forked_child.append(self._release_in_child)
        path = box.path.with_suffix(".stacks.txt")
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._stacks = path.open("w", encoding="utf-8")
            faulthandler.register(
                signal.SIGTERM, file=self._stacks, all_threads=True, chain=True
            )
            if not faulthandler.is_enabled():
                faulthandler.enable(self._stacks)
                self._enabled_faulthandler = True

    _enabled_faulthandler = False

    def _release_signals(self) -> None:
        if self._stacks is None:
            return
        self._release_in_child()
        self._stacks.close()
        self._stacks = None

    def _release_in_child(self) -> None:
        """Let go of the signals; a forked child keeps the file open but unused."""
        if self._release_in_child in in_forked_child:
            in_forked_child.remove(self._release_in_child)
        theirs = signal.getsignal(signal.SIGTERM)
        faulthandler.unregister(signal.SIGTERM)
        if callable(theirs):
            # unregister puts back what was there at enable(), not what came since.
            with contextlib.suppress(ValueError):  # only the main thread may
                signal.signal(signal.SIGTERM, theirs)
        if self._enabled_faulthandler:
            faulthandler.disable()
            self._enabled_faulthandler = False

    def _at_exit(self) -> None:
        on, monitor = self._on, self._monitor
        if on is None or monitor is None or os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        with contextlib.suppress(Exception):
            if isinstance(error, BaseException):
                on.recorder.exception(error)
                on.recorder.box.set_status(Status.RAISED)
                monitor.exception_left_step(error)
                monitor.finish(timeout=5.0)
            else:
                on.recorder.close(Status.EXITED)
                monitor.finish(timeout=5.0)
            on.recorder.heartbeat()


_current: Session | None = None


def current() -> Session | None:
    """The session that is on."""
    return _current


def start(settings: Settings, render: Callable[[Report], str]) -> Session:
    """Start the one session of this process; the one that is on if there is one."""
    global _current  # noqa: PLW0603 - one session per process
    if _current is None:
        session = Session(settings, render)
        _current = session
        try:
            session.start()
        except BaseException:
            _current = None
            session.stop()
            raise
    return _current


def stop() -> None:
    """Stop the session, if one is on."""
    global _current
    session, _current = _current, None
    if session is not None:
        session.stop()


def _single_node_run() -> str | None:
    """The run's name where torchrun runs all ranks on this host; else None.

    All ranks are children of one agent, so its start time and pid name the run alike
    on every rank, before any of them can talk to the others.
    """
    env = os.environ
    if "RANK" not in env or env.get("LOCAL_WORLD_SIZE") != env.get("WORLD_SIZE", ""):
        return None
    parent = os.getppid()
    began = process_start(parent)
    if not began:
        return None
    name = f"{_stamp(_boot_time() + began / _TICKS)}-{parent}"
    return _with_attempt(
        f"{name}-{env['MASTER_PORT']}" if "MASTER_PORT" in env else name
    )


_OWNER = "PPTRACE_OWNER_PID"
"""Set in the environment of a rank for its children to see."""
_TICKS = os.sysconf("SC_CLK_TCK")


def _boot_time() -> int:
    lines = Path("/proc/stat").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("btime")).split()[1])


def _agree_on_run() -> str:
    """The run's name: the first rank to ask chooses, the job's store tells the others.

    Nobody waits: pptrace may be on in some ranks only.
    """
    name = _with_attempt(_stamp(time.time()) + f"-{os.getpid()}")
    try:
        store = c10d._get_default_store()
        chosen = store.compare_set(f"pptrace/run/{_starts()}", "", name)
        return str(chosen.decode())
    except Exception as error:  # noqa: BLE001 - a store that does not answer
        logger.warning("pptrace: run name not agreed with the other ranks: %s", error)
        return name


def _stamp(seconds: float) -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))


def _with_attempt(name: str) -> str:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = name if attempt == "0" else f"{name}-attempt{attempt}"
    again = _starts()
    return name if again == 1 else f"{name}-{again}"


_start_count = 0


def _starts() -> int:
    return _start_count or 1


def _used_before() -> str:
    """Why counts cannot start at zero now: P2P may have been posted before.

    Looks for traces of earlier use: a schedule whose stage has been set up, or works
    still alive. Raw P2P that has completed before leaves none on NCCL.
    """
    global _start_count  # noqa: PLW0603 - how often this process switched on
    _start_count += 1
    if not dist.is_initialized():
        return ""
    if _start_count > 1:
        return "pptrace was switched off and on again: ops in between are not counted"
    if any(torch_compat.was_used(group) for group in list(c10d._world.pg_map)):
        return "enabled after a process group had been used: ops before are not counted"
    kinds = _subclasses(torch_compat.schedule_bases())
    for thing in gc.get_objects():
        if type(thing) in kinds and torch_compat.was_stepped(thing):
            return "enabled after a schedule had run: its ops are not counted"
    return ""


def _subclasses(bases: tuple[type, ...]) -> set[type]:
    kinds = set(bases)
    for base in bases:
        kinds |= _subclasses(tuple(base.__subclasses__()))
    return kinds
