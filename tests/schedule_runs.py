"""Runs of `schedule_worker` on real ranks, alone or under the emulation of NCCL."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import launch
from schedule_worker import Case, Outcome

__all__ = ["Emulation", "run_cases"]

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
) -> list[list[Outcome]]:
    """Run cases under one torchrun; per case, what each rank saw.

    Raises AssertionError, naming the case, if the job failed or did not end in time.
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
        script, num_ranks, str(folder), timeout=limit_s, **environment
    )
    files = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
    ranks = [json.loads(f.read_text()) if f.exists() else [] for f in files]
    done = min(map(len, ranks))
    where = "" if done == len(cases) else f"stopped in {cases[done]}"
    assert job.returncode == 0, f"{where}\n{job.output[-4000:]}"
    return [
        [Outcome(**outcome) for outcome in outcomes]
        for outcomes in zip(*ranks, strict=True)
    ]
