"""LoadedModel: a checkpoint in memory, in the form that its tier runs, and the factory of the tier's parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from backend.api.config.quantization import is_chosen
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.architectures.shards import most_layers
from backend.layers.device_linear import make_triton_linear
from backend.models import loader
from backend.models.decoder import Decoder
from backend.models.key_shift import shift_keys
from backend.models.linears import WHOLE_ROW, LinearOptions
from backend.models.lora import Layers, ProjectionPlace, Projections, projections_of
from backend.quant.chosen_forms import ChosenForms
from backend.quant.importance import Importance
from backend.worker.adapter_pages import (
    AdapterPages,
    PagedLayers,
    PagePool,
    hold_layers,
    module_bytes,
    page_bytes,
    part_bytes,
)
from backend.worker.adapters import make_stacks
from backend.worker.kv_storage import KVStorage
from backend.worker.native_tier import NativeTier, PackLinears
from backend.worker.packed_model import PackedModels
from backend.worker.state_storage import StateStorage
from backend.worker.tier import KVBlock, Tier, TierChoice, choose_tier, kv_format, kv_layout
from backend.worker.token_adapters import NativeAdapters, TorchAdapters
from backend.worker.torch_tier import TorchTier
from kernels.common.kv_format import PoolLayout
from kernels.common.rounding import ROUNDED
from kernels.cpu.build import NativeLibrary
from kernels.cpu.linear import RotateInBlocks, RoundToBlocks
from kernels.cpu.lora import PackedAdapter, packed_bytes
from kernels.cpu.ranks import RanksMemory
from kernels.cpu.screen import Screen

if TYPE_CHECKING:
    from backend.hosted.checkpoint import HostedCheckpoint
    from backend.hosted.model import HostedModel

log = logging.getLogger("everbatch.worker")


class LoadedModel:
    def __init__(
        self,
        checkpoint: loader.CheckpointReader | HostedCheckpoint,
        section: ModelConfigSection,
        kv_cache: KvCacheConfig,
        device: torch.device,
        progress: Callable[[str], None] = lambda line: None,
        lora: LoraSection = LoraSection(),  # noqa: B008 (immutable)
    ) -> None:
        """Raises ConfigError when the checkpoint, or the tier that `section` names, cannot be used."""
        self.is_hosted = not isinstance(checkpoint, loader.CheckpointReader)
        checkpoint.limit_attention(kv_cache.max_attention_window, kv_cache.sink_tokens)
        self.config, dtype = checkpoint.config, checkpoint.compute_dtype(section.dtype)
        self.whole = checkpoint.config  # where several ranks run the model, `config` becomes that of this one's part
        self.is_encoder = checkpoint.is_encoder
        self.device = device
        self.kv_format = kv_format(kv_cache, self.config)
        self.choice = choose_tier(section, kv_cache, device, self.config, progress, self.is_hosted)
        self.dtype = self.choice.computes_in(dtype)
        own = () if isinstance(checkpoint, loader.CheckpointReader) else checkpoint.remarks
        self.remarks = (*own, *_remarks(self.choice, kv_cache.block_size, dtype, device, self.config))
        if self.choice.name == "native" and isinstance(checkpoint, loader.CheckpointReader) and checkpoint.is_fp8:
            section = _in_eight_bits(section)
        linears = linear_options(self.choice, section.quantization, self.dtype)
        linears = _measured(linears, checkpoint, section, progress)
        self._screen: Screen | None = None
        self.mapped_bytes = 0  # weights that are pages of a file, which other engines may share
        self.model: Decoder | HostedModel
        if isinstance(checkpoint, loader.CheckpointReader) and (library := self.choice.library) is not None:
            packed = PackedModels(checkpoint, section, self.dtype, linears, library, progress).build()
            self.model, self._screen, self.mapped_bytes = packed
        else:
            self.model = checkpoint.build(section.max_seq_len, self.dtype, device, linears)
        if isinstance(self.model, Decoder) and self.kv_format.is_quantised:
            shift_keys(self.model)
        self.config = self.model.config  # a hosted model's heads and windows are known only now
        self._native: NativeTier | None = None
        self._hosted: tuple[int, Tier] | None = None  # and the size of its blocks
        self._lora = lora
        self.projections = self._projections()
        if lora.enabled and not any(self.projections.layers):
            raise ConfigError(
                f"lora.enabled is true, and {self.config.architecture} has no linear layers that adapters can change; use --set "
                f"lora.enabled=false"
            )
        if lora.enabled and not isinstance(self.model, Decoder):
            self.model.adapters.enable()
        page = page_bytes(self.projections, self._part_bytes, lora.page_rank, lora.max_rank)
        self.pages = PagePool(page, lora.host_pages_per_block)

    @property
    def tier_name(self) -> str:
        return self.choice.name

    @property
    def decoder(self) -> Decoder:
        """The model, where it is not hosted."""
        assert isinstance(self.model, Decoder)
        return self.model

    @property
    def max_seq_len(self) -> int:
        """Positions that the model was built for."""
        return self.model.max_seq_len

    @property
    def prompt_embedding_width(self) -> int:
        """The width of the embeddings that prompts may bring; 0: none."""
        if self.is_encoder:
            return 0
        return self.model.embedding.shape[1] if isinstance(self.model, Decoder) else self.model.embeddings.width

    def kv_block(self, block_size: int) -> KVBlock:
        if self.is_hosted or self.tier_name == "native":
            return self.tier(block_size).kv_block()
        layout = self.layout(block_size)
        return KVBlock(layout.block_shape, layout.dtype)

    def kv_bytes_per_token(self, block_size: int) -> int:
        """Bytes of KV of one token in all layers of a rank; of several stages, of the one that has most layers."""
        return -(-self._most_layers * self.kv_block(block_size).num_bytes // block_size)

    @property
    def _most_layers(self) -> int:
        """The layers with KV of the stage that has most layers, for all have pools of as many blocks."""
        shard = self.config.shard
        return self.config.num_kv_layers if shard.stages == 1 else most_layers(self.whole, shard)

    def layout(self, block_size: int) -> PoolLayout:
        """The KV pool's layout in the torch and triton tiers; the native tier has a layout of its own."""
        return kv_layout(self.config, block_size, self.dtype, self.kv_format)

    def storage(self, block_size: int, num_blocks: int, layers: Sequence[memoryview] | None = None) -> KVStorage:
        """`layers`: memory for all blocks of each layer. Raises ConfigError when memory for `num_blocks` cannot be had."""
        storage = KVStorage(self.config.num_kv_layers, *self.kv_block(block_size), self.device, layers)
        try:
            storage.grow(num_blocks)
        except (MemoryError, torch.OutOfMemoryError):
            gib = num_blocks * storage.bytes_per_block / (1 << 30)
            raise ConfigError(
                f"{gib:.1f} GiB for {num_blocks} KV blocks cannot be had; lower kv_cache.max_tokens"
            ) from None
        return storage

    def states(self, num_states: int) -> StateStorage | None:
        """The states of recurrent layers; None where the model has none. Raises ConfigError when their memory cannot be had."""
        if not self.config.state_bytes:
            return None
        try:
            return StateStorage(self.config, num_states, self.device)
        except (MemoryError, torch.OutOfMemoryError):
            gib = num_states * self.config.state_bytes / (1 << 30)
            raise ConfigError(
                f"{gib:.1f} GiB for {num_states} states of recurrent layers cannot be had; lower scheduler.max_batch_size"
            ) from None

    def tier(self, block_size: int) -> Tier:
        """The object that runs steps: on the native and torch tiers, and for a draft model on every tier."""
        if self.is_hosted:
            if self._hosted is None or self._hosted[0] != block_size:
                self._hosted = block_size, self._hosted_tier(block_size)
            return self._hosted[1]
        if self.tier_name == "native":
            return self._native_tier(block_size)
        return TorchTier(self.decoder, self.layout(block_size))

    @property
    def lora_module_bytes(self) -> int:
        return module_bytes(self.projections, self._part_bytes)

    def pack(self, layers: Layers) -> tuple[object, int, int]:
        """An adapter in the form of the tier, in pages; their bytes, and those that it takes on the device."""
        pages = AdapterPages(self.pages)
        weights: PackedAdapter | PagedLayers
        if self.tier_name == "native":
            weights = PackedAdapter(layers, self.model.dtype, pages.hold)
            pages.belong_to(weights)
        else:
            weights = hold_layers(layers, pages)
        if self.tier_name == "triton":
            page = self.pages.page_bytes
            num_pages = -(-make_stacks(self.decoder, self._lora.max_rank).bytes_per_adapter // page)
            return weights, pages.num_bytes, num_pages * page
        return weights, pages.num_bytes, pages.num_bytes

    @property
    def whole_projections(self) -> Projections:
        """The projections of the whole model, where this rank has a part of it."""
        return self.projections if self.is_hosted else projections_of(self.whole)

    def _projections(self) -> Projections:
        """The projections that LoRA adapters may change."""
        if isinstance(self.model, Decoder):
            return projections_of(self.config)
        return self.model.adapters.projections

    def _part_bytes(self, place: ProjectionPlace, rank: int) -> int:
        itemsize = self.model.dtype.itemsize
        if self.tier_name == "native":
            return packed_bytes(place.first, place.n, place.k, rank, itemsize)
        return part_bytes(place, rank, itemsize)

    def _hosted_tier(self, block_size: int) -> Tier:
        from backend.worker.hosted_tier import (
            HostedTier,
            NativeLayers,
            PoolLayers,
            WholeTexts,
        )  # only where transformers is needed

        model, library = self.model, self.choice.library
        assert not isinstance(model, Decoder)
        adapters = TorchAdapters(self.device) if library is None else NativeAdapters(library)
        if self.is_encoder:
            return HostedTier(model, WholeTexts(self.tier_name), adapters)
        if library is None:
            return HostedTier(model, PoolLayers(model, self.layout(block_size)), adapters)
        return HostedTier(model, NativeLayers(model, library, block_size, self.kv_format), adapters)

    def _native_tier(self, block_size: int) -> NativeTier:
        if self._native is None or self._native.block_size != block_size:
            self._native = self.native_tier(block_size)
        return self._native

    def native_tier(
        self, block_size: int, ranks: RanksMemory | None = None, make: Callable[..., NativeTier] = NativeTier
    ) -> NativeTier:
        """A tier of its own. ranks: what it shares with the tiers of other ranks. make: gets the arguments of NativeTier."""
        tier = make(self.decoder, self.library, block_size, self.kv_format, self._screen, ranks)
        self._screen = tier.screen
        return tier

    @property
    def library(self) -> NativeLibrary:
        """The native kernels."""
        assert self.choice.library is not None  # choose_tier chooses the native tier only with it
        return self.choice.library


def _remarks(
    choice: TierChoice, block_size: int, dtype: torch.dtype, device: torch.device, config: ModelConfig
) -> tuple[str, ...]:
    """Sentences for the operator about how the model runs, where the configuration alone does not say it."""
    remarks = []
    if config.is_part and config.images is None:
        remarks.append(
            f"the checkpoint is a {config.architecture}, of which the text model alone is served: what it has for images is "
            f"left out, and requests with images are refused"
        )
    if choice.name == "torch" and device.type == "cpu":
        remarks.append(
            f"the model runs on torch operators, because {choice.reason}: the last bits of a reply may then depend on the "
            f"requests beside it and on evictions, and with them a token, and steps are slower, often by a factor of 2 to 3"
        )
    if (used := choice.block_size(block_size)) != block_size:
        remarks.append(
            f"kv_cache.block_size is {block_size}, and the native kernels hold KV in blocks of at least {used} tokens: "
            f"it is {used} in this server"
        )
    if choice.computes_in(dtype) != dtype:
        remarks.append(
            "the model is float16, and the native kernels compute it in float32 from weights that are held in float16, which "
            "loses nothing; --set model.dtype=bfloat16 halves the KV cache and is faster, but rounds the weights to 8 bits"
        )
    return tuple(remarks)


def _in_eight_bits(section: ModelConfigSection) -> ModelConfigSection:
    """FP8 weights as int8, unless other bits are asked for."""
    if section.quantization != "none":
        return section
    log.info(
        "the checkpoint's FP8 weights are held as int8; --set model.quantization=w8a8 rounds activations too, which is faster "
        "for prompts and many rows"
    )
    return msgspec.structs.replace(section, quantization="int8")


def load_draft_model(
    path: str, model: LoadedModel, section: ModelConfigSection, kv_cache: KvCacheConfig
) -> LoadedModel:
    """The checkpoint of speculation.draft_model, held like the model's. Raises ConfigError when the two do not go together."""
    if model.config.sliding_window is not None:
        raise ConfigError(
            f"speculation.mode is draft_model, and the model's sliding window of {model.config.sliding_window} tokens lets KV go "
            f"that the draft model would need; use --set speculation.mode=lookup"
        )
    try:
        checkpoint = loader.open_directory(loader.resolve_model_path(path))
    except ConfigError as error:
        raise ConfigError(f"speculation.draft_model: {error}") from None
    config = checkpoint.config
    if isinstance(checkpoint, loader.CheckpointReader) and checkpoint.config.state_bytes:
        raise ConfigError(
            f"speculation.draft_model {path} has recurrent layers, whose state cannot go back to before a wrong guess; give a "
            f"draft model that has none"
        )
    if config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"speculation.draft_model {path} has a vocabulary of {config.vocab_size} tokens, the model one of "
            f"{model.config.vocab_size}: its guesses would be other words; give a draft model of the same family"
        )
    if config.max_position < model.max_seq_len:
        raise ConfigError(
            f"speculation.draft_model {path} takes {config.max_position} tokens, model.max_seq_len is {model.max_seq_len}; "
            f"use --set model.max_seq_len={config.max_position}"
        )
    section = msgspec.structs.replace(section, path=path, max_seq_len=model.max_seq_len, additional_outputs=())
    return LoadedModel(checkpoint, section, kv_cache, model.device)


