"""The API against its own description: schemathesis invents requests, good ones and bad ones.

Every answer must have a status, a content type and a body that /openapi.json tells of, and no
request that breaks the description may be accepted.
"""

import asyncio
import contextlib
import threading

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.config import (
    ChecksConfig,
    GenerationConfig,
    NotAServerErrorConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from schemathesis.specs.openapi.checks import positive_data_acceptance

from baton.gateway.openapi import document
from tests.unit.router.scripted_workers import Cluster
from tests.unit.router.small_tokenizers import byte_tokenizer

from .conftest import Gateway

EXAMPLES = 25
# A prompt that fits the description may still be too long for the model, or of unknown tokens.
UNTOLD = [positive_data_acceptance]


def described():
    """A time of a millisecond may be asked for, and then it passes: 504 is an answer."""
    generation = GenerationConfig(deterministic=True, max_examples=EXAMPLES)
    fine = NotAServerErrorConfig(expected_statuses=["2xx", "4xx", 504])
    project = ProjectConfig(generation=generation, checks=ChecksConfig(not_a_server_error=fine))
    projects = ProjectsConfig(default=project)
    return schemathesis.openapi.from_dict(
        document(), config=SchemathesisConfig(seed=1, projects=projects)
    )


schema = described()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A gateway on a thread of its own, for schemathesis waits where it calls."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    running = {}

    async def serve():
        tokenizer = byte_tokenizer(tmp_path_factory.mktemp("model"))
        running["end"] = asyncio.Event()
        async with Cluster() as cluster, Gateway(cluster, tokenizer) as gateway:
            running["url"] = gateway.url
            started.set()
            await running["end"].wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield running["url"]
    finally:
        loop.call_soon_threadsafe(running["end"].set)
        thread.join(30)
        with contextlib.suppress(RuntimeError):
            loop.close()
    assert not thread.is_alive()


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case, url):
    response = case.call(base_url=url, timeout=30)
    case.validate_response(response, excluded_checks=UNTOLD)
