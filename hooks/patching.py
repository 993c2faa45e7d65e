"""Patches as data: installed in order, undone in reverse on the remembered owner.

One list serves both ways, so what is undone cannot drift from what was installed. A
patch is undone only if the attribute still holds our replacement: if another tool
replaced it after us, it is left alone and reported, because putting the original back
would cut that tool off.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Patch", "PatchList"]


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute."""

    owner: Any
    name: str
    original: Any
    """The very object found in the owner's ``__dict__``."""
    replacement: Any


class PatchList:
    """All patches of one `enable`."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._functions: list[tuple[Any, Any]] = []  # (original, replacement)

    def __iter__(self) -> Any:
        return iter(self._patches)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Any | None:
        """Replace ``owner.name`` by ``make(original)``; None if it is not there.

        ``original`` is given as a plain callable; the object that stood in the
        ``__dict__`` is what `undo` puts back.
        """
        raw = vars(owner).get(name)
        if raw is None:
            return None
        replacement = make(getattr(owner, name))
        setattr(owner, name, replacement)
        self._patches.append(Patch(owner, name, raw, replacement))
        return replacement

    def replace_function(
        self, module: types.ModuleType, name: str, make: Callable[[Any], Any]
    ) -> None:
        """Replace a module's function, and every module global that is that object.

        ``from module import name`` makes a second reference which replacing the
        module's attribute does not reach. Closures, default arguments, containers and
        class attributes cannot be reached this way.
        """
        original = vars(module).get(name)
        if original is None:
            return
        replacement = self.replace(module, name, make)
        self._functions.append((original, replacement))
        for owner, attribute in _globals_holding(original):
            setattr(owner, attribute, replacement)

    def undo(self) -> list[str]:
        """Put every original back; return what could not be, in words."""
        left: list[str] = []
        for patch in reversed(self._patches):
            if vars(patch.owner).get(patch.name) is patch.replacement:
                setattr(patch.owner, patch.name, patch.original)
            else:
                owner = getattr(patch.owner, "__name__", repr(patch.owner))
                left.append(f"{owner}.{patch.name} was replaced by someone else")
        # Names of other modules: those we found, and those that took a replacement by
        # name while we were on. What has been bound anew since is theirs.
        for original, replacement in self._functions:
            for owner, attribute in _globals_holding(replacement):
                setattr(owner, attribute, original)
        self._patches.clear()
        self._functions.clear()
        return left


def _globals_holding(value: Any) -> list[tuple[types.ModuleType, str]]:
    found = []
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, held in list(vars(module).items()):
            if held is value:
                found.append((module, name))
    return found
