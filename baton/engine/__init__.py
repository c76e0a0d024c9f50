"""The engine: runs a model over paged KV, one step after the other, on one thread.

Read `loop` first: admit, plan, run, publish. `scheduler` decides, `runner` computes. Prefill and
decode workers use the same engine; what differs is when a sequence is parked.
"""

import os
from pathlib import Path

# On Intel's CPUs MKL may add up a deep product of few rows on several threads, in another order
# than one of many. Its strict mode does not; MKL reads the variable at its first product.
if "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
