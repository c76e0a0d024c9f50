"""/rerank, /score, /classify and /pooling over scripted workers."""

import base64
import json
import math
import struct

import pytest

from tests.unit.router.small_tokenizers import byte_tokenizer

HEAD = {"architectures": ["LlamaForSequenceClassification"], "max_position_embeddings": 999}
THREE = {**HEAD, "id2label": {"0": "bad", "1": "fair", "2": "good"}}
# Short, as scripted workers have room for few tokens.
PAIRS = "{% for m in messages if m.role in ('query', 'document') %}{{ m.content }}{% endfor %}"
SIGMOID = 1 / (1 + math.exp(1))  # of the tokens "n" and "y" or "m", one apart


@pytest.fixture
async def classifier(gateway_of, tmp_path):
    """A model of three labels, whose logits are a prompt's number of tokens, 1 and 0.5."""
    return await gateway_of(
        tokenizer=byte_tokenizer(tmp_path, **THREE), cluster={"max_context": 999}
    )


@pytest.fixture
async def reranker(gateway_of, tmp_path):
    """A model whose worker answers with the ids of the tokens that it compares: "b" and "a"."""
    tokenizer = byte_tokenizer(
        tmp_path, template=PAIRS, max_position_embeddings=99, classifier_from_token=["b", "a"]
    )
    return await gateway_of(tokenizer=tokenizer, cluster={"max_context": 99})


async def test_inputs_are_classified(classifier):
    answer = (await classifier.post("/classify", {"input": ["ab", "c"]})).json()
    assert answer["id"].startswith("classify-") and answer["object"] == "list"
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    first, second = answer["data"]
    powers = [math.exp(x) for x in (2, 1, 0.5)]
    assert first["probs"] == pytest.approx([x / sum(powers) for x in powers])
    assert (first["index"], first["label"], first["num_classes"]) == (0, "bad", 3)
    assert (second["index"], sum(second["probs"])) == (1, pytest.approx(1))
    raw = (await classifier.post("/classify", {"input": [3, 4, 5], "use_activation": False})).json()
    assert raw["data"][0]["probs"] == [3, 1, 0.5]
    assert classifier.decode.requests == []


