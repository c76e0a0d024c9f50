"""Models in a cluster: their tokens are those of transformers, also if a worker dies.

One of each form of attention and MLP, and of each form of checkpoint; the tests of every
architecture and format are `tests.unit.engine.test_model_oracle` and `test_quantized_checkpoints`.
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
from tests.unit.engine.quantized_checkpoints import make_quantized
from tests.unit.engine.test_gguf import MIXED, SIZES
from tests.unit.engine.test_gguf import reference as gguf_reference
from tests.unit.engine.test_model_oracle import VARIANTS
from tests.unit.engine.test_quantized_checkpoints import FORMATS, PARTS

FORMS = (
    *("demo", "LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Glm4ForCausalLM"),
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Gemma4ForCausalLM", "Llama4ForCausalLM"),
)
OF_EACH = dict(reversed(VARIANTS.values()))  # the first variant of each
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
        with torch.inference_mode():
            texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, done, strict=True)]
            expected = reference(torch.tensor(texts)).logits.argmax(dim=-1)
        assert [text[75:] for text in texts] == expected[:, 74:-1].tolist()
        return done

    async def _completion(self, prompt):
        asked = self._client.stream(
            prompt, max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True
        )
        async with asked as stream:
            await anext(aiter(stream))
            self._underway += 1
            if self._underway == len(PROMPTS) // 2:
                self._cluster.kill("decode-0")
            async for _ in stream:
                pass
        return stream.completion


@pytest.mark.parametrize("architecture", FORMS)
async def test_greedy_tokens_are_those_of_transformers_also_when_a_decode_worker_is_killed(
    architecture, tmp_path, clusters
):
    """torch prefills and native code decodes: each reads the KV that the other wrote."""
    if architecture == "demo":
        model, reference = DEMO_MODEL, load_reference(DEMO_MODEL)
    else:
        options = {"sliding_window": 24, **OF_EACH[architecture], "head_dim": 16}  # as native needs
        model = tmp_path
        reference = make_checkpoint(model, architecture, tokenizer=True, **options)
    engine = replace(ENGINE, model=str(model), kv_cache_bytes=0, kv_blocks=256)
    cluster, client = await clusters(
        alone=True, engine=engine, decode=2, extra_args={"prefill": ["--kernels", "torch"]}
    )
    done = await Killing(cluster, client, NEW_TOKENS).check(reference)
    assert {one.route.transport for one in done} == {"shm"}


# Where layers have heads of two sizes, a rank's share of either is in one part of a block.
WINDOWS = {
    "Gemma3ForCausalLM": {"sliding_window": 24},
    "Gemma4ForCausalLM": {
        "sliding_window": 24,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
    },
}


@pytest.mark.parametrize("architecture", WINDOWS)
async def test_windows_with_other_ranks_in_decode_one_of_which_is_killed(
    architecture, tmp_path, clusters
):
    reference = make_checkpoint(tmp_path, architecture, tokenizer=True, **WINDOWS[architecture])
    engine = replace(
        ENGINE, model=str(tmp_path), kv_cache_bytes=0, kv_blocks=256, tp_backend="gloo"
    )
    ranks = {"prefill": ["--tp", "2"], "decode": ["--tp", "1"]}
    cluster, client = await clusters(alone=True, engine=engine, decode=2, extra_args=ranks)
    await Killing(cluster, client, 64).check(reference)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_multi_token_prediction_changes_no_token(ranks, tmp_path, clusters):
    """After handoffs, and when a worker dies in the middle of streams."""
    make_checkpoint(tmp_path, "DeepseekV3ForCausalLM", tokenizer=True, num_nextn_predict_layers=1)
    add_predicting_layer(tmp_path, mixed=0.1)
    engine = replace(
        ENGINE, model=str(tmp_path), kv_cache_bytes=0, kv_blocks=256, speculative_model="mtp",
        tp_backend="gloo",
    )  # fmt: skip
    extra = {"decode": ["--tp", str(ranks)]}
    cluster, client = await clusters(alone=True, engine=engine, decode=2, extra_args=extra)
    largest = 0
    async with client.stream(PROMPTS[0], max_tokens=NEW_TOKENS, temperature=0.0) as stream:
        async for delta in stream:
            largest = max(largest, len(delta.token_ids))
    assert stream.completion.route.prefill != stream.completion.route.decode
    assert largest > 1
    await Killing(cluster, client, NEW_TOKENS).check(load_reference(tmp_path))


async def test_latent_kv_is_handed_over_between_halves_of_unlike_tensor_parallelism(
    tmp_path, clusters
):
    """Every rank has all of it, from one rank of the other half."""
    reference = make_checkpoint(tmp_path, "DeepseekV3ForCausalLM", tokenizer=True)
    settings = {"model": str(tmp_path), "kv_cache_bytes": 0, "kv_blocks": 128}
    engine = replace(ENGINE, tp=2, tp_backend="gloo", **settings)
    other = {name: ["--tp", "1"] for name in ("prefill-1", "decode-1")}
    _, client = await clusters(alone=True, engine=engine, prefill=2, decode=2, extra_args=other)
    workers = (await client.status())["workers"]
    roles = [[w["incarnation"] for w in workers if w["role"] == r] for r in ("prefill", "decode")]
    for number, pair in enumerate(itertools.product(*roles)):
        done = await client.generate(
            PROMPTS[number], max_tokens=40, temperature=0.0, ignore_eos=True, workers=pair
        )
        assert (done.route.prefill, done.route.decode) == pair
        text = [*PROMPTS[number], *done.token_ids]
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).logits[0].argmax(dim=-1)
        assert text[75:] == expected[74:-1].tolist()


# A multimodal model's text part with weights of two formats; fp8 with static scales.
CHECKPOINTS = {"mixed": "Gemma3ForConditionalGeneration", "fp8 static": "LlamaForCausalLM"}


@pytest.mark.parametrize("form", CHECKPOINTS)
async def test_quantised_checkpoints_give_the_tokens_of_the_dense_model(form, tmp_path, clusters):
    reference = make_quantized(
        tmp_path, FORMATS[form], CHECKPOINTS[form], parts=PARTS.get(form, ()), tokenizer=True
    )
    await check_greedy_tokens(tmp_path, reference, clusters)


async def test_a_gguf_file_gives_the_tokens_of_transformers(tmp_path, clusters):
    write_gguf(file := tmp_path / "model.gguf", "LlamaForCausalLM", "Q4_K", MIXED, **SIZES)
    await check_greedy_tokens(file, gguf_reference(file), clusters)


async def check_greedy_tokens(model, reference, clusters):
    """A cluster's greedy tokens are those of the transformers model, each after a handoff."""
    engine = replace(ENGINE, model=str(model), kv_cache_bytes=0, kv_blocks=256)
    _, client = await clusters(alone=True, engine=engine)
    asked = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    done = await asyncio.gather(*(client.generate(prompt, **asked) for prompt in PROMPTS))
    assert all(one.route.prefill != one.route.decode for one in done)
    with torch.inference_mode():
        texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, done, strict=True)]
        expected = reference(torch.tensor(texts)).logits.argmax(dim=-1)
    assert [text[75:] for text in texts] == expected[:, 74:-1].tolist()


