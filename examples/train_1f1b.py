"""A small pipeline job: 1F1B over all ranks of torchrun, a real model, a few steps.

    torchrun --nproc-per-node 4 examples/train_1f1b.py --microbatches 2 --schedule torch

``--schedule torch`` is torch's own 1F1B with its guard against fewer microbatches than
stages taken out, as older torch had it; ``--schedule fixed`` is
`pptrace.schedules.Schedule1F1B`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pptrace


class UnguardedSchedule1F1B(Schedule1F1B):
    """torch's 1F1B without the check that n_microbatches >= num_stages."""

    def __init__(self, stage: Any, n_microbatches: int, **options: Any) -> None:
        super().__init__(stage, max(n_microbatches, stage.num_stages), **options)
        self._n_microbatches = n_microbatches


class Block(torch.nn.Module):
    """One stage of the model: a residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) in and out."""
        y: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def main() -> None:
    """Train for a few steps and print the losses on the last rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--schedule", choices=["torch", "fixed"], default="torch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    pptrace.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)
    stage = PipelineStage(Block(options.width), rank, world_size, torch.device("cpu"))
    if options.schedule == "fixed":
        from pptrace.schedules import Schedule1F1B as FixedSchedule1F1B

        make_schedule = FixedSchedule1F1B
    else:
        make_schedule = UnguardedSchedule1F1B
    schedule = make_schedule(
        stage, options.microbatches, loss_fn=torch.nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)

    torch.manual_seed(0)
    x = torch.randn(8 * options.microbatches, options.width)
    y = torch.randn(8 * options.microbatches, options.width)
    for step in range(options.steps):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
