"""Writes a checkpoint of the demo model as a Hugging Face model folder.

python scripts/demo_model/export.py --checkpoint /tmp/demo_model --out baton/demo_model
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from model import Shape
from safetensors.torch import save
from tokenizer import BOS, BOS_ID, EOS, EOS_ID
from tokenizers import Tokenizer

# The model only goes on with Python, so what a person says becomes a comment, and the reply is
# what follows it. Nothing is written for a reply to come: a longer conversation always begins with
# the whole text of a shorter one, which a prefix cache can use.
CHAT_TEMPLATE = (
    "{#- The reply begins on the line after the comment: add_generation_prompt adds nothing. -#}\n"
    "{{- bos_token -}}\n"
    "{%- for message in messages -%}\n"
    "{%- if message['role'] == 'assistant' -%}\n"
    "{{- message['content'] + '\\n\\n\\n' -}}\n"
    "{%- else -%}\n"
    "{{- '# ' + message['content'] | replace('\\n', '\\n# ') + '\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}"
)


def model_config(shape: Shape) -> dict[str, object]:
    """Returns `config.json`: the shape in the names Hugging Face gives a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions_max,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    """Returns `tokenizer_config.json`, with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": shape.positions_max,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def export(checkpoint: Path, out: Path) -> None:
    """Writes the weights in bfloat16, the tokenizer and their settings into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape()
    state = torch.load(checkpoint / "checkpoint.pt")
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state["model"].items()
    }
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    Tokenizer.from_file(str(checkpoint / "tokenizer.json")).save(str(out / "tokenizer.json"))
    _write_json(out / "config.json", model_config(shape))
    _write_json(out / "tokenizer_config.json", tokenizer_config(shape))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    _write_json(out / "generation_config.json", generation)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"step {state['step']}: {parameters} parameters written to {out}")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Reads the command line and exports."""
    parser = argparse.ArgumentParser(description="Writes a checkpoint as a model folder.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="train.py's --out folder")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    options = parser.parse_args()
    export(options.checkpoint, options.out)


if __name__ == "__main__":
    main()
