"""HAProxy, as compose configures it, before two routers that end while OpenAI clients wait."""

import asyncio
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from baton.local import ports
from tests.cluster.oracle import SIMULATED
from tests.processes import running
from tests.waiting import WAIT_S, eventually

PROGRAM = shutil.which("haproxy", path="/usr/sbin:/usr/bin")
pytestmark = pytest.mark.skipif(
    not PROGRAM, reason="needs haproxy, of Debian's package of this name"
)
CONFIG = Path(__file__).parents[2] / "compose/haproxy/haproxy.cfg"
SLOW = replace(SIMULATED, simulate="150,20")  # prompt tokens per second; ms of a step
PROMPT, OUTPUT = 500, 60


def configuration(http_addresses, health_ports, port, metrics_port):
    """Compose's configuration with this machine's addresses in place of containers' names."""
    text = CONFIG.read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    text = text.replace("bind :8404", f"bind 127.0.0.1:{metrics_port}")
    text = text.replace(" init-addr last,libc,none resolvers docker", "").replace(" port 9463", "")
    text = text.partition("# Containers get other addresses")[0]
    pairs = zip(http_addresses, health_ports, strict=True)
    for number, (address, health) in enumerate(pairs, start=1):
        text = text.replace(f"router-{number}:7780", f"{address} port {health}")
    assert not re.search(r"router-\d:|docker", text)
    return text


async def test_a_client_of_haproxy_sees_no_router_end_before_its_first_byte(
    clusters, simulated, tmp_path
):
    health_ports = [ports.free(), ports.free()]
    cluster, _ = await clusters(
        alone=True, engine=SLOW, routers=2, http_port=ports.free(), drain_s=WAIT_S,
        extra_args={
            f"router-{number}": ["--health-port", str(port)]
            for number, port in enumerate(health_ports)
        },
    )  # fmt: skip
    port, metrics_port = ports.free(), ports.free()
    text = configuration(cluster.http_addresses, health_ports, port, metrics_port)
    (tmp_path / "haproxy.cfg").write_text(text)
    cases = [simulated.case(PROMPT, seed, "greedy", OUTPUT) for seed in range(2)]

    async with (
        running(PROGRAM, "-f", str(tmp_path / "haproxy.cfg")) as proxy,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        ) as http,
    ):

        async def stream(case, seen=None):
            pieces = await http.completions.create(
                model="demo", prompt=list(case.prompt), stream=True, max_tokens=OUTPUT,
                temperature=0.0, extra_body={"ignore_eos": True},
            )  # fmt: skip
            text = ""
            async for piece in pieces:
                text += piece.choices[0].text if piece.choices else ""
                if seen is not None:
                    seen.set()
            return text

        async def dispatched():
            """Requests of each router that prefill workers have."""
            async with httpx.AsyncClient(verify=False) as asking:
                pages = [
                    (await asking.get(f"http://{one}/metrics")).text
                    for one in cluster.http_addresses
                ]
            return [
                sum(map(float, re.findall(r"^baton_requests_running(?:{.*})? (\S+)", page, re.M)))
                for page in pages
            ]

        async def routers_up():
            """Routers that the proxy uses."""
            try:
                async with httpx.AsyncClient(verify=False) as asking:
                    page = await asking.get(f"http://127.0.0.1:{metrics_port}/metrics")
            except httpx.HTTPError:  # it starts
                return 0
            return len(re.findall(r'haproxy_server_status{.*state="UP"} 1', page.text))

        await eventually(routers_up, lambda up: up == 2, "not both routers are used")
        expected = [simulated.text(simulated.tokens(case)) for case in cases]
        tasks = [asyncio.create_task(stream(case)) for case in cases]
        await eventually(dispatched, lambda found: found == [1, 1], "not one at each router")
        cluster.kill("router-0")
        assert await asyncio.gather(*tasks) == expected  # one of them was repeated
        assert await stream(cases[0]) == expected[0]

        await eventually(routers_up, lambda up: up == 1, "the dead router is still used")
        await cluster.start_again("router-0")
        await eventually(routers_up, lambda up: up == 2, "not both routers are used")
        first = asyncio.Event()
        streams = [asyncio.create_task(stream(case, first)) for case in cases]
        await first.wait()
        cluster.kill("router-1", signal.SIGTERM)  # it drains
        assert await stream(cases[1]) == expected[1]
        assert await asyncio.gather(*streams) == expected
        assert await cluster.processes["router-1"].wait() == 0
        first = asyncio.Event()
        broken = asyncio.create_task(stream(cases[0], first))
        await first.wait()
        cluster.kill("router-0")
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await broken  # after its first byte only the SDK continues a stream
        assert await proxy.end(signal.SIGUSR1) == 0
