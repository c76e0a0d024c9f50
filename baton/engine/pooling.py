"""Pooling of a prompt's hidden states to an embedding, as the checkpoint configures it; or of the
logits of label tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.checkpoint_files import MAX_JSON_BYTES, parse_json_value, read_bytes
from baton.engine.scheduler import ScheduledSequence
from baton.errors import CheckpointError, quoted

Vector = npt.NDArray[np.float32]
_MODULES, _POOLING = "modules.json", "config.json"


@dataclass(frozen=True)
class Pooling:
    """Pooling as a checkpoint's sentence-transformers files configure it."""

    mean: bool = False  # of all tokens; else the last token
    normalized: bool = True

    @classmethod
    def read(cls, path: Path) -> Pooling:
        """Reads a model directory; without such files, the last token, normalized.

        Raises CheckpointError for files that are broken or ask for unsupported pooling.
        """
        file = path / _MODULES
        modules = _read(file)
        if modules is None:
            return cls()
        if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
            raise CheckpointError(f"{file}: must be a list of modules")
        kinds = {str(one.get("type")).rpartition(".")[2]: str(one.get("path")) for one in modules}
        if unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
            raise CheckpointError(f"{file}: module {unknown.pop()!r} is not supported")
        pooling = _read(path / kinds.get("Pooling", "") / _POOLING) if "Pooling" in kinds else {}
        if not isinstance(pooling, dict):
            raise CheckpointError(f"{file}: names a pooling without its {_POOLING}")
        modes = _modes(pooling) if "Pooling" in kinds else ["lasttoken"]
        if modes not in (["mean"], ["lasttoken"]):
            found = ", ".join(map(str, modes))
            raise CheckpointError(f"{file}: its pooling of {quoted(found)} is not supported")
        return cls(modes == ["mean"], "Normalize" in kinds)

    def finish(self, summed: Vector, num_tokens: int) -> Vector:
        """The embedding of a prompt, from the sum over its steps of what `pooled` returned."""
        length = float(np.linalg.norm(summed)) if self.normalized else 1.0
        if self.mean and not self.normalized:
            length = float(num_tokens)
        vector: Vector = summed / np.float32(length or 1.0)
        return vector


def pooled(work: Sequence[ScheduledSequence], hidden: Tensor, logits: Tensor) -> dict[str, Vector]:
    """Sums the rows of each sequence that wants no output but these, by id.

    Of a sequence with label tokens those are its logits. hidden: `[rows, hidden_size]`, and logits:
    `[rows, vocab_size]`, of each work's `scored` positions, and then of those that it samples at.
    """
    found, at = dict[str, Vector](), 0
    for item in work:
        end = at + len(item.scored) + (1 + len(item.proposed) if item.samples else 0)
        params = item.sequence.params
        if params.is_pooled and end > at:
            labels = list(params.label_token_ids)
            rows = logits[at:end, labels] if labels else hidden[at:end]
            found[item.sequence.seq_id] = rows.float().sum(0).cpu().numpy()
        at = end
    return found


def _modes(pooling: dict[str, Any]) -> list[Any]:
    """The modes of a Pooling module; the mean by default.

    sentence-transformers lists them in `pooling_mode`; older versions have a boolean key for each.
    """
    named = pooling.get("pooling_mode")
    if named is None:
        keys = (key for key, on in pooling.items() if key.startswith("pooling_mode_") and on)
        named = [key.removeprefix("pooling_mode_").removesuffix("_tokens") for key in keys]
    return named if isinstance(named, list) and named else [named or "mean"]


def _read(file: Path) -> Any:
    """The value in a JSON file; None when there is no such file."""
    try:
        return parse_json_value(file, read_bytes(file, MAX_JSON_BYTES))
    except FileNotFoundError:
        return None
