"""Rules about prompts, demonstrations and the tokenizer, and whether their files are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from parallel.files import CHARACTERS, unreachable
from parallel.settings import TOKENIZER_SIZE, EngineSettings, ModelSettings
from pipeline.config.violations import hint, shown
from stages.data.formats import FORMATS
from stages.data.reasoning_gym_options import options, value_violation
from stages.data.sources.settings import (
    FileDemonstrationSettings,
    FilePromptSettings,
    FileSettings,
    ReasoningGymPromptSettings,
    TooManyFolders,
)
from stages.settings import DomainSettings, MergeSettings, MixedSettings

Found = Iterator[tuple[str, str]]


def tokenizer_rules(model: ModelSettings) -> Found:
    """A folder's tokenizer is loaded, and held to the model, by the stages that use it."""
    if model.tokenizer == CHARACTERS and model.vocabulary_size != TOKENIZER_SIZE:
        yield (
            "model.vocabulary_size",
            f"{model.vocabulary_size} should be {TOKENIZER_SIZE}, the number of ids of the "
            "tokenizer",
        )


def data_rules(
    key: str,
    domain: DomainSettings,
    model: ModelSettings | None,
    engine: EngineSettings | None,
    others: Iterable[MergeSettings | MixedSettings | None],
) -> Found:
    """What a domain's prompts ask of the other blocks; `others` sample them too."""
    prompts = domain.prompts
    if isinstance(prompts, ReasoningGymPromptSettings) and prompts.dataset not in FORMATS:
        yield f"{key}.prompts.dataset", f"unknown dataset; {hint(prompts.dataset, FORMATS)}"
    if engine and isinstance(prompts, FilePromptSettings) and prompts.max_prompt_tokens:
        samplings = [domain.sampling, *(other.sampling for other in others if other)]
        response = max(sampling.max_response_tokens for sampling in samplings)
        if prompts.max_prompt_tokens + response > engine.max_model_tokens:
            yield (
                f"{key}.prompts.max_prompt_tokens",
                f"{prompts.max_prompt_tokens} and a response of {response} tokens are more than "
                f"engine.max_model_tokens = {engine.max_model_tokens}",
            )


def option_rules(key: str, domain: DomainSettings) -> Found:
    """Return wrong options of a reasoning-gym dataset, where reasoning-gym is installed."""
    prompts = domain.prompts
    if not isinstance(prompts, ReasoningGymPromptSettings) or prompts.dataset not in FORMATS:
        return
    if (known := options(prompts.dataset)) is None:
        return
    for name, value in prompts.config.items():
        option = f"{key}.prompts.config.{name}"
        if name not in known:
            yield option, f"unknown option of {prompts.dataset}; {hint(name, known)}"
        elif fault := value_violation(known[name], value):
            yield option, fault


def demonstration_rules(key: str, domain: DomainSettings, model: ModelSettings | None) -> Found:
    """What a domain's demonstrations ask of its prompts and of the model, where a cold start learns
    from them."""
    demonstrations = domain.demonstrations
    if isinstance(demonstrations, FileDemonstrationSettings):
        longest = demonstrations.max_tokens
        if model and longest and longest > model.max_positions:
            yield (
                f"{key}.demonstrations.max_tokens",
                f"{longest} is more than model.max_positions = {model.max_positions}",
            )
    elif not isinstance(domain.prompts, ReasoningGymPromptSettings):
        yield (
            f"{key}.demonstrations.source",
            "generated demonstrations need prompts of reasoning_gym, not of "
            f"{domain.prompts.source}; use jsonl or parquet, or cold_start: null in a run with "
            "model.initial_weights",
        )


def missing_data(key: str, domain: DomainSettings, demonstrated: bool) -> Found:
    """The domain's files that are not there; demonstrations count where a cold start learns from
    them."""
    blocks: dict[str, object] = {"prompts": domain.prompts}
    if demonstrated:
        blocks["demonstrations"] = domain.demonstrations
    for block, settings in blocks.items():
        if not isinstance(settings, FileSettings):
            continue
        if (why := unreachable(settings.path)) is not None:
            yield f"{key}.{block}.path", f"{shown(settings.path)} {why}"
            continue
        try:
            found = settings.files()
        except TooManyFolders as why_not:
            yield f"{key}.{block}.path", f"{shown(settings.path)} {why_not}"
            continue
        if not found:
            below = (
                f" with a name that ends in .{settings.source}" if settings.path.is_dir() else ""
            )
            yield f"{key}.{block}.path", f"no file at {shown(settings.path)}{below}"


def missing_tokenizer(model: ModelSettings) -> Found:
    """Yield that the directory of `model.tokenizer` is not there."""
    if model.tokenizer == CHARACTERS:
        return
    folder = Path(model.tokenizer)
    if (why := unreachable(folder)) is not None:
        yield "model.tokenizer", f"{shown(folder)} {why}"
    elif not folder.is_dir():
        yield "model.tokenizer", f"no such folder: {shown(folder)}; or use {CHARACTERS}"
