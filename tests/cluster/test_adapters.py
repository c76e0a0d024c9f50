"""LoRA adapters that come and go on a running cluster: every request gets its own one's tokens."""

import asyncio

import httpx
import pytest
import torch

from baton.config import EngineConfig
from baton.errors import ModelNotFound
from tests.cluster.oracle import all_blocks_free, decoding_process
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.test_lora import ALL, make_adapter
from tests.waiting import WAIT_S, eventually

PROMPT = [(7 * i) % 250 + 2 for i in range(40)]
TOKENS = 400
SCALE = 12 / 4  # of `make_adapter`


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A checkpoint, two adapters, and greedy tokens of transformers' model with each merged."""
    directory = tmp_path_factory.mktemp("adapted")
    model = make_checkpoint(directory / "base", tokenizer=True)
    expected = {"base": greedy(model)}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed, name in enumerate(("sql", "chat")):
        for module, update in make_adapter(directory / name, model, modules=ALL, seed=seed).items():
            model.get_submodule(module).weight.data += SCALE * update
        expected[name] = greedy(model)
        model.load_state_dict(before)
    return directory, expected


@torch.inference_mode()
def greedy(model):
    tokens = torch.tensor([PROMPT])
    kept = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    found = model.generate(tokens, pad_token_id=0, eos_token_id=None, **kept)
    return found[0, len(PROMPT) :].tolist()


async def generate(client, model, tokens=TOKENS):
    found = await client.generate(
        PROMPT, model=model, max_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    return list(found.token_ids)


async def test_adapters_come_and_go_and_a_killed_workers_stream_keeps_its_own(clusters, adapted):
    """With torch's kernels, whose steps are slow enough for a stream to be found on its worker."""
    directory, expected = adapted
    engine = EngineConfig(
        model=str(directory / "base"), max_loras=2, dtype="float32", kernels="torch",
        kv_blocks=400, threads=1,
    )  # fmt: skip
    cluster, client = await clusters(
        alone=True, engine=engine, decode=2, model_name="base", restart=True
    )
    loaded = await client.load_adapter("sql", str(directory / "sql"))
    assert len(loaded) == 3 and not any(loaded.values())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.config.http_port}") as http:
        asked = {"lora_name": "chat", "lora_path": str(directory / "chat")}
        answer = await http.post("/v1/load_lora_adapter", json=asked, timeout=WAIT_S)
        assert (answer.status_code, len(answer.json()["workers"])) == (200, 3), answer.text
        for wrong, field in (
            ({"lora_path": str(directory / "no")}, "lora_path"),
            ({"lora_name": "sql"}, "lora_name"),  # of another adapter
            ({"lora_name": ""}, "lora_name"),
        ):
            answer = await http.post("/v1/load_lora_adapter", json=asked | wrong, timeout=WAIT_S)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        asked = {"lora_name": "none"}
        answer = await http.post("/v1/unload_lora_adapter", json=asked, timeout=WAIT_S)
        assert answer.status_code == 404, answer.text
    models = await eventually(client.models, lambda found: len(found) == 3, "they are not listed")
    assert {one.name: one.parent for one in models} == {"base": "", "sql": "base", "chat": "base"}

    names = ("base", "sql", "chat") * 2
    found = await asyncio.gather(*(generate(client, name) for name in names))
    assert all(tokens == expected[name] for name, tokens in zip(names, found, strict=True))

    asked = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    stream, tokens = client.stream(PROMPT, model="sql", **asked), []
    async for delta in stream:
        if not tokens:
            killed = await decoding_process(cluster, client)
            dead = cluster.processes[killed].pid
            cluster.kill(killed)
        tokens += delta.token_ids
    assert tokens == expected["sql"]

    async def holders():
        workers = (await client.status())["workers"]
        return {one["pid"]: (one["state"], len(one["adapters"])) for one in workers}

    def replaced(found):  # the record of the killed one has a lease
        return dead not in found and list(found.values()) == [("READY", 2)] * 3

    await eventually(holders, replaced, "a new worker has no adapters")
    stream, tokens = client.stream(PROMPT, model="chat", **asked), []
    async for delta in stream:
        if not tokens:
            unloading = asyncio.create_task(client.unload_adapter("chat"))
        tokens += delta.token_ids
    assert tokens == expected["chat"]
    assert not any((await unloading).values())
    await eventually(client.models, lambda found: len(found) == 2, "an adapter is still listed")
    with pytest.raises(ModelNotFound, match="'chat' is not served here"):
        await generate(client, "chat")
    assert await generate(client, "sql", 20) == expected["sql"][:20]
    await all_blocks_free(client)
