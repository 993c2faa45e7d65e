"""`pptrace.viewers.terminal`: what a reader of the report sees, at any width."""

from __future__ import annotations

import dataclasses
import io
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from pptrace.report import Finding, OpView, RankView, Report, WaitEdge
from pptrace.viewers.terminal import printable, render, render_plain

__all__: list[str] = []

_SENTENCE = (
    "r0 fused its isend of F1 with its irecv of B0, r1 posted a lone irecv of F1: "
    "they ride different communicators and never match, because Schedule1F1B ran 2 "
    "microbatches on 4 stages."
)
_VERDICT = Finding(
    code="PPT001",
    name="transport split",
    severity="error",
    sentence=_SENTENCE,
    culprits=(0,),
    victims=(1, 2, 3),
    evidence=("r0: batch 3 {isend F1→r1, irecv B0←r1}", "r1: irecv F1←r0, alone"),
    remedy=("use pptrace.schedules.Schedule1F1B", "or n_microbatches ≥ 4"),
)


def _rank(rank: int, doing: str, **more: object) -> RankView:
    view = RankView(rank, "alive", doing, 12.1, stages=(rank,), step=0, pending=1)
    return dataclasses.replace(view, **more)  # type: ignore[arg-type]


def _op(rank: int, direction: str, peer: int, label: str, **more: object) -> OpView:
    arrow = "→" if direction == "isend" else "←"
    view = OpView(
        rank=rank,
        direction=direction,
        peer=peer,
        edge=f"r{rank}{arrow}r{peer} (group pp=[0,1,2,3]: {rank}{arrow}{peer})",
        label=label,
        stage=rank,
        microbatch=1,
        tensor_index=0,
        shape=(4, 128, 1024),
        dtype="float32",
        nbytes=2_097_152,
        age_s=12.13,
        reason="unmatched",
        transport="group",
        coalesced=True,
        batch=3,
        batch_ops=("isend F1→r1", "irecv B0←r1"),
        k=1,
        group="pp",
        desc="fwd_send_bwd_recv",
        step=0,
    )
    return dataclasses.replace(view, **more)  # type: ignore[arg-type]


_HANG = Report(
    run="pptrace-out/20261201-141552-7",
    created="2026-12-01T14:16:12Z",
    world_size=4,
    findings=(
        _VERDICT,
        Finding("PPT030", "straggler", "note", "r2 takes 3 times as long as others."),
    ),
    ranks=(
        _rank(0, "waits for B0←r1", role="culprit"),
        _rank(1, "waits for F1←r0", role="victim"),
        _rank(2, "waits for F0←r1", role="victim"),
        _rank(3, "waits for F0←r2", role="victim", state="dead", pid=77, host="n1",
              last_record_s=300.0),
    ),
    pending=(
        _op(0, "irecv", 1, "B0", reason="stuck"),
        _op(0, "isend", 1, "F1"),
        _op(1, "irecv", 0, "F1", coalesced=False, transport="pair",
            batch_ops=("irecv F1←r0",)),
    ),
    chain=("r3 waits for r2", "r2 waits for r1", "r1 waits for r0"),
    problems=("rank00009.pptrace: is not a pptrace black box",),
)  # fmt: skip


def _joined(text: str) -> str:
    """A wrapped text as one line, for reading phrases across line ends."""
    return " ".join(text.split())


def test_the_answer_stands_in_the_first_two_lines() -> None:
    """Code, name, culprit and victims first, then the sentence."""
    first, second, *_ = render_plain(_HANG, 250).splitlines()
    assert first == "ERROR PPT001 transport split: culprit r0, victims r1-r3"
    assert second == _SENTENCE


@pytest.mark.parametrize("width", [60, 100, 160])
def test_sections_come_in_the_order_a_reader_needs_them(width: int) -> None:
    """Verdict, ranks, unmatched ops, those held up, chain, remedy, input, next."""
    text = _joined(render_plain(_HANG, width))
    landmarks = [
        "PPT001 transport split",
        "they ride different communicators",
        "What each rank is doing",
        "r0 culprit alive waits for B0←r1 for 12.1 s",
        "Unmatched isends and irecvs, not posted on the other side (2)",
        "isend F1 r0→r1 12.1 s stage 0 microbatch 1 float32[4,128,1024]",
        "batch 3 {isend F1→r1, irecv B0←r1}, on the group's communicator",
        "irecv F1 r1←r0",
        "single op, on the pair's communicator",
        "Ops held up by something else (1)",
        "irecv B0 r0←r1",
        "Who waits for whom",
        "r3 waits for r2",
        "What to do",
        "or n_microbatches ≥ 4",
        "Problems with the input (1)",
        "rank00009.pptrace",
        "pptrace trace pptrace-out/20261201-141552-7",
        "pptrace explain PPT001",
    ]
    at = 0
    for landmark in landmarks:
        found = text.find(landmark, at)
        assert found >= 0, f"{landmark!r} is missing or out of order"
        at = found


