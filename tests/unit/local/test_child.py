"""A tied child is the program itself, and refuses to start for a parent that is gone."""

import asyncio
import os
import sys

from baton.local.child import tied


async def run(command):
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    return process, out.decode(), err.decode()


async def test_the_program_keeps_its_pid_and_needs_its_parent():
    asks = "import os, sys; print(os.getpid(), os.getppid(), *sys.argv[1:])"
    process, out, _ = await run(tied([sys.executable, "-c", asks, "a b", "--c"]))
    assert out.split() == [str(process.pid), str(os.getpid()), "a", "b", "--c"]
    assert process.returncode == 0
    command = tied([sys.executable, "-c", "print('ran')"])
    command[command.index(str(os.getpid()))] = "1"
    process, out, err = await run(command)
    assert (process.returncode, out) == (1, "")
    assert "the parent ended first" in err
