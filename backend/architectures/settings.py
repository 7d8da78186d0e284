"""Settings: the content of a config.json. A key is read by the family, is harmless, or is refused: none is ignored in silence.

The rule for a key that the family does not read:
1. It is accepted if it stands in HARMLESS: nothing that the model computes follows from it, or what follows from it shows in the
   names and shapes of the tensors, all of which must be used.
2. It is accepted if its value is null, false or empty: then what it names is off.
3. Any other is refused with its name and value, because it may change what the model computes.

Code that a checkpoint brings (`auto_map`, `trust_remote_code`) is never run. The keys are harmless here, because an architecture
that this server knows is built from its own description, and every other architecture is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from backend.api.checkpoint.model_files import REMEDY, convert, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError

MAX_LAYERS = 4096  # bounds the memory that config.json's number alone can make the parser take

Size = Annotated[int, Meta(ge=1, le=2**40)]
NumLayers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
HeadDim = Annotated[int, Meta(ge=2, le=2**20, multiple_of=2)]
NumExperts = Annotated[int, Meta(ge=1, le=4096)]
Factor = Annotated[float, Meta(gt=0, le=1e30)]
Epsilon = Annotated[float, Meta(ge=0, le=1)]
Cap = Annotated[float, Meta(ge=0, le=1e30)]
T = TypeVar("T")

HARMLESS = frozenset(
    # They say where the checkpoint comes from and how it is stored.
    """
    architectures model_type _name_or_path name_or_path _commit_hash transformers_version transformers.js_config auto_map
    trust_remote_code tokenizer_class processor_class model_max_length max_seq_len max_length_in_training seq_length language
    license base_model finetuning_task task_specific_params problem_type id2label label2id num_labels custom_pipelines
    dtype torch_dtype use_bfloat16 fp16 bf16 fp32 quantization_config compression_config gguf
    _model_name_or_path model_name model_name_or_path base_model_name_or_path base_model_revision parent_model
    parent_model_name revision tokenizer_name tokenizer_file is_llama_config unsloth_fixed max_sequence_length
    """.split()
    # Training.
    + """
    initializer_range initializer_factor initializer_cutoff_factor init_method init_std use_mup gradient_checkpointing
    use_liger_kernel label_smoothing z_loss z_loss_coefficient aux_loss_alpha router_aux_loss_coef router_z_loss_coef
    output_router_logits tf_legacy_loss torchscript pretraining_tp embd_pdrop resid_pdrop attn_pdrop upcast_lm_head
    neftune_noise_alpha gradient_checkpointing_kwargs summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout
    """.split()
    # How transformers runs it, which gives the same results up to rounding.
    + """
    use_cache cache_implementation return_dict output_attentions output_hidden_states chunk_size_feed_forward use_flash_attn
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _flash_attn_2_enabled _experts_implementation fused_qkv fuse_rms_norm fuse_rope fuse_swiglu use_fused_rope use_rmsnorm
    use_flash_attention use_flash_attention_2 _use_flash_attention_2 output_past
    tensor_parallel_output attention_softmax_in_fp32 scale_attention_softmax_in_fp32 scale_attn_weights
    use_parallel_embedding use_embedding_sharing reorder_and_upcast_attn rescale_every weight_share_add_bias mlp_type
    """.split()
    # Generation: requests bring their own settings, and what ends a text is read beside the families.
    + """
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences output_scores return_dict_in_generate bad_words_ids suppress_tokens begin_suppress_tokens
    exponential_decay_length_penalty remove_invalid_values prefix generation_config eos_token pad_token bos_token
    is_decoder classifier_activation keys_to_ignore_at_inference min_new_tokens max_time stop_strings use_mtp cache_config
    max_cache_len top_h epsilon_cutoff eta_cutoff encoder_repetition_penalty renormalize_logits sequence_bias token_healing
    guidance_scale watermarking_config output_logits is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit
    assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type compile_config disable_compile
    continuous_batching_config low_memory penalty_alpha dola_layers constraints force_words_ids prefill_chunk_size
    """.split()
    # The tensors show if a projection has a bias.
    + ["attention_bias", "mlp_bias", "lm_head_bias", "qkv_bias", "use_bias"]
)
_HARMLESS_ENDINGS = re.compile(r".*(dropout|dropout_prob|dropout_p|_token_id|_token_ids|_token_index|_version)")


def is_harmless(key: str, value: object) -> bool:
    """True if nothing that a model computes follows from a key, whatever its family: by its name, or because its value is off."""
    is_off = value is None or value is False or value in ("", [], {})
    return is_off or key in HARMLESS or _HARMLESS_ENDINGS.fullmatch(key) is not None


class Settings:
    """Keys that are read count as known. A key with the value null counts as absent."""

    def __init__(self, content: dict[str, Any], section: str = "") -> None:
        """`section`: the key of config.json under which `content` stands; empty = it is the whole file."""
        self.content, self._section, self._known = content, section, set(HARMLESS)

    def has(self, key: str) -> bool:
        self._known.add(key)
        return self.content.get(key) is not None

    def find(self, key: str, kind: type[T]) -> T | None:
        """A value, checked against a msgspec type. Raises ConfigError."""
        return self.need(key, kind) if self.has(key) else None

    def get(self, key: str, kind: type[T], default: T) -> T:
        """Like `find`, with what stands for an absent value."""
        found = self.find(key, kind)
        return default if found is None else found

    def need(self, key: str, kind: type[T]) -> T:
        """Like `find`, of a key that must be there."""
        self._known.add(key)
        if key not in self.content:
            raise ConfigError(f"{FILE}: it lacks the key {self._named(key)}; {REMEDY}")
        return convert(self.content[key], kind, FILE, self._named(key))

    def only(self, key: str, *values: object) -> None:
        """Raise ConfigError where the key is there with a value that is none of `values`."""
        if self.has(key) and self.content[key] not in values:
            raise self.unsupported(key, f"supported is {' or '.join(map(shown, values))}")

    def ignore(self, *keys: str) -> None:
        """Keys that have no effect in this family, in transformers either."""
        self._known.update(keys)

    def unsupported(self, key: str, remedy: str) -> ConfigError:
        return ConfigError(f"{FILE}: {self._named(key)} {shown(self.content.get(key))} is not supported here; {remedy}")

    def check_all_known(self, reader: str) -> None:
        """Raise ConfigError for the first key that neither `reader` has read nor is harmless."""
        for key, value in self.content.items():
            if not (key in self._known or is_harmless(key, value)):
                raise ConfigError(
                    f"{FILE}: {shown(self._named(key))} is {shown(value)}, which is not known of {reader} and may change what "
                    f"the model computes; remove the key if it does not"
                )

    def _named(self, key: str) -> str:
        return f"{self._section}.{key}" if self._section else key
