"""Every metric of every process, once: name, kind, unit, attributes, buckets, meaning.

Names are OpenTelemetry's; GenAI semantic conventions where they have one, and of a process those
that Prometheus's client libraries share. docs/metrics.md is generated from here, and nothing can be
recorded that is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ROUTER, PLANNER = "router", "planner"
WORKERS = ("prefill", "decode", "mixed")  # by the role that a worker starts with
EVERYBODY = (ROUTER, *WORKERS, PLANNER)

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

# Seconds. Fit for a person waiting for a first token, and for one reading along.
FIRST_TOKEN_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0,
    5.0, 7.5, 10.0, 20.0, 30.0, 60.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0,
)  # fmt: skip
WHOLE_S = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
    90.0, 120.0, 300.0, 600.0,
)  # fmt: skip
WAIT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
PLACEMENT_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
STEP_S = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3,
    0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
BYTES_PER_S = tuple(n * 1e9 for n in (0.01, 0.03, 0.1, 0.3, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
RATIO = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
TOKENS = tuple(float(4**n) for n in range(11))  # as the conventions advise
SEQUENCES = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0)

MODEL = ("gen_ai.request.model", "baton.model.version")
GEN_AI = (*MODEL, "gen_ai.provider.name", "gen_ai.operation.name")
_UNITS = {"1": "ratio", "s": "seconds", "By": "bytes", "By/s": "bytes_per_second"}


@dataclass(frozen=True)
class Instrument:
    """One metric. Its unit is UCUM's, or `{what}` for things that are counted."""

    name: str
    kind: str
    unit: str
    processes: tuple[str, ...]
    text: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(name.replace(".", "_") for name in self.attributes)

    def values(self, attributes: Mapping[str, str]) -> list[str]:
        """The labels' values; KeyError unless exactly its attributes are given."""
        if attributes.keys() != set(self.attributes):
            raise KeyError(f"{self.name} has the attributes {self.attributes}, not {attributes}")
        return [attributes[name] for name in self.attributes]

    @property
    def series(self) -> str:
        """Its name for Prometheus, without the endings of a counter's or histogram's samples."""
        name, unit = self.name.replace(".", "_"), _UNITS.get(self.unit, "")
        return f"{name}_{unit}" if unit and not name.endswith(unit) else name

    @property
    def samples(self) -> tuple[str, ...]:
        """The names that its samples have in a query."""
        if self.kind == COUNTER:
            return (f"{self.series}_total",)
        if self.kind == HISTOGRAM:
            return tuple(f"{self.series}_{end}" for end in ("bucket", "sum", "count"))
        return (self.series,)


