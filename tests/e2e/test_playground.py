"""The playground in a real browser: sending, stopping, numbers, errors, and models that write hostile text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page, expect

from backends.mock import MockBackend
from cluster.client import EngineOverloadedError
from cluster.ingress.app import build_api
from engine.backend import BackendInfo
from engine.config import EngineConfig
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.text.tokenizer import Tokenizer
from tests.cluster.ingress.local_client import LocalEngineClient, demo_tokenizer, serve_api
from tests.e2e.browser import ask, chromium, chromium_path

expect.set_options(timeout=30_000)  # a busy machine is slow, not wrong

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="chromium is not installed (apt-get install chromium)")

MARKDOWN = """Sorting is **easy**:

```python
sorted([3, 1, 2])  # <b>not bold</b>
```

| a | b |
|---|---|
| 1 | 2 |

- one
- [docs](https://example.org/docs)
"""
HOSTILE = """<img src="http://127.0.0.1:8299/pixel.png" onerror="document.title='owned'">
<script>document.title = 'owned'</script>
<b>bold?</b> <iframe src="http://127.0.0.1:8299/frame"></iframe>

[click](javascript:document.title='owned') [data](data:text/html,<script>1</script>)
![tracker](http://127.0.0.1:8299/track.png)
<svg onload="document.title='owned'"></svg><style>body{display:none}</style>
"""


class ScriptedClient(LocalEngineClient):
    """Answers with a given text, token by token."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, MockBackend(config))
        self._tokenizer = tokenizer
        self.text: str | None = None  # None: what the mock backend says
        self.refuse = False
        self.requests: list[EngineRequest] = []

    async def info(self) -> BackendInfo:
        return replace(await super().info(), max_model_len=2048)

    async def generate(self, request: EngineRequest, **_: object) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        if self.refuse:
            raise EngineOverloadedError("too many requests are waiting; try again later", retry_after_s=3)
        if self.text is None:
            async for output in super().generate(request):
                yield output
            return
        ids = self._tokenizer.encode(self.text, add_special_tokens=False)
        for i, token_id in enumerate(ids):
            await asyncio.sleep(0.002)
            finish = FinishReason.LENGTH if i == len(ids) - 1 else None
            yield RequestOutput(
                request_id=request.request_id, token_ids=(token_id,), finish_reason=finish, num_cached_tokens=32
            )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, ScriptedClient]]:
    config = EngineConfig.from_args({"backend": "mock", "mock_step_ms": 5})
    tokenizer = demo_tokenizer()
    client = ScriptedClient(config, tokenizer)
    client.start()
    try:
        with serve_api(build_api(config, client, tokenizer)) as url:
            yield url, client
    finally:
        client.core.stop()


@pytest.fixture
def engine(running: tuple[str, ScriptedClient]) -> ScriptedClient:
    client = running[1]
    client.text, client.refuse = None, False
    client.requests.clear()
    return client


@pytest.fixture
def page(running: tuple[str, ScriptedClient], browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1180, "height": 760})
    opened = context.new_page()
    opened.problems = []  # type: ignore[attr-defined]
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))  # type: ignore[attr-defined]
    opened.goto(running[0])
    yield opened
    assert opened.problems == []  # type: ignore[attr-defined]
    context.close()


def test_sends_streams_and_shows_the_numbers(page: Page, engine: ScriptedClient) -> None:
    engine.text = MARKDOWN
    expect(page.locator("#model")).to_have_text("SmolLM2-135M-Instruct")
    ask(page, "How do I sort?")
    body = page.locator(".message.assistant .body")
    expect(body.locator("strong")).to_have_text("easy")
    expect(body.locator("pre code")).to_contain_text("# <b>not bold</b>")
    expect(body.locator("td").first).to_have_text("1")
    expect(body.locator("a")).to_have_attribute("href", "https://example.org/docs")
    expect(body.locator("a")).to_have_attribute("rel", "noopener noreferrer nofollow")
    stats = page.locator(".message.assistant .stats").inner_text()
    for part in ("tokens/s", "TTFT", "32 of", "prompt tokens cached"):
        assert part in stats
    expect(page.locator(".message.user .body")).to_have_text("How do I sort?")


