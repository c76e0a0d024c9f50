"""Delivers one request's tokens to its caller as text, until the deadline at the latest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton.errors import ENDINGS, BatonError, DeadlineExceeded, as_exception
from baton.generation.enum_names import FINISH_REASONS
from baton.v1 import common_pb2, inference_pb2
from router.output.sink import Piece, Sink
from router.output.text_stream import TextStream
from router.request import RequestState

_STOP = common_pb2.FINISH_REASON_STOP


class Delivery:
    """Delivers one request's events from its workers to its sink."""

    def __init__(
        self,
        state: RequestState,
        text: TextStream,
        sink: Sink,
        on_tokens: Callable[[int, float | None], None],
        on_first: Callable[[], None],
    ) -> None:
        """`on_tokens` is called with the number of delivered tokens and the seconds since the last
        delivery, if that is a measurement; `on_first` once, after the first output of a request
        that resumes none.
        """
        self._state = state
        self._text = text
        self._sink = sink
        self._on_tokens = on_tokens
        self._on_first = None if state.request.resumed else on_first
        # Tokens that are held back until there are several have no time of their own.
        self._measures_gaps = state.request.stream_interval <= 1
        self.scope = asyncio.timeout(state.request.time_left_s)  # around all work of the request
        self._error: Exception | None = None
        self.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def progress(self) -> str:
        """How far the request has come, for error texts."""
        return f"after {len(self._state.delivered)} tokens"

    def start(self, started: inference_pb2.Started) -> None:
        self._sink.start(started)

    def put(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        reason: common_pb2.FinishReason,
    ) -> bool:
        """Delivers a worker's output; see `router.dispatch.attempt.Deliver`.

        A stop string may end among the tokens of a step: later tokens are not delivered.
        """
        try:
            text, count = self._text.advance(token_ids, FINISH_REASONS[reason])
            if stopped := self._text.stop is not None:
                token_ids, logprobs, reason = token_ids[:count], logprobs[:count], _STOP
            if reason == _STOP and self._text.calls_tools:
                reason = common_pb2.FINISH_REASON_TOOL_CALLS
            self.finish_reason = reason
            if not self._state.delivered and self._state.request.params.prompt_logprobs is not None:
                self._put_prompt_logprobs()
            gap_s = self._state.deliver(token_ids)
            stop, parsed = self._text.stop or "", self._text.parsed
            self._sink.put(Piece(text, token_ids, logprobs, reason, stop, parsed))
            self._on_tokens(len(token_ids), gap_s if self._measures_gaps else None)
            if on_first := self._on_first:
                self._on_first = None
                on_first()
            return stopped
        except ENDINGS:
            raise
        except BaseException as error:
            self._error = as_exception(error)
            return True

    def _put_prompt_logprobs(self) -> None:
        logprobs, prompt = self._state.prompt_logprobs, self._state.request.prompt
        assert logprobs is not None and len(logprobs.logprobs) == len(prompt) - 1
        logprobs.token_ids.extend(prompt)
        self._sink.prompt(logprobs)

    def end(self, error: BatonError) -> None:
        """Ends the request with an error from outside its task, unless it has ended."""
        if self._error is None and not self.scope.expired():
            self._error = error
            self.scope.reschedule(asyncio.get_running_loop().time())

    @property
    def timeout_error(self) -> Exception:
        """The cause of the scope's TimeoutError: an error given to `end`, or the deadline."""
        return self._error or DeadlineExceeded(f"the deadline passed {self.progress}")

    async def finish(self, route: common_pb2.Route) -> None:
        """Sends the end, unless output could not be delivered. `route`: the workers to report."""
        if self._error is not None:
            raise self._error
        usage = self._state.usage()
        usage.reasoning_tokens = self._text.reasoning_tokens
        request = self._state.request
        labels = request.scoring.scores(self._state.pooled) if request.scoring else []
        await self._sink.finish(
            inference_pb2.Finish(
                reason=self.finish_reason,
                stop=self._text.stop or "",
                usage=usage,
                timing=self._state.timing(),
                route=route,
                embedding=() if request.scoring else self._state.pooled,
                labels=[
                    inference_pb2.LabelScore(name=one.name, logit=one.logit, score=one.score)
                    for one in labels
                ],
            )
        )
