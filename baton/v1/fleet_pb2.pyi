from baton.v1 import common_pb2 as _common_pb2
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
