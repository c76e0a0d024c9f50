"""Options of what a process tells of itself: traces, metrics, logs."""

from __future__ import annotations

import argparse
import logging

from baton import log_format
from baton.cli.options import Options
from baton.config import WorkerConfig

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_options(parser: argparse.ArgumentParser, log_level: str = "info") -> None:
    """Where spans go, where metrics are read, and how much is logged."""
    group = parser.add_argument_group("telemetry")
    group.add_argument(
        "--otlp",
        metavar="URL",
        help="export traces to this OTLP/gRPC address, as http://HOST:4317; several "
        "separated by commas",
    )
    group.add_argument(
        "--trace-sample",
        type=float,
        default=WorkerConfig.trace_sample,
        metavar="SHARE",
        help="of traces to export, from 0 to 1; a caller who sends a trace decides for it; failed "
        "and slow requests are exported in any case",
    )
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve metrics for Prometheus at http://HOST:PORT/metrics; 0 takes a free port "
        "(default: do not)",
    )
    group.add_argument(
        "--log-level", choices=LOG_LEVELS, default=log_level, help="of log lines on stderr"
    )
    group.add_argument(
        "--log-format",
        choices=log_format.FORMATS,
        default="text",
        help="lines for people, or JSON objects for machines",
    )


def add_price_option(group: Options) -> None:
    """What a worker costs."""
    group.add_argument(
        "--worker-price",
        type=float,
        dest="price_per_hour",
        default=WorkerConfig.price_per_hour,
        metavar="PRICE",
        help="of a worker for an hour, in whatever currency: shows what tokens cost",
    )


def log_to_stderr(level: str, form: str = "text") -> None:
    """Log lines of this process, in the one form that all of ours have."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_format.formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
