"""A schedule drawn: ranks × time, as text for a terminal or as an SVG file.

Text wraps into panels, one below the other, so that it reads at any width.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.text import Text

from pptrace.schedules.picture import Arrow, Box, Picture

__all__ = ["render_svg", "render_text"]

_COLORS = {"F": "#4c8bf5", "B": "#34a871", "I": "#2bb3c0", "W": "#e2a73b"}
_NAMES = {"F": "forward", "B": "backward", "I": "for inputs", "W": "for weights"}
_ARROW_COLORS = {"F": "#1f4fa8", "B": "#1b6b46"}
_TOWARDS = {1: "↓", 0: " ", -1: "↑"}


# -- text --------------------------------------------------------------------------


def render_text(picture: Picture, width: int = 80, *, arrows: bool = False) -> Text:
    """Ranks × time in ``width`` columns, coloured by kind of action.

    ``arrows`` marks each result that goes to another rank: ↓ to a higher rank (in a row
    below), ↑ to a lower one. Idle time is ``·``, a box longer than its label goes on
    as ``═``.
    """
    boxes = [box for row in picture.ranks.values() for box in row]
    cell = max((len(box.label) for box in boxes), default=2) + 1 + arrows
    lead = max(len(f"r{rank}") for rank in picture.ranks) + 1
    units = max(2, (width - lead) // cell)
    text = Text(_head(picture) + "\n")
    for first in range(0, picture.makespan, units):
        last = min(first + units, picture.makespan)
        text.append("\n" + _ruler(first, last, lead, cell) + "\n", "dim")
        for rank, row in picture.ranks.items():
            text.append(f"r{rank}".ljust(lead), "bold")
            for part in _cells(row, first, last, cell, arrows=arrows):
                text.append_text(part)
            text.rstrip()
            text.append("\n")
    shown = [kind for kind in _COLORS if any(box.kind == kind for box in boxes)]
    text.append("\n")
    for kind in shown:
        text.append(f" {kind} ", _style(kind))
        text.append(f" {_NAMES[kind]}   ")
    text.append("· idle")
    if arrows:
        text.append("\n ↓ sent to a rank below   ↑ sent to a rank above")
    text.append("\n")
    return text


def _head(picture: Picture) -> str:
    return (
        f"{picture.title}: bubble {picture.bubble_share:.0%}, "
        f"up to {picture.in_flight} in flight"
    )


def _ruler(first: int, last: int, lead: int, cell: int) -> str:
    """Times above a panel, every fifth unit."""
    line = [" "] * (lead + (last - first) * cell + 6)
    for unit in range(first, last):
        if unit % 5 == 0 or unit == first:
            at = lead + (unit - first) * cell
            line[at : at + len(str(unit))] = str(unit)
    return "".join(line).rstrip()


def _style(kind: str) -> str:
    return f"black on {_COLORS[kind]}"


def _cells(
    row: tuple[Box, ...], first: int, last: int, cell: int, *, arrows: bool
) -> Iterator[Text]:
    """The part of a rank's row between two times."""
    at = first
    for box in row:
        begin, end = max(box.begin, first), min(box.end, last)
        if begin >= end:
            continue
        yield Text("·".ljust(cell) * (begin - at), "dim")
        size = (end - begin) * cell - 1
        label = box.label if box.begin >= first else ""
        body = label.ljust(size, "═") if end - begin > 1 or not label else label
        if arrows:
            tail = _TOWARDS[box.sends] if box.end <= last else " "
            body = body.ljust(size)[: size - 1] + tail
        yield Text(body.ljust(size), _style(box.kind))
        yield Text(" ")
        at = end
    yield Text("·".ljust(cell) * (last - at), "dim")


# -- SVG ---------------------------------------------------------------------------

_UNIT, _ROW, _BOX = 26, 34, 22
_LEFT, _TOP = 42, 58


def render_svg(picture: Picture, *, arrows: bool = True) -> str:
    """A self-contained SVG; with arrows from each result to the action that needs it."""
    rows = {rank: index for index, rank in enumerate(picture.ranks)}
    width = _LEFT + picture.makespan * _UNIT + 20
    width = max(width, 480)
    height = _TOP + len(rows) * _ROW + 46
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
        (
            f'<text x="12" y="22" font-size="14" font-weight="bold">'
            f"{escape(_head(picture))}</text>"
        ),
        *_svg_ruler(picture.makespan, len(rows)),
    ]
    if arrows:  # below the boxes, whose labels stay readable
        lines += [_svg_arrow(arrow, rows) for arrow in picture.arrows]
    for rank, row in picture.ranks.items():
        y = _TOP + rows[rank] * _ROW
        lines.append(f'<text x="12" y="{y + 15}" font-weight="bold">r{rank}</text>')
        lines += [_svg_box(box, y) for box in row]
    lines += _svg_legend(picture, _TOP + len(rows) * _ROW + 22)
    return "\n".join([*lines, "</svg>", ""])


def _svg_ruler(makespan: int, rows: int) -> Iterator[str]:
    bottom = _TOP + rows * _ROW
    for unit in range(0, makespan + 1, 5):
        x = _LEFT + unit * _UNIT
        yield f'<line x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{_TOP - 12}" fill="#666" text-anchor="middle">{unit}</text>'


def _svg_box(box: Box, y: int) -> str:
    x, width = _LEFT + box.begin * _UNIT, (box.end - box.begin) * _UNIT - 2
    return (
        f"<g><title>{box.label}, time {box.begin} to {box.end}</title>"
        f'<rect x="{x}" y="{y}" width="{width}" height="{_BOX}" rx="3" '
        f'fill="{_shade(_COLORS[box.kind], box.chunk)}"/>'
        f'<text x="{x + width / 2}" y="{y + 15}" text-anchor="middle">'
        f"{box.label}</text></g>"
    )


def _shade(color: str, chunk: int) -> str:
    """Lighter for the later stages of a rank; solid, so no arrow shows through."""
    strength = max(0.45, 1 - 0.35 * chunk)
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - c) * strength):02x}" for c in channels)


def _svg_arrow(arrow: Arrow, rows: dict[int, int]) -> str:
    down = rows[arrow.target] > rows[arrow.source]
    x1, x2 = (_LEFT + t * _UNIT - 1 for t in (arrow.begin, arrow.end))
    y1 = _TOP + rows[arrow.source] * _ROW + (_BOX if down else 0)
    y2 = _TOP + rows[arrow.target] * _ROW + (0 if down else _BOX)
    color = _ARROW_COLORS[arrow.kind]
    tip = 4 if down else -4
    return (
        f'<path d="M{x1 - 2} {y1}L{x2 + 2} {y2}m-3 {-tip}l3 {tip}l3 {-tip}" fill="none" '
        f'stroke="{color}" stroke-opacity="0.6"/>'
    )


def _svg_legend(picture: Picture, y: int) -> Iterator[str]:
    kinds = {box.kind for row in picture.ranks.values() for box in row}
    x = 12
    for kind in (kind for kind in _COLORS if kind in kinds):
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLORS[kind]}"/>'
        yield f'<text x="{x + 19}" y="{y + 11}">{kind} {_NAMES[kind]}</text>'
        x += 100
