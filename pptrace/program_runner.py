"""One rank of a program as a real process: ``python -m pptrace.program_runner FILE``.

Started once per rank with torchrun's variables. It performs the program's instructions
through torch's public calls, on gloo under pptrace's emulation of NCCL, so the black
boxes are those that the hooks wrote. Nothing here knows how a verdict is made.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pptrace.dryrun import LONG_SLEEP_S
from pptrace.errors import InputError
from pptrace.plan import (
    Act,
    Action,
    Await,
    Batch,
    Caught,
    Collective,
    Die,
    Instruction,
    Leave,
    Op,
    Raise,
    Signal,
    Sleep,
    Spawn,
    Step,
    Wait,
)
from pptrace.programs import load
from pptrace.records import Direction, Pass
from pptrace.statements import WORLD, Program, ProgramError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["HostCounts", "check_eager", "main"]

_FOREVER = timedelta(days=7)


class HostCounts:
    """How many host threads of a rank live, and wait outside the process groups.

    A file of three numbers, so that whoever started the job can tell that nothing can
    move any more: the emulator does not know of threads that wait for a signal.
    """

    _FORMAT = struct.Struct("<3I")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._counts = [0, 0, 0]

    def add(self, place: int, change: int) -> None:
        """Change one number: 0 threads alive, 1 waiting for a signal, 2 asleep long."""
        with self._lock:
            self._counts[place] += change
            self._path.write_bytes(self._FORMAT.pack(*self._counts))

    @contextlib.contextmanager
    def inside(self, place: int) -> Iterator[None]:
        """Count this thread there for a while."""
        self.add(place, 1)
        try:
            yield
        finally:
            self.add(place, -1)

    @classmethod
    def read(cls, path: Path) -> tuple[int, int, int] | None:
        """The three numbers; None if there are none yet."""
        try:
            alive, waiting, asleep = cls._FORMAT.unpack(path.read_bytes())
        except (OSError, struct.error):
            return None
        return alive, waiting, asleep


def main(argv: list[str] | None = None) -> None:
    """Perform this rank's part of a program."""
    parser = argparse.ArgumentParser(prog="python -m pptrace.program_runner")
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("pptrace-out"))
    parser.add_argument("--counts", type=Path, help="folder for the hosts' counts")
    args = parser.parse_args(argv)
    program = load(args.file)
    is_eager = check_eager(program)

    import torch
    import torch.distributed as dist

    import pptrace

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    pptrace.enable(
        args.out,
        emulate="nccl",
        rule="split",
        eager=is_eager,
        host=program.host or "blocking",
    )
    dist.init_process_group("gloo", timeout=_FOREVER)
    folder = args.counts or pptrace.run_folder() or args.out
    counts = HostCounts(folder / f"rank{rank:05d}.hosts")
    performer = _Performer(program, rank, counts)
    performer.run()


def check_eager(program: Program) -> bool:
    """Whether the groups are set up at creation: emulation has one answer for all."""
    used = program.uses()
    eager = used & program.eager
    if eager and eager != used:
        raise InputError(
            program.name,
            f"{', '.join(sorted(eager))} eager and {', '.join(sorted(used - eager))} not",
            "run-program needs all groups that are used alike",
        )
    return bool(eager)


