"""Export of the access and the audit log, to a collector that answers as a real one."""

import logging
import queue
from concurrent import futures
from contextlib import closing

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc

from baton.local import ports
from baton.log_format import audit
from baton.telemetry import span_export, tracing
from tests.waiting import WAIT_S

TRACE_ID = "ab" * 16


class Collector(logs_service_pb2_grpc.LogsServiceServicer):
    """Its address, and the log records that it received."""

    def __init__(self, port=0):
        self.received = queue.SimpleQueue()
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def Export(self, request, context):
        for resource in request.resource_logs:
            name = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_logs:
                for record in scope.log_records:
                    self.received.put((name["service.name"], scope.scope.name, record))
        return logs_service_pb2.ExportLogsServiceResponse()

    def close(self):
        self._server.stop(0).wait()


@pytest.fixture
def loggers(caplog):
    for name in ("baton.access", "baton.audit"):
        caplog.set_level(logging.INFO, name)


def exporting(port):
    """A router's telemetry whose logs go to that port until it is closed."""
    return closing(tracing.setup("baton-router", None, logs=f"http://127.0.0.1:{port}"))


def log_request(**fields):
    logging.getLogger("baton.access").info("request", extra={"fields": fields})


def test_access_and_audit_lines_arrive_with_their_fields_and_trace(loggers):
    with closing(Collector()) as collector, exporting(collector.port):
        log_request(tenant="acme\n", ttft_ms=12.5, batch=False, trace_id=TRACE_ID)
        audit("role changed", worker="w1")
        logging.getLogger("baton.other").warning("not exported")
        (service, scope, line), (_, other, changed) = (
            collector.received.get(timeout=WAIT_S) for _ in range(2)
        )
    assert (service, scope, other) == ("baton-router", "baton.access", "baton.audit")
    assert line.trace_id.hex() == TRACE_ID and line.time_unix_nano > 0
    found = {one.key: one.value for one in line.attributes}
    assert found["tenant"].string_value == "acme\\n" and found["ttft_ms"].double_value == 12.5
    assert "trace_id" not in found
    assert changed.body.string_value == "role changed" and changed.severity_text == "INFO"
    log_request(tenant="after the end")
    assert collector.received.empty()


def test_lines_wait_for_a_collector_that_starts_late(loggers, monkeypatch):
    monkeypatch.setattr(span_export, "_FIRST_DELAY_S", 0.05)
    with exporting(port := ports.free()):
        log_request(tenant="early")
        with closing(Collector(port)) as collector:
            _, _, line = collector.received.get(timeout=WAIT_S)
        assert line.attributes[0].value.string_value == "early"


def test_a_collector_that_is_not_there_is_named_and_not_waited_for(loggers, caplog):
    with exporting(ports.free()):
        log_request(tenant="lost")
    lines = [one.getMessage() for one in caplog.records if one.name.endswith("span_export")]
    assert len(lines) == 1 and lines[0].startswith("cannot export logs to http://127.0.0.1:")
