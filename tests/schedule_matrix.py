"""Every size: the fixed 1F1B finishes with right results, torch's hangs where expected.

``python tests/schedule_matrix.py`` (``make full``) runs real ranks under the emulation
of NCCL, for both rules and both metadata modes, each case in a process group never used
before, and prints the table that ``docs/verified.md`` holds; ``--write`` puts it there.
A quarter of an hour on two cores. Exit code 1 if anything is not as expected.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from pptrace import schedules
from pptrace.checker import check
from schedule_runs import Emulation, ends, run_cases
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


def _row(size: int, counts: list[int], rule: str, metadata: str) -> tuple[str, bool]:
    """One line of the table: what became of each n; and whether all is as expected."""
    emulation = Emulation(rule)
    fixed = [Case("Schedule1F1B", n, metadata=metadata, steps="tet") for n in counts]
    legal = [Case("Schedule1F1B", n, "torch", metadata) for n in counts if n >= size]
    with tempfile.TemporaryDirectory() as folder:
        runs = run_cases(Path(folder), size, fixed + legal, emulation, limit_s=300)
    differences = [_difference(ranks) for ranks in runs[: len(fixed)]]
    theirs = {case.n: "ends" for case in legal}
    for n in counts:
        if n not in theirs:
            case = Case("Schedule1F1B", n, "unguarded", metadata)
            with tempfile.TemporaryDirectory() as folder:
                hung = ends(Path(folder), size, case, emulation) is None
            theirs[n] = "**hangs**" if hung else "ends"
    cells = [
        f"{'right' if difference < 1e-12 else '**WRONG**'} / {theirs[n]}"
        for n, difference in zip(counts, differences, strict=True)
    ]
    expected = all((theirs[n] == "ends") == (n >= size) for n in counts)
    line = f"| {size} | {rule} | {metadata} | {' | '.join(cells)} |"
    return line, expected and max(differences) < 1e-12


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


def main() -> int:
    """Run everything, print the table, say with the exit code whether it is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--counts", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    all_right = True
    lines = [
        "# What was verified",
        "",
        "Written by `make full`. Real processes on CPU under the emulation of NCCL's",
        "rules; no GPU was involved.",
        "",
        "## 1F1B: the fixed schedule / torch's own",
        "",
        "`right`: finished; losses and every gradient equal those of the model without",
        "a pipeline, train → eval → train, to 1e-12 in float64. `hangs`: every host is",
        "blocked and no message is on its way; torch's refusal of n < S was taken out.",
        "Lazy process group, never used before.",
        "",
        f"| S | rule | metadata | {' | '.join(f'n={n}' for n in options.counts)} |",
        f"|{'---|' * (3 + len(options.counts))}",
    ]
    print("\n".join(lines), flush=True)
    for size, rule, metadata in itertools.product(options.sizes, _RULES, _METADATA):
        line, right = _row(size, options.counts, rule, metadata)
        print(line, flush=True)
        lines.append(line)
        all_right &= right
    lines += [
        "",
        "## All fixed schedules: the checker",
        "",
        "2 to 8 ranks, 1 to 12 microbatches, both rules, lazy and eager, static and",
        "dynamic, host async and blocking, `step` and `eval`.",
        "",
        "| schedule | stages per rank | runs | result |",
        "|---|---|---|---|",
    ]
    for name, per_ranks in _SCHEDULES:
        for per_rank in per_ranks:
            line, right = _checked(name, per_rank)
            print(line, flush=True)
            lines.append(line)
            all_right &= right
    if options.write:
        _TABLE.write_text("\n".join(lines) + "\n")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