def _measured(
    linears: LinearOptions,
    checkpoint: loader.CheckpointReader | HostedCheckpoint,
    section: ModelConfigSection,
    progress: Callable[[str], None],
) -> LinearOptions:
    """With what is measured of the model before its weights are rounded to blocks. Raises ConfigError."""
    quantization, has_choice = section.quantization, is_chosen(section.quantization)
    if not isinstance(checkpoint, loader.CheckpointReader):
        if has_choice:
            raise ConfigError(
                f"model.quantization is {quantization}, and transformers runs this model, whose layers are not measured; use "
                f"--set model.quantization={' or '.join(ROUNDED)}"
            )
        return linears
    if quantization not in ROUNDED and not has_choice:
        return linears
    path = loader.resolve_model_path(section.path)
    importance = Importance(path, checkpoint.config, checkpoint.tensors, progress)
    linears = linears._replace(importance=importance)
    if not has_choice:
        return linears
    return linears._replace(choose=ChosenForms(quantization, path, checkpoint.config, checkpoint.tensors, linears))


def linear_options(choice: TierChoice, quantization: str, dtype: torch.dtype) -> LinearOptions:
    """How the tier holds linear layers. `quantization`: model.quantization. Raises ConfigError for one that it has not."""
    match choice.name:
        case "native":
            assert choice.library is not None  # choose_tier chooses this tier only with it
            pack = PackLinears(choice.library)
            return LinearOptions(
                quantization,
                make=pack,
                make_by_head=pack,
                round_to_blocks=RoundToBlocks(choice.library),
                rotate=RotateInBlocks(choice.library),
                holds_super_blocks=True,
            )
        case "triton":
            if quantization in ROUNDED or is_chosen(quantization):
                raise ConfigError(
                    f"model.quantization is {quantization}, which rounds weights for a CPU; on a GPU use w8a8, or a checkpoint "
                    f"that ./everbatch quantize --scheme w4a8 makes"
                )
            group = WHOLE_ROW if quantization == "w8a8" else None  # the only grouping that the w8a8 kernel supports
            return LinearOptions(quantization, group, make_triton_linear(dtype))
    return LinearOptions(quantization)
