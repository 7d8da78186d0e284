"""Messages between the engine and its workers, and the WorkerGroup protocol.

A worker keeps, for each slot of the persistent batch: the token ids, the block table, the sampling parameters. A row that is
new to its slot arrives in full (`NewRow`); afterwards only differences travel (`Row`). The worker appends the token it
samples to the slot's token ids itself, so the engine never sends a token back.

    token positions of one slot   0 ............ num_computed ............ num_computed + num_tokens
                                  | KV in blocks  |  run through the model in this step  |
                                                                    sampled token goes here ^   (if row.samples)

A row may end with draft tokens. The model samples a token behind the last known token and behind each draft, as if all drafts
were right. Sampled tokens up to and including the first that differs from its draft are what plain decoding would have sampled;
they are appended. The rest is rejected, and later steps overwrite its KV. The engine sends the drafts, or says how many of them
the worker's draft model is to propose.

    known tokens ... 17 | drafts 4 9 10      sampled  4 9 8 3      appended  4 9 8

Steps are collected in the order in which they were submitted. A worker that looks ahead accepts the next step while one runs: the
token that the running step samples is known to it before the engine has it. Writes to the pool happen in the order of submission,
so a block may be given to another sequence while a step in flight still writes to it for a sequence that has ended.

A model with recurrent layers keeps a state of each slot's sequence, which a row begins with (or with zeros, where nothing is
computed) and moves behind its last known token. Snapshots are states behind whole blocks of tokens; a sequence that takes a
slot gets the state behind its computed tokens by a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from msgspec import Struct

from backend.api.errors import EverbatchError
from backend.api.guide import NOT_SET_UP, Guide, Thinking
from backend.api.images import ImageInput
from backend.api.lora import LoraConfig
from backend.api.request import RequestId
from backend.api.sampling import SamplingConfig
from backend.api.stats import ImageStats
from backend.api.tensor import TensorData

SequenceId = NewType("SequenceId", int)
SlotId = NewType("SlotId", int)  # row of the persistent batch
BlockId = NewType("BlockId", int)  # index into the KV pool


class Gather(Struct, frozen=True):
    """A tensor that the client of a sequence asked for."""

    name: str  # one of the names in core/gathered.py, or another output of the model
    context_from: int | None  # first position of the prompt whose row is wanted; None: no row of the prompt is
    generation: bool  # True if the row from which each output token is sampled is wanted
    top: int = 0  # prompt_log_probs only: how many of the most likely tokens to return with each position
    columns: tuple[int, ...] = ()  # prompt_logits only: the tokens whose logits are wanted


class NewRow(Struct, frozen=True):
    """Everything a worker needs to know about a sequence that takes a slot. It replaces the former content of the slot."""

    slot: SlotId
    token_ids: list[int]  # history + prompt + output so far
    num_prompt_tokens: int  # token_ids[:n] are prompt (and history), the rest output of this request; penalties need it
    num_sampled_before: (
        int  # tokens this sequence sampled before token_ids[num_prompt_tokens]: earlier turns' share of the RNG counter
    )
    block_ids: list[BlockId]  # -1 for blocks that the sliding window has released
    sampling: SamplingConfig
    end_ids: tuple[int, ...] = ()  # masked until min_tokens outputs exist
    bad_words: list[list[int]] = []
    return_log_probs: bool = False
    top_log_probs: int = 0
    cache_namespace: str = ""
    extra_inputs: dict[str, bytes] = {}  # inputs other than tokens, for models that take them
    gather: list[Gather] = []
    prompt_embeddings: TensorData | None = None  # row i is the embedding of token id vocab_size + i
    position_ids: list[int] | None = None  # one for each token of the prompt
    guide: Guide | None = None  # the form of the output, token_ids[num_prompt_tokens:]
    thinking: Thinking | None = None  # the reasoning at its beginning, behind which the guide applies
    post_processor: str = ""  # name of a callable that changes the logits; it is called with the next two fields
    request_id: int = 0
    client_id: int | None = None
    num_beams: int = 1  # rows of the same beam search; a post-processor is called once for all of them
    adapter: str = ""  # content hash of the LoRA adapter that the row uses; empty = none
    images: list[tuple[str, int]] = []  # (digest, tokens) of each image, whose tokens have the model's id in the prompt

    @property
    def is_guided(self) -> bool:
        """True if not every token may follow the output."""
        return self.guide is not None or self.thinking is not None


class Row(Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of one step."""

    slot: SlotId
    num_computed: int  # tokens whose KV is in the blocks
    num_tokens: int  # tokens to run now: token_ids[num_computed : num_computed + num_tokens]
    samples: bool  # True if a token is sampled behind the last of them
    new_block_ids: list[BlockId] = []  # appended to the slot's block table before the step
    drafts: list[int] = []  # draft tokens, run behind the known tokens of the row
    num_guesses: int = 0  # number of draft tokens that the worker's draft model is to propose, instead of `drafts`
    saves: list[
        tuple[int, int]
    ] = []  # (tokens of the sequence, snapshot): its state behind so many tokens, to keep there

    @property
    def num_samples(self) -> int:
        """Tokens that the row samples: one behind the last known token, and one behind each draft."""
        return 1 + len(self.drafts) + self.num_guesses if self.samples else 0


