"""Stored responses: found again by any process, by their tenant alone, within bounds."""

import asyncio

import openai
import pytest

from baton.errors import InvalidRequest
from baton.gateway import background, responses_store
from baton.gateway.responses_store import ALIVE_S, ResponseStore, StoredResponse
from tests.waiting import eventually

from .conftest import CALLS, client_of
from .test_responses import TOOLS

LETTERS = "{% for m in messages %}{{ m.role[0] }}{% endfor %}{# tools #}<tool_call></think>"

TURNS = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ m.reasoning_content }}"
    "{{ m.tool_calls | length if m.tool_calls }};{% endfor %}{# tools #}<tool_call></think>"
)


def roles(prompt):
    """A model that says whose messages it was given."""
    return prompt.partition("<")[0]


async def test_a_conversation_goes_on_at_another_router_by_the_last_responses_id(says, config):
    first, second = [await says(roles, template=LETTERS, api=config) for _ in range(2)]
    async with client_of(first) as one, client_of(second) as two:
        a = await one.responses.create(model="tiny", input="Hi", instructions="Be short.")
        items = [{"role": "user", "content": "Go"}, {"role": "user", "content": "on"}]
        b = await two.responses.create(model="tiny", input=items, previous_response_id=a.id)
        async with one.responses.stream(
            model="tiny", input="on", previous_response_id=b.id
        ) as stream:
            c = await stream.get_final_response()
        unstored = await one.responses.create(model="tiny", input="Hi", store=False)
        assert unstored.store is False
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(unstored.id)
        texts = [answer.output_text for answer in (a, b, c)]
        assert texts == ["su", "uauu", "uauuau"]  # instructions are of one response
        assert (b.previous_response_id, b.store) == (a.id, True)
        assert await two.responses.retrieve(a.id) == a
        assert (await one.responses.retrieve(c.id)).output_text == texts[2]
        counted = await two.responses.input_tokens.count(model="tiny", previous_response_id=c.id)
        assert counted.input_tokens == len("uauuaua") + len("<tool_call>") + 1
        listed = await two.responses.input_items.list(b.id, order="asc", limit=1)
        (item,) = listed.data
        assert (item.role, item.content[0].text, listed.has_more) == ("user", "Go", True)
        (newest,) = (await two.responses.input_items.list(b.id, limit=1)).data
        assert newest.content[0].text == "on"
        await two.responses.delete(a.id)
        for gone in (one.responses.retrieve(a.id), one.responses.delete(a.id)):
            with pytest.raises(openai.NotFoundError):
                await gone
        with pytest.raises(openai.BadRequestError, match="send the conversation in input"):
            await one.responses.create(model="tiny", input="x", previous_response_id=c.id)


async def test_calls_and_reasoning_of_a_stored_response_are_one_turn(says, config):
    gateway = await says(CALLS, template=TURNS, api=config)
    async with client_of(gateway) as client:
        first = await client.responses.create(model="tiny", input="Hi", tools=TOOLS)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "yes"}
            for item in first.output[2:]
        ]
        asked = {"model": "tiny", "tools": TOOLS, "previous_response_id": first.id}
        second = await client.responses.create(input=results, **asked)
        whole = [{"role": "user", "content": "Hi"}, *(i.to_dict() for i in first.output), *results]
        alike = await client.responses.create(model="tiny", tools=TOOLS, input=whole)
        listed = (await client.responses.input_items.list(second.id, order="asc")).data
    assert second.usage.input_tokens == alike.usage.input_tokens
    assert [item.type for item in listed] == ["function_call_output"] * 2


async def test_a_response_in_the_background_ends_though_nobody_waits(says, config):
    gateway = await says(CALLS, api=config)
    async with client_of(gateway) as client:
        asked = {"model": "tiny", "input": "Hi", "tools": TOOLS, "background": True}
        begun = await client.responses.create(**asked)
        assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
        done = await eventually(
            lambda: client.responses.retrieve(begun.id), lambda r: r.status != "in_progress", "runs"
        )
        assert (done.status, done.id) == ("completed", begun.id)
        assert [item.type for item in done.output][-2:] == ["function_call"] * 2
        with pytest.raises(openai.ConflictError, match="is completed"):
            await client.responses.cancel(begun.id)
        with pytest.raises(openai.BadRequestError, match="has no events"):
            await client.responses.retrieve(begun.id, stream=True)
        with pytest.raises(openai.BadRequestError, match="maximum context"):
            await client.responses.create(**{**asked, "input": "x" * 20000})


async def events(stream, most=None):
    found = []
    async for event in stream:
        found.append(event)
        if len(found) == most:
            await stream.close()
            break
    return found


