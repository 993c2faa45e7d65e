"""The one place that knows torch's shapes: names, signatures and behaviours.

Everything is found by looking at the installed torch, never by its version number.
"""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stages

__all__ = [
    "COLLECTIVES",
    "P2P_OPS_METHODS",
    "START_UP_METHODS",
    "backend_name",
    "completion_probe",
    "default_rule",
    "dtype_name",
    "is_eager",
    "metadata_mode",
    "open_root_store",
    "public_collective_name",
    "schedule_bases",
    "split_batch_p2p",
    "stage_base",
    "stages_of",
    "was_stepped",
    "was_used",
]

COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of ``ProcessGroup`` that are collectives; absent ones are skipped."""

START_UP_METHODS = ("_initialize_stage", "_initialize_stages")
"""Methods of a schedule that exchange votes and shapes before the first microbatch."""

P2P_OPS_METHODS = (
    ("get_fwd_recv_ops", "F"),
    ("get_fwd_send_ops", "F"),
    ("get_bwd_recv_ops", "B"),
    ("get_bwd_send_ops", "B"),
)
"""Methods of a stage that make the P2POps of one microbatch."""


def stage_base() -> type:
    """The class that defines ``forward_one_chunk``."""
    return stages._PipelineStageBase


def schedule_bases() -> tuple[type, ...]:
    """The classes that define ``step``."""
    return (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank, of a single- or multi-stage schedule."""
    many = getattr(schedule, "_stages", None)
    if many is not None:
        return list(many)
    one = getattr(schedule, "_stage", None)
    return [one] if one is not None else []


def metadata_mode(stage: Any) -> str:
    """``static`` if the stage was given its shapes, ``dynamic`` if it infers them."""
    meta = getattr(stage, "_user_meta", None)
    if meta is not None:
        known = meta.inputs is not None and meta.outputs is not None
        return "static" if known else "dynamic"
    given = getattr(stage, "inputs_meta", None)
    return "static" if given is not None else "dynamic"


def public_collective_name(method: str) -> str:
    """The name users know: ``all_reduce`` for ``allreduce``."""
    return {
        "allreduce": "all_reduce",
        "allgather": "all_gather",
        "alltoall": "all_to_all",
        "alltoall_base": "all_to_all_single",
        "_allgather_base": "all_gather_into_tensor",
        "_reduce_scatter_base": "reduce_scatter_tensor",
    }.get(method, method)


def split_batch_p2p(batch_p2p: Any, ops: list[Any]) -> Any:
    """``_batch_p2p`` under the split rule, whatever the installed torch does.

    One-sided batches are issued op by op. The result has the installed torch's shape: a
    list of works, or (torch 2.6) only the last one.
    """
    kinds = {op.op for op in ops}
    if len(kinds) > 1 or default_rule() == "split":
        return batch_p2p(ops)
    key = "group_dst" if kinds == {dist.isend} else "group_src"
    works = [
        op.op(op.tensor, group=op.group, tag=op.tag, **{key: op.group_peer})
        for op in ops
    ]
    returns_list = "list" in str(inspect.signature(batch_p2p).return_annotation)
    return works if returns_list else works.pop()


def was_stepped(schedule: Any) -> bool:
    """Whether a schedule has already exchanged anything with its neighbours."""
    flags = (
        "_stage_forward_initialized",
        "_stages_forward_initialized",
        "_stage_initialized",
        "_stages_initialized",
    )
    return any(getattr(schedule, flag, False) for flag in flags)


@functools.lru_cache(maxsize=1)
def default_rule() -> str:
    """``split`` if ``_batch_p2p`` issues one-sided batches one by one (torch ≥ 2.13).

    Decided by reading the installed function: the splitting one compares the kinds of
    ops in the batch and calls them itself.
    """
    try:
        source = inspect.getsource(inspect.unwrap(schedules._batch_p2p))
    except (OSError, TypeError):
        return "split"
    return "split" if "dist.isend" in source else "coalesced"


class _EventProbe:
    """Completion of all that the current stream waits for so far (CUDA)."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_completed(self) -> bool:
        return bool(self._event.query())


def completion_probe(work: Any) -> Any:
    """What to ask ``is_completed()`` after ``work.wait()`` returned early.

    Python works and works on a CPU are asked themselves. A C++ work of a CUDA backend
    may own its output tensors, which torch frees once the caller drops the work; so an
    event on the current stream, which the wait just made depend on the op, stands in
    for it. (Not verified on a GPU.)
    """
    if type(work) is dist.Work and torch.cuda.is_available():
        return _EventProbe()
    return work


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def backend_name(group: Any) -> str:
    """The backend that carries P2P of a group: ``gloo``, ``nccl``, ..."""
    try:
        name = str(c10d.get_backend(group))
        if name.isalpha() and name not in ("undefined", "custom"):
            return name
        # Several backends: the one for the device that pipelines run on.
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind = type(group._get_backend(device)).__name__
        return kind.removeprefix("ProcessGroup").lower()
    except Exception:  # noqa: BLE001 - a foreign ProcessGroup class; name only
        return ""


def was_used(group: Any) -> bool:
    """Whether a group has already run something: collectives, on gloo P2P as well."""
    try:
        return bool(group._get_sequence_number_for_group() > 0)
    except Exception:  # noqa: BLE001 - a backend that does not count
        return False


def is_eager(group: Any) -> bool:
    """Whether the group's communicator was set up when the group was made."""
    return getattr(group, "bound_device_id", None) is not None


def open_root_store() -> Any | None:
    """A client connection of our own to the job's root store; None if impossible.

    The default store is a chain of prefixes; the watchdog's keys and ours are in its
    root. A call that blocks holds a connection, hence a clone per thread.
    """
    try:
        store = c10d._get_default_store()
    except (RuntimeError, ValueError):
        return None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, HashStore):
        return None  # lives in this process only
    patience = timedelta(seconds=5)
    if isinstance(store, TCPStore):
        # Not its clone(): that would wait for as long as the job's own connection.
        clone: Any = TCPStore(
            store.host, store.port, None, False, patience, wait_for_workers=False
        )
    elif hasattr(store, "clone"):
        clone = store.clone()
    elif isinstance(store, FileStore):
        clone = FileStore(getattr(store, "path"), -1)  # noqa: B009 - not in torch's stubs
    else:
        return None
    clone.set_timeout(patience)
    return clone
