"""Every fixed schedule, every size: the checker; and real ranks for a sample of sizes.

``python tests/schedule_matrix.py`` prints the tables that ``docs/verified.md`` holds;
``--write`` puts them there. Ten minutes on two cores. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from pptrace import schedules
from pptrace.checker import check
from schedule_runs import Emulation, run_cases
from schedule_worker import Case, Outcome

__all__ = ["main"]

_TABLE = Path(__file__).parent.parent / "docs" / "verified.md"
_RULES = ("split", "coalesced")
_METADATA = ("static", "dynamic")
_SCHEDULES = (
    ("Schedule1F1B", (1,)),
    ("ScheduleGPipe", (1,)),
    ("ScheduleLoopedBFS", (1, 2)),
    ("ScheduleInterleaved1F1B", (1, 2)),
    ("ScheduleInterleavedZeroBubble", (1, 2)),
    ("ScheduleZBVZeroBubble", (2,)),
    ("ScheduleDualPipeV", (2,)),
)
_RANKS = 4
_COUNTS = (1, 2, 3, 5, 8, 9)
_EMULATIONS = (
    ("split lazy", Emulation("split")),
    ("split eager", Emulation("split", eager=True)),
    ("coalesced lazy", Emulation("coalesced")),
)
_TOLERANCE = 1e-12


def _difference(ranks: list[Outcome]) -> float:
    """Largest deviation of a loss or gradient; infinite where one is missing."""
    worst = 0.0
    for rank in ranks:
        pairs = list(zip(rank.gradients, rank.reference, strict=True))
        pairs += list(zip(rank.losses, rank.reference_losses, strict=False))
        for mine, theirs in pairs:
            if rank.error or len(mine) != len(theirs):
                return float("inf")
            worst = max(
                [worst, *(abs(a - b) for a, b in zip(mine, theirs, strict=True))]
            )
    return worst


def _cases(name: str, per_rank: int) -> list[Case]:
    v_shaped = name in {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
    return [
        Case(
            name,
            n,
            metadata=metadata,
            steps="tett",
            stages_per_rank=per_rank,
            placement="v" if v_shaped else "loop",
        )
        for n in _COUNTS
        for metadata in _METADATA
    ]


def _ran(name: str, per_rank: int) -> tuple[str, bool]:
    """One line: real ranks under each emulation; each cell both metadata modes."""
    worst = dict.fromkeys(_COUNTS, 0.0)
    cases = _cases(name, per_rank)
    for _, emulation in _EMULATIONS:
        with tempfile.TemporaryDirectory() as folder:
            runs = run_cases(Path(folder), _RANKS, cases, emulation, limit_s=300)
        for case, ranks in zip(cases, runs, strict=True):
            worst[case.n] = max(worst[case.n], _difference(ranks))
    cells = ["right" if d <= _TOLERANCE else f"**off by {d}**" for d in worst.values()]
    line = f"| {name} | {per_rank} | {' | '.join(cells)} |"
    return line, max(worst.values()) <= _TOLERANCE


def _checked(name: str, per_rank: int) -> tuple[str, bool]:
    """One line: the checker over all sizes and conditions."""
    cls = getattr(schedules, name)
    count, bad = 0, []
    for ranks, n in itertools.product(range(2, 9), range(1, 13)):
        for rule, eager, metadata, host, forward_only in itertools.product(
            _RULES, (False, True), _METADATA, ("async", "blocking"), (False, True)
        ):
            result = check(
                cls,
                num_stages=ranks * per_rank,
                num_ranks=ranks,
                n_microbatches=n,
                rule=rule,
                eager=eager,
                metadata=metadata,
                host=host,
                forward_only=forward_only,
            )
            count += 1
            if not result.ok:
                bad.append((ranks, n, rule, eager, metadata, host, forward_only))
    said = "clean" if not bad else f"**{len(bad)} findings**, first {bad[0]}"
    return f"| {name} | {per_rank} | {count} | {said} |", not bad


_CHECKER_HEAD = """\
# Fixed schedules: what was verified

Written by `tests/schedule_matrix.py`. On CPU; no GPU was involved. 1F1B beside torch's
own, cell by cell: [1F1B in every case](full.md).

## The checker

2 to 8 ranks, 1 to 12 microbatches, both rules, lazy and eager, static and dynamic, host
async and blocking, `step` and `eval`.

| schedule | stages per rank | runs | result |
|---|---|---|---|"""
_RANKS_HEAD = f"""
## Real ranks

{_RANKS} processes under the emulation of NCCL's rules ({", ".join(n for n, _ in _EMULATIONS)};
static and dynamic metadata each), every case in a process group never used before, train
→ eval → train → train. Right: losses and every gradient equal those of the model without
a pipeline to {_TOLERANCE} in float64, and evaluation leaves the gradients alone.

| schedule | stages per rank | {" | ".join(f"n={n}" for n in _COUNTS)} |
{"|---" * (2 + len(_COUNTS))}|"""


def main() -> int:
    """Run everything, print the tables, say with the exit code whether all is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    pairs = [(name, per) for name, several in _SCHEDULES for per in several]
    all_right = True
    lines: list[str] = []
    for head, measure in ((_CHECKER_HEAD, _checked), (_RANKS_HEAD, _ran)):
        lines.append(head)
        print(head, flush=True)
        for name, per_rank in pairs:
            line, right = measure(name, per_rank)
            print(line, flush=True)
            lines.append(line)
            all_right &= right
    if options.write:
        _TABLE.write_text("\n".join(lines) + "\n")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
