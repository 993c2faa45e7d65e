"""The wheel holds the three rooms, whole, under the names they are imported by."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

__all__: list[str] = []

_ROOT = Path(__file__).parent.parent
_ROOMS = {
    "pptrace": "pptrace",
    "hooks": "pptrace/hooks",
    "viewers": "pptrace/viewers",
}


def _room_files() -> list[Path]:
    """Every file of the rooms, relative to the root, but for caches."""
    return [
        path.relative_to(_ROOT)
        for room in _ROOMS
        for path in (_ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy: setuptools would reuse a stale build folder."""
    tree = tmp_path_factory.mktemp("tree")
    for room in _ROOMS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(_ROOT / room, tree / room, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run(command, cwd=tree, check=True, timeout=100)
    (path,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_file_of_the_three_rooms_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """A new sub-package or data file that pyproject.toml does not list is caught."""
    expected = {
        "/".join((_ROOMS[path.parts[0]], *path.parts[1:])) for path in _room_files()
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without ``__init__.py`` would be found in the tree and not packaged."""
    folders = {_ROOT / path.parent for path in _room_files() if path.suffix == ".py"}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_type_checkers_see_the_annotations(wheel: zipfile.ZipFile) -> None:
    """The marker of a typed package is in the wheel."""
    assert "pptrace/py.typed" in wheel.namelist()


def test_the_command_and_the_licence_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """`pptrace` is installed as a command; the licence text goes along."""
    text = {
        name.partition(".dist-info/")[2]: wheel.read(name).decode()
        for name in wheel.namelist()
        if ".dist-info/" in name
    }
    assert "pptrace = pptrace.cli:main" in text["entry_points.txt"]
    assert "the pptrace authors" in text["licenses/LICENSE"]
    assert "License-Expression: BSD-3-Clause" in text["METADATA"]
