"""The port that a scraper asks: what it answers, and that nothing of it stays."""

import asyncio
import contextlib

import pytest

from baton.errors import ConfigError
from baton.local import ports
from baton.metrics import server
from baton.metrics.server import serving
from tests.waiting import eventually

PATIENCE_S = 30.0


def page(accept):
    return "text/plain", f"accept={accept}".encode()


async def ask(address, request):
    """The whole answer, read until the server hangs up."""
    host, _, port = address.partition(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request.encode())
        try:
            answer = await reader.read()
        except ConnectionResetError:  # it hung up with some of the request unread
            answer = b""
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head, body


async def test_what_is_answered():
    async with serving(page, "127.0.0.1", 0) as address:
        request = "GET /metrics?x=1 HTTP/1.1\r\nHost: h\r\nAccept: text/a;q=1\r\n\r\n"
        head, body = await ask(address, request)
        assert head.startswith("HTTP/1.0 200 OK\r\n")
        assert "Content-Type: text/plain" in head and f"Content-Length: {len(body)}" in head
        assert body == "accept=text/a;q=1"
        head, body = await ask(address, "HEAD /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith("HTTP/1.0 200 OK") and body == ""
        assert (await ask(address, "GET / HTTP/1.1\r\n\r\n"))[0].startswith("HTTP/1.0 404 ")
        assert (await ask(address, "POST /metrics HTTP/1.1\r\n\r\n"))[0].startswith("HTTP/1.0 405 ")
        assert "414" in (await ask(address, "x" * 100_000 + "\r\n\r\n"))[0]


async def test_a_silent_client_is_cut(monkeypatch):
    monkeypatch.setattr(server._Handler, "timeout", 0.2)
    async with serving(page, "127.0.0.1", 0) as address:
        assert await ask(address, "GET /metrics HTT") == ("", "")
        head, _ = await ask(address, "GET /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith("HTTP/1.0 200 ")


async def test_so_many_at_a_time_and_no_more_and_the_end_waits_for_none(monkeypatch):
    monkeypatch.setattr(server._Handler, "timeout", 1e6)
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 2)
    async with asyncio.timeout(PATIENCE_S), serving(page, "127.0.0.1", 0) as address:
        host, _, port = address.partition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        assert await ask(address, "") == ("", "")
        for _, writer in silent:
            writer.close()

        async def status():
            try:
                return (await ask(address, "GET /metrics HTTP/1.1\r\n\r\n"))[0][:12]
            except ConnectionResetError:  # one too many: closed with our request unread
                return "refused"

        await eventually(status, lambda now: now == "HTTP/1.0 200", "not let go", PATIENCE_S)
        reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
    ports.check_free(host, int(port))


async def test_a_page_that_cannot_be_made_ends_nothing(caplog):
    def broken(accept):
        raise ValueError("no page")

    async with serving(broken, "127.0.0.1", 0) as address:
        answer = await ask(address, "GET /metrics HTTP/1.1\r\n\r\n")
        assert answer[0].startswith("HTTP/1.0 500 ")
        assert "metrics could not be shown" in caplog.text
        assert (await ask(address, "GET /x HTTP/1.1\r\n\r\n"))[0].startswith("HTTP/1.0 404 ")


async def test_a_taken_port_is_named():
    async with serving(page, "127.0.0.1", 0) as address:
        port = int(address.partition(":")[2])
        with pytest.raises(ConfigError, match=f"metrics on 127.0.0.1:{port}.*--metrics-port"):
            async with serving(page, "127.0.0.1", port):
                pass
