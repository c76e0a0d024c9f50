"""How checkpoints score prompts, and the prompts of pairs."""

import json
import math

import pytest

from baton.errors import CheckpointError, InvalidRequest
from baton.text import load_tokenizer
from baton.text.scoring import Scoring
from tests.unit.engine.checkpoints import byte_tokenizer

PAIR = [{"role": "query", "content": "What?"}, {"role": "document", "content": "That."}]
HEAD = {"architectures": ["Qwen3ForSequenceClassification"]}
# The model card's, with its three messages filled in.
QWEN = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {instruct}
<Query>: What?
<Document>: That.<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


def make(directory, template=None, modules=None, **config):
    """A tokenizer of 258 tokens, a byte each, by the files of a checkpoint."""
    config = {"vocab_size": 300, "architectures": ["Qwen3ForCausalLM"], **config}
    (directory / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if modules is not None:
        (directory / "modules.json").write_text(json.dumps(modules))
    return load_tokenizer(directory)


def logit_score(directory, **config):
    (directory / "1_LogitScore").mkdir(exist_ok=True)
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    kinds = ("base.modules.transformer.Transformer", ""), (
        "cross_encoder.modules.logit_score.LogitScore", "1_LogitScore",
    )  # fmt: skip
    return [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in kinds]


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),  # transformers' default
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "identity"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Identity"},
            ("LABEL_0",),
            "identity",
        ),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
            ("LABEL_0",),
            "identity",
        ),
    ],
)
def test_a_classification_heads_labels_and_activation(tmp_path, config, labels, activation):
    assert make(tmp_path, **HEAD, **config).scoring == Scoring(labels, activation)


def test_scores_are_activated_logits():
    two, three = Scoring(("a", "b"), "softmax"), Scoring(("a", "b", "c"), "identity")
    assert [one.score for one in two.scores([0.0, math.log(3)])] == pytest.approx([0.25, 0.75])
    assert [one.score for one in three.scores([5, -7, 0])] == [5, -7, 0]
    (one,) = Scoring.from_tokens([9, 4]).scores([3.0, 2.0])  # yes, no
    assert (one.name, one.logit) == ("relevance", 1.0)
    assert one.score == pytest.approx(1 / (1 + math.exp(-1)))
    (alone,) = Scoring.from_tokens([9]).scores([-800.0])
    assert (alone.logit, alone.score) == (-800.0, 0.0)


def test_a_reranker_without_a_head_names_its_tokens(tmp_path):
    assert make(tmp_path).scoring is None
    assert make(tmp_path, classifier_from_token=["n", "y"]).scoring == Scoring.from_tokens(
        [byte_tokenizer().token_to_id("y"), byte_tokenizer().token_to_id("n")]
    )
    modules = logit_score(tmp_path, true_token_id=9, false_token_id=4)
    assert make(tmp_path, modules=modules).scoring == Scoring.from_tokens([9, 4])
    logit_score(tmp_path, true_token_id=9, false_token_id=None)
    assert make(tmp_path, modules=modules).scoring == Scoring.from_tokens([9])
    logit_score(tmp_path, false_token_id=4)
    with pytest.raises(CheckpointError, match=r"1_LogitScore.*true_token_id"):
        make(tmp_path, modules=modules)
    (tmp_path / "1_LogitScore" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_LogitScore.*not found"):
        make(tmp_path, modules=modules)


def test_a_broken_configuration_is_refused_by_name(tmp_path):
    for config, named in (
        ({**HEAD, "id2label": {"0": "a", "2": "b"}}, "id2label"),
        ({**HEAD, "id2label": []}, "id2label"),
        ({**HEAD, "id2label": "ab"}, "id2label"),
        ({**HEAD, "num_labels": "2"}, "num_labels"),
        ({**HEAD, "num_labels": 10**9}, "num_labels"),
        ({"classifier_from_token": ["no", "yes"]}, "is not one token"),
        ({"classifier_from_token": ["y"]}, "must be two texts"),
    ):
        with pytest.raises(CheckpointError, match=f"config.json.*{named}"):
            make(tmp_path, **config)


def test_pairs_are_rendered_as_the_model_expects(tmp_path):
    library = byte_tokenizer()
    plain, chats = make(tmp_path), "{% for m in messages %}{{ m.content }}{% endfor %}"
    for tokenizer in (plain, make(tmp_path, chats)):  # a template of chats has no pairs
        assert tokenizer.encode_pair(PAIR) == library.encode(QWEN.format(instruct=SEARCH)).ids
    told = [{"role": "system", "content": "Find it"}, *PAIR]
    assert plain.encode_pair(told) == library.encode(QWEN.format(instruct="Find it")).ids
    roles = "{% for m in messages %}{% if m.role == 'query' %}Q{{ m.content }}{% endif %}"
    own = make(
        tmp_path, roles + '{% if m.role == "document" %}D{{ m.content }}{% endif %}{% endfor %}'
    )
    assert own.encode_pair(PAIR) == library.encode("QWhat?DThat.").ids
    head = make(tmp_path, **HEAD, num_labels=1)
    assert head.encode_pair(PAIR) == library.encode("What?", "That.").ids
    with pytest.raises(InvalidRequest, match="no instruction"):
        head.encode_pair(told)
    with pytest.raises(InvalidRequest, match="not Unicode"):
        head.encode_pair([PAIR[0], {"role": "document", "content": "\ud800"}])
