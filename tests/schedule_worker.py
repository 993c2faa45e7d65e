"""What each rank of the schedule tests runs: many cases in one start of torchrun.

``python -m torch.distributed.run ... schedule_worker.py OUT`` with the cases as JSON
in ``SCHEDULE_CASES``; each rank writes ``OUT/rank<r>.json``, one entry per case. The
rules of NCCL are emulated where ``SCHEDULE_EMULATE`` is set; ``SCHEDULE_RULE`` and
``SCHEDULE_EAGER`` choose among them.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, pipe_split, pipeline
from torch.distributed.pipelining import schedules as torch_schedules

__all__ = ["Case", "Outcome", "run_case"]

WIDTH = 4
ROWS = 2  # per microbatch


@dataclass(frozen=True)
class Case:
    """One schedule on all ranks, in a process group never used before."""

    schedule: str
    n: int
    source: str = "pptrace"
    """``pptrace``, ``torch``, or ``installed``: torch's name after `install`."""
    metadata: str = "static"
    """``static`` (shapes given to the stage) or ``dynamic``."""
    steps: str = "tt"
    """What is done in turn: t train, e eval, f eval that returns no outputs."""
    stages_per_rank: int = 1
    placement: str = "loop"
    """``loop`` or ``v``: which stages a rank holds."""
    tensors: int = 1
    """Tensors per message."""
    scale_grads: bool = True
    zero_grad: bool = True
    """Whether gradients are cleared between training steps."""
    loss: bool = True
    """Whether the schedule has a loss function."""
    defer: bool = False
    """``defer_pp_recv``, for schedules that know it."""
    skip: bool = False
    """A traced model of three stages whose first feeds the third as well."""


@dataclass
class Outcome:
    """What one rank saw of a case."""

    error: str = ""
    losses: list[list[float]] = field(default_factory=list)
    """Per step, on the rank of the last stage: one per microbatch."""
    outputs: list[Any] = field(default_factory=list)
    gradients: list[list[float]] = field(default_factory=list)
    """Per training step: every gradient of this rank's stages, flattened."""
    reference: list[list[float]] = field(default_factory=list)
    """The same of the model without a pipeline, for the same parameters."""
    reference_losses: list[list[float]] = field(default_factory=list)
    actions: dict[str, int] = field(default_factory=dict)
    """How often each stage method ran."""
    in_flight: int = 0
    mixed_batches: int = 0
    """Batches with a send beside a receive."""


