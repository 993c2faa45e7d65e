"""Runs of `schedule_worker` on real ranks, alone or under the emulation of NCCL."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import launch
import pptrace
from pptrace import blackbox
from schedule_worker import Case, Outcome

__all__ = ["Emulation", "ends", "is_quiescent", "run_cases"]

_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Emulation:
    """Under which rules the ranks run."""

    rule: str = "split"
    eager: bool = False


def run_cases(
    folder: Path,
    num_ranks: int,
    cases: list[Case],
    emulation: Emulation | None = None,
    *,
    limit_s: float = 110,
    until: Callable[[], bool] | None = None,
) -> list[list[Outcome]]:
    """Run cases under one torchrun; per case that ended, what each rank saw.

    Raises AssertionError if the job failed, or did not end in time, unless ``until``
    was given: then the job is ended once that holds.
    """
    script = folder / "job.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(_HERE)!r})\n"
        "import schedule_worker\nschedule_worker.main()\n"
    )
    environment = {"SCHEDULE_CASES": json.dumps([dataclasses.asdict(c) for c in cases])}
    if emulation is not None:
        environment |= {
            "SCHEDULE_EMULATE": "nccl",
            "SCHEDULE_RULE": emulation.rule,
            "SCHEDULE_EAGER": "1" if emulation.eager else "",
            "PPTRACE_DIR": str(folder / "out"),
        }
    job = launch.torchrun(
        script, num_ranks, str(folder), timeout=limit_s, until=until, **environment
    )
    files = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
    ranks = [json.loads(f.read_text()) if f.exists() else [] for f in files]
    if until is None:
        done = min(map(len, ranks))
        where = "" if done == len(cases) else f"stopped in {cases[done]}"
        assert job.returncode == 0, f"{where}\n{job.output[-4000:]}"
    return [
        [Outcome(**outcome) for outcome in outcomes]
        for outcomes in zip(*ranks, strict=False)
    ]


def ends(
    folder: Path, num_ranks: int, case: Case, emulation: Emulation
) -> list[Outcome] | None:
    """What the ranks saw of one case, or None if it hangs.

    Nothing is concluded from time: it hangs if every rank's host is blocked and every
    message that was sent has been received, so that nothing can ever happen again.
    """
    first: _Look | None = None
    hung = False

    def hangs() -> bool:
        nonlocal first, hung
        look = is_quiescent(folder / "out", num_ranks)
        if look is None or first is None or look.counts != first.counts:
            first = look
        else:  # the second look must be wholly after the first
            hung = min(look.written_ns) > max(first.written_ns)
        return hung

    outcomes = run_cases(folder, num_ranks, [case], emulation, until=hangs)
    if hung:
        return None
    assert outcomes, f"neither ended nor quiescent: {case}"
    return outcomes[0]


@dataclasses.dataclass(frozen=True)
class _Look:
    """What the black boxes of all ranks say of their emulators."""

    counts: tuple[tuple[int, int, int], ...]
    written_ns: tuple[int, ...]


def is_quiescent(out: Path, num_ranks: int) -> _Look | None:
    """The ranks' counts, if every host is blocked and no message is on its way."""
    logs = []
    for path in sorted(out.rglob("rank*.pptrace")):
        try:
            logs.append(blackbox.read(path, tail=1))
        except pptrace.InputError:  # just being made
            return None
    if len(logs) < num_ranks:
        return None
    counts = tuple(log.emulation for log in logs)
    all_blocked = all(blocked for blocked, _, _ in counts)
    sent, received = (sum(c[i] for c in counts) for i in (1, 2))
    if not all_blocked or sent != received:
        return None
    return _Look(counts, tuple(log.heartbeat_ns for log in logs))
