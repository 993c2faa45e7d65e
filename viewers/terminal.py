"""The report as text: in colour in a terminal, plain where it is piped or logged.

The answer stands in the first two lines; what supports it follows; the next useful
command is last. The same layout serves a person at a terminal and a job that prints its
own report into a log. Whatever came from the job (exception messages, names, paths) is
shown, never interpreted: no markup, no control characters, no endless lines.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from pptrace.report import Finding, OpView, RankView, Report

__all__ = ["printable", "render", "render_plain"]

_MAX_ROWS = 24
"""Lines for the ranks; more than these are folded, then cut."""
_MAX_OPS = 8
"""Ops shown of each sort; of those only held up, half."""
_MAX_ITEMS = 8
"""Evidence, problems and other findings shown."""
_MAX_LINES = 30
"""Lines shown of one text from the job, a traceback for example."""
_MAX_CHARACTERS = 600
"""Characters shown of one line from the job."""

_SEVERITY = {"error": "bold white on red", "warning": "black on yellow"}
_ROLE = {"culprit": "bold red", "victim": "yellow"}
_GONE = ("dead", "terminated", "raised")
_OVER = ("dead", "raised", "exited")
_REASONS = {
    "unmatched": "Unmatched isends and irecvs, not posted on the other side",
    "mismatch": "Pairs whose two sides differ",
    "in call": "Ops whose call has not come back",
    "stuck": "Ops held up by something else",
}
_OTHER_REASON = "Other open ops"
_NUMBER = re.compile(r"((?<![A-Za-z0-9])r[0-9]{1,9}|[0-9]{1,9})")
"""A number in a phrase; with its letter if it is a rank."""
_ASCII = str.maketrans(
    {"→": "->", "←": "<-", "↔": "<->", "…": "...", "–": "-", "—": "-", "·": "-",
     "•": "*", "×": "x", "≥": ">=", "≤": "<=", "’": "'", "“": '"', "”": '"'}
)  # fmt: skip


def render(report: Report, console: Console) -> None:
    """Print ``report`` to ``console``, wrapped to its width.

    Colour, width and encoding are the console's; with an encoding that is not Unicode,
    arrows are written ``->``.
    """
    page = _Page(report, console)
    _put_verdict(page)
    _put_ranks(page)
    _put_ops(page)
    _put_chain(page)
    _put_remedy(page)
    _put_list(page, "Problems with the input", report.problems)
    _put_next(page)


def render_plain(report: Report, width: int = 100) -> str:
    """The same as text without colour, for logs and pipes; ends with a newline."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False)
    render(report, console)
    return file.getvalue()


def printable(text: str, limit: int = _MAX_CHARACTERS) -> str:
    """One safe line: control and invisible characters escaped, the rest cut off."""
    more = len(text) - limit
    if more > 0:
        text = text[:limit]
    if not text.isprintable():
        text = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
        )
    return f"{text}… ({more} characters more)" if more > 0 else text


class _Page:
    """Where lines are put: knows the width, the encoding and who is to blame."""

    def __init__(self, report: Report, console: Console) -> None:
        self.report = report
        self.console = console
        self.width = max(20, console.width)
        self._ascii = console.options.ascii_only
        verdict = report.verdict
        self._roles = dict.fromkeys(verdict.victims if verdict else (), "victim")
        self._roles |= dict.fromkeys(verdict.culprits if verdict else (), "culprit")

    def text(self, *parts: str | tuple[str, str]) -> Text:
        """Safe text from pieces, each plain or with a style; r0 in its role's colour."""
        made = Text()
        for part in parts:
            piece, style = (part, "") if isinstance(part, str) else part
            safe = printable(piece)
            made.append(safe.translate(_ASCII) if self._ascii else safe, style)
        for found in re.finditer(r"\br(\d{1,7})\b", made.plain):
            role = self._roles.get(int(found[1]))
            if role:
                made.stylize(_ROLE[role], *found.span())
        return made

    def put(self, lead: Text | str, body: Text | str = "") -> None:
        """A line; ``body`` wraps beside ``lead`` and keeps its indent."""
        lead = Text(lead) if isinstance(lead, str) else lead
        body = Text(body) if isinstance(body, str) else body
        indent = lead.cell_len
        if indent > self.width // 2:
            lead, body, indent = Text(), Text.assemble(lead, body), 4
        lines = body.wrap(self.console, self.width - indent, overflow="fold")
        for number, line in enumerate(lines or [Text()]):
            line.rstrip()
            shown = lead if number == 0 else Text(" " * indent)
            self._print(Text.assemble(shown, line))

    def put_whole(self, text: Text) -> None:
        """A line to be copied: never wrapped by us."""
        self._print(text)

    def heading(self, title: str) -> None:
        """An empty line and the title of a section."""
        self._print(Text())
        self.put("", Text(title, "bold underline"))

    def _print(self, text: Text) -> None:
        text.rstrip()
        self.console.print(
            text, highlight=False, no_wrap=True, overflow="ignore", crop=False
        )