class StepInput(Struct, frozen=True):
    """One step. `rows` is the order of the flat batch.

    Side effects in order: adapters are released and uploaded, blocks are swapped out, the pool grows, blocks are swapped in,
    blocks and states are copied, new rows are stored, the rows run, tokens are sampled. No step swaps both out and in.
    """

    step_id: int
    rows: list[Row]
    new_rows: list[NewRow] = []
    copies: list[
        tuple[BlockId, BlockId]
    ] = []  # (source, destination): KV of a whole block, all layers, before anything runs
    num_blocks: int = 0  # blocks that must be backed by memory from now on (never shrinks)
    swap_out: list[tuple[BlockId, int]] = []  # (block, place in host memory): KV that moves there before all else
    swap_in: list[tuple[BlockId, int]] = []  # the same pairs: KV that comes back once the pool has grown
    adapters_in: list[PreparedAdapter] = []  # to upload to the device; some may be there already
    adapters_out: list[str] = []  # content hashes of adapters to release
    state_copies: list[
        tuple[int, int]
    ] = []  # (source, destination): states of recurrent layers; all are read, then written


class SampledToken(Struct, frozen=True, array_like=True, gc=False):
    slot: SlotId
    token_id: int
    log_prob: float | None = None  # natural log, of the model's distribution before penalties and temperature
    top_log_probs: list[tuple[int, float]] = []


class GatheredRows(Struct, frozen=True, array_like=True, gc=False):
    """Rows of a gathered tensor, computed by one row of a step."""

    row: int  # index into StepInput.rows
    name: str
    is_context: bool
    position: int  # position in the sequence of the first row
    num_rows: int
    data: bytes  # float32 [num_rows, width]; core/gathered.py describes the layout of prompt_log_probs


class StepOutput(Struct, frozen=True):
    """`sampled` has one entry for each row that samples, in row order, also for rows in `failed`."""

    step_id: int
    sampled: list[SampledToken]
    gathered: list[GatheredRows] = []
    failed: list[
        tuple[int, str]
    ] = []  # rows that failed without the others: (index of the row, sentence for the client)
    debug_tensors: dict[str, TensorData] = {}  # tensors that `records.debug_tensors` names
    further: dict[
        SlotId, list[SampledToken]
    ] = {}  # for rows with accepted drafts: the tokens sampled behind each of them


