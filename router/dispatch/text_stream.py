"""Turns one request's tokens into text: detokenizer and stop strings, kept at the router.

Because this state lives here, no worker's death can lose half a character or half a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.text import AnyTokenizer, Detokenizer, StopStrings
from router.dispatch.request_state import Ask


class TextStream:
    """Feed it tokens in order; `stop` is set once a stop string was met."""

    def __init__(self, tokenizer: AnyTokenizer, ask: Ask) -> None:
        self._detokenizer = Detokenizer(tokenizer, ask.prompt)
        self._stops = StopStrings(ask.stop, ask.include_stop)
        self.stop: str | None = None
        if ask.resumed:
            self.advance(ask.resumed, None)  # its text was said by the stream that broke

    def advance(self, token_ids: Sequence[int], finish_reason: str | None) -> str:
        """Text that new tokens make certain; all of it when `finish_reason` says they are the last.

        A token that ended the sequence by itself ("stop") is no text.
        """
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        text, self.stop = self._stops.push(self._detokenizer.push(shown))
        if finish_reason is None or self.stop is not None:
            return text
        rest, self.stop = self._stops.push(self._detokenizer.flush())
        return text + rest + ("" if self.stop is not None else self._stops.flush())
