"""How each Triton model is put together; the files model_repository/*/1/model.py call `load_model` in initialize().

The first model of the role `tensorrt_llm` owns the engine process. All others are clients of the same engine and bring their
own tokenizer, so that no response crosses Triton twice. They are Python models on purpose: a Triton ensemble swallows
cancellation.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.api import ConfigError, EngineConfig, EngineUnavailable
from backend.api.config.multi_model import ENGINE, LABEL, OWNS
from backend.api.config.telemetry import check_traces
from backend.api.processes.setup import calm_garbage_collector, set_up_logging
from backend.executor import Executor
from backend.images.reader import ImageReader
from backend.serving import pb
from backend.serving.intake.batch import Batch
from backend.serving.intake.rendering import RenderProcess
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.lifecycle.environment import (
    Health,
    RunDirectory,
    check_numpy,
    drain_grace_s,
    engine_config,
    local_path,
)
from backend.serving.protocols import EngineClient
from backend.serving.served_model import ServedModel
from backend.serving.server import ModelServer
from backend.serving.upstream_parameters import (
    OWN_TOKENIZER,
    apply_parameters,
    set_parameters,
)
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.named_adapters import check_adapters, read_adapters
from backend.serving.wires.roles import FRONTS, OWNER
from backend.serving.wires.vllm import VLLM
from backend.serving.work import Work
from backend.text.template import Templates

log = logging.getLogger("everbatch.serving")


def load_model(args: dict[str, str]) -> ModelServer:
    """Serve a Triton model by its role; `args` are those of initialize(). Raises ConfigError or EngineUnavailable; then
    nothing of it is left running.
    """
    _prepare_process(args)
    model_config = json.loads(args["model_config"])
    role = role_of(args["model_name"], model_config)
    parameters = set_parameters(model_config)
    run_directory = run_directory_of(model_config)
    config = _with_parameters(role, model_config, engine_config(run_directory))
    check_traces(config.telemetry)
    may_own = role == OWNER and parameters.get(OWNS, "true") == "true"
    owner = may_own and run_directory.claim(args["model_name"])  # another model of that role is a client too
    executor = (_launch if owner else _attach)(args["model_name"], config, run_directory)
    # The owner's config.pbtxt may have changed the configuration; the engine reports the one in force.
    configure = lru_cache(maxsize=2)(lambda engines: apply_parameters(role, model_config, engines).config)
    if executor.hello is not None:
        config = configure(executor.hello.config)
    front = FRONTS[role]
    own_tokenizer = parameters.get("tokenizer_dir", "") if role in OWN_TOKENIZER else ""
    is_for_chats = isinstance(front, TextFront) and front.is_for_chats
    tools = ToolsLoader(executor, own_tokenizer, config.model.chat_template, is_for_chats=is_for_chats)
    try:
        arguments = text_arguments(front, tools) if isinstance(front, TextFront) else {"parse": front.parse}
        named = read_adapters(Path(args["model_repository"], args["model_version"])) if front is VLLM else {}
        check_adapters(named, config.lora)
    except ConfigError:
        executor.shutdown()
        raise
    model = ServedModel(
        front.tensors,
        decoupled=is_decoupled(model_config),
        owner=owner,
        labels=labels_of(args, parameters),
        drain_grace_s=drain_grace_s(),
        dialect=front.dialect,
        reports_vllm=is_true(model_config, "REPORT_CUSTOM_METRICS"),
        parameters=parameters,
        configure=configure,
        report_health=_report_to(run_directory, args["model_name"]),
        adapters=named,
        is_one_of_several=ENGINE in parameters,
        reading_file=run_directory.reading_file(args["model_name"]),
        away_file=None if owner else run_directory.away_file,
        **arguments,
    )
    server = ModelServer(model, executor, config)
    calm_garbage_collector()
    return server


def run_directory_of(model_config: dict[str, Any]) -> RunDirectory:
    """The directory of the engine that a model is a client of. Raises ConfigError."""
    return RunDirectory.of_this_server(set_parameters(model_config).get(ENGINE, ""))


def labels_of(args: dict[str, str], parameters: dict[str, str]) -> dict[str, str]:
    """The labels of a model's metrics. The owner of one engine of several has the name that an operator knows the model by, and
    the number of the engine as its version: a replacement runs beside the engine before it.
    """
    if LABEL in parameters:
        return {"model": parameters[LABEL], "version": parameters[ENGINE].removeprefix("e")}
    return {"model": args["model_name"], "version": args["model_version"]}


def _with_parameters(role: str, model_config: dict[str, Any], config: EngineConfig) -> EngineConfig:
    """The configuration with what the model's config.pbtxt sets, which is logged. Raises ConfigError."""
    settings = apply_parameters(role, model_config, config)
    for sentence in settings.sentences:
        log.info("%s", sentence)
    return settings.config