class ModelInfo(Struct, frozen=True):
    """The facts about the loaded model that the engine needs."""

    name: str
    vocab_size: int
    max_seq_len: int  # tokens
    sliding_window: int | None = None  # tokens, if every layer has a window; else None
    kv_bytes_per_token: int = 0  # KV of one token in all layers, on one rank
    eos_ids: tuple[int, ...] = ()
    takes_extra_inputs: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    kernels: str = "torch"
    kv_block_size: int = 0  # tokens of a KV block, where the kernels overrule the configuration; 0: they do not
    remarks: tuple[str, ...] = ()  # sentences for the operator about how the model runs
    has_matrix_units: bool = False  # True if the CPU has AMX: prompts run several times as fast with it
    context_logits: bool = False  # True if requests may ask for the logits of their prompts
    generation_logits: bool = False  # True if requests may ask for the logits of their outputs
    additional_outputs: tuple[str, ...] = ()  # names of further tensors that requests may ask for
    output_widths: dict[str, int] = {}  # numbers in a row of each of these tensors, and of "logits"
    prompt_embedding_width: int = 0  # the hidden size, if prompts may bring embeddings and positions; else 0
    post_processors: tuple[str, ...] = ()  # names of the logits post-processors that requests may choose
    guide_refusal: str = NOT_SET_UP  # why requests with guides are refused; '': they are accepted
    lora_module_bytes: int = 0  # size of the largest projection's adapter at rank 1; 0: LoRA is off
    lora_page_bytes: int = 1  # adapters take whole pages of this size
    looks_ahead: bool = False  # True if a step may be submitted before the step ahead of it is collected
    takes_drafts: bool = False  # True if rows may have drafts
    reads_whole_texts: bool = (
        False  # True if each token attends to all of its text, so that this runs in one step, or not at all
    )
    has_head: bool = True  # False if the checkpoint is of the layers alone: then its logits mean nothing
    kv_fingerprint: str = ""  # hash of all that the bits of KV depend on besides tokens; '': it is not read or written
    kv_block_bytes: int = 0  # a block of all layers, as `read_blocks` returns it
    kv_layers: int = 0  # layers of a pool that may lie in memory which the engine gives; 0: it may not
    default_sampling: dict[str, float] = {}  # of fields that requests of the JSON wire leave out
    state_bytes: int = 0  # size of a sequence's state in all recurrent layers, on one rank; 0: there are none
    image_token_id: int = -1  # the id that stands for images in prompts; -1: the model takes none
    image_refusal: str = ""  # why it takes none, where it could otherwise
    whole_images: bool = False  # True if the tokens of an image must be computed in one step


class MemoryUse(Struct, frozen=True):
    """Memory that the workers occupy, in bytes."""

    cpu_bytes: int = 0  # resident memory of the process
    gpu_bytes: int = 0  # memory that torch's allocator holds; 0 without a device


class WorkersLost(Exception):
    """No further step can run in this process."""


