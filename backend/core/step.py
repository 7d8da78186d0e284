"""Messages between the engine and its workers, and the WorkerGroup protocol.

A worker keeps, for each slot of the persistent batch: the token ids, the block table, the sampling parameters. A row that is
new to its slot arrives in full (`NewRow`); afterwards only differences travel (`Row`). The worker appends the token it
samples to the slot's token ids itself, so the engine never sends a token back.

    token positions of one slot   0 ............ num_computed ............ num_computed + num_tokens
                                  | KV in blocks  |  run through the model in this step  |
                                                                    sampled token goes here ^   (if row.samples)

A row may end with drafts: guesses at the tokens that follow the known ones. A token is sampled behind the last known one and
behind each draft, as if all drafts were right. Those behind right ones are what the slot would have sampled one by one; they
are appended, and the rest is forgotten: its KV is overwritten by whoever comes to these positions. The engine sends the drafts,
or how many of them the worker's own draft model is to make.

    known tokens ... 17 | drafts 4 9 10      sampled  4 9 8 3      appended  4 9 8

Steps are submitted and collected in the same order. A worker that looks ahead takes the next step while one runs: it knows the
token that the running one samples, though the engine does not yet. Effects on the pool happen in the order of submission, so a
block may be given to another sequence while a step in flight still writes for one that has ended.
"""

from __future__ import annotations

from typing import NewType, Protocol

from msgspec import Struct

from backend.api.guide import NOT_SET_UP, Guide
from backend.api.lora import LoraConfig
from backend.api.sampling import SamplingConfig
from backend.api.tensor import TensorData
from backend.core.adapter import PreparedAdapter
from backend.core.guides import Guides

SequenceId = NewType("SequenceId", int)
SlotId = NewType("SlotId", int)  # row of the persistent batch
BlockId = NewType("BlockId", int)  # index into the KV pool


class Gather(Struct, frozen=True):
    """A tensor that a sequence's client wants."""

    name: str  # "logits", "prompt_log_probs", or another output that the model marks
    context_from: int | None  # first position of the prompt whose row is wanted; None = no such rows
    generation: bool  # the row behind each sampled token is wanted
    top: int = 0  # of prompt_log_probs: how many of the most likely tokens are wanted besides


class NewRow(Struct, frozen=True):
    """Everything a worker must know of a sequence that takes a slot. Replaces whatever the slot held before."""

    slot: SlotId
    token_ids: list[int]  # history + prompt + output so far
    num_prompt_tokens: int  # token_ids[:n] are prompt (and history), the rest output of this request; penalties need it
    num_sampled_before: (
        int  # tokens this sequence sampled before token_ids[num_prompt_tokens]: earlier turns' share of the RNG counter
    )
    block_ids: list[BlockId]  # -1 where the sliding window has let a block go
    sampling: SamplingConfig
    end_ids: tuple[int, ...] = ()  # masked until min_tokens outputs exist
    bad_words: list[list[int]] = []
    return_log_probs: bool = False
    top_log_probs: int = 0
    cache_namespace: str = ""
    extra_inputs: dict[str, bytes] = {}  # besides tokens, for models that take them
    gather: list[Gather] = []
    prompt_embeddings: TensorData | None = None  # for token ids from vocab_size on
    position_ids: list[int] | None = None  # of the prompt's tokens
    guide: Guide | None = None  # the form of the output, token_ids[num_prompt_tokens:]
    post_processor: str = ""  # name of a callable that changes the logits; it is told the next two
    request_id: int = 0
    client_id: int | None = None
    adapter: str = ""  # content of the LoRA adapter it runs with; empty = none


