"""Settings classes as trees of keys."""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

Key = tuple[str | int, ...]
# Keys by the names that other projects give them, for suggestions alone.
ALIASES = {
    # Hugging Face's config.json
    "num_hidden_layers": "model.layers",
    "num_attention_heads": "model.attention_heads",
    "num_key_value_heads": "model.key_value_heads",
    "moe_intermediate_size": "model.expert_hidden_size",
    "num_experts": "model.experts",
    "num_local_experts": "model.experts",
    "n_routed_experts": "model.experts",
    "num_experts_per_tok": "model.experts_per_token",
    "rope_theta": "model.rope_base",
    "rms_norm_eps": "model.norm_epsilon",
    "max_position_embeddings": "model.max_positions",
    "vocab_size": "model.vocabulary_size",
    # Megatron's arguments
    "tensor_model_parallel_size": "layout.tensor",
    "tp": "layout.tensor",
    "pipeline_model_parallel_size": "layout.pipeline",
    "pp": "layout.pipeline",
    "expert_model_parallel_size": "layout.expert",
    "ep": "layout.expert",
    "expert_tensor_parallel_size": "layout.expert_tensor",
    "etp": "layout.expert_tensor",
    "context_parallel_size": "layout.context",
    "cp": "layout.context",
    "sequence_parallel": "layout.tensor",
    "lr": "optimizer.learning_rate",
    "micro_batch_size": "loop.micro_batch_tokens",
    # vLLM's arguments
    "tensor_parallel_size": "engine.tensor",
    "gpu_memory_utilization": "engine.kv_cache_mebibytes",
    "max_model_len": "engine.max_model_tokens",
    "max_num_seqs": "engine.max_sequences",
}
_REMARKS = {
    "sequence_parallel": "sequence parallelism is on wherever tensor > 1",
    "gpu_memory_utilization": "it is computed where null",
}


def type_at(root: type[BaseModel], key: Key) -> Any:
    """Return the annotation at `key`, or None for an unknown key.

    A mapping of free names has every name. A union of settings classes has the keys of all, unless
    `key` includes the class's tag, as the locations of pydantic's errors do.
    """
    annotation: Any = root
    for name in key:
        if name in (classes := arms(annotation)):
            annotation = classes[name]
        elif annotations := fields(annotation):
            annotation = _bare(annotations.get(name))
        elif get_origin(annotation) is dict:
            annotation = _bare(get_args(annotation)[1])
        elif annotation is not Any:
            return None
    return annotation


def fields(annotation: Any) -> dict[Any, Any]:
    """Return the keys of a settings class, or of all classes of a union, with annotations."""
    return {
        field.alias or name: field.annotation
        for settings_class in _all_classes(annotation)
        for name, field in settings_class.model_fields.items()
    }


def former(annotation: Any) -> set[str]:
    """Return the keys of earlier versions that a settings class, or one of a union's, reads."""
    return {name for each in _all_classes(annotation) for name in getattr(each, "former", ())}


def renamed(annotation: Any, name: str) -> str | None:
    """Return the new name of a settings class's former key, or None."""
    return annotation.renamed.get(name) if _is_settings(annotation) else None


def alias_hint(name: str, fields: Collection[str]) -> str | None:
    """Return the end of a message about another project's name for a key; None for others.

    A key of the same block, one of `known`, is named without its path.
    """
    if (target := ALIASES.get(name)) is None:
        return None
    short_name = target.rpartition(".")[2]
    remark = f" ({_REMARKS[name]})" if name in _REMARKS else ""
    return f'did you mean "{short_name if short_name in fields else target}"?{remark}'


def without_arms(root: type[BaseModel], location: Key) -> Key:
    """Return one of pydantic's locations without the tags of unions: the key in the file."""
    return tuple(
        name
        for depth, name in enumerate(location)
        if name not in arms(type_at(root, location[:depth]))
    )


def arms(annotation: Any) -> dict[Any, type[BaseModel]]:
    """Return the settings classes of a union by their tag's value; empty for no union."""
    classes = _classes(annotation)
    return {arm.model_fields[_tag(classes)].default: arm for arm in classes}


def tag(annotation: Any) -> str:
    """Return the key that selects the class of a union, such as `name`."""
    return _tag(_classes(annotation))


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _all_classes(annotation: Any) -> list[type[BaseModel]]:
    """Return a settings class alone, or all classes of a union."""
    return [annotation] if _is_settings(annotation) else [*arms(annotation).values()]


def _classes(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    return [arm for arm in map(_bare, get_args(annotation)) if _is_settings(arm)]


def _tag(classes: list[type[BaseModel]]) -> str:
    """Return the key that is a literal of one value in all classes, another one in each."""
    for name, field in classes[0].model_fields.items():
        defaults = {arm.model_fields[name].default for arm in classes if name in arm.model_fields}
        only = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if only and len(defaults) == len(classes):
            return name
    raise TypeError(f"no literal field distinguishes {classes}")


def _bare(annotation: Any) -> Any:
    """Return the annotation without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        non_null = [arm for arm in get_args(annotation) if arm is not type(None)]
        return _bare(non_null[0]) if len(non_null) == 1 else annotation
    return annotation
