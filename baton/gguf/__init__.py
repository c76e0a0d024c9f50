"""GGUF, llama.cpp's file of a model: metadata, tokenizer and tensors in one file.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Torch-free:
texts are read by the router, too. The engine reads the tensors, in
`baton.engine.checkpoint.gguf` and `baton.engine.quantization.gguf`.
"""
