"""How a member is written down: key `<prefix><role>/<incarnation>`, value JSON for people too."""

from __future__ import annotations

from google.protobuf import json_format

from baton.errors import InvalidRequest
from baton.v1.common_pb2 import WorkerRecord, WorkerRole

_ROLES = {
    WorkerRole.WORKER_ROLE_PREFILL: "prefill",
    WorkerRole.WORKER_ROLE_DECODE: "decode",
}


def key_of(prefix: str, record: WorkerRecord) -> str:
    """The key of `record`; raises InvalidRequest unless it has a role and an incarnation."""
    if record.role not in _ROLES:
        raise InvalidRequest(f"a worker cannot register in role {record.role}", "role")
    if not record.incarnation or "/" in record.incarnation:
        raise InvalidRequest(f"{record.incarnation!r} is no incarnation", "incarnation")
    return f"{prefix}{_ROLES[record.role]}/{record.incarnation}"


def copy_for_update(old: WorkerRecord, new: WorkerRecord) -> WorkerRecord:
    """A copy of `new`; raises InvalidRequest unless it is about the same worker as `old`."""
    if (new.incarnation, new.role) != (old.incarnation, old.role):
        raise InvalidRequest(
            f"an update of {old.incarnation} cannot name {new.incarnation or 'nobody'} "
            "or another role",
            "incarnation",
        )
    return copied(new)


def copied(record: WorkerRecord) -> WorkerRecord:
    """A copy, so that the caller's later changes stay the caller's."""
    copy = WorkerRecord()
    copy.CopyFrom(record)
    return copy


def incarnation_of(key: bytes) -> str:
    """The last part of a key."""
    return key.decode(errors="replace").rpartition("/")[2]


def encode(record: WorkerRecord) -> bytes:
    """The value stored for `record`: one line of JSON."""
    return json_format.MessageToJson(record, indent=None).encode()


def decode(key: bytes, value: bytes) -> WorkerRecord:
    """The record stored at `key`. Fields of a newer version are passed over.

    Raises InvalidRequest for a value that is no record, has a role that is not known here, or
    belongs under another key.
    """
    record = WorkerRecord()
    try:
        json_format.Parse(value, record, ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{key!r} does not hold a worker record: {error}") from error
    if record.incarnation != incarnation_of(key):
        raise InvalidRequest(f"{key!r} holds the record of {record.incarnation!r}")
    if record.role not in _ROLES:
        raise InvalidRequest(f"{key!r} holds a worker of role {record.role}, not known here")
    return record