class _Performer:
    """Performs the instructions of one rank."""

    def __init__(self, program: Program, rank: int, counts: HostCounts) -> None:
        import torch.distributed as dist

        self._program = program
        self._rank = rank
        self._counts = counts
        self._threads: list[threading.Thread] = []
        self._groups: dict[str, Any] = {WORLD: None}
        self._stages: dict[int, Any] = {}
        self._told: dict[tuple[int, int, str], int] = {}
        self._lock = threading.Lock()
        for name, ranks in program.groups.items():
            self._groups[name] = dist.new_group(list(ranks), group_desc=name)

    def run(self) -> None:
        """The main thread, then all it started."""
        with self._counts.inside(0):
            _Thread(self).run(self._program.instructions(self._rank))
            for thread in self._threads:
                thread.join()

    def spawn(self, body: Callable[[], Iterable[Instruction]]) -> None:
        """Start another thread."""

        def run() -> None:
            try:
                _Thread(self).run(iter(body()))
            finally:
                self._counts.add(0, -1)

        self._counts.add(0, 1)
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    # what is posted

    def post(self, posted: Op | Batch | Collective) -> list[Any]:
        """Post; returns the works."""
        if isinstance(posted, Collective):
            return [self._collective(posted)]
        import torch.distributed as dist

        if isinstance(posted, Batch):
            return list(dist.batch_isend_irecv([self._p2p_op(op) for op in posted.ops]))
        if posted.edge.pass_ is not Pass.UNKNOWN:
            # As a pipeline's stage does it, so that the op carries its label.
            from torch.distributed.pipelining import schedules

            batch_p2p: Any = vars(schedules)["_batch_p2p"]
            return list(batch_p2p([self._p2p_op(posted)]))
        edge = posted.edge
        group = self._groups[edge.group.name]
        call = dist.isend if edge.direction is Direction.SEND else dist.irecv
        return [call(_tensor(posted), edge.peer, group=group)]

    def _p2p_op(self, op: Op) -> dist.P2POp:
        import torch.distributed as dist

        edge = op.edge
        call = dist.isend if edge.direction is Direction.SEND else dist.irecv
        made = dist.P2POp(
            call, _tensor(op), edge.peer, group=self._groups[edge.group.name]
        )
        label = (int(edge.pass_), edge.stage, op.microbatch, edge.index)
        vars(made)["_pptrace_label"] = label
        return made

    def _collective(self, what: Collective) -> Any:
        import torch
        import torch.distributed as dist

        group, size = self._groups[what.group.name], len(what.group.ranks)
        tensor = torch.ones(size)
        parts = list(torch.ones(size).chunk(size))
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: dist.all_gather(
                parts, torch.ones(1), group, async_op=True
            ),
            "all_reduce": lambda: dist.all_reduce(tensor, group=group, async_op=True),
            "all_to_all": lambda: dist.all_to_all_single(
                torch.ones(size), tensor, group=group, async_op=True
            ),
            "barrier": lambda: dist.barrier(group, async_op=True),
            "broadcast": lambda: dist.broadcast(
                tensor, what.group.ranks[0], group, async_op=True
            ),
            "reduce_scatter": lambda: dist.reduce_scatter(
                torch.ones(1), parts, group=group, async_op=True
            ),
        }
        return calls[what.name]()

    # signals

    def sleep(self, seconds: float) -> None:
        """Sleep; a long sleep is counted."""
        is_long = seconds >= LONG_SLEEP_S
        with self._counts.inside(2) if is_long else contextlib.nullcontext():
            time.sleep(seconds)

    def tell(self, rank: int, name: str) -> None:
        """Give a signal: a key of the job's store."""
        _store().set(self._key(self._rank, rank, name), b"1")

    def listen(self, rank: int, name: str) -> None:
        """Wait for a signal."""
        with self._counts.inside(1):
            _store().get(self._key(rank, self._rank, name))

    def _key(self, source: int, target: int, name: str) -> str:
        with self._lock:
            number = self._told.get((source, target, name), 0)
            self._told[source, target, name] = number + 1
        return f"pptrace/signal/{source}/{target}/{name}/{number}"

    # stages and steps

    def stage(self, index: int) -> Any:
        """The stage that performs actions of this number."""
        with self._lock:
            if index not in self._stages:
                group = self._groups[self._program.default_group(self._rank)]
                self._stages[index] = _make_stage(index, group)
            return self._stages[index]

    def step(self, instruction: Step, body: Callable[[], None]) -> None:
        """Run a body as a step of the rank's schedule."""
        run = self._program.schedules(self._rank)[instruction.schedule]
        stage = self.stage(run.stages[0])
        schedule = _schedule_class(run.name)(stage, max(1, run.n_microbatches), body)
        (schedule.eval if instruction.is_eval else schedule.step)()


