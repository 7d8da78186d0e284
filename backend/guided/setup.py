"""Sets guided decoding up for a model: which library compiles, and what its tokens stand for."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from backend.api.config.schema import GuidedConfig
from backend.api.errors import ConfigError
from backend.api.guide import NOT_SET_UP
from backend.core.limited_messages import Limits
from backend.guided.compile_jobs import CompileProcess, CompileSetup, Materials
from backend.guided.compiler import GuideCompiler
from backend.guided.vocabulary import TokenizerInfo

DEFAULT = "llguidance"
log = logging.getLogger("everbatch.guided")


def make_guides(
    config: GuidedConfig, model_path: Path | None, vocab_size: int, eos_ids: tuple[int, ...]
) -> tuple[GuideCompiler | None, str]:
    """Returns the compiler and '', or None and why requests with guides are refused. Without xgrammar llguidance serves under
    its name, with a line in the log.

    model_path: of the tokenizer, if there is one; eos_ids: the model's, where the materials name no end ids. Raises ConfigError
    for a library that is asked for and not installed, and for materials that cannot be read.
    """
    if config.backend == "none":
        return None, f"{NOT_SET_UP}: guided.backend is none; start the engine with another, or leave the guide out"
    name = _library(config.backend)
    if importlib.util.find_spec(name) is None:
        if config.backend != "auto":
            raise ConfigError(f"guided.backend is {name}, which is not installed; pip install {name}, or use auto")
        return None, f"{NOT_SET_UP}: {name} is not installed; pip install {name}, or leave the guide out"
    if config.tokenizer_info is not None:
        source: TokenizerInfo | str = TokenizerInfo.read(config.tokenizer_info)
    elif model_path is not None:
        source = str(model_path.absolute())  # for a process with another working directory
    else:
        return None, f"{NOT_SET_UP}: the engine has no tokenizer; set guided.tokenizer_info, or leave the guide out"
    materials = Materials(name, vocab_size, eos_ids, source)
    process = CompileProcess(CompileSetup(materials, Limits(config.compile_cpu_s, config.compile_bytes)))
    return GuideCompiler(config, materials.make, process), ""


def _library(backend: str) -> str:
    """The one that compiles. Programs written for TensorRT-LLM name xgrammar, and both libraries take the same guides."""
    if backend == "auto":
        return DEFAULT
    if backend == "xgrammar" and importlib.util.find_spec(backend) is None:
        log.warning(
            "guided.backend is xgrammar, which is not installed: %s serves guides in its place; for xgrammar itself run "
            "pip install -r requirements/xgrammar.txt",
            DEFAULT,
        )
        return DEFAULT
    return backend
