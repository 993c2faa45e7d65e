"""Programs as text, and the known hangs written as programs with their verdicts."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from pptrace.checker import check_plan
from pptrace.errors import InputError
from pptrace.plan import Batch, Instruction, Op, Wait
from pptrace.programs import load, parse, write
from pptrace.records import Pass
from pptrace.report import Report
from pptrace.statements import (
    Block,
    Collect,
    Compute,
    Listen,
    OpText,
    Post,
    Program,
    ProgramError,
    Statement,
    Tell,
)

__all__: list[str] = []

_CASES = Path(__file__).parent / "cases"
_NAMES = sorted(path.stem for path in _CASES.glob("*.pp"))
_OTHERWISE_ASYNC = {"e1", "i1"}
"""Where hosts go on, the collective is queued behind the receive that never comes: what
the boxes show is another order of the two."""
_ABOUT_NUMBERS = {"D2"}
"""With other rank numbers this is another mistake."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """A verdict file: the code, who is to blame, and what the report must name."""

    code: str
    culprits: frozenset[int] | None
    """None: nobody in particular."""
    op: str

    @classmethod
    def of(cls, name: str) -> Expected:
        """Read the file of a case."""
        lines = (_CASES / f"{name}.expected").read_text("utf-8").splitlines()
        facts = dict(line.split(": ", 1) for line in lines)
        who = facts.get("culprits", "undetermined")
        culprits = None if who == "undetermined" else frozenset(map(int, who.split()))
        return cls(facts["code"], culprits, facts.get("op", ""))

    def assert_met(self, report: Report) -> None:
        """The verdict is the expected one."""
        verdict = report.verdict
        if self.code == "none":
            assert verdict is None, verdict
            return
        assert verdict is not None
        assert verdict.code == self.code, verdict
        if self.culprits is not None:
            assert set(verdict.culprits) == self.culprits, verdict
        assert self.op in "\n".join([verdict.sentence, *verdict.evidence])


def _check(program: Program, host: str = "blocking") -> Report:
    return check_plan(
        program.plan(),
        host=program.host or host,
        preconnect=program.preconnected,
    ).report


# -- the known hangs -----------------------------------------------------------------


@pytest.mark.parametrize("name", _NAMES)
def test_every_case_gets_its_verdict(name: str) -> None:
    """Code, culprit and op are those written down by hand; hosts block as on gloo."""
    Expected.of(name).assert_met(_check(load(_CASES / f"{name}.pp")))


@pytest.mark.parametrize("name", sorted(set(_NAMES) - _OTHERWISE_ASYNC))
def test_every_case_gets_its_verdict_where_hosts_go_on(name: str) -> None:
    """The same on CUDA, where ``wait()`` returns at once."""
    Expected.of(name).assert_met(_check(load(_CASES / f"{name}.pp"), host="async"))


@pytest.mark.parametrize("name", _NAMES)
def test_case_files_are_written_as_they_read(name: str) -> None:
    """What `write` makes of a parsed file is the file."""
    text = (_CASES / f"{name}.pp").read_text("utf-8")
    assert write(parse(text)) == text


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", _NAMES)
def test_a_case_is_not_known_by_its_looks(name: str, seed: int) -> None:
    """Other ranks, other labels and two ranks more: the same code."""
    program = load(_CASES / f"{name}.pp")
    disguised = _disguise(program, random.Random(seed))
    report = _check(disguised)
    code = report.verdict.code if report.verdict else "none"
    assert code == Expected.of(name).code, write(disguised)


def _disguise(program: Program, chance: random.Random) -> Program:
    """The program with its ranks permuted, words renamed, and two ranks that chat."""
    size = program.world_size + 2
    places = list(range(size))
    if program.name[:2] not in _ABOUT_NUMBERS:
        chance.shuffle(places)
    one, two = places[-2:]
    ranks: dict[int, tuple[Statement, ...]] = {
        places[rank]: tuple(_move(s, places) for s in body)
        for rank, body in program.ranks.items()
    }
    chat = parse(f"r{one}: S a->{two}; R b<-{two}\nr{two}: R a<-{one}; S b->{one}")
    ranks |= chat.ranks
    groups = {
        f"{name}_": tuple(places[rank] for rank in members)
        for name, members in program.groups.items()
    }
    groups["world_"] = tuple(places[: program.world_size])  # without the two
    lines = [f"world {size}"]
    for name, members in groups.items():
        eager = " eager" if name.removesuffix("_") in program.eager else ""
        lines.append(f"group {name} = {' '.join(map(str, members))}{eager}")
    if program.host:
        lines.append(f"host {program.host}")
    sections = tuple(((rank,), body) for rank, body in sorted(ranks.items()))
    made = dataclasses.replace(program, header=tuple(lines), sections=sections)
    return parse(write(made))


def _move(statement: Any, places: list[int]) -> Any:
    if isinstance(statement, Post):
        return statement._replace(
            ops=tuple(_move_op(op, places) for op in statement.ops)
        )
    if isinstance(statement, (Tell, Listen)):
        return statement._replace(rank=places[statement.rank])
    if isinstance(statement, Collect) and statement.group:
        return statement._replace(group=f"{statement.group}_")
    if isinstance(statement, (Block, Compute)):
        return statement._replace(body=tuple(_move(s, places) for s in statement.body))
    return statement


def _move_op(op: OpText, places: list[int]) -> OpText:
    group = f"{op.group}_" if op.group else ""
    label = op.label
    if label.pass_ is Pass.UNKNOWN:
        label = dataclasses.replace(label, word=f"other_{label.word}")
    return dataclasses.replace(op, peer=places[op.peer], group=group, label=label)


# -- reading -------------------------------------------------------------------------


def _instructions(text: str, rank: int = 0) -> list[Instruction]:
    return list(parse(text).instructions(rank))


def _shown(text: str, rank: int = 0) -> list[str]:
    return [_show(instruction) for instruction in _instructions(text, rank)]


def _show(instruction: Instruction) -> str:
    if isinstance(instruction, Op):
        return instruction.text
    if isinstance(instruction, Batch):
        return repr(instruction).strip("<>")
    if isinstance(instruction, Wait):
        return f"wait {_show(instruction.on)}"  # type: ignore[arg-type]
    return str(instruction)


def test_receives_are_waited_on_before_the_next_action() -> None:
    """Two receives in a row are both posted first; sends wait until the end."""
    assert _shown("r0: S a->1; R x<-1; R y<-1; F0\nr1:") == [
        "S a->1",
        "R x<-1",
        "R y<-1",
        "wait R x<-1",
        "wait R y<-1",
        "0F0",
        "wait S a->1",
    ]


def test_named_ops_are_waited_on_where_the_program_says() -> None:
    """A name takes an op out of the default; nothing waits on it by itself."""
    assert _shown("r0: a = R x<-1; b = S y->1; F0; wait b a; c = {R z<-1}\nr1:") == [
        "R x<-1",
        "S y->1",
        "0F0",
        "wait S y->1",
        "wait R x<-1",
        "{R z<-1}",
    ]


def test_send_and_recv_block() -> None:
    """As ``dist.send`` and ``dist.recv`` do."""
    assert _shown("r0: send x->1; recv y<-1\nr1:") == [
        "S x->1",
        "wait S x->1",
        "R y<-1",
        "wait R y<-1",
    ]


def test_exit_leaves_everything_open() -> None:
    """No wait comes after it."""
    assert _shown("r0: S x->1; exit; F0\nr1:") == ["S x->1"]


def test_an_op_rides_the_first_group_that_has_both_ranks() -> None:
    """Unless it names one; without any, the world."""
    text = "group a = 0-1\ngroup b = 0-2\n"
    text += "r0: S x->1; S x->2; S x->3; S x->1 @world\nr1-3:"
    ops = [i for i in _instructions(text) if isinstance(i, Op)]
    assert [op.edge.group.name for op in ops] == ["a", "b", "world", "world"]


def test_an_exception_leaves_what_it_passes_and_is_caught() -> None:
    """Inside an action it ends the action; after the catch the program goes on."""
    text = 'r0: catch { F0 { raise ValueError "no" }; F1 }; F2\nr1:'
    names = [type(i).__name__ for i in _instructions(text)]
    assert names == ["Act", "Leave", "Caught", "Action"]
    assert "ValueError: no" in str(_instructions(text)[1])


def test_an_exception_thrown_in_is_handled_like_its_own() -> None:
    """Whoever performs an op can fail; ``catch`` catches that, too."""
    program = parse("r0: catch { S x->1; F0 }; F1\nr1:")
    instructions = program.instructions(0)
    assert isinstance(next(instructions), Op)
    caught = instructions.throw(ProgramError("RuntimeError: closed"))
    assert caught == ("RuntimeError: closed",)
    assert str(next(instructions)) == "0F1"


def test_payloads_and_arrows_have_several_forms() -> None:
    """Unicode arrows, dtypes short and long, strides; written in one form."""
    text = "r0: S F0.1→1 [float32 2x3 strides 1x2]; R 3B0←1 [bf16]\nr1:\n"
    assert write(parse(text)).splitlines()[0] == (
        "r0: S F0.1->1 [f32 2x3 strides 1x2]; R 3B0<-1 [bf16]"
    )


_EVERYTHING = """\
# everything there is
world 4 eager
group pp = 0-2
group odd = 2,0 eager
host async
preconnected