async def test_a_conversation_resumes_at_checkpoints_of_states(tmp_path, clusters):
    """Prefill computes the end of a repeated prompt, and only that and the state are sent."""
    reference = make_checkpoint(tmp_path, "Qwen3_5ForCausalLM", tokenizer=True)
    engine = replace(ENGINE, model=str(tmp_path), kv_cache_bytes=0, kv_blocks=256)
    _, client = await clusters(alone=True, engine=engine)
    asked = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    prompt = [(7 * i) % 250 + 2 for i in range(410)]
    first = await client.generate(prompt, **asked)
    again = await client.generate(prompt, **asked)
    goes_on = [*prompt, *first.token_ids, 5, 5, 5]
    last = await client.generate(goes_on, **asked)
    assert [one.usage.cached_tokens for one in (first, again, last)] == [0, 400, 400]
    # 26, 1 and 3 of 26, 26 and 29 blocks, each time with the state: decode has 416 tokens.
    sent = [one.timing.transfer_bytes for one in (first, again, last)]
    assert 0 < (sent[0] - sent[1]) / 25 == (sent[2] - sent[1]) / 2 < sent[1] / 2
    for text, done in ((prompt, first), (prompt, again), (goes_on, last)):
        with torch.inference_mode():
            expected = reference(torch.tensor([[*text, *done.token_ids]])).logits[0].argmax(dim=-1)
        assert list(done.token_ids) == expected[len(text) - 1 : -1].tolist()


@pytest.mark.parametrize(("prefill", "decode"), [("2", "1"), ("1", "2")])
async def test_states_are_handed_over_between_workers_of_other_ranks(
    prefill, decode, tmp_path, clusters
):
    reference = make_checkpoint(tmp_path, "Qwen3_5ForCausalLM", tokenizer=True)
    engine = replace(
        ENGINE, model=str(tmp_path), kv_cache_bytes=0, kv_blocks=256, tp_backend="gloo"
    )
    ranks = {"prefill": ["--tp", prefill], "decode": ["--tp", decode]}
    _, client = await clusters(alone=True, engine=engine, extra_args=ranks)
    options = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    done = await asyncio.gather(*(client.generate(prompt, **options) for prompt in PROMPTS))
    assert all(one.route.prefill and one.route.attempts == 1 for one in done)
    with torch.inference_mode():
        texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, done, strict=True)]
        expected = reference(torch.tensor(texts)).logits.argmax(dim=-1)
    assert [text[75:] for text in texts] == expected[:, 74:-1].tolist()
