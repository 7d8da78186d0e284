"""Requests that an earlier engine has begun: their sequences get the output that clients have had, as if they had been paused.

Everything else follows from the token ids, as it does after an eviction: KV, penalties, stop words, the place in a guide and in
the random stream. docs/replay.md has the contract, field by field.
"""

from __future__ import annotations

import math

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.limits import check_outputs_so_far
from backend.api.request import Request
from backend.core.gathered import wanted
from backend.core.messages import Delivered, Resume
from backend.core.sequence import Sequence

MAX_TURN_CHARACTERS = 64


def check_resume(resume: Resume, request: Request, vocab_size: int, max_seq_len: int) -> None:
    """Raise InvalidRequest, or Unsupported, unless a request may go on so. The request itself must have been checked."""
    if len(resume.turn) > MAX_TURN_CHARACTERS or (resume.turn and request.session is None):
        raise InvalidRequest(
            f"resume.turn has {len(resume.turn)} characters, at most {MAX_TURN_CHARACTERS} name a turn of a session"
        )
    if resume.trial_tokens is not None and resume.trial_tokens < 0:
        raise InvalidRequest(f"resume.trial_tokens is {resume.trial_tokens}, 0 or more is a number of tokens")
    if not resume.delivered:
        return
    if not goes_on(request):
        raise Unsupported(
            "resume: this request cannot go on from its middle, because it does not stream, or asks for beams, logits, hidden "
            "states or log-probabilities of the prompt; leave resume out, and it begins anew"
        )
    check_outputs_so_far([each.token_ids for each in resume.delivered], request, vocab_size, max_seq_len)
    if all(each.has_ended for each in resume.delivered):
        raise InvalidRequest("resume says of every sequence that it has ended; the answer is complete")
    if not all(math.isfinite(each.cum_log_prob) for each in resume.delivered):
        raise InvalidRequest("resume has a log-probability that is no finite number; send those that came")


def check_room(resume: Resume | None, max_output: int) -> None:
    """Raise InvalidRequest where a sequence that has not ended has had all of its `max_output` tokens."""
    for each in () if resume is None else resume.delivered:
        if len(each.token_ids) >= max_output and not each.has_ended and each.token_ids:
            raise InvalidRequest(
                f"resume has {len(each.token_ids)} output tokens of a sequence that goes on, and it ends with {max_output}; mark "
                f"it as ended"
            )


def goes_on(request: Request) -> bool:
    """True if a request can go on from its middle. Others begin anew, and their client drops what it has had."""
    output = request.output_config
    shows_all = request.return_all_generated_tokens and (output.return_log_probs or output.top_log_probs)
    return (
        request.streaming
        and request.sampling_config.beam_width == 1
        and not (request.context_only or shows_all or wanted(request))
    )


def take_up(sequences: list[Sequence], resume: Resume | None) -> list[Sequence]:
    """Give the new sequences of a request what clients have had of them. Returns those that have not ended."""
    if resume is None:
        return sequences
    for seq in sequences:  # times are those that the client has seen, whatever engine ran it
        seq.arrival_ns = resume.arrival_ns or seq.arrival_ns
    if not resume.delivered:
        return sequences
    for seq, delivered in zip(sequences, resume.delivered, strict=True):
        _take_up(seq, delivered, resume.first_token_ns)
    going_on = [seq for seq, delivered in zip(sequences, resume.delivered, strict=True) if not delivered.has_ended]
    group = sequences[0].group
    if group is not None:
        group.members = list(going_on)
    return going_on


def _take_up(seq: Sequence, delivered: Delivered, first_token_ns: int) -> None:
    if not delivered.token_ids:
        return
    seq.token_ids += delivered.token_ids
    seq.num_published_tokens = len(seq.token_ids)
    seq.cum_log_prob = delivered.cum_log_prob
    output = seq.request.output_config
    if output.return_log_probs:  # never shown again
        seq.log_probs = [0.0] * len(delivered.token_ids)
    if output.top_log_probs:
        seq.top_log_probs = [[] for _ in delivered.token_ids]
    seq.first_token_ns, seq.first_scheduled_ns = first_token_ns or seq.arrival_ns, seq.arrival_ns
