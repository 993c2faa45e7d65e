"""The report: the one value that diagnosis makes and every viewer renders.

Frozen and plain, so it turns into JSON (``to_json``) without loss. Viewers compute
nothing: what they show stands here.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding", "OpView", "RankView", "Report", "WaitEdge"]


@dataclass(frozen=True, slots=True)
class OpView:
    """One op that is not complete, as a reader wants to see it.

    ``reason`` says what kind of incompleteness: ``unmatched`` (the other side never
    posted it), ``stuck`` (matched or matchable, but held up by something else),
    ``in call`` (the host has not come back from issuing it) or ``mismatch`` (payloads
    differ). ``edge`` reads ``r3←r1 (group pp=[1,3]: 1←0)``.
    """

    rank: int
    direction: str
    peer: int
    edge: str
    label: str
    """``F2``, ``B0``, ``metadata`` or ``x``."""
    stage: int | None
    microbatch: int | None
    tensor_index: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    age_s: float | None
    """None: there is no clock, as in a check."""
    reason: str
    transport: str
    """``group`` or ``pair``."""
    coalesced: bool
    batch: int
    batch_ops: tuple[str, ...]
    """The ops of the same batch, e.g. ``("isend F1→r1", "irecv B0←r1")``."""
    k: int
    group: str
    desc: str
    """The schedule's own word for the batch (``fwd_recv``); may be empty."""
    step: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank is doing now, or did last."""

    rank: int
    state: str
    """``alive``, ``exited``, ``raised``, ``dead``, ``terminated``, ``disabled``,
    ``missing`` (no file) or ``unknown`` (a copied file: cannot be told)."""
    doing: str
    """One phrase: ``waits for B0←r1``, ``in F2 stage 1``, ``raised ValueError``."""
    since_s: float | None
    role: str = ""
    """``culprit``, ``victim`` or empty."""
    host: str = ""
    pid: int = 0
    stages: tuple[int, ...] = ()
    step: int | None = None
    last_record_s: float | None = None
    """Age of the rank's last record at the time of the report."""
    pending: int = 0
    """Ops not complete."""
    progress: str = ""
    """Plan against fact: ``op 3 of 14, next expected irecv B0←r1``; empty without a
    plan."""


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """``waiter`` cannot go on before ``holder`` does something; ``why`` in words."""

    waiter: int
    holder: int
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict: a code, a sentence, who, the evidence, what to do."""

    code: str
    """Stable: ``PPT001``."""
    name: str
    """Short name of the class: ``transport split``."""
    severity: str
    """``error`` (counts for the exit code), ``warning`` (counts too) or ``note``."""
    sentence: str
    """Culprit, what is missing, why: one sentence."""
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    remedy: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything known about one run at one moment."""

    run: str
    """Path of the run's folder, or a name."""
    created: str
    """ISO 8601, UTC."""
    world_size: int
    findings: tuple[Finding, ...]
    """Culprits before victims; the verdict is the first."""
    ranks: tuple[RankView, ...]
    pending: tuple[OpView, ...] = ()
    waits: tuple[WaitEdge, ...] = ()
    chain: tuple[str, ...] = ()
    """The wait-for chain in words, from a victim to the culprit, or around a cycle."""
    problems: tuple[str, ...] = ()
    """Inputs that could not be used, one line each; the rest was used."""
    environment: dict[str, Any] = field(default_factory=dict)
    trigger: str = ""
    """What made the job print it: ``no progress for 10 s``, ``exception``, ...; empty
    for a report made afterwards."""

    @property
    def exit_code(self) -> int:
        """0 nothing wrong (notes at most), 1 findings."""
        return int(any(f.severity != "note" for f in self.findings))

    @property
    def verdict(self) -> Finding | None:
        """The first finding."""
        return self.findings[0] if self.findings else None

    def to_json(self) -> str:
        """The whole report as JSON; ``exit_code`` is included for scripts."""
        value = dataclasses.asdict(self)
        value["exit_code"] = self.exit_code
        return json.dumps(value, indent=2, ensure_ascii=False)
