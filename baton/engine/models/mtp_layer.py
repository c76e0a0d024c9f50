"""A layer that predicts further tokens (multi-token prediction), as a decoder of one layer.

The input of a token is its embedding and the hidden state of the token before it, after the model's
final norm; the logits are those of the token after it:

    projection(embedding_norm(embed(t[i])), hidden_norm(h[i - 1])) -> layer -> norm -> output layer

For tokens further ahead the layer runs again, on its own hidden states. Embedding and output layer
are the model's.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.2, https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.torch.rms_norm import Norm
from baton.engine.models.decoder import DecoderModel


class MtpLayer(DecoderModel):
    """The layer; `previous` belongs to the rows of the next step.

    previous: `[rows, hidden_size]`, hidden states of the tokens before the rows; None: zeros.
    """

    previous: Tensor | None = None

    def _embed(self, token_ids: Tensor, embedding: Tensor) -> Tensor:
        weights, eps = self._weights.predictor, self.config.rms_eps
        assert weights is not None, "this layer has weights for prediction"
        embedded = super()._embed(token_ids, embedding)
        previous = torch.zeros_like(embedded) if self.previous is None else self.previous
        parts = (embedded, weights.embedding_norm), (previous.contiguous(), weights.hidden_norm)
        normed = [self.ops.add_rms_norm(x, None, Norm(norm, eps))[0] for x, norm in parts]
        return weights.projection.apply(torch.cat(normed, dim=1))
