"""Which front serves which Triton model: the parameter `role` of its config.pbtxt, or else its name."""

from __future__ import annotations

from backend.serving.wires.embedding import EMBEDDING
from backend.serving.wires.everbatch import EVERBATCH
from backend.serving.wires.front import Front, TextFront
from backend.serving.wires.llmapi import LLMAPI
from backend.serving.wires.lmdeploy import LMDEPLOY
from backend.serving.wires.processing import POSTPROCESSING, PREPROCESSING
from backend.serving.wires.trtllm_text import BLS, ENSEMBLE, ENSEMBLE_UINT32
from backend.serving.wires.trtllm_tokens import TENSORRT_LLM
from backend.serving.wires.turbomind import TURBOMIND
from backend.serving.wires.turbomind_text import TURBOMIND_POSTPROCESSING, TURBOMIND_PREPROCESSING
from backend.serving.wires.vllm import VLLM

FRONTS: dict[str, Front | TextFront] = {
    front.tensors.model: front
    for front in (
        *(TENSORRT_LLM, PREPROCESSING, POSTPROCESSING, ENSEMBLE, BLS, ENSEMBLE_UINT32, LLMAPI),
        *(TURBOMIND, TURBOMIND_PREPROCESSING, TURBOMIND_POSTPROCESSING, LMDEPLOY),
        *(VLLM, EVERBATCH, EMBEDDING),
    )
}
_TRTLLM = ("tensorrt_llm", "preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls", "everbatch", "embedding")
# Profile -> Triton model -> role. A server serves one or several; the model that owns the engine is added where it is missing.
PROFILES: dict[str, dict[str, str]] = {
    "trtllm": {name: name for name in _TRTLLM},
    "llmapi": {"tensorrt_llm": "llmapi", "everbatch_engine": "tensorrt_llm"},
    "langchain": {"tensorrt_llm": "tensorrt_llm", "ensemble": "ensemble_uint32"},
    "vllm": {"vllm_model": "vllm"},
    "turbomind": {
        "turbomind": "turbomind",
        "preprocessing": "turbomind_preprocessing",
        "postprocessing": "turbomind_postprocessing",
    },
    "lmdeploy": {"lmdeploy_model": "lmdeploy"},
}
MODELS = {role: front.tensors for role, front in FRONTS.items()}
OWNER = TENSORRT_LLM.tensors.model  # the model that starts the engine process; all others attach to it
