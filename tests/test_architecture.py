"""Imports go one way between the three rooms, and torch stays out where it must."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__: list[str] = []

_ROOT = Path(__file__).parent.parent
_ROOMS = {
    "pptrace": "pptrace",
    "hooks": "pptrace.hooks",
    "viewers": "pptrace.viewers",
}
_COMPOSITION_ROOT = (
    "pptrace.cli",
    "pptrace.commands_check",
    "pptrace.commands_schedule",
)
# Who may import torch: what runs inside a training job, or subclasses its schedules.
_WITH_TORCH = ("pptrace.hooks", "pptrace.schedules")
# Where a third-party package may be imported at the top level of a module.
_THIRD_PARTY = {
    "torch": _WITH_TORCH,
    "numpy": ("pptrace",),
    "rich": ("pptrace.viewers",),
    "perfetto": ("pptrace.viewers",),
    "google": ("pptrace.viewers",),
    "opentelemetry": ("pptrace.viewers",),
    "viztracer": (),
}


@dataclass(frozen=True)
class _Import:
    module: str
    """The module that imports."""
    target: str
    """What it imports, in full: for ``from a import b`` both ``a`` and ``a.b``."""
    line: int
    at_import: bool
    """Outside functions and ``if TYPE_CHECKING``: runs when the module is imported."""

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: imports {self.target}"


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _modules() -> dict[str, Path]:
    """Name and file of every module of the three rooms."""
    found = {}
    for room, package in _ROOMS.items():
        for path in sorted((_ROOT / room).rglob("*.py")):
            parts = path.relative_to(_ROOT / room).with_suffix("").parts
            dotted = ".".join((package, *parts)).removesuffix(".__init__")
            found[dotted] = path
    return found


def _targets(node: ast.Import | ast.ImportFrom, module: str, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        up = node.level - (path.name == "__init__.py")
        parts = module.split(".")
        base = ".".join(parts[: len(parts) - up] + ([base] if base else []))
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _imports(module: str, path: Path) -> Iterator[_Import]:
    """Every import statement of a module, those inside functions too."""

    def visit(node: ast.AST, *, at_import: bool) -> Iterator[_Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                for target in _targets(child, module, path):
                    yield _Import(module, target, child.lineno, at_import)
            delayed = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            yield from visit(child, at_import=at_import and not delayed)

    yield from visit(ast.parse(path.read_text()), at_import=True)


def _all_imports() -> list[_Import]:
    return [i for module, path in _modules().items() for i in _imports(module, path)]


def _may_cross(found: _Import) -> bool:
    """Only the command line and the functions of ``pptrace`` know all rooms."""
    if found.module == "pptrace":
        return not found.at_import
    return any(_within(found.module, root) for root in _COMPOSITION_ROOT)


def test_hooks_and_viewers_do_not_know_each_other() -> None:
    """Capture never imports presentation, presentation never imports capture."""
    rooms = ("pptrace.hooks", "pptrace.viewers")
    wrong = [
        str(i)
        for i in _all_imports()
        for mine, other in (rooms, rooms[::-1])
        if _within(i.module, mine) and _within(i.target, other)
    ]
    assert wrong == []


def test_the_model_knows_neither_hooks_nor_viewers() -> None:
    """`pptrace` imports neither room, but for the command line and ``enable``."""
    rooms = ("pptrace.hooks", "pptrace.viewers")
    wrong = [
        str(i)
        for i in _all_imports()
        if not any(_within(i.module, room) for room in rooms)
        and any(_within(i.target, room) for room in rooms)
        and not _may_cross(i)
    ]
    assert wrong == []


def test_nothing_imports_the_command_line() -> None:
    """The command line is the composition root: only ``__main__`` stands above it."""
    wrong = [
        str(i)
        for i in _all_imports()
        if any(_within(i.target, root) for root in _COMPOSITION_ROOT)
        and not any(_within(i.module, root) for root in _COMPOSITION_ROOT)
        and i.module != "pptrace.__main__"
    ]
    assert wrong == []


def test_third_party_packages_stay_in_their_rooms() -> None:
    """At top level a module imports only the standard library and what its room may."""
    wrong = []
    for found in _all_imports():
        package = found.target.partition(".")[0]
        if not found.at_import or package in {"pptrace", *sys.stdlib_module_names}:
            continue
        rooms = _THIRD_PARTY.get(package, ())
        if not any(_within(found.module, room) for room in rooms):
            wrong.append(str(found))
    assert wrong == []


_REFUSE_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise AssertionError("torch was imported")

sys.meta_path.insert(0, Refuse())
"""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=_ROOT
    )


def test_import_pptrace_loads_nothing_heavy() -> None:
    """`import pptrace` in a training script costs no third-party package."""
    done = _python("import pptrace, sys; print(*sys.modules, sep='\\n')")
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "pptrace" in loaded, done.stderr
    assert loaded & _THIRD_PARTY.keys() == set()


def test_post_mortem_modules_load_without_torch() -> None:
    """Every module outside of hooks and schedules works on a machine without torch."""
    modules = [
        module
        for module in _modules()
        if not any(_within(module, room) for room in _WITH_TORCH)
        and module != "pptrace.__main__"  # runs the command line when imported
    ]
    done = _python(_REFUSE_TORCH + f"import {', '.join(modules)}")
    assert done.returncode == 0, done.stderr
