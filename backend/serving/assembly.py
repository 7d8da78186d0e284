"""How each Triton model is put together; the adapters in model_repository/*/1/model.py call these from initialize().

`tensorrt_llm` owns the engine process. The text models are clients of the same engine and bring their own tokenizer,
so that no response crosses Triton twice. They are Python models on purpose: a Triton ensemble swallows cancellation.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from backend.api import EngineUnavailable
from backend.executor import Executor
from backend.serving import pb
from backend.serving.environment import Health, RunDirectory, check_numpy, drain_grace_s, engine_config
from backend.serving.model_server import EngineClient, ModelServer, is_decoupled
from backend.serving.reading import Batch
from backend.serving.requests import Parameters, ServingContext, Work
from backend.serving.tensors import MODELS, TOKEN_MODEL
from backend.serving.text_requests import TextTools, check_text_requests, parse_text_requests
from backend.serving.token_requests import parse_token_requests

log = logging.getLogger("everbatch.serving")


def load_token_model(args: dict[str, str]) -> ModelServer:
    """Start the engine and serve token ids. Raises ConfigError or EngineUnavailable; then nothing of it is left
    running.
    """
    _prepare_process(args)
    config = engine_config()
    run_directory = RunDirectory.of_this_server()
    run_directory.claim()
    try:
        executor = Executor.launch(config, run_directory.socket_path)
    except BaseException:
        run_directory.disclaim()
        raise
    return ModelServer(
        TOKEN_MODEL,
        parse_token_requests,
        executor,
        config,
        decoupled=is_decoupled(args["model_config"]),
        owner=True,
        labels=_labels(args),
        drain_grace_s=drain_grace_s(),
        report_health=_report_to(run_directory, args),
    )


def load_text_model(args: dict[str, str]) -> ModelServer:
    """Serve text with the engine that `tensorrt_llm` owns. While there is none, requests are refused with UNAVAILABLE."""
    _prepare_process(args)
    config = engine_config()
    run_directory = RunDirectory.of_this_server()
    executor = Executor.attach(run_directory.socket_path, wait_s=0)
    front = TextFront(executor)
    if not run_directory.wait_for_engine(executor.is_ready, config.triton.attach_timeout_s):
        log.warning(
            "model %s is loaded without an engine; it serves as soon as tensorrt_llm has started one",
            args["model_name"],
        )
    return ModelServer(
        MODELS[args["model_name"]],
        front.parse,
        executor,
        config,
        decoupled=is_decoupled(args["model_config"]),
        labels=_labels(args),
        drain_grace_s=drain_grace_s(),
        check_text=front.check,
        prepare=front.prepare,
        report_health=_report_to(run_directory, args),
    )


class TextFront:
    """Parsing for the text models: needs the tokenizer, whose directory is known once the engine was reached."""

    def __init__(self, executor: EngineClient):
        self._executor = executor
        self._tools: TextTools | None = None
        self._lock = threading.Lock()

    def prepare(self) -> bool:
        """Load the tokenizer once it can be; returns whether it is there. Raises ConfigError when the model directory
        has none.
        """
        hello = self._executor.hello
        with self._lock:
            if self._tools is None and hello is not None:
                self._tools = TextTools.from_directory(hello.model_path)
            return self._tools is not None

    def check(self, batch: Batch, context: ServingContext) -> None:
        """What can be told at once; see check_text_requests. Raises EngineUnavailable before there is a tokenizer."""
        self._loaded_tools()
        check_text_requests(batch, context)

    def parse(self, batch: Batch, context: ServingContext, parameters: Parameters) -> list[Work]:
        """On a text thread."""
        return parse_text_requests(batch, context, parameters, self._loaded_tools())

    def _loaded_tools(self) -> TextTools:
        if self._tools is None:
            raise EngineUnavailable("the tokenizer is not loaded yet; try again in a few seconds")
        return self._tools


def _prepare_process(args: dict[str, str]) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s {args['model_name']} %(levelname)s %(name)s: %(message)s",
    )
    check_numpy(pb.numpy_round_trip_works)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the text threads are the parallelism


def _report_to(run_directory: RunDirectory, args: dict[str, str]) -> Callable[[Health], None]:
    return lambda state: run_directory.report_health(args["model_name"], state)


def _labels(args: dict[str, str]) -> dict[str, str]:
    return {"model": args["model_name"], "version": args["model_version"]}
