"""HostedModel: a model that transformers runs, with the interface of backend.models.decoder.Decoder where the engine needs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from backend.api.errors import ConfigError
from backend.architectures.description import LayerConfig, ModelConfig
from backend.hosted.adapters import AdapterHost
from backend.hosted.attention import NAME, Attention, AttentionHost, LayerAttention
from backend.hosted.embeddings import EmbeddingHost, GivenRows
from backend.hosted.layers import EngineLinear
from backend.hosted.masks import masks_are_windows
from backend.hosted.native_modules import NativeModules
from backend.hosted.products import Products
from backend.layers.lora import AdaptedTokens
from backend.models.decoder import MarkedOutput


class HostedModel:
    is_encoder = False

    def __init__(
        self,
        config: ModelConfig,
        module: Any,
        host: AttentionHost,
        products: Products,
        max_seq_len: int,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.max_seq_len, self.dtype = config, max_seq_len, dtype
        self._module, self.host, self._products = module, host, products
        self.natives: NativeModules | None = None
        self._hidden: Tensor | None = None  # hidden states of all tokens, as the base model returns them
        self._rows: Tensor | None = None  # input of the head, for families that call a part of the base model directly
        self._picks_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self.takes_adapters = False
        self.adapters, self.embeddings = AdapterHost(module, config.architecture), EmbeddingHost(module)
        self.outputs = {
            "hidden_states": MarkedOutput(config.hidden_size, lambda hidden, logits: hidden),
            "logits": MarkedOutput(config.vocab_size, lambda hidden, logits: logits),
        }
        module.base_model.register_forward_hook(self._keep_hidden)
        if (head := module.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(self._keep_rows)

    @property
    def num_linear_bytes(self) -> int:
        """Bytes of the engine's linear layers, experts not included."""
        layers = {id(each.linear): each.linear for each in self._module.modules() if isinstance(each, EngineLinear)}
        return sum(layer.num_bytes for layer in layers.values())

    @property
    def memory(self) -> str:
        """A description of the memory that the weights take."""
        return f"linear layers {self.num_linear_bytes / 1e6:,.1f} MB, run by transformers"

    def learn(self) -> None:
        """Run two tokens twice: to find the arguments of each layer's attention, then the modules that call torch's matrix
        products themselves.

        Raises ConfigError for what cannot be run independently of the batch.
        """
        try:
            with masks_are_windows(NAME, both_sides=self.is_encoder):
                self._run_two_tokens()
            self.host.step = _values
            with self.adapters.learning(num_tokens=2):
                self._run_multiplying()
        except ConfigError:
            raise
        except Exception as error:  # module code of any family
            raise ConfigError(
                f"{self.config.architecture} cannot be run on a flat batch: {sentence_of(error)}"
            ) from None
        self.config = self._described()

    def use_native_modules(self, natives: NativeModules, attention: Attention, tokens: int) -> None:
        """Replace what can be replaced, as a trial with `tokens` shows, in place of what was replaced for another tier."""
        if self.natives is not None:
            self.natives.remove()
        self.natives = natives
        device = self._module.device
        ids = torch.arange(tokens, device=device) * 7919 % self.config.vocab_size
        # Positions up to the last one: some families compute with them in other ways from some position on.
        positions = torch.linspace(0, self.max_seq_len - 1, tokens, device=device).long()
        last = torch.tensor([tokens - 1], device=device)
        natives.install(self._module, lambda: self.run(ids, positions, last, attention))

    def _run_two_tokens(self) -> None:
        device = self._module.device
        places = torch.arange(2, device=device)
        self._run(torch.zeros(2, dtype=torch.int64, device=device), places, places)

    def _run_multiplying(self) -> None:
        """Let modules that compute products of their own compute them by `Products` from now on."""
        stack: list[nn.Module] = []
        multiplying: dict[int, nn.Module] = {}

        def note() -> None:
            if self._products.seen and stack:
                multiplying[id(stack[-1])] = stack[-1]
            self._products.seen = False

        def enter(module: nn.Module, args: Any) -> None:
            note()
            stack.append(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            note()
            stack.pop()

        hooks = [each.register_forward_pre_hook(enter) for each in self._module.modules()]
        hooks += [each.register_forward_hook(leave) for each in self._module.modules()]
        try:
            with self._products:
                self._run_two_tokens()
        finally:
            for hook in hooks:
                hook.remove()
        for module in multiplying.values():
            module.forward = _inside(self._products, module.forward)

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        attention: Attention,
        given: GivenRows | None = None,
        adapted: AdaptedTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """token_ids, positions int64 [tokens]; rows int64: the tokens whose logits are wanted. given: tokens whose embeddings are
        given, and whose ids are not looked at. adapted: the tokens' LoRA adapters, if any has one.

        Returns (logits [rows, vocab], hidden states after the last norm [rows, hidden]).
        """
        self.host.step, self.embeddings.step, self.adapters.step = attention, given, adapted
        try:
            logits = self._run(self.embeddings.known_ids(token_ids), positions, rows)
            if self._hidden is not None:
                return logits, self._hidden[0, rows]
            assert self._rows is not None  # the head has run
            return logits, self._rows[0] if self._picks_rows else self._rows[0, rows]
        finally:
            self._hidden = self._rows = self.embeddings.step = self.adapters.step = None

    def _run(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        picked = {"logits_to_keep": rows} if self._picks_rows else {}
        out = self._module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **picked)
        logits: Tensor = out.logits[0]
        return logits if self._picks_rows else logits[rows]

    def _keep_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state

    def _keep_rows(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._rows = args[0]

    def _described(self) -> ModelConfig:
        """The configuration with what the first pass has shown. Raises ConfigError for heads that do not fit into one pool."""
        layers = self.host.layers
        if not layers:
            raise ConfigError(
                f"{self.config.architecture} does not attend through transformers' interface; use another model"
            )
        kv_heads, heads = self.host.kv_heads, max(layer.heads for layer in layers)
        if any(kv_heads % layer.kv_heads or layer.heads % kv_heads for layer in layers):
            raise ConfigError(
                f"{self.config.architecture} has layers whose numbers of heads do not divide each other's"
            )
        return msgspec.structs.replace(
            self.config,
            num_layers=len(layers),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.host.dim,
            layers=tuple(LayerConfig(layer.window) for layer in layers),
        )


def sentence_of(error: Exception) -> str:
    """The first line of an error of the library, without characters that cannot be printed."""
    lines = str(error).strip().splitlines() or [""]
    printed = "".join(letter if letter.isprintable() else "?" for letter in lines[0][:300])
    return f"{type(error).__name__}: {printed}"


def _inside(products: Products, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **given: Any) -> Any:
        with products:
            return forward(*args, **given)

    return run


def _values(index: int, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """An Attention for a pass of which only the modules matter."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
