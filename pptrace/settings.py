"""The options of `pptrace.enable` and the environment variables behind them.

An argument given to `enable` wins over its variable, the variable over the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pptrace.errors import SettingsError

__all__ = ["Settings", "load_settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What `pptrace.enable` was asked to do; see there for each option."""

    dir: Path = Path("pptrace-out")
    ring_slots: int = 4096
    hang_after: float | None = None
    emulate: str | None = None
    rule: str | None = None
    eager: bool | None = None
    host: str = "blocking"
    report: bool = True
    fix: bool = False
    preflight: str = "warn"
    preflight_budget: float = 0.2


def _positive_int(text: str) -> int:
    value = int(text)
    if not 64 <= value <= 1 << 22:
        raise ValueError("must be between 64 and 4194304")
    return value


def _seconds(text: str) -> float | None:
    if text in ("auto", ""):
        return None
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError("must be a positive number of seconds, or 'auto'")
    return value


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("must be 1 or 0")


def _choice(*allowed: str) -> Callable[[str], str | None]:
    def parse(text: str) -> str | None:
        if text in ("", "none"):
            return None
        if text not in allowed:
            raise ValueError("must be " + " or ".join(repr(a) for a in allowed))
        return text

    return parse


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "dir": ("PPTRACE_DIR", lambda text: Path(text or "pptrace-out")),
    "ring_slots": ("PPTRACE_RING_SLOTS", _positive_int),
    "hang_after": ("PPTRACE_HANG_AFTER", _seconds),
    "emulate": ("PPTRACE_EMULATE", _choice("nccl")),
    "rule": ("PPTRACE_RULE", _choice("split", "coalesced")),
    "eager": ("PPTRACE_EAGER", _flag),
    "host": ("PPTRACE_EMULATE_HOST", _choice("blocking", "async")),
    "report": ("PPTRACE_REPORT", _flag),
    "fix": ("PPTRACE_FIX", _flag),
    "preflight": ("PPTRACE_PREFLIGHT", _choice("warn", "raise", "off")),
    "preflight_budget": ("PPTRACE_PREFLIGHT_BUDGET", _seconds),
}


def load_settings(
    options: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Settings:
    """Merge given options, environment variables and defaults.

    Args:
        options: option name to value; None means "not given".
        environ: the environment; default ``os.environ``.

    Raises:
        SettingsError: an unknown option, or a value that cannot be used; the message
            names the option or variable, the value and what is allowed.
    """
    environ = os.environ if environ is None else environ
    known = {f.name for f in fields(Settings)}
    for name in options:
        if name not in known:
            raise SettingsError(
                f"pptrace.enable has no option {name!r}; it has "
                + ", ".join(sorted(known))
            )
    values: dict[str, Any] = {}
    for name, (variable, parse) in _PARSERS.items():
        given = options.get(name)
        if given is not None:
            text, source = _to_text(given), f"option {name}"
        elif variable in environ:
            text, source = environ[variable], variable
        else:
            continue
        try:
            parsed = parse(text)
        except ValueError as error:
            raise SettingsError(f"{source}={text!r}: {error}") from None
        values[name] = parsed
    for name in ("host", "preflight", "preflight_budget"):
        if values.get(name, "") is None:
            del values[name]
    return replace(Settings(), **values)


def _to_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return str(os.fspath(value)) if isinstance(value, os.PathLike) else str(value)
