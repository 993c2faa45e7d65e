"""pptrace: says why a pipeline-parallel job hangs, and what to change.

Three lines in the training script, before ``init_process_group`` if possible::

    import pptrace

    pptrace.enable()

From then on every rank writes a black box; a job that hangs prints a report, and
``pptrace report DIR`` reads the boxes at any time, of living and of dead processes.
Importing pptrace does not import torch; `enable` does.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from pptrace.errors import InputError, PptraceError, PreflightError, SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from pptrace.checker import CheckResult
    from pptrace.report import Report

__all__ = [
    "InputError",
    "PptraceError",
    "PreflightError",
    "SettingsError",
    "__version__",
    "check",
    "disable",
    "enable",
    "run_folder",
]

__version__ = "0.1.0"


def enable(
    dir: str | os.PathLike[str] | None = None,  # noqa: A002 - reads as PPTRACE_DIR does
    *,
    ring_slots: int | None = None,
    hang_after: float | str | None = None,
    emulate: str | None = None,
    rule: str | None = None,
    eager: bool | None = None,
    host: str | None = None,
    report: bool | None = None,
    fix: bool | None = None,
    preflight: str | None = None,
    preflight_budget: float | None = None,
) -> None:
    """Record every P2P op and chunk of this process, and explain a hang.

    Call it once per rank, before or after ``init_process_group``; calling it twice is
    harmless (the options of the first call stay). ``PPTRACE=1`` in the environment at
    ``import pptrace`` does the same. Each option has an environment variable, which
    counts where the argument is not given. Training results do not change; an error
    inside pptrace switches the hook off and training goes on.

    Call it before any P2P has been posted: ops before that are not counted, and where
    that is seen (a schedule has already run) verdicts stay undetermined.

    Args:
        dir: output directory (``PPTRACE_DIR``, default ``./pptrace-out``). Each run gets
            a folder in it, each rank a file ``rank00012.pptrace`` there.
        ring_slots: records kept per rank, 128 bytes each (``PPTRACE_RING_SLOTS``,
            default 4096, i.e. 512 KiB).
        hang_after: seconds without progress, while ops are pending, after which the
            job is diagnosed (``PPTRACE_HANG_AFTER``). Default "auto": ten times the
            slowest recent step, between 30 and 300 s; 120 s before the first step ends.
        emulate: "nccl" makes P2P on CPU follow NCCL's matching rules, so that the job
            hangs on a laptop where it would hang on the cluster (``PPTRACE_EMULATE``).
        rule: emulation only: "split" (torch 2.13 and later issue one-sided batches op by
            op) or "coalesced" (2.8 and earlier never do); default: what the installed
            torch does (``PPTRACE_RULE``).
        eager: emulation only: treat groups as initialised eagerly, as with
            ``init_process_group(device_id=...)`` (``PPTRACE_EAGER``); default: as the
            group was made.
        host: emulation only: "blocking" (default) or "async", where ``wait()`` returns at
            once as on CUDA (``PPTRACE_EMULATE_HOST``).
        report: print the report of a hang on stderr (``PPTRACE_REPORT``, default on);
            it is written to the run's folder in any case.
        fix: make torch hand out the fixed schedules of `pptrace.schedules`
            (``PPTRACE_FIX``, default off).
        preflight: check each schedule at its first step against the rules of NCCL:
            "warn" (default; by the pipeline's first rank, beside the step), "raise"
            (`PreflightError` on every rank, before the step) or "off"
            (``PPTRACE_PREFLIGHT``).
        preflight_budget: seconds the check may take (``PPTRACE_PREFLIGHT_BUDGET``,
            default 0.2); a larger schedule is not checked, which is noted.

    Raises:
        SettingsError: an option or variable has a value that cannot be used.
    """
    from pptrace.settings import load_settings

    settings = load_settings(
        {
            "dir": dir,
            "ring_slots": ring_slots,
            "hang_after": hang_after,
            "emulate": emulate,
            "rule": rule,
            "eager": eager,
            "host": host,
            "report": report,
            "fix": fix,
            "preflight": preflight,
            "preflight_budget": preflight_budget,
        }
    )
    from pptrace.hooks import session

    if settings.fix:
        from pptrace import schedules

        schedules.install()
    session.start(settings, _render)


def disable() -> None:
    """Stop recording and restore every patched attribute to the very same object.

    The black boxes stay; they say that recording ended. Harmless if pptrace is off.
    """
    session = sys.modules.get("pptrace.hooks.session")
    if session is not None:
        current = session.current()
        session.stop()
        if current is not None and current.settings.fix:
            from pptrace import schedules

            schedules.uninstall()


def check(schedule: type | str, **numbers: Any) -> CheckResult:
    """Say whether a schedule can hang on NCCL; see `pptrace.checker.check`."""
    from pptrace.checker import check as checked

    return checked(schedule, **numbers)


def run_folder() -> Path | None:
    """The folder of the current run; None while off or before the rank is known."""
    session = sys.modules.get("pptrace.hooks.session")
    current = session.current() if session is not None else None
    return current.folder if current is not None else None


def _render(report: Report) -> str:
    """The report as the job prints it: plain text for a log."""
    from pptrace.viewers.terminal import render_plain

    return render_plain(report)


def _is_own_command() -> bool:
    """Whether this process is the pptrace command, not a training script."""
    argv: list[Any] = getattr(sys, "orig_argv", sys.argv)
    names = [os.path.basename(str(a)) for a in argv[:3]]  # noqa: PTH119 - start-up time
    return "pptrace" in names


if os.environ.get("PPTRACE") == "1" and not _is_own_command():
    enable()
