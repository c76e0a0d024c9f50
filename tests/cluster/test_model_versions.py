"""Two versions of a model behind one router: each answers with its own tokens, whatever changes."""

import asyncio

import pytest

from baton.client import RetryPolicy
from baton.config import RouterLimits
from baton.errors import InvalidRequest, ModelNotFound, Unavailable
from tests.cluster.oracle import ENGINE, Oracle, check
from tests.perturbed import perturbed_model
from tests.waiting import WAIT_S, eventually

RECOVERY_S = 3.0


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """The demo model with other weights, which say something else."""
    directory = tmp_path_factory.mktemp("second") / "second"
    perturbed_model(directory)
    return directory


@pytest.fixture(scope="module")
def oracles(oracle, second):
    """One process of each version."""
    with Oracle(ENGINE, model=str(second)) as other:
        yield {"chat@v1": oracle, "chat@v2": other}


@pytest.fixture
def settings(second):
    return {
        "models": ("chat@v1=demo", f"chat@v2={second}"),
        "limits": RouterLimits(recovery_s=RECOVERY_S),
    }


async def test_each_version_answers_with_its_own_tokens(clusters, settings, oracles):
    _, client = await clusters(**settings)
    case = oracles["chat@v1"].case(100)
    assert oracles["chat@v1"].tokens(case) != oracles["chat@v2"].tokens(case)
    await check(client, oracles["chat@v1"], case)
    for name, one in oracles.items():
        await check(client, one, case, model=name)
    assert [model.name for model in await client.models()] == ["chat", "chat@v1", "chat@v2"]
    with pytest.raises(ModelNotFound, match="'chat', 'chat@v1', 'chat@v2' are"):
        await client.generate("x", model="chat@v3")
    with pytest.raises(InvalidRequest, match="neither a version of chat nor a model"):
        await client.set_route("chat", {"v3": 1})
    await client.set_route("best", {"chat@v2": 1})
    await check(client, oracles["chat@v2"], case, model="best")
    await client.delete_route("best")
    versions = {worker["version"] for worker in (await client.status())["workers"]}
    assert versions == {"v1", "v2"}


async def test_streams_stay_with_their_version_when_the_weights_change(clusters, settings, oracles):
    _, client = await clusters(**settings)
    first, second = oracles["chat@v1"], oracles["chat@v2"]
    cases = [first.case(60 + n, new_tokens=200) for n in range(6)]
    expected = [(first.tokens(case), second.tokens(case)) for case in cases]
    await client.set_route("chat", {"v1": 1})
    begun = [asyncio.Event() for _ in cases]

    async def stream(number):
        tokens = []
        case = cases[number]
        async with client.stream(
            case.prompt, **case.options, session=str(number), timeout=WAIT_S
        ) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                begun[number].set()
        return tuple(tokens)

    running = [asyncio.create_task(stream(number)) for number in range(len(cases))]
    for one in begun:
        await one.wait()
    await client.set_route("chat", {"v2": 1})  # blue-green, in one step
    assert await stream(0) == expected[0][1]
    await client.set_route("chat", {"v1": 1, "v2": 1})
    assert await asyncio.gather(*running) == [of_first for of_first, _ in expected]
    shared = await asyncio.gather(*(stream(number) for number in range(len(cases))))
    for tokens, both in zip(shared, expected, strict=True):
        assert tokens in both
    again = await asyncio.gather(*(stream(number) for number in range(len(cases))))
    assert again == shared, "a session stays where it is"
    await client.delete_route("chat")


async def test_a_canary_whose_workers_die_under_load_is_rolled_back(clusters, settings, oracles):
    cluster, client = await clusters(**settings)
    client = type(client)(cluster.targets, retry=RetryPolicy(max_attempts=1))
    case = oracles["chat@v1"].case(40, new_tokens=8)
    known = {one.tokens(case): name for name, one in oracles.items()}
    answers, ended = [], asyncio.Event()

    async def load(number):
        while not ended.is_set():
            session = f"{number} {len(answers)}"
            try:
                done = await client.generate(case.prompt, **case.options, session=session)
                answers.append(known[done.token_ids])
            except Unavailable:  # it ran on the version that is gone
                answers.append("")

    began = {"steps": (50.0, 100.0), "step_s": 1e6, "min_requests": 10**6}
    await client.start_canary("chat", "v2", **began)
    loading = [asyncio.create_task(load(number)) for number in range(3)]
    async with asyncio.timeout(WAIT_S):
        while "chat@v2" not in answers:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    pids = {w["pid"] for w in (await client.status())["workers"] if w["version"] == "v2"}
    for name in [one.name for one in cluster.processes.values() if one.pid in pids]:
        cluster.kill(name)

    async def route():
        return (await client.routes())[0]

    rolled_back = await eventually(
        route, lambda found: found["canary"]["state"] == "rolled_back", "it is not rolled back"
    )
    assert rolled_back["targets"] == {"chat@v1": 100.0}
    assert "no usable workers" in rolled_back["canary"]["reason"]
    before = len(answers)
    async with asyncio.timeout(WAIT_S):
        while len(answers) < before + 20:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    ended.set()
    await asyncio.gather(*loading)
    assert set(answers[before + 5 :]) == {"chat@v1"}
    assert answers.count("") <= len(loading)
    await client.delete_route("chat")
    await client.close()
