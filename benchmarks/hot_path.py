"""What recording costs, as ratios to floors and peers measured in the same run.

    python benchmarks/hot_path.py

Floor: one clock call, one 128-byte ``pack_into`` of the same slot into a mapped file,
and one empty Python wrapper. Peer: torch's ``record_function`` with no profiler on.
Each figure is the median of repeated blocks; the spread is the middle half.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.profiler import record_function

from pptrace import blackbox
from pptrace.blackbox import BlackBox
from pptrace.hooks.recorder import Recorder
from pptrace.records import Direction, Kind

BLOCKS, CALLS = 31, 2000


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """(median, half the width of the middle half) in ns per call."""
    samples = []
    for _ in range(BLOCKS):
        began = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter_ns() - began) / CALLS)
    low, _, high = statistics.quantiles(samples, n=4)
    return statistics.median(samples), (high - low) / 2


def main() -> None:
    """Measure and print the table."""
    folder = Path(tempfile.mkdtemp(prefix="hot-path"))
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    box = BlackBox(folder / "rank00000.pptrace", rank=0, world_size=1)
    recorder = Recorder(box, eager=None, rule="split")
    state = recorder.group_state(c10d._get_default_group())
    tensor = torch.zeros(4, 8)
    slot, buffer = blackbox._SLOT, box._map
    values = (1, 2, 0, 0, 0, 0, *([1] * 24), 1)[: len(slot.unpack(bytes(slot.size)))]

    def wrapped() -> None:
        pass

    def floor() -> None:
        time.monotonic_ns()
        slot.pack_into(buffer, blackbox._PAGE, *values)

    def op() -> None:
        recorder.returned(recorder.post(state, int(Direction.SEND), tensor, 0, 0)[0])

    def action() -> None:
        recorder.end_action(recorder.begin_action(1, 0, 3), None)

    def profiler() -> None:
        with record_function("F3"):
            pass

    rows = {
        "empty wrapper": wrapped,
        "clock + slot, in a wrapper (the floor)": floor,
        "a record alone": lambda: box.record(1, int(Kind.NOTE)),
        "an op: recorded, and its return": op,
        "an action: begin and end": action,
        "record_function, no profiler": profiler,
    }
    results = {name: measure(call) for name, call in rows.items()}
    base = results["clock + slot, in a wrapper (the floor)"][0]
    print(f"{'':42}{'ns':>8}{'±':>6}{'/ floor':>9}")
    for name, (median, spread) in results.items():
        print(f"{name:42}{median:8.0f}{spread:6.0f}{median / base:9.2f}")
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