def test_the_conversation_and_the_settings_reach_the_engine(page: Page, engine: ScriptedClient) -> None:
    engine.text = "Fine."
    page.fill("#system", "You are terse.")
    settings = {"temperature": "0.3", "top_p": "0.5", "top_k": "9", "min_p": "0.1", "max_tokens": "77", "seed": "5"}
    penalties = {"presence_penalty": "0.5", "frequency_penalty": "-0.5", "repetition_penalty": "1.2"}
    for name, value in (settings | penalties).items():
        page.fill(f"#{name}", value)
    ask(page, "First")
    ask(page, "Second")
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.5, 9, 0.1)
    assert (sampling.max_tokens, sampling.seed) == (77, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    prompt = engine._tokenizer.decode(list(engine.requests[-1].prompt_token_ids), skip_special_tokens=False)
    for text in ("You are terse.", "First", "Fine.", "Second"):
        assert text in prompt


def test_a_stop_string_is_sent(page: Page, engine: ScriptedClient) -> None:
    engine.text = "one two three four"
    page.fill("#stop_strings", "three")
    ask(page, "Count")
    expect(page.locator(".message.assistant .body")).to_have_text("one two")


def test_stop_ends_the_answer_and_the_request(page: Page, engine: ScriptedClient) -> None:
    aborted = len(engine.aborted)
    page.fill("#prompt", "Go on and on")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".message.assistant .body")).not_to_be_empty()
    expect(page.locator("#send")).to_be_disabled()
    page.click("#stop")
    expect(page.locator(".message.assistant .stats")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_enabled()
    page.wait_for_timeout(200)
    assert len(engine.aborted) == aborted + 1
    engine.text = "Still here."
    ask(page, "And now?")
    expect(page.locator(".message.assistant .body").last).to_have_text("Still here.")


def test_text_from_the_model_is_never_markup_nor_loads_anything(page: Page, engine: ScriptedClient) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    engine.text = HOSTILE
    ask(page, "Attack")
    page.wait_for_timeout(300)
    body = page.locator(".message.assistant .body")
    assert page.title() == "SliceServe playground"
    for tag in ("img", "script", "iframe", "svg", "style", "b"):
        assert body.locator(tag).count() == 0
    expect(body).to_contain_text("<script>document.title = 'owned'</script>")
    assert [link.get_attribute("href") for link in body.locator("a").all()] == [
        None,
        None,
        "http://127.0.0.1:8299/track.png",
    ]
    assert all(":8299" not in url for url in fetched)
    expect(page.locator("#composer")).to_be_visible()


def test_a_users_markup_is_text(page: Page, engine: ScriptedClient) -> None:
    engine.text = "ok"
    ask(page, "<img src=x onerror=alert(1)>")
    expect(page.locator(".message.user .body")).to_have_text("<img src=x onerror=alert(1)>")
    assert page.locator(".message.user img").count() == 0


def test_errors_are_sentences_and_point_at_the_field(page: Page, engine: ScriptedClient) -> None:
    page.fill("#temperature", "9")
    page.fill("#prompt", "Hi")
    page.click("#send")
    expect(page.locator(".error")).to_contain_text("temperature: must be less than or equal to 2")
    expect(page.locator("#temperature")).to_have_attribute("aria-invalid", "true")
    page.fill("#temperature", "1")
    engine.refuse = True
    page.fill("#prompt", "Hi again")
    page.click("#send")
    expect(page.locator(".error").last).to_contain_text(
        "too many requests are waiting; try again later. Try again in 3 s."
    )
    expect(page.locator("#temperature")).not_to_have_attribute("aria-invalid", "true")
    engine.refuse, engine.text = False, "Better."
    ask(page, "Once more")
    expect(page.locator(".message.assistant .body").last).to_have_text("Better.")


def test_a_server_that_is_gone_is_said(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#prompt", "Hi")
    page.click("#send")
    expect(page.locator(".error")).to_have_text("The server can't be reached. Is it still running?")


def test_new_chat_forgets(page: Page, engine: ScriptedClient) -> None:
    engine.text = "Fine."
    ask(page, "Remember 42")
    page.click("#new-chat")
    assert page.locator(".message").count() == 0
    expect(page.locator("#empty")).to_be_visible()
    ask(page, "What?")
    assert "42" not in engine._tokenizer.decode(list(engine.requests[-1].prompt_token_ids))


def test_every_field_has_a_label_and_narrow_screens_work(page: Page, engine: ScriptedClient) -> None:
    unlabelled = page.evaluate(
        "[...document.querySelectorAll('input, textarea')].filter((e) => e.labels.length === 0).map((e) => e.id)"
    )
    assert unlabelled == []
    page.set_viewport_size({"width": 360, "height": 640})
    engine.text = "A" * 300
    ask(page, "Wide?")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_page_may_load_from_its_own_server_only(page: Page, running: tuple[str, ScriptedClient]) -> None:
    response = page.request.get(running[0])
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.request.get(f"{running[0]}/static/app.js").headers["content-type"].startswith("text/javascript")
