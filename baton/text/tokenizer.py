"""Tokenizers: texts and conversations to token ids, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from baton.checkpoint_files import MAX_JSON_BYTES, read_bytes
from baton.errors import (
    ENDINGS,
    CheckpointError,
    ContextOverflow,
    InternalError,
    InvalidRequest,
    quoted,
)
from baton.text import detokenizer
from baton.text.chat_template import ChatTemplate, Message
from baton.text.detokenizer import TokenPieces
from baton.text.model_files import (
    CONFIG_FILE,
    DEFAULT_TEMPLATE,
    TOKENIZER_FILE,
    TOOL_TEMPLATE,
    TextFiles,
)
from baton.text.scoring import (
    DOCUMENT,
    PAIR_TEMPLATE,
    QUERY,
    ROLES,
    Scoring,
    embeds,
    renders_pairs,
)
from baton.text.segment_cache import SegmentCache

MAX_CHARS_AT_ONCE = 4096  # on an event loop; longer texts take milliseconds
_PIECE_CHARS = 1 << 16
# More than texts of any language have: a longer text has too many tokens.
_MANY_CHARS_PER_TOKEN = 6
_TRIAL = "Hello, W\u00f6rld!\n 12"
# Tokens before the prefix, before the suffix, and after the suffix.
_FILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
)
_PAIRS = ChatTemplate(PAIR_TEMPLATE, {}, "the template of pairs")
_CUT_TOKENS = 64  # more tokens than a cut inside a word and special tokens can add


class Tokenizer:
    """The tokenizer of a Hugging Face model directory, for any thread.

    A model that is only a config accepts token ids only, and its output has no text. Encoding a
    long text takes seconds and releases the interpreter lock, so it belongs in a thread.
    """

    def __init__(
        self, library: tokenizers.Tokenizer | None, files: TextFiles, path: Path = Path()
    ) -> None:
        """`path`: the directory or file that `files` was read from."""
        self.path = path
        self.vocab_size = files.vocab_size  # token ids are below this
        self.max_context = files.max_context  # tokens; 0 if config.json has none
        # Tokens that end an output, from the generation, model or tokenizer config.
        self.eos_token_ids = files.eos_token_ids
        # Equal to `text_fingerprint` of the same directory, on any machine.
        self.fingerprint = files.fingerprint
        if library is not None and files.added_tokens:
            added = [tokenizers.AddedToken(**token) for token in files.added_tokens]
            library.add_tokens(added)
            library.add_special_tokens([token for token in added if token.special])
        # For `Detokenizer`; without a tokenizer, no id has text.
        self.pieces = TokenPieces(library or tokenizers.Tokenizer(models.BPE()))
        self.has_text = library is not None  # whether texts can be encoded and decoded
        self._library = library
        self._added = frozenset(library.get_added_tokens_decoder() if library else ())
        self._segments: SegmentCache | None = None
        self.special_tokens = files.special_tokens  # texts by name, as "bos_token"
        self.template: ChatTemplate | None = None  # for chats without tools
        self.tool_template: ChatTemplate | None = None
        self._bos_token_id: int | None = None
        self._fill: tuple[int, ...] | None = None  # fill-in-the-middle tokens
        self.scoring: Scoring | None = None  # how the checkpoint scores a prompt, if it does
        self.embeds = False  # whether it is an embedding model
        if library is None:
            return
        # A tokenizer.json may have limits of the training; prompts are never truncated or padded.
        library.no_truncation()
        library.no_padding()
        self.vocab_size = files.vocab_size or library.get_vocab_size()
        templates = {
            name: ChatTemplate(text, files.special_tokens, str(file))
            for name, (text, file) in files.chat_templates.items()
        }
        self.scoring = Scoring.read(files.config_file, files.config, self.token_id)
        self.embeds = embeds(files.config_file.parent)
        self.template = templates.get(DEFAULT_TEMPLATE)
        self.tool_template = templates.get(TOOL_TEMPLATE, self.template)
        if bos := files.special_tokens.get("bos_token"):
            self._bos_token_id = library.token_to_id(bos)
        for names in _FILL_TOKENS:
            found = [token for name in names if (token := library.token_to_id(name)) is not None]
            if len(found) == len(names):
                self._fill = tuple(found)
        name = files.special_tokens.get("eos_token")
        if not self.eos_token_ids and name and (token := library.token_to_id(name)) is not None:
            self.eos_token_ids = frozenset([token] if token < self.vocab_size else [])

    @property
    def has_chat_template(self) -> bool:
        """Whether it accepts chats."""
        return self.tool_template is not None

    def use_template(self, file: Path) -> None:
        """Replaces the checkpoint's chat templates. Raises CheckpointError naming the file."""
        try:
            source = read_bytes(file, MAX_JSON_BYTES).decode()
        except FileNotFoundError:
            raise CheckpointError(f"{file}: not found") from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        self.template = self.tool_template = ChatTemplate(source, self.special_tokens, str(file))

    def keep_segments(self, max_bytes: int) -> None:
        """Caches ids of chats' segments from now on; then for one thread only."""
        if self._library is not None:
            self._segments = SegmentCache(self._library, max_bytes)

    def encode(self, text: str, max_tokens: int = 0, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds by default.

        An empty text is the beginning-of-sequence token, if there is one. Raises InvalidRequest
        (field "text") for a lone surrogate, or for text far longer than `max_tokens`; 0: no limit.
        """
        found = self._encode(text, "text", max_tokens, add_special_tokens=add_special_tokens)
        if not (text or found) and self._bos_token_id is not None:
            return [self._bos_token_id]
        return found

    def encode_between(self, before: str, after: str, max_tokens: int = 0) -> list[int]:
        """Token ids of a fill-in-the-middle prompt.

        Raises InvalidRequest (field "suffix") for a model without such tokens, and as `encode`.
        """
        if self._fill is None:
            raise InvalidRequest(
                "this model's tokenizer has no tokens for the middle of a text: leave suffix out",
                "suffix",
            )
        first, second, last = self._fill
        parts = [self._encode(text, "text", max_tokens, add_special_tokens=False)
                 for text in (before, after)]  # fmt: skip
        begin = self._encode("", "text", 0, add_special_tokens=True)
        return [*begin, first, *parts[0], second, *parts[1], last]

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokens of each text, at the beginning of an output and after a space, as in vLLM."""
        found = list[tuple[int, ...]]()
        for word in words:
            alone = tuple(self._encode(word, "bad_words", 0, add_special_tokens=False))
            behind = tuple(
                self._encode(" " + word.lstrip(), "bad_words", 0, add_special_tokens=False)
            )
            if alone:
                found.append(alone)
            if behind and len(behind) == len(alone) and behind[0] != alone[0]:
                found.append(behind)
        return tuple(found)

    def encode_chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = 0,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        at_once: bool = False,
        salt: str = "",
    ) -> list[int]:
        """Token ids of a conversation up to the assistant's answer; see `ChatTemplate`.

        Cached ids are shared within a `salt` only. Raises InvalidRequest (field "chat") without a
        template, or if it refuses the messages; with `at_once`, TimeoutError if it would block the
        event loop.
        """
        template = self.tool_template if (variables or {}).get("tools") else self.template
        if self._library is not None and template is None:
            without = " for chats without tools" if self.has_chat_template else ""
            raise InvalidRequest(
                f"this model has no chat template{without}: send text or token ids", "chat"
            )
        text = ""
        if template is not None:
            text = template.render(messages, variables, continue_final_message, at_once)
        if at_once and len(text) > MAX_CHARS_AT_ONCE:
            raise TimeoutError
        # The template writes special tokens.
        return self._encode(
            text, "chat", max_tokens, add_special_tokens=add_special_tokens, salt=salt
        )

    def encode_pair(self, messages: Sequence[Message], max_tokens: int = 0) -> list[int]:
        """Token ids of a query and a document, messages of these roles, for a reranker.

        The chat template renders them if it has these roles. Else a classification head gets them
        as the tokenizer joins two texts, and other models the prompt of Qwen3-Reranker, which a
        message of the role "system" may instruct. Raises InvalidRequest (field "chat").
        """
        if self.template is not None and renders_pairs(self.template.source):
            return self.encode_chat(messages, max_tokens)
        if self.scoring is None or self.scoring.token_ids:
            text = _PAIRS.render(messages)
            return self._encode(text, "chat", max_tokens, add_special_tokens=False)
        by_role = {str(message["role"]): str(message["content"]) for message in messages}
        if by_role.keys() != set(ROLES):
            raise InvalidRequest("this model takes a query and a document, no instruction", "chat")
        self._check_text(by_role[QUERY] + by_role[DOCUMENT], "chat")
        (found,) = self._ids([(by_role[QUERY], by_role[DOCUMENT])], add_special_tokens=True)
        return found

    def token_id(self, text: str) -> int:
        """The id of a text that is one token. Raises InvalidRequest for other texts."""
        found = self._encode(text, "text", 0, add_special_tokens=False)
        if len(found) != 1:
            raise InvalidRequest(f"{quoted(text)} is not one token of this model", "text")
        return found[0]

    def added_token(self, text: str) -> int | None:
        """The id of an added token, which is one token anywhere in a text."""
        library = self._library
        token_id = None if library is None else library.token_to_id(text)
        return token_id if token_id in self._added else None

    def showing(self, texts: Iterable[str]) -> TokenPieces:
        """Pieces for an output that shows these special tokens."""
        ids = [token for text in texts if (token := self.added_token(text)) is not None]
        return self.pieces.showing(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens, equal to a Detokenizer's."""
        return detokenizer.decode(self.pieces, token_ids)

    def _encode(
        self,
        text: str,
        field: str,
        max_tokens: int,
        *,
        add_special_tokens: bool,
        salt: str | None = None,
    ) -> list[int]:
        """Token ids; with a `salt`, from the cache."""
        self._check_text(text, field)
        if max_tokens and len(text) > max(_PIECE_CHARS, max_tokens * _MANY_CHARS_PER_TOKEN):
            # Piece by piece: encoding takes 200 bytes for each token.
            count = 0
            for start in range(0, len(text), _PIECE_CHARS):
                (ids,) = self._ids([text[start : start + _PIECE_CHARS]])
                count += len(ids) - _CUT_TOKENS
                if count > max_tokens:
                    raise _too_many(count, max_tokens, field)
        if salt is not None and self._segments is not None and not add_special_tokens:
            found = self._segments.encode(text, self._ids, salt, max_tokens)
        else:
            (found,) = self._ids([text], add_special_tokens)
        if max_tokens and len(text) > _PIECE_CHARS and len(found) > max_tokens:
            raise _too_many(len(found) - 1, max_tokens, field)
        return found

    def _check_text(self, text: str, field: str) -> None:
        if self._library is None:
            raise InvalidRequest("this model has no tokenizer: send token ids", field)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{field} is not Unicode text: {error}", field) from error

    def _ids(
        self, texts: Sequence[str | tuple[str, str]], add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Token ids of each text or pair of texts."""
        assert self._library is not None
        # The library's `encode` holds the interpreter lock: 2.4 s for 2 MB of text.
        encode = self._library.encode_batch_fast
        try:
            return [one.ids for one in encode(texts, add_special_tokens=add_special_tokens)]
        except ENDINGS:
            raise
        except BaseException as error:  # Rust's panics are not Exceptions
            raise InternalError(f"the tokenizer failed: {error}") from error


def _too_many(num_tokens: int, max_tokens: int, field: str) -> ContextOverflow:
    text = f"{field} has more than {num_tokens} tokens and the context holds {max_tokens}"
    return ContextOverflow(text, field, max_tokens)


def load_tokenizer(path: Path, *, required: bool = False) -> Tokenizer:
    """Loads a model directory's tokenizer; unless `required`, a config has one without text.

    Raises CheckpointError naming a missing or broken file.
    """
    files = TextFiles.read(path)
    if files.tokenizer_json is None:
        if required:
            raise CheckpointError(f"{path / TOKENIZER_FILE}: not found")
        if not files.vocab_size:
            file = path / CONFIG_FILE if path.is_dir() else path
            raise CheckpointError(f"{file}: no vocab_size, and there is no {TOKENIZER_FILE}")
        return Tokenizer(None, files)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        library = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        tokenizer = Tokenizer(library, files, path)
        for add_special_tokens in (False, True):
            tokenizer.decode(tokenizer.encode(_TRIAL, add_special_tokens=add_special_tokens))
    except (CheckpointError, *ENDINGS):
        raise
    except InternalError as error:
        raise CheckpointError(
            f"{file}: {error}: it cannot encode a short text, so correct it (a post_processor may "
            "name a token that is not there) or take its maker's"
        ) from error
    # The library raises Exception for unreadable files, or a Rust panic, which is not one.
    except BaseException as error:
        reason = str(error)[:200]
        raise CheckpointError(f"{file}: not a tokenizer: {reason}") from error
    return tokenizer
