"""Programs as text: what each rank of a job does, written down in a few lines.

`parse` reads the format that ``docs/programs.md`` describes and `write` writes it; what
`write` wrote reads back as the same program and is written as the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pptrace.errors import InputError
from pptrace.records import Direction, Pass, Signature, format_ranks
from pptrace.statements import (
    COLLECTIVES,
    DEFAULT,
    WORLD,
    Block,
    Collect,
    Comment,
    Compute,
    Kill,
    Label,
    Listen,
    OpText,
    Pause,
    Post,
    Program,
    Quit,
    Statement,
    Tell,
    Throw,
    WaitFor,
)

__all__ = ["load", "parse", "write"]

_DTYPES = {
    "bool": "bool",
    "u8": "uint8",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
}
_SHORT = {long: short for short, long in _DTYPES.items()}
_WIDTH = 88
_MAX_RANKS = 4096
_BLOCKS = ("catch", "thread", "step", "eval")
_HEADER = ("world", "group", "host", "preconnected")
_WORDS = (
    "S, R, send, recv, {...}, wait, F0 (or B, I, W), signal, sleep, raise, catch, thread,"
    f" step, eval, die, exit, {', '.join(COLLECTIVES)}"
)


def load(path: str | Path) -> Program:
    """Read a program from a file.

    Raises:
        InputError: it cannot be read, or is malformed; names the line.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, f"cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, file: str = "program") -> Program:
    """Read a program from its text; ``file`` is its name in errors.

    Raises:
        InputError: it is malformed; names file and line.
    """
    return _Parser(text, file).program()


def write(program: Program) -> str:
    """A program in the format `parse` reads; comments on lines of their own are kept."""
    lines = [*program.header]
    if lines and program.sections:
        lines.append("")
    for ranks, body in program.sections:
        lines += _section(ranks, body)
    return "\n".join(lines) + "\n"


