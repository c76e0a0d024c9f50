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


async def test_logits_of_two_tokens_and_of_a_classification_head_are_scores(tmp_path, clusters):
    ranks, sorts = tmp_path / "ranks", tmp_path / "sorts"
    reranker = make_checkpoint(ranks, "Qwen3ForCausalLM", **SIZES)
    config = json.loads((ranks / "config.json").read_text())
    (ranks / "config.json").write_text(json.dumps({**config, "classifier_from_token": ["n", "y"]}))
    classifier = make_checkpoint(sorts, "LlamaForSequenceClassification", num_labels=3, **SIZES)
    engine = EngineConfig(dtype="float32", kv_blocks=256)
    models = tuple(f"{path.name}={path}" for path in (ranks, sorts))
    _, client = await clusters(alone=True, engine=engine, models=models)
    scores = await asyncio.gather(
        *(client.score(QUERY, one, instruction="Find it", model="ranks") for one in DOCUMENTS)
    )
    for score, document in zip(scores, DOCUMENTS, strict=True):
        text = PROMPT.format(query=QUERY, document=document)
        found = logits_of(reranker, byte_tokenizer().encode(text).ids)
        expected = 1 / (1 + math.exp(float(found[NO] - found[YES])))
        assert score == pytest.approx(expected, abs=1e-4)
    done = await client.generate("a", max_tokens=2, model="ranks")
    assert done.usage.completion_tokens == 2

    for text in DOCUMENTS:
        labels = await client.classify(text, model="sorts")
        expected = logits_of(classifier, byte_tokenizer().encode(text).ids)
        assert [one.name for one in labels] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert [one.logit for one in labels] == pytest.approx(expected.tolist(), abs=1e-3)
        assert [one.score for one in labels] == pytest.approx(
            expected.softmax(0).tolist(), abs=1e-3
        )
    with pytest.raises(InvalidRequest, match="generates none"):
        await client.generate("a", max_tokens=2, model="sorts")
    with pytest.raises(InvalidRequest, match="3 labels"):
        await client.score("a", "b", model="sorts")
