"""Conversations and references to stored items, asked by OpenAI's client."""

import asyncio
import contextlib
import json
import threading

import openai
import pytest

from baton.errors import InvalidRequest
from baton.gateway import conversation_store, responses_store
from baton.gateway.conversation_store import ConversationStore, StoredConversation, StoredItem
from tests.waiting import WAIT_S, eventually

from .conftest import CALLS, client_of
from .test_responses import TOOLS
from .test_responses_store import LETTERS, TURNS, roles


def message(text, role="user"):
    return {"type": "message", "role": role, "content": text}


async def test_calls_to_a_busy_database_end_with_the_deadline(says, config, monkeypatch):
    """Each waits for another process's transaction, and behind those that do already."""
    gateway, busy = await says("abc", api=config), threading.Event()
    monkeypatch.setattr(ConversationStore, "conversation", lambda *args: busy.wait())
    asked = {"model": "tiny", "input": "Hi"}
    try:
        for method, path, body in (
            ("GET", "/v1/conversations/conv_a", None),
            ("POST", "/v1/conversations", {}),
            ("POST", "/v1/responses", {**asked, "previous_response_id": "resp_a"}),
            ("POST", "/v1/responses", {**asked, "store": True}),
            ("POST", "/v1/responses", {**asked, "background": True}),
            ("POST", "/v1/responses/input_tokens", {**asked, "previous_response_id": "resp_a"}),
            ("GET", "/v1/responses/resp_a", None),
            ("POST", "/v1/responses/resp_a/cancel", {}),
            ("DELETE", "/v1/responses/resp_a", None),
        ):
            late = {"x-request-timeout": "0.3"}
            sent = gateway.client.request(method, path, json=body, headers=late)
            answer = await asyncio.wait_for(sent, WAIT_S)
            assert (answer.status_code, "deadline" in answer.text) == (504, True), (method, path)
    finally:
        busy.set()


async def test_a_conversation_is_made_changed_and_deleted(says, config):
    first, second = [await says("abc", api=config) for _ in range(2)]
    async with client_of(first) as one, client_of(second) as two:
        made = await one.conversations.create(items=[message("Hi")], metadata={"a": "b"})
        assert made.metadata == {"a": "b"} and made.id.startswith("conv_")
        assert await two.conversations.retrieve(made.id) == made
        changed = await two.conversations.update(made.id, metadata={"c": "d"})
        assert changed == await one.conversations.retrieve(made.id)
        assert changed.metadata == {"c": "d"}
        items = [
            message("Hello", "assistant"),
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "yes"},
            {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": "no"},
            {"type": "reasoning", "id": "", "summary": [], "content": []},
        ]
        added = await one.conversations.items.create(made.id, items=items)
        assert [item.type for item in added.data] == [item["type"] for item in items]
        kinds = ["message", *(item["type"] for item in items)]
        for order in ("asc", "desc"):
            listed = [
                item async for item in two.conversations.items.list(made.id, order=order, limit=3)
            ]
            assert [item.type for item in listed] == (kinds if order == "asc" else kinds[::-1])
        oldest = listed[-1]
        assert oldest.content[0].text == "Hi"
        assert await two.conversations.items.retrieve(oldest.id, conversation_id=made.id) == oldest
        assert await one.conversations.items.delete(oldest.id, conversation_id=made.id) == changed
        with pytest.raises(openai.NotFoundError, match="there is no item"):
            await two.conversations.items.retrieve(oldest.id, conversation_id=made.id)
        with pytest.raises(openai.NotFoundError):  # no longer there
            await two.conversations.items.list(made.id, after=oldest.id)
        deleted = await two.conversations.delete(made.id)
        assert deleted.deleted
        for gone in (
            one.conversations.retrieve(made.id),
            one.conversations.items.create(made.id, items=items[:1]),
            one.conversations.delete(made.id),
        ):
            with pytest.raises(openai.NotFoundError, match="there is no conversation"):
                await gone