class _Thread:
    """One host thread: the instructions, and the works it has not waited on."""

    def __init__(self, performer: _Performer) -> None:
        self._performer = performer
        self._works: dict[Op | Batch | Collective, list[Any]] = {}
        self._instructions: Generator[Instruction, None, None]
        self._error: Exception | None = None
        self._is_leaving = False

    def run(self, instructions: Iterator[Instruction]) -> None:
        """All of them; raises what the program does not catch."""
        self._instructions = instructions  # type: ignore[assignment]
        self._perform_all()

    def _perform_all(self) -> None:
        """Go on until the thread, or the block that this is called in, ends.

        An error is thrown into the instructions, where ``catch`` may catch it. If it
        ends a block, that says so, and the error is raised here, so that it leaves
        torch's own call too; out there the instructions know of it already.
        """
        instructions = self._instructions
        instruction = next(instructions, None)
        while instruction is not None:
            if isinstance(instruction, (Leave, Raise)):
                if not instruction.error:
                    return
                self._is_leaving = isinstance(instruction, Leave)
                raise self._error or _exception(instruction.error)
            try:
                self._perform(instruction)
            except Exception as error:  # noqa: BLE001 - the program may catch it
                self._error = error
                if self._is_leaving:
                    self._is_leaving = False
                    instruction = next(instructions, None)
                else:
                    instruction = instructions.throw(error)
            else:
                instruction = next(instructions, None)

    def _perform(self, instruction: Instruction) -> None:
        performer = self._performer
        if isinstance(instruction, (Op, Batch, Collective)):
            self._works[instruction] = performer.post(instruction)
        elif isinstance(instruction, Wait):
            for work in self._works.pop(instruction.on, ()):
                if work is not None:
                    work.wait()
        elif isinstance(instruction, Action):
            performer.stage(instruction.stage).act(instruction, _nothing)
        elif isinstance(instruction, Act):
            action = instruction.action
            performer.stage(action.stage).act(action, self._perform_all)
        elif isinstance(instruction, Step):
            performer.step(instruction, self._perform_all)
        elif isinstance(instruction, Caught):
            self._error = None
        else:
            self._outside(instruction)

    def _outside(self, instruction: Instruction) -> None:
        """What has to do with the host alone."""
        performer = self._performer
        if isinstance(instruction, Signal):
            performer.tell(instruction.rank, instruction.name)
        elif isinstance(instruction, Await):
            performer.listen(instruction.rank, instruction.name)
        elif isinstance(instruction, Spawn):
            performer.spawn(instruction.body)
        elif isinstance(instruction, Die):
            os.kill(os.getpid(), signal.SIGKILL)
        elif isinstance(instruction, Sleep):
            performer.sleep(instruction.seconds)


def _nothing() -> None:
    """The body of an action that has none."""


def _exception(text: str) -> Exception:
    """``TYPE: message`` as an exception of that type, if there is one."""
    import torch

    name, _, message = text.partition(": ")
    known = getattr(builtins, name, None) or getattr(torch, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        return known(message)
    made: Exception = type(name, (ProgramError,), {})(message)
    return made


def _tensor(op: Op) -> torch.Tensor:
    import torch

    signature = op.edge.signature
    return torch.empty_strided(
        signature.shape, signature.strides, dtype=getattr(torch, signature.dtype)
    )


def _store() -> Any:
    """A connection of its own: one that waits serves nobody else."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, timeout=_FOREVER
    )


# -- pipelines -----------------------------------------------------------------------


def _make_stage(index: int, group: Any) -> Any:
    """A stage whose actions do what they are told."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage

    class Body(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            stage.body()
            return torch.zeros(1)

    class Stage(PipelineStage):
        """Torch's own stage, from its chunk methods down to the user's code."""

        body: Callable[[], None]

        def act(self, action: Action, body: Callable[[], None]) -> None:
            microbatch = action.microbatch or 0
            self.body = body
            self.has_backward = True
            self.chunks = microbatch + 1
            self.args_recv_info[microbatch] = ()
            self.grad_recv_info[microbatch] = ()
            if action.kind == "F":
                self.forward_one_chunk(microbatch, ())
            elif action.kind == "W":
                self.backward_state[microbatch] = ((), None, (), ())
                self.dw_runner[microbatch] = _nothing
                self.backward_weight_one_chunk(microbatch)
            else:
                self.fwd_cache[microbatch] = ((), [])
                is_full = action.kind == "B"
                self.backward_one_chunk(microbatch, full_backward=is_full)

        def backward_maybe_with_nosync(self, *_: Any, **__: Any) -> Any:
            self.body()
            return (), None

    num_stages = max(index + 1, dist.get_world_size(group))
    device = torch.device("cpu")
    stage = Stage(Body(), index, num_stages, device, group=group)
    meta = getattr(stage, "_stage_meta", None)  # 2.12: backward asks for it
    if meta is not None:
        meta.inputs = ()
    return stage


@functools.cache
def _schedule_class(name: str) -> Any:
    """A schedule of this name whose step runs a body."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    class Schedule(PipelineScheduleSingle):
        def __init__(self, stage: Any, n: int, body: Callable[[], None]) -> None:
            super().__init__(stage, n, loss_fn=lambda *_: None)
            self._body = body

        def _step_microbatches(self, *_: Any, **__: Any) -> None:
            self._body()

        def _merge_outputs(self, _: Any) -> None:
            pass

    Schedule.__name__ = Schedule.__qualname__ = name
    return Schedule


if __name__ == "__main__":
    main()
