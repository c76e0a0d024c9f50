"""The page at `/`, as a headless Chromium shows it: skipped where none is installed."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from functools import partial

import aiohttp
import pytest

from tests.unit.router.scripted_workers import TIMEOUT_S
from tests.unit.router.small_tokenizers import byte_tokenizer
from tests.waiting import WAIT_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")


class Page:
    """A page in a browser, by Chrome's DevTools protocol."""

    def __init__(self, socket):
        self._socket = socket
        self._count = 0
        self._session = {}
        self.complaints = []  # of its script, and of its policy

    async def open(self, url):
        self.target = await self.call("Target.createTarget", url="about:blank")
        session = await self.call("Target.attachToTarget", flatten=True, **self.target)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.loaded()

    async def loaded(self):
        """Returns once it knows its model, without which it cannot ask."""
        await self.until("document.readyState === 'complete' && !$('model').value.startsWith('no')")

    async def call(self, method, **params):
        self._count += 1
        asked = {"id": self._count, "method": method, "params": params, **self._session}
        async with asyncio.timeout(WAIT_S):
            await self._socket.send_json(asked)
            while True:
                told = await self._socket.receive_json()
                event = told.get("params", {})
                if event.get("entry", {}).get("level") == "error" or "exceptionDetails" in event:
                    self.complaints.append(event)
                if told.get("id") == self._count:
                    return told["result"]

    async def value(self, expression):
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["result"]
        return found["result"].get("value")

    async def until(self, expression):
        """Returns once it is true; else fails with what the page shows."""
        assert await self.value(
            "new Promise((resolve, reject) => {"
            f"  const found = () => {{ try {{ return {expression}; }} catch {{ return false; }} }};"
            "  setInterval(() => found() && resolve(true), 20);"
            f"  setTimeout(() => reject(document.body.innerText), {WAIT_S * 500});"
            "})"
        )

    async def write(self, text, *, into="message"):
        await self.value(f"$('{into}').focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text)

    async def send(self, text):
        await self.write(text)
        await self.press("Enter")

    def texts(self, of):
        return self.value(f"[...document.querySelectorAll('{of}')].map((one) => one.textContent)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The address of one browser for all tests here."""
    if not CHROMIUM:
        pytest.skip("Chromium is not installed")
    folder = tmp_path_factory.mktemp("browser")
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    told, end, where = folder / "DevToolsActivePort", time.monotonic() + WAIT_S, []
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:
        try:
            while len(where) < 2:  # a port and a path
                assert process.poll() is None and time.monotonic() < end, "Chromium does not start"
                time.sleep(0.02)
                where = told.read_text().split() if told.exists() else []
            yield "ws://127.0.0.1:{}{}".format(*where)
        finally:
            process.terminate()


@pytest.fixture
async def page(browser):
    """A page of it, not opened yet."""
    async with aiohttp.ClientSession() as session, session.ws_connect(browser) as socket:
        page = Page(socket)
        yield page
        await page.call("Target.closeTarget", **page.target)


@pytest.fixture
async def gateway(gateway_of, tmp_path):
    return await gateway_of(tokenizer=byte_tokenizer(tmp_path, max_position_embeddings=64))


def prompts(gateway):
    return [
        gateway.tokenizer.decode(request.sequence.token_ids)
        for request in gateway.cluster.prefills[0].requests
    ]


async def test_a_chat_is_streamed_answered_again_and_goes_on(page, gateway):
    await page.open(gateway.url)
    assert await page.value("$('model').value") == "tiny"
    await page.value("$('toggle').click()")
    await page.write("4", into="max_tokens")
    await page.write("So.", into="system")
    await page.send("Hi")
    await page.until("/^cut .*4 tokens.*TTFT/.test(document.querySelector('.stats').textContent)")
    assert await page.texts(".text") == ["Hi", "abcd"]
    (stats,) = await page.texts(".stats")
    assert "p0 → d0 by shm, 0.001 MB of KV" in stats
    await page.value("document.querySelector('.stats button').click()")
    await page.until("!running && document.querySelectorAll('.stats').length === 1")
    await page.send("a<b>")
    await page.until("!running && document.querySelectorAll('.stats').length === 2")
    assert await page.texts(".text") == ["Hi", "abcd", "a<b>", "abcd"]
    first = "system:So.\nuser:Hi\nassistant:"
    then = "system:So.\nuser:Hi\nassistant:abcd\nuser:a<b>\nassistant:"
    assert prompts(gateway) == [first, first, then]
    await page.value("$('clear').click()")
    await page.send("x")
    await page.until("!running && document.querySelector('.stats')")
    assert prompts(gateway)[3] == "system:So.\nuser:x\nassistant:"
    assert page.complaints == []


async def test_an_answer_can_be_stopped(page, gateway):
    gateway.decode.runs.append(partial(gateway.decode.run_to_end, most=2))
    await page.open(gateway.url)
    await page.send("Hi")
    await page.until("document.querySelectorAll('.text')[1]?.textContent === 'abc'")
    assert await page.value("$('send').textContent") == "Stop"
    await page.press("Escape")
    async with asyncio.timeout(TIMEOUT_S):
        await gateway.decode.cancelled.get()
    await page.until("/^stopped.*TTFT/.test(document.querySelector('.stats').textContent)")
    assert await page.value("JSON.stringify(messages.at(-1))") == (
        '{"role":"assistant","content":"abc"}'
    )
    assert page.complaints == []


async def test_an_error_is_shown_as_the_server_says_it(page, gateway_of, tmp_path):
    gateway = await gateway_of(tokenizer=byte_tokenizer(tmp_path), default_timeout_s=1.0)
    gateway.decode.runs.append(partial(gateway.decode.run_to_end, most=2))
    await page.open(gateway.url)
    await page.value("$('toggle').click()")
    await page.write("99", into="max_tokens")
    await page.send("Hi")
    await page.until(
        "document.querySelector('.error')?.textContent.includes('maximum context length')"
    )
    await page.value("$('max_tokens').value = ''")
    await page.value("document.querySelector('.stats button').click()")
    await page.until("document.querySelector('.error')?.textContent.includes('deadline')")
    assert await page.texts(".text") == ["Hi", "abc"]


async def answers(page, *deltas):
    """Has the page get an answer of these parts."""
    chunks = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
    body = json.dumps("".join([": waiting\n\n", *chunks, "data: [DONE]\n\n"]))
    await page.value(f"window.fetch = async () => new Response({body})")
    await page.send("Hi")
    await page.until("!running && document.querySelector('.stats')")


MARKDOWN = """\
# One *two* `three`
1. a
   ```py
   def f():
       pass
   ```
2. **b** [link](https://a.example/b) [no](javascript:alert(1)) <img src=x onerror=alert(1)>
   - c

| x | y |
|---|---|
| `1` | ~~2~~ |

> snake_case_name 2 * 3 * 4
"""


async def test_markdown_is_shown_and_nothing_in_it_is_html(page, gateway):
    await page.open(gateway.url)
    await answers(page, *({"content": MARKDOWN[at : at + 7]} for at in range(0, 500, 7)))
    shown = await page.value("document.querySelector('.assistant .text').innerHTML")
    shown = re.sub(r' (class|tabindex|type|title|target|rel)="[^"]*"', "", shown)
    assert shown == (
        "<h1>One <em>two</em> <code>three</code></h1>"
        '<ol start="1"><li><p>a</p>'
        "<div><pre>def f():\n    pass</pre><button>Copy</button></div></li>"
        '<li><p><strong>b</strong> <a href="https://a.example/b">link</a> [no](javascript:alert(1))'
        " &lt;img src=x onerror=alert(1)&gt;</p><ul><li><p>c</p></li></ul></li></ol>"
        "<table><tr><th>x</th><th>y</th></tr>"
        "<tr><td><code>1</code></td><td><del>2</del></td></tr></table>"
        "<blockquote><p>snake_case_name 2 * 3 * 4</p></blockquote>"
    )
    await page.value("window.copy = async (text) => { window.copied = text; }")
    await page.value("document.querySelector('.code button').click()")
    await page.until("document.querySelector('.code button').textContent === 'Copied'")
    assert await page.value("window.copied") == "def f():\n    pass"
    assert page.complaints == []


async def test_no_text_takes_long_to_show(page, gateway):
    """Of patterns that go back over what they have read, each of these would take minutes."""
    await page.open(gateway.url)
    worst = [
        *(part * 15_000 for part in ("`", "**a ", "_a ", ">>>>", "[a](", "- ", "|a|\n")),
        "a" + " " * 60_000 + "x", "```" + "a" * 60_000 + "`", "- " + " " * 60_000 + "\u2028x",
        "|a|\n" + "-" * 60_000 + "x|", "http://" + "." * 60_000, "**`_~~[" * 8_000,
    ]  # fmt: skip
    show = "(text) => show(document.createElement('div'), text)"
    await page.value(f"{json.dumps(worst)}.forEach({show})")  # or the call's time is over


async def test_a_chat_is_there_after_a_reload_also_in_the_midst_of_an_answer(page, gateway):
    gateway.decode.runs.append(partial(gateway.decode.run_to_end, most=2))
    await page.open(gateway.url)
    await page.send("<b>Hi</b>")
    await page.until("document.querySelectorAll('.text')[1]?.textContent === 'abc'")
    await page.call("Page.reload")
    await page.until("document.querySelector('.stats button')?.textContent === 'Regenerate'")
    await page.loaded()
    assert await page.texts(".text") == ["<b>Hi</b>", "abc"]
    await page.send("more")
    await page.until("!running && document.querySelectorAll('.text').length === 4")
    assert prompts(gateway)[-1] == "user:<b>Hi</b>\nassistant:abc\nuser:more\nassistant:"
    await page.value("$('clear').click()")
    await page.call("Page.reload")
    await page.until("document.readyState === 'complete' && !$('empty').hidden")
    assert await page.texts(".text") == []


async def test_reasoning_is_folded_and_code_is_not_markup(page, gateway):
    await page.open(gateway.url)
    pieces = ["So:\n\n```py\nx = '<i>'\n", "```\n\ndone"]
    await answers(page, {"reasoning_content": "hm"}, *({"content": piece} for piece in pieces))
    assert await page.texts(".assistant .text") == ["So:x = '<i>'Copydone"]
    assert await page.texts(".assistant pre") == ["x = '<i>'"]
    assert await page.value("document.querySelector('details').open") is False
    assert await page.texts("details") == ["Reasoninghm"]
    assert await page.value("messages.at(-1).content.startsWith('So:')")
