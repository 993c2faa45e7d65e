"""Fixed schedules: drop-in subclasses of torch's, the remedy a verdict points to.

Same names, same signatures; where torch's own is right, nothing but the name is ours.

========================  ==============================  ==============================
schedule                  torch's own                     here
========================  ==============================  ==============================
``Schedule1F1B``          hangs for n < stages on NCCL    any n: no send ever shares a
                          (pytorch/torchtitan#775);       batch with a receive
                          refused since pytorch#144702;
                          hangs with skip connections     one order for all ranks
                          on one communicator
                          (pytorch/PiPPy#969)
``ScheduleGPipe``         refuses n < stages in torch     any n
                          2.7 to 2.10; hangs in the       one order for all ranks
                          backward with skip connections
                          on one communicator
both                      ``eval`` divides gradients      ``eval`` leaves gradients
                          left by ``step`` by n again     alone
========================  ==============================  ==============================

The table speaks of torch 2.6 to 2.14. Nothing is imported from torch before one of the
classes is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pptrace.schedules.actions import actions_1f1b, actions_gpipe
    from pptrace.schedules.single import Schedule1F1B, ScheduleGPipe

__all__ = ["Schedule1F1B", "ScheduleGPipe", "actions_1f1b", "actions_gpipe"]

_HOME = {
    "ScheduleDualPipeV": "multi",
    "ScheduleInterleaved1F1B": "multi",
    "ScheduleInterleavedZeroBubble": "multi",
    "ScheduleLoopedBFS": "multi",
    "ScheduleZBVZeroBubble": "multi",
    "Schedule1F1B": "single",
    "ScheduleGPipe": "single",
    "actions_1f1b": "actions",
    "actions_gpipe": "actions",
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
