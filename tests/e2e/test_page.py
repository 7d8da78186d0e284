"""The page before a real server: a chat whose KV is evicted, and an engine that dies while somebody watches."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.launched import Launched, launched
from tests.gateway.browser import answered, chromium, opened

ENGINE = b"backend.executor.engine_process"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pooled(browser: Any) -> Iterator[Launched]:
    """With a pool of 2560 tokens."""
    with launched("--set=kv_cache.max_tokens=2560", "--set=kv_cache.survives_engine=false") as found:
        yield found


@pytest.fixture
def page(browser: Any, pooled: Launched) -> Iterator[Any]:
    with opened(browser, pooled.url.removesuffix("v1")) as found:
        # Sampled answers now and then have a text that is tokenized otherwise, so that less of them is found in the cache.
        found.evaluate("""localStorage.setItem("everbatch.settings", '{"temperature": "0", "max_tokens": "200"}')""")
        found.reload()
        found.wait_for_selector("#model:not([disabled])")
        yield found


def foot(page: Any, text: str) -> str:
    """The line under the answer to a question."""
    answer = answered(page, text)
    assert not answer.locator(".error").count(), answer.inner_text()
    found: str = answer.locator(".foot").inner_text()
    return found


def flood(pooled: Launched) -> None:
    """Fill the pool with prompts of others."""
    with openai.OpenAI(base_url=pooled.url, api_key="none", timeout=120) as client:
        for seed in range(4):
            client.completions.create(
                model="everbatch", prompt=f"{seed} import", max_tokens=900, seed=seed, extra_body={"ignore_eos": True}
            )


def test_a_turn_says_what_was_reused_and_after_an_eviction_what_was_computed_again(page: Any, pooled: Launched) -> None:
    answered(page, "Write the function read_lines.")
    second = foot(page, "Now one that writes them.")
    assert "computed again" not in second and "cached" in page.inner_text("#conversations .kv")
    flood(pooled)
    assert "of earlier turns computed again" in foot(page, "And one that counts them.")
    assert "computed again" in page.inner_text("#conversations .kv")
    page.wait_for_selector("#count-free:text-is('0')")  # all of the pool has been used


def test_a_page_goes_on_with_the_engine_that_follows_a_dead_one(page: Any, pooled: Launched) -> None:
    page.wait_for_selector(".dot.here")
    engine = page.inner_text("#state").split()[1].rstrip(",")
    pid = pooled.pid_of(ENGINE)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    page.wait_for_selector(f"#state:not(:has-text('{engine}')):has-text(', up ')")
    assert " tokens" in foot(page, "Write the function read_lines.")
