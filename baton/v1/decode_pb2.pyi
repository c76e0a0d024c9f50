from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveRequest(_message.Message):
    __slots__ = ("sequence", "local_prefill_max_tokens", "trace", "stream_interval")
    class TraceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    sequence: _common_pb2.SequenceSpec
    local_prefill_max_tokens: int
    trace: _containers.ScalarMap[str, str]
    stream_interval: int
    def __init__(self, sequence: _Optional[_Union[_common_pb2.SequenceSpec, _Mapping]] = ..., local_prefill_max_tokens: _Optional[int] = ..., trace: _Optional[_Mapping[str, str]] = ..., stream_interval: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("handoff_id", "reservation_token", "cached_tokens", "started")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    reservation_token: str
    cached_tokens: int
    started: bool
    def __init__(self, handoff_id: _Optional[str] = ..., reservation_token: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., started: bool = ...) -> None: ...

class SequenceEvent(_message.Message):
    __slots__ = ("handoff_id", "token_ids", "logprobs", "finish_reason", "abort_reason", "invalid", "prompt_logprobs")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ABORT_REASON_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    finish_reason: _common_pb2.FinishReason
    abort_reason: str
    invalid: bool
    prompt_logprobs: _common_pb2.PromptLogprobs
    def __init__(self, handoff_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., abort_reason: _Optional[str] = ..., invalid: bool = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...