# -- verdict -----------------------------------------------------------------------


def _put_verdict(page: _Page) -> None:
    report, verdict = page.report, page.report.verdict
    origin = "pptrace: " if report.trigger else ""
    if verdict is None:
        page.put("", page.text(origin, ("OK", "bold white on green"), " no finding"))
        here = sum(rank.state != "missing" for rank in report.ranks)
        page.put("", f"Nothing is wrong in the records of {_count(here, 'rank')}.")
    else:
        page.put("", page.text(origin, *_title(verdict)))
        for line in _lines(verdict.sentence):
            page.put("", _bold(page.text(line)))
        _put_bullets(page, verdict.evidence)
    parts = [f"run {report.run}" if report.run else "", report.created, report.trigger]
    parts.insert(1, f"{report.world_size} ranks")
    page.put("", page.text((" · ".join(filter(None, parts)), "dim")))
    others = report.findings[1:]
    if others:
        page.heading("Also found")
        for finding in others[:_MAX_ITEMS]:
            page.put("  ", page.text(*_title(finding)))
            for line in _lines(finding.sentence):
                page.put("    ", page.text(line))
        _put_more(page, len(others) - _MAX_ITEMS, "findings")


def _title(finding: Finding) -> Iterable[str | tuple[str, str]]:
    """``ERROR PPT002 transport split: culprit r0, victims r1-r3`` in styles."""
    style = _SEVERITY.get(finding.severity, "black on cyan")
    yield (finding.severity.upper(), style)
    yield (f" {finding.code} {finding.name}", "bold")
    roles = (("culprit", finding.culprits), ("victim", finding.victims))
    separator = ": "
    for role, ranks in roles:
        if ranks:
            yield separator + _plural(role, len(ranks)) + " "
            yield (_ranks(ranks), _ROLE[role])
            separator = ", "


# -- ranks -------------------------------------------------------------------------


def _put_ranks(page: _Page) -> None:
    ranks = page.report.ranks
    if not ranks:
        return
    page.heading("What each rank is doing")
    are_known = any(rank.state != "unknown" for rank in ranks)
    if not are_known:
        page.put("  ", page.text(("their processes cannot be seen from here", "dim")))
    rows = _fold(ranks)
    shown = _pick(rows)
    names = [_ranks([r.rank for r in row]) for row in shown]
    roles = max(len(row[0].role) for row in shown)
    states = max(len(row[0].state) for row in shown) if are_known else 0
    name_width = max(map(len, names))
    for row, name in zip(shown, names, strict=True):
        first = row[0]
        style = _ROLE.get(first.role, "")
        gone = "bold red" if first.state in _GONE else ""
        state = first.state.ljust(states) + "  " if states else ""
        role = first.role.ljust(roles) + "  " if roles else ""
        lead = page.text(
            "  ", (name.ljust(name_width) + "  ", style), (role, style), (state, gone)
        )
        page.put(lead, _rank_body(page, row))
    _put_more(page, sum(map(len, rows)) - sum(map(len, shown)), "ranks")


def _rank_body(page: _Page, row: Sequence[RankView]) -> Text:
    """What the ranks of a row are doing, since when, and their details."""
    first = row[0]
    since = [r.since_s for r in row if r.since_s is not None]
    lasting = ""
    if since:
        is_over = first.state in _OVER
        lasting = f", {_span(since)} ago" if is_over else f" for {_span(since)}"
    body = page.text(_merge([r.doing for r in row]), (lasting, "bold"))
    if page.width >= 80 or first.state in _GONE:
        body.append_text(page.text((_rank_details(page, row), "dim")))
    return body


def _rank_details(page: _Page, row: Sequence[RankView]) -> str:
    first = row[0]
    parts = []
    stages = sorted({stage for r in row for stage in r.stages})
    if stages:
        parts.append(f"{_plural('stage', len(stages))} {_numbers(stages)}")
    steps = sorted({r.step for r in row if r.step is not None})
    if steps:
        parts.append(f"{_plural('step', len(steps))} {_numbers(steps)}")
    if len(row) == 1 and first.progress:
        parts.append(first.progress)
    pending = sum(r.pending for r in row)
    if pending:
        parts.append(f"{_count(pending, 'op')} open")
    ages = [r.last_record_s for r in row if r.last_record_s is not None]
    since = [r.since_s for r in row if r.since_s is not None]
    if ages and first.state != "alive" and (not since or _span(ages) != _span(since)):
        parts.append(f"last record {_span(ages)} ago")
    if len(row) == 1 and first.pid and (page.width >= 120 or first.state in _GONE):
        parts.append(f"pid {first.pid}" + (f" on {first.host}" if first.host else ""))
    return "".join(f" · {part}" for part in parts)


