from baton.v1 import common_pb2 as _common_pb2
from baton.v1 import dispatch_pb2 as _dispatch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ControlRequest(_message.Message):
    __slots__ = ("call_id", "trace", "offer", "ready", "commit", "abort", "cancel")
    class TraceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    trace: _containers.ScalarMap[str, str]
    offer: OfferRequest
    ready: ReadyRequest
    commit: CommitRequest
    abort: AbortRequest
    cancel: CancelRequest
    def __init__(self, call_id: _Optional[int] = ..., trace: _Optional[_Mapping[str, str]] = ..., offer: _Optional[_Union[OfferRequest, _Mapping]] = ..., ready: _Optional[_Union[ReadyRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("call_id", "offer", "ready", "commit", "abort", "failure")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    offer: OfferResponse
    ready: ReadyResponse
    commit: CommitResponse
    abort: AbortResponse
    failure: _dispatch_pb2.Failure
    def __init__(self, call_id: _Optional[int] = ..., offer: _Optional[_Union[OfferResponse, _Mapping]] = ..., ready: _Optional[_Union[ReadyResponse, _Mapping]] = ..., commit: _Optional[_Union[CommitResponse, _Mapping]] = ..., abort: _Optional[_Union[AbortResponse, _Mapping]] = ..., failure: _Optional[_Union[_dispatch_pb2.Failure, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("incarnation", "target_incarnation", "kv", "transports", "reachable_gpus")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_GPUS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    target_incarnation: str
    kv: _common_pb2.KvDescriptor
    transports: _containers.RepeatedScalarFieldContainer[_common_pb2.Transport]
    reachable_gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, incarnation: _Optional[str] = ..., target_incarnation: _Optional[str] = ..., kv: _Optional[_Union[_common_pb2.KvDescriptor, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[_common_pb2.Transport, str]]] = ..., reachable_gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("transport", "epoch", "endpoint")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    transport: _common_pb2.Transport
    epoch: int
    endpoint: bytes
    def __init__(self, transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., epoch: _Optional[int] = ..., endpoint: _Optional[bytes] = ...) -> None: ...

class ReadyRequest(_message.Message):
    __slots__ = ("handoff_id", "reservation_token", "incarnation", "epoch", "first_token", "num_tokens")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    reservation_token: str
    incarnation: str
    epoch: int
    first_token: int
    num_tokens: int
    def __init__(self, handoff_id: _Optional[str] = ..., reservation_token: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ReadyResponse(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("handoff_id", "reservation_token", "incarnation", "epoch", "num_tokens", "num_bytes", "checksum", "first_token_id", "token_digest")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    reservation_token: str
    incarnation: str
    epoch: int
    num_tokens: int
    num_bytes: int
    checksum: int
    first_token_id: int
    token_digest: bytes
    def __init__(self, handoff_id: _Optional[str] = ..., reservation_token: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., first_token_id: _Optional[int] = ..., token_digest: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("handoff_id", "reservation_token", "incarnation", "reason", "resend")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    reservation_token: str
    incarnation: str
    reason: str
    resend: bool
    def __init__(self, handoff_id: _Optional[str] = ..., reservation_token: _Optional[str] = ..., incarnation: _Optional[str] = ..., reason: _Optional[str] = ..., resend: bool = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
