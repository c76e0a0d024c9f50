"""Measurements that start what they measure: `python -m benchmarks NAME`, see `--help`.

Not part of what is installed: some start programs that are not Baton's, under an interpreter of
their own. `baton bench serve` loads any server that runs already.
"""