async def test_a_classifier_generates_no_text_and_scores_no_pairs(classifier):
    for path, body, field in (
        ("/v1/completions", {"prompt": "a"}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "model"),
        ("/score", {"text_1": "a", "text_2": "b"}, "model"),
    ):
        refused = await classifier.post(path, body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert "classif" in refused.json()["error"]["message"]


async def test_pooling_does_what_the_model_is_for(classifier):
    def floats(answer):
        return [one["data"] for one in answer.json()["data"]]

    pooling = "/pooling", {"input": "ab"}
    (scores,) = floats(await classifier.post(*pooling))
    assert scores[0] > scores[1] > scores[2]
    (logits,) = floats(await classifier.post(*pooling, use_activation=False))
    assert logits == [2, 1, 0.5]
    (embedding,) = floats(await classifier.post(*pooling, task="embed"))
    assert embedding == [0, 100, 101]
    in_base64 = await classifier.post(*pooling, task="embed", encoding_format="base64")
    assert struct.unpack("<3f", base64.b64decode(floats(in_base64)[0])) == (0, 100, 101)
    (shortened,) = floats(await classifier.post(*pooling, task="embed", dimensions=2))
    assert shortened == [0, 1]
    for bad, field in (
        ({"task": "classify", "dimensions": 2}, "dimensions"),
        ({"task": "token_embed"}, "task"),
        ({"normalize": False}, "normalize"),
    ):
        refused = await classifier.post(*pooling, **bad)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_a_model_without_labels_says_so(gateway):
    for path, body in (
        ("/classify", {"input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/pooling", {"input": "a", "task": "classify"}),
    ):
        refused = (await gateway.post(path, body)).json()["error"]
        assert refused["param"] == "model" and "--score-tokens no,yes" in refused["message"]


async def test_documents_are_ordered_by_relevance(reranker):
    prefill = reranker.cluster.prefills[0]

    def relevant(logit):
        async def script(request):
            async for message in prefill.good(request):
                if message.HasField("first_token"):
                    del message.first_token.pooled[:]
                    message.first_token.pooled.extend([logit, 0.0])
                yield message

        return script

    logits = [0.0, 2.0, -1.0, 2.0]
    prefill.scripts = [relevant(logit) for logit in logits]
    body = {"query": "q", "documents": ["a", {"text": "b"}, "c", "d"], "instruction": "say"}
    answer = (await reranker.post("/v1/rerank", body)).json()
    found = [(one["index"], one["document"]["text"]) for one in answer["results"]]
    assert found == [(1, "b"), (3, "d"), (0, "a"), (2, "c")]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(
        [1 / (1 + math.exp(-x)) for x in (2, 2, 0, -1)]
    )
    for path, more in (("/rerank", {"return_documents": False}), ("/v2/rerank", {"top_n": 2})):
        prefill.scripts = [relevant(logit) for logit in logits]
        answer = (await reranker.post(path, body, **more)).json()
        assert [one["index"] for one in answer["results"]] == [1, 3, 0, 2][: more.get("top_n", 4)]
        assert all(("document" in one) is ("top_n" in more) for one in answer["results"])


async def test_pairs_are_scored(reranker):
    for body in (
        {"text_1": "q", "text_2": ["a", "b"]},
        {"queries": ["q", "r"], "documents": ["a", "b"]},
        {"data_1": "q", "data_2": ["a", "b"]},
    ):
        answer = (await reranker.post("/score", body)).json()
        scores = [one["score"] for one in answer["data"]]
        assert scores == pytest.approx([SIGMOID, SIGMOID]) and answer["object"] == "list"
    raw = await reranker.post("/v1/score", {"text_1": "q", "text_2": "a", "use_activation": False})
    assert [one["score"] for one in raw.json()["data"]] == [-1]
    for bad, field in (
        ({"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "q"}, "text_2"),
        ({"text_1": "q", "documents": "a"}, "text_1"),
        ({}, "text_1"),
    ):
        refused = await reranker.post("/score", bad)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_tokens_that_score_are_the_routers_option(gateway_of, tmp_path):
    tokenizer = byte_tokenizer(tmp_path, template=PAIRS, max_position_embeddings=99)
    gateway = await gateway_of(tokenizer=tokenizer, cluster={"max_context": 99}, score_tokens="b,a")
    answer = await gateway.post("/score", {"text_1": "q", "text_2": "a"})
    assert answer.json()["data"][0]["score"] == pytest.approx(SIGMOID)


async def test_a_body_may_have_2048_inputs(gateway_of, tmp_path):
    """They do not fill the router's wait queue, which holds 1,024 requests."""
    gateway = await gateway_of(default_timeout_s=86400.0)  # none is rejected for its deadline
    answer = await gateway.post("/v1/embeddings", {"input": [[3, 4]] * 2048})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 2048
    for body in ({"input": ["a"] * 2049}, {"input": [[3]] * 2049}):
        refused = (await gateway.post("/v1/embeddings", body)).json()["error"]
        assert refused["param"] == "input" and "2048" in refused["message"]
    many = {"query": "q", "documents": ["a"] * 2049}
    refused = (await gateway.post("/rerank", many)).json()["error"]
    assert refused["param"] == "documents" and "2048" in refused["message"]


async def test_an_embedding_model_scores_pairs_by_cosine(gateway_of, tmp_path):
    """The workers' embedding of a prompt is 0, then its tokens."""
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    gateway = await gateway_of(tokenizer=byte_tokenizer(tmp_path))
    texts = ["aa", "ab", "zA"]
    embedded = (await gateway.post("/v1/embeddings", {"input": ["ab", *texts]})).json()["data"]
    query, *others = [one["embedding"] for one in embedded]
    cosines = [
        sum(map(math.prod, zip(query, one, strict=True))) / (math.hypot(*query) * math.hypot(*one))
        for one in others
    ]
    scored = (await gateway.post("/score", {"text_1": "ab", "text_2": texts})).json()
    assert [one["score"] for one in scored["data"]] == pytest.approx(cosines)
    assert scored["usage"]["prompt_tokens"] == 6  # "ab" is computed once
    ranked = (await gateway.post("/v1/rerank", {"query": "ab", "documents": texts})).json()
    assert [one["index"] for one in ranked["results"]] == [1, 0, 2]
    asked = {"text_1": "ab", "text_2": texts, "instruction": "Be kind."}
    refused = (await gateway.post("/score", asked)).json()["error"]
    assert refused["param"] == "instruction"