def _fold(ranks: Sequence[RankView]) -> list[list[RankView]]:
    """Rows of alike ranks: every rank its own if they fit, else the finest that do."""
    rows = [[rank] for rank in ranks]
    for loose in (False, True):
        if len(rows) <= _MAX_ROWS:
            break
        groups: dict[tuple[str, str, str], list[RankView]] = {}
        for rank in ranks:
            key = (rank.role, rank.state, _alike(rank, loose=loose))
            groups.setdefault(key, []).append(rank)
        rows = list(groups.values())
    return rows


def _alike(rank: RankView, *, loose: bool) -> str:
    """``doing`` with what may differ taken out: ranks relative to this one, or all."""

    def replace(found: re.Match[str]) -> str:
        is_rank, number = found[0].startswith("r"), int(found[0].lstrip("r"))
        if is_rank:
            return "r#" if loose else f"r{number - rank.rank:+d}"
        is_stage = rank.doing[: found.start()].endswith("stage ")
        return "#" if loose or is_stage else found[0]

    return _NUMBER.sub(replace, rank.doing)


def _merge(texts: Sequence[str]) -> str:
    """Alike phrases as one: numbers that differ become ``r3-r62`` or ``0-7``."""
    if len(set(texts)) == 1:
        return texts[0]
    pieces = _NUMBER.split(texts[0])
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    for place, column in enumerate(columns):
        numbers = sorted({int(number.lstrip("r")) for number in column})
        is_rank = column[0].startswith("r")
        pieces[2 * place + 1] = _ranks(numbers) if is_rank else _numbers(numbers)
    return "".join(pieces)


def _pick(rows: list[list[RankView]]) -> list[list[RankView]]:
    """At most `_MAX_ROWS` rows, in order; those with a role before those without."""
    importance = {"culprit": 0, "victim": 1}
    order = sorted(
        range(len(rows)), key=lambda i: (importance.get(rows[i][0].role, 2), i)
    )
    return [rows[i] for i in sorted(order[:_MAX_ROWS])]


# -- ops ---------------------------------------------------------------------------


def _put_ops(page: _Page) -> None:
    sorts: dict[str, list[OpView]] = {}
    for op in page.report.pending:
        title = _REASONS.get(op.reason, _OTHER_REASON)
        sorts.setdefault(title, []).append(op)
    for title in (*_REASONS.values(), _OTHER_REASON):
        ops = sorts.get(title, [])
        if not ops:
            continue
        page.heading(f"{title} ({len(ops)})")
        limit = _MAX_OPS // 2 if ops[0].reason == "stuck" else _MAX_OPS
        shown = [(_op_cells(op), op) for op in ops[:limit]]
        columns = zip(*(cells for cells, _ in shown), strict=True)
        widths = [max(map(len, column)) for column in columns]
        for cells, op in shown:
            name, *rest = (c.ljust(w) for c, w in zip(cells, widths, strict=True))
            page.put(page.text("  ", (name, "bold"), "  "), page.text("  ".join(rest)))
            page.put("      ", page.text((_op_details(op), "dim")))
        _put_more(page, len(ops) - limit, "(all are in the report's --json)")


def _op_cells(op: OpView) -> tuple[str, ...]:
    arrow = "→" if op.direction == "isend" else "←"
    peer = f"r{op.peer}" if op.peer >= 0 else "any rank"
    payload = f"{op.dtype}[{','.join(map(str, op.shape))}]" if op.dtype else ""
    return (
        printable(f"{op.direction} {op.label}", 60),
        f"r{op.rank}{arrow}{peer}",
        "" if op.age_s is None else _duration(op.age_s),
        f"stage {'?' if op.stage is None else op.stage}",
        f"microbatch {'?' if op.microbatch is None else op.microbatch}",
        printable(payload, 60) + (f" tensor {op.tensor_index}" * (op.tensor_index > 0)),
    )


def _op_details(op: OpView) -> str:
    parts = []
    if op.coalesced or len(op.batch_ops) > 1:
        ops = [printable(each, 60) for each in op.batch_ops[:6]]
        more = len(op.batch_ops) - len(ops)
        ops += [f"{more} more"] if more else []
        parts.append(f"batch {op.batch} {{{', '.join(ops)}}}")
        parts[0] += "" if op.coalesced else " issued one by one"
    else:
        parts.append("single op")
    whose = "pair's" if op.transport == "pair" else "group's"
    _, _, numbering = op.edge.partition(" (")
    group = numbering.removesuffix(")") or (op.group and f"group {op.group}")
    parts.append(f"on the {whose} communicator" + (f", {group}" if group else ""))
    parts.append(f"k={op.k}")
    parts.append(f"{op.nbytes:,} bytes")
    parts += [f"desc {op.desc}"] if op.desc else []
    parts += [] if op.step is None else [f"step {op.step}"]
    parts += [op.detail] if op.detail else []
    return ", ".join(printable(part, 300) for part in parts)


