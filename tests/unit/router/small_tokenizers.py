"""A model directory whose tokens are bytes, so that a test can write tokens as text."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from baton.config import ApiConfig, RouterConfig, RouterLimits
from baton.text import load_tokenizer
from router.admission.admission import Admission
from router.admission.tenants import Tenants

EOS = "</s>"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"


def byte_tokenizer(directory, added=(), template=TEMPLATE, **config):
    """Loads it: end-of-sequence is token 0, and bytes follow so that token 100 is an "a".

    Then come the special tokens `added`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    turn = alphabet.index("a") - 99
    pieces = [EOS, *alphabet[turn:], *alphabet[:turn]]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([EOS, *added])
    library.save(str(directory / "tokenizer.json"))
    vocab_size = library.get_vocab_size()
    config = {"vocab_size": vocab_size, "eos_token_id": 0, "max_position_embeddings": 32, **config}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load_tokenizer(directory)


def ids_only_tokenizer(directory, **config):
    """The stand-in of a model that is a config alone."""
    path = directory / "model.json"
    path.write_text(json.dumps({"vocab_size": 50, **config}))
    return load_tokenizer(path)


def admission(tokenizer, tenants=None, **settings):
    """An Admission of a model "tiny"; `settings` are its arguments, or a router's configuration."""
    names = ("grammars", "sampling_defaults")
    more = {name: settings.pop(name) for name in names if name in settings}
    api = settings.pop("api", ApiConfig())
    limits = RouterLimits(**{"default_timeout_s": 60.0, **settings})
    config = RouterConfig(model_name="tiny", limits=limits, api=api, http_port=1)
    return Admission(config, tokenizer, tenants or Tenants(), **more)
