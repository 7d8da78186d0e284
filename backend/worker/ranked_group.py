"""RankedWorkerGroup: a model on several ranks of this machine. This process is rank 0 (docs/design/ranks.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from backend.api.config.schema import EngineConfig, ModelConfigSection
from backend.api.errors import ConfigError
from backend.api.processes.setup import physical_cores
from backend.architectures.description import Shard
from backend.architectures.shards import shards_of
from backend.core.step import MemoryUse, ModelInfo, WorkersLost
from backend.models import loader
from backend.models.cut import adapter_of_rank
from backend.models.lora import Layers
from backend.worker.debug_tensors import DebugFetch
from backend.worker.group import InProcessWorkerGroup
from backend.worker.image_setup import ImageParts
from backend.worker.input_batch import SlotMemory
from backend.worker.leading import LeadingRunner, LeadingTier, SharedAdapter
from backend.worker.loaded_model import LoadedModel
from backend.worker.memory import free_bytes, memory_use
from backend.worker.model_runner import ModelRunner
from backend.worker.post_processors import PostProcessors
from backend.worker.rank_followers import RankFollowers
from backend.worker.rank_messages import Load, Loaded, MakePool
from kernels.cpu.lora import PackedAdapter
from kernels.cpu.ranks import RankPlace, RanksMemory, RanksShape

if TYPE_CHECKING:
    from backend.hosted.checkpoint import HostedCheckpoint

SIZES = "workers.tensor_parallel_size and workers.pipeline_parallel_size"


class RankedWorkerGroup(InProcessWorkerGroup):
    """Implements core.step.WorkerGroup."""

    can_compute_in_thread = False  # one thread alone talks with the other ranks

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] = lambda line: None,
        processors: PostProcessors | None = None,
        debug: DebugFetch | None = None,
    ) -> None:
        """Arguments and errors are those of InProcessWorkerGroup. Also raises ConfigError for more ranks than cores."""
        self._workers = workers = config.workers
        self._shards = shards_of(workers.tensor_parallel_size, workers.pipeline_parallel_size)
        self._load_timeout_s = config.triton.attach_timeout_s
        super().__init__(
            replace(config.model, num_threads=self._threads_of_rank(config)),
            config.scheduler,
            config.kv_cache,
            progress=progress,
            processors=processors,
            debug=debug,
            guided=config.guided,
            lora=config.lora,
            speculation=config.speculation,
        )
        if self.device.type != "cpu":
            raise ConfigError(f"{self._asked}, and several ranks run on CPUs only; use --set model.device=cpu")
        if config.model.kernels not in ("auto", "native"):
            raise ConfigError(
                f"{self._asked} and model.kernels is {config.model.kernels}, and only native kernels run on several "
                f"ranks; use --set model.kernels=native"
            )
        self._followers: RankFollowers | None = None
        self._memory: RanksMemory | None = None
        self._mapped_bytes = 0

    def _make_images(self, checkpoint: loader.CheckpointReader | HostedCheckpoint, loaded: LoadedModel) -> ImageParts:
        if loaded.config.images is None:
            return ImageParts()
        return ImageParts(refusal="images are not read by several ranks in this version; start the server with one")

    @property
    def _asked(self) -> str:
        """The beginning of a sentence: how many ranks the configuration asks for."""
        size, stages = self._workers.tensor_parallel_size, self._workers.pipeline_parallel_size
        if stages == 1:
            return f"workers.tensor_parallel_size is {size}"
        if size == 1:
            return f"workers.pipeline_parallel_size is {stages}"
        return f"{SIZES} are {size} and {stages}, {size * stages} ranks"

    @property
    def _one_rank(self) -> str:
        """The settings of one rank, for a remedy."""
        keys = ("tensor", self._workers.tensor_parallel_size), ("pipeline", self._workers.pipeline_parallel_size)
        return " ".join(f"--set workers.{name}_parallel_size=1" for name, size in keys if size > 1)

    @property
    def _moves_kv(self) -> bool:
        """Each rank has a part of every block."""
        return False

    def _threads_of_rank(self, config: EngineConfig) -> int:
        cores, workers = physical_cores(), config.workers
        if len(self._shards) > cores:
            raise ConfigError(f"{self._asked}, and this process may use {cores} cores; use {cores} ranks or less")
        # Where the stages take turns, each of them has the cores of all.
        sharing = len(self._shards) if workers.micro_batches > 1 else workers.tensor_parallel_size
        return max(1, (config.model.num_threads or cores) // sharing)

    def load(self) -> ModelInfo:
        """Every rank loads its part, all at once."""
        try:
            info = super().load()
            if info.kernels != "native":
                raise ConfigError(
                    f"{self._asked}, and only the native kernels run on several ranks, which are not used because "
                    f"{self._ready.choice.reason}; use {self._one_rank}"
                )
            self._wait_for_others()
        except BaseException:
            self.shutdown()
            raise
        return info

    def free_memory_bytes(self) -> int:
        """The share of one rank in the free memory: each has a pool of the same size."""
        mapped = (
            self._mapped_bytes + self._ready.mapped_bytes + (0 if self._draft is None else self._draft.mapped_bytes)
        )
        return max(0, free_bytes(self.device) - mapped) // len(self._shards)

    def check(self) -> None:
        self._others.check()

    def memory_use(self) -> MemoryUse:
        try:
            return memory_use(self.device, children=self._others.pids)
        except OSError:
            raise WorkersLost("a rank has ended") from None

    def initialize_kv_cache(
        self,
        max_blocks: int,
        block_size: int,
        num_blocks: int,
        layers: Sequence[memoryview] | None = None,
        num_snapshots: int = 0,
    ) -> None:
        """`layers` is None: each rank has a pool of its own, which ends with it. num_snapshots: 0, see check_ranks."""
        whole, max_len, workers = self._ready.whole, self._ready.max_seq_len, self._workers
        shape = RanksShape(
            *(workers.tensor_parallel_size, workers.pipeline_parallel_size, workers.micro_batches),
            *(self._max_num_tokens, whole.hidden_size, whole.vocab_size),
            *(self._num_slots, max_len, -(-max_len // block_size)),
        )
        place = RankPlace(0, shape.stages - 1)
        pool = MakePool(block_size, num_blocks, shape, workers.rank_timeout_s)
        memory = self._memory = self._make_memory(shape, place, pool)
        super().initialize_kv_cache(max_blocks, block_size, num_blocks)
        self._others.wait_for_pool()
        memory.close()

    def shutdown(self) -> None:
        super().shutdown()
        if self._followers is not None:
            self._followers.stop()
        if self._memory is not None:
            self._memory.disconnect()
        self._memory = None

    def _open(self) -> tuple[loader.CheckpointReader | HostedCheckpoint, tuple[int, ...]]:
        """Open the checkpoint, and let the other ranks begin to load their parts."""
        checkpoint, eos_ids = super()._open()
        if not isinstance(checkpoint, loader.CheckpointReader):
            raise ConfigError(
                f"{self._asked}, and {checkpoint.config.architecture} is run by transformers, in one process only; use "
                f"{self._one_rank}"
            )
        checkpoint.cut(self._shards[0])
        section = replace(self._section, path=str(self.model_path))
        self._checkpoint = checkpoint
        self._followers = self._follow(section, self._shards[1:])
        return checkpoint, eos_ids

    def _follow(self, section: ModelConfigSection, shards: Sequence[Shard]) -> RankFollowers:
        """The other ranks, which begin to load."""
        loads = [Load(shard, section, self._kv_cache, self._lora) for shard in shards]
        self._progress(f"starting {len(loads)} more ranks")
        return RankFollowers(loads, self._load_timeout_s, self._workers.rank_timeout_s)

    def _make_memory(self, shape: RanksShape, place: RankPlace, pool: MakePool) -> RanksMemory:
        """Let the other ranks make their pools, and have what all ranks share. Raises ConfigError."""
        memory = RanksMemory(self._ready.library, shape, place, pool.timeout_s)
        self._others.share(memory)
        self._others.make_pool(pool, [memory.descriptor])
        return memory

    def _wait_for_others(self) -> None:
        found = self._others.wait_until_loaded(self._progress)
        self._check_loaded(found)
        self._mapped_bytes = sum(loaded.mapped_bytes for loaded in found)

    def _check_loaded(self, found: Sequence[Loaded]) -> None:
        """Raise ConfigError if the ranks do not fit together."""
        for rank, loaded in enumerate(found, start=1):
            if loaded.kernels != self._ready.library.version:
                raise ConfigError(
                    f"rank {rank} has the kernels {loaded.kernels}, and rank 0 has {self._ready.library.version}: the program "
                    f"has changed while it was started; start it again"
                )

    def _pack(self, layers: Layers) -> tuple[object, int, int]:
        own, num_bytes, device_bytes = super()._pack(adapter_of_rank(layers, self._ready.whole, self._shards[0]))
        assert isinstance(own, PackedAdapter)
        of_others = sum(part.a.nbytes + part.b.nbytes for layer in layers for parts in layer.values() for part in parts)
        return SharedAdapter(own, layers), num_bytes + of_others, device_bytes

    def _slot_memory(self) -> SlotMemory | None:
        assert self._memory is not None  # initialize_kv_cache has made it
        return self._memory.token_ids, self._memory.block_tables

    def _model_runner(self, block_size: int, *arguments: Any) -> ModelRunner:
        tier = self._ready.native_tier(block_size, self._memory, partial(LeadingTier, self._others))
        return LeadingRunner(self._others, self._ready.whole, self._shards[1:], tier, *arguments)

    @property
    def _others(self) -> RankFollowers:
        assert self._followers is not None  # load comes before whatever needs them
        return self._followers
