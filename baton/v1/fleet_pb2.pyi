from baton.v1 import common_pb2 as _common_pb2
from baton.v1 import inference_pb2 as _inference_pb2
from baton.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("incarnation", "address", "pid", "state", "model", "queued", "running", "registry_connected", "cluster")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    address: str
    pid: int
    state: str
    model: str
    queued: int
    running: int
    registry_connected: bool
    cluster: str
    def __init__(self, incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., registry_connected: bool = ..., cluster: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("router", "workers", "pairs")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    router: RouterStatus
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    pairs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.PairStatus]
    def __init__(self, router: _Optional[_Union[RouterStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[_worker_pb2.PairStatus, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("prefill", "decode", "refused", "ttft_ms", "tpot_ms", "queue_tokens", "prefill_cached_tokens", "decode_cached_tokens", "same_host", "score")
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
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., refused: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., queue_tokens: _Optional[int] = ..., prefill_cached_tokens: _Optional[int] = ..., decode_cached_tokens: _Optional[int] = ..., same_host: bool = ..., score: _Optional[float] = ...) -> None: ...

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
