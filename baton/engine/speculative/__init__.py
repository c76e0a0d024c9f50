"""Speculative decoding: proposers of tokens, and their verification. Torch-free.

Proposed tokens are computed in the same step as the last known one, and compared with the tokens
sampled at their positions (`verify`): a step yields the accepted tokens and one more. The output is
the same as without: a token depends on logits, settings, earlier tokens and position only.
"""