# -- reading: tokens -----------------------------------------------------------------

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\ufeff]+)
  | (?P<comment>\#[^\n]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<payload>\[[^\]\n]*\])
  | (?P<arrow>->|→|<-|←)
  | (?P<mark>[\n;{},=:])
  | (?P<word>(?:(?!->|<-)[\w.@+-])+)
    """,
    re.VERBOSE,
)
_LABEL = re.compile(r"(?:(\d+)?([FBIW])(\d+)|([A-Za-z_][\w-]*))(?:\.(\d+))?")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SCHEDULE = re.compile(r"\w[\w.]*")
_PEER = re.compile(r"r?(\d{1,6})")
_RANKS = re.compile(r"r?\d+(-\d+)?")


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def _tokens(text: str, error: Callable[[int, str], InputError]) -> Iterator[_Token]:
    line, at = 1, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise error(line, f"unexpected {text[at]!r}")
        at = match.end()
        kind = match.lastgroup or ""
        if kind != "space":
            yield _Token(kind, match[0], line)
        line += match[0] == "\n"
    yield _Token("end", "", line)


class _Parser:
    """Reads one program, from left to right."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._tokens = list(_tokens(text, self._error_at))
        self._at = 0
        self._header: list[str] = []
        self._world = 0
        self._groups: dict[str, tuple[int, ...]] = {}
        self._eager: set[str] = set()
        self._host = ""
        self._is_preconnected = False
        self._names: set[str] = set()
        self._checks: list[tuple[int, tuple[int, ...], Statement]] = []

    # errors

    def _error_at(self, line: int, reason: str, advice: str = "") -> InputError:
        return InputError(f"{self._file}:{line}", reason, advice)

    def _error(self, reason: str, advice: str = "") -> InputError:
        return self._error_at(self._next.line, reason, advice)

    # tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def _accept(self, *texts: str) -> bool:
        if self._next.text in texts and self._next.kind in ("mark", "word", "arrow"):
            self._at += 1
            return True
        return False

    def _expect(self, text: str, after: str) -> None:
        if not self._accept(text):
            raise self._error(f"{text!r} expected {after}, not {self._shown}")

    @property
    def _shown(self) -> str:
        token = self._next
        if token.kind == "end":
            return "the end of the file"
        return "the end of the line" if token.text == "\n" else repr(token.text)

    def _word(self, what: str, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.fullmatch(self._next.text)
        if self._next.kind != "word" or match is None:
            raise self._error(f"{what} expected, not {self._shown}")
        self._at += 1
        return match

    def _is_line_over(self) -> bool:
        return self._next.kind in ("end", "comment") or self._next.text in ("\n", ";")

    # program

    def program(self) -> Program:
        sections: list[tuple[tuple[int, ...], tuple[Statement, ...]]] = []
        ranks: dict[int, tuple[Statement, ...]] = {}
        self._read_header()
        while self._next.kind != "end":
            line = self._next.line
            own = self._rank_list()
            self._expect(":", "after the ranks of a section")
            for rank in own:
                if rank in ranks:
                    raise self._error_at(line, f"r{rank} has a section already")
            self._names = set()
            body = tuple(self._body(own, in_block=False))
            sections.append((own, body))
            ranks.update(dict.fromkeys(own, body))
        self._finish(ranks)
        return Program(
            name=self._title(),
            header=tuple(self._header),
            world_size=self._world,
            groups=self._groups,
            eager=frozenset(self._eager),
            ranks=ranks,
            sections=tuple(sections),
            host=self._host,
            preconnected=self._is_preconnected,
        )

    def _title(self) -> str:
        """The first comment, else the file's name."""
        for line in self._header:
            if line.startswith("#") and line.strip("# "):
                return line.strip("# ")
        return Path(self._file).stem

    def _finish(self, ranks: dict[int, tuple[Statement, ...]]) -> None:
        """Check what can only be known at the end: which ranks and groups there are."""
        if not ranks:
            raise self._error("there is no rank's section", "such as: r0: S x->1")
        used = {*ranks, *(r for group in self._groups.values() for r in group)}
        for line, own, statement in self._checks:
            for op in statement.ops if isinstance(statement, Post) else ():
                used.add(op.peer)
                self._check_op(line, own, op)
            if isinstance(statement, Collect) and statement.group:
                self._check_group(line, own, statement.group)
            if isinstance(statement, (Tell, Listen)):
                used.add(statement.rank)
        needed = max(used) + 1
        if self._world and needed > self._world:
            raise self._error(f"r{needed - 1} is not in a world of {self._world} ranks")
        self._world = self._world or needed

    def _check_op(self, line: int, own: tuple[int, ...], op: OpText) -> None:
        if op.peer in own:
            raise self._error_at(line, f"r{op.peer} cannot be its own peer")
        if op.group:
            self._check_group(line, (*own, op.peer), op.group)

    def _check_group(self, line: int, ranks: tuple[int, ...], name: str) -> None:
        if name == WORLD:
            return
        if name not in self._groups:
            known = ", ".join([*self._groups, WORLD])
            raise self._error_at(line, f"there is no group {name}", f"groups: {known}")
        for rank in ranks:
            if rank not in self._groups[name]:
                raise self._error_at(line, f"r{rank} is not in group {name}")

    # header

    def _read_header(self) -> None:
        while True:
            token = self._next
            if token.text == "\n":
                if self._header and self._header[-1]:
                    self._header.append("")
            elif token.kind == "comment":
                self._header.append(token.text.rstrip())
                self._at += 1
            elif token.kind == "word" and token.text in _HEADER:
                self._header.append(getattr(self, f"_read_{token.text}")())
                if not self._is_line_over():
                    raise self._error(f"the line should end before {self._shown}")
            else:
                break
            if self._next.text == "\n":
                self._at += 1
        while self._header and not self._header[-1]:
            self._header.pop()

    def _read_world(self) -> str:
        self._at += 1
        size = ""
        if self._next.kind == "word" and self._next.text != "eager":
            size = self._word("a number of ranks", re.compile(r"\d{1,6}"))[0]
            if not 1 <= int(size) <= _MAX_RANKS:
                raise self._error(f"a world has from 1 to {_MAX_RANKS} ranks")
            self._world = int(size)
        eager = self._accept("eager")
        if eager:
            self._eager.add(WORLD)
        return " ".join(filter(None, ("world", size, "eager" if eager else "")))

    def _read_group(self) -> str:
        self._at += 1
        name = self._word("a group's name", _NAME)[0]
        if name in self._groups or name == WORLD:
            raise self._error(f"there is a group {name} already")
        self._expect("=", "after a group's name")
        ranks = self._rank_list()
        if len(set(ranks)) < len(ranks):
            raise self._error(f"a rank is named twice in group {name}")
        self._groups[name] = ranks
        eager = self._accept("eager")
        if eager:
            self._eager.add(name)
        return f"group {name} = {format_ranks(ranks)}" + (" eager" if eager else "")

    def _read_host(self) -> str:
        self._at += 1
        self._host = self._word("async or blocking", re.compile("async|blocking"))[0]
        return f"host {self._host}"

    def _read_preconnected(self) -> str:
        self._at += 1
        self._is_preconnected = True
        return "preconnected"

    def _rank_list(self) -> tuple[int, ...]:
        """``0 1 2``, ``0-3``, ``r0, r2-4``."""
        ranks: list[int] = []
        while True:
            match = self._word("a rank", _RANKS)
            first, _, last = match[0].removeprefix("r").partition("-")
            ranks += range(int(first), int(last or first) + 1)
            if ranks and max(ranks) >= _MAX_RANKS:
                raise self._error(f"more than {_MAX_RANKS} ranks")
            if not (self._accept(",") or _RANKS.fullmatch(self._next.text)):
                break
        if not ranks:
            raise self._error("a range of ranks goes from the lower to the higher")
        return tuple(ranks)

    # statements

    def _body(self, own: tuple[int, ...], *, in_block: bool) -> Iterator[Statement]:
        while True:
            while self._accept("\n", ";"):
                pass
            token = self._next
            if token.kind == "end" or self._is_section():
                if in_block:
                    raise self._error("a '{' is not closed")
                return
            if token.kind == "comment":
                yield Comment(self._take().text.rstrip())
                continue
            if token.text == "}" and in_block:
                self._at += 1
                return
            statement = self._statement(own)
            self._checks.append((token.line, own, statement))
            yield statement
            if not (self._is_line_over() or self._next.text == "}"):
                raise self._error(f"';' or a new line expected before {self._shown}")

    def _is_section(self) -> bool:
        """Whether what follows is ``r0:`` or ``r0, r2-4:``."""
        at = self._at
        while self._tokens[at].kind == "word" and _RANKS.fullmatch(
            self._tokens[at].text
        ):
            at += 1
            if self._tokens[at].text == ":":
                return True
            at += self._tokens[at].text == ","
        return False

    def _statement(self, own: tuple[int, ...]) -> Statement:
        token = self._next
        if token.text == "{":
            return self._batch("")
        if token.kind != "word":
            raise self._error(
                f"a statement expected, not {self._shown}", f"one of {_WORDS}"
            )
        word = token.text
        reader = getattr(self, f"_read_{word}", None) if word in _READERS else None
        if reader is not None:
            self._at += 1
            found: Statement = reader()
            return found
        if word in _BLOCKS:
            return self._block(own)
        if word in COLLECTIVES:
            return self._collective("")
        if self._tokens[self._at + 1].text == "=":
            return self._named()
        match = _LABEL.fullmatch(word)
        if match and match[2]:
            return self._compute(own)
        raise self._error(f"{word!r} is no statement", f"one of {_WORDS}")

    def _named(self) -> Statement:
        name = self._word("a name", _NAME)[0]
        self._at += 1
        if name == "signal":
            raise self._error("'signal' cannot be a name")
        self._names.add(name)
        if self._next.text == "{":
            return self._batch(name)
        if self._next.text in COLLECTIVES:
            return self._collective(name)
        if self._accept("S"):
            return Post((self._op(Direction.SEND),), name=name)
        if self._accept("R"):
            return Post((self._op(Direction.RECV),), name=name)
        raise self._error(f"S, R, a batch or a collective expected, not {self._shown}")

    def _read_S(self) -> Statement:  # noqa: N802 - the word it reads
        return Post((self._op(Direction.SEND),))

    def _read_R(self) -> Statement:  # noqa: N802 - the word it reads
        return Post((self._op(Direction.RECV),))

    def _read_send(self) -> Statement:
        return Post((self._op(Direction.SEND),), at_once=True)

    def _read_recv(self) -> Statement:
        return Post((self._op(Direction.RECV),), at_once=True)

    def _batch(self, name: str) -> Statement:
        self._at += 1
        ops: list[OpText] = []
        while True:
            while self._accept("\n"):
                pass
            if not self._accept("S", "R"):
                raise self._error(f"S or R expected in a batch, not {self._shown}")
            is_send = self._tokens[self._at - 1].text == "S"
            ops.append(self._op(Direction.SEND if is_send else Direction.RECV))
            while self._accept("\n"):
                pass
            if self._accept("}"):
                break
            self._expect(",", "between the ops of a batch")
        if len({op.group for op in ops}) > 1:
            raise self._error("all ops of a batch have one group")
        return Post(tuple(ops), is_batch=True, name=name)

    def _op(self, direction: Direction) -> OpText:
        label = self._label()
        is_send = direction is Direction.SEND
        if not self._accept(*(("->", "→") if is_send else ("<-", "←"))):
            want = "S x->1" if is_send else "R x<-0"
            raise self._error(
                f"an arrow expected, not {self._shown}", f"such as {want}"
            )
        peer = int(self._word("the other rank", _PEER)[1])
        signature, group = DEFAULT, ""
        if self._next.kind == "payload":
            signature = self._payload()
        if self._next.kind == "word" and self._next.text.startswith("@"):
            group = self._take().text[1:]
        return OpText(direction, label, peer, signature, group)

    def _label(self) -> Label:
        match = self._word("a label such as F0 or x", _LABEL)
        stage, letter, microbatch, word, index = match.groups()
        number = int(index or 0)
        if word == "metadata":
            return Label(word, Pass.META, index=number)
        if word:
            return Label(word, index=number)
        return Label(
            "",
            Pass[letter],
            int(microbatch),
            int(stage) if stage is not None else -1,
            number,
        )

    def _payload(self) -> Signature:
        words = self._next.text[1:-1].split()
        try:
            dtype, *rest = words
            shape = _sizes(rest.pop(0)) if rest and rest[0] != "strides" else ()
            strides = _contiguous(shape)
            if rest:
                if rest[0] != "strides" or len(rest) != 2:
                    raise ValueError
                strides = _sizes(rest[1])
            if len(strides) != len(shape):
                raise ValueError
            signature = Signature(shape, _dtype(dtype), strides)
        except (ValueError, KeyError):
            raise self._error(
                f"{self._next.text!r} is no payload",
                f"such as [f32 2x3] or [f32 2x3 strides 1x2]; {', '.join(_DTYPES)}",
            ) from None
        self._at += 1
        return signature

    def _collective(self, name: str) -> Statement:
        what = self._take().text
        group = ""
        if not (self._is_line_over() or self._next.text == "}"):
            group = self._word("a group", _NAME)[0]
        return Collect(what, group, name)

    def _compute(self, own: tuple[int, ...]) -> Statement:
        label = self._label()
        body: tuple[Statement, ...] = ()
        if self._accept("{"):
            body = tuple(self._body(own, in_block=True))
        return Compute(label, body)

    def _block(self, own: tuple[int, ...]) -> Statement:
        kind, name, n = self._take().text, "", 0
        if kind in ("step", "eval"):
            if self._next.kind == "word" and self._next.text != "n":
                name = self._word("a schedule's name", _SCHEDULE)[0]
            if self._accept("n"):
                self._expect("=", "after n")
                n = int(self._word("a number", re.compile(r"\d{1,6}"))[0])
        self._expect("{", f"after {kind}")
        return Block(kind, tuple(self._body(own, in_block=True)), name, n)

    def _read_wait(self) -> Statement:
        if self._accept("signal"):
            return Listen(*self._signal())
        names: list[str] = []
        while not (self._is_line_over() or self._next.text == "}"):
            name = self._word("a name", _NAME)[0]
            if name not in self._names:
                raise self._error(
                    f"nothing is called {name!r} here", "such as a = S x->1"
                )
            names.append(name)
        return WaitFor(tuple(names))

    def _read_signal(self) -> Statement:
        return Tell(*self._signal())

    def _signal(self) -> tuple[int, str]:
        rank = int(self._word("a rank", _PEER)[1])
        if self._is_line_over() or self._next.text == "}":
            return rank, ""
        return rank, self._word("a name", _NAME)[0]

    def _read_sleep(self) -> Statement:
        text = self._word("seconds", re.compile(r"\d+(\.\d+)?"))[0]
        return Pause(float(text))

    def _read_raise(self) -> Statement:
        kind = self._word("an exception's type", _NAME)[0]
        message = ""
        if self._next.kind == "string":
            message = re.sub(r"\\(.)", r"\1", self._take().text[1:-1])
        return Throw(kind, message)

    def _read_die(self) -> Statement:
        return Kill()

    def _read_exit(self) -> Statement:
        return Quit()


_READERS = ("S", "R", "send", "recv", "wait", "signal", "sleep", "raise", "die", "exit")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def _dtype(word: str) -> str:
    return word if word in _SHORT else _DTYPES[word]


# -- writing -----------------------------------------------------------------------


def _payload(signature: Signature) -> str:
    dtype = _SHORT.get(signature.dtype, signature.dtype)
    shape = "x".join(map(str, signature.shape))
    text = f"{dtype} {shape}".rstrip()
    if signature.strides != _contiguous(signature.shape):
        text += f" strides {'x'.join(map(str, signature.strides))}"
    return f"[{text}]"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _section(ranks: tuple[int, ...], body: tuple[Statement, ...]) -> list[str]:
    lead = f"r{format_ranks(ranks)}:"
    if not any(isinstance(s, (Comment, Block)) for s in body):
        line = f"{lead} {'; '.join(map(_statement, body))}".rstrip()
        if len(line) <= _WIDTH:
            return [line]
    return [lead, *_lines(body, "  ")]


def _lines(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for statement in body:
        inner: tuple[Statement, ...] = ()
        if isinstance(statement, (Block, Compute)):
            inner = statement.body
        line = f"{indent}{_statement(statement)}"
        is_long = len(line) > _WIDTH or any(map(_is_tall, inner))
        if inner and is_long:
            yield f"{indent}{_head(statement)} {{"
            yield from _lines(inner, indent + "  ")
            yield f"{indent}}}"
        else:
            yield line


def _is_tall(statement: Statement) -> bool:
    """Whether a statement cannot stand in a line with others."""
    if isinstance(statement, Compute):
        return any(map(_is_tall, statement.body))
    return isinstance(statement, (Block, Comment))


def _head(statement: Statement) -> str:
    """A block's text before its brace."""
    if isinstance(statement, Compute):
        return str(statement.label)
    assert isinstance(statement, Block)
    name = f" {statement.name}" if statement.name else ""
    return f"{statement.kind}{name}" + (f" n={statement.n}" if statement.n else "")


def _statement(statement: Statement) -> str:
    if isinstance(statement, Post):
        return _post(statement)
    if isinstance(statement, (Compute, Block)):
        inner = "; ".join(map(_statement, statement.body))
        braces = f" {{ {inner} }}" if inner else ""
        if isinstance(statement, Block) and not inner:
            braces = " {}"
        return _head(statement) + braces
    return _simple(statement)


def _simple(statement: Statement) -> str:
    text = "die" if isinstance(statement, Kill) else "exit"
    if isinstance(statement, Collect):
        name = f"{statement.name} = " if statement.name else ""
        text = f"{name}{statement.what} {statement.group}".rstrip()
    elif isinstance(statement, WaitFor):
        text = " ".join(("wait", *statement.names))
    elif isinstance(statement, (Tell, Listen)):
        word = "signal" if isinstance(statement, Tell) else "wait signal"
        text = f"{word} {statement.rank} {statement.name}".rstrip()
    elif isinstance(statement, Pause):
        text = f"sleep {statement.seconds:g}"
    elif isinstance(statement, Throw):
        message = re.sub(r'(["\\])', r"\\\1", statement.message)
        text = f"raise {statement.type}" + (f' "{message}"' if message else "")
    elif isinstance(statement, Comment):
        text = statement.text
    return text


def _post(post: Post) -> str:
    name = f"{post.name} = " if post.name else ""
    if post.is_batch:
        return f"{name}{{{', '.join(map(_op, post.ops))}}}"
    op = post.ops[0]
    if post.at_once:
        word = "send" if op.direction is Direction.SEND else "recv"
        return f"{word} {_op(op)[2:]}"
    return name + _op(op)


def _op(op: OpText) -> str:
    letter, arrow = ("S", "->") if op.direction is Direction.SEND else ("R", "<-")
    payload = "" if op.signature == DEFAULT else f" {_payload(op.signature)}"
    group = f" @{op.group}" if op.group else ""
    return f"{letter} {op.label}{arrow}{op.peer}{payload}{group}"
