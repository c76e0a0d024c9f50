"""Inline PTX of kernels, run by torch on whole tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def run_ptx(text: str, word: Tensor, results: int) -> list[Tensor]:
    """$0 and so many results after a few instructions on the word behind them, all int32.

    By what PTX's manual says of the instructions; rounding where there should be none fails.
    """
    held = {f"${results}": word}

    def value(name: str) -> Tensor:
        return held[name] if name in held else torch.tensor(int(name, 0)).to(torch.int32)

    def halves(name: str) -> Tensor:
        return value(name).expand(word.shape).contiguous().view(torch.bfloat16).double()

    for line in text.strip("{} \n").split(";")[:-1]:
        operation, _, names = line.strip().partition(" ")
        to, *given = names.replace(",", "").split()
        if operation == "mov.b32":
            held[to] = value(*given)
        elif operation == "shl.b32":
            held[to] = value(given[0]) << int(given[1])
        elif operation == "shr.b32":
            held[to] = (
                (value(given[0]).long() & 0xFFFFFFFF).bitwise_right_shift(int(given[1])).int()
            )
        elif operation == "and.b32":
            held[to] = value(given[0]) & value(given[1])
        elif operation == "lop3.b32":
            assert given[3] == "0xea", "a & b | c"
            held[to] = value(given[0]) & value(given[1]) | value(given[2])
        elif operation == "fma.rn.bf16x2":
            a, b, c = map(halves, given)
            result = (a * b + c).to(torch.bfloat16)
            assert torch.equal(result.double(), a * b + c)
            held[to] = result.view(torch.int32)
        else:
            assert operation == ".reg"
    return [held[f"${number}"] for number in range(results)]
