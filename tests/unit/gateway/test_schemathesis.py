"""The API against its own description: schemathesis invents requests, good ones and bad ones.

Every answer must have a status, a content type and a body that /openapi.json describes, and no
request that breaks the description may be accepted.
"""

import contextlib

import pytest
import requests
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import (
    ChecksConfig,
    GenerationConfig,
    NotAServerErrorConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from baton.config import ApiConfig
from baton.gateway import batch_store, responses_store, routes
from baton.gateway.openapi import document
from tests.unit.router.scripted_workers import Cluster
from tests.unit.router.small_tokenizers import byte_tokenizer
from tests.waiting import WAIT_S

from .conftest import Gateway

EXAMPLES = 6
# A prompt that fits the description may still be too long for the model, or of unknown tokens.
NOT_IN_THE_DESCRIPTION = [positive_data_acceptance]
UNKNOWN_HEADER = "x-schemathesis-unknown-property"


def described():
    """A time of a millisecond may be asked for: that it passes, or would, is 504 or 529."""
    generation = GenerationConfig(deterministic=True, max_examples=EXAMPLES)
    fine = NotAServerErrorConfig(expected_statuses=["2xx", "4xx", 504, 529])
    project = ProjectConfig(generation=generation, checks=ChecksConfig(not_a_server_error=fine))
    projects = ProjectsConfig(default=project)
    return schemathesis.openapi.from_dict(
        document(routes.ALL_ROUTES),
        config=SchemathesisConfig(seed=1, projects=projects),
    )


schema = described()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A gateway on a thread of its own, for schemathesis waits where it calls."""
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("model"))
    folders = [tmp_path_factory.mktemp(name) for name in ("batches", "responses")]
    api = ApiConfig(batch_dir=folders[0], response_dir=folders[1])
    batch_store.prepare(api.batch_dir)
    responses_store.prepare(api.response_dir)

    @contextlib.asynccontextmanager
    async def serving():
        async with Cluster() as cluster, Gateway(cluster, tokenizer, api=api) as gateway:
            yield gateway.url

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving()) as url:
        yield url


@pytest.fixture(scope="module")
def session():
    """Connections that are kept: thousands of requests are sent. It has no headers of its own."""
    with requests.Session() as session:
        session.trust_env = False  # proxies are read from the environment at each request
        session.headers.clear()
        yield session


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case, url, session):
    response = case.call(base_url=url, session=session, timeout=WAIT_S)
    excluded = list(NOT_IN_THE_DESCRIPTION)
    if UNKNOWN_HEADER in (case.headers or {}):  # which HTTP has ignored
        excluded.append(negative_data_rejection)
    if "load_lora_adapter" in case.path:  # scripted workers load none: 503
        excluded.append(not_a_server_error)
    case.validate_response(response, excluded_checks=excluded)
