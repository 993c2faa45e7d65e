"""What this process records: torch's objects turned into slots of its black box.

One `Recorder` per process. Its methods are called by the hooks on the hot path; what
they need (group tables, channels, payload signatures) is looked up once and kept.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import traceback
import weakref
from collections import deque
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from pptrace import blackbox
from pptrace.blackbox import BlackBox
from pptrace.hooks import torch_compat
from pptrace.records import (
    Flag,
    Group,
    Kind,
    Pass,
    Status,
    Transport,
)

__all__ = ["Batch", "Context", "GroupState", "Recorder", "Tracked"]

_now = time.monotonic_ns
_MAX_PENDING = 4096


class _Channel:
    """This rank's side of one channel."""

    __slots__ = ("index", "next_k")

    def __init__(self, index: int) -> None:
        self.index = index
        self.next_k = itertools.count().__next__


class GroupState:
    """A process group with what the hot path needs of it at hand."""

    __slots__ = ("channels", "next_collective", "ref", "value")

    def __init__(self, pg: Any, value: Group) -> None:
        self.ref = weakref.ref(pg)
        self.value = value
        self.channels: dict[tuple[int, int, int, int], _Channel] = {}
        self.next_collective = itertools.count().__next__


class Batch:
    """The ops of one call that issues several, while it is open."""

    __slots__ = ("coalesced", "desc", "emulated", "number", "ops", "position", "seqs")

    def __init__(self, number: int, ops: list[Any], desc: int) -> None:
        self.number = number
        self.ops = ops
        self.desc = desc
        self.position = 0
        self.coalesced = False
        self.seqs: list[tuple[int, int, int]] = []  # (record, channel, k)
        self.emulated: list[tuple[GroupState, Any]] = []


class Context(threading.local):
    """What this thread is in the middle of."""

    step = 0
    pass_ = int(Pass.UNKNOWN)
    stage = -1
    microbatch = -1
    batch: Batch | None = None
    thread = 0


class Tracked:
    """A work that was handed out, and the records it stands for."""

    __slots__ = ("probe", "ref", "seqs")

    def __init__(
        self, work: Any, seqs: list[tuple[int, int, int]], forget: Any
    ) -> None:
        self.ref = weakref.ref(work, forget)
        self.seqs = seqs
        self.probe: Any = None
        """Answers ``is_completed()`` once the caller may have dropped the work."""


