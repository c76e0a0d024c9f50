"""The port that a scraper asks, and what it answers."""

import asyncio

import pytest

from baton.errors import ConfigError
from baton.net.metrics_server import serving
from tests.waiting import WAIT_S

GET = "GET /metrics?x=1 HTTP/1.1\r\nHost: localhost\r\naccept: text/a;q=1\r\n\r\n"


def parts(url):
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def page(accept):
    return "text/plain", f"accept={accept}".encode()


async def ask(address, request):
    """(status, body) of the answer, read until the server hangs up; ("", "") without one."""
    host, port = parts(address)
    request = request.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(request.encode())
            answer = await reader.read()
        except ConnectionError:  # it hung up with some of the request unread
            answer = b""
        writer.close()
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head[9:12], body


async def test_only_the_page_is_served(caplog):
    def broken(accept):
        raise ValueError("no page")

    async with serving(page, "127.0.0.1", 0) as address:
        assert await ask(address, GET) == ("200", "accept=text/a;q=1")
        assert await ask(address, GET.replace("GET", "HEAD")) == ("200", "")
        assert (await ask(address, "GET / HTTP/1.1\r\n\r\n"))[0] == "404"
        assert (await ask(address, GET.replace("GET", "POST")))[0] == "405"
        assert (await ask(address, "x" * 100_000 + "\r\n\r\n"))[0] in ("400", "431")
    async with serving(broken, "127.0.0.1", 0) as address:
        assert (await ask(address, GET))[0] == "500"
        assert "no page" in caplog.text
        assert (await ask(address, "GET /x HTTP/1.1\r\n\r\n"))[0] == "404"


async def test_a_taken_port_is_named():
    async with serving(page, "127.0.0.1", 0) as address:
        port = parts(address)[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} for metrics.*--metrics-port"):
            async with serving(page, "127.0.0.1", port):
                pass