class Block(nn.Module):
    """One stage: takes and returns ``tensors`` tensors."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(tensors))

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Mix the inputs, so that every output depends on all of them."""
        total = torch.stack(inputs).sum(0)
        outputs = [
            torch.tanh(layer(x) + total / 3)
            for layer, x in zip(self.layers, inputs, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class SkipModel(nn.Module):
    """Three stages; the third takes a tensor from the first too."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.first, self.second, self.third = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send one output to the next stage and another one past it."""
        near, far = self.first(x, x / 2)
        pipe_split()
        near = self.second(near, near / 2)
        near = near[0] - near[1]
        pipe_split()
        return self.third(near, far)[0]


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error over all outputs."""
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([((o - target) ** 2).mean() for o in outputs]).sum()


def _blocks(num_stages: int, tensors: int) -> list[Block]:
    torch.manual_seed(7)
    return [Block(tensors).double() for _ in range(num_stages)]


def _batch(step: int, case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shape = (case.n * ROWS, WIDTH)
    make = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for _ in range(case.tensors + 1)
    ]
    return make[:-1], make[-1]


def _flat(blocks: list[Block]) -> list[float]:
    return [
        value
        for block in blocks
        for p in block.parameters()
        for value in (p.grad.flatten().tolist() if p.grad is not None else [])
    ]


def _update(blocks: list[Block]) -> None:
    """One step of gradient descent, so that the next step differs."""
    with torch.no_grad():
        for block in blocks:
            for p in block.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


def _stage_indices(case: Case, rank: int, world: int) -> list[int]:
    if case.placement == "v":
        return [rank, 2 * world - 1 - rank]
    return [rank + world * i for i in range(case.stages_per_rank)]


def _schedule_class(case: Case) -> type:
    if case.source == "torch":
        return getattr(torch_schedules, case.schedule)
    from pptrace import schedules

    if case.source == "installed":
        schedules.install()
        try:
            name = case.schedule.removeprefix("Schedule")
            return torch_schedules.get_schedule_class(name)
        finally:
            schedules.uninstall()
    return getattr(schedules, case.schedule)


class _Counter:
    """Counts what the stages of this rank do, and looks at each batch."""

    def __init__(self, stages: list[PipelineStage], outcome: Outcome) -> None:
        self._outcome = outcome
        self._counts: Counter[str] = Counter()
        self._flying = 0
        for stage in stages:
            for name in (
                "forward_one_chunk",
                "backward_one_chunk",
                "backward_weight_one_chunk",
            ):
                setattr(stage, name, self._wrap(stage, name, getattr(stage, name)))
        self._batch_p2p = torch_schedules._batch_p2p
        torch_schedules._batch_p2p = self._look

    def _wrap(self, stage: PipelineStage, name: str, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if name == "forward_one_chunk":
                self._flying += 1
            elif stage.has_backward:
                self._flying -= kwargs.get("full_backward", True)
            else:
                return result
            self._counts[name] += 1
            self._outcome.in_flight = max(self._outcome.in_flight, self._flying)
            return result

        return counted

    def _look(self, ops: Any, desc: str | None = None) -> Any:
        self._outcome.mixed_batches += len({op.op for op in ops}) > 1
        return self._batch_p2p(ops, desc=desc)

    def new_step(self) -> None:
        self._flying = 0

    def close(self) -> None:
        torch_schedules._batch_p2p = self._batch_p2p
        self._outcome.actions = dict(self._counts)


def _make_stages(case: Case, blocks: list[Block], group: Any) -> list[PipelineStage]:
    world = dist.get_world_size()
    if case.skip:
        return [_traced_stage(blocks, group)]
    extra: dict[str, Any] = {}
    if case.metadata == "static":
        example = tuple(
            torch.zeros(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
            for _ in range(case.tensors)
        )
        extra = {"input_args": example, "output_args": example}
    return [
        PipelineStage(
            blocks[i], i, len(blocks), torch.device("cpu"), group=group, **extra
        )
        for i in _stage_indices(case, dist.get_rank(), world)
    ]


def _traced_stage(blocks: list[Block], group: Any) -> Any:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, in tracing
    model = SkipModel(blocks)
    example = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    stage = pipeline(model, mb_args=(example,)).build_stage(
        dist.get_rank(), torch.device("cpu"), group
    )
    # Tracing copies the parameters: look at those of the stage.
    for name, block in (("first", 0), ("second", 1), ("third", 2)):
        if hasattr(stage.submod, name):
            blocks[block].layers = getattr(stage.submod, name).layers
    return stage


def _whole_model(case: Case, blocks: list[Block], value: Any) -> Any:
    if case.skip:
        near, far = blocks[0](value[0], value[0] / 2)
        near = blocks[1](near, near / 2)
        return blocks[2](near[0] - near[1], far)[0]
    for block in blocks:
        value = block(*(value if isinstance(value, tuple) else (value,)))
    return value


def _reference_step(
    case: Case, blocks: list[Block], step: int, *, train: bool
) -> list[float]:
    inputs, target = _batch(step, case)
    losses = []
    factor = case.n if case.scale_grads else 1
    for i in range(case.n):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        value = _whole_model(case, blocks, tuple(x[rows] for x in inputs))
        loss = loss_fn(value, target[rows])
        losses.append(loss.item())
        if train:
            (loss / factor).backward()
    return losses


def _flat_output(output: Any) -> Any:
    if output is None:
        return None
    tensors = output if isinstance(output, tuple) else (output,)
    return [value for t in tensors for value in t.flatten().tolist()]


def _steps(
    case: Case,
    schedule: Any,
    stages: list[PipelineStage],
    blocks: list[Block],
    copies: list[Block],
    outcome: Outcome,
    counter: _Counter,
) -> None:
    mine = [stage.stage_index for stage in stages]
    has_first, has_last = 0 in mine, len(blocks) - 1 in mine
    for step, what in enumerate(case.steps):
        counter.new_step()
        inputs, target = _batch(step, case)
        losses: list[torch.Tensor] = []
        kwargs: dict[str, Any] = {}
        if case.loss:
            kwargs = {"target": target, "losses": losses} if has_last else {}
            if case.metadata == "dynamic" and what == "t":
                kwargs["target"] = target
        if what == "f":
            kwargs["return_outputs"] = False
        run = schedule.step if what == "t" else schedule.eval
        if what == "t" and case.zero_grad:
            for block in (*blocks, *copies):
                block.zero_grad(set_to_none=True)
        output = run(*(inputs if has_first else ()), **kwargs)
        if has_last:
            outcome.losses.append([loss.item() for loss in losses])
        outcome.outputs.append(_flat_output(output))
        train = what == "t" and case.loss
        reference = _reference_step(case, copies, step, train=train)
        outcome.reference_losses.append(reference)
        outcome.gradients.append(_flat([blocks[i] for i in mine]))
        outcome.reference.append(_flat([copies[i] for i in mine]))
        if train and case.zero_grad:
            _update(blocks)
            _update(copies)


def _scaling(cls: type, case: Case) -> dict[str, bool]:
    """Torch 2.6 never scales, and has no such argument."""
    known = "scale_grads" in inspect.signature(cls).parameters
    return {"scale_grads": case.scale_grads} if known else {}


def run_case(case: Case) -> Outcome:
    """Run one case on this rank; every rank must call it with the same case."""
    group = dist.new_group(list(range(dist.get_world_size())))
    outcome = Outcome()
    num_stages = dist.get_world_size() * case.stages_per_rank
    width = 2 if case.skip else case.tensors
    blocks, copies = _blocks(num_stages, width), _blocks(num_stages, width)
    counter: _Counter | None = None
    try:
        stages = _make_stages(case, blocks, group)
        counter = _Counter(stages, outcome)
        cls = _schedule_class(case)
        single = issubclass(cls, torch_schedules.PipelineScheduleSingle)
        schedule = cls(
            stages[0] if single else stages,
            n_microbatches=case.n,
            loss_fn=loss_fn if case.loss else None,
            **_scaling(cls, case),
            **({"defer_pp_recv": True} if case.defer else {}),
        )
        _steps(case, schedule, stages, blocks, copies, outcome, counter)
    except (ValueError, RuntimeError, AssertionError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        if counter is not None:
            counter.close()
    dist.destroy_process_group(group)
    return outcome


def main() -> None:
    """Read the cases, run them in order, write what this rank saw after each."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    cases = [Case(**case) for case in json.loads(os.environ["SCHEDULE_CASES"])]
    if os.environ.get("SCHEDULE_EMULATE"):
        import pptrace

        pptrace.enable(
            emulate=os.environ["SCHEDULE_EMULATE"],
            rule=os.environ.get("SCHEDULE_RULE"),
            eager=bool(os.environ.get("SCHEDULE_EAGER")) or None,
            report=False,
        )
    dist.init_process_group("gloo")
    outcomes = []
    for case in cases:
        outcomes.append(asdict(run_case(case)))
        path = folder / f"rank{dist.get_rank()}.json"
        path.write_text(json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
