"""What one row's next token must be, written slowly in Python integers and numpy, without torch and without batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from backend.api.sampling import SamplingConfig

MASK = (1 << 64) - 1


@dataclass
class Case:
    """One row: the tokens known so far (prompt first), its parameters, and the model's logits."""

    tokens: list[int]
    num_prompt: int
    logits: np.ndarray  # [vocab] float32
    config: SamplingConfig
    end_ids: tuple[int, ...] = ()
    bad_words: list[list[int]] = field(default_factory=list)
    num_sampled_before: int = 0

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt


def splitmix_finaliser(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, counter: int) -> float:
    gamma = 0x9E3779B97F4A7C15
    word = splitmix_finaliser((splitmix_finaliser((seed + gamma) & MASK) + (counter + 1) * gamma) & MASK)
    return ((word >> 12) + 0.5) / 2**52


def changed_logits(case: Case) -> np.ndarray:
    """Logits after bad words, bias, min_tokens and penalties."""
    logits = case.logits.astype(np.float32).copy()
    config = case.config
    for token, bias in (config.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    if case.num_outputs < (config.min_tokens or 0):
        logits[list(case.end_ids)] = -np.inf
    for word in case.bad_words:
        head = word[:-1]
        if len(head) <= len(case.tokens) and case.tokens[len(case.tokens) - len(head) :] == head:
            logits[word[-1]] = -np.inf
    size = config.no_repeat_ngram_size or 0
    for start in range(len(case.tokens) - size + 1) if size else ():
        if case.tokens[start : start + size - 1] == case.tokens[len(case.tokens) - size + 1 :]:
            logits[case.tokens[start + size - 1]] = -np.inf
    repetition = np.float32(config.repetition_penalty if config.repetition_penalty is not None else 1.0)
    for token in set(case.tokens):
        value = logits[token]
        logits[token] = value / repetition if value > 0 else value * repetition
    output = case.tokens[case.num_prompt :]
    for token in set(output):
        frequency = np.float32(config.frequency_penalty or 0.0) * np.float32(output.count(token))
        logits[token] = (logits[token] - frequency) - np.float32(config.presence_penalty or 0.0)
    return logits


def kept_tokens(probabilities: list[float], config: SamplingConfig) -> list[int]:
    """Tokens that top-k, top-p and min-p leave, most likely first, equal ones by id."""
    ranked = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    if config.top_k:
        ranked = ranked[: config.top_k]
    mass = math.fsum(probabilities[token] for token in ranked)
    kept: list[int] = []
    before = 0.0
    for token in ranked:
        if kept and before >= (config.top_p if config.top_p is not None else 1.0) * mass:
            break
        kept.append(token)
        before += probabilities[token]
    least = (config.min_p or 0.0) * probabilities[ranked[0]]
    return [token for token in kept if probabilities[token] >= least]


def top_p_now(case: Case) -> float | None:
    """top_p of the next token, followed token by token as TensorRT-LLM does."""
    config, now = case.config, case.config.top_p
    if not config.decays_top_p:
        return now
    now = 1.0 if now is None else now
    for token in case.tokens[case.num_prompt :]:
        decay = 1.0 if config.top_p_decay is None else config.top_p_decay
        now = max(now * decay, 1e-6 if config.top_p_min is None else config.top_p_min)
        if token == config.top_p_reset_ids:
            now = 1.0 if config.top_p is None else config.top_p
    return now


def next_token(case: Case) -> int:
    """The token the sampler must return."""
    logits = changed_logits(case)
    config = replace(case.config, top_p=top_p_now(case))
    if case.config.is_greedy:
        return int(np.argmax(logits))
    probabilities = distribution(logits, config)
    filtered = bool(config.top_k) or (config.top_p or 1.0) < 1.0 or bool(config.min_p) or config.decays_top_p
    order = kept_tokens(probabilities, config) if filtered else range(len(logits))
    target = uniform(config.seed or 0, case.num_sampled_before + case.num_outputs)
    target *= math.fsum(probabilities[token] for token in order)
    running = 0.0
    for token in order:
        running += probabilities[token]
        if running > target:
            return token
    raise AssertionError("the reference ran off the end of the distribution")


def distribution(logits: np.ndarray, config: SamplingConfig) -> list[float]:
    temperature = 1.0 if config.temperature is None else config.temperature
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled)
    return (weights / weights.sum()).tolist()
