"""The errors pptrace raises at its own users: what was wrong, where, and what to do.

Exit codes of every command: 0 nothing wrong, 1 findings, 2 unusable input.
"""

from __future__ import annotations

__all__ = ["InputError", "PptraceError", "PreflightError", "SettingsError"]


class PptraceError(Exception):
    """Base of all pptrace errors; ``exit_code`` is what the command line returns."""

    exit_code = 2


class InputError(PptraceError):
    """A file or folder that cannot be used: names it, the reason and the way out."""

    def __init__(self, where: object, reason: str, advice: str = "") -> None:
        self.where = str(where)
        self.reason = reason
        self.advice = advice
        super().__init__(f"{where}: {reason}" + (f" ({advice})" if advice else ""))


class PreflightError(PptraceError, RuntimeError):
    """A schedule would hang with these numbers; raised before its first step."""


class SettingsError(PptraceError):
    """An option of `pptrace.enable` or its environment variable has no usable value."""
