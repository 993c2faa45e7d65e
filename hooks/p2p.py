"""Hooks on raw P2P of any group: single ops, batches, and waits on their works.

They sit on the methods of ``ProcessGroup`` that ``isend``, ``irecv``, ``send``,
``recv``, the object variants and ``batch_isend_irecv`` all end in, not on those
functions: ``_batch_p2p`` chooses the transport by the identity of ``dist.isend``, so a
wrapper in its place would change which communicator an op rides. For the same reason
works are not wrapped; ``Work.wait`` is hooked on the class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pptrace.hooks.patching import PatchList
from pptrace.hooks.recorder import Batch
from pptrace.hooks.state import Active, active, fail_open, guarded
from pptrace.records import Direction, Pass

__all__ = ["follow", "install", "open_batch", "run_batch"]

_SEND, _RECV = int(Direction.SEND), int(Direction.RECV)


def install(patches: PatchList) -> None:
    """Install the P2P hooks."""
    group = dist.ProcessGroup
    patches.replace(group, "send", functools.partial(_issue, direction=_SEND))
    patches.replace(group, "recv", functools.partial(_issue, direction=_RECV))
    patches.replace(group, "recv_anysource", _recv_anysource)
    patches.replace(group, "_start_coalescing", _start_coalescing)
    patches.replace(group, "_end_coalescing", _end_coalescing)
    patches.replace_function(c10d, "batch_isend_irecv", _batch_isend_irecv)
    patches.replace(dist.Work, "wait", _wait)


def _issue(original: Callable[..., Any], *, direction: int) -> Callable[..., Any]:
    # The binding's own names, for those who pass them by keyword.
    names = ("tensors", "dstRank" if direction == _SEND else "srcRank", "tag")

    @functools.wraps(original)
    def issue(*args: Any, **kwargs: Any) -> Any:
        on = active("p2p")
        if on is None:
            return original(*args, **kwargs)
        call = functools.partial(original, *args, **kwargs)
        given = dict(zip(("self", *names), args, strict=False)) | kwargs
        try:
            pg, tensor = given["self"], given["tensors"][0]
            peer, tag = int(given[names[1]]), int(given.get("tag", 0))
        except Exception:  # noqa: BLE001 - not a call torch accepts: let it say so
            return call()
        return _recorded(on, call, pg, direction, tensor, peer, tag)

    return issue


def _recv_anysource(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def recv_anysource(*args: Any, **kwargs: Any) -> Any:
        on = active("p2p")
        if on is None:
            return original(*args, **kwargs)
        call = functools.partial(original, *args, **kwargs)
        given = dict(zip(("self", "tensors", "tag"), args, strict=False)) | kwargs
        try:
            pg, tensor, tag = given["self"], given["tensors"][0], given.get("tag", 0)
        except Exception:  # noqa: BLE001 - not a call torch accepts: let it say so
            return call()
        return _recorded(on, call, pg, _RECV, tensor, -1, int(tag))

    return recv_anysource


def _recorded(
    on: Active,
    call: Callable[[], Any],
    pg: Any,
    direction: int,
    tensor: Any,
    peer: int,
    tag: int,
) -> Any:
    """Record an op, issue it (or have it emulated), follow its work."""
    recorder = on.recorder
    try:
        state = recorder.group_state(pg)
        entry = recorder.post(state, direction, tensor, peer, tag)
    except Exception as error:  # noqa: BLE001
        fail_open(on, "p2p", error)
        return call()
    seq = entry[0]
    batch = recorder.context.batch
    try:
        if on.emulator is not None and peer >= 0:
            op = on.emulator.op(direction, tensor, entry[3], entry[2])
            if batch is not None and batch.coalesced:
                batch.emulated.append((state, op))
                batch.seqs.append(entry[:3])
                return None
            transport = recorder.transport_of(state, coalesced=False)
            work = on.emulator.post(state.value, transport, [op], coalesced=False)[0]
        else:
            work = call()
    except BaseException:
        guarded(on, "p2p", recorder.failed, seq)
        raise
    if batch is not None and batch.coalesced and work is None:
        batch.seqs.append(entry[:3])  # the whole batch gets one work, at its end
        return work
    guarded(on, "p2p", recorder.returned, seq)
    follow(on, work, [entry[:3]])
    return work


# -- batches -----------------------------------------------------------------------


def open_batch(on: Active, ops: list[Any], desc: str | None) -> Batch:
    """Start a batch on this thread; the ops issued until it ends belong to it."""
    box = on.recorder.box
    return Batch(box.next_batch(), ops, box.text(desc) if desc else 0)


def run_batch(on: Active, batch: Batch, call: Callable[[], Any]) -> Any:
    """Run ``call`` with ``batch`` open on this thread.

    A coalesced batch under emulation is posted here, as one call, and its one work
    takes the place of what ``call`` returned.
    """
    context = on.recorder.context
    outer, context.batch = context.batch, batch
    try:
        result = call()
        # ``batch_isend_irecv`` inside ``_batch_p2p`` shares the batch: whichever of
        # the two ends first has posted it, and leaves nothing for the other.
        if batch.emulated:
            result = _post_emulated(on, batch)
            batch.emulated, batch.seqs = [], []
        elif batch.seqs:
            _returned(on, batch, result)
            batch.seqs = []
    except BaseException:
        for seq, _, _ in batch.seqs:
            guarded(on, "p2p", on.recorder.failed, seq)
        raise
    finally:
        context.batch = outer
    return result


def _post_emulated(on: Active, batch: Batch) -> list[Any]:
    """Post what a coalesced batch collected; one call per group, as NCCL would."""
    works: list[Any] = []
    recorder = on.recorder
    for group_state in dict.fromkeys(state for state, _ in batch.emulated):
        picked = [
            (op, entry)
            for (state, op), entry in zip(batch.emulated, batch.seqs, strict=True)
            if state is group_state
        ]
        transport = recorder.transport_of(group_state, coalesced=True)
        posted = on.emulator.post(
            group_state.value, transport, [op for op, _ in picked], coalesced=True
        )
        entries = [entry for _, entry in picked]
        for entry in entries:
            guarded(on, "p2p", recorder.returned, entry[0])
        follow(on, posted[0], entries)
        works.extend(posted)
    return works


def _returned(on: Active, batch: Batch, result: Any) -> None:
    works = result if isinstance(result, list) else [result]
    for entry in batch.seqs:
        guarded(on, "p2p", on.recorder.returned, entry[0])
    for work in works:
        if isinstance(work, dist.Work):
            follow(on, work, batch.seqs)


def _batch_isend_irecv(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        on = active("p2p")
        if on is None:
            return original(p2p_op_list)
        try:
            batch = on.recorder.context.batch
            if batch is None or len(batch.ops) != len(p2p_op_list):
                batch = open_batch(on, list(p2p_op_list), None)
            elif batch.coalesced:  # the caller has already opened and will post it
                return original(p2p_op_list)
            if on.emulator is not None:
                batch.coalesced = not _is_old_object_list(on, p2p_op_list)
            else:
                batch.coalesced = _coalesces(p2p_op_list)
        except Exception as error:  # noqa: BLE001
            fail_open(on, "batch_isend_irecv", error)
            return original(p2p_op_list)
        return run_batch(on, batch, lambda: original(p2p_op_list))

    return batch_isend_irecv


def _is_old_object_list(on: Active, ops: Any) -> bool:
    """Shapes sent at start-up, which torch sent unbatched while it had that rule.

    Torch up to 2.8, whose rule ``coalesced`` is, used plain ``send_object_list``; later
    it batches each tensor of it alone, which would set up the group's communicator.
    """
    return (
        on.recorder.rule == "coalesced"
        and on.recorder.context.pass_ == int(Pass.META)
        and len(ops) == 1
    )


def _coalesces(ops: Any) -> bool:
    """Whether the backend makes one call of a batch (gloo issues op by op)."""
    first = ops[0]
    group = first.group or c10d._get_default_group()
    return bool(group._get_backend(first.tensor.device).supports_coalescing)


def _start_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_coalescing(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)  # raises where the backend cannot coalesce
        on = active("p2p")
        if on is not None and on.recorder.context.batch is None:
            batch = guarded(on, "p2p", open_batch, on, [], None)
            if batch is not None:
                batch.coalesced = True
                on.recorder.context.batch = batch
        return result

    return start_coalescing


def _end_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def end_coalescing(*args: Any, **kwargs: Any) -> Any:
        on = active("p2p")
        batch = on.recorder.context.batch if on is not None else None
        if on is None or batch is None or batch.ops:
            return original(*args, **kwargs)
        on.recorder.context.batch = None  # a batch opened by start_coalescing
        work = original(*args, **kwargs)
        _returned(on, batch, work)
        return work

    return end_coalescing


# -- works -------------------------------------------------------------------------


def follow(on: Active, work: Any, entries: list[tuple[int, int, int]]) -> None:
    """Follow a work to its wait and completion: (record, channel, k) of its ops."""
    if work is None:
        return
    guarded(on, "wait", _hook_wait, on, type(work))
    guarded(on, "wait", on.recorder.track, work, entries)


def _hook_wait(on: Active, kind: type) -> None:
    """A Python subclass of Work with a wait of its own does not pass the base's."""
    if kind is dist.Work or kind in on.wait_hooked:
        return
    on.wait_hooked.add(kind)
    for owner in kind.__mro__:
        if owner is dist.Work:
            break
        on.patches.replace(owner, "wait", _wait)


def _wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        on = active("wait")
        if on is None:
            return original(work, *args, **kwargs)
        recorder = on.recorder
        tracked = guarded(on, "wait", recorder.wait_begins, work)
        if tracked is None:
            return original(work, *args, **kwargs)
        try:
            result = original(work, *args, **kwargs)
        except BaseException:
            guarded(on, "wait", recorder.wait_ended, work, tracked, True)
            raise
        guarded(on, "wait", recorder.wait_ended, work, tracked, False)
        return result

    return wait
