from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffTarget(_message.Message):
    __slots__ = ("incarnation", "reservation_token", "cached_tokens")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    reservation_token: str
    cached_tokens: int
    def __init__(self, incarnation: _Optional[str] = ..., reservation_token: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "target", "trace")
    class TraceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    sequence: _common_pb2.SequenceSpec
    target: HandoffTarget
    trace: _containers.ScalarMap[str, str]
    def __init__(self, sequence: _Optional[_Union[_common_pb2.SequenceSpec, _Mapping]] = ..., target: _Optional[_Union[HandoffTarget, _Mapping]] = ..., trace: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("queue_ms", "cached_tokens")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    cached_tokens: int
    def __init__(self, queue_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillFirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "finish_reason", "embedding")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _common_pb2.PositionLogprobs
    finish_reason: _common_pb2.FinishReason
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.PositionLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class PrefillCommitted(_message.Message):
    __slots__ = ("transfer_bytes", "transfer_ms", "transport")
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    transfer_bytes: int
    transfer_ms: float
    transport: _common_pb2.Transport
    def __init__(self, transfer_bytes: _Optional[int] = ..., transfer_ms: _Optional[float] = ..., transport: _Optional[_Union[_common_pb2.Transport, str]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("handoff_id", "started", "first_token", "committed", "prompt_logprobs")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    started: PrefillStarted
    first_token: PrefillFirstToken
    committed: PrefillCommitted
    prompt_logprobs: _common_pb2.PromptLogprobs
    def __init__(self, handoff_id: _Optional[str] = ..., started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., committed: _Optional[_Union[PrefillCommitted, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...
