"""The part of a step that goes to the workers: a row for each running sequence, the whole state of those new in a slot."""

from __future__ import annotations

import msgspec

from backend.api.images import ImageInput, with_model_ids
from backend.api.sampling import SamplingConfig
from backend.core.sequence import BeamSequence, Sequence
from backend.core.step import BlockId, NewRow, Row, SequenceId
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import TableChange
from backend.kvcache.states import StatePool
from backend.scheduler.drafting import NO_DRAFT
from backend.scheduler.plan import StepPlan


def take_rows(plan: StepPlan, changes: dict[SequenceId, TableChange], states: StatePool | None = None) -> list[Row]:
    """Make the rows of a step and count their tokens as in flight. Removes from `changes` what the rows contain.

    `states`: of a model with recurrent layers.
    """
    rows = []
    for seq in plan.generation:
        new_blocks = _take_new_blocks(seq, changes) if changes else []
        assert seq.slot is not None  # it runs
        draft = plan.drafts.get(seq.seq_id, NO_DRAFT)
        start, num_tokens = seq.num_computed_tokens + seq.num_inflight_tokens, 1 + draft.num_tokens
        saves = [] if states is None else states.saves(seq, start, 1)
        rows.append(Row(seq.slot, start, num_tokens, True, new_blocks, draft.token_ids, draft.num_guesses, saves))
        seq.num_inflight_tokens += num_tokens
        seq.num_inflight_samples += 1
        seq.num_inflight_drafts = draft.num_tokens
    for seq, num_tokens in plan.context:
        start = seq.num_computed_tokens + seq.num_inflight_tokens
        seq.num_inflight_tokens += num_tokens
        samples = seq.num_uncomputed_tokens == 0 and seq.max_output_tokens > 0
        seq.num_inflight_samples += samples
        assert seq.slot is not None  # it runs
        saves = [] if states is None else states.saves(seq, start, num_tokens)
        rows.append(Row(seq.slot, start, num_tokens, samples, _take_new_blocks(seq, changes), saves=saves))
    return rows


def _take_new_blocks(seq: Sequence, changes: dict[SequenceId, TableChange]) -> list[BlockId]:
    """Take the blocks appended to a table that the worker has; a table that is new to it stays in `changes`."""
    change = changes.get(seq.seq_id)
    if change is None or change.is_new:
        return []
    del changes[seq.seq_id]
    return change.new_block_ids


def new_row(seq: Sequence, kv: KVCacheManager) -> NewRow:
    request = seq.request
    assert seq.slot is not None  # it runs
    if isinstance(seq, BeamSequence):
        return _new_beam_row(seq, kv)
    return NewRow(
        slot=seq.slot,
        token_ids=with_model_ids(seq.token_ids, seq.request.images),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_sampled_before=seq.num_sampled_before,
        block_ids=kv.block_ids(seq),
        sampling=msgspec.structs.replace(request.sampling_config, seed=seq.seed),
        end_ids=request.end_ids,
        bad_words=request.bad_words,
        return_log_probs=request.output_config.return_log_probs,
        top_log_probs=request.output_config.top_log_probs,
        cache_namespace=seq.namespace,
        extra_inputs=request.extra_inputs,
        gather=[] if seq.gathered is None else seq.gathered.asked(),
        prompt_embeddings=request.prompt_embeddings,
        position_ids=request.position_ids,
        guide=request.guide,
        thinking=request.thinking,
        post_processor=request.logits_post_processor,
        request_id=seq.request_id,
        client_id=request.client_id,
        adapter=seq.adapter,
        images=_images(seq.request.images),
    )


def _new_beam_row(seq: BeamSequence, kv: KVCacheManager) -> NewRow:
    """A row of a beam search, which returns candidates. It decodes greedily, so that its own token is usually the best one."""
    assert seq.slot is not None  # it runs
    return NewRow(
        slot=seq.slot,
        token_ids=with_model_ids(seq.token_ids, seq.request.images),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_sampled_before=0,
        block_ids=kv.block_ids(seq),
        sampling=SamplingConfig(),
        end_ids=seq.request.end_ids if seq.request.guide or seq.request.thinking else (),
        top_log_probs=seq.search.num_candidates,
        guide=seq.request.guide,
        thinking=seq.request.thinking,
        cache_namespace=seq.namespace,
        gather=[] if seq.gathered is None else seq.gathered.asked(),
        post_processor=seq.request.logits_post_processor,
        request_id=seq.request_id,
        client_id=seq.request.client_id,
        num_beams=seq.beam_width,
        extra_inputs=seq.request.extra_inputs,
        prompt_embeddings=seq.request.prompt_embeddings,
        position_ids=seq.request.position_ids,
        adapter=seq.adapter,
        images=_images(seq.request.images),
    )


def _images(images: tuple[ImageInput, ...]) -> list[tuple[str, int]]:
    return [(image.digest, image.num_tokens) for image in images]
