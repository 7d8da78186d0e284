"""Make Triton's own readiness tell the truth.

Triton 24.10 asks no model whether it is well, so /v2/health/ready (and ServerReady over gRPC) stays true while a stub or
the engine is gone. What it does look at is the state of every model's last load. So while the launcher knows better, it
lets the load of a model fail that exists for this purpose only: its configuration names a backend that there is not.
From then on the server is not ready. To be ready again the same name is loaded as an ensemble of one step, which needs no
process, and unloaded: a model that was unloaded on purpose does not count. Neither shows up in the repository's index.

Needs --model-control-mode=explicit; the model-repository API asks for the admin key. /v2/models/M/ready and
/v2/health/live stay as Triton answers them.
"""

from __future__ import annotations

import json
from typing import Any

from deploy import probe
from deploy.invocation import ADMIN_HEADER

SENTINEL = "everbatch_not_ready"
EXPLANATION = f"the errors about a model {SENTINEL} are intended: by them /v2/health/ready says that it is not ready"
TIMEOUT_S = 2.0
_FILE = {"file:1/sentinel": ""}  # Without a version directory with a file in it Triton looks for the model on the disk.
_TENSOR = {"name": "unused", "data_type": "TYPE_INT32", "dims": [1]}


class Readiness:
    """Switches the readiness that one server tells. Not thread-safe."""

    def __init__(self, url: str, admin_key: str, model: str | None) -> None:
        """`model`: any model of the server, for the ensemble; None = a server without one is left as it is."""
        self._url = url
        self._headers = {ADMIN_HEADER: admin_key}
        self._model = model
        self.told_ready = True

    def tell(self, ready: bool) -> None:
        """Have the server report itself ready, or not ready, from now on. Raises ProbeFailed if it refuses; call again then."""
        if self._model is None or ready == self.told_ready:
            return
        if ready:
            self.forget(SENTINEL)
        else:
            broken = {"backend": SENTINEL, "input": [_TENSOR], "output": [_TENSOR]}
            self._post(
                "load", {"config": json.dumps(broken), **_FILE}, (400,)
            )  # 400: the load failed, which ends readiness
        self.told_ready = ready

    def forget(self, name: str) -> None:
        """Have a model whose load has failed count no longer. Raises ProbeFailed if the server refuses."""
        assert self._model is not None, "another model serves"
        self._post("load", {"config": json.dumps(self._ensemble(self._model)), **_FILE}, (200,), name)
        self._post("unload", {}, (200,), name)

    def _post(self, action: str, parameters: dict[str, str], expected: tuple[int, ...], name: str = SENTINEL) -> None:
        path = f"/v2/repository/models/{name}/{action}"
        status, text = probe.request(self._url, "POST", path, {"parameters": parameters}, TIMEOUT_S, self._headers)
        if status not in expected:
            raise probe.ProbeFailed(f"the server answered {status} to {action} of {name}: {text[:200]}")

    def _ensemble(self, model: str) -> dict[str, Any]:
        """A model of one step: `model` itself, with those of its inputs that must be there, and its first output."""
        status, text = probe.request(self._url, "GET", f"/v2/models/{model}/config", timeout_s=TIMEOUT_S)
        if status != 200:
            raise probe.ProbeFailed(f"the server answered {status} to the configuration of model {model}")
        config = json.loads(text)
        inputs = [tensor for tensor in config["input"] if not tensor.get("optional")] or config["input"][:1]
        output = config["output"][0]
        return {
            "platform": "ensemble",
            "max_batch_size": config["max_batch_size"],
            "model_transaction_policy": config.get("model_transaction_policy", {}),
            "input": [_signature(tensor) for tensor in inputs],
            "output": [_signature(output)],
            "ensemble_scheduling": {"step": [_step(model, [tensor["name"] for tensor in inputs], output["name"])]},
        }


def _signature(tensor: dict[str, Any]) -> dict[str, Any]:
    return {key: tensor[key] for key in ("name", "data_type", "dims")}


def _step(model: str, inputs: list[str], output: str) -> dict[str, Any]:
    return {
        "model_name": model,
        "model_version": -1,
        "input_map": {name: name for name in inputs},
        "output_map": {output: output},
    }
