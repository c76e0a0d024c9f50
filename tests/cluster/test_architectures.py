"""Models in a cluster: their tokens are those of transformers, also if a worker dies.

One of each kind of KV, and of each form of checkpoint; the tests of every architecture and format
are `tests.unit.engine.test_model_oracle` and `test_quantized_checkpoints`.
"""

import asyncio
import itertools
from dataclasses import replace

import pytest
import torch

from baton.config import DEMO_MODEL
from tests.cluster.oracle import ENGINE
from tests.unit.engine.checkpoints import add_predicting_layer, load_reference, make_checkpoint
from tests.unit.engine.gguf_files import write_gguf
from tests.unit.engine.model_cases import KINDS
from tests.unit.engine.quantized_checkpoints import make_quantized
from tests.unit.engine.test_gguf import MIXED, SIZES
from tests.unit.engine.test_gguf import reference as gguf_reference
from tests.unit.engine.test_quantized_checkpoints import FORMATS, PARTS
from tests.waiting import eventually

PROMPTS = [[(7 * i + 5 * one) % 250 + 2 for i in range(75)] for one in range(6)]
NEW_TOKENS = 300


class Killing:
    """Streams greedy completions of all prompts; a decode worker is killed during half of them."""

    def __init__(self, cluster, client, max_tokens):
        self._cluster, self._client, self._max_tokens = cluster, client, max_tokens
        self._underway = 0

    async def check(self, reference):
        """The completions, which have the transformers model's tokens."""
        done = await asyncio.gather(*map(self._completion, PROMPTS))
        assert any(one.route.attempts > 1 for one in done)
        check_greedy(zip(PROMPTS, done, strict=True), reference)
        return done

    async def _completion(self, prompt):
        asked = self._client.stream(
            prompt, max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True
        )
        async with asked as stream:
            await anext(aiter(stream))
            self._underway += 1
            if self._underway == len(PROMPTS) // 2:
                self._cluster.kill(await self._busiest())
            async for _ in stream:
                pass
        return stream.completion

    async def _busiest(self):
        """The name of the decode worker with the most sequences."""

        async def running():
            workers = (await self._client.status())["workers"]
            return {w["pid"]: w["running"] for w in workers if w["role"] == "decode"}

        found = await eventually(running, lambda of: any(of.values()), "no worker decodes")
        pid = max(found, key=found.get)
        return next(name for name, one in self._cluster.processes.items() if one.pid == pid)


async def test_the_demo_models_tokens_are_those_of_transformers_also_when_a_worker_is_killed(
    clusters,
):
    """torch prefills and native code decodes: each reads the KV that the other wrote."""
    cluster, client = await clusters(
        alone=True, decode=2, extra_args={"prefill": ["--kernels", "torch"]}
    )
    done = await Killing(cluster, client, NEW_TOKENS).check(load_reference(DEMO_MODEL))
    assert {one.route.transport for one in done} == {"shm"}


# All tokens: test_halves_of_unlike_tensor_parallelism_and_a_rank_that_is_killed.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all tokens"])
async def test_each_kind_of_kv_between_workers_of_other_ranks_one_of_which_is_killed(
    kind, tmp_path, clusters
):
    """torch prefills and native code decodes, on one rank or two each."""
    architecture, options = KINDS[kind]
    reference = make_checkpoint(tmp_path, architecture, tokenizer=True, **options)
    settings = {"model": str(tmp_path), "kv_cache_bytes": 0, "kv_blocks": 256}
    engine = replace(ENGINE, tp=2, tp_backend="gloo", **settings)
    one, torch_kernels = ["--tp", "1"], ["--kernels", "torch"]
    arguments = {"prefill-0": torch_kernels, "prefill-1": one + torch_kernels, "decode-1": one}
    cluster, client = await clusters(
        alone=True, engine=engine, prefill=2, decode=2, extra_args=arguments
    )
    workers = (await client.status())["workers"]
    roles = [[w["incarnation"] for w in workers if w["role"] == r] for r in ("prefill", "decode")]
    options = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    for number, pair in enumerate(itertools.product(*roles)):
        prompt = PROMPTS[number][1:]
        done = await client.generate(prompt, workers=pair, **options)
        assert (done.route.prefill, done.route.decode) == pair
        check_greedy([(prompt, done)], reference)
    await Killing(cluster, client, NEW_TOKENS).check(reference)