# the first
r0:
  # begins
  a = S F0->1
  {S x->1, R y<-2}
  F0
  wait a; wait
  1B3 { sleep 0.5; raise MyError "a \\"quoted\\" word" }
  step 1F1B n=4 {
    # inside
    F1
    catch { all_gather odd; b = all_reduce; wait b }
    thread { signal 1 done; wait signal 1 }
  }
r1, r3: wait signal 0 done; signal 0; barrier world; die
r2:
"""


def test_writing_is_stable() -> None:
    """What was written reads as the same program and is written the same."""
    program = parse(_EVERYTHING)
    text = write(program)
    again = parse(text)
    assert write(again) == text
    assert again.ranks == program.ranks
    assert again.groups == {"pp": (0, 1, 2), "odd": (2, 0)}
    assert program.eager == {"world", "odd"}
    for comment in ("# everything there is", "  # begins", "    # inside"):
        assert comment in text.splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file:1: there is no rank's section"),
        ("# nothing", "file:1: there is no rank's section"),
        ("r0: S x->1\nr1: R x->0", "file:2: an arrow expected, not '->'"),
        ("r0: S x->\nr1:", "file:1: the other rank expected, not the end of the line"),
        ("r0: S x 1", "file:1: an arrow expected, not '1'"),
        ("r0: {S x->1\nr1:", "file:2: ',' expected between the ops of a batch"),
        ("r0: {}", "file:1: S or R expected in a batch"),
        ("r0: F0 F1", "file:1: ';' or a new line expected before 'F1'"),
        ("r0: jump", "file:1: 'jump' is no statement"),
        ("r0: S x->0", "file:1: r0 cannot be its own peer"),
        ("r0-1: S x->1", "file:1: r1 cannot be its own peer"),
        ("r0: wait a", "file:1: nothing is called 'a' here"),
        ("r0: S x->1 @tp\nr1:", "file:1: there is no group tp"),
        ("group pp = 0-1\nr2: S x->1 @pp", "file:2: r2 is not in group pp"),
        ("group pp = 0 0\nr0:", "file:1: a rank is named twice in group pp"),
        ("group pp = 0\ngroup pp = 1\nr0:", "file:2: there is a group pp already"),
        ("world 2\nr0: S x->2", "file:2: r2 is not in a world of 2 ranks"),
        ("world 0\nr0:", "file:1: a world has from 1 to 4096 ranks"),
        ("r0:\nr0:", "file:2: r0 has a section already"),
        ("r0: S x->1 [f33 2]", r"file:1: '\[f33 2\]' is no payload"),
        ("r0: S x->1 [f32 2x3 strides 1]", "is no payload"),
        ("r0: S x->1 [f32 2", "file:1: unexpected '\\['"),
        ('r0: raise E "half', "file:1: unexpected '\"'"),
        ("r0: step { F0", "file:1: a '{' is not closed"),
        ("r0: step { F0\nr1: F0", "file:2: a '{' is not closed"),
        ("r0: sleep long", "file:1: seconds expected, not 'long'"),
        ("r0: {S x->1 @a, S x->1 @b}", "file:1: all ops of a batch have one group"),
        ("host maybe\nr0:", "file:1: async or blocking expected"),
        ("world 2 ranks\nr0:", "file:1: the line should end before 'ranks'"),
        ("hello\nr0:", "file:1: a rank expected, not 'hello'"),
        ("r3-1:", "file:1: a range of ranks goes from the lower"),
        ("r0: $", "file:1: unexpected '\\$'"),
        ("r0: signal = S x->1", "file:1: a rank expected, not '='"),
    ],
)
def test_a_malformed_program_is_one_line_with_its_place(
    text: str, message: str
) -> None:
    """File, line, what is wrong; never a traceback."""
    with pytest.raises(InputError, match=message) as caught:
        parse(text, "file")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Missing, a folder, or not text."""
    (tmp_path / "binary.pp").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.pp", ".", "binary.pp"):
        with pytest.raises(InputError, match="cannot be read"):
            load(tmp_path / name)


def test_a_cycle_through_the_queue_of_a_rank_that_waits_elsewhere() -> None:
    """The host of r0 waits for r1; what is in the cycle is its batch of before."""
    text = (
        "group pp = 0 1 2 eager\ngroup dp = 0 1 2 eager\n"
        "r0: a1 = {S x->1 @dp, R x<-2 @dp}; {S x->1 @dp, R x<-2 @dp}; S x->2 @dp;"
        " S x->1 @pp\n"
        "r1: a2 = {R x<-0 @dp, S x->2 @dp}; a3 = {R x<-0 @dp, S x->2 @dp}; wait a3\n"
        "r2: {R x<-1 @dp, S x->0 @dp}; R x<-0 @dp\n"
    )
    result = check_plan(parse(text).plan(), host="blocking")
    assert result.findings[0].code == "PPT013"
    assert result.findings[0].culprits == (0, 2)
