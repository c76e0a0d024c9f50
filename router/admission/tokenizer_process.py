"""A process that renders and tokenizes long texts for a router, which may kill it.

It answers one job after another on the socket that is its standard input, and ends with the
router. The kernel limits a job's CPU time and memory by ending the process: templates and
tokenizers come from a model, and some of their steps cannot be interrupted.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from baton.errors import ENDINGS, BatonError, InternalError, InvalidRequest
from baton.text import load_tokenizer
from baton.v1 import inference_pb2
from router.admission.chat import ChatFormats

HEAD = struct.Struct("<II")  # of a job: bytes of its JSON, and of the text after it
ANSWER = struct.Struct("<cI")  # its kind and number of bytes
IDS, REFUSAL, FAILURE = b"i", b"r", b"f"
MEMORY_BYTES = 1 << 30  # a job's, in addition to the process's own at its start
_NICE = 2  # streams go before new prompts, as on workers
_CACHED_BYTES = 32 << 20  # token ids of parts of chats


def main(path: str, fingerprint: str, tool_parser: str, chat_template: str = "") -> None:
    """Serves until the router closes the connection."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles ctrl-C
    formats, failure = None, ""
    try:
        formats = _load(Path(path), fingerprint, tool_parser, chat_template)
    except BatonError as error:
        failure = str(error)
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as stream:
        while head := stream.read(HEAD.size):
            job_bytes, text_bytes = HEAD.unpack(head)
            job, text = json.loads(stream.read(job_bytes)), stream.read(text_bytes)
            used_s = math.ceil(time.process_time())
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (used_s + job["cpu_s"], hard))
            kind, answer = (
                (FAILURE, failure.encode()) if formats is None else _answer(formats, job, text)
            )
            stream.write(ANSWER.pack(kind, len(answer)) + answer)
            stream.flush()


def _load(path: Path, fingerprint: str, tool_parser: str, chat_template: str) -> ChatFormats:
    """Raises BatonError."""
    tokenizer = load_tokenizer(path)
    if tokenizer.fingerprint != fingerprint:
        raise InternalError(f"{path} has changed since the router was started: restart it")
    if chat_template:
        tokenizer.use_template(Path(chat_template))
    tokenizer.keep_segments(_CACHED_BYTES)
    formats = ChatFormats.from_tokenizer(tokenizer, tool_parser, "none")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return formats


def _answer(formats: ChatFormats, job: dict[str, Any], text: bytes) -> tuple[bytes, bytes]:
    """Kind and bytes of the answer."""
    most, special = job["max_tokens"], job["add_special_tokens"]
    try:
        if job["field"] == "chat":
            chat = inference_pb2.Chat.FromString(text)
            ids = formats.encode(chat, most, special, salt=job["salt"])
        else:
            before, after = text[: job["text_bytes"]].decode(), text[job["text_bytes"] :].decode()
            encode = formats.tokenizer.encode
            between = formats.tokenizer.encode_between
            ids = between(before, after, most) if after else encode(before, most, special)
        return IDS, array("I", ids).tobytes()
    except InvalidRequest as error:
        most = getattr(error, "max_context", None)  # of a ContextOverflow
        return REFUSAL, json.dumps([str(error), error.field, most]).encode()
    except MemoryError:
        reason = f"rendering and tokenizing it takes over {MEMORY_BYTES >> 20} MiB"
        return REFUSAL, json.dumps([reason, job["field"], None]).encode()
    except ENDINGS:
        raise
    except BaseException as error:
        return FAILURE, f"{type(error).__name__}: {error}".encode(errors="replace")


if __name__ == "__main__":
    main(*sys.argv[1:])
