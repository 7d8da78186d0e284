"""InProcessWorkerGroup: one rank in the engine's own process, on a CPU or one CUDA device."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from backend.api.config import GuidedConfig, KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig
from backend.api.errors import ConfigError, Unsupported
from backend.api.gguf import SUFFIX
from backend.api.guide import NOT_SET_UP
from backend.api.lora import LoraConfig
from backend.core.adapter import PreparedAdapter
from backend.core.step import MemoryUse, ModelInfo, StepInput, StepOutput, WorkersLost
from backend.guided.compiler import GuideCompiler
from backend.guided.setup import make_guides
from backend.layers.device_linear import make_triton_linear
from backend.models import loader
from backend.models.linears import WHOLE_ROW, LinearOptions
from backend.models.llama import Llama
from backend.models.lora import Layers, widest_module
from backend.sampling.sampler import Sampler
from backend.sampling.slots import SlotParameters
from backend.worker.adapters import AdapterReader, num_bytes_of
from backend.worker.debug_tensors import DebugFetch
from backend.worker.device_runner import DeviceRunner, make_stacks
from backend.worker.extras import Extras, check_outputs
from backend.worker.graphs import CudaCapture, Graphs
from backend.worker.guided_rows import GuidedRows
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.memory import free_bytes, memory_use
from backend.worker.model_runner import ModelRunner, Pending, full_step
from backend.worker.native_tier import NativeTier, PackLinears
from backend.worker.post_processors import PostProcessors
from backend.worker.prompt_inputs import PromptInputs
from backend.worker.tier import Choice, KVBlock, Tier, choose_tier, kv_dtype, kv_layout
from backend.worker.torch_tier import TorchTier
from kernels.common.kv_format import PoolLayout
from kernels.cpu.isa import supported_isas
from kernels.cpu.linear import RoundToFourBits
from kernels.cpu.lora import PackedAdapter

log = logging.getLogger("everbatch.worker")
_DUMMY_BLOCK_SIZE = 32  # tokens


class InProcessWorkerGroup:
    """Implements core.step.WorkerGroup."""

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
    ) -> None:
        """`progress` gets a line before slow work. `processors` come besides those that the configuration names.
        `debug`: what is kept of every step. `guided`: None for no guided decoding.

        Raises ConfigError when the checkpoint or the device does not exist.
        """
        self._section = model
        self._kv_cache = kv_cache
        self._progress = progress
        self._processors = (processors or PostProcessors()).with_configured(model)
        self._debug = debug
        self._guided = guided
        self.guides: GuideCompiler | None = None
        self._lora = lora
        self._adapter_reader: AdapterReader | None = None
        self._num_slots = scheduler.max_batch_size
        self._max_num_tokens = scheduler.max_num_tokens
        self._buffers: tuple[Mapping[str, Tensor], str] | None = None
        self.model_path = Path() if model.path == "<buffers>" else loader.resolve_model_path(model.path)
        self.device = _device(model.device)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton and CUDA events use the current device
        self.model: Llama | None = None
        self._choice = Choice("torch")
        self._native: NativeTier | None = None
        self.runner: ModelRunner | DeviceRunner | None = None
        self._look_ahead = scheduler.look_ahead
        self._in_flight: deque[Pending] = deque()

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
        )
        group._buffers = (tensors, json_config)
        return group

    def load(self) -> ModelInfo:
        section = self._section
        torch.set_num_threads(section.num_threads or _physical_cores())
        if self._buffers is not None:
            checkpoint = loader.of_buffers(*self._buffers)
            eos_ids = checkpoint.config.eos_ids
        else:
            checkpoint = loader.open_directory(self.model_path)
            eos_ids = loader.read_eos_ids(self.model_path)
        checkpoint.limit_attention(self._kv_cache.max_attention_window, self._kv_cache.sink_tokens)
        config, dtype = checkpoint.config, checkpoint.compute_dtype(section.dtype)
        self._choice = choose_tier(section, self._kv_cache, self.device, config, dtype, self._progress)
        if self._choice.name == "triton" and not section.cuda_graphs:
            log.info("CUDA graphs: off, because model.cuda_graphs is false")
        self.model = checkpoint.build(section.max_seq_len, dtype, self.device, self._linears(dtype))
        log.info("weights: %s", self.model.memory)
        check_outputs(section.additional_outputs, self.model)
        if self._lora.enabled:
            self.model.takes_adapters = True
            self._adapter_reader = AdapterReader(config, dtype, self._lora.max_rank, self._pack)
        kv_block = self._kv_block(self._kv_cache.block_size)
        refusal = NOT_SET_UP
        if self._guided is not None:
            tokenizer = None if self._buffers is not None else self.model_path
            self.guides, refusal = make_guides(self._guided, tokenizer, config.vocab_size, eos_ids)
        return ModelInfo(
            name=self.model_path.name.removesuffix(SUFFIX) or config.architecture,
            vocab_size=config.vocab_size,
            max_seq_len=self.model.cos.shape[0],
            sliding_window=config.sliding_window,
            kv_bytes_per_token=-(-config.num_layers * kv_block.num_bytes // self._kv_cache.block_size),
            eos_ids=eos_ids,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self.device),
            kernels=self._choice.name,
            has_matrix_units=dtype is torch.bfloat16 and "amx" in supported_isas(),
            context_logits=section.gather_context_logits,
            generation_logits=section.gather_generation_logits,
            additional_outputs=section.additional_outputs,
            output_widths={name: output.width for name, output in self.model.outputs.items()},
            post_processors=self._processors.names,
            prompt_embedding_width=config.hidden_size if self._choice.name == "torch" else 0,
            guide_refusal=refusal,
            lora_module_bytes=self._lora.max_rank * widest_module(config) * dtype.itemsize if self._lora.enabled else 0,
            takes_drafts=self._choice.name != "triton",
            looks_ahead=self._choice.name == "triton" if self._look_ahead is None else self._look_ahead,
        )

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        if self._adapter_reader is None:
            raise Unsupported("LoRA is not enabled; start with --set lora.enabled=true")
        return self._adapter_reader.prepare(lora)

    def free_memory_bytes(self) -> int:
        if self.device.type != "cuda":
            return free_bytes(self.device)
        self._progress("running the largest step, which compiles the GPU kernels")
        runner = self._dummy_run()
        free = free_bytes(self.device)  # before the dummy runner goes: real steps need its buffers and graphs, too
        del runner
        torch.cuda.empty_cache()
        return free

    def memory_use(self) -> MemoryUse:
        return memory_use(self.device)

    def initialize_kv_cache(self, max_blocks: int, block_size: int, num_blocks: int) -> None:
        self.runner = self._make_runner(block_size, num_blocks)

    def submit(self, step: StepInput) -> None:
        with self._all_or_nothing():
            assert self.runner is not None  # initialize_kv_cache comes first
            self._in_flight.append(self.runner.launch(step))

    def collect(self) -> StepOutput:
        with self._all_or_nothing():
            return self._in_flight.popleft().wait()

    def execute(self, step: StepInput) -> StepOutput:
        """Submit and collect."""
        self.submit(step)
        return self.collect()

    def shutdown(self) -> None:
        self._in_flight.clear()
        self.runner = None
        self._native = None
        self.model = None

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """On a failure drop every step in flight, once the device has finished them. WorkersLost if the device is lost."""
        try:
            yield
        except Exception:  # it is raised again below: whatever failed, the steps in flight are lost
            self._in_flight.clear()
            if self.device.type == "cuda":
                try:
                    torch.cuda.synchronize(self.device)
                except RuntimeError as error:
                    raise WorkersLost(f"the device {self.device} is lost: {error}") from error
            raise

    def _pack(self, layers: Layers) -> tuple[object, int, int]:
        """An adapter in the form of the tier, its bytes, and those that it takes on the device."""
        if self._choice.name == "native":
            packed = PackedAdapter(layers, self._loaded.dtype)
            return packed, packed.num_bytes, packed.num_bytes
        num_bytes = num_bytes_of(layers)
        if self._choice.name == "triton":
            return layers, num_bytes, make_stacks(self._loaded, self._lora.max_rank).bytes_per_adapter
        return layers, num_bytes, num_bytes

    def _linears(self, dtype: torch.dtype) -> LinearOptions:
        quantization = self._section.quantization
        match self._choice.name:
            case "native":
                assert self._choice.library is not None  # choose_tier chooses this tier only with it
                return LinearOptions(
                    quantization,
                    make=PackLinears(self._choice.library),
                    round_to_four_bits=RoundToFourBits(self._choice.library),
                    holds_super_blocks=True,
                )
            case "triton":
                if quantization == "w4a8":
                    raise ConfigError(
                        "model.quantization is w4a8, which rounds weights for a CPU; on a GPU use w8a8, or a checkpoint that "
                        "./everbatch quantize --scheme w4a8 makes"
                    )
                group = WHOLE_ROW if quantization == "w8a8" else None  # the only grouping that the w8a8 kernel takes
                return LinearOptions(quantization, group, make_triton_linear(dtype))
        return LinearOptions(quantization)

    @property
    def _loaded(self) -> Llama:
        assert self.model is not None  # load comes before whatever needs it
        return self.model

    def _dummy_run(self) -> ModelRunner | DeviceRunner:
        """Run the largest step on a runner of its own, which warms up kernels and the allocator; returns that runner."""
        step = full_step(self._num_slots, self._max_num_tokens, self._loaded.cos.shape[0], _DUMMY_BLOCK_SIZE)
        runner = self._make_runner(_DUMMY_BLOCK_SIZE, step.num_blocks)
        runner.execute(step)
        if isinstance(runner, DeviceRunner):
            runner.execute(
                full_step(1, 2, self._loaded.cos.shape[0], _DUMMY_BLOCK_SIZE)
            )  # few queries use other kernels
            runner.warm_up()
        return runner

    def _layout(self, block_size: int) -> PoolLayout:
        """The KV pool's layout in the torch and triton tiers; the native tier has a layout of its own."""
        config = self._loaded.config
        return kv_layout(config, block_size, self._loaded.dtype, kv_dtype(self._kv_cache, config))

    def _native_tier(self, block_size: int) -> NativeTier:
        if self._native is None or self._native.block_size != block_size:
            assert self._choice.library is not None  # choose_tier chooses this tier only with it
            kv_bits = {"int8": 8, "int4": 4}.get(kv_dtype(self._kv_cache, self._loaded.config), 0)
            self._native = NativeTier(self._loaded, self._choice.library, block_size, kv_bits)
        return self._native

    def _kv_block(self, block_size: int) -> KVBlock:
        if self._choice.name == "native":
            return self._native_tier(block_size).kv_block()
        layout = self._layout(block_size)
        return KVBlock(layout.block_shape, layout.dtype)

    def _storage(self, block_size: int, num_blocks: int) -> KVStorage:
        storage = KVStorage(self._loaded.config.num_layers, *self._kv_block(block_size), self.device)
        try:
            storage.grow(num_blocks)
        except (MemoryError, torch.OutOfMemoryError):
            gib = num_blocks * storage.bytes_per_block / (1 << 30)
            raise ConfigError(
                f"{gib:.1f} GiB for {num_blocks} KV blocks cannot be had; lower kv_cache.max_tokens"
            ) from None
        return storage

    def _make_runner(self, block_size: int, num_blocks: int) -> ModelRunner | DeviceRunner:
        model, slots, device = self._loaded, self._num_slots, self.device
        max_len, vocab_size = model.cos.shape[0], model.config.vocab_size
        storage = self._storage(block_size, num_blocks)
        if self._choice.name == "triton":
            batch = InputBatch(slots + 1, max_len, block_size, device)
            parameters = SlotParameters(slots, vocab_size, device)
            extras = Extras(self._processors, self._debug)
            guided = GuidedRows(self.guides, slots + 1, vocab_size)
            layout = self._layout(block_size)
            graphs, rank = self._graphs(), self._lora.max_rank
            return DeviceRunner(model, layout, storage, batch, parameters, graphs, extras, guided, rank)
        is_native = self._choice.name == "native"
        tier: Tier = self._native_tier(block_size) if is_native else TorchTier(model, self._layout(block_size))
        prompts = None if is_native else PromptInputs(vocab_size, model.dtype, device)
        batch = InputBatch(slots, max_len, block_size, device, prompts)
        sampler = Sampler(slots, vocab_size, device, self._choice.library)
        guided = GuidedRows(self.guides, slots, vocab_size)
        return ModelRunner(tier, storage, batch, sampler, Extras(self._processors, self._debug), guided)

    def _graphs(self) -> Graphs:
        return Graphs(CudaCapture if self._section.cuda_graphs and self.device.type == "cuda" else None)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device is {name}, which torch does not know; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {name}, but torch finds no CUDA device; use --set model.device=cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device is {name}, supported are cpu and cuda")
    return device


def _physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once where the kernel tells."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(cpu))
    return max(1, len(cores))
