"""Planted bugs of ranks and stages: a rank's part of the model, the messages of rank 0, and how a lost rank is noticed."""

from __future__ import annotations

from backend.api import foreign
from backend.api.processes import launched
from backend.architectures import description, shards
from backend.engine import steps_in_flight
from backend.models import cut, linears, parts
from backend.models import decoder as model_decoder
from backend.worker import (
    joined_group,
    joining,
    leading,
    loaded_model,
    micro_batches,
    native_tier,
    rank_messages,
    rank_process,
    ranked_group,
)
from backend.worker.rank_followers import RankFollowers
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
REFUSALS = ["tests/ranks/test_refusals.py"]
JOINED = "tests/ranks/test_joined.py::"
JOINING = "tests/ranks/test_joining.py::"
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
    "every_rank_adds_the_bias": (
        change_everywhere(shards.cuts, ("is_first = rank == 0", "is_first = True")),
        SHARDS,
    ),
    "the_bias_is_added_by_nobody": (
        change(parts.CheckpointParts, "linear", ("whole.has_bias", "False")),
        [TOKENS + "[gpt-neox-2]"],
    ),
    "a_gate_meets_another_up": (
        change_everywhere(shards.cuts, ("_moved(ffn, inter)", "_moved(ffn, inter - ffn[0])")),
        SHARDS,
    ),
    "the_vocabulary_ends_in_a_whole_panel": (
        change_everywhere(shards.vocabulary, ("min(end, config.vocab_size)", "end")),
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
    "other_ranks_turn_by_their_own_positions": (
        change(rank_messages.RunRows, "native", ("self.positions is None", "True")),
        [SAME + "test_prompts_that_bring_embeddings_and_positions"],
    ),
    "all_ranks_tell_of_the_same_tokens": (
        change(rank_process.RankWorker, "make_pool", ("vocabulary(self._whole, self.shard)[0]", "0")),
        [TOKENS + "[llama-2]"],
    ),
    "nobody_says_that_a_rank_has_ended": (
        change(RankFollowers, "_on_end", ("self._memory.lose(rank)", "pass")),
        [MEETINGS + "test_a_rank_that_fails_within_a_step_ends_it_at_once"],
    ),
    "a_lost_rank_is_overlooked": (
        change(decoder.NativeDecoder, "step", ("bad < -1", "False")),
        [MEETINGS + "test_a_rank_that_does_not_come_is_lost_when_its_time_is_over"],
    ),
    "an_idle_engine_does_not_look_for_its_ranks": (
        change(ranked_group.RankedWorkerGroup, "check", ("self._others.check()", "pass")),
        [MEETINGS + "test_a_rank_that_has_ended_is_found_without_a_step"],
    ),
    "every_rank_takes_all_memory": (
        change(ranked_group.RankedWorkerGroup, "free_memory_bytes", ("// len(self._shards)", "")),
        [MEETINGS + "test_ranks_share_threads_and_memory"],
    ),
    "the_last_stage_s_head_costs_nothing": (
        change_everywhere(shards.layers_of, ("- head)", ")")),
        STAGES,
    ),
    "rank_0_has_the_first_stage": (
        change(description.Shard, "number", ("self.stages - 1 - self.stage", "self.stage")),
        STAGES,
    ),
    "blocks_that_all_windows_have_left_are_looked_for": (
        change(native_tier.NativeTier, "__init__", ("config.sliding_window or 0", "0")),
        ["tests/native/test_bad_rows.py"],
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
    "a_cut_row_begins_anew": (
        change_everywhere(micro_batches._within, ("part[:, 1] += (kept_from - starts).astype(np.int32)", "pass")),
        STAGES,
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
    "rows_that_cannot_run_are_told": (
        change(leading.LeadingTier, "step", ("self.check(call)", "pass")),
        [MEETINGS + "test_rows_that_cannot_run_are_told_to_nobody"],
    ),
    "all_ranks_count_as_those_of_one_stage": (
        change_everywhere(foreign.ranks_of_stage, ("ranks.value // stages", "ranks.value")),
        ["tests/serving/test_upstream_parameters.py::test_participants_are_the_ranks_of_all_stages"],
    ),
    "steps_in_flight_have_one_number": (
        change(steps_in_flight.StepsInFlight, "advance", ("flight.step.step_id % 2", "0")),
        ["tests/trtllm/test_gpt_manager.py::test_with_overlap_two_micro_batches_are_in_flight_and_alternate"],
    ),
    "hosted_models_are_let_in": (
        change(
            ranked_group.RankedWorkerGroup,
            "_open",
            ("if not isinstance(checkpoint, loader.CheckpointReader)", "if False"),
        ),
        REFUSALS,
    ),
    "a_rank_of_another_program_joins": (
        change_everywhere(joining._check, ("join.program != program_version()", "False")),
        [JOINING + "test_ranks_of_another_program_or_world_are_refused_and_told"],
    ),
    "a_refused_rank_is_not_told_why": (
        change_everywhere(joining._check, ("send(last.socket, Refused(objection))", "pass")),
        [JOINING + "test_ranks_of_another_program_or_world_are_refused_and_told"],
    ),
    "ranks_are_numbered_as_they_come": (
        change_everywhere(joining._in_order, ("if each.join.rank is not None}", "if False}")),
        [JOINING + "test_ranks_have_the_numbers_that_they_were_given"],
    ),
    "links_of_other_groups_are_taken": (
        change_everywhere(joining.accept_links, ("message.group == group and ", "")),
        [JOINING + "test_links_of_another_group_are_ended"],
    ),
    "joined_ranks_may_have_another_checkpoint": (
        change(joined_group.JoinedWorkerGroup, "_check_loaded", ("loaded.content != own", "False")),
        [JOINING + "test_another_checkpoint_on_another_machine_is_refused"],
    ),
    "the_fullest_machine_is_not_looked_at": (
        change(joined_group.JoinedWorkerGroup, "free_memory_bytes", ("min(shares)", "max(shares)")),
        [JOINING + "test_free_memory_is_that_of_the_fullest_machine"],
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
    "joined_ranks_run_the_ids_of_the_first_row": (
        change(rank_messages.SlotContents, "put", ("at_id + count,", "at_id,")),
        [JOINED + "test_all_ranks_run_the_same_rows_and_ids_in_every_step"],
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
