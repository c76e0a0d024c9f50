from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("record", "load", "pairs")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    record: _common_pb2.WorkerRecord
    load: Load
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    def __init__(self, record: _Optional[_Union[_common_pb2.WorkerRecord, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queue_tokens", "running", "waiting", "blocks_total", "blocks_free", "blocks_cached", "blocks_held", "blocks_quarantined", "prefill_tokens_per_s", "step_ms", "steps", "preemptions", "step_age_ms", "tokens_computed", "tokens_generated", "chunk_tokens")
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_tokens: int
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_quarantined: int
    prefill_tokens_per_s: float
    step_ms: float
    steps: int
    preemptions: int
    step_age_ms: float
    tokens_computed: int
    tokens_generated: int
    chunk_tokens: int
    def __init__(self, queue_tokens: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_held: _Optional[int] = ..., blocks_quarantined: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_ms: _Optional[float] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., step_age_ms: _Optional[float] = ..., tokens_computed: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("stored", "evicted", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    cleared: bool
    def __init__(self, stored: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ..., cleared: bool = ...) -> None: ...

class PairStatus(_message.Message):
    __slots__ = ("prefill", "decode", "transport", "state", "epoch", "sent_bytes", "sent_ms", "fallback")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_MS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    transport: _common_pb2.Transport
    state: str
    epoch: int
    sent_bytes: int
    sent_ms: float
    fallback: str
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., sent_ms: _Optional[float] = ..., fallback: _Optional[str] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("load", "state", "cache", "pairs")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    load: Load
    state: _common_pb2.WorkerState
    cache: CacheEvent
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., state: _Optional[_Union[_common_pb2.WorkerState, str]] = ..., cache: _Optional[_Union[CacheEvent, _Mapping]] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