async def test_responses_continue_a_conversation(says, config):
    first, second = [await says(roles, template=LETTERS, api=config) for _ in range(2)]
    async with client_of(first) as one, client_of(second) as two:
        made = await one.conversations.create(items=[message("Hi"), message("you")])
        asked = {"model": "tiny", "conversation": made.id}
        a = await one.responses.create(input="a", instructions="Be short.", **asked)
        async with two.responses.stream(input="b", **asked) as stream:
            b = await stream.get_final_response()
        begun = await one.responses.create(input="c", background=True, **asked)
        c = await eventually(
            lambda: two.responses.retrieve(begun.id), lambda r: r.status != "in_progress", "runs"
        )
        asked["conversation"] = {"id": made.id}
        d = await eventually(
            lambda: one.responses.create(input="d", store=False, **asked),
            lambda r: len(r.output_text) > len(c.output_text) + 1, "c's items are added"
        )  # fmt: skip
        texts = [one.output_text for one in (a, b, c)]
        assert texts == ["suuu", "uuuau", "uuuauau"]
        assert {one.conversation.id for one in (a, b, c, d)} == {made.id}
        counted = await two.responses.input_tokens.count(model="tiny", conversation=made.id)
        assert counted.input_tokens > len(d.output_text)
        listed = [item async for item in two.conversations.items.list(made.id, order="asc")]
        assert [item.role for item in listed[2:6]] == ["user", "assistant"] * 2
        with pytest.raises(openai.BadRequestError, match="previous_response_id or conversation"):
            await one.responses.create(input="x", previous_response_id=a.id, **asked)
        await one.conversations.delete(made.id)
        with pytest.raises(openai.BadRequestError, match="there is no conversation") as refused:
            await one.responses.create(input="x", **asked)
        assert refused.value.param == "conversation"
        assert (await one.responses.retrieve(a.id)).output_text == texts[0]


async def test_an_item_that_no_response_could_continue_is_refused_with_its_place(says, config):
    gateway = await says(roles, template=LETTERS, api=config)
    made = (await gateway.post("/v1/conversations", {})).json()
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    for wrong, field in (
        ({"type": "message", "content": "x"}, "role"),
        ({"type": "message", "role": "user"}, "content"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text"),
        ({**call, "call_id": None}, "call_id"),
        ({**call, "name": None}, "name"),
        ({**call, "arguments": "[]"}, "arguments"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
    ):
        for path in ("/v1/conversations", f"/v1/conversations/{made['id']}/items"):
            refused = await gateway.post(path, {"items": [message("Hi"), wrong]})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, f"items[1].{field}"), error
    asked = {"input": "a", "conversation": made["id"]}
    assert (await gateway.post("/v1/responses", asked)).status_code == 200


async def test_items_are_sent_again_by_their_ids(says, config):
    gateway = await says(CALLS, template=TURNS, api=config)
    async with client_of(gateway) as client:
        first = await client.responses.create(model="tiny", input="Hi", tools=TOOLS)
        asked = (await client.responses.input_items.list(first.id)).data
        made = await client.conversations.create(items=[message("Hello", "assistant")])
        (hello,) = (await client.conversations.items.list(made.id)).data
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "yes"}
            for item in calls
        ]
        before = [message("Hi"), message("Hello", "assistant")]
        whole = [*before, *(item.to_dict() for item in calls), *results]
        ids = [item.id for item in (*asked, hello, *calls)]
        for kind in ({"type": "item_reference"}, {}):
            referred = [*({**kind, "id": one} for one in ids), *results]
            answers = [
                await client.responses.create(model="tiny", tools=TOOLS, input=items)
                for items in (whole, referred)
            ]
            assert len({answer.usage.input_tokens for answer in answers}) == 1
            lists = [
                (await client.responses.input_items.list(answer.id, order="asc")).data
                for answer in answers
            ]
            shown = [[item.to_dict(exclude_unset=True) for item in items] for items in lists]
            for item in (*shown[0], *shown[1]):
                del item["id"]
            assert shown[0] == shown[1]
        for wrong in ("msg_1", "msg_x_0", f"msg_{first.id.removeprefix('resp_')}_99"):
            with pytest.raises(openai.BadRequestError, match="there is no item") as refused:
                await client.responses.create(
                    model="tiny", input=[message("a"), {"type": "item_reference", "id": wrong}]
                )
            assert refused.value.param == "input[1].id"


async def test_responses_conversations_and_items_are_their_tenants(says, config, ann_and_bob):
    gateway = await says("abc", api=config, tenants=ann_and_bob)
    async with client_of(gateway, "ann") as ann, client_of(gateway, "bob") as bob:
        made = await ann.conversations.create(items=[message("Hi")])
        (item,) = (await ann.conversations.items.list(made.id)).data
        answer = await ann.responses.create(model="tiny", input="Hi")
        assert (await ann.responses.retrieve(answer.id)).id == answer.id
        responses, conversations = bob.responses, bob.conversations
        for name, calls in (
            (made.id, (conversations.retrieve, conversations.delete, conversations.items.list)),
            (answer.id, (responses.retrieve, responses.delete, responses.cancel,
                         responses.input_items.list)),
        ):  # fmt: skip
            for call in calls:
                with pytest.raises(openai.NotFoundError):
                    await call(name)
        for name, field, kind in (
            (made.id, "conversation", "conversation"),
            (answer.id, "previous_response_id", "response"),
        ):
            with pytest.raises(openai.BadRequestError, match=f"there is no {kind}"):
                await responses.create(model="tiny", input="x", **{field: name})
        for name in (item.id, answer.output[0].id):
            with pytest.raises(openai.BadRequestError, match="there is no item"):
                await bob.responses.create(model="tiny", input=[{"id": name}])
            await ann.responses.create(model="tiny", input=[{"id": name}])


