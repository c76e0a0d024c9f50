"""What a request is for a worker, and the session that its headers name."""

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_a_chat_is_rendered_as_it_would_run(says):
    gateway = await says("abc")
    asked = {**CHAT, "temperature": 0.5, "cache_salt": "s", "max_tokens": 7}
    rendered = (await gateway.post("/v1/chat/completions/render", asked)).json()
    ran = (await gateway.post("/v1/chat/completions", asked)).json()
    tokens = rendered["token_ids"]
    assert len(tokens) == ran["usage"]["prompt_tokens"]
    assert tokens == (await gateway.post("/tokenize", CHAT)).json()["tokens"]
    assert rendered["sampling_params"]["temperature"] == 0.5
    assert rendered["sampling_params"]["max_tokens"] == 7
    assert (rendered["model"], rendered["cache_salt"]) == ("tiny", "s")
    assert rendered["request_id"].startswith("chatcmpl-") and rendered["features"] is None
    cut = {**CHAT, "truncate_prompt_tokens": 3}
    rendered = (await gateway.post("/v1/chat/completions/render", cut)).json()
    assert rendered["token_ids"] == tokens[-3:]
    assert rendered["sampling_params"]["max_tokens"] == 2000 - 3
    cut = {"prompt": [3] * 3000, "max_tokens": 100, "truncate_prompt_tokens": -1}
    (rendered,) = (await gateway.post("/v1/completions/render", cut)).json()
    assert rendered["token_ids"] == [3] * (2000 - 100)


async def test_prompts_are_rendered(says):
    gateway = await says("abc")
    for prompts, expected in ((["ab", "c"], 2), ([[3, 4], [5]], 2), ("ab", 1), ([3, 4], 1)):
        asked = {"prompt": prompts, "max_tokens": 1}
        rendered = (await gateway.post("/v1/completions/render", asked)).json()
        assert len(rendered) == expected
        assert len({one["request_id"] for one in rendered}) == expected
    assert rendered[0]["token_ids"] == [3, 4]
    limits = []
    for prompts in ([[3] * 1990, [3]], [[3]]):
        asked = {"prompt": prompts, "max_tokens": None}
        rendered = (await gateway.post("/v1/completions/render", asked)).json()
        limits.append([one["sampling_params"]["max_tokens"] for one in rendered])
    assert limits == [[10, *limits[1]], limits[1]] and limits[1][0] > 10


WRONG = [
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("completions", {"prompt": "x" * 20000}, "prompt"),
    ("completions", {"prompt": [3] * 2000}, "prompt"),
    ("completions", {"prompt": [[3], [99999]]}, "prompt"),
    ("chat/completions", {**CHAT, "tools": [{"type": "web"}]}, "tools[0].type"),
]


async def test_what_would_not_run_is_not_rendered(says):
    gateway = await says("abc")
    for path, body, field in WRONG:
        refused = await gateway.post(f"/v1/{path}/render", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), body


async def test_a_session_is_the_bodys_or_a_headers(says, monkeypatch):
    gateway = await says("abc")
    sessions, resolve = [], gateway.service.resolve

    def resolved(model, session, caller):
        sessions.append(session)
        return resolve(model, session, caller)

    monkeypatch.setattr(gateway.service, "resolve", resolved)
    for name in ("x-session-id", "session_id", "session-id", "x-session-affinity",
                 "x-claude-code-session-id"):  # fmt: skip
        for headers in (
            {name: "s"},
            {name: "s", "authorization": "Bearer any"},
            {name: "s" * 1025},
        ):
            await gateway.chat(headers, max_tokens=2)
        assert sessions == ["s", "s", ""]
        sessions.clear()
    for body, session in (
        ({"user": "u"}, "u"),
        ({"user": "u", "safety_identifier": "i"}, "u"),
        ({"safety_identifier": "i"}, "i"),
        ({"user": "u", "prompt_cache_key": "k"}, "k"),
    ):
        await gateway.chat({"x-session-id": "s"}, max_tokens=2, **body)
        assert sessions.pop() == session
