"""Errors as messages."""

from baton import errors
from baton.net.failures import error_of, failure_of
from baton.v1.dispatch_pb2 import Failure


def test_errors_keep_their_kind_advice_and_field():
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.BatonError):
            failure = Failure.FromString(failure_of(cls("why"), "h").SerializeToString())
            assert (failure.handoff_id, failure.error, type(error_of(failure))) == ("h", name, cls)
            assert str(error_of(failure)) == "why"
    assert error_of(failure_of(errors.Overloaded("full", 2.5))).retry_after_s == 2.5
    assert error_of(failure_of(errors.InvalidRequest("bad", "sequence"))).field == "sequence"
    assert str(error_of(failure_of(errors.InvalidRequest("\ud800")))) == "?"
    of_a_newer_version = Failure(error="NewKind", text="why")
    assert type(error_of(of_a_newer_version)) is errors.InternalError
    unexpected = error_of(failure_of(ValueError("x")))
    assert type(unexpected) is errors.InternalError and "ValueError" in str(unexpected)