@pytest.mark.parametrize("width", [40, 60, 100, 160])
def test_lines_keep_to_the_width(width: int) -> None:
    """Nothing sticks out but the commands, which must stay whole to be copied."""
    for line in render_plain(_HANG, width).splitlines():
        assert cell_len(line) <= width or "pptrace " in line


def test_a_dead_rank_shows_what_is_left_of_it() -> None:
    """Its last record's age, pid and host are there even on a narrow screen."""
    text = _joined(render_plain(_HANG, 60))
    assert "r3 victim dead" in text
    assert "last record 5 min 0 s ago · pid 77 on n1" in text


def test_nothing_wrong_says_so() -> None:
    """A report without findings starts with OK."""
    report = Report("run", "now", 2, (), (_rank(0, "done"), _rank(1, "done")))
    first, second, *_ = render_plain(report).splitlines()
    assert first == "OK no finding"
    assert second == "Nothing is wrong in the records of 2 ranks."


def test_a_report_printed_by_the_job_names_its_author() -> None:
    """In a job's log the first line says who speaks, and why now."""
    report = dataclasses.replace(_HANG, trigger="no progress for 10 s")
    text = render_plain(report)
    assert text.startswith("pptrace: ERROR PPT001")
    assert "no progress for 10 s" in text


def test_waits_stand_in_for_a_chain() -> None:
    """Without a chain in words, the edges are shown, each as one sentence."""
    waits = (WaitEdge(1, 0, "irecv F1←r0"), WaitEdge(2, 1, "r2 waits for F1←r1"))
    text = render_plain(dataclasses.replace(_HANG, chain=(), waits=waits))
    assert "  r1 waits for r0: irecv F1←r0\n  r2 waits for F1←r1\n" in text


def test_states_that_cannot_be_known_are_said_once() -> None:
    """In a directory from elsewhere no column repeats that nobody knows."""
    ranks = tuple(dataclasses.replace(r, state="unknown") for r in _HANG.ranks)
    text = render_plain(dataclasses.replace(_HANG, ranks=ranks))
    assert "unknown" not in text
    assert text.count("their processes cannot be seen from here") == 1
    assert "  r0  culprit  waits for B0←r1 for 12.1 s" in text


def test_what_is_over_is_so_long_ago() -> None:
    """A rank that raised did so 3 s ago; it does not raise for 3 s."""
    ranks = (_rank(0, "raised ValueError", state="raised", since_s=3.0),)
    text = render_plain(dataclasses.replace(_HANG, ranks=ranks))
    assert "raised ValueError, 3.0 s ago" in text


def _many(ranks: int) -> Report:
    views = [_rank(0, "waits for B0←r1", role="culprit")]
    views += [
        _rank(r, f"waits for F0←r{r - 1} in stage {r}", role="victim")
        for r in range(1, ranks)
    ]
    ops = tuple(_op(r, "irecv", r - 1, "F0", reason="stuck") for r in range(1, ranks))
    chain = tuple(f"r{r} waits for r{r - 1}" for r in range(ranks - 1, 0, -1))
    return dataclasses.replace(
        _HANG, world_size=ranks, ranks=tuple(views), pending=ops, chain=chain
    )


def test_alike_ranks_are_folded() -> None:
    """Sixty-three ranks that wait for their neighbours take one row."""
    text = render_plain(_many(64), 160)
    assert (
        "r1-r63  victim   alive  waits for F0←r0-r62 in stage 1-63 for 12.1 s" in text
    )
    assert "(63)" in text
    assert "and 59 more" in text


def test_few_ranks_are_not_folded() -> None:
    """Where all fit, every rank has its own row."""
    text = render_plain(_many(16), 160)
    assert "r15  " in text
    assert "waits for F0←r14 in stage 15" in text


def test_thousands_of_unlike_ranks_stay_readable() -> None:
    """However many ranks, a page or two; the culprit among them."""
    words = ["".join(w) for w in itertools.product("abcdefgh", repeat=4)]
    views = [_rank(r, f"raised {word}") for r, word in enumerate(words)]
    views[3000] = _rank(3000, "in isend x→r1", role="culprit")
    report = dataclasses.replace(_many(4096), ranks=tuple(views))
    lines = render_plain(report, 100).splitlines()
    assert len(lines) < 120
    assert any(line.lstrip().startswith("r3000  culprit") for line in lines)
    assert "  and 4,072 more ranks" in lines


