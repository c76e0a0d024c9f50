"""A model's tokenizer: text and conversations to token ids, token ids to text.

Encoding a long text takes seconds and releases the interpreter lock: an event loop should
leave it to a thread. Both classes are safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from baton.errors import CheckpointError, InvalidRequest
from baton.text import detokenizer
from baton.text.chat_template import ChatTemplate, ChatTurn
from baton.text.detokenizer import TokenPieces
from baton.text.model_files import CONFIG_FILE, TOKENIZER_FILE, TextFiles

_PIECE_CHARS = 1 << 16
_CUT_TOKENS = 64  # more than a cut in the middle of a word, and special tokens, can add
_NO_TOKENIZER = "this model has no tokenizer: send token ids"


class _TextModel:
    """What both tokenizers say of the model."""

    def __init__(self, files: TextFiles) -> None:
        self.vocab_size = files.vocab_size  # token ids are below this
        self.max_context = files.max_context  # tokens; 0 when config.json does not say
        # Tokens that end an output, from the first of generation, model and tokenizer config.
        self.eos_token_ids = files.eos_token_ids
        # Equal to `text_fingerprint` of the same directory, on any machine.
        self.fingerprint = files.fingerprint


class Tokenizer(_TextModel):
    """The tokenizer of a Hugging Face model directory."""

    def __init__(self, library: tokenizers.Tokenizer, files: TextFiles) -> None:
        super().__init__(files)
        # A tokenizer.json can carry its training's limits; a prompt is never cut or padded.
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.vocab_size = files.vocab_size or library.get_vocab_size()
        source = files.chat_template
        self._template = source and ChatTemplate(
            source.text, files.special_tokens, str(source.file)
        )
        name = files.special_tokens.get("eos_token")
        if not self.eos_token_ids and name and (token := library.token_to_id(name)) is not None:
            self.eos_token_ids = frozenset([token])
        self.pieces = TokenPieces(library)  # what `Detokenizer` reads

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, the configs and the chat template.

        Raises CheckpointError naming the file that is missing or broken.
        """
        files, file = TextFiles.read(directory), directory / TOKENIZER_FILE
        if files.tokenizer_json is None:
            raise CheckpointError(f"{file}: not found")
        try:
            library = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        # The library raises plain Exception for whatever it cannot read.
        except Exception as error:
            raise CheckpointError(f"{file}: not a tokenizer: {str(error)[:200]}") from error
        return cls(library, files)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template is not None

    def encode(self, text: str, max_tokens: int = 0) -> list[int]:
        """Token ids, with the special tokens this tokenizer adds by default.

        Raises InvalidRequest (field "text") for text that is not Unicode (a lone surrogate), or
        is longer by far than `max_tokens`; 0 limits nothing.
        """
        return self._encode(text, "text", max_tokens, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[tuple[str, str] | ChatTurn], max_tokens: int = 0
    ) -> list[int]:
        """Token ids of a conversation, (role, content) each, up to where the assistant answers.

        Raises InvalidRequest (field "chat") when there is no template or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: send text or token ids", "chat")
        # The template writes the special tokens itself.
        text = self._template.render(messages)
        return self._encode(text, "chat", max_tokens, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens; the same that a Detokenizer makes of the ids."""
        return detokenizer.decode(self.pieces, token_ids)

    def _encode(
        self, text: str, field: str, max_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{field} is not Unicode text: {error}", field) from error
        if max_tokens and len(text) > _PIECE_CHARS:
            self._check_length(text, field, max_tokens)
        # The library's `encode` holds the interpreter lock all the time: 2.4 s for 2 MB of text.
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def _check_length(self, text: str, field: str, max_tokens: int) -> None:
        """Counts piece by piece: while it encodes, the library takes 200 bytes for each token."""
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            count += len(self._library.encode_batch_fast([piece])[0]) - _CUT_TOKENS
            if count > max_tokens:
                raise InvalidRequest(
                    f"{field} has more than {count} tokens and the context holds {max_tokens}",
                    field,
                )


class TokenIdsOnly(_TextModel):
    """Stands in for the tokenizer of a model that is only a config: it takes token ids alone."""

    has_chat_template = False
    pieces = None

    @classmethod
    def load(cls, path: Path) -> TokenIdsOnly:
        """Reads a config file, or the one in a directory; raises CheckpointError naming it."""
        files = TextFiles.read(path)
        if not files.vocab_size:
            file = path / CONFIG_FILE if path.is_dir() else path
            raise CheckpointError(f"{file}: no vocab_size, and there is no {TOKENIZER_FILE}")
        return cls(files)

    def encode(self, text: str, max_tokens: int = 0) -> list[int]:
        """Raises InvalidRequest (field "text")."""
        raise InvalidRequest(_NO_TOKENIZER, "text")

    def encode_chat(
        self, messages: Sequence[tuple[str, str] | ChatTurn], max_tokens: int = 0
    ) -> list[int]:
        """Raises InvalidRequest (field "chat")."""
        raise InvalidRequest(_NO_TOKENIZER, "chat")

    def decode(self, token_ids: Sequence[int]) -> str:
        """No text."""
        return ""


AnyTokenizer = Tokenizer | TokenIdsOnly


def load_tokenizer(path: Path) -> AnyTokenizer:
    """The tokenizer of a model directory, or its stand-in for a config without a tokenizer.

    Raises CheckpointError naming the file that is missing or broken.
    """
    if (path / TOKENIZER_FILE).exists():
        return Tokenizer.load(path)
    return TokenIdsOnly.load(path)
