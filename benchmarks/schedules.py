"""Step time of fixed schedules against torch's own, in one run on gloo.

``python benchmarks/schedules.py`` starts torchrun. Both schedules live in the same
processes and take turns step by step, so that whatever else the machine does hits both.
The bar: median of the step-by-step ratios at most 1.02. Exit code 1 if one is above.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from pptrace import schedules

__all__ = ["main"]

_BAR = 1.02
_WIDTH, _ROWS, _DEPTH = 512, 64, 4
_CASES = (
    ("Schedule1F1B", 1),
    ("ScheduleGPipe", 1),
    ("ScheduleInterleaved1F1B", 2),
    ("ScheduleZBVZeroBubble", 2),
)


def _stages(name: str, group: Any) -> list[PipelineStage]:
    rank, world = dist.get_rank(), dist.get_world_size()
    per_rank = dict(_CASES)[name]
    indices = [rank + world * i for i in range(per_rank)]
    if name == "ScheduleZBVZeroBubble":
        indices = [rank, 2 * world - 1 - rank]
    example = torch.zeros(_ROWS, _WIDTH, requires_grad=True)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH)]
    return [
        PipelineStage(
            torch.nn.Sequential(*layers, torch.nn.Tanh()),
            index,
            world * per_rank,
            torch.device("cpu"),
            input_args=example,
            output_args=example,
            group=group,
        )
        for index in indices
    ]


def _make(module: Any, name: str, n: int) -> Any:
    stages = _stages(name, dist.new_group(list(range(dist.get_world_size()))))
    cls = getattr(module, name)
    single = issubclass(cls, torch_schedules.PipelineScheduleSingle)
    loss_fn = torch.nn.functional.mse_loss
    schedule = cls(stages[0] if single else stages, n, loss_fn=loss_fn)
    return schedule, {stage.stage_index for stage in stages}


def _step(schedule: Any, mine: set[int], batch: torch.Tensor) -> float:
    """Seconds of one step, of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    last = dist.get_world_size() * len(mine) - 1
    schedule.step(
        *([batch] if 0 in mine else []), target=batch if last in mine else None
    )
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _worker(steps: int) -> bool:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    n = 2 * dist.get_world_size()
    batch = torch.randn(n * _ROWS, _WIDTH)
    met = True
    for name, _ in _CASES:
        pair = [_make(module, name, n) for module in (torch_schedules, schedules)]
        times: list[list[float]] = [[], []]
        for step in range(steps + 5):
            order = (0, 1) if step % 2 else (1, 0)
            for which in order:
                took = _step(*pair[which], batch)
                if step >= 5:
                    times[which].append(took)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        theirs, ours = (statistics.median(values) * 1e3 for values in times)
        met &= ratio <= _BAR
        if dist.get_rank() == 0:
            print(
                f"{name:24} torch's {theirs:7.2f} ms, fixed {ours:7.2f} ms, "
                f"median ratio {ratio:.3f} (bar {_BAR})",
                flush=True,
            )
    dist.destroy_process_group()
    return met


def main() -> int:
    """Measure, print a line per schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if "RANK" in os.environ:
        return 0 if _worker(options.steps) else 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks), str(Path(__file__))]
    command += ["--steps", str(options.steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, env=environment, check=False).returncode and 1


if __name__ == "__main__":
    sys.exit(main())