async def test_without_a_folder_they_are_refused(says):
    gateway = await says("abc")
    async with client_of(gateway) as client:
        with pytest.raises(openai.NotFoundError, match="--response-dir"):
            await client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="--response-dir"):
            await client.responses.create(model="tiny", input="x", conversation="conv_1")
        with pytest.raises(openai.BadRequestError, match="--response-dir") as refused:
            await client.responses.create(model="tiny", input=[{"id": "msg_1"}])
        assert refused.value.param == "input[0].id"
        with pytest.raises(openai.NotFoundError, match="--response-dir"):
            await client.responses.retrieve("resp_1")


def test_of_a_tenants_conversations_and_responses_the_oldest_and_the_expired_are_removed(
    tmp_path, monkeypatch
):
    """They share its room; what others have stays, and is not found by it."""
    now = 1000.0
    monkeypatch.setattr(responses_store.time, "time", lambda: now)
    store = ConversationStore(tmp_path, 100, 60.0)
    of_another = responses_store.StoredResponse("other", "", b"", b"x" * 90)
    store.add("b", of_another)
    for number in range(5):
        store.add("a", responses_store.StoredResponse(f"r{number}", "", b"[]", b"x" * 38))

    def kept():
        names = []
        reads = [(store.get, one) for one in ("other", *(f"r{n}" for n in range(5)), "r")]
        for read, name in (*reads, (store.conversation, "c0"), (store.conversation, "c1")):
            with contextlib.suppress(responses_store.HttpError):
                names.append(read("a", name)[0])
        return names

    assert kept() == ["r3", "r4"]
    for name in ("r3", "r4"):
        store.delete("a", name)
    store.create_conversation("a", StoredConversation("c0", 1, b"{}"), [StoredItem("i", b"x" * 28)])
    now += 1.0
    store.add("a", responses_store.StoredResponse("r", "", b"[]", b"x" * 28))
    now += 1.0
    store.create_conversation("a", StoredConversation("c1", 1, b"{}"), [StoredItem("j", b"x" * 28)])
    assert kept() == ["r", "c0", "c1"]
    store.add_items("a", "c0", [StoredItem("k", b"x" * 28)])  # now r is the oldest
    assert kept() == ["c0", "c1"]
    assert store.context("a", "", "c0", {}).before == [b"[%b,%b]" % (b"x" * 28, b"x" * 28)]
    assert store.get("b", "other") == of_another
    now += 61.0
    assert kept() == []
    store.add("a", responses_store.StoredResponse("s", "", b"", b"x"))
    counts = [store._row(f"SELECT COUNT(*) FROM {name}")[0] for name in ("conversations", "items")]
    assert counts == [0, 0]
    store.close()


def test_items_of_a_response_are_read_once_and_have_a_limit(tmp_path, monkeypatch):
    store = ConversationStore(tmp_path, 1 << 20, 60.0)
    outputs, inputs = (
        [{"id": f"msg_{key}_{at}", "text": "x" * 100} for at in range(3)]
        for key in ("a", "a_input")
    )
    body = json.dumps({"output": outputs}).encode()
    stored = responses_store.StoredResponse("resp_a", "", json.dumps(inputs).encode(), body)
    store.add("t", stored)
    conversation = StoredConversation("c", 1, b"{}")
    store.create_conversation("t", conversation, [StoredItem("msg_c_0", b"x" * 100)])
    reads, get = [], store.get
    monkeypatch.setattr(store, "get", lambda *args: reads.append(args) or get(*args))
    names = [*(item["id"] for item in (*outputs, *inputs)), "msg_c_0"]
    found = store.context("t", "", "", {name: [name] for name in names}).referenced
    assert [json.loads(found[name]) for name in names[:-1]] == [*outputs, *inputs]
    assert found["msg_c_0"] == b"x" * 100 and len(reads) == 2  # one of each list
    monkeypatch.setattr(conversation_store, "MAX_HISTORY_BYTES", 300)
    for references, field in (
        ({"msg_a_0": ["a"], "msg_a_2": ["b"], "msg_c_0": ["c"]}, "b"),
        ({"msg_c_0": ["a", "b", "c", "d"]}, "a"),
    ):
        with pytest.raises(InvalidRequest, match="more than 300 bytes") as refused:
            store.context("t", "", "", references)
        assert refused.value.field == field
    assert store.context("t", "", "", {"msg_c_0": ["a", "b", "c"]}).referenced