INSTRUMENTS: tuple[Instrument, ...] = (
    # What callers see, measured at the router.
    Instrument("gen_ai.server.request.duration", HISTOGRAM, "s", (ROUTER,),
        "From arrival to the end, of requests that were admitted. `error.type` is empty for those "
        "that ended OK, CANCELLED where the caller left, else the error's name. Like all times of "
        "requests without those of batches, for which nobody waits.",
        (*GEN_AI, "error.type"), WHOLE_S),
    Instrument("gen_ai.server.time_to_first_token", HISTOGRAM, "s", (ROUTER,),
        "From arrival to the first token on its way to the caller.",
        GEN_AI, FIRST_TOKEN_S),
    Instrument("gen_ai.server.time_per_output_token", HISTOGRAM, "s", (ROUTER,),
        "Mean time between a request's output tokens after its first, of requests that ended OK.",
        GEN_AI, BETWEEN_TOKENS_S),
    Instrument("baton.request.inter_token_latency", HISTOGRAM, "s", (ROUTER,),
        "Every single gap between two outputs of a stream, pauses of a failover included.",
        (), BETWEEN_TOKENS_S),
    Instrument("gen_ai.client.token.usage", HISTOGRAM, "{token}", (ROUTER,),
        "Tokens of a request that ended OK: of its prompt, and of its output. A prompt with "
        "several choices counts once, each of their outputs by itself.",
        (*GEN_AI, "gen_ai.token.type"), TOKENS),
    Instrument("baton.requests.ended", COUNTER, "{request}", (ROUTER,),
        "Requests that ended, by gRPC status; CANCELLED where the caller left before its deadline, "
        "or did not read its output.", ("status", "tenant")),
    Instrument("baton.requests.refused", COUNTER, "{request}", (ROUTER,),
        "Of those, the ones that ended before any work: overloaded, at a limit of the HTTP server; "
        "queue_full, too_late, tenant_limit, tenant_unknown, no_worker, draining, invalid, "
        "deadline, internal. A connection beyond `--max-http-connections` counts as a request. "
        "Requests of batches, which are tried again, are not counted.", ("cause",)),
    Instrument("baton.requests.served", COUNTER, "{request}", (ROUTER,),
        "Requests that ended OK, by the way their KV came to decode: handed_over by a prefill "
        "worker; local, computed there; cached, computed there beside what its prefix cache had; "
        "prefill_only, where the first token was the last.", ("way",)),
    Instrument("baton.requests.running", GAUGE, "{request}", (ROUTER,),
        "Requests inside now, those that wait included."),
    Instrument("baton.requests.queued", GAUGE, "{request}", (ROUTER,),
        "Requests that wait in the queue for room now."),
    Instrument("baton.request.queue_time", HISTOGRAM, "s", (ROUTER,),
        "From arrival until a decode worker held blocks for the request the first time.",
        (), WAIT_S),
    Instrument("baton.request.ttft_prediction", HISTOGRAM, "1", (ROUTER,),
        "Time to first token that was predicted when the request was admitted, by the actual one.",
        (), RATIO),
    Instrument("baton.placement.duration", HISTOGRAM, "s", (ROUTER,),
        "Search for the best pair of workers: once to predict whether a request can be in time, "
        "and once for each try to place it.", (), PLACEMENT_S),
    Instrument("baton.event_loop.lag", HISTOGRAM, "s", (ROUTER,),
        "Delay of a timer of the event loop every 50 ms; outputs have the same delay.",
        (), WAIT_S),
    Instrument("baton.failovers", COUNTER, "{attempt}", (ROUTER,),
        "Attempts that failed and were followed by another, by the error's name.", ("reason",)),
    Instrument("baton.tokens.input", COUNTER, "{token}", (ROUTER,),
        "Prompt tokens of requests that were placed; those of a prompt with several choices once.",
        MODEL),
    Instrument("baton.tokens.cached", COUNTER, "{token}", (ROUTER,),
        "Of those, the tokens whose KV came from a prefix cache.", MODEL),
    Instrument("baton.tokens.output", COUNTER, "{token}", (ROUTER,),
        "Output tokens delivered; counted as they stream.", MODEL),
    Instrument("baton.slo.requests", COUNTER, "{request}", (ROUTER,),
        "Requests by SLO class (`--slo`), and whether they met all of its targets. One that failed "
        "or was refused has not; one that the caller left, or that was invalid or of a batch, is "
        "not counted.",
        ("slo", "met")),
    Instrument("baton.batches", GAUGE, "{batch}", (ROUTER,),
        "Batches of the HTTP API by status, at the process that runs those of its `--batch-dir`.",
        ("status",)),
    Instrument("baton.batch.requests", COUNTER, "{request}", (ROUTER,),
        "Requests of batches whose result was written: completed, or failed.", ("result",)),
    Instrument("baton.workers", GAUGE, "{worker}", (ROUTER,),
        "Workers by model, role, and state as this router sees them.", (*MODEL, "role", "state")),
    Instrument("baton.breaker.ejections", COUNTER, "{ejection}", (ROUTER,),
        "Times a circuit breaker shut a worker or a pair out.", ("kind",)),
    Instrument("baton.route.share", GAUGE, "1", (ROUTER,),
        "Share of a route's requests by version (`baton route`).", ("route", *MODEL)),
    Instrument("baton.canary.decisions", COUNTER, "{decision}", (ROUTER,),
        "Decisions of this router on canaries: stepped, promoted, rolled_back.",
        ("route", "decision")),
    Instrument("baton.canary.step.age", GAUGE, "s", (ROUTER,),
        "Time since a running canary's step began.", ("route",)),
    # What engines do, measured at every worker.
    Instrument("baton.engine.step.duration", HISTOGRAM, "s", WORKERS,
        "One engine step, by what it computed: prefill, decode or mixed.", ("kind",), STEP_S),
    Instrument("baton.engine.batch.size", HISTOGRAM, "{sequence}", WORKERS,
        "Sequences in a step.", (), SEQUENCES),
    Instrument("baton.engine.step.age", GAUGE, "s", WORKERS,
        "How long the step that runs now has been running; 0 when none runs."),
    Instrument("baton.engine.sequences", GAUGE, "{sequence}", WORKERS,
        "Sequences on the engine: running in the batch, or waiting for room in it.", ("state",)),
    Instrument("baton.engine.queue", GAUGE, "{token}", WORKERS,
        "Tokens known and not yet computed."),
    Instrument("baton.engine.tokens.computed", COUNTER, "{token}", WORKERS,
        "Tokens computed, of prompts and outputs together."),
    Instrument("baton.engine.tokens.generated", COUNTER, "{token}", WORKERS,
        "Tokens sampled."),
    Instrument("baton.engine.draft_tokens", COUNTER, "{token}", WORKERS,
        "Tokens proposed from a sequence's own text (`--speculate`) or by a draft model "
        "(`--speculative-model`) and computed, by whether they were accepted: yes or no.",
        ("accepted",)),
    Instrument("baton.engine.draft_time", COUNTER, "s", WORKERS,
        "Time that a draft model (`--speculative-model`) computed, before steps and not counted in "
        "their durations."),
    Instrument("baton.engine.gpu.rows", COUNTER, "{row}", WORKERS,
        "Rows of decode steps on a GPU: wanted, padding up to a graph's batch size, or wasted, "
        "which were launched ahead for sequences that had ended.", ("kind",)),
    Instrument("baton.engine.gpu.wait_time", COUNTER, "s", WORKERS,
        "Time that the engine's thread waited for the GPU to end steps. While sequences decode and "
        "next to none passes so, the host is slower than the GPU."),
    Instrument("baton.engine.expert.imbalance", GAUGE, "1", WORKERS,
        "Tokens of the busiest expert over the mean of its layer, in the layer where that is most, "
        "over the 10 s or more before a scrape; 1 is even. Only of mixtures of experts."),
    Instrument("baton.engine.collective.time", COUNTER, "s", WORKERS,
        "What sums and gathers over tensor-parallel ranks took on the first rank, with waiting for "
        "the others. Only of workers with ranks."),
    Instrument("baton.engine.preemptions", COUNTER, "{preemption}", WORKERS,
        "Sequences that lost their blocks to others and started over."),
    Instrument("baton.kv.blocks", GAUGE, "{block}", WORKERS,
        "KV blocks by state: free, cached, held, quarantined. Their sum is the pool.", ("state",)),
    Instrument("baton.kv.group.blocks", GAUGE, "{block}", WORKERS,
        "Held KV blocks by the window, in tokens, of the layers that they belong to: full where "
        "those attend to all tokens, state for blocks of states.", ("window",)),
    Instrument("baton.worker.cost", COUNTER, "{currency}", WORKERS,
        "Price of this worker since it started, by `--worker-price`; 0 where none is set."),
    Instrument("baton.prefill.queue_time", HISTOGRAM, "s", WORKERS,
        "From a prompt's arrival at the prefill worker to its first chunk.", (), WAIT_S),
    Instrument("baton.kv.transfer.duration", HISTOGRAM, "s", WORKERS,
        "A handoff's KV, from the first block leaving to Commit acknowledged.",
        ("transport",), WAIT_S),
    Instrument("baton.kv.transfer.throughput", HISTOGRAM, "By/s", WORKERS,
        "A handoff's bytes by the time its bytes were moving.", ("transport",), BYTES_PER_S),
    Instrument("baton.kv.transfer.io", COUNTER, "By", WORKERS,
        "KV bytes handed over and verified.", ("transport",)),
    Instrument("baton.kv.transfer.resends", COUNTER, "{transfer}", WORKERS,
        "Transfers that were done again from the start, of handoffs that arrived in the end.",
        ("transport",)),
    Instrument("baton.kv.link.throughput", GAUGE, "By/s", WORKERS,
        "Of each open link to a decode worker: the KV bytes it has sent by the time they were "
        "moving; 0 before the first. fallback: yes where a faster transport was to be expected.",
        ("peer", "transport", "fallback")),
    Instrument("baton.kv.transfer.failures", COUNTER, "{transfer}", WORKERS,
        "Handoffs that were not committed though their prompt was computed, by the error's name.",
        ("reason",)),
    Instrument("baton.reservations", COUNTER, "{reservation}", WORKERS,
        "Answers to Reserve: held for a prefill worker, started here at once, refused for want of "
        "room, or failed.", ("outcome",)),
    Instrument("baton.adapter.loads", COUNTER, "{adapter}", WORKERS,
        "Loads of LoRA adapters: loaded (also where it was before), or failed.", ("result",)),
    # What the planner decides.
    Instrument("baton.planner.leader", GAUGE, "1", (PLANNER,),
        "1 on the planner that leads, 0 on the others."),
    Instrument("baton.planner.workers.needed", GAUGE, "{worker}", (PLANNER,),
        "Workers of a role that the demand needs, as a fraction, by the leader's newest plan.",
        (*MODEL, "role")),
    Instrument("baton.planner.workers.wanted", GAUGE, "{worker}", (PLANNER,),
        "Workers of a role that there should be, as published to KEDA.", (*MODEL, "role")),
    Instrument("baton.planner.workers.ready", GAUGE, "{worker}", (PLANNER,),
        "Workers of a role that are ready.", (*MODEL, "role")),
    Instrument("baton.planner.decisions", COUNTER, "{decision}", (PLANNER,),
        "Decisions of this planner while it led: kept, changed (a number or a role), or held, for "
        "want of good data.", ("outcome",)),
    Instrument("baton.planner.flips", COUNTER, "{flip}", (PLANNER,),
        "Workers whose role changed from prefill to decode or back: done, failed, or dry_run.",
        ("before", "after", "result")),
    # What everybody costs.
    Instrument("process.cpu", COUNTER, "s", EVERYBODY,
        "CPU time of the process, all threads, user and system."),
    Instrument("process.resident_memory", GAUGE, "By", EVERYBODY,
        "Resident memory of the process."),
    Instrument("process.virtual_memory", GAUGE, "By", EVERYBODY,
        "Memory that the process has mapped."),
    Instrument("process.start_time", GAUGE, "s", EVERYBODY,
        "When the process began, seconds since 1970."),
    Instrument("process.open_fds", GAUGE, "{descriptor}", EVERYBODY,
        "File descriptors that the process has open."),
    Instrument("process.max_fds", GAUGE, "{descriptor}", EVERYBODY,
        "File descriptors that it may have open."),
)  # fmt: skip


def for_process(process: str) -> dict[str, Instrument]:
    """What a "router", "planner" or a worker process measures, by name."""
    return {one.name: one for one in INSTRUMENTS if process in one.processes}
