"""InProcessWorkerGroup: one rank in the engine's own process, on a CPU or one CUDA device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from backend.api.checkpoint.gguf_parts import model_name, title
from backend.api.checkpoint.recommended import default_sampling
from backend.api.config.schema import (
    GuidedConfig,
    ImagesConfig,
    KvCacheConfig,
    KvTransferConfig,
    LoraSection,
    ModelConfigSection,
    SchedulerConfig,
    SpeculationConfig,
)
from backend.api.errors import Unsupported
from backend.api.guide import NOT_SET_UP
from backend.api.lora import LoraConfig
from backend.api.processes.setup import physical_cores
from backend.core.step import BlockId, MemoryUse, ModelInfo, PreparedAdapter, StepInput, StepOutput
from backend.models import loader
from backend.models.decoder import Decoder
from backend.models.lora import Layers
from backend.sampling.sampler import Sampler
from backend.sampling.slots import SlotParameters
from backend.worker.adapters import AdapterReader
from backend.worker.checkpoints import open_checkpoint, read_eos_ids
from backend.worker.debug_tensors import DebugFetch
from backend.worker.device import device_of
from backend.worker.device_runner import DeviceRunner
from backend.worker.draft_model import DraftModel
from backend.worker.extra_outputs import ExtraOutputs, check_outputs
from backend.worker.graphs import CudaCapture, Graphs
from backend.worker.guided_rows import GuidedRows
from backend.worker.image_features import ImageFeatures
from backend.worker.image_setup import ImageParts, make_images
from backend.worker.input_batch import InputBatch, SlotMemory
from backend.worker.kv_fingerprint import kv_fingerprint
from backend.worker.lane import Lane, all_or_nothing
from backend.worker.loaded_model import LoadedModel, load_draft_model
from backend.worker.memory import free_bytes, memory_use
from backend.worker.model_runner import ModelRunner, full_step
from backend.worker.pipeline import Pending
from backend.worker.post_processors import PostProcessors
from backend.worker.prompt_inputs import PromptInputs
from kernels.cpu.isa import supported_isas

if TYPE_CHECKING:
    from backend.guided.compiler import GuideCompiler
    from backend.hosted.checkpoint import HostedCheckpoint

log = logging.getLogger("everbatch.worker")
_DUMMY_BLOCK_SIZE = 32  # tokens


class InProcessWorkerGroup:
    """Implements core.step.WorkerGroup."""

    can_compute_in_thread = True  # while the caller plans the next step, where a CPU is to look ahead
    starts_guides = False  # True: the compiler of guides starts while weights are loaded, else with the first guide

    def __init__(
        self,
        model: ModelConfigSection,
        scheduler: SchedulerConfig,
        kv_cache: KvCacheConfig = KvCacheConfig(),  # noqa: B008 (immutable)
        progress: Callable[[str], None] = lambda line: None,
        processors: PostProcessors | None = None,
        debug: DebugFetch | None = None,
        guided: GuidedConfig | None = None,
        lora: LoraSection = LoraSection(),  # noqa: B008 (immutable)
        speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008 (immutable)
        kv_transfer: KvTransferConfig = KvTransferConfig(),  # noqa: B008 (immutable)
        keeps_pool: bool = False,
        images: ImagesConfig = ImagesConfig(),  # noqa: B008 (immutable)
    ) -> None:
        """`progress` gets a line before slow work. `processors` come besides those that the configuration names.
        `debug`: what is kept of every step. `guided`: None for no guided decoding.
        `keeps_pool`: the engine gives the KV pool memory that outlives this process, where the model's kernels allow it.

        Raises ConfigError when the checkpoint or the device does not exist.
        """
        self._section = model
        self._kv_cache = kv_cache
        self._progress = progress
        self._processors = (processors or PostProcessors()).with_configured(model)
        self._debug = debug
        self._guided = guided
        self.guides: GuideCompiler | None = None
        self._images_config, self._images = images, ImageParts()
        self._lora = lora
        self._speculation = speculation
        self._kv_transfer = kv_transfer
        self._keeps_pool = keeps_pool and kv_cache.keeps_pool
        self._adapter_reader: AdapterReader | None = None
        self._num_slots = scheduler.max_batch_size
        self._max_num_tokens = scheduler.max_num_tokens
        self._buffers: tuple[Mapping[str, Tensor], str] | None = None
        self.model_path = Path() if model.path == "<buffers>" else loader.resolve_model_path(model.path)
        self.device = device_of(model.device)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton and CUDA events use the current device
        self._loaded: LoadedModel | None = None
        self._draft: LoadedModel | None = None
        self.runner: ModelRunner | DeviceRunner | None = None
        self._look_ahead = scheduler.look_ahead
        self._in_flight: deque[Pending] = deque()
        self._lane = Lane(has_thread=False)

    @classmethod
    def from_buffers(
        cls,
        tensors: Mapping[str, Tensor],
        json_config: str,
        model: ModelConfigSection,
        scheduler: SchedulerConfig,
        kv_cache: KvCacheConfig = KvCacheConfig(),  # noqa: B008 (immutable)
        processors: PostProcessors | None = None,
        debug: DebugFetch | None = None,
        guided: GuidedConfig | None = None,
        lora: LoraSection = LoraSection(),  # noqa: B008 (immutable)
        speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008 (immutable)
        kv_transfer: KvTransferConfig = KvTransferConfig(),  # noqa: B008 (immutable)
    ) -> InProcessWorkerGroup:
        """A group over tensors in memory, by their checkpoint names, and the text of config.json."""
        group = cls(
            msgspec.structs.replace(model, path="<buffers>"),
            scheduler,
            kv_cache,
            processors=processors,
            debug=debug,
            guided=guided,
            lora=lora,
            speculation=speculation,
            kv_transfer=kv_transfer,
        )
        group._buffers = (tensors, json_config)
        return group

    def load(self) -> ModelInfo:
        section = self._section
        torch.set_num_threads(section.num_threads or physical_cores())
        checkpoint, eos_ids = self._open()
        refusal = self._make_guides(checkpoint.config.vocab_size, eos_ids)
        loaded = self._loaded = LoadedModel(
            checkpoint, section, self._kv_cache, self.device, self._progress, self._lora
        )
        config, dtype, tier_name = loaded.config, loaded.dtype, loaded.tier_name
        if tier_name == "triton" and not section.cuda_graphs:
            log.info("CUDA graphs: off, because model.cuda_graphs is false")
        log.info("weights: %s", loaded.model.memory)
        check_outputs(section.additional_outputs, loaded.model)
        models, wanted = [loaded], self._kv_cache.block_size
        if self._speculation.mode == "draft_model":
            self._draft = load_draft_model(self._speculation.draft_model, loaded, section, self._kv_cache)
            log.info("weights of the draft model: %s", self._draft.model.memory)
            models.append(self._draft)
        block_size = max(each.choice.block_size(wanted) for each in models)  # one table of blocks serves both
        remarks = tuple(dict.fromkeys(remark for each in models for remark in each.remarks))
        for remark in remarks:
            log.warning("%s", remark)
        if self._lora.enabled:
            loaded.model.takes_adapters = True
            self._adapter_reader = AdapterReader(loaded.whole_projections, dtype, self._lora.max_rank, self._pack)
        self._images = self._make_images(checkpoint, loaded)
        return ModelInfo(
            name=title(model_name(self.model_path.name)) or config.architecture,
            vocab_size=config.vocab_size,
            max_seq_len=loaded.max_seq_len,
            sliding_window=config.sliding_window,
            kv_bytes_per_token=sum(each.kv_bytes_per_token(block_size) for each in models),
            kv_block_size=block_size if block_size != wanted else 0,
            remarks=remarks,
            eos_ids=eos_ids,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self.device),
            kernels=tier_name,
            has_matrix_units=dtype is torch.bfloat16 and "amx" in supported_isas(),
            context_logits=section.gather_context_logits,
            generation_logits=section.gather_generation_logits,
            additional_outputs=section.additional_outputs,
            output_widths={name: output.width for name, output in loaded.model.outputs.items()},
            post_processors=self._processors.names,
            prompt_embedding_width=loaded.prompt_embedding_width,
            guide_refusal=refusal,
            lora_module_bytes=loaded.lora_module_bytes if self._lora.enabled else 0,
            lora_page_bytes=loaded.pages.page_bytes,
            takes_drafts=True,
            reads_whole_texts=loaded.is_encoder,
            has_head=checkpoint.has_head,
            kv_fingerprint=kv_fingerprint(checkpoint, loaded, section, block_size)
            if self._moves_kv and not config.state_bytes
            else "",
            kv_block_bytes=loaded.config.num_layers * loaded.kv_block(block_size).num_bytes,
            kv_layers=loaded.config.num_layers
            if self._keeps_pool and tier_name == "native" and not config.state_bytes
            else 0,
            state_bytes=config.state_bytes,
            image_token_id=self._images.token_id,
            image_refusal=self._images.refusal,
            whole_images=self._images.are_whole,
            looks_ahead=tier_name == "triton" if self._look_ahead is None else self._look_ahead,
            default_sampling={}
            if self._buffers is not None
            else default_sampling(self.model_path, section.default_sampling),
        )

    @property
    def images(self) -> ImageFeatures | None:
        return self._images.features

    def _make_images(self, checkpoint: loader.CheckpointReader | HostedCheckpoint, loaded: LoadedModel) -> ImageParts:
        return make_images(
            checkpoint, loaded, None if self._buffers is not None else self.model_path, self._images_config
        )

    def _make_guides(self, vocab_size: int, eos_ids: tuple[int, ...]) -> str:
        """Returns why requests with guides are refused, or ''."""
        if self._guided is None:
            return NOT_SET_UP
        from backend.guided.setup import make_guides  # only here: GPU benchmarks run without what it needs

        tokenizer = None if self._buffers is not None else self.model_path
        self.guides, refusal = make_guides(self._guided, tokenizer, vocab_size, eos_ids)
        if self.guides is not None and self.starts_guides:
            self.guides.start()
        return refusal

    def _open(self) -> tuple[loader.CheckpointReader | HostedCheckpoint, tuple[int, ...]]:
        """The checkpoint, and the ids that end a text."""
        if self._buffers is not None:
            of_buffers = loader.of_buffers(*self._buffers)
            return of_buffers, of_buffers.config.eos_ids
        checkpoint = open_checkpoint(self.model_path, self._section.implementation)
        return checkpoint, read_eos_ids(self.model_path, checkpoint)

    def _pack(self, layers: Layers) -> tuple[object, int, int]:
        """An adapter as `LoadedModel.pack` makes it."""
        return self._ready.pack(layers)

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        if self._adapter_reader is None:
            raise Unsupported("LoRA is not enabled; start with --set lora.enabled=true")
        return self._adapter_reader.prepare(lora)

    def free_memory_bytes(self) -> int:
        if self.device.type != "cuda":  # Linux counts the pages of a mapped file as free, and the weights need them
            mapped = sum(each.mapped_bytes for each in (self._loaded, self._draft) if each is not None)
            return max(0, free_bytes(self.device) - mapped - self._images.num_bytes)
        self._progress("running the largest step, which compiles the GPU kernels")
        runner = self._dummy_run()
        free = free_bytes(self.device)  # before the dummy runner goes: real steps need its buffers and graphs, too
        del runner
        torch.cuda.empty_cache()
        return max(0, free - self._images.num_bytes)

    def memory_use(self) -> MemoryUse:
        return memory_use(self.device)

    def check(self) -> None:
        """Nothing can have ended: the worker is this process."""

    def initialize_kv_cache(
        self,
        max_blocks: int,
        block_size: int,
        num_blocks: int,
        layers: Sequence[memoryview] | None = None,
        num_snapshots: int = 0,
    ) -> None:
        backed = num_blocks if layers is None else max_blocks
        self.runner = self._make_runner(block_size, backed, layers, num_snapshots)
        if self._look_ahead and self.device.type == "cpu" and self._ready.tier_name != "triton":
            self._lane = Lane(has_thread=self.can_compute_in_thread)

    def submit(self, step: StepInput) -> None:
        with all_or_nothing(self._in_flight, self._lane, self.device):
            assert self.runner is not None  # initialize_kv_cache comes first
            self._in_flight.append(self._lane.start(partial(self.runner.launch, step)))

    def collect(self) -> StepOutput:
        with all_or_nothing(self._in_flight, self._lane, self.device):
            return self._in_flight.popleft().wait()

    def execute(self, step: StepInput) -> StepOutput:
        """Submit and collect."""
        self.submit(step)
        return self.collect()

    def read_blocks(self, block_ids: list[BlockId]) -> bytes:
        assert self.runner is not None  # initialize_kv_cache comes first
        return self._lane.wait_for(partial(self.runner.storage.read, block_ids))

    def write_blocks(self, block_ids: list[BlockId], data: bytes, num_blocks: int) -> None:
        self._lane.wait_for(partial(self._write, block_ids, data, num_blocks))

    def _write(self, block_ids: list[BlockId], data: bytes, num_blocks: int) -> None:
        assert self.runner is not None  # initialize_kv_cache comes first
        self.runner.grow(num_blocks)
        self.runner.storage.write(block_ids, data)
        if self.runner.draft_model is not None:
            self.runner.draft_model.forget(block_ids)

    def shutdown(self) -> None:
        self._lane.close()
        self._in_flight.clear()
        self.runner = None
        self._loaded = self._draft = None
        if self.guides is not None:
            self.guides.close()
        if self.images is not None:
            self.images.close()
            self._images = ImageParts()

    @property
    def model(self) -> Decoder | None:
        """None before `load` and after `shutdown`. Only of a model that is not run by transformers."""
        return None if self._loaded is None else self._loaded.decoder

    @property
    def _moves_kv(self) -> bool:
        """True if blocks are read and written from outside."""
        return self._kv_transfer.enabled or self._kv_cache.has_second_level or self._keeps_pool

    @property
    def _ready(self) -> LoadedModel:
        assert self._loaded is not None  # load comes before whatever needs it
        return self._loaded

    def _dummy_run(self) -> ModelRunner | DeviceRunner:
        """Run the largest step on a runner of its own, which warms up kernels and the allocator; returns that runner."""
        step = full_step(self._num_slots, self._max_num_tokens, self._ready.max_seq_len, _DUMMY_BLOCK_SIZE)
        runner = self._make_runner(_DUMMY_BLOCK_SIZE, step.num_blocks)
        runner.execute(step)
        if isinstance(runner, DeviceRunner):
            runner.execute(full_step(1, 2, self._ready.max_seq_len, _DUMMY_BLOCK_SIZE))  # few queries use other kernels
            runner.warm_up()
        return runner

    def _make_runner(
        self, block_size: int, num_blocks: int, layers: Sequence[memoryview] | None = None, num_snapshots: int = 0
    ) -> ModelRunner | DeviceRunner:
        loaded, slots, device = self._ready, self._num_slots, self.device
        model, max_len, vocab_size = loaded.model, loaded.max_seq_len, loaded.config.vocab_size
        storage = loaded.storage(block_size, num_blocks, layers)
        states = loaded.states(slots + num_snapshots)
        extras = ExtraOutputs(self._processors, self._debug, cuts_prompts=not loaded.is_encoder)
        prompts = PromptInputs(vocab_size, model.dtype, device, self._images.setting)
        if loaded.tier_name == "triton":
            batch = InputBatch(slots + 1, max_len, block_size, device, prompts)
            parameters = SlotParameters(slots, vocab_size, device)
            guided = GuidedRows(self.guides, slots + 1, vocab_size)
            layout = loaded.layout(block_size)
            graphs = self._graphs()
            draft = self._make_draft_model(batch, block_size, num_blocks)
            page = loaded.pages.page_bytes
            parts = loaded.decoder, layout, storage, batch, parameters, graphs, extras, guided
            return DeviceRunner(*parts, self._lora, page, draft, states)
        sampler = Sampler(slots, vocab_size, device, loaded.choice.library)
        guided = GuidedRows(self.guides, slots, vocab_size)
        batch = InputBatch(slots, max_len, block_size, device, prompts, self._slot_memory())
        draft = self._make_draft_model(batch, block_size, num_blocks)
        return self._model_runner(block_size, storage, batch, sampler, extras, guided, draft, states)

    def _slot_memory(self) -> SlotMemory | None:
        """Where token ids and block tables of the slots lie; None: in memory of their own."""
        return None

    def _model_runner(self, block_size: int, *arguments: Any) -> ModelRunner:
        """arguments: those of ModelRunner behind the tier."""
        return ModelRunner(self._ready.tier(block_size), *arguments)

    def _make_draft_model(self, batch: InputBatch, block_size: int, num_blocks: int) -> DraftModel | None:
        """`batch`: of the model whose tokens the draft model guesses."""
        if self._draft is None:
            return None
        storage = self._draft.storage(block_size, num_blocks)
        return DraftModel(self._draft.tier(block_size), storage, batch, block_size, self._max_num_tokens)

    def _graphs(self) -> Graphs:
        return Graphs(CudaCapture if self._section.cuda_graphs and self.device.type == "cuda" else None)
