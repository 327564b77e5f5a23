"""Checks of the environment a run needs: files, Python modules and variables.

They find a mistyped path or function before the cold start instead of after it, without importing.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from pathlib import Path

from parallel.files import HUGGING_FACE, unreachable
from parallel.settings import CHARACTERS
from pipeline.config.checkpoints import (
    dtype_violation,
    json_object,
    model_violation,
    teacher_violation,
    weights_violation,
)
from pipeline.config.modules import find_module
from pipeline.config.rows import Rewards, row_report
from pipeline.config.tokenizers import (
    argument_violation,
    directory_violation,
    outside_models,
    size_violation,
    template_violation,
    tokenizer_violation,
)
from pipeline.config.unroll import Blocks, is_path
from pipeline.text import shown
from stages.data.reasoning_gym import prompt_violations
from stages.data.settings import (
    FileSettings,
    PromptTemplateSettings,
    TooManyDirectories,
    template_of,
)
from stages.directory import COLLECTION, StageDirectory
from stages.domains import DomainSettings
from stages.kinds.distill.settings import DistillSettings
from stages.kinds.distill.source_settings import CollectedDataSettings
from stages.kinds.kind import Violations
from stages.kinds.mixture_settings import MixtureStageSettings, StageSourceSettings
from stages.rewards.kinds.judge import JudgeReward
from stages.rewards.kinds.python import PythonReward
from stages.settings import RunSettings


def violations(run: RunSettings) -> Violations:
    """Yield everything that the stages need and that is missing here, as (dotted key, message).

    A started run is read without this check: its files may be gone, or not visible on a login node.
    """
    model = run.model
    if model.initial_weights is not None and (
        problem := weights_violation(model.initial_weights, model)
    ):
        yield "model.initial_weights", problem
    for key, path in outside_models(Blocks(run)):
        problem = model_violation(path, model) or tokenizer_violation(path, model)
        if ".teachers." in key:
            problem = problem or teacher_violation(path)
        if problem:
            yield key, problem
    tokenizer: str | None = model.tokenizer
    if tokenizer and (problem := unusable_tokenizer(tokenizer)):
        yield "model.tokenizer", problem
        tokenizer = None
    else:
        if why := argument_violation(model):
            yield "model.chat_template_arguments", why
        if why := size_violation(model):
            yield "model.vocabulary_size", why
    shown_in = {
        name for block in run.stages.values() for name in block.demonstrated(run.domains_of(block))
    }
    for name, domain in run.domains.items():
        demonstrated = name in shown_in
        yield from domain_violations(name, domain, demonstrated=demonstrated, tokenizer=tokenizer)
    for key, block in run.stages.items():
        if isinstance(block, MixtureStageSettings):
            for name, files in block.files():
                yield from _file_violations(f"stages.{key}.data.{name}", files, tokenizer)
        if isinstance(block, MixtureStageSettings | DistillSettings):
            yield from _collected_violations(f"stages.{key}.data", block.data)


def unusable_tokenizer(name: str) -> str | None:
    """Return why no tokenizer can be loaded from a directory, or None."""
    path = Path(name)
    if name == CHARACTERS:
        return None
    if (why := unreachable(path)) is not None:
        return f"{shown(path)} {why}"
    if not path.is_dir():
        return f"no such directory: {shown(path)}; use a tokenizer's, or {CHARACTERS}"
    # A stage reports other errors in a config.json, which a tokenizer need not have.
    return directory_violation(path) or dtype_violation(
        file := path / HUGGING_FACE, json_object(file)[0]
    )


def _collected_violations(key: str, data: Mapping[str, object]) -> Violations:
    """Yield the stages of other runs that are to have collected data and have none here."""
    for name, source in data.items():
        if not isinstance(source, StageSourceSettings | CollectedDataSettings):
            continue
        if not is_path(source.stage):
            continue
        path = Path(source.stage)
        if why := unreachable(path):
            yield f"{key}.{name}.stage", f"{shown(path)} {why}"
        elif not StageDirectory(path).collection.is_file():
            absent = f"{shown(path)} is no finished stage that collected responses"
            yield f"{key}.{name}.stage", f"{absent}: it has no {COLLECTION}"


def _file_violations(
    key: str,
    source: FileSettings,
    tokenizer: str | None,
    rewards: Rewards | None = None,
    template: PromptTemplateSettings | None = None,
) -> Violations:
    """Yield that no file is there, or what its first rows lack for the stages that read them."""
    if missing := [*_missing_files(key, source)]:
        yield from missing
        return
    try:
        report = row_report(source, rewards, template=template)
    except OSError as error:
        yield f"{key}.path", f"{shown(Path(error.filename))} cannot be read: {error.strerror}"
        return
    if columns_fix := report.columns_fix(key, source):
        yield key, columns_fix
    elif report.unusable and source.on_bad_row == "stop":
        it = "it" if len(report.unusable) == 1 else "them"
        fix = f"fix {it}, or skip such rows with {key}.on_bad_row: skip"
        yield key, f"{report.described(report.unusable)}; {fix}"
    elif report.unreadable:
        yield key, f"{report.described(report.unreadable)}; fix the rows, or remove them"
    if report.chats and tokenizer and (why := template_violation(tokenizer, key)):
        yield "model.tokenizer", why


def domain_violations(
    name: str, domain: DomainSettings, *, demonstrated: bool = True, tokenizer: str | None = None
) -> Violations:
    """Yield everything that a domain needs and that is missing here, as (dotted key, message).

    Without a `tokenizer`, not what its chat template is needed for.
    """
    prompts, key = domain.prompts, f"domains.{name}.prompts"
    if isinstance(prompts, FileSettings):
        yield from _file_violations(key, prompts, tokenizer, domain.rewards)
    else:
        for option, message in prompt_violations(prompts):
            yield f"{key}.{option}", message
        if prompts.form == "chat" and tokenizer == CHARACTERS:
            yield (
                "model.tokenizer",
                f"{CHARACTERS} has no line break, which {key}.form: chat writes; name the directory"
                " of the model's tokenizer",
            )
        elif prompts.form == "chat" and tokenizer and (why := template_violation(tokenizer, key)):
            yield "model.tokenizer", why
    if demonstrated and isinstance(source := domain.demonstrations, FileSettings):
        template = template_of(prompts)
        yield from _file_violations(
            f"domains.{name}.demonstrations", source, tokenizer, template=template
        )
    yield from _reward_needs(f"domains.{name}.rewards", domain)


def _missing_files(key: str, settings: FileSettings) -> Violations:
    """Yield the path of the settings at `key` if no file is there."""
    path, why = shown(settings.path), unreachable(settings.path)
    try:
        if why is None and not settings.files():
            kind = f"*.{settings.source} file in" if settings.path.is_dir() else "such file:"
            yield f"{key}.path", f"no {kind} {path}"
    except TooManyDirectories as error:
        why = str(error)
    if why is not None:
        yield f"{key}.path", f"{path} {why}"


def _reward_needs(key: str, domain: DomainSettings) -> Violations:
    """Yield everything that a domain's rewards need and that is missing here."""
    for name, reward in domain.rewards.items():
        if isinstance(reward, PythonReward) and (
            problem := function_violation(reward.function, reward.path)
        ):
            yield f"{key}.{name}.function", problem
        if not isinstance(reward, JudgeReward):
            continue
        file, variable = reward.api_key_file, reward.api_key_variable
        if file is not None and (why := unreachable(file)) is not None:
            yield f"{key}.{name}.api_key_file", f"{shown(file)} {why}"
        elif file is not None and not file.is_file():
            yield f"{key}.{name}.api_key_file", f"no such file: {shown(file)}"
        if variable is not None and variable not in os.environ:
            absent = f"environment variable {variable} is not set"
            yield f"{key}.{name}.api_key_variable", absent