class Row(Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of one step."""

    slot: SlotId
    num_computed: int  # tokens whose KV is in the blocks
    num_tokens: int  # tokens to run now: token_ids[num_computed : num_computed + num_tokens]
    samples: bool  # the last of them yields a token
    new_block_ids: list[BlockId] = []  # appended to the slot's block table before the step
    drafts: list[int] = []  # the last tokens of the row are these guesses, which the slot does not know
    num_guesses: int = 0  # instead of drafts: so many of them, which the worker's draft model is to make

    @property
    def num_samples(self) -> int:
        """How many of its last tokens yield a token."""
        return 1 + len(self.drafts) + self.num_guesses if self.samples else 0


class StepInput(Struct, frozen=True):
    """One step. `rows` is the order of the flat batch.

    Side effects in order: adapters go and come, grow, copy, take in new rows, run, sample.
    """

    step_id: int
    rows: list[Row]
    new_rows: list[NewRow] = []
    copies: list[
        tuple[BlockId, BlockId]
    ] = []  # (source, destination): KV of a whole block, all layers, before anything runs
    num_blocks: int = 0  # blocks that must be backed by memory from now on (never shrinks)
    adapters_in: list[PreparedAdapter] = []  # to the device, where some may be already
    adapters_out: list[str] = []  # contents that no sequence has any more


class SampledToken(Struct, frozen=True, array_like=True, gc=False):
    slot: SlotId
    token_id: int
    log_prob: float | None = None  # natural log, of the model's distribution before penalties and temperature
    top_log_probs: list[tuple[int, float]] = []


class GatheredRows(Struct, frozen=True, array_like=True, gc=False):
    """Rows of a tensor that one row of a step has computed."""

    row: int  # index into StepInput.rows
    name: str
    is_context: bool
    position: int  # of the first one
    num_rows: int
    data: bytes  # float32 [num_rows, width]; of prompt_log_probs see core/gathered.py


class StepOutput(Struct, frozen=True):
    """`sampled` has one entry for each row with `samples`, in row order, those in `failed` included."""

    step_id: int
    sampled: list[SampledToken]
    gathered: list[GatheredRows] = []
    failed: list[tuple[int, str]] = []  # (index of the row, sentence for its client): rows that failed alone
    debug_tensors: dict[str, TensorData] = {}  # those of the step that the configuration asks for
    further: dict[SlotId, list[SampledToken]] = {}  # of rows with right drafts: what was sampled behind each of these


class ModelInfo(Struct, frozen=True):
    """What the engine must know of the loaded model."""

    name: str
    vocab_size: int
    max_seq_len: int  # tokens
    sliding_window: int | None = None  # tokens, when every layer has one; else None
    kv_bytes_per_token: int = 0  # of all layers, on one rank
    eos_ids: tuple[int, ...] = ()
    takes_extra_inputs: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    kernels: str = "torch"
    has_matrix_units: bool = False  # of a CPU: prompts run several times as fast as without
    context_logits: bool = False  # whether requests may ask for them
    generation_logits: bool = False
    additional_outputs: tuple[str, ...] = ()  # names of what requests may ask for besides
    output_widths: dict[str, int] = {}  # numbers in a row of each of these tensors, and of "logits"
    prompt_embedding_width: int = 0  # the hidden size, if prompts may bring embeddings and positions
    post_processors: tuple[str, ...] = ()  # names of the callables that requests may have their logits changed by
    guide_refusal: str = NOT_SET_UP  # why requests with guides are refused; '' = they are not
    lora_module_bytes: int = 0  # of the largest projection's adapter at the highest rank; 0: no adapters are taken
    looks_ahead: bool = False  # a step may be submitted before the one ahead of it is collected
    takes_drafts: bool = False  # rows may have drafts


class MemoryUse(Struct, frozen=True):
    """What the workers occupy now, in bytes."""

    cpu_bytes: int = 0  # resident memory of the process
    gpu_bytes: int = 0  # of torch's allocator; 0 without a device


class WorkersLost(Exception):
    """No step can ever run again in this process."""


class WorkerGroup(Protocol):
    """The fan-out of one step to the ranks. The engine knows the workers only through this."""

    @property
    def guides(self) -> Guides | None:
        """Who compiles guides; None before `load`, and where ModelInfo.guide_refusal says why not."""
        ...

    def load(self) -> ModelInfo:
        """Load the weights. Raises ConfigError when the checkpoint cannot be used."""
        ...

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        """Read an adapter that brings its weights. For any thread. Raises InvalidRequest for one that cannot be used."""
        ...

    def free_memory_bytes(self) -> int:
        """Memory the KV pool may be cut from, after weights and the peak of one full step."""
        ...

    def memory_use(self) -> MemoryUse:
        """What this takes of the machine. Asked about once a second, and cheap."""
        ...

    def initialize_kv_cache(self, max_blocks: int, block_size: int, num_blocks: int) -> None:
        """Prepare a pool of at most `max_blocks`, `num_blocks` of them backed by memory at once."""
        ...

    def submit(self, step: StepInput) -> None:
        """Begin one step on every rank. Where the model looks ahead, one other may be in flight; steps run in their order.

        Raises on failure, like `collect`: all steps in flight are lost then, and the pool's content is undefined. WorkersLost
        says that there is no use in going on.
        """
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight."""
        ...

    def shutdown(self) -> None:
        """Release everything. Safe to call twice."""
        ...