# -- chain, remedy, next -----------------------------------------------------------


def _put_chain(page: _Page) -> None:
    report = page.report
    chain = list(report.chain) or [
        edge.why
        if edge.why.startswith(f"r{edge.waiter} ")
        else f"r{edge.waiter} waits for r{edge.holder}: {edge.why}"
        for edge in report.waits
    ]
    if not chain:
        return
    page.heading("Who waits for whom")
    cut = max(0, len(chain) - 12)
    for number, link in enumerate(chain):
        if number == 4 and cut:
            page.put("  ", page.text((f"… {cut} more links …", "dim")))
        if 4 <= number < 4 + cut:
            continue
        page.put("  ", page.text(link))


def _put_remedy(page: _Page) -> None:
    findings = [f for f in page.report.findings if f.remedy]
    if not findings:
        return
    page.heading("What to do")
    said: set[str] = set()
    for finding in findings[:3]:
        fresh = [r for r in finding.remedy if r not in said]
        said.update(fresh)
        if fresh and finding is not page.report.verdict:
            page.put("  ", page.text((f"{finding.code} {finding.name}:", "bold")))
        _put_bullets(page, fresh)


def _put_list(page: _Page, title: str, items: Sequence[str]) -> None:
    if items:
        page.heading(f"{title} ({len(items)})")
        _put_bullets(page, items)


def _put_next(page: _Page) -> None:
    report, verdict = page.report, page.report.verdict
    commands = []
    if report.run:
        folder = shlex.quote(report.run)
        commands.append(("all ranks on one time axis", f"pptrace trace {folder}"))
    if verdict is not None:
        means = f"what {verdict.code} means"
        commands.append((means, f"pptrace explain {verdict.code}"))
    if not commands:
        return
    page.heading("Next")
    width = max(len(what) for what, _ in commands) + 3
    for what, command in commands:
        lead = page.text("  ", f"{what}:".ljust(width))
        if lead.cell_len + cell_len(command) > page.width:
            page.put(lead)
            lead = Text("    ")
        page.put_whole(lead.append_text(page.text((command, "bold"))))


# -- pieces ------------------------------------------------------------------------


def _put_bullets(page: _Page, items: Sequence[str]) -> None:
    bullet = page.text("  • ")
    for item in items[:_MAX_ITEMS]:
        for number, line in enumerate(_lines(item)):
            text = line.lstrip(" ")
            inner = " " * min(len(line) - len(text), page.width // 4)
            start = Text("    ") if number else bullet
            page.put(Text.assemble(start, inner), page.text(text))
    _put_more(page, len(items) - _MAX_ITEMS, "")


def _put_more(page: _Page, count: int, what: str) -> None:
    if count > 0:
        page.put("  ", page.text((f"and {count:,} more {what}", "dim")))


def _lines(text: str) -> list[str]:
    """The lines of a text from the job; of a long one the beginning and the end."""
    lines = text.expandtabs(4).splitlines() or [""]
    cut = len(lines) - _MAX_LINES
    if cut <= 0:
        return lines
    return [*lines[:4], f"… {cut} lines more …", *lines[4 + cut :]]


def _bold(text: Text) -> Text:
    text.stylize("bold")
    return text


def _ranks(ranks: Sequence[int]) -> str:
    """``r0, r4-r63``; of many separate ones the first few and the count."""
    runs = _runs(ranks)
    parts = [f"r{a}" if a == b else f"r{a}-r{b}" for a, b in runs[:6]]
    if len(runs) > 6:
        return ", ".join(parts[:4]) + f", … ({len(ranks)} ranks)"
    return ", ".join(parts)


def _numbers(numbers: Sequence[int]) -> str:
    """``0-3``, ``1, 3``; of many separate ones only the extremes."""
    runs = _runs(numbers)
    if len(runs) > 3:
        return f"{numbers[0]}…{numbers[-1]}"
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _span(seconds: Sequence[float]) -> str:
    low, high = _duration(min(seconds)), _duration(max(seconds))
    return high if low == high else f"{low} to {high}"


def _duration(seconds: float) -> str:
    if not 0 <= seconds < 1e10:
        return "? s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 1:
        return f"{minutes} min {rest} s"
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} days"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"


def _count(number: int, noun: str) -> str:
    return f"{number} {_plural(noun, number)}"
