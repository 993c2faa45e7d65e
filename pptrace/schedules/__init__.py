"""Fixed schedules: drop-in subclasses of torch's, the remedy a verdict points to.

Same names, same signatures, any number of microbatches. Where torch's own is right, its
own code runs: the order of compute actions is torch's in every schedule but the first
two, and so is the runtime of the multi-stage ones.

==============================  =============================  ============================
schedule                        torch's own, 2.6 to 2.14       here
==============================  =============================  ============================
``Schedule1F1B``                hangs for n < stages on NCCL   any n: no send ever shares a
                                (pytorch/torchtitan#775);      batch with a receive
                                refused since
                                pytorch/pytorch#144702
``Schedule1F1B``,               skip connections hang where    one order of messages for
``ScheduleGPipe``               all ops ride one communicator  all ranks
                                (pytorch/PiPPy#969)
``ScheduleGPipe``,              n < stages refused in 2.7 to   any n
forward only                    2.10 (the guard of #144702)
``ScheduleInterleaved1F1B``,    refused unless n divides into  any n: the order for the
``ScheduleInterleaved-``        its rounds                     next n that does, without
``ZeroBubble``                                                 the surplus microbatches
``ScheduleDualPipeV``           n < stages refused             the order for n = stages,
                                                               without the surplus
``ScheduleZBVZeroBubble``,      ``eval``, or no ``loss_fn``:   forwards alone are run
``ScheduleDualPipeV``           "can't steal_bwd_input", the
                                other ranks hang
every one                       ``eval`` divides gradients     ``eval`` leaves gradients
                                that are there by n again      alone
multi-stage                     ``defer_pp_recv=True`` lets    receives as late as the
                                two sends face each other:     order of messages permits
                                hangs on NCCL
multi-stage, up to 2.9          sends and receives mixed in    torch's later runtime: no
                                one batch per time step        mixed batch
zero bubble, 2.7 to 2.9         gradients not scaled on        scaled
                                torch's runtime
``ScheduleZBVZeroBubble``, 2.6  stages must be told where      they are told
                                they are
V-shaped, 2.9 to 2.11           ops to itself at the start:    left out
                                refused by gloo
all, 2.6 and 2.7                ``_batch_p2p`` loses all works every work is waited for
                                but the last: wrong results
                                on gloo
``ScheduleLoopedBFS``           right (but for ``eval``)       torch's order and runtime
==============================  =============================  ============================

The bubble of the numbers of microbatches that torch refuses is in ``docs/schedules.md``.
Nothing is imported from torch before one of the classes is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pptrace.schedules.actions import actions_1f1b, actions_gpipe
    from pptrace.schedules.advice import Advice, Setting, advise, programs
    from pptrace.schedules.multi import (
        ScheduleDualPipeV,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
    )
    from pptrace.schedules.registry import (
        get_schedule_class,
        install,
        is_installed,
        uninstall,
    )
    from pptrace.schedules.single import Schedule1F1B, ScheduleGPipe

__all__ = [
    "Advice",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "Setting",
    "actions_1f1b",
    "actions_gpipe",
    "advise",
    "get_schedule_class",
    "install",
    "is_installed",
    "programs",
    "uninstall",
]

_HOME = {
    "Advice": "advice",
    "Schedule1F1B": "single",
    "ScheduleDualPipeV": "multi",
    "ScheduleGPipe": "single",
    "ScheduleInterleaved1F1B": "multi",
    "ScheduleInterleavedZeroBubble": "multi",
    "ScheduleLoopedBFS": "multi",
    "ScheduleZBVZeroBubble": "multi",
    "Setting": "advice",
    "actions_1f1b": "actions",
    "actions_gpipe": "actions",
    "advise": "advice",
    "get_schedule_class": "registry",
    "install": "registry",
    "is_installed": "registry",
    "programs": "advice",
    "uninstall": "registry",
}


def __getattr__(name: str) -> Any:
    """Import torch's subclasses only when one is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME.keys())