class Recorder:
    """Writes the black box of this rank; everything the hooks call is here.

    ``emulator`` is set while ``emulate="nccl"`` is on.
    """

    def __init__(self, box: BlackBox, *, eager: bool | None, rule: str | None) -> None:
        self.box = box
        self.eager = eager
        self.rule = rule
        self.emulator: Any = None
        self.context = Context()
        self.last_action: tuple[int, int, int, int] = (0, 0, -1, -1)
        self.steps = 0
        self.open_steps = 0
        self.step_ns: list[int] = []
        self.exceptions = 0
        self._groups: dict[int, GroupState] = {}
        self._group_names: dict[tuple[str, tuple[int, ...]], int] = {}
        self._next_group = itertools.count(1).__next__
        self._signatures: dict[Any, tuple[int, int, int, int]] = {}
        self._threads = itertools.count(1).__next__
        self.works: dict[int, Tracked] = {}
        self.pending: deque[Tracked] = deque(maxlen=_MAX_PENDING)

    # -- tables --------------------------------------------------------------------

    def group_state(self, pg: Any) -> GroupState:
        """The state of a process group, made at its first use."""
        state = self._groups.get(id(pg))
        if state is not None and state.ref() is pg:
            return state
        return self._add_group(pg)

    def _add_group(self, pg: Any) -> GroupState:
        ranks = tuple(c10d.get_process_group_ranks(pg))
        name = str(pg.group_name)
        # A group made anew under an old name is another group with other counts.
        again = self._group_names.get((name, ranks), 0)
        self._group_names[(name, ranks)] = again + 1
        value = Group(
            index=self._next_group(),
            name=f"{name}#{again + 1}" if again else name,
            desc=str(getattr(pg, "group_desc", "")),
            ranks=ranks,
            backend="nccl" if self.emulator else torch_compat.backend_name(pg),
            eager=torch_compat.is_eager(pg) if self.eager is None else self.eager,
        )
        self.box.group(value)
        state = self._groups[id(pg)] = GroupState(pg, value)
        return state

    def _channel(
        self,
        state: GroupState,
        transport: int,
        direction: int,
        group_peer: int,
        tag: int,
    ) -> _Channel:
        key_tag = tag if state.value.backend == "gloo" else 0
        key = (transport, direction, group_peer, key_tag)
        channel = state.channels.get(key)
        if channel is None:
            index = self.box.channel(
                state.value.index,
                transport,
                direction,
                key_tag,
                self._global_peer(state, group_peer),
                group_peer,
            )
            if index < 0:
                self.box.set_incomplete("more channels than the table holds")
            channel = state.channels[key] = _Channel(index)
        return channel

    @staticmethod
    def _global_peer(state: GroupState, group_peer: int) -> int:
        ranks = state.value.ranks
        return ranks[group_peer] if 0 <= group_peer < len(ranks) else -1

    def _payload(self, tensor: torch.Tensor) -> tuple[int, int, int, int]:
        """(signature id, numel, bytes, flags) of a tensor."""
        key = (tensor.shape, tensor.dtype, tensor.stride())
        known = self._signatures.get(key)
        if known is None:
            numel = tensor.numel()
            known = (
                self.box.signature(
                    tuple(tensor.shape),
                    torch_compat.dtype_name(tensor.dtype),
                    tuple(tensor.stride()),
                ),
                numel,
                numel * tensor.element_size(),
                int(Flag.CONTIGUOUS) if tensor.is_contiguous() else 0,
            )
            if len(self._signatures) < 4096:
                self._signatures[key] = known
        return known

    def thread(self) -> int:
        """A small number for the current thread; 1 is the first one seen."""
        if not self.context.thread:
            self.context.thread = self._threads()
        return self.context.thread

    # -- ops -----------------------------------------------------------------------

    def transport_of(self, state: GroupState, *, coalesced: bool) -> int:
        """The communicator an op of this group rides (semantics: what can match)."""
        if coalesced or state.value.eager or state.value.backend == "gloo":
            return int(Transport.GROUP)
        return int(Transport.PAIR)

    def post(
        self,
        state: GroupState,
        direction: int,
        tensor: torch.Tensor,
        group_peer: int,
        tag: int,
    ) -> tuple[int, int, int, int]:
        """Record an op before its call.

        Returns (record, channel index, k, global peer).
        """
        context = self.context
        batch = context.batch
        flags = 0
        number = position = size = desc = index = 0
        pass_, stage, microbatch = context.pass_, context.stage, context.microbatch
        if batch is not None:
            number, position, size, desc = (
                batch.number,
                batch.position,
                len(batch.ops) or 1,
                batch.desc,
            )
            if batch.coalesced:
                flags = int(Flag.COALESCED)
            if position < len(batch.ops):
                label = getattr(batch.ops[position], "_pptrace_label", None)
                if label is not None:
                    pass_, stage, microbatch, index = label
            batch.position = position + 1
        transport = self.transport_of(state, coalesced=bool(flags))
        channel = self._channel(state, transport, direction, group_peer, tag)
        peer = self._global_peer(state, group_peer)
        if group_peer < 0:
            flags |= int(Flag.ANY_SOURCE)
            self.box.set_incomplete(
                "it receives from any rank: which op such a receive took is not known"
            )
        signature, numel, nbytes, contiguous = self._payload(tensor)
        k = channel.next_k()
        seq = self.box.record(
            _now(),
            1,
            flags | contiguous,
            direction,
            transport,
            pass_,
            min(index, 255),
            state.value.index,
            peer,
            group_peer,
            number,
            min(position, 65535),
            min(size, 65535),
            k,
            tag if -(1 << 31) <= tag < 1 << 31 else -1,
            context.step,
            stage,
            self.thread(),
            microbatch,
            signature,
            numel,
            nbytes,
            desc,
            max(channel.index, 0),
        )
        if channel.index >= 0:
            self.box.set_posted(channel.index, k + 1)
        return seq, channel.index, k, peer

    def returned(self, seq: int) -> None:
        """The call that issued record ``seq`` gave control back."""
        self.box.set_time(seq, blackbox.RETURNED, _now())

    def done(self, seq: int) -> None:
        """Record ``seq`` ended within its call."""
        self.box.set_time(seq, blackbox.DONE, _now())

    def failed(self, seq: int) -> None:
        """The call, wait or action of record ``seq`` ended in an exception."""
        self.box.set_flag(seq, int(Flag.FAILED))

    # -- works ---------------------------------------------------------------------

    def track(self, work: Any, seqs: list[tuple[int, int, int]]) -> None:
        """Follow a work from now on, without keeping it alive."""
        if work is None:
            return
        key = id(work)

        def forget(_: Any) -> None:
            tracked = self.works.pop(key, None)
            if tracked is not None:
                for seq, _, _ in tracked.seqs:
                    self.box.set_flag(seq, int(Flag.DROPPED))

        known = self.works.get(key)
        if known is not None and known.ref() is work:
            known.seqs = known.seqs + seqs
        else:
            self.works[key] = Tracked(work, seqs, forget)

    def wait_begins(self, work: Any) -> Tracked | None:
        """Called before ``work.wait``; None if the work is not one of ours."""
        tracked = self.works.get(id(work))
        if tracked is None or tracked.ref() is not work:
            return None
        now = _now()
        for seq, _, _ in tracked.seqs:
            self.box.set_time(seq, blackbox.WAIT, now)
        return tracked

    def wait_ended(self, work: Any, tracked: Tracked, failed: bool) -> None:
        """Called after ``work.wait`` returned or raised.

        Where wait returns before the op is complete (CUDA), something that can be asked
        for completion is kept, in a bounded set: callers drop works right after waiting.
        """
        now = _now()
        for seq, _, _ in tracked.seqs:
            self.box.set_time(seq, blackbox.WAITED, now)
            if failed:
                self.failed(seq)
        self.works.pop(id(work), None)
        if failed:
            return
        if work.is_completed():
            self.complete(tracked)
        else:
            tracked.probe = torch_compat.completion_probe(work)
            self.pending.append(tracked)

    def complete(self, tracked: Tracked) -> None:
        """The ops of a work were seen complete."""
        now = _now()
        for seq, channel, k in tracked.seqs:
            self.box.set_time(seq, blackbox.DONE, now)
            if channel >= 0:
                self.box.set_done(channel, k + 1)

    def poll_works(self) -> None:
        """Look for completions nobody waits for; called by the monitor thread."""
        for _ in range(len(self.pending)):
            tracked = self.pending.popleft()
            if _is_completed(tracked.probe):
                tracked.probe = None
                self.complete(tracked)
            else:
                self.pending.append(tracked)
        for key, tracked in list(self.works.items()):
            work = tracked.ref()
            if work is not None and _is_completed(work):
                self.works.pop(key, None)
                self.complete(tracked)

    # -- steps, actions, exceptions --------------------------------------------------

    def begin_step(
        self, *, n_microbatches: int, stage: int, schedule: int, is_eval: bool
    ) -> int:
        """A schedule's step (or eval) begins on this rank.

        ``schedule`` is what `BlackBox.schedule` returned for it.
        """
        self.steps += 1
        self.open_steps += 1
        self.context.step = self.steps
        if self.open_steps == 1:
            self.box.set_status(Status.RUNNING)
        return self.box.record(
            _now(),
            int(Kind.STEP),
            flags=int(Flag.EVAL) if is_eval else 0,
            step=self.steps,
            stage=stage,
            thread=self.thread(),
            microbatch=n_microbatches,
            text=schedule,
        )

    def end_step(self, seq: int, began_ns: int, error: BaseException | None) -> None:
        """The step ended, normally or by an exception."""
        self.open_steps -= 1
        if error is not None:
            self.failed(seq)
            self.exception(error)
            self.exceptions += 1
            self.box.set_status(Status.RAISED)
        else:
            self.step_ns.append(_now() - began_ns)
            del self.step_ns[:-32]
        self.box.set_time(seq, blackbox.DONE, _now())

    def begin_action(self, pass_: int, stage: int, microbatch: int) -> int:
        """A compute action begins."""
        context = self.context
        context.pass_, context.stage, context.microbatch = pass_, stage, microbatch
        self.last_action = (context.step, pass_, stage, microbatch)
        return self.box.record(
            _now(),
            int(Kind.ACTION),
            pass_=pass_,
            step=context.step,
            stage=stage,
            thread=self.thread(),
            microbatch=microbatch,
        )

    def end_action(self, seq: int, error: BaseException | None) -> None:
        """The compute action ended."""
        if error is not None:
            self.failed(seq)
            self.exception(error)
        context = self.context
        context.pass_, context.stage, context.microbatch = 0, -1, -1
        self.box.set_time(seq, blackbox.DONE, _now())

    def exception(self, error: BaseException) -> None:
        """Record an exception once, where it was first seen."""
        if getattr(error, "_pptrace_seen", False):
            return
        with contextlib.suppress(Exception):
            error._pptrace_seen = True  # type: ignore[attr-defined]
        context = self.context
        self.box.record(
            _now(),
            int(Kind.EXCEPTION),
            pass_=context.pass_,
            step=context.step,
            stage=context.stage,
            thread=self.thread(),
            microbatch=context.microbatch,
            text=self.box.text(_describe(error)),
        )

    def note(self, message: str) -> None:
        """Record something pptrace has to say about itself."""
        self.box.record(_now(), int(Kind.NOTE), text=self.box.text(message))

    # -- collectives -----------------------------------------------------------------

    def collective(self, state: GroupState, name: str, numel: int, nbytes: int) -> int:
        """Record a collective before its call; returns the record."""
        context = self.context
        return self.box.record(
            _now(),
            int(Kind.COLLECTIVE),
            group=state.value.index,
            pass_=context.pass_,
            k=state.next_collective(),
            step=context.step,
            stage=context.stage,
            thread=self.thread(),
            microbatch=context.microbatch,
            numel=numel,
            nbytes=nbytes,
            text=self.box.text(name),
        )

    # -- monitor ---------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Publish what the rank is doing now in the header page."""
        step, pass_, stage, microbatch = self.last_action
        if self.emulator is not None:
            state = self.emulator.state()
            self.box.set_emulation(state.hosts_blocked, state.sent, state.received)
        self.box.heartbeat(step, pass_, stage, microbatch, int(self.open_steps > 0))

    def close(self, status: Status) -> None:
        """Say how it ended; the file stays.

        An exception that left a step stays the last word if no step came after it: an
        interpreter may end orderly after it, by ``sys.exit`` say.
        """
        self.heartbeat()
        if status is not Status.EXITED or self.box.status is not Status.RAISED:
            self.box.set_status(status)


def _is_completed(probe: Any) -> bool:
    try:
        return bool(probe.is_completed())
    except Exception:  # noqa: BLE001 - the work itself failed: never complete
        return False


def _describe(error: BaseException) -> str:
    """Type and message of the root cause first, then the whole traceback."""
    root = error
    seen = {id(root)}
    while (cause := root.__cause__ or root.__context__) and id(cause) not in seen:
        root = cause
        seen.add(id(root))
    head = f"{type(root).__name__}: {root}".strip()
    trace = "".join(traceback.format_exception(error))
    return f"{head[:2000]}\n{trace[-12000:]}"


def describe_environment(settings: Any, rule: str) -> dict[str, Any]:
    """Facts about the process for the report: versions and relevant variables."""
    prefixes = ("TORCH_", "NCCL_", "PPTRACE", "MASTER_", "SLURM_JOB_ID", "TORCHELASTIC")
    return {
        "torch": torch.__version__,
        "rule": rule,
        "emulate": settings.emulate or "",
        "hang_after": settings.hang_after,
        "variables": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)
        },
    }
