"""A reranker and a classifier, served by processes: their scores are those of transformers."""

import asyncio
import json
import math

import pytest
import torch

from baton.config import EngineConfig
from baton.errors import InvalidRequest
from tests.unit.engine.checkpoints import byte_tokenizer, make_checkpoint

YES, NO = (byte_tokenizer().token_to_id(text) for text in "yn")
QUERY, DOCUMENTS = "What is it?", ["It is this.", "Nothing.", "x" * 300]
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Find it\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
SIZES = {"tokenizer": True, "max_position_embeddings": 2048}


def logits_of(reference, ids):
    """After the last token."""
    with torch.no_grad():
        found = reference(torch.tensor([ids])).logits[0]
    return found[-1] if found.dim() == 2 else found


async def test_a_reranker_compares_the_logits_of_two_tokens(tmp_path, clusters):
    model = tmp_path / "reranker"
    reference = make_checkpoint(model, "Qwen3ForCausalLM", **SIZES)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "classifier_from_token": ["n", "y"]}))
    engine = EngineConfig(model=str(model), dtype="float32", kv_blocks=256)
    _, client = await clusters(alone=True, engine=engine)
    scores = await asyncio.gather(
        *(client.score(QUERY, one, instruction="Find it") for one in DOCUMENTS)
    )
    for score, document in zip(scores, DOCUMENTS, strict=True):
        text = PROMPT.format(query=QUERY, document=document)
        found = logits_of(reference, byte_tokenizer().encode(text).ids)
        expected = 1 / (1 + math.exp(float(found[NO] - found[YES])))
        assert score == pytest.approx(expected, abs=1e-4)
    assert (await client.generate("a", max_tokens=2)).usage.completion_tokens == 2


async def test_a_classification_head_scores(tmp_path, clusters):
    model = tmp_path / "classifier"
    reference = make_checkpoint(model, "LlamaForSequenceClassification", num_labels=3, **SIZES)
    engine = EngineConfig(model=str(model), dtype="float32", kv_blocks=256)
    _, client = await clusters(alone=True, engine=engine)
    for text in DOCUMENTS:
        labels = await client.classify(text)
        expected = logits_of(reference, byte_tokenizer().encode(text).ids)
        assert [one.name for one in labels] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert [one.logit for one in labels] == pytest.approx(expected.tolist(), abs=1e-3)
        assert [one.score for one in labels] == pytest.approx(
            expected.softmax(0).tolist(), abs=1e-3
        )
    with pytest.raises(InvalidRequest, match="generates none"):
        await client.generate("a", max_tokens=2)
    with pytest.raises(InvalidRequest, match="3 labels"):
        await client.score("a", "b")
