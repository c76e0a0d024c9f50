from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveRequest(_message.Message):
    __slots__ = ("stream_id", "sequence", "local_prefill_max_tokens")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    sequence: _common_pb2.SequenceSpec
    local_prefill_max_tokens: int
    def __init__(self, stream_id: _Optional[str] = ..., sequence: _Optional[_Union[_common_pb2.SequenceSpec, _Mapping]] = ..., local_prefill_max_tokens: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation_token", "cached_tokens", "started", "incarnation")
    RESERVATION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    reservation_token: str
    cached_tokens: int
    started: bool
    incarnation: str
    def __init__(self, reservation_token: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., started: bool = ..., incarnation: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("handoff_ids",)
    HANDOFF_IDS_FIELD_NUMBER: _ClassVar[int]
    handoff_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, handoff_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamEventsRequest(_message.Message):
    __slots__ = ("router_id", "heartbeat_ms", "stream_id")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    heartbeat_ms: int
    stream_id: str
    def __init__(self, router_id: _Optional[str] = ..., heartbeat_ms: _Optional[int] = ..., stream_id: _Optional[str] = ...) -> None: ...

class SequenceEvent(_message.Message):
    __slots__ = ("handoff_id", "token_ids", "logprobs", "finish_reason", "abort_reason", "invalid")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ABORT_REASON_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    finish_reason: _common_pb2.FinishReason
    abort_reason: str
    invalid: bool
    def __init__(self, handoff_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., abort_reason: _Optional[str] = ..., invalid: bool = ...) -> None: ...

class StreamEventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[SequenceEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[SequenceEvent, _Mapping]]] = ...) -> None: ...
