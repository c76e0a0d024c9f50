"""A log line for every request that did not end well, with the ids that lead to its trace."""

from __future__ import annotations

import logging

from baton.log_format import about
from router.telemetry.stats import Ending, Listener, Seen

log = logging.getLogger(__name__)


class RequestLog(Listener):
    """A listener of the tally."""

    def ended(self, seen: Seen, ending: Ending) -> None:
        """Failures are warnings; a refusal is an answer like others."""
        if ending.error is None:
            return
        log.log(
            logging.WARNING if seen.placed else logging.INFO,
            "request %s of tenant %s ended with %s: %s",
            seen.request_id or "(not let in)",
            seen.tenant or "(unknown)",
            ending.status,
            ending.error,
            extra=about(trace_id=seen.trace_id, request_id=seen.request_id),
        )