def test_microbatches_are_folded_where_ranks_alone_do_not_help() -> None:
    """Ranks that wait for different microbatches share a row with a range."""
    views = [_rank(r, f"waits for F{200 - r}←r{r + 1}") for r in range(100)]
    text = render_plain(dataclasses.replace(_HANG, ranks=tuple(views)), 160)
    assert "r0-r99  alive  waits for F101-200←r1-r100" in text


def test_what_comes_from_the_job_is_shown_not_obeyed() -> None:
    """Markup, escapes and line breaks of an exception do nothing to the terminal."""
    evil = "[red]x[/red] \x1b[2J\x1b]0;title\x07 \u202edrow \r\x00\x9b31m"
    finding = dataclasses.replace(_VERDICT, sentence=evil, name=evil, evidence=(evil,))
    report = dataclasses.replace(
        _HANG,
        run=evil,
        trigger=evil,
        findings=(finding, finding),
        ranks=(_rank(0, evil, state=evil, host=evil, role=evil),),
        pending=(_op(0, evil, 1, evil, detail=evil, dtype=evil, desc=evil),),
        chain=(evil,),
        problems=(evil,),
    )
    text = render_plain(report)
    assert "[red]x[/red] \\x1b[2J\\x1b]0;title\\x07 \\u202edrow" in _joined(text)
    assert all(c.isprintable() or c == "\n" for c in text)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80), st.integers(20, 200))
def test_any_text_at_any_width_stays_within_its_lines(text: str, width: int) -> None:
    """Whatever a job calls things, output is printable and keeps to the width."""
    report = dataclasses.replace(
        _HANG,
        run="",
        findings=(dataclasses.replace(_VERDICT, code="", sentence=text),),
        ranks=(_rank(0, text), _rank(1, text * 3, role=text[:10])),
        pending=(_op(0, "isend", 1, text, desc=text),),
        problems=(text,),
    )
    shown = render_plain(report, width)
    for line in shown.splitlines():
        assert line.isprintable()
        assert cell_len(line) <= width or "pptrace " in line


def test_long_texts_are_cut_and_say_so() -> None:
    """A message of a megabyte, or of a thousand lines, does not bury the rest."""
    trace = (
        "Traceback\n" + "\n".join(f"  line {i}" for i in range(1000)) + "\nTypeError"
    )
    finding = dataclasses.replace(
        _VERDICT, evidence=("m" * 1_000_000, trace), sentence="s" * 5000
    )
    text = render_plain(dataclasses.replace(_HANG, findings=(finding,)))
    assert len(text.splitlines()) < 110
    assert "(999400 characters more)" in _joined(text)
    assert "Traceback" in text
    assert "TypeError" in text
    assert "… 972 lines more …" in text


def test_code_in_a_remedy_keeps_its_lines() -> None:
    """What is to be pasted keeps its line breaks and indents."""
    remedy = ("use:\n    with x:\n        y()",)
    finding = dataclasses.replace(_VERDICT, remedy=remedy)
    text = render_plain(dataclasses.replace(_HANG, findings=(finding,)))
    assert "  • use:\n        with x:\n            y()\n" in text


def test_a_remedy_common_to_findings_is_said_once() -> None:
    """Two findings with the same way out do not repeat it."""
    twin = dataclasses.replace(_VERDICT, code="PPT002")
    text = render_plain(dataclasses.replace(_HANG, findings=(_VERDICT, twin)))
    assert text.count("use pptrace.schedules.Schedule1F1B") == 1


def test_printable_leaves_good_text_alone() -> None:
    """Letters of any script pass; only what cannot be seen is escaped."""
    assert printable("größe 階段 F2→r1") == "größe 階段 F2→r1"
    assert printable("a\tb") == "a\\tb"
    assert printable("abcdef", 3) == "abc… (3 characters more)"


def _render(report: Report, **options: object) -> str:
    file = io.StringIO()
    console = Console(file=file, width=100, **options)  # type: ignore[arg-type]
    render(report, console)
    return file.getvalue()


def test_colour_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal there is colour, and without it the very same text."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = _render(_HANG, force_terminal=True, color_system="standard")
    assert "\x1b[" in coloured
    assert "\x1b[33mr1\x1b[0m waits for \x1b[1;31mr0\x1b[0m" in coloured
    plain = render_plain(_HANG, 100)
    assert "\x1b" not in plain
    console = Console(file=io.StringIO(), width=100, record=True)
    render(_HANG, console)
    assert console.export_text() == plain


def test_an_ascii_terminal_gets_ascii() -> None:
    """Where the encoding has no arrows they are written with two signs."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    render(_HANG, Console(file=file, width=100))
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "isend F1  r0->r1" in text
    assert "n_microbatches >= 4" in text
