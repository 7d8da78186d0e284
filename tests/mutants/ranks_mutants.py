"""Planted bugs of ranks and stages: a rank's part of the model, the messages of rank 0, and how a lost rank is noticed."""

from __future__ import annotations

from backend.api.processes import launched
from backend.architectures import description, shards
from backend.engine import steps_in_flight
from backend.models import cut, linears, parts
from backend.models import decoder as model_decoder
from backend.worker import (
    joined_group,
    leading,
    loaded_model,
    micro_batches,
    native_tier,
    rank_messages,
    rank_process,
)
from kernels.cpu import decoder, ranks
from tests.mutants.changes import Plant, change, change_everywhere

SHARDS = ["tests/ranks/test_shards.py"]
STAGES = ["tests/ranks/test_stages.py"]
BITS = "tests/ranks/test_pipeline.py::"
FEATURES = "tests/ranks/test_pipeline_features.py::"
CUT = ["tests/ranks/test_cut.py"]
TOKENS = "tests/ranks/test_tokens.py::test_ranks_compute_the_tokens_of_one"
SAME = "tests/ranks/test_invariance.py::"
MEETINGS = "tests/ranks/test_meetings.py::"
JOINED = "tests/ranks/test_joined.py::"
LAUNCHED = ["tests/ranks/test_launched.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "kv_is_swapped_out_once_its_block_is_used_anew": (
        change(
            rank_process.RankWorker,
            "prepare",
            ("    self._storage.swap_out(told.swap_out)\n", ""),
            ("copy_blocks(told.copies)", "copy_blocks(told.copies); self._storage.swap_out(told.swap_out)"),
        ),
        ["tests/ranks/test_unequal_ranks.py"],
    ),
    "all_ranks_hold_the_first_kv_head": (
        change_everywhere(shards.cuts, ("first_kv = rank * kv // size", "first_kv = 0")),
        SHARDS,
    ),
    "the_bias_is_added_by_nobody": (
        change(parts.CheckpointParts, "linear", ("whole.has_bias", "False")),
        [TOKENS + "[gpt-neox-2]"],
    ),
    "a_gate_meets_another_up": (
        change_everywhere(shards.cuts, ("_moved(ffn, size_of)", "_moved(ffn, size_of - ffn[0])")),
        SHARDS,
    ),
    "kv_heads_are_not_looked_at": (
        change_everywhere(shards._objection, ("size % config.num_kv_heads", "False")),
        SHARDS,
    ),
    "groups_are_cut_through": (
        change_everywhere(cut._groups, ("first % group or end % group", "False")),
        CUT,
    ),
    "an_adapter_s_rows_stay_where_they_were": (
        change_everywhere(cut._of_parts, ("first + begin - start", "begin")),
        CUT,
    ),
    "weights_are_rounded_before_they_are_cut": (
        change(
            linears.LinearBuilder, "_quantize", ("stored[start:stop, first:end]", "stored[start:stop, : end - first]")
        ),
        ["tests/ranks/test_tokens.py::test_rounded_weights_and_activations_stay_near_those_of_one_rank"],
    ),
    "other_ranks_copy_no_blocks": (
        change(leading.LeadingRunner, "prepare", ("*(step.copies, step.swap_out", "*([], step.swap_out")),
        [SAME + "test_several_outputs_of_one_prompt_are_those_of_one_rank"],
    ),
    "other_ranks_have_no_adapters": (
        change(
            leading.LeadingRunner,
            "_part_of",
            ("adapter.weights.whole, self", "[{} for _ in adapter.weights.whole], self"),
        ),
        [SAME + "test_an_adapter_is_cut_as_the_layers_that_it_adds_to"],
    ),
    "all_ranks_tell_of_the_same_tokens": (
        change(rank_process.RankWorker, "make_pool", ("vocabulary(self._whole, self.shard)[0]", "0")),
        [TOKENS + "[llama-2]"],
    ),
    "a_lost_rank_is_overlooked": (
        change(decoder.NativeDecoder, "step", ("bad < -1", "False")),
        [MEETINGS + "test_a_rank_that_does_not_come_is_lost_when_its_time_is_over"],
    ),
    "every_stage_has_the_windows_of_the_first_layers": (
        change(description.ModelConfig, "held_settings", ("self.held.start : self.held.stop", ": len(self.held)")),
        [BITS + "test_stages_compute_the_bits_of_one_rank[gemma 3]"],
    ),
    "every_stage_has_the_ropes_of_the_first_layers": (
        change_everywhere(
            model_decoder.assemble, ("in config.held_settings]", "in config.layers[: len(config.held)]]")
        ),
        [BITS + "test_stages_compute_the_bits_of_one_rank[gemma 3]"],
    ),
    "every_stage_has_the_first_layers_of_an_adapter": (
        change_everywhere(cut.adapter_of_rank, ("layers[slice(*layers_of(config, shard))]", "layers")),
        [FEATURES + "test_an_adapter_s_layers_go_to_their_stages"],
    ),
    "pools_are_sized_by_the_stage_of_rank_0": (
        change(loaded_model.LoadedModel, "_most_layers", ("most_layers(self.whole, shard)", "len(self.config.held)")),
        [MEETINGS + "test_stages_have_pools_of_the_size_of_the_largest"],
    ),
    "a_micro_batch_reads_another_s_hidden_states": (
        change(native_tier.NativeTier, "_step_of_part", ("states[tokens] for", "states for")),
        [BITS + "test_stages_compute_the_bits_of_one_rank[llama]"],
    ),
    "logits_are_those_of_the_last_part": (
        change_everywhere(
            micro_batches._within, ("np.maximum(kept_to - logits_from, 0)", "np.minimum(part[:, 3], part[:, 2])")
        ),
        STAGES,
    ),
    "given_positions_are_those_of_the_first_part": (
        change_everywhere(native_tier._part, ("array[tokens]", "array[: tokens.stop - tokens.start]")),
        [FEATURES + "test_prompts_that_bring_embeddings_and_positions"],
    ),
    "steps_in_flight_have_one_number": (
        change(steps_in_flight.StepsInFlight, "advance", ("flight.step.step_id % 2", "0")),
        ["tests/trtllm/test_gpt_manager.py::test_with_overlap_two_micro_batches_are_in_flight_and_alternate"],
    ),
    "the_end_of_a_joined_rank_is_not_looked_for": (
        change(joined_group.JoinedFollower, "_is_closed", ("bool(poll.poll(timeout_s * 1000)) and", "False and")),
        [JOINED + "test_a_rank_that_has_ended_is_found_without_a_step"],
    ),
    "joined_ranks_get_no_new_blocks": (
        change(
            rank_messages.SlotContents,
            "put",
            ("-(-(first + count) // self.block_size)", "(first + count) // self.block_size"),
        ),
        [JOINED + "test_bits_do_not_depend_on_eviction_chunks_or_company"],
    ),
    "torchrun_s_own_port_is_used": (
        change_everywhere(launched.launched, ('== "True"', '== "true"')),
        LAUNCHED,
    ),
    "a_rank_that_ends_blames_the_others": (
        change(ranks.RanksMemory, "disconnect", ("self.lose(", "int(")),
        ["tests/ranks/test_links.py::test_a_rank_that_disconnects_names_itself"],
    ),
}
