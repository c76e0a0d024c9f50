from baton.v1 import common_pb2 as _common_pb2
from baton.v1 import inference_pb2 as _inference_pb2
from baton.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_FAILOVER: _ClassVar[EventKind]
    EVENT_KIND_REFUSAL: _ClassVar[EventKind]
    EVENT_KIND_FAILURE: _ClassVar[EventKind]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_FAILOVER: EventKind
EVENT_KIND_REFUSAL: EventKind
EVENT_KIND_FAILURE: EventKind

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("incarnation", "address", "pid", "state", "model", "queued", "running", "registry_connected", "cluster", "otlp", "counts", "latency", "events")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    OTLP_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    address: str
    pid: int
    state: str
    model: str
    queued: int
    running: int
    registry_connected: bool
    cluster: str
    otlp: str
    counts: RouterCounts
    latency: Latency
    events: _containers.RepeatedCompositeFieldContainer[RouterEvent]
    def __init__(self, incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., registry_connected: bool = ..., cluster: _Optional[str] = ..., otlp: _Optional[str] = ..., counts: _Optional[_Union[RouterCounts, _Mapping]] = ..., latency: _Optional[_Union[Latency, _Mapping]] = ..., events: _Optional[_Iterable[_Union[RouterEvent, _Mapping]]] = ...) -> None: ...

class RouterCounts(_message.Message):
    __slots__ = ("ended", "refused", "late", "failovers", "prompt_tokens", "cached_tokens", "output_tokens", "served")
    class EndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ServedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    ended: _containers.ScalarMap[str, int]
    refused: int
    late: int
    failovers: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    served: _containers.ScalarMap[str, int]
    def __init__(self, ended: _Optional[_Mapping[str, int]] = ..., refused: _Optional[int] = ..., late: _Optional[int] = ..., failovers: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., served: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("requests", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_P95_MS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    def __init__(self, requests: _Optional[int] = ..., ttft_p50_ms: _Optional[float] = ..., ttft_p95_ms: _Optional[float] = ..., tpot_p50_ms: _Optional[float] = ..., tpot_p95_ms: _Optional[float] = ...) -> None: ...

class RouterEvent(_message.Message):
    __slots__ = ("time_ms", "kind", "text", "times", "request_id", "trace_id")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    kind: EventKind
    text: str
    times: int
    request_id: str
    trace_id: str
    def __init__(self, time_ms: _Optional[int] = ..., kind: _Optional[_Union[EventKind, str]] = ..., text: _Optional[str] = ..., times: _Optional[int] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("record", "load", "state", "reason")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    record: _common_pb2.WorkerRecord
    load: _worker_pb2.Load
    state: str
    reason: str
    def __init__(self, record: _Optional[_Union[_common_pb2.WorkerRecord, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("router", "workers", "pairs", "siblings")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    router: RouterStatus
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    pairs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.PairStatus]
    siblings: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    def __init__(self, router: _Optional[_Union[RouterStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[_worker_pb2.PairStatus, _Mapping]]] = ..., siblings: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("prefill", "decode", "refused", "ttft_ms", "tpot_ms", "queue_tokens", "prefill_cached_tokens", "decode_cached_tokens", "same_host", "score", "decode_prefills", "handed_over_ttft_ms")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    refused: str
    ttft_ms: float
    tpot_ms: float
    queue_tokens: int
    prefill_cached_tokens: int
    decode_cached_tokens: int
    same_host: bool
    score: float
    decode_prefills: bool
    handed_over_ttft_ms: float
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., refused: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., queue_tokens: _Optional[int] = ..., prefill_cached_tokens: _Optional[int] = ..., decode_cached_tokens: _Optional[int] = ..., same_host: bool = ..., score: _Optional[float] = ..., decode_prefills: bool = ..., handed_over_ttft_ms: _Optional[float] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("candidates", "refused", "decode_prefills", "prompt_tokens", "tenant", "queued")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DECODE_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    refused: str
    decode_prefills: bool
    prompt_tokens: int
    tenant: str
    queued: int
    def __init__(self, candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., refused: _Optional[str] = ..., decode_prefills: bool = ..., prompt_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., queued: _Optional[int] = ...) -> None: ...
