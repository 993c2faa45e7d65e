"""How long `pptrace.check` takes: beside construction, and as schedules grow.

Bars, on processor time, all in one process and in turns, so that what else the machine
does hits all alike::

    check of 1F1B, 64 ranks, n=256     at most 2.0 times (construct it once + a plain
                                       loop over its ops)
    twice the microbatches, or ranks   at most 2.2 times per doubling of the ops, for
                                       what is done after torch has constructed it

The plain loop walks torch's table of the constructed schedule, all ranks, and makes for
each message a tuple of what a ``P2POp`` says (direction, peer, stage, microbatch), in a
list per rank; nothing is matched. The time of a loop that makes nothing is printed, too.
Garbage collection is on, as in any program. ``python benchmarks/checker.py [RUNS]``
prints medians with the middle half of the runs.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules

import pptrace
from pptrace.records import Group
from pptrace.schedules._stubs import Recorder, StubGroup, StubStage, Symbols
from pptrace.schedules.recording import installed_rule

__all__: list[str] = []

_RANKS, _N = 64, 256
_BAR, _LINEAR_BAR = 2.0, 2.2
_GROWTH = (
    ("1F1B", torch_schedules.Schedule1F1B, 1),
    # A ring: every message is looked at by the general way.
    ("Interleaved1F1B", torch_schedules.ScheduleInterleaved1F1B, 2),
)


def _construct(
    cls: Any = torch_schedules.Schedule1F1B,
    ranks: int = _RANKS,
    n: int = _N,
    per_rank: int = 1,
) -> Any:
    """The schedule as torch makes it on one rank: it has the tables of all."""
    group = StubGroup(Group(1, "pp", "pp", tuple(range(ranks)), "nccl"), 0)
    recorder = Recorder(group, installed_rule(), Symbols(n), is_plain=True)
    size = ranks * per_rank
    stages: Any = [StubStage(i, size, recorder) for i in range(0, size, ranks)]
    return cls(stages if per_rank > 1 else stages[0], n, loss_fn=_no_loss)


def _no_loss(*_: Any) -> None:
    """Never called."""


def _loop(order: dict[int, list[Any]]) -> dict[int, list[tuple[str, int, int, int]]]:
    """The messages of every rank, in its order."""
    last = _RANKS - 1
    found = {}
    for rank, actions in order.items():
        ops: list[tuple[str, int, int, int]] = []
        for action in actions:
            if action is None or action.microbatch_index is None:
                continue
            stage, kind, microbatch = action[:3]
            is_forward = kind is torch_schedules.FORWARD
            source, target = (rank - 1, rank + 1)[:: 1 if is_forward else -1]
            if 0 <= source <= last:
                ops.append(("irecv", source, stage, microbatch))
            if 0 <= target <= last:
                ops.append(("isend", target, stage, microbatch))
        found[rank] = ops
    return found


def _bare_loop(order: dict[int, list[Any]]) -> None:
    """As `_loop`, with nothing done."""
    for actions in order.values():
        for _ in actions:
            pass


def _ms(function: Callable[[], Any]) -> float:
    """Milliseconds of processor time; what is returned is freed afterwards."""
    gc.collect()
    began = time.process_time()
    result = function()
    took = time.process_time() - began
    del result
    return took * 1e3


def _in_turns(functions: dict[Any, Callable[[], Any]], runs: int) -> dict[Any, Any]:
    """The times of each, taken in turns; the first round fills caches."""
    rounds = [
        {name: _ms(function) for name, function in functions.items()}
        for _ in range(runs + 1)
    ][1:]
    return {name: [times[name] for times in rounds] for name in functions}


def _line(name: str, values: list[float], unit: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{name:44} {middle:7.2f} {unit:2} ({low:.2f} to {high:.2f})"


def _against_construction(runs: int) -> bool:
    order = _construct().pipeline_order
    times = _in_turns(
        {
            "check 1F1B, 64 ranks, n=256": lambda: pptrace.check(
                torch_schedules.Schedule1F1B, num_stages=_RANKS, n_microbatches=_N
            ),
            "torch constructs it once": _construct,
            "a plain loop over its ops": lambda: _loop(order),
            "a loop over its table that does nothing": lambda: _bare_loop(order),
        },
        runs,
    )
    for name, values in times.items():
        print(_line(name, values, "ms"))
    check, construct, loop, bare = times.values()
    columns = list(zip(check, construct, loop, bare, strict=True))
    ratios = [c / (made + plain) for c, made, plain, _ in columns]
    print(_line("check / (construct + loop)", ratios, ""), f" bar {_BAR}")
    strict = [c / (made + nothing) for c, made, _, nothing in columns]
    print(_line("check / (construct + empty loop)", strict, ""), " no bar")
    return statistics.median(ratios) <= _BAR


def _grows(runs: int) -> bool:
    met = True
    for name, cls, per_rank in _GROWTH:
        sizes = [(16, 64), (16, 128), (16, 256), (32, 128), (64, 128)]

        def run(ranks: int, n: int, cls: Any = cls, per_rank: int = per_rank) -> Any:
            return pptrace.check(
                cls, num_stages=ranks * per_rank, n_microbatches=n, num_ranks=ranks
            )

        checks = {s: (lambda s=s: run(*s)) for s in sizes}
        makes = {("make", s): (lambda s=s, c=cls, k=per_rank: _construct(c, *s, k))
                 for s in sizes}  # fmt: skip
        times = _in_turns({**checks, **makes}, runs)
        ops = {s: sum(len(list(p.ops(r))) for r in p.ranks) for s in sizes
               if (p := run(*s).plan) is not None}  # fmt: skip
        for small, large in (
            ((16, 64), (16, 128)),
            ((16, 128), (16, 256)),
            ((16, 128), (32, 128)),
            ((32, 128), (64, 128)),
        ):
            doublings = ops[large] / ops[small] / 2
            after = {
                s: [a - b for a, b in zip(times[s], times["make", s], strict=True)]
                for s in (small, large)
            }
            pairs = zip(after[large], after[small], strict=True)
            growth = [a / b / doublings for a, b in pairs]
            what = f"{name}: P, n from {small} to {large}"
            print(_line(what, growth, "x"), f" bar {_LINEAR_BAR}")
            met &= statistics.median(growth) <= _LINEAR_BAR
    return met


def main() -> int:
    """Measure, print; 1 if something is over its bar."""
    torch.set_num_threads(1)
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    met = _against_construction(runs)
    return int(not (_grows(runs) and met))


if __name__ == "__main__":
    sys.exit(main())
