"""The command ``schedule``: a fixed schedule drawn, or written as a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from pptrace.errors import InputError

__all__ = ["Schedule"]


class Schedule:
    """Draw a schedule of pptrace.schedules: ranks × time, bubble, what is in flight.

    Unit time: a forward takes 1, a backward 2 (its two halves 1 each), a message none.

    Examples:
      pptrace schedule show 1F1B --pp 4 --microbatches 2
      pptrace schedule show Interleaved1F1B --pp 4 --microbatches 9 --arrows
      pptrace schedule show DualPipeV --pp 4 --microbatches 8 --svg dualpipev.svg
      pptrace schedule show 1F1B --pp 4 --microbatches 2 --csv 1f1b.csv
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument("what", choices=["show"])
        parser.add_argument("name", metavar="NAME", help="as torch names it: 1F1B, ...")
        parser.add_argument("--pp", type=int, required=True, metavar="P", help="ranks")
        parser.add_argument(
            "--microbatches", type=int, required=True, metavar="N", help="per step"
        )
        parser.add_argument(
            "--stages-per-rank",
            type=int,
            metavar="V",
            help="default: 1 for single-stage schedules, else 2",
        )
        output = parser.add_argument_group("output")
        output.add_argument(
            "--arrows",
            action="store_true",
            help="mark what is sent to another rank; an SVG has arrows anyway",
        )
        output.add_argument("--svg", type=Path, metavar="FILE", help="draw into FILE")
        output.add_argument(
            "--csv", type=Path, metavar="FILE", help="write it for torch's runtime"
        )
        output.add_argument(
            "--width", type=int, metavar="COLUMNS", help="default: the terminal's"
        )
        output.add_argument("--no-color", action="store_true", help="no colour or bold")

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit code."""
        from rich.console import Console

        from pptrace.schedules.actions import write_csv
        from pptrace.schedules.advice import programs
        from pptrace.schedules.picture import draw
        from pptrace.viewers.schedule import render_svg, render_text

        numbers = (args.pp, args.microbatches, args.stages_per_rank)
        found = programs(args.name, *numbers)
        title = f"{args.name}, {args.pp} ranks, {args.microbatches} microbatches"
        picture = draw(found, title)
        try:
            if args.csv is not None:
                with args.csv.open("w", encoding="utf-8") as file:
                    write_csv(found, file)
            if args.svg is not None:
                args.svg.write_text(render_svg(picture), encoding="utf-8")
        except OSError as error:
            where = args.csv if args.svg is None else args.svg
            raise InputError(where, f"cannot be written: {error.strerror}") from error
        console = Console(width=args.width, no_color=args.no_color, highlight=False)
        text = render_text(picture, console.width, arrows=args.arrows)
        console.print(text, soft_wrap=True, end="")
        return 0
