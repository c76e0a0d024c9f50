"""What a decode worker reports to a router about one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.step_report import SequenceProgress
from baton.worker.dispatch_service import RouterStream
from baton.worker.messages import FINISH_REASONS, logprobs_proto, prompt_logprobs_proto


@dataclass(eq=False)
class EventStream:
    """The events of one sequence: at least `interval` tokens each, except the first and the last.

    They leave within `SOON_S`, but the first token of a request, which is `awaited`, at once.

    `per_token` is set from the first event on if every token is an event: callers may then add a
    sequence's only token to the router's message themselves.
    """

    router: RouterStream
    handoff_id: str
    interval: int = 1
    awaited: bool = True
    started: bool = False
    per_token: bool = False
    _held: SequenceProgress | None = None  # tokens kept for the next event

    def send(self, progress: SequenceProgress, *, from_step: bool = True) -> None:
        """Adds an event to the router's message, or keeps the tokens for the next one.

        from_step: False if the handoff was aborted, not an engine step.
        """
        if (held := self._held) is not None:
            self._held = None
            if progress.abort_reason:  # the failed step gave none of the held tokens
                self._add(held)
            else:
                progress = progress._replace(
                    token_ids=held.token_ids + progress.token_ids,
                    logprobs=held.logprobs + progress.logprobs,
                )
        is_last = progress.finish_reason or progress.abort_reason
        is_full = len(progress.token_ids) >= self.interval
        if is_last or is_full or progress.prompt_logprobs or not self.started:
            self.started, self.per_token = True, self.interval <= 1
            self._add(progress, from_step)
            if self.awaited:
                self.awaited = False
                self.router.flush()
        else:
            self._held = progress

    def _add(self, progress: SequenceProgress, from_step: bool = True) -> None:
        # Fields that most events lack are set separately: an empty argument costs like a set one.
        event = self.router.outgoing_soon.events.add(
            handoff_id=self.handoff_id, token_ids=progress.token_ids
        )
        if progress.logprobs:
            event.logprobs.extend(map(logprobs_proto, progress.logprobs))
        if progress.finish_reason:
            event.finish_reason = FINISH_REASONS[progress.finish_reason]
        if progress.abort_reason:
            event.abort_reason, event.invalid = progress.abort_reason, progress.invalid
            event.step_failed = from_step
        if progress.prompt_logprobs is not None:
            event.prompt_logprobs.CopyFrom(prompt_logprobs_proto(progress.prompt_logprobs))
