from baton.v1 import decode_pb2 as _decode_pb2
from baton.v1 import prefill_pb2 as _prefill_pb2
from baton.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterMessage(_message.Message):
    __slots__ = ("reserve", "prefill", "cancel", "keep_traces")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    KEEP_TRACES_FIELD_NUMBER: _ClassVar[int]
    reserve: _containers.RepeatedCompositeFieldContainer[_decode_pb2.ReserveRequest]
    prefill: _containers.RepeatedCompositeFieldContainer[_prefill_pb2.PrefillRequest]
    cancel: _containers.RepeatedScalarFieldContainer[str]
    keep_traces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reserve: _Optional[_Iterable[_Union[_decode_pb2.ReserveRequest, _Mapping]]] = ..., prefill: _Optional[_Iterable[_Union[_prefill_pb2.PrefillRequest, _Mapping]]] = ..., cancel: _Optional[_Iterable[str]] = ..., keep_traces: _Optional[_Iterable[str]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("handoff_id", "error", "text", "retry_after_ms", "field")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    error: str
    text: str
    retry_after_ms: int
    field: str
    def __init__(self, handoff_id: _Optional[str] = ..., error: _Optional[str] = ..., text: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., field: _Optional[str] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("incarnation", "reserved", "events", "prefill", "failures", "report")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    reserved: _containers.RepeatedCompositeFieldContainer[_decode_pb2.ReserveResponse]
    events: _containers.RepeatedCompositeFieldContainer[_decode_pb2.SequenceEvent]
    prefill: _containers.RepeatedCompositeFieldContainer[_prefill_pb2.PrefillResponse]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    report: _worker_pb2.LoadReport
    def __init__(self, incarnation: _Optional[str] = ..., reserved: _Optional[_Iterable[_Union[_decode_pb2.ReserveResponse, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[_decode_pb2.SequenceEvent, _Mapping]]] = ..., prefill: _Optional[_Iterable[_Union[_prefill_pb2.PrefillResponse, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., report: _Optional[_Union[_worker_pb2.LoadReport, _Mapping]] = ...) -> None: ...
