"""`python -m tools.draw_page [DIRECTORY]`: the pictures of docs/page.md, of a server with the default model under conversations.

It needs playwright (requirements/test.txt) and Debian's chromium. The server is started for it, on free ports, with a KV pool
that is too small for all conversations, so that evictions are seen.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from client.client import EverbatchClient
from client.conversation import Conversation
from deploy.ports import Ports

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PICTURES: tuple[tuple[str, int, int, Literal["dark", "light"], str], ...] = (  # name, width, height, colours, panel
    ("page-dark.png", 1360, 960, "dark", "chat"),
    ("page-light.png", 1360, 960, "light", "chat"),
    ("page-phone-chat.png", 390, 780, "dark", "chat"),
    ("page-phone-batch.png", 390, 780, "light", "live"),
)
CHATS = (  # the last one is seen
    ("Explain photosynthesis in three sentences.",),
    ("What is the capital of France?", "And of Italy?", "What is Rome famous for?", "What do people eat there?"),
)
PROMPTS = (
    "Tell me a story about a lighthouse. ",
    "How does a sailing boat work? ",
    "Why do leaves turn red? ",
    "Describe a market. ",
)
SETTINGS = ("kv_cache.max_tokens=6144", "scheduler.max_batch_size=8", "model.max_seq_len=1024")


@contextmanager
def serving() -> Iterator[tuple[str, str]]:
    """A server of its own; yields the addresses of its page and of Triton's gRPC."""
    ports, port = Ports.free(), Ports.free().http
    command = [sys.executable, "-P", "-m", "deploy.cli", "serve", f"--openai-port={port}", "--exit-timeout=2"]
    command += [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"]
    command += [f"--set={setting}" for setting in SETTINGS]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if "Ctrl-C stops it" in line:
                yield f"http://127.0.0.1:{port}", f"127.0.0.1:{ports.grpc}"
                return
        raise SystemExit("the server has ended before it was ready")
    finally:
        process.terminate()
        process.wait()


def crowd(url: str, grpc: str, done: threading.Event) -> list[threading.Thread]:
    """Other clients, who ask until `done`, some of them in sessions."""

    def talk(index: int) -> None:
        with EverbatchClient(grpc) as client:
            while not done.is_set():
                conversation = Conversation(client, max_tokens=80)
                for turn in range(5):
                    for _ in conversation.say(PROMPTS[(index + turn) % len(PROMPTS)]):
                        pass
                    done.wait(2.0 + index)

    def ask(index: int) -> None:
        for turn in range(10_000):
            if done.is_set():
                return
            content = PROMPTS[(index + turn) % len(PROMPTS)] * (1 + (index + 2 * turn) % 5 * 6)
            message = {"role": "user", "content": f"{turn} {content}"}
            tokens = 150 + 70 * (index + turn) % 350
            body = {"model": "everbatch", "messages": [message], "max_tokens": tokens, "ignore_eos": True, "seed": turn}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            urllib.request.urlopen(request, timeout=120).read()

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    threads += [threading.Thread(target=talk, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    return threads


def converse(page: Any) -> None:
    """The conversations of CHATS, each turn when the one before is answered."""
    for number, questions in enumerate(CHATS):
        if number:
            page.click("#new")
        for question in questions:
            page.fill("#question", question)
            page.click("#send")
            page.wait_for_selector("#messages .assistant:last-child .again", timeout=60_000)


def draw(directory: Path) -> None:
    """Write the pictures."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium; apt-get install chromium")
    done = threading.Event()
    with serving() as (url, grpc), sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        settings = {"seed": "2"}  # and the temperature that the model's makers recommend
        browser = playwright.chromium.launch_persistent_context(
            profile, executable_path=chromium, args=["--no-sandbox"], viewport={"width": 1360, "height": 960}
        )
        page = browser.pages[0]
        page.goto(url)
        page.evaluate("values => localStorage.setItem('everbatch.settings', JSON.stringify(values))", settings)
        page.reload()
        threads = crowd(url, grpc, done)
        try:
            converse(page)
            time.sleep(40)  # so that the strip of the last minutes shows something
            for name, width, height, colours, panel in PICTURES:
                page.set_viewport_size({"width": width, "height": height})
                page.emulate_media(color_scheme=colours)
                page.evaluate("name => document.querySelector(`.tabs [data-panel=${name}]`).click()", panel)
                time.sleep(1.5)
                page.screenshot(path=directory / name)
        finally:
            done.set()
            for thread in threads:
                thread.join()
            browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