class WorkerGroup(Protocol):
    """The fan-out of one step to the ranks. The engine knows the workers only through this."""

    @property
    def images(self) -> ImageEncoder | None:
        """The encoder of images; None before `load`, and for a model that takes none."""
        ...

    @property
    def guides(self) -> Guides | None:
        """The compiler of guides; None before `load`, and if ModelInfo.guide_refusal says why guides are refused."""
        ...

    def load(self) -> ModelInfo:
        """Load the weights. Raises ConfigError when the checkpoint cannot be used."""
        ...

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        """Read the weights of an adapter. Any thread may call it. Raises InvalidRequest for an adapter that cannot be used."""
        ...

    def free_memory_bytes(self) -> int:
        """Bytes that are left for the KV pool after the weights and the peak of one full step."""
        ...

    def memory_use(self) -> MemoryUse:
        """Memory that the workers occupy. Called about once a second, so it must be cheap."""
        ...

    def check(self) -> None:
        """Raise WorkersLost if a worker has ended. Called about once a second while nothing runs."""
        ...

    def initialize_kv_cache(
        self,
        max_blocks: int,
        block_size: int,
        num_blocks: int,
        layers: Sequence[memoryview] | None = None,
        num_snapshots: int = 0,
    ) -> None:
        """Prepare a pool of at most `max_blocks`, `num_blocks` of them backed by memory at once.

        `num_snapshots`: states of recurrent layers beside those of the slots, where ModelInfo.state_bytes names a size.
        `layers`: memory for `max_blocks` blocks of each layer, given only where ModelInfo.kv_layers says so. It may hold KV of
        a group with the same fingerprint, which stays.
        """
        ...

    def submit(self, step: StepInput) -> None:
        """Start one step on every rank. If the model looks ahead, one other step may be in flight; steps run in order.

        Raises on failure, as `collect` does: then all steps in flight are lost and the content of the pool is undefined.
        WorkersLost means that no further step can run.
        """
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight."""
        ...

    def read_blocks(self, block_ids: list[BlockId]) -> bytes:
        """The KV of these blocks behind all submitted steps, kv_block_bytes each. Called only where there is a kv_fingerprint."""
        ...

    def write_blocks(self, block_ids: list[BlockId], data: bytes, num_blocks: int) -> None:
        """Write what `read_blocks` of a group with the same fingerprint has returned, behind all submitted steps.

        `num_blocks`: blocks that must be backed by memory from now on.
        """
        ...

    def shutdown(self) -> None:
        """Release everything. Safe to call twice."""
        ...


@dataclass(slots=True, weakref_slot=True, eq=False)
class PreparedAdapter:
    """A LoRA adapter that the workers have read and checked, in the form in which they compute with it.

    It keeps the weights in memory as long as it is referenced, which the engine does from its host cache of adapters.
    """

    content: str  # hash of configuration and weights: two adapters of the same hash are the same
    max_rank: int
    num_bytes: int  # size of its pages on the host
    device_bytes: int  # size of its pages on the device
    weights: object  # in the form that the workers use


# Called with a request, and why its guide cannot be used; None: it can be used.
OnCompiled = Callable[[RequestId, EverbatchError | None], None]


OnEncoded = Callable[[RequestId, EverbatchError | None], None]


class ImageEncoder(Protocol):
    """The encoder of images, as the engine sees it.

    A request whose images have no features yet waits outside the queue, so that it delays no other request. Features are kept
    until the last request that uses them has ended, and longer as long as there is room.
    """

    def on_encoded(self, tell: OnEncoded) -> None:
        """`tell` is called from other threads, once for each live request whose `begin` returned False."""
        ...

    def begin(self, request_id: RequestId, images: Sequence[ImageInput], namespace: str) -> bool:
        """Encode images for a request of a namespace. Returns True if all are encoded already. Raises Overloaded where the
        features of live requests leave no room.
        """
        ...

    def end(self, request_id: RequestId) -> None:
        """Note that a request has ended. Unknown ids are ignored."""
        ...

    def stats(self) -> ImageStats: ...


class Guides(Protocol):
    """The compiler of guides, as the engine sees it.

    A request whose guide is not compiled yet waits outside the queue, so that it delays no other request. A compiled guide is
    kept until the last request that uses it has ended, also while that request is paused or evicted.
    """

    def on_compiled(self, tell: OnCompiled) -> None:
        """`tell` is called from other threads, once for each live request whose `begin` returned False."""
        ...

    def begin(self, request_id: RequestId, guide: Guide, namespace: str) -> bool:
        """Compile a guide for a request of a namespace. Returns True if it is compiled already. Raises Overloaded if too many
        guides of this namespace wait.
        """
        ...

    def notes(self, request_id: RequestId) -> tuple[str, ...]:
        """The keywords that the compiled guide of a live request does not hold, with their places."""
        ...

    def end(self, request_id: RequestId) -> None:
        """Note that a request has ended. Unknown ids are ignored."""
        ...
