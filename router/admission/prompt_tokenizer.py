"""Tokenizes prompts: short ones on the event loop, long ones in processes; and detokenizes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from baton.errors import DeadlineExceeded, InvalidRequest
from baton.text import MAX_CHARS_AT_ONCE, Detokenizer, Tokenizer
from baton.v1 import inference_pb2
from router.admission.chat import ChatFormats, check_messages
from router.admission.tenants import Tenant
from router.admission.tokenizer_pool import Text, TokenizerPool
from router.admission.validation import (
    MAX_CHARS_PER_TOKEN,
    check_chars,
    num_chars,
    smallest_limit,
)
from router.request import TenantShare

# Work on threads holds the interpreter lock: more threads would only delay the event loop.
_THREADS = 2

T = TypeVar("T")


class PromptTokenizer:
    """The served model's tokenizer, with the threads and processes for long texts."""

    def __init__(
        self,
        formats: ChatFormats,
        tool_parser: str,
        processes: int,
        chat_template: Path | None = None,
    ) -> None:
        """`chat_template`: the file that the tokenizer has its template from, if not its own."""
        self._formats = formats
        self._tokenizer: Tokenizer = formats.tokenizer
        path, fingerprint = str(self._tokenizer.path.absolute()), self._tokenizer.fingerprint
        template = [str(chat_template.absolute())] if chat_template else []
        self.pool = TokenizerPool((path, fingerprint, tool_parser, *template), processes)
        self._threads = ThreadPoolExecutor(_THREADS, "text")

    async def run_in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Runs long work on one of two threads that do nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def context_limit(self, max_context: int) -> int:
        """Longest sequence in tokens; 0 if none is known yet."""
        return smallest_limit(self._tokenizer.max_context, max_context)

    async def tokenize(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        max_context: int,
        timeout_s: float,
        tenant: Tenant | None = None,
    ) -> Sequence[int]:
        """The prompt's token ids, however it was given.

        Short texts are tokenized on the event loop: a process would take several times as long.
        Raises DeadlineExceeded, and as `TokenizerPool.encode`.
        """
        kind, special = request.WhichOneof("input"), request.add_special_tokens
        if not request.HasField("add_special_tokens"):
            special = kind == "text"
        if kind is None:
            raise InvalidRequest("give text, chat or token_ids", "input")
        if kind == "token_ids":
            return list(request.token_ids.ids)  # type: ignore[union-attr]
        limit, suffix = self.context_limit(max_context), getattr(request, "suffix", "")
        # A prompt that is truncated is checked afterwards.
        max_tokens = 0 if getattr(request, "truncate_prompt_tokens", 0) else limit
        if self._checked_size(request, suffix, limit) or not self._tokenizer.has_text:
            with contextlib.suppress(TimeoutError):
                return self._encode_at_once(request, suffix, max_tokens, special)
        salt = tenant.salt(getattr(request, "cache_salt", "")) if tenant else ""
        data = request.text.encode() if kind == "text" else request.chat.SerializeToString()
        text = Text(kind, data, suffix.encode(), max_tokens, special, salt)
        try:
            async with asyncio.timeout(timeout_s):
                return await self.pool.encode(text, tenant.share if tenant else TenantShare(""))
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed during tokenizing") from None

    @staticmethod
    def _checked_size(
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        suffix: str,
        limit: int,
    ) -> bool:
        """Whether it is short. Raises InvalidRequest for a text that cannot fit the limit."""
        if not request.HasField("chat"):
            size = len(request.text) + len(suffix)
            check_chars(size, limit)
            return size <= MAX_CHARS_AT_ONCE
        check_messages(request.chat.messages)
        num_bytes = request.chat.ByteSize()
        if num_bytes > limit * MAX_CHARS_PER_TOKEN:  # counting characters takes longer
            check_chars(sum(map(num_chars, request.chat.messages)), limit)
        return num_bytes <= MAX_CHARS_AT_ONCE

    def _encode_at_once(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        suffix: str,
        max_tokens: int,
        special: bool,
    ) -> list[int]:
        """Raises TimeoutError for a chat that would block the event loop for too long."""
        if request.HasField("chat"):
            return self._formats.encode(request.chat, max_tokens, special, at_once=True)
        if suffix:
            return self._tokenizer.encode_between(request.text, suffix, max_tokens)
        return self._tokenizer.encode(request.text, max_tokens, special)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises InvalidRequest."""
        if not self._tokenizer.has_text:
            raise InvalidRequest("this model has no tokenizer: its tokens have no text", "tokens")
        vocab_size = self._tokenizer.vocab_size
        if token_ids and (largest := max(token_ids)) >= vocab_size:
            text = f"token id {largest} is not below the vocabulary size {vocab_size}"
            raise InvalidRequest(text, "tokens")
        detokenizer = Detokenizer(self._tokenizer.pieces.showing_all)

        def text_of_all() -> str:
            return detokenizer.push(token_ids) + detokenizer.flush()

        if len(token_ids) > MAX_CHARS_AT_ONCE:
            return await self.run_in_thread(text_of_all)
        return text_of_all()
