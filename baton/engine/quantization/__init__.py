"""Quantised weights: the formats in memory and the checkpoints that hold them.

| word | file | activations |
|---|---|---|
| `--quantization int8`, W8A8 int8 | `int8.py` | int8, a scale for each row |
| `--quantization fp8`, W8A8; W8A16 with scales of groups | `fp8.py` | fp8; unquantised |
| `--quantization int4`, W4A16 | `int4.py`, on `group_scaled.py` | unquantised |
| MXFP4 (gpt-oss), NVFP4 | `mxfp4.py`, on `group_scaled.py` | unquantised |
| AWQ, GPTQ, compressed-tensors checkpoints | `awq.py`, `gptq.py`, `compressed_tensors.py` | |
| fp8, NVFP4, MXFP4 and MXFP8 checkpoints | `scaled_floats.py` | unquantised |
| `quantization_config` of a checkpoint | `checkpoint_configs.py`, `config.py` | |
| GGUF files | `gguf.py` | unquantised |
| choosing among them | `methods.py` | |

Every format is a `LinearWeight` (`linear_weight.py`). How rows of activations and of the KV cache
are quantised is in `baton.engine.kernels.torch.row_quantization`.
"""
