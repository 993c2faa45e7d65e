"""Whether pptrace is on in this process, and what a hook does when it fails.

A hook that raises is switched off, says so once, and the user's call goes on as if the
hook were not there. Counts of ops are then no longer complete, which is written into
the black box so that no verdict is built on them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pptrace.hooks.preflight import Preflight

if TYPE_CHECKING:
    from pptrace.hooks.patching import PatchList
    from pptrace.hooks.recorder import Recorder
    from pptrace.settings import Settings

__all__ = ["Active", "active", "fail_open", "guarded", "set_active"]

logger = logging.getLogger("pptrace")


class Active:
    """Everything that exists while pptrace is on."""

    def __init__(
        self, settings: Settings, patches: PatchList, recorder: Recorder
    ) -> None:
        self.settings = settings
        self.patches = patches
        self.recorder = recorder
        self.off: set[str] = set()
        self.wait_hooked: set[type] = set()
        self.chunk_hooked: set[type] = set()
        self.described: dict[tuple[int, int], tuple[type, int]] = {}
        self.preflight = Preflight(
            recorder, settings.preflight, settings.preflight_budget
        )
        self.on_exception: Callable[[BaseException], None] = lambda _: None

    @property
    def emulator(self) -> Any:
        """The NCCL emulator, or None."""
        return self.recorder.emulator


_active: Active | None = None


def active(hook: str) -> Active | None:
    """The state if pptrace is on and this hook has not failed, else None."""
    on = _active
    return None if on is None or hook in on.off else on


def set_active(on: Active | None) -> None:
    """Switch every hook on or off at once."""
    global _active  # noqa: PLW0603 - the one switch all hooks look at
    _active = on


def fail_open(on: Active, hook: str, error: BaseException) -> None:
    """Switch ``hook`` off for good and say so once."""
    if hook in on.off:
        return
    on.off.add(hook)
    message = f"hook {hook!r} failed and is off: {type(error).__name__}: {error}"
    logger.warning("pptrace: %s; training goes on", message, exc_info=error)
    with contextlib.suppress(Exception):
        on.recorder.box.set_incomplete(message)
        on.recorder.note(message)


def guarded(on: Active, hook: str, call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``; if it raises, the hook fails open and None is returned."""
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001
        fail_open(on, hook, error)
        return None


def _forget_in_child() -> None:
    # A forked child (a data loader's worker) shares the mapped file of its parent: it
    # must not write into it.
    set_active(None)
    for forget in in_forked_child:
        forget()


in_forked_child: list[Callable[[], None]] = []
"""What else a forked child must let go of."""

os.register_at_fork(after_in_child=_forget_in_child)
