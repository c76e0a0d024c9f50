"""One rank's part of a model under tensor and expert parallelism.

Query, key, value, gate and up projections, embedding and output layer are split by outputs; the
projections that read their results are split by inputs, so that the ranks' results add up (Shoeybi
et al., "Megatron-LM", 2019). Norms are replicated, and so is a KV head that several ranks' queries
read. Each rank has a part of every expert or, with expert parallelism, some entire experts; all
ranks route all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from baton.config import EngineConfig, kv_heads_of
from baton.engine.models.model_config import ModelConfig
from baton.engine.quantization.linear_weight import LinearWeight

BY_INPUTS = ("o", "down", "delta_out")


@dataclass(frozen=True)
class Shard:
    """One of `count` ranks. expert_parallel: experts are not split but distributed."""

    rank: int = 0
    count: int = 1
    expert_parallel: bool = False

    def settings(self, settings: EngineConfig) -> EngineConfig:
        """Settings with the rank's share of the worker's threads and cores."""
        if self.count == 1:
            return settings
        cpus = settings.cpus
        if len(cpus) >= self.count:
            cpus = tuple(cpus[at] for at in self._part(len(cpus)))
        threads = (settings.threads or len(settings.cpus) or torch.get_num_threads()) // self.count
        return replace(settings, cpus=cpus, threads=max(1, threads))

    def kv_heads(self, config: ModelConfig) -> range:
        """The KV heads that this rank's queries read."""
        return kv_heads_of(self.rank, self.count, config.num_kv_heads)

    def tokens(self, config: ModelConfig) -> range:
        """The tokens whose embeddings and logits this rank has."""
        return self._part(config.vocab_size)

    def experts(self, config: ModelConfig) -> range:
        """The experts that this rank has, entirely or in part."""
        count = config.experts.count if config.experts else 0
        return self._part(count) if self.expert_parallel else range(count)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model's configuration with this rank's heads; other sizes are the model's."""
        heads, delta = len(self._part(config.num_heads)), config.delta_rule
        if delta is not None:
            shape, ranks = delta.shape, self.count
            own = {"key_heads": shape.key_heads // ranks, "value_heads": shape.value_heads // ranks}
            delta = replace(delta, shape=replace(shape, **own))
        kv_heads = len(self.kv_heads(config))
        layer_heads = tuple(
            replace(one, num_kv_heads=len(self.kv_heads(config.layer(index))))
            for index, one in enumerate(config.layer_heads)
        )
        return replace(
            config, num_heads=heads, num_kv_heads=kv_heads, delta_rule=delta,
            layer_heads=layer_heads,
        )  # fmt: skip

    def weight(self, config: ModelConfig, field: str, weight: LinearWeight) -> LinearWeight:
        """This rank's part of the matrix of a field of `ModelWeights`."""
        if self.count == 1:
            return weight
        outputs, inputs = weight.shape
        if field in BY_INPUTS:
            return weight.take_inputs(self._part(inputs))
        return weight.take_outputs(self._outputs(config, field, outputs))

    def tensor(self, config: ModelConfig, field: str, tensor: Tensor) -> Tensor:
        """This rank's part of a norm or bias; a bias that all ranks add is zero but on rank 0."""
        is_of_heads = field == "sinks" or (
            field in ("q_norm", "k_norm") and config.qk_norm == "row"
        )
        if self.count == 1 or (field.endswith("norm") and not is_of_heads):
            return tensor
        if field in ("conv", "log_decay", "decay_bias"):
            return tensor[self._part(len(tensor)).start : self._part(len(tensor)).stop]
        if field == "head_scale":
            return tensor
        if is_of_heads:
            keys = field == "k_norm"
            heads = self.kv_heads(config) if keys else self._part(config.num_heads)
            by_head = tensor.view(config.num_kv_heads if keys else config.num_heads, -1)
            return by_head[heads.start : heads.stop].flatten()
        name = field.removesuffix("_bias")
        if name in BY_INPUTS:
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        return tensor[self._outputs(config, name, len(tensor))]

    def _outputs(self, config: ModelConfig, field: str, outputs: int) -> Tensor:
        latent, heads = config.latent, self._part(config.num_heads)
        match field:
            case "qkv" if latent is not None:
                queries = range(heads.start * latent.query_size, heads.stop * latent.query_size)
                if latent.q_rank:
                    queries = range(latent.q_rank)
                parts = [queries, range(outputs - config.head_size, outputs)]
            case "q_b" | "kv_b":
                size = outputs // config.num_heads
                parts = [range(heads.start * size, heads.stop * size)]
            case "qkv":
                size, keys = config.head_size, self.kv_heads(config)
                counts, own = [config.num_heads, *[config.num_kv_heads] * 2], [heads, keys, keys]
                if outputs == config.num_heads * size:  # K and V are those of another layer
                    own = own[:1]
                if config.arch.gated_attention:
                    counts, own = [*counts, config.num_heads], [*own, heads]
                parts = [
                    range((start + part.start) * size, (start + part.stop) * size)
                    for start, part in zip(accumulate(counts, initial=0), own, strict=False)
                ]
            case "gate_up":
                half = outputs // 2
                part = self._part(half)
                parts = [part, range(half + part.start, half + part.stop)]
            case "embedding" | "lm_head" | "delta_in" | "delta_gates":
                parts = [self._part(outputs)]
            case _:  # routers and shared gates are replicated
                parts = [range(outputs)]
        return torch.cat([torch.arange(part.start, part.stop) for part in parts])

    def _part(self, size: int) -> range:
        return range(size * self.rank // self.count, size * (self.rank + 1) // self.count)


WHOLE = Shard()
