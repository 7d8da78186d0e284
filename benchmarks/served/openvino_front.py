"""OpenAI's /v1/completions, streamed, over OpenVINO GenAI's continuous batching. Runs in OpenVINO's environment.

No registry of Python packages has OpenVINO Model Server, so this front stands in for it: one thread steps the pipeline, and each
connection has a thread that writes what has come. It is for measurements on one machine: prompts are token ids, decoding is
greedy, and the text of a piece is that of its tokens alone.

    python -m benchmarks.served.openvino_front FORM TOKENIZER.json PORT THREADS KV_BLOCKS USERS
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MOST_BODY = 16 << 20  # bytes


class Engine:
    """The pipeline and the thread that steps it. `submit` may be called from any thread."""

    def __init__(self, form: Path, threads: int, kv_blocks: int, users: int) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = kv_blocks
        scheduler.max_num_seqs = users
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._genai = openvino_genai
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(form), scheduler, "CPU", properties)
        self._new: queue.Queue[tuple[list[int], int, queue.Queue[list[int] | None]]] = queue.Queue()
        self._running: list[tuple[Any, queue.Queue[list[int] | None]]] = []
        self._names = 0
        threading.Thread(target=self._steps, daemon=True).start()

    def submit(self, prompt: list[int], new: int) -> queue.Queue[list[int] | None]:
        """Where the tokens of the answer come, piece by piece; None ends it."""
        pieces: queue.Queue[list[int] | None] = queue.Queue()
        self._new.put((prompt, new, pieces))
        return pieces

    def _steps(self) -> None:
        while True:
            while not self._new.empty() or not self._running:
                self._add(*self._new.get())
            self._pipeline.step()
            self._running = [entry for entry in self._running if self._passed_on(*entry)]

    def _add(self, prompt: list[int], new: int, pieces: queue.Queue[list[int] | None]) -> None:
        import numpy
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        tensor = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        self._names += 1
        self._running.append((self._pipeline.add_request(self._names, tensor, config), pieces))

    def _passed_on(self, handle: Any, pieces: queue.Queue[list[int] | None]) -> bool:
        """Put what has come into the queue. Returns whether more will come."""
        while handle.can_read():
            for output in handle.read().values():
                pieces.put(list(output.generated_ids))
        if handle.get_status() == self._genai.GenerationStatus.RUNNING:
            return True
        pieces.put(None)
        return False


class Front(BaseHTTPRequestHandler):
    """`engine` and `tokenizer` are set by main."""

    protocol_version = "HTTP/1.1"
    engine: Engine
    tokenizer: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of a request."""

    def do_GET(self) -> None:
        """/health, and the list of models for all else."""
        self._json(200, {"data": [{"id": "bench"}]})

    def do_POST(self) -> None:
        """A streamed completion."""
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= MOST_BODY:
            return self._json(413, {"error": {"message": f"a body has 1 to {MOST_BODY} bytes"}})
        body = json.loads(self.rfile.read(length))
        prompt = body.get("prompt")
        if self.path != "/v1/completions" or not isinstance(prompt, list) or not body.get("stream"):
            return self._json(400, {"error": {"message": "streamed /v1/completions of token ids alone"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = 0
        pieces = self.engine.submit(prompt, int(body.get("max_tokens", 16)))
        while (piece := pieces.get()) is not None:
            tokens += len(piece)
            choice = {"index": 0, "text": self.tokenizer.decode(piece), "finish_reason": None}
            self._event({"object": "text_completion", "model": "bench", "choices": [choice]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens, "total_tokens": len(prompt) + tokens}
        self._event({"object": "text_completion", "model": "bench", "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        return None

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    from tokenizers import Tokenizer

    form, tokenizer, *numbers = sys.argv[1:]
    port, threads, kv_blocks, users = map(int, numbers)
    Front.engine = Engine(Path(form), threads, kv_blocks, users)
    Front.tokenizer = Tokenizer.from_file(tokenizer)
    ThreadingHTTPServer(("127.0.0.1", port), Front).serve_forever()


if __name__ == "__main__":
    main()
