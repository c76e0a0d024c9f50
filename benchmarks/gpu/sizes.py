"""What the engine part measures, and how much of it a GPU's memory holds."""

from __future__ import annotations

import torch

from baton.engine.backends.gpu.assemble import unsupported_format
from benchmarks.gpu.job import Job
from benchmarks.gpu.our_engine import BF16, Formats, blocks_for, layout_bytes
from benchmarks.shapes import Shape

BATCHES, CONTEXT, STEPS = (1, 8, 64, 256), 512, 64
PROMPTS, CHUNK = (512, 2048, 8192), 2048
RIVAL_MOST = 64  # sequences of transformers
_SPARE = 6 << 30  # bytes for activations, graphs, and what torch keeps


def blocks(job: Job, batch: int) -> int:
    """For decoding, or for the longest prompt if that takes more."""
    context = job.sized(CONTEXT, CONTEXT, 20)
    steps = 8 + job.sized(STEPS, STEPS // 2, 2) + 4
    prompt = job.sized(max(PROMPTS), max(PROMPTS), 33)
    return max(blocks_for(batch + 2, context + steps), blocks_for(1, prompt + 32)) + 8


def batches_of(
    job: Job, shape: Shape, formats: Formats, device: torch.device, *, beside: bool
) -> list[int]:
    """Batch sizes whose KV fits beside the weights, and if told so transformers' beside that."""
    wanted = list(job.sized(BATCHES, (1, 64), (2,)))
    if device.type != "cuda":
        return wanted
    free_bytes = torch.cuda.mem_get_info(device)[0] - _SPARE
    free_bytes -= shape.num_parameters * formats.storage.weight
    if beside:
        theirs = blocks_for(RIVAL_MOST, CONTEXT + 2 * STEPS)
        free_bytes -= 2 * shape.num_parameters + 2 * layout_bytes(shape, BF16, theirs)
    return [
        batch for batch in wanted if layout_bytes(shape, formats, blocks(job, batch)) <= free_bytes
    ]


def unsupported(formats: Formats, device: torch.device) -> str:
    """Why a GPU does not compute these formats; empty if it does."""
    if formats.quantization == "none" or device.type != "cuda":
        return ""
    capability = torch.cuda.get_device_capability(device)
    return unsupported_format(formats.quantization, capability)
