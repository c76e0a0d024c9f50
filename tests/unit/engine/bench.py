"""A started engine, and everything that it publishes."""

import queue

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.step_report import SequenceProgress, StepReport
from tests.unit.engine.small_models import require
from tests.waiting import WAIT_S


def load(directory=None, **settings):
    """A model, or the demo model, as an engine has it; skips the test without its kernels."""
    require(settings.get("kernels"))
    if directory is not None:
        settings["model"] = str(directory)
    defaults = {"kv_blocks": 128, "threads": 1, "dtype": "float32"}
    return build.load(EngineConfig(**{**defaults, **settings}))


class Bench:
    def __init__(self, make_engine):
        """make_engine: what makes an engine that publishes through its argument."""
        self._reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.reports: list[StepReport] = []  # those that were looked at
        self.engine = make_engine(self._reports.put)

    def __enter__(self):
        self.engine.start()
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self.engine.submit(self.engine._blocks.check).result(WAIT_S)
        finally:
            self.engine.stop()

    def next_report(self):
        self.reports.append(self._reports.get(timeout=WAIT_S))
        return self.reports[-1]

    def total(self, name):
        """The sum of a number of all reports that were looked at."""
        return sum(getattr(report, name) for report in self.reports)

    def until(self, seq_id, *fields):
        """The first progress of a sequence that has one of these fields set."""
        while True:
            for progress in self.next_report().progress:
                if progress.seq_id == seq_id and any(getattr(progress, name) for name in fields):
                    return progress

    def finish(self, *sequences):
        """Runs sequences to their ends, which must not be failures: what each got, by its id."""
        for added in [self.engine.add(sequence) for sequence in sequences]:
            added.result(WAIT_S)  # all are there before the first gets far
        got: dict[str, list[SequenceProgress]] = {sequence.seq_id: [] for sequence in sequences}
        running = set(got)
        while running:
            for progress in self.next_report().progress:
                assert progress.abort_reason is None
                got.setdefault(progress.seq_id, []).append(progress)
                if progress.finish_reason:
                    running.discard(progress.seq_id)
        return got

    def tokens(self, *sequences):
        """Tokens that sequences got until their ends, by their ids."""
        return {name: tokens_of(got) for name, got in self.finish(*sequences).items()}


def tokens_of(got):
    return [token for progress in got for token in progress.token_ids]
