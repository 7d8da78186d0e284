"""Shards: which part of a model each rank holds, as a function of the model's description (docs/design/ranks.md).

    rows of a fused projection    | q of rank 0 | q of rank 1 | k of rank 0 | k of rank 1 | v of rank 0 | v of rank 1 |
    columns of out and down       | the inputs that rank 0 computes | those that rank 1 computes |
    rows of the output head       | whole panels of 32 tokens for each rank; the last rank's end may be short |

Where there are fewer KV heads than ranks, neighbouring ranks hold the same KV head.
Of several stages each has a range of the layers:

    layers                        | stage 0, and the embedding | stage 1 | stage 2, and the output head |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from backend.api.errors import ConfigError
from backend.architectures.description import WHOLE, ModelConfig, Shard

Range = tuple[int, int]  # [first, end)
PANEL = 32  # tokens of the vocabulary that are never separated


class Cut(NamedTuple):
    """A rank's part of a weight [n, k]."""

    rows: tuple[Range, ...]  # one after the other
    columns: Range | None = None  # None: all
    has_bias: bool = True  # False: another rank adds the bias

    def within(self, first: int, count: int) -> Iterator[Range]:
        """The rows of a tensor that is stacked at `first` and has `count` rows, counted from its own first row."""
        for start, end in self.rows:
            start, end = max(start, first), min(end, first + count)
            if start < end:
                yield start - first, end - first


class WholeLinear(NamedTuple):
    """A linear layer as the checkpoint has it, and the part of it that a rank holds."""

    rows: Mapping[str, int]  # rows of each of its tensors, in the order in which they are stacked
    columns: int
    has_bias: bool
    cut: Cut


def shards_of(size: int, stages: int) -> list[Shard]:
    """The part of each rank, in the order of their numbers. size: ranks of a stage."""
    every = [Shard(rank, size, stage, stages) for stage in range(stages) for rank in range(size)]
    return sorted(every, key=lambda shard: shard.number)


def check_ranks(config: ModelConfig, size: int, stages: int = 1) -> None:
    """Raise ConfigError for a model whose layers `size` ranks cannot share, or that has fewer layers than `stages`."""
    if config.recurrence is not None and size * stages > 1:
        raise ConfigError(
            f"{size * stages} ranks are asked for, and {config.architecture} has recurrent layers, which run on one rank; use "
            f"--set workers.tensor_parallel_size=1 --set workers.pipeline_parallel_size=1"
        )
    if stages > config.num_layers:
        raise ConfigError(
            f"workers.pipeline_parallel_size is {stages}, more than the model's {config.num_layers} layers; use "
            f"{config.num_layers} or less"
        )
    objection = _objection(config, size)
    if objection:
        sizes = [str(fitting) for fitting in range(1, config.num_heads + 1) if not _objection(config, fitting)]
        raise ConfigError(f"workers.tensor_parallel_size is {size}, {objection}; use {' or '.join(sizes)}")