def _launch(model_name: str, config: EngineConfig, run_directory: RunDirectory) -> Executor:
    """Start the engine process, which this model has claimed."""
    try:
        return Executor.launch(config, run_directory.socket_path)
    except BaseException:  # Whatever ends the start, another model must be able to claim the engine.
        run_directory.disclaim()
        raise


def _attach(model_name: str, config: EngineConfig, run_directory: RunDirectory) -> Executor:
    """Become a client of the engine that another model owns. While there is none, requests are refused with UNAVAILABLE."""
    executor = Executor.attach(run_directory.socket_path, wait_s=0)
    if not run_directory.wait_for_engine(executor.is_ready, config.triton.attach_timeout_s):
        log.warning("model %s is loaded without an engine; it serves as soon as %s has started one", model_name, OWNER)
    return executor


class ToolsLoader:
    """The tokenizer and chat template of the text models, from `directory`; without one from that of the model, which is
    known once the engine was reached. `chat_template`: a file in place of the template there. `is_for_chats`: what renders
    chats is started as soon as it can be.
    """

    def __init__(
        self, executor: EngineClient, directory: str = "", chat_template: str = "", *, is_for_chats: bool = False
    ) -> None:
        self._executor = executor
        self._directory = directory
        self._chat_template = chat_template
        self._is_for_chats = is_for_chats
        self._renderer: RenderProcess | None = None
        self._images: ImageReader | None = None
        self._tools: TextTools | None = None
        self._lock = threading.Lock()

    def prepare(self) -> bool:
        """Load them once they can be; returns whether they are there. Raises ConfigError when the model directory has none."""
        hello = self._executor.hello
        directory = local_path(self._directory or (hello.model_path if hello else ""))
        with self._lock:
            if self._tools is None and directory:
                self._tools = TextTools.from_directory(directory, self._chat_template, self._make_renderer)
                if self._is_for_chats and self._renderer is not None and self._tools.template.exists:
                    self._renderer.start()
            return self._tools is not None

    def close(self) -> None:
        """End the processes that render chats and read images."""
        if self._images is not None:
            self._images.close()
        if self._renderer is not None:
            self._renderer.close()

    def _make_renderer(self, templates: Templates) -> RenderProcess:
        self._renderer = RenderProcess(templates)
        return self._renderer

    def loaded(self) -> TextTools:
        """Raises EngineUnavailable before they are there."""
        if self._tools is None:
            raise EngineUnavailable("the tokenizer is not loaded yet; try again in a few seconds")
        if self._images is None:
            self._add_images()
        return self._tools

    def _add_images(self) -> None:
        """Let images be read, once the engine has said that the model takes some."""
        hello = self._executor.hello
        if hello is None or hello.model.image_token_id < 0:
            return
        directory = local_path(self._directory or hello.model_path)
        with self._lock:
            if self._images is None and self._tools is not None:
                self._images = ImageReader(directory, hello.config.images)
                self._tools = self._tools._replace(images=self._images)
                if self._is_for_chats:  # elsewhere the first image starts the process
                    self._images.start()


def text_arguments(front: TextFront, tools: ToolsLoader) -> dict[str, Any]:
    """The part of a text model's ServedModel that reads its requests. Raises ConfigError when the tokenizer cannot be read."""
    tools.prepare()

    def check(batch: Batch, context: ServingContext) -> None:
        tools.loaded()
        front.check(batch, context)

    def parse(batch: Batch, context: ServingContext, parameters: Parameters) -> list[Work]:
        return front.parse(batch, context, parameters, tools.loaded())

    return {
        "parse": parse,
        "check_text": check,
        "at_once": front.at_once,
        "prepare": tools.prepare,
        "close": tools.close,
    }


def role_of(model_name: str, model_config: dict[str, Any]) -> str:
    """The parameter `role`, else the backend where that is not `python`, else the name. Raises ConfigError for a model that no
    front serves.
    """
    backend = model_config.get("backend", "python")
    role = model_config.get("parameters", {}).get("role", {}).get("string_value") or (
        model_name if backend == "python" else backend
    )
    if role not in FRONTS:
        raise ConfigError(
            f"model {model_name}: the role {role!r} is not known, known are {', '.join(FRONTS)}; "
            'set it in config.pbtxt: parameters { key: "role" value: { string_value: "ensemble" } }'
        )
    return role


def is_true(model_config: dict[str, Any], parameter: str) -> bool:
    """True if a parameter of config.pbtxt is true or 1, in upper or lower case; False if it is anything else or absent."""
    value = model_config.get("parameters", {}).get(parameter, {}).get("string_value", "")
    return str(value).strip().lower() in ("true", "1")


def is_decoupled(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _prepare_process(args: dict[str, str]) -> None:
    set_up_logging(args["model_name"])
    check_numpy(pb.numpy_round_trip_works)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The text threads already tokenise in parallel.


def _report_to(run_directory: RunDirectory, model_name: str) -> Callable[[Health, int, str], None]:
    return lambda state, num_live, why: run_directory.report_health(model_name, state, num_live, why)
