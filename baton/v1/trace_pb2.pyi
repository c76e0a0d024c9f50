from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReadTracesRequest(_message.Message):
    __slots__ = ("trace_id", "wait_ms")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    wait_ms: int
    def __init__(self, trace_id: _Optional[str] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ReadTracesResponse(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, spans: _Optional[_Iterable[str]] = ...) -> None: ...
