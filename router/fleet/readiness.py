"""Readiness: a router is SERVING exactly while a request could be placed somewhere."""

from __future__ import annotations

import logging

from baton.server import Health
from router.fleet.fleet import Fleet

log = logging.getLogger(__name__)


async def follow_readiness(fleet: Fleet, health: Health) -> None:
    """Keeps `health` at what the fleet allows, until cancelled."""
    while True:
        news = fleet.news
        why_not = fleet.snapshot().why_not_ready
        if (not why_not) is not health.serving:
            log.info("readiness: %s", f"NOT_SERVING, {why_not}" if why_not else "SERVING")
        await health.set(not why_not)
        await news.wait()