async def test_a_stream_in_the_background_is_followed_at_any_router_from_any_event(says, config):
    first, second = [await says(CALLS, api=config) for _ in range(2)]
    asked = {"model": "tiny", "input": "Hi", "tools": TOOLS}
    async with client_of(first) as one, client_of(second) as two:
        plain = await events(await one.responses.create(**asked, stream=True))
        (begun,) = await events(
            await one.responses.create(**asked, stream=True, background=True), most=1
        )
        assert begun.type == "response.created" and begun.response.background
        follow = two.responses.retrieve
        whole = await events(await follow(begun.response.id, stream=True))
        assert [event.type for event in whole] == [event.type for event in plain]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        for after in range(len(whole)):
            rest = await events(await follow(begun.response.id, stream=True, starting_after=after))
            assert rest == whole[after + 1 :]
        done = await one.responses.retrieve(begun.response.id)
        assert whole[-1].response == done and done.status == "completed"
        for wrong in ("-1", "x"):
            path = f"/v1/responses/{done.id}?stream=true&starting_after={wrong}"
            assert (await first.client.get(path)).status_code == 400


async def test_a_stream_in_the_background_that_is_stopped_says_so(says, config):
    first, second = [await says("abc", api=config) for _ in range(2)]
    await first.cluster.fill()
    async with client_of(first) as one, client_of(second) as two:
        asked = {"model": "tiny", "input": "Hi", "background": True, "stream": True}
        for stop, ends in (("cancel", "cancelled"), ("delete", "error"), ("give up", "failed")):
            stream = await one.responses.create(**asked)
            begun = await anext(aiter(stream))
            name = begun.response.id
            reading = asyncio.create_task(events(await two.responses.retrieve(name, stream=True)))
            if stop == "give up":
                first.service.give_up()
            else:
                await getattr(two.responses, stop)(name)
            for found in (await events(stream), await reading):
                last = found[-1].to_dict()
                numbers = [event.sequence_number for event in found]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
                response = last.get("response", {})
                assert ends in (last["type"], response.get("status")), last
                assert ends != "failed" or response["error"]["code"] == "server_error"
            await first.idle()
        asked["stream"] = False
        begun = await one.responses.create(**asked)
        first.service.give_up()
        done = await eventually(
            lambda: one.responses.retrieve(begun.id), lambda r: r.status != "in_progress", "runs"
        )
        assert (done.status, done.error.code) == ("failed", "server_error")


async def test_a_response_in_the_background_is_cancelled_at_any_router(says, config):
    first, second = [await says("abc", api=config) for _ in range(2)]
    await first.cluster.fill()
    async with client_of(first) as one, client_of(second) as two:
        asked = {"model": "tiny", "input": "Hi", "background": True}
        for cancel in (one.responses.cancel, two.responses.cancel, two.responses.delete):
            begun = await one.responses.create(**asked)
            assert first.service.running == 1
            with pytest.raises(openai.BadRequestError, match="has not ended"):
                await two.responses.create(model="tiny", input="x", previous_response_id=begun.id)
            await cancel(begun.id)
            await first.idle()
            if cancel != two.responses.delete:
                assert (await one.responses.retrieve(begun.id)).status == "cancelled"
                assert (await two.responses.cancel(begun.id)).status == "cancelled"


async def test_a_response_whose_router_has_ended_has_failed(says, config, monkeypatch):
    monkeypatch.setattr(responses_store, "ALIVE_S", -1.0)
    gateway = await says("abc", api=config)
    await gateway.cluster.fill()
    async with client_of(gateway) as client:
        begun = await client.responses.create(model="tiny", input="Hi", background=True)
        found = await client.responses.retrieve(begun.id)
        assert (found.status, found.error.code) == ("failed", "server_error")
        await client.responses.delete(begun.id)
        asked = {"model": "tiny", "input": "Hi", "background": True, "stream": True}
        found = await events(await client.responses.create(**asked))
        assert [event.type for event in found][-1] == "response.failed"
        await client.responses.delete(found[-1].response.id)


def test_a_response_whose_router_has_ended_may_be_followed_by_another(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(responses_store.time, "time", lambda: now)
    store = ResponseStore(tmp_path, 100, 60.0)
    store.add("a", StoredResponse("r", "", b"[]", b"x", is_running=True))
    with pytest.raises(InvalidRequest, match="has not ended"):
        store.history("a", "r")
    now += ALIVE_S + 1
    assert [one.id for one in store.history("a", "r")] == ["r"]


async def test_requests_at_once_are_no_more_in_the_background_than_fit(says, config, monkeypatch):
    monkeypatch.setattr(background, "MAX_BACKGROUND", 1)
    gateway = await says("abc", api=config)
    await gateway.cluster.fill()
    async with client_of(gateway) as client:
        asked = {"model": "tiny", "input": "Hi", "background": True}
        creating = (client.responses.create(**asked) for _ in range(3))
        begun = await asyncio.gather(*creating, return_exceptions=True)
        refused = [one for one in begun if isinstance(one, openai.RateLimitError)]
        assert len(refused) == 2
        for response in begun:
            if response not in refused:
                await client.responses.cancel(response.id)
        await gateway.idle()