@pytest.mark.parametrize(("kind", "ranks"), [("latent", 1), ("states", 2)])
async def test_multi_token_prediction_changes_no_token(kind, ranks, tmp_path, clusters):
    """After handoffs, and when a worker dies in the middle of streams."""
    named = {"num_nextn_predict_layers": 1} if kind == "latent" else {}
    make_checkpoint(tmp_path, KINDS[kind].architecture, tokenizer=True, **named)
    add_predicting_layer(tmp_path, mixed=0.1)
    engine = replace(
        ENGINE, model=str(tmp_path), kv_cache_bytes=0, kv_blocks=256, speculative_model="mtp",
        tp_backend="gloo",
    )  # fmt: skip
    extra = {"decode": ["--tp", str(ranks)]}
    cluster, client = await clusters(alone=True, engine=engine, decode=2, extra_args=extra)
    largest = 0
    async with client.stream(PROMPTS[0], max_tokens=100, temperature=0.0) as stream:
        async for delta in stream:
            largest = max(largest, len(delta.token_ids))
    assert stream.completion.route.prefill != stream.completion.route.decode
    assert largest > 1
    await Killing(cluster, client, NEW_TOKENS).check(load_reference(tmp_path))


# A multimodal model's text part with weights of two formats; fp8 with static scales.
QUANTISED = {"mixed": "Gemma3ForConditionalGeneration", "fp8 static": "LlamaForCausalLM"}


async def test_checkpoints_of_other_forms_give_the_tokens_of_transformers(tmp_path, clusters):
    """Each after a handoff, of four models in one cluster."""
    models = {}
    for number, (form, architecture) in enumerate(QUANTISED.items()):
        path, parts = tmp_path / f"q{number}", PARTS.get(form, ())
        models[path] = make_quantized(
            path, FORMATS[form], architecture, parts=parts, tokenizer=True
        )
    write_gguf(file := tmp_path / "model.gguf", "LlamaForCausalLM", "Q4_K", MIXED, **SIZES)
    models[file] = gguf_reference(file)
    states = tmp_path / "states"
    models[states] = make_checkpoint(states, "Qwen3_5ForCausalLM", tokenizer=True)
    engine = replace(ENGINE, kv_cache_bytes=0, kv_blocks=256)
    named = tuple(f"{path.stem}={path}" for path in models)
    _, client = await clusters(alone=True, engine=engine, models=named)
    asked = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    for path, reference in models.items():
        done = await asyncio.gather(
            *(client.generate(prompt, model=path.stem, **asked) for prompt in PROMPTS)
        )
        assert all(one.route.prefill != one.route.decode for one in done), path
        check_greedy(zip(PROMPTS, done, strict=True), reference)
    await check_conversation(client, "states", models[states])


async def check_conversation(client, model, reference):
    """It resumes at checkpoints of states.

    Prefill computes the end of a repeated prompt, and only that and the state are sent.
    """
    asked = {"model": model, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    asked["cache_salt"] = "conversation"
    prompt = [(7 * i) % 250 + 2 for i in range(410)]
    first = await client.generate(prompt, **asked)
    again = await client.generate(prompt, **asked)
    goes_on = [*prompt, *first.token_ids, 5, 5, 5]
    last = await client.generate(goes_on, **asked)
    assert [one.usage.cached_tokens for one in (first, again, last)] == [0, 400, 400]
    # 26, 1 and 3 of 26, 26 and 29 blocks, each time with the state: decode has 416 tokens.
    sent = [one.timing.transfer_bytes for one in (first, again, last)]
    assert 0 < (sent[0] - sent[1]) / 25 == (sent[2] - sent[1]) / 2 < sent[1] / 2
    check_greedy([(prompt, first), (prompt, again), (goes_on, last)], reference)


def check_greedy(of_prompts, reference):
    """That completions of prompts have the tokens of the transformers model."""
    for prompt, done in of_prompts:
        text = [*prompt, *done.token_ids]
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).logits[0].argmax(dim=-1)
        assert text[len(prompt) :] == expected[len(prompt) - 1 : -1].tolist()
