"""How long `pptrace report` takes on 8 small files, beside a bare Python.

The bar: at most twice the time of a Python that imports rich and numpy. Runs of both
alternate, so a busy machine hurts both alike, and the medians are compared::

    python benchmarks/startup.py [RUNS]

With ``-X importtime`` in ``PPTRACE_STARTUP_FLAGS`` Python itself says where time goes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pptrace.blackbox import BlackBox, file_name
from pptrace.records import Direction, Group, Kind, Pass, Status, Transport

__all__: list[str] = []

_RANKS = 8
_OPS = 50
_BAR = 2.0


def _write_run(folder: Path) -> None:
    """Eight ranks that passed activations on and finished."""
    group = Group(1, "pp", "pipeline", tuple(range(_RANKS)), "nccl")
    for rank in range(_RANKS):
        box = BlackBox(folder / file_name(rank), rank=rank, world_size=_RANKS)
        box.group(group)
        shape = box.signature((4, 1024), "float32", (1024, 1))
        neighbours = ((Direction.RECV, rank - 1), (Direction.SEND, rank + 1))
        for direction, peer in neighbours:
            if not 0 <= peer < _RANKS:
                continue
            channel = box.channel(1, Transport.PAIR, direction, 0, peer, peer)
            for k in range(_OPS):
                seq = box.record(
                    time.monotonic_ns(), Kind.OP, direction=direction,
                    transport=Transport.PAIR, pass_=Pass.F, group=1, peer=peer,
                    group_peer=peer, batch=box.next_batch(), batch_size=1, k=k,
                    step=1, stage=rank, microbatch=k, signature=shape,
                    numel=4096, nbytes=16384, channel=channel,
                )  # fmt: skip
                for offset in (16, 24, 32, 40):
                    box.set_time(seq, offset, time.monotonic_ns())
                box.set_posted(channel, k + 1)
                box.set_done(channel, k + 1)
        box.set_status(Status.EXITED)
        box.heartbeat(1, Pass.F, rank, 0, 0)
        box.close()


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - began


def main() -> int:
    """Measure, print both medians and their ratio; 1 if it is over the bar."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    flags = os.environ.get("PPTRACE_STARTUP_FLAGS", "").split()
    with tempfile.TemporaryDirectory() as folder:
        _write_run(Path(folder))
        bare = [sys.executable, "-c", "import rich, numpy"]
        report = [sys.executable, *flags, "-m", "pptrace", "report", folder]
        if flags:
            return subprocess.run(report, check=False, timeout=60).returncode
        times = [(_seconds(bare), _seconds(report)) for _ in range(runs + 1)][1:]
    bare_s, report_s = (
        statistics.median(column) for column in zip(*times, strict=True)
    )
    ratio = report_s / bare_s
    print(f"bare Python with rich and numpy  {bare_s * 1e3:6.0f} ms")
    print(f"pptrace report, 8 files          {report_s * 1e3:6.0f} ms")
    print(f"ratio {ratio:.2f}, bar {_BAR:.1f} (medians of {runs} alternating runs)")
    return int(ratio > _BAR)


if __name__ == "__main__":
    sys.exit(main())
