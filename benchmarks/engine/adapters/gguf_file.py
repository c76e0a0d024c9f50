"""Writes a model directory of ours as a GGUF file, for llama.cpp.

    python -m benchmarks.engine.adapters.gguf_file DIRECTORY SHAPE TYPE FILE

TYPE is "bf16", "q8_0" (all matrices, as llama.cpp's own quantizer does it) or "q4_k_m", which that
quantizer makes of bf16: of a matrix whose rows are no multiple of 256 it makes q5_0 or q8_0. Runs
under the interpreter that has the packages `gguf` and `llama-cpp-python`. llama.cpp's converters do
not know our tokenizer; weights are random, so the order of rotary pairs in q and k does not matter
either.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import word
from benchmarks.child import Failed, exit_text
from benchmarks.shapes import SHAPES, Shape

_NORMAL, _CONTROL = 1, 3  # kinds of tokens


def gguf_of(python: str, directory: str, shape: str, kind: str) -> Path:
    """The GGUF file of a model directory, written if it does not exist.

    Written by a process of that interpreter, whose memory is then free. Raises Failed with the end
    of its output.
    """
    file = Path(directory) / f"{kind}.gguf"
    if not file.exists():
        argv = [python, "-m", "benchmarks.engine.adapters.gguf_file", directory, shape, kind]
        log = file.with_name(f"{file.name}.log")
        with log.open("wb") as out:
            status = subprocess.call([*argv, str(file)], stdout=out, stderr=subprocess.STDOUT)
        if status:
            raise Failed(f"{file.name} cannot be written: {exit_text(status, log)}")
        log.unlink()
    return file


def write(directory: Path, shape: Shape, kind: str, file: Path) -> None:
    """Writes the file; nothing is left if it is interrupted."""
    part = file.with_name(f"{file.name}.part")
    if kind == "q4_k_m":
        quantize(gguf_of(sys.executable, str(directory), shape.name, "bf16"), part)
    else:
        convert(directory, shape, kind, part)
    part.rename(file)


def quantize(source: Path, file: Path) -> None:
    """Quantises a bf16 file to Q4_K_M. Raises RuntimeError."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    names = (str(path).encode() for path in (source, file))
    if status := llama_cpp.llama_model_quantize(*names, ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize returned {status}")


def convert(directory: Path, shape: Shape, kind: str, file: Path) -> None:
    """Writes the weights in bf16 or q8_0."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = shape.config()
    kind_of_model = config["model_type"].replace("_", "")
    writer = gguf.GGUFWriter(file, kind_of_model)
    for field, value in {
        "name": shape.name,
        "context_length": config["max_position_embeddings"],
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.intermediate,
        "head_count": shape.heads,
        "head_count_kv": shape.kv_heads,
        "rope_dimension_count": shape.head_size,
        "rope_freq_base": config["rope_theta"],
        "layer_norm_rms_eps": config["rms_norm_eps"],
        "vocab_size": shape.vocab,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "default",
        # Its tokenizer joins tokens as they are: a space keeps them words (its byte form is "Ġ").
        "token_list": [f"\u0120{word(token_id)}" for token_id in range(shape.vocab)],
        "token_types": [_CONTROL, *[_NORMAL] * (shape.vocab - 1)],
        "token_merges": ["w 0"],
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "add_bos_token": False,
        "expert_count": shape.experts,
        "expert_used_count": shape.per_token,
        "expert_feed_forward_length": shape.intermediate,
    }.items():
        if shape.experts or not field.startswith("expert_"):
            getattr(writer, f"add_{field}")(value)
    wanted = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}[kind]
    arch = getattr(gguf.MODEL_ARCH, kind_of_model.upper())
    names = gguf.get_tensor_name_map(arch, shape.layers)
    tensors: dict[str, list[Any]] = {}  # experts of a layer together
    for name, tensor in sorted(load_file(directory / "model.safetensors").items()):
        tensors.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(tensor)
    for name, parts in tensors.items():
        theirs, tensor = names.get_name(name, (".weight", ".bias")), torch.stack(parts)
        assert theirs is not None, name
        values = (tensor if ".experts." in name else tensor[0]).float().numpy()
        if values.ndim == 1 or name.endswith(".gate.weight"):  # a router stays as it is
            writer.add_tensor(theirs, values)
        else:
            writer.add_tensor(theirs, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    _directory, _shape, _kind, _file = sys.argv[1:]
    write(Path(_directory), SHAPES[_shape], _kind, Path(_file))
