"""What a chaos run counted, and whether all was as it must be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.wishes import MISMATCH, Ending


@dataclass
class Tally:
    """Counts of one or several rounds. `violations` is empty exactly when the promise was kept."""

    faults: Counter[str] = field(default_factory=Counter)
    kv_faults: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    http: Counter[str] = field(default_factory=Counter)  # of the endings, streams over HTTP
    failovers: int = 0
    mismatches: int = 0
    endless: int = 0
    busy_workers: int = 0
    traces: int = 0
    torn_traces: int = 0
    excused_traces: int = 0
    largest_gap_s: float = 0.0
    largest_excused_gap_s: float = 0.0
    largest_ttft_s: float = 0.0
    violations: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All that were asked."""
        return self.endings.total()

    def count(self, ending: Ending, complaint: str, excused: bool) -> None:
        """Adds one request; `excused` if a router was hurt or a role was down while it ran."""
        self.endings[ending.status] += 1
        if ending.router:
            self.http[ending.broke or ending.status] += 1
        self.endless += not ending.over
        self.mismatches += complaint.startswith(MISMATCH)
        if ending.completion is not None and ending.completion.route.attempts > 1:
            self.failovers += 1
        if excused:
            longest_s = max(self.largest_excused_gap_s, ending.largest_gap_s)
            self.largest_excused_gap_s = longest_s
        else:
            self.largest_gap_s = max(self.largest_gap_s, ending.largest_gap_s)
        self.largest_ttft_s = max(self.largest_ttft_s, ending.ttft_s)

    def render(self) -> str:
        """The figures, one a line."""
        rows: list[tuple[str, object]] = [
            ("faults", f"{self.faults.total()} ({_listed(self.faults)}), {self.skipped} skipped"),
            ("KV transfers spoilt", f"{self.kv_faults.total()} ({_listed(self.kv_faults)})"),
            ("requests", f"{self.requests} ({_listed(self.endings)})"),
            ("of them over HTTP", f"{self.http.total()} ({_listed(self.http)})"),
            ("failovers", f"{self.failovers} requests completed after more than one attempt"),
            ("mismatches", self.mismatches),
            ("requests without an end", self.endless),
            ("workers with blocks leaked", self.busy_workers),
            ("traces", f"{self.traces}, torn {self.torn_traces}"
             f" (and {self.excused_traces} around a kill)"),
            ("largest gap", f"{self.largest_gap_s:.2f} s"
             f" (a router hurt or a role down: {self.largest_excused_gap_s:.2f} s)"),
            ("largest time to first token", f"{self.largest_ttft_s:.2f} s"),
            ("violations", len(self.violations)),
        ]  # fmt: skip
        return "\n".join(f"  {name:28} {value}" for name, value in rows)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"
