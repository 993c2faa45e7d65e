"""The commands ``check`` and ``run-program``: will it hang, and does it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pptrace.errors import InputError

if TYPE_CHECKING:
    from pptrace.checker import CheckResult, Conditions

__all__ = ["Check", "RunProgram"]

_NUMBERS = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")
_MAX_SWEEP = 4096
"""More combinations than this are a mistake."""


class Check:
    """Say whether a schedule or a program can hang on NCCL, before it runs.

    A schedule's own code runs on stub stages, rank after rank, in this process; no GPU
    and no process group is needed. FILE is a program (docs/programs.md). The result is
    exact under the rules of docs/checker.md.

    Examples:
      pptrace check --schedule 1F1B --pp 4 --microbatches 2
      pptrace check --schedule my_module.py:MySchedule --pp 8 --microbatches 16 --eager
      pptrace check --schedule Interleaved1F1B --pp 2,4,8 --microbatches 1-16 --sweep
      pptrace check --csv schedule.csv
      pptrace check hang.pp
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        what = parser.add_argument_group("what to check, one of")
        what.add_argument(
            "file", nargs="?", type=Path, metavar="FILE", help="a program"
        )
        what.add_argument(
            "--schedule",
            metavar="NAME",
            help="torch's name for it, or module:Class or path/to/file.py:Class",
        )
        what.add_argument(
            "--csv", type=Path, metavar="FILE", help="a schedule as torch writes it"
        )
        numbers = parser.add_argument_group("numbers, with --schedule")
        numbers.add_argument("--pp", metavar="P", help="ranks of the pipeline")
        numbers.add_argument(
            "--stages", type=_positive, metavar="S", help="default: one or two per rank"
        )
        numbers.add_argument("--microbatches", metavar="N", help="per step")
        numbers.add_argument(
            "--sweep",
            action="store_true",
            help="a table: --pp and --microbatches may be lists such as 2,4 or 1-16",
        )
        _add_conditions(parser)
        output = parser.add_argument_group("output")
        output.add_argument(
            "--json", action="store_true", help="report and numbers as JSON"
        )
        output.add_argument(
            "--width",
            type=_positive,
            metavar="COLUMNS",
            help="default: the terminal's",
        )
        output.add_argument("--no-color", action="store_true", help="no colour or bold")

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit code."""
        given = [args.file, args.schedule, args.csv]
        if sum(one is not None for one in given) != 1:
            raise InputError("check", "needs one of FILE, --schedule and --csv")
        if args.schedule is None and (args.pp or args.microbatches or args.sweep):
            raise InputError("--pp, --microbatches and --sweep", "go with --schedule")
        if args.sweep:
            return _sweep(args)
        result, title = _check(args)
        if args.json:
            _print(_to_json(result, title))
        else:
            _show(result, title, args)
        return result.report.exit_code


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conditions")
    group.add_argument(
        "--rule",
        choices=["split", "coalesced"],
        help="how batches are issued: split (torch 2.13 and later), coalesced (2.8 and"
        " before); default: as the installed torch does",
    )
    group.add_argument(
        "--eager",
        action="store_true",
        help="the group is set up by init_process_group(device_id=...)",
    )
    group.add_argument(
        "--metadata",
        choices=["dynamic", "static"],
        default="dynamic",
        help="static: shapes are given to the stages; default: %(default)s",
    )
    group.add_argument(
        "--host",
        choices=["async", "blocking"],
        help="what wait() does: async as on CUDA (default), blocking as on gloo",
    )
    group.add_argument(
        "--preconnect",
        action="store_true",
        help="every pair of ranks has communicated before the first step",
    )
    group.add_argument(
        "--start-up",
        choices=["votes", "neighbours", "shapes"],
        help="what is exchanged before the first microbatch: torch 2.12 to 2.14, 2.9 to"
        " 2.11, up to 2.8; default: what goes with the rule",
    )
    group.add_argument(
        "--forward-only", action="store_true", help="check eval() in place of step()"
    )


# -- doing it ----------------------------------------------------------------------


def _conditions(args: argparse.Namespace) -> Conditions:
    from pptrace.checker import Conditions

    return Conditions(
        rule=args.rule,
        eager=args.eager,
        metadata=args.metadata,
        host=args.host or "async",
        preconnect=args.preconnect,
        start_up=args.start_up,
        forward_only=args.forward_only,
    )


def _check(args: argparse.Namespace) -> tuple[CheckResult, str]:
    """The result, and what was checked in a line."""
    from pptrace import checker

    if args.file is not None:
        from pptrace import programs

        program = programs.load(args.file)
        host = args.host or program.host or "async"
        result = checker.check_plan(
            program.plan(),
            host=host,
            preconnect=args.preconnect or program.preconnected,
        )
        return result, f"{program.name} · host {host}"
    conditions = _conditions(args)
    said = _said(conditions)
    if args.csv is not None:
        return checker.check_csv(args.csv, conditions), f"{args.csv}{said}"
    ranks, n = _number("--pp", args.pp), _number("--microbatches", args.microbatches)
    results = checker.sweep(
        args.schedule,
        [ranks],
        [n],
        stages_per_rank=_per_rank(args.stages, ranks),
        conditions=conditions,
    )
    result = results[ranks, n]
    title = f"{args.schedule}, {ranks} ranks, n={n}"
    return result, f"{result.plan.name if result.plan else title}{said}"


def _said(conditions: Conditions) -> str:
    rule = conditions.rule
    if rule is None:
        from pptrace.schedules.recording import installed_rule

        rule = installed_rule().value
    words = [
        f"rule {rule}",
        "eager group" if conditions.eager else "lazy group",
        f"{conditions.metadata} metadata",
        f"host {conditions.host}",
    ]
    if conditions.preconnect:
        words.append("preconnected")
    if conditions.start_up:
        words.append(f"start-up {conditions.start_up}")
    if conditions.forward_only:
        words.append("forward only")
    return " · " + " · ".join(words)


def _sweep(args: argparse.Namespace) -> int:
    from pptrace import checker

    ranks, n = _list("--pp", args.pp), _list("--microbatches", args.microbatches)
    if len(ranks) * len(n) > _MAX_SWEEP:
        raise InputError("--sweep", f"has more than {_MAX_SWEEP} combinations")
    if args.stages is not None and len(ranks) > 1:
        raise InputError("--stages", "goes with a single --pp")
    conditions = _conditions(args)
    results = checker.sweep(
        args.schedule,
        ranks,
        n,
        stages_per_rank=_per_rank(args.stages, ranks[0]),
        conditions=conditions,
    )
    cells = {key: _cell(result) for key, result in results.items()}
    if args.json:
        rows = [
            {"pp": p, "microbatches": m, "verdict": cell}
            for (p, m), cell in cells.items()
        ]
        _print(json.dumps(rows, indent=2))
    else:
        _print(f"{args.schedule}{_said(conditions)}\n\n{_table(ranks, n, cells)}")
    hangs = [r for r in results.values() if r.plan is not None and not r.ok]
    return int(bool(hangs))


def _cell(result: CheckResult) -> str:
    if result.plan is None:
        return "refused"
    return "ok" if result.ok else result.findings[0].code


def _table(
    ranks: Iterable[int], n: Iterable[int], cells: Mapping[tuple[int, int], str]
) -> str:
    columns = [*ranks]
    width = max(map(len, ("refused", *cells.values()))) + 2
    lines = ["   n" + "".join(f"pp={p}".rjust(width) for p in columns)]
    lines += [f"{m:4}" + "".join(cells[p, m].rjust(width) for p in columns) for m in n]
    codes = sorted({cell for cell in cells.values() if cell.startswith("PPT")})
    lines += ["", *(f"what {code} means: pptrace explain {code}" for code in codes)]
    if "refused" in cells.values():
        lines.append(
            "refused: torch does not construct the schedule with these numbers"
        )
    return "\n".join(lines).rstrip()


# -- showing it --------------------------------------------------------------------


def _show(result: CheckResult, title: str, args: argparse.Namespace) -> None:
    from pptrace.cli import _write_report

    _print(title)
    if result.findings:
        _print("")
        _write_report(result.report, width=args.width, in_color=not args.no_color)
    else:
        _print("ok: every op meets its partner, whatever the timing")
    timeline = result.timeline(args.width or _columns())
    if timeline:
        _print(f"\n{timeline}")
    numbers = _numbers(result)
    if numbers:
        _print(f"\n{numbers}")


def _numbers(result: CheckResult) -> str:
    peaks = result.peak_in_flight
    if not any(peaks.values()):
        return ""
    most = max(peaks.values())
    lines = []
    if result.bubble_share is not None:
        lines.append(
            f"bubble: {result.bubble_share:.1%} of all rank-time"
            " (F, I and W take 1, B takes 2, messages nothing)"
        )
    shown = ", ".join(f"r{rank} {peak}" for rank, peak in list(peaks.items())[:16])
    more = ", …" if len(peaks) > 16 else ""
    lines.append(f"most microbatches in flight: {most} ({shown}{more})")
    return "\n".join(lines)


def _to_json(result: CheckResult, title: str) -> str:
    value = json.loads(result.report.to_json())
    value["checked"] = title
    value["ok"] = result.ok
    value["bubble_share"] = result.bubble_share
    value["peak_in_flight"] = {str(r): n for r, n in result.peak_in_flight.items()}
    return json.dumps(value, indent=2, ensure_ascii=False)


def _print(text: str) -> None:
    from pptrace.cli import _write

    _write(text.rstrip("\n") + "\n")


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns


# -- numbers -----------------------------------------------------------------------


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _number(option: str, text: str | None) -> int:
    numbers = _list(option, text)
    if len(numbers) != 1:
        raise InputError(f"{option} {text}", "is several numbers", "add --sweep")
    return numbers[0]


def _list(option: str, text: str | None) -> list[int]:
    """``2,4,8-10`` as numbers."""
    if text is None:
        raise InputError(
            option, "is missing", "--schedule needs --pp and --microbatches"
        )
    if not _NUMBERS.fullmatch(text):
        raise InputError(f"{option} {text}", "is no number", "such as 4, or 2,4,8-16")
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or min(numbers) < 1:
        raise InputError(f"{option} {text}", "must be 1 or more")
    return numbers


def _per_rank(stages: int | None, ranks: int) -> int | None:
    if stages is None:
        return None
    if stages % ranks:
        raise InputError(f"--stages {stages}", f"is no multiple of --pp {ranks}")
    return stages // ranks


# -- running it ----------------------------------------------------------------------


class RunProgram:
    """Run a program as real processes that follow NCCL's rules, and say what happened.

    FILE is a program (docs/programs.md). Each rank is a process on this machine; P2P
    follows the rules of NCCL by emulation. Ends when all ranks have, or when nothing
    can move any more; the black boxes stay in DIR.

    Examples:
      pptrace run-program hang.pp
      pptrace run-program hang.pp --out /tmp/boxes --json
    """

    name = "run-program"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument("file", type=Path, metavar="FILE", help="a program")
        parser.add_argument(
            "--out",
            type=Path,
            default=Path("pptrace-out"),
            metavar="DIR",
            help="folder for the black boxes; default: pptrace-out",
        )
        parser.add_argument(
            "--limit",
            type=_positive,
            default=120,
            metavar="SECONDS",
            help="give up after so long; default: %(default)s",
        )
        parser.add_argument("--json", action="store_true", help="the report as JSON")
        parser.add_argument("--width", type=_positive, metavar="COLUMNS")
        parser.add_argument("--no-color", action="store_true", help="no colour or bold")

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit code."""
        from pptrace import program_job, programs
        from pptrace.cli import _write_report

        program = programs.load(args.file)
        done = program_job.run_program(args.file, program, args.out, limit_s=args.limit)
        if args.json:
            _print(done.report.to_json())
        else:
            became = "stands still" if done.is_hung else "has ended"
            _print(f"{program.name}: the job {became}\n")
            _write_report(done.report, width=args.width, in_color=not args.no_color)
        return done.report.exit_code
