"""The activation functions of gated MLPs, by name."""

from typing import Literal, get_args

Activation = Literal["silu", "gelu_tanh", "swigluoai"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # constants of "swigluoai"
