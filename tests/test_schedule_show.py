"""Schedules drawn: what stands where, at any width, as text and as SVG."""

from __future__ import annotations

import argparse
import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pptrace.commands_schedule import Schedule
from pptrace.errors import InputError
from pptrace.schedules import actions
from pptrace.schedules.picture import picture
from pptrace.viewers.schedule import render_svg, render_text

__all__: list[str] = []

_NAMES = (
    "1F1B",
    "GPipe",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
_SVG = "{http://www.w3.org/2000/svg}"


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command = Schedule()
    command.prepare_parser(parser)
    return command.run(parser.parse_args(arguments))


def test_a_small_schedule_as_text() -> None:
    """The whole picture, read by eye."""
    assert render_text(picture("1F1B", 3, 2), 80, arrows=True).plain == (
        "1F1B, 3 ranks, 2 microbatches: bubble 50%, up to 2 in flight\n"
        "\n"
        "   0                   5                   10\n"
        "r0 F0↓ F1↓ ·   ·   ·   ·   ·   B0════  ·   B1════\n"
        "r1 ·   F0↓ F1↓ ·   ·   B0════↑ ·   B1════↑ ·   ·\n"
        "r2 ·   ·   F0  B0════↑ F1  B1════↑ ·   ·   ·   ·\n"
        "\n"
        " F  forward    B  backward   · idle\n"
        " ↓ sent to a rank below   ↑ sent to a rank above\n"
    )


@pytest.mark.parametrize("name", _NAMES)
def test_text_fits_its_width_and_leaves_nothing_out(name: str) -> None:
    """Every action is there once, 32 microbatches on 80 columns too."""
    for width, arrows in itertools.product((80, 200), (False, True)):
        drawn = picture(name, 4, 32)
        text = render_text(drawn, width, arrows=arrows).plain
        assert max(map(len, text.splitlines())) <= width
        words = text.replace("═", " ").replace("↓", " ").replace("↑", " ").split()
        for rank, row in drawn.ranks.items():
            for box in row:
                found = words.count(box.label)
                same = sum(
                    other.label == box.label
                    for boxes in drawn.ranks.values()
                    for other in boxes
                )
                assert found == same, (rank, box)


def test_a_box_that_continues_in_the_next_panel_is_not_labelled_twice() -> None:
    """The rest of a cut box is drawn without its label."""
    text = render_text(picture("1F1B", 2, 4), 14).plain
    assert text.count("B1") == 2
    assert "══ " in text


@pytest.mark.parametrize("name", _NAMES)
def test_svg_has_a_box_per_action_and_an_arrow_per_message(name: str) -> None:
    """The file is well-formed XML, with as much in it as the schedule has."""
    found = picture(name, 3, 4)
    root = ET.fromstring(render_svg(found))
    boxes = [title.text for title in root.iter(f"{_SVG}title")]
    assert len(boxes) == sum(map(len, found.ranks.values()))
    assert len(list(root.iter(f"{_SVG}path"))) == len(found.arrows)
    plain = ET.fromstring(render_svg(found, arrows=False))
    assert not list(plain.iter(f"{_SVG}path"))


@pytest.mark.parametrize("name", _NAMES)
def test_arrows_are_the_messages_of_the_program(name: str) -> None:
    """As many as there are sends, each from what made it to what needs it."""
    found = picture(name, 3, 5)
    from pptrace.schedules import programs

    sends = [
        action
        for program in programs(name, 3, 5).values()
        for action in program
        if action.kind in actions.SENDS
    ]
    assert len(found.arrows) == len(sends)
    for arrow in found.arrows:
        assert arrow.begin <= arrow.end
        assert any(box.end == arrow.begin for box in found.ranks[arrow.source])
        assert any(box.begin == arrow.end for box in found.ranks[arrow.target])


def test_the_command_prints_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One call draws in the terminal and leaves an SVG and a CSV file."""
    svg, table = tmp_path / "s.svg", tmp_path / "s.csv"
    files = ("--svg", str(svg), "--csv", str(table))
    assert _run("show", "1F1B", "--pp", "4", "--microbatches", "2", *files) == 0
    assert "1F1B, 4 ranks, 2 microbatches: bubble 60%" in capsys.readouterr().out
    assert svg.read_text().startswith("<svg")
    with table.open() as file:
        assert actions.read_csv(file)[3] == actions.order_1f1b(3, 4, 2)


def test_the_command_refuses_nonsense_in_one_line(tmp_path: Path) -> None:
    """An unknown schedule, no rank, and a folder that is not there."""
    with pytest.raises(InputError, match="is no schedule"):
        _run("show", "3F3B", "--pp", "4", "--microbatches", "2")
    with pytest.raises(InputError, match="0 ranks: is too few"):
        _run("show", "1F1B", "--pp", "0", "--microbatches", "2")
    missing = tmp_path / "no" / "s.svg"
    with pytest.raises(InputError, match="cannot be written"):
        _run("show", "1F1B", "--pp", "2", "--microbatches", "2", "--svg", str(missing))
