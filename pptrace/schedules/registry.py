"""Which class stands for which name, and putting the fixed ones in torch's place.

`install` changes no torch code: it puts the fixed classes where torch's stand, in
torch's own modules and wherever a module imported one by name.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from pptrace.schedules import _compat, multi, single

__all__ = ["get_schedule_class", "install", "is_installed", "uninstall"]

_logger = logging.getLogger("pptrace.schedules")

_FIXED: dict[str, type] = {
    name: getattr(module, name)
    for module in (multi, single)
    for name in module.__all__
    if name.startswith("Schedule") and hasattr(module, name)
}
_FIXED["_ScheduleForwardOnly"] = single.ForwardOnly
# Kept from the start: once installed, torch's modules no longer have them.
_ORIGINALS: dict[str, type] = {
    name: next(c for c in fixed.__mro__ if c.__name__ == name and c is not fixed)
    for name, fixed in _FIXED.items()
}

_lock = threading.Lock()
_places: list[tuple[ModuleType, str, Any, Any]] = []
"""What is replaced now: module, name, torch's value, ours; in the order of doing."""


def get_schedule_class(schedule_name: str) -> type:
    """The fixed class of this name; spelling as torch's function of the same name.

    Raises:
        ValueError: torch knows no such schedule.
    """
    found: type = torch_schedules.get_schedule_class(schedule_name)
    return _FIXED.get(found.__name__, found)


def is_installed() -> bool:
    """Whether torch hands out the fixed schedules now."""
    return bool(_places)


def install() -> None:
    """Make torch hand out the fixed schedules; twice is harmless.

    From then on ``torch.distributed.pipelining.Schedule1F1B``, torch's
    ``get_schedule_class("1F1B")`` and every module that has imported one of the classes
    by name have the fixed one. Schedule objects that exist stay what they are, and so do
    classes already derived from torch's. On torch 2.6 and 2.7 ``_batch_p2p`` is replaced
    too, by one that loses no work, so that schedules of your own gain as well. Logged
    once.
    """
    with _lock:
        if _places:
            return
        fixed = {id(_ORIGINALS[name]): cls for name, cls in _FIXED.items()}
        values: dict[int, Any] = dict(fixed)
        if _compat.loses_works:
            current = id(torch_schedules._batch_p2p)
            values[current] = _compat.batch_p2p_keeping_works
        for module in _modules():
            for name, value in list(vars(module).items()):
                if id(value) in values:
                    _places.append((module, name, value, values[id(value)]))
        for module, name, _, ours in _places:
            setattr(module, name, ours)
        names = sorted({ours.__name__ for _, _, _, ours in _places})
        _logger.warning(
            "pptrace's fixed schedules stand in for torch's: %s", ", ".join(names)
        )


def uninstall() -> None:
    """Put torch's own classes back: the very same objects, in every place.

    A place that something else has changed meanwhile is left alone, with a warning.
    """
    with _lock:
        while _places:
            module, name, torchs, ours = _places.pop()
            if vars(module).get(name) is ours:
                setattr(module, name, torchs)
            else:
                _logger.warning(
                    "%s.%s is not what pptrace put there; left as it is",
                    module.__name__,
                    name,
                )


def _modules() -> list[ModuleType]:
    """Torch's own first, then every other, once; pptrace needs torch's classes itself."""
    loaded: dict[str, Any] = dict(sorted(sys.modules.items()))  # may hold anything
    modules = [torch_schedules, pipelining] + [
        module
        for name, module in loaded.items()
        if isinstance(module, ModuleType) and name.partition(".")[0] != "pptrace"
    ]
    return list({id(module): module for module in modules}.values())