def function_violation(reference: str, directory: Path | None = None) -> str | None:
    """Return the problem with `package.module:function`, or None.

    A module is looked up as a stage's process would: in `directory`, or in the working directory
    and then on `sys.path`.
    """
    module, _, function = reference.partition(":")
    spec = find_module(module, directory)
    if spec is None:
        return _not_found(module, function, directory)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    where = shown(Path(spec.origin))
    try:
        bound = _TopLevel(ast.parse(Path(spec.origin).read_bytes())).bound
    except SyntaxError as error:
        return f"{where}:{error.lineno} is not valid Python: {error.msg}"
    except OSError as error:
        return f"{where} cannot be read: {error.strerror}"
    # The parser raises all three for too deeply nested code, MemoryError without a message.
    except (MemoryError, RecursionError, ValueError) as error:
        return f"{where} cannot be read: {str(error) or 'too deeply nested for Python'}"
    if function not in bound:
        return None if "*" in bound else f"{where} defines no {function}"
    if (definition := bound[function]) is None or _takes_two(definition):
        return None
    definition.body = []
    return (
        f"{where}:{definition.lineno}: a reward is called as {function}(problem, response) and "
        f"returns its value; it cannot be called as {ast.unparse(definition).rstrip(':')}"
    )


def _takes_two(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return False where a call with two arguments would not return a value."""
    takes = definition.args
    most = len(takes.posonlyargs) + len(takes.args)
    positional = most - len(takes.defaults) <= 2 and (most >= 2 or takes.vararg is not None)
    return isinstance(definition, ast.FunctionDef) and positional and None not in takes.kw_defaults


def _not_found(module: str, function: str, directory: Path | None) -> str:
    """Return why a module is not found: its package is a plain module, or there is none."""
    package = module.rpartition(".")[0]
    spec = find_module(package, directory) if package else None
    if spec is not None and spec.submodule_search_locations is None:
        return (
            f"{package} is a module, not a package; name the module whose file defines {function}, "
            f"not {module}"
        )
    where = shown(directory) if directory else "the working directory or on sys.path"
    return f"no module {module} in {where}"


class _TopLevel(ast.NodeVisitor):
    """A collector of the names that a module binds outside its functions and classes.

    It looks below `try` and `if` too; `*` stands for the names of a star import. `bound` has the
    definition of a name that is bound once, to a function without a decorator.
    """

    def __init__(self, module: ast.Module) -> None:
        self.bound: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | None] = {}
        self.visit(module)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.bound[node.name] = None if node.name in self.bound or node.decorator_list else node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bound[node.name] = None

    def visit_alias(self, node: ast.alias) -> None:
        self.bound[node.asname or node.name] = None

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound[node.id] = None
