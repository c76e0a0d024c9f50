"""One part of the run, as a process: `python -m benchmarks.gpu.part JOB`; its events are its
output."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import cast

from benchmarks.gpu import absent
from benchmarks.gpu.job import Event, Failed, Job, to_line, told

# Modules by name: each is imported in its own process alone, and may lack what it needs.
PARTS = {
    "machine": "benchmarks.gpu.ceilings",
    "kernels": "benchmarks.gpu.correctness",
    "speed": "benchmarks.gpu.speed",
    "engine": "benchmarks.gpu.engine",
    "cluster": "benchmarks.gpu.cluster",
}


def events_of(job: Job) -> Iterator[Event]:
    """All that a part tells; what it does not catch itself is its last event."""
    try:
        absent.stand_in()
        module = importlib.import_module(PARTS[job.part])
        yield from cast("Callable[[Job], Iterator[Event]]", module.run)(job)
    except Exception as error:
        traceback.print_exc()
        yield Failed(job.part, "the whole part", told(error))


def main() -> int:
    """Writes one line for each event; 1 if anything failed."""
    # Libraries print: what they write must not get between the events.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    failed = False
    for event in events_of(Job.from_json(sys.argv[1])):
        failed |= isinstance(event, Failed)
        out.write(to_line(event) + "\n")
        out.flush()
    out.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
