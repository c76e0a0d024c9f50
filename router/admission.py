"""The door: turns a request into a validated `Ask` in tokens, or refuses it before any work."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.errors import DeadlineExceeded, InvalidRequest, ModelNotFound
from baton.sampling import SamplingParams
from baton.text import AnyTokenizer, check_stop_strings
from baton.v1 import inference_pb2
from router.story import Ask

_LONG_TEXT_CHARS = 4096  # longer texts are tokenized on a thread, off the event loop


@dataclass(frozen=True)
class Admission:
    """What a router knows of its model."""

    model: str
    tokenizer: AnyTokenizer
    default_timeout_s: float

    async def admit(
        self,
        request: inference_pb2.GenerateRequest,
        time_left_s: float | None,
        max_context: int,
        request_id: str,
    ) -> Ask:
        """The request in tokens. Raises InvalidRequest, ModelNotFound or DeadlineExceeded.

        `max_context` is what workers take, 0 where none is known yet.
        """
        timeout_s = self.default_timeout_s if time_left_s is None else time_left_s
        if timeout_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        deadline = time.monotonic() + timeout_s
        self.check_model(request.model)
        params = SamplingParams.from_proto(request.sampling)
        if not request.sampling.HasField("seed"):
            params = replace(params, seed=secrets.randbits(64))
        params.validate(self.tokenizer.vocab_size)
        self._check_stop(request.stop)
        try:
            async with asyncio.timeout(timeout_s):
                prompt = await self.tokenize(request)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed during tokenizing") from None
        self._check_prompt(prompt, max_context)
        return Ask(
            request_id=request_id,
            prompt=tuple(prompt),
            params=params,
            stop=tuple(request.stop),
            include_stop=request.include_stop,
            cache_salt=request.cache_salt,
            deadline=deadline,
        )

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound unless the request means the model that is served."""
        if model not in ("", self.model):
            raise ModelNotFound(f"model {model!r} is not served here; {self.model!r} is")

    async def tokenize(
        self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest
    ) -> list[int]:
        """The prompt's token ids, whichever way it was given."""
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("give text, chat or token_ids", "input")
        if kind == "token_ids":
            return list(request.token_ids.ids)  # type: ignore[union-attr]
        if kind == "chat":
            if not request.chat.messages:
                raise InvalidRequest("chat has no messages", "chat")
            return await asyncio.to_thread(self.tokenizer.encode_chat, request.chat.messages)
        if len(request.text) > _LONG_TEXT_CHARS:
            return await asyncio.to_thread(self.tokenizer.encode, request.text)
        return self.tokenizer.encode(request.text)

    def _check_stop(self, stop: Sequence[str]) -> None:
        check_stop_strings(stop)
        if stop and self.tokenizer.pieces is None:
            raise InvalidRequest("this model has no text: stop at token ids instead", "stop")

    def _check_prompt(self, prompt: list[int], max_context: int) -> None:
        limit = min((n for n in (self.tokenizer.max_context, max_context) if n), default=0)
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", "input")
        if limit and len(prompt) >= limit:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and the context holds {limit}, "
                "of which one must be left for output",
                "input",
            )
        if (largest := max(prompt)) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is not below the vocabulary size {self.tokenizer.vocab_size}",
                "token_ids",
            )
