"""Tracing as a process has it, and the spans that it exports, for tests to look at."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.telemetry.span_export import MAX_SPANS, HeadSampler, TailSampler
from baton.telemetry.tracing import Telemetry


class Traces:
    """Exports a share of all traces, and others once they are kept."""

    def __init__(self, ratio=1.0, max_spans=MAX_SPANS):
        self._exporter = InMemorySpanExporter()
        self.held = TailSampler(SimpleSpanProcessor(self._exporter), max_spans)
        provider = TracerProvider(sampler=HeadSampler(ratio), shutdown_on_exit=False)
        provider.add_span_processor(self.held)
        self.tracer = provider.get_tracer("test")
        self.telemetry = Telemetry(self.tracer, provider, self.held)

    @property
    def spans(self):
        """What was exported, in order of its end."""
        return self._exporter.get_finished_spans()
