"""Runner of ik_llama.cpp through the C interface that ik-llama-cpp-python binds.

Weights are repacked as they are loaded (`-rtr`), so that rows of several types lie interleaved; flash attention and the fused
operators are on by default.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.protocol import serve
from benchmarks.peers.run_llamacpp import LlamaCpp


class IkLlamaCpp(LlamaCpp):
    def _bind(self) -> Any:
        from ik_llama_cpp import _ctypes_api

        return _ctypes_api

    def _model_parameters(self) -> Any:
        parameters = super()._model_parameters()
        parameters.repack_tensors = True
        return parameters

    def _clear(self) -> None:
        self._api.llama_kv_cache_clear(self._context)


if __name__ == "__main__":
    serve(IkLlamaCpp, ["ik-llama-cpp-python"])