def _objection(config: ModelConfig, size: int) -> str:
    """Why `size` ranks cannot share the model; empty if they can."""
    if size == 1:
        return ""
    if config.latent is not None:
        return f"and {config.architecture} has latent attention, which one rank computes"
    if config.block.qk_norm == "row":
        return f"and {config.architecture} normalises all query heads of a token together, which ranks cannot"
    counts = [("attention heads", config.num_heads)]
    if not all(layer.has_experts for layer in config.layers):
        counts.append(("rows of each MLP", config.intermediate_size))
    if config.experts is not None:
        counts += ("experts", config.experts.count), ("rows of the shared expert", config.experts.shared)
    for what, count in counts:
        if count % size:
            return f"which does not divide the model's {count} {what}"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"which neither divides the model's {config.num_kv_heads} KV heads nor is a multiple of them"
    if -(-config.vocab_size // PANEL) < size:
        return f"too many for a vocabulary of {config.vocab_size} tokens"
    return ""


def of_rank(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The description of what a rank computes. config: the whole model's. `check_ranks` must have passed."""
    if shard == WHOLE:
        return config
    experts = config.experts
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=max(1, config.num_kv_heads // shard.size),
        intermediate_size=config.intermediate_size // shard.size,
        shard=shard,
        held_layers=layers_of(config, shard),
        experts=experts and replace(experts, shared=experts.shared // shard.size),
        held_experts=experts and experts_of(config, shard),
    )


def layers_of(config: ModelConfig, shard: Shard) -> Range:
    """The layers of a rank's stage. The last stage has fewer, because the output head costs as much as some layers.

    config: the whole model's.
    """
    count, stages = config.num_layers, shard.stages
    head = config.vocab_size * config.hidden_size / _weights_of_layer(config)  # in layers
    of_last = round((count + head) / stages - head)
    of_last = min(max(of_last, 1), count - stages + 1) if stages > 1 else count
    others = count - of_last
    borders = [-(-others * stage // max(1, stages - 1)) for stage in range(stages)] + [count]
    return borders[shard.stage], borders[shard.stage + 1]


def most_layers(config: ModelConfig, shard: Shard) -> int:
    """The number of layers of the stage that has most. config: the whole model's."""
    ranges = [layers_of(config, replace(shard, stage=stage)) for stage in range(shard.stages)]
    return max(end - first for first, end in ranges)


def _weights_of_layer(config: ModelConfig) -> int:
    """Weights of a layer that a token is multiplied with."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    if config.latent is not None:
        attention = config.num_heads * (config.latent.query_dim + config.latent.value_dim)
    inter, experts = config.intermediate_size, config.experts
    if experts is not None:
        inter = experts.places * experts.intermediate + experts.shared
    return config.hidden_size * (attention + (2 + config.block.gated) * inter)


def vocabulary(config: ModelConfig, shard: Shard) -> Range:
    """The tokens whose logits a rank computes."""
    if not shard.is_last:
        return 0, 0
    panels = -(-config.vocab_size // PANEL)
    first, end = (panels * rank // shard.size * PANEL for rank in (shard.rank, shard.rank + 1))
    return first, min(end, config.vocab_size)


def experts_of(config: ModelConfig, shard: Shard) -> Range:
    """The experts of each layer that a rank holds, whole. config: the whole model's."""
    return (0, 0) if config.experts is None else _share(config.experts.count, shard)


def cuts(config: ModelConfig, shard: Shard) -> dict[str, Cut]:
    """The part of each linear layer that a rank holds: qkv, out, gate_up and down, and those of a shared expert. config: the
    whole model's.
    """
    head, rank, size = config.head_dim, shard.rank, shard.size
    heads, kv, inter = config.num_heads, config.num_kv_heads, config.intermediate_size
    q = _share(heads * head, shard)
    held = max(1, kv // size)  # KV heads of a rank
    first_kv = rank * kv // size
    k = heads * head + first_kv * head
    v = k + kv * head
    width, is_first = held * head, rank == 0
    found = {
        "qkv": Cut((q, (k, k + width), (v, v + width))),
        "out": Cut(((0, config.hidden_size),), q, is_first),
    }
    shared = 0 if config.experts is None else config.experts.shared
    for kind, size_of in (("", inter), ("shared_", shared)):
        ffn = _share(size_of, shard)
        found[kind + "gate_up"] = Cut((ffn, _moved(ffn, size_of)) if config.block.gated else (ffn,))
        found[kind + "down"] = Cut(((0, config.hidden_size),), ffn, is_first)
    return found


def linears(config: ModelConfig, shard: Shard) -> dict[str, WholeLinear]:
    """The linear layers of all decoder layers, by the name of the first tensor of each. config: the whole model's."""
    found: dict[str, WholeLinear] = {}
    block, names, hidden, of = config.block, config.names.layer, config.hidden_size, cuts(config, shard)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    of_attention = (
        ("qkv", names.qkv, (q, kv, kv), hidden, block.qkv_bias),
        ("out", (names.out,), (hidden,), q, block.out_bias),
    )
    shared = 0 if config.experts is None else config.experts.shared
    sizes = (
        ("", names.gate_up, names.down, config.intermediate_size),
        ("shared_", names.shared_gate_up, names.shared_down, shared),
    )
    mlp, of_shared = (
        (
            (kind + "gate_up", gate_up, (inter, inter) if block.gated else (inter,), hidden, block.mlp_bias),
            (kind + "down", (down,), (hidden,), inter, block.mlp_bias),
        )
        for kind, gate_up, down, inter in sizes
    )
    for index, settings in enumerate(config.layers):
        own = mlp if not settings.has_experts else of_shared if shared else ()
        for kind, stored, rows, columns, has_bias in (*of_attention, *own):
            by_name = stacked_rows(f"{config.names.layers}{index}.", stored, rows)
            found[next(iter(by_name))] = WholeLinear(by_name, columns, has_bias, of[kind])
    return found


def sinks(config: ModelConfig, shard: Shard) -> Range:
    """The heads of a rank, and so its attention sinks. config: the whole model's."""
    return _share(config.num_heads, shard)


def stacked_rows(prefix: str, names: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, int]:
    """The rows of each tensor of a projection; one name means that the checkpoint stores its parts in one tensor."""
    return {prefix + names[0]: sum(rows)} if len(names) == 1 else dict(zip((prefix + n for n in names), rows))


def _share(count: int, shard: Shard) -> Range:
    return count * shard.rank // shard.size, count * (shard.rank + 1) // shard.size


def _moved(part: Range, by: int) -> Range:
    return part[0] + by, part[1] + by
