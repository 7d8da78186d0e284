"""From the options of `serve` to several models, and to the endpoint before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backend.api.config.schema import EngineConfig
from backend.api.processes.setup import physical_cores
from deploy import chat_template
from deploy.capacity import size
from deploy.engine_sets import EngineSet
from deploy.errors import UserError
from deploy.gateway import EndpointModel, GatewayOptions
from deploy.models_file import Entry, Models, named_on_the_command_line, read_models
from deploy.multi_model import MultiModel

if TYPE_CHECKING:
    from deploy.serve import ServeOptions


def chosen_models(given: Sequence[str], file: Path | None) -> Models | None:
    """The models of `--models FILE` or of `--model NAME=DIRECTORY`; None: one model without a name. Raises UserError."""
    if file is None:
        return named_on_the_command_line(given)
    if given:
        raise UserError("--models and --model both say what is served; leave one out")
    return read_models(file)


def several_of(options: ServeOptions, models: Models) -> MultiModel:
    """Raises UserError for whatever is wrong, before anything starts."""
    alone = {
        "--lora": options.adapters,
        "--chat-template": options.chat_template,
        "--served-model-name": options.model_names,
    }
    for option, value in alone.items():
        if value:
            key = {"--lora": "lora", "--chat-template": "chat_template", "--served-model-name": "names"}[option]
            raise UserError(
                f"{option} does not say which of several models it is for; give `{key}` of one in --models FILE"
            )

    def configure(name: str, entry: Entry) -> EngineConfig:
        from deploy.serve import effective_config  # which makes a server of what this module returns

        config = effective_config(
            replace(
                options,
                model=entry.path,
                models=None,
                overrides=(*options.overrides, *entry.set),
                adapters=entry.lora,
                chat_template=Path(entry.chat_template) if entry.chat_template else None,
            )
        )
        chat_template.check_own(config)
        return config

    return MultiModel(models, configure, physical_cores(), options.profiles, options.model_repositories)


def of_several(gateway: GatewayOptions, several: MultiModel) -> GatewayOptions:
    """The endpoint before all of them."""
    first, *others = several.sets
    return replace(
        gateway,
        names=first.served_names,
        metrics_label=first.name,
        others=tuple(_served(each, gateway) for each in others),
    )


def _served(each: EngineSet, gateway: GatewayOptions) -> EndpointModel:
    config = each.engine.share.config
    shown = gateway.with_formats_of(chat_template.source(config))
    adapters = tuple(config.lora.directories)
    return EndpointModel(
        each.own_wire,
        each.served_names,
        adapters,
        each.name,
        shown.tool_format,
        shown.reasoning_format,
        tuple(config.prompt_adapters.directories),
    )


def described(each: EngineSet) -> str:
    """A line for the console."""
    config, names = each.engine.share.config, ", ".join(each.served_names)
    idle = "" if each.entry.idle_unload_s is None else f", unloaded when idle for {each.entry.idle_unload_s:g} s"
    return (
        f"{each.name:<9} {size(each.engine.share.num_bytes)} for weights and KV ({config.kv_cache.max_tokens or 0:,} tokens), "
        f"{config.model.num_threads} threads{idle}; clients say {names}"
    )
