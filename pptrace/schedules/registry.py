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

from pptrace.schedules import multi, single

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
_places: list[tuple[ModuleType, str, type, type]] = []
"""What is replaced now: module, name, torch's class, ours; in the order of doing."""


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
    classes already derived from torch's. Logged once.
    """
    with _lock:
        if _places:
            return
        by_identity = {
            id(torch_class): name for name, torch_class in _ORIGINALS.items()
        }
        for module in _modules():
            for name, value in list(vars(module).items()):
                known = by_identity.get(id(value))
                if known is not None:
                    _places.append((module, name, value, _FIXED[known]))
        for module, name, _, fixed in _places:
            setattr(module, name, fixed)
        names = sorted({fixed.__name__ for _, _, _, fixed in _places})
        _logger.warning(
            "pptrace's fixed schedules stand in for torch's: %s", ", ".join(names)
        )


def uninstall() -> None:
    """Put torch's own classes back: the very same objects, in every place.

    A place that something else has changed meanwhile is left alone, with a warning.
    """
    with _lock:
        while _places:
            module, name, torch_class, fixed = _places.pop()
            if vars(module).get(name) is fixed:
                setattr(module, name, torch_class)
            else:
                _logger.warning(
                    "%s.%s is not what pptrace put there; left as it is",
                    module.__name__,
                    name,
                )


def _modules() -> list[ModuleType]:
    """Torch's own first, then every other one; pptrace needs torch's classes itself."""
    modules: dict[str, Any] = dict(sorted(sys.modules.items()))  # may hold anything
    own = [modules.pop(m.__name__) for m in (torch_schedules, pipelining)]
    return own + [
        module
        for name, module in modules.items()
        if isinstance(module, ModuleType) and name.partition(".")[0] != "pptrace"
    ]
