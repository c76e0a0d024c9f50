"""The kernels become machine code for every GPU that is served, without one."""

import os
import subprocess
import sys

# In a process of its own: in this one kernels may be interpreted.
SCRIPT = """
from types import SimpleNamespace
from baton.engine.ops.triton.check import ARCHITECTURES, check
from kvtransfer.kernels.blocks import SPEC

one = "copy bf16 128"
some = SimpleNamespace(name=SPEC.name, launches={one: SPEC.launches[one]})
results = check([some], ARCHITECTURES, str) + check([SPEC], ARCHITECTURES[1:2], str)
for result in results:
    wide = result.ptx.count("ld.global.v4.b32"), result.ptx.count("st.global.v4.b32")
    print(result.case, *wide, result.spilled, result.complaint or "fine", sep="|")
"""


def test_every_use_compiles_and_moves_16_bytes_at_a_time():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert len(lines) == 8 + 3
    for case, loads, stores, spilled, complaint in lines:
        assert complaint == "fine", case
        assert int(loads) >= 4, case
        assert (int(stores) >= 4) != case.startswith("checksum"), case
        assert spilled in ("0", "None"), case
