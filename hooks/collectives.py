"""Hooks on collectives and barriers of any group, so that they share the timeline.

Collectives issued from C++ (DDP's reducer, functional collectives) do not pass the
Python methods of ``ProcessGroup`` and are not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pptrace.hooks import torch_compat
from pptrace.hooks.p2p import follow
from pptrace.hooks.patching import PatchList
from pptrace.hooks.state import active, fail_open, guarded

__all__ = ["install"]


def install(patches: PatchList) -> None:
    """Install the collective hooks."""
    for name in torch_compat.COLLECTIVES:
        patches.replace(
            dist.ProcessGroup, name, functools.partial(_collective, name=name)
        )


def _collective(original: Callable[..., Any], *, name: str) -> Callable[..., Any]:
    public = torch_compat.public_collective_name(name)

    @functools.wraps(original)
    def collective(pg: Any, *args: Any, **kwargs: Any) -> Any:
        on = active("collective")
        if on is None:
            return original(pg, *args, **kwargs)
        try:
            state = on.recorder.group_state(pg)
            seq = on.recorder.collective(state, public, *_payload(args))
        except Exception as error:  # noqa: BLE001
            fail_open(on, "collective", error)
            return original(pg, *args, **kwargs)
        try:
            if on.emulator is None:
                work = original(pg, *args, **kwargs)
            else:
                turn = on.emulator.enter_collective(state.value, public)
                work = original(pg, *args, **kwargs)
                if isinstance(work, dist.Work):
                    work = turn.carry(work)
        except BaseException:
            guarded(on, "collective", on.recorder.failed, seq)
            raise
        guarded(on, "collective", on.recorder.returned, seq)
        if isinstance(work, dist.Work):
            follow(on, work, [(seq, -1, 0)])
        else:
            guarded(on, "collective", on.recorder.done, seq)
        return work

    return collective


def _payload(args: tuple[Any, ...]) -> tuple[int, int]:
    """(elements, bytes) of the first tensor found in the arguments."""
    for arg in args:
        first = arg
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            numel = first.numel()
            return numel, numel * first.element_size()
    return 0, 0
