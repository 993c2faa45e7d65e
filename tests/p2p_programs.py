"""Small P2P programs for tests: a one-line notation, and two schedules as programs.

The notation, one string per rank, words in order of the program:

``S1`` ``R0``     a single isend to rank 1, irecv from rank 0
``{S1,R1}``       a coalesced batch
``S1x12``         an op of 12 bytes (default 4)
``barrier``       a collective of that name
``S1~``           any of these, not waited on until ``W``, which waits on all such
``F0`` ``B0``     compute
``!1`` ``?0``     signal rank 1, wait for a signal from rank 0
``@dp:barrier``   any of these on the group ``dp`` in place of the first group
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping

from pptrace.records import Direction, Group, Transport
from pptrace.semantics import (
    Communicator,
    Kernel,
    KernelOp,
    Rule,
    transport_of,
)
from pptrace.simulation import Await, Compute, Post, Signal, Step, Wait

__all__ = ["gpipe", "group_of", "one_f_one_b", "parse", "programs", "start_up"]

_OP = re.compile(r"([SR])(\d+)(?:x(\d+))?")

Kernels = Generator[Step, None, list[Kernel]]


def group_of(
    *ranks: int, name: str = "pp", eager: bool = False, index: int = 1
) -> Group:
    """A process group of these global ranks."""
    return Group(index, name, name, ranks, "nccl", eager)


def programs(
    texts: Mapping[int, str], *groups: Group, eager: bool = False
) -> dict[int, list[Step]]:
    """Programs of all ranks; the first group is all of them if none is given."""
    chosen = groups or (group_of(*texts, eager=eager),)
    return {rank: parse(rank, text, *chosen) for rank, text in texts.items()}


def parse(rank: int, text: str, *groups: Group) -> list[Step]:
    """The steps of one rank."""
    steps: list[Step] = []
    open_kernels: list[Kernel] = []
    by_name = {group.name: group for group in groups}
    for word in text.split():
        group = groups[0]
        if word.startswith("@"):
            name, _, word = word[1:].partition(":")  # noqa: PLW2901
            group = by_name[name]
        body = word.rstrip("~")
        if word == "W":
            steps += [Wait(kernel) for kernel in open_kernels]
            open_kernels = []
        elif word[0] in "FB":
            steps.append(Compute(word))
        elif word[0] == "!":
            steps.append(Signal(int(word[1:])))
        elif word[0] == "?":
            steps.append(Await(int(word[1:])))
        else:
            kernel = _kernel(rank, body, group)
            steps.append(Post(kernel))
            if word == body:
                steps.append(Wait(kernel))
            else:
                open_kernels.append(kernel)
    return steps


def _kernel(rank: int, body: str, group: Group) -> Kernel:
    if body.startswith("{"):
        ops = tuple(_op(part) for part in body[1:-1].split(","))
        return _posted(rank, group, ops, coalesced=True)
    if _OP.fullmatch(body):
        return _posted(rank, group, (_op(body),), coalesced=False)
    return Kernel(Communicator.of(group, Transport.GROUP), collective=body)


def _op(text: str) -> KernelOp:
    match = _OP.fullmatch(text)
    assert match, text
    letter, peer, size = match.groups()
    direction = Direction.SEND if letter == "S" else Direction.RECV
    return KernelOp(direction, int(peer), int(size or 4))


def _posted(
    rank: int, group: Group, ops: tuple[KernelOp, ...], *, coalesced: bool
) -> Kernel:
    transport = transport_of(coalesced=coalesced, eager=group.eager)
    communicator = Communicator.of(group, transport, rank, ops[0].peer)
    return Kernel(communicator, ops, coalesced)


class _Stage:
    """One rank of a pipeline with one stage per rank, as the schedules see it."""

    def __init__(self, group: Group, rank: int, rule: Rule) -> None:
        self.group = group
        self.rank = rank
        self.rule = rule
        self.is_first = rank == 0
        self.is_last = rank == len(group.ranks) - 1
        self._pair = {
            peer: Communicator.of(
                group, transport_of(coalesced=False, eager=group.eager), rank, peer
            )
            for peer in (rank - 1, rank + 1)
        }
        self._group = Communicator.of(group, Transport.GROUP)

    def op(self, direction: Direction, peer: int, label: str) -> list[KernelOp]:
        if peer not in self.group.ranks:
            return []
        return [KernelOp(direction, peer, 4, label)]

    def f_recv(self, i: int) -> list[KernelOp]:
        return self.op(Direction.RECV, self.rank - 1, f"F{i}")

    def f_send(self, i: int) -> list[KernelOp]:
        return self.op(Direction.SEND, self.rank + 1, f"F{i}")

    def b_recv(self, i: int) -> list[KernelOp]:
        return self.op(Direction.RECV, self.rank + 1, f"B{i}")

    def b_send(self, i: int) -> list[KernelOp]:
        return self.op(Direction.SEND, self.rank - 1, f"B{i}")

    def post(self, ops: list[KernelOp], *, batched: bool = True) -> Kernels:
        """Issue ops as ``_batch_p2p`` does, or singly."""
        directions = [op.direction for op in ops]
        if ops and batched and self.rule.coalesces(directions):
            kernels = [Kernel(self._group, tuple(ops), coalesced=True)]
        else:
            kernels = [Kernel(self._pair[op.peer], (op,)) for op in ops]
        for kernel in kernels:
            yield Post(kernel)
        return kernels

    def run(self, ops: list[KernelOp], *, batched: bool = True) -> Iterator[Step]:
        """Issue ops and wait on them."""
        yield from wait((yield from self.post(ops, batched=batched)))


def wait(kernels: Iterable[Kernel]) -> Iterator[Step]:
    """Wait on each."""
    for kernel in kernels:
        yield Wait(kernel)


def start_up(group: Group, rank: int, *, dynamic: bool) -> Iterator[Step]:
    """Torch 2.13 before the first microbatch: votes, and metadata if ``dynamic``.

    Votes are single ops, metadata go in batches of one, both up and down the pipeline.
    """
    stage = _Stage(group, rank, Rule.COALESCED)
    for batched in (False, True) if dynamic else (False,):
        yield from stage.run(stage.f_recv(0), batched=batched)
        yield from stage.run(stage.f_send(0), batched=batched)
        yield from stage.run(stage.b_recv(0), batched=batched)
        yield from stage.run(stage.b_send(0), batched=batched)


def one_f_one_b(group: Group, rank: int, n: int, rule: Rule) -> Iterator[Step]:
    """Torch's 1F1B with ``n`` microbatches, guard taken away."""
    stage = _Stage(group, rank, rule)
    warm_up = min(n, len(group.ranks) - rank)
    forwards = backwards = 0
    sent: list[Kernel] = []
    held: list[KernelOp] = []
    while forwards < warm_up:
        yield from stage.run(stage.f_recv(forwards))
        yield Compute(f"F{forwards}")
        yield from wait(sent)
        held = stage.f_send(forwards)
        forwards += 1
        if forwards < warm_up:
            sent = yield from stage.post(held)
    while True:
        yield from stage.run(held + stage.b_recv(backwards))
        yield Compute(f"B{backwards}")
        held = stage.b_send(backwards)
        backwards += 1
        if forwards == n:
            break
        yield from stage.run(held + stage.f_recv(forwards))
        yield Compute(f"F{forwards}")
        held = stage.f_send(forwards)
        forwards += 1
    sent = yield from stage.post(held)
    while backwards < n:
        yield from stage.run(stage.b_recv(backwards))
        yield Compute(f"B{backwards}")
        yield from wait(sent)
        sent = yield from stage.post(stage.b_send(backwards))
        backwards += 1
    yield from wait(sent)


def gpipe(group: Group, rank: int, n: int, rule: Rule) -> Iterator[Step]:
    """Torch's GPipe with ``n`` microbatches."""
    stage = _Stage(group, rank, rule)
    sent: list[Kernel] = []
    for i in range(n):
        yield from stage.run(stage.f_recv(i))
        yield Compute(f"F{i}")
        sent += yield from stage.post(stage.f_send(i))
    yield from wait(sent)
    sent = []
    for i in range(n):
        yield from stage.run(stage.b_recv(i))
        yield Compute(f"B{i}")
        sent += yield from stage.post(stage.b_send(i))
    yield from wait(sent)
