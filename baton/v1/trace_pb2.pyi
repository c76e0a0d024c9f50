from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TraceOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRACE_ORDER_UNSPECIFIED: _ClassVar[TraceOrder]
    TRACE_ORDER_LATEST: _ClassVar[TraceOrder]
    TRACE_ORDER_SLOWEST: _ClassVar[TraceOrder]
TRACE_ORDER_UNSPECIFIED: TraceOrder
TRACE_ORDER_LATEST: TraceOrder
TRACE_ORDER_SLOWEST: TraceOrder

class AttributeValue(_message.Message):
    __slots__ = ("text", "integer", "number", "flag")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    text: str
    integer: int
    number: float
    flag: bool
    def __init__(self, text: _Optional[str] = ..., integer: _Optional[int] = ..., number: _Optional[float] = ..., flag: bool = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("span_id", "parent_id", "name", "service", "start_ns", "end_ns", "attributes", "is_entry", "error")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: AttributeValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[AttributeValue, _Mapping]] = ...) -> None: ...
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    IS_ENTRY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: _containers.MessageMap[str, AttributeValue]
    is_entry: bool
    error: str
    def __init__(self, span_id: _Optional[str] = ..., parent_id: _Optional[str] = ..., name: _Optional[str] = ..., service: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., attributes: _Optional[_Mapping[str, AttributeValue]] = ..., is_entry: bool = ..., error: _Optional[str] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("trace_id", "wait_ms")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    wait_ms: int
    def __init__(self, trace_id: _Optional[str] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class ListTracesRequest(_message.Message):
    __slots__ = ("order", "most")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    order: TraceOrder
    most: int
    def __init__(self, order: _Optional[_Union[TraceOrder, str]] = ..., most: _Optional[int] = ...) -> None: ...

class TraceSummary(_message.Message):
    __slots__ = ("trace_id", "start_ns", "took_ms", "spans", "error", "input_tokens", "output_tokens", "attempts")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    start_ns: int
    took_ms: float
    spans: int
    error: str
    input_tokens: int
    output_tokens: int
    attempts: int
    def __init__(self, trace_id: _Optional[str] = ..., start_ns: _Optional[int] = ..., took_ms: _Optional[float] = ..., spans: _Optional[int] = ..., error: _Optional[str] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., attempts: _Optional[int] = ...) -> None: ...

class ListTracesResponse(_message.Message):
    __slots__ = ("traces",)
    TRACES_FIELD_NUMBER: _ClassVar[int]
    traces: _containers.RepeatedCompositeFieldContainer[TraceSummary]
    def __init__(self, traces: _Optional[_Iterable[_Union[TraceSummary, _Mapping]]] = ...) -> None: ...
