"""The domain's own template of prompts: system text, and text around the user's.

It makes chat messages of a row's prompt, which the model's chat template renders. It comes before
the content keys, so that a question is on one side of the split in prompts and in demonstrations.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.data.columns import RowError
from stages.data.problem import ASSISTANT, Message
from stages.data.row_forms import Conversation, Turns
from stages.data.settings import PLACEHOLDER, PromptTemplateSettings

INSTRUCTING = ("system", "developer")  # roles of a first message that instructs


def templated(prompt: Turns, template: PromptTemplateSettings | None) -> Turns:
    r"""Return a prompt in the form of a template; None leaves it as it is.

    Text becomes a user's message, or stays text with `form: text`. Of messages the last one of the
    user is wrapped. What a row has already is not added again. Raises RowError for a prompt that
    does not fit.

    Example:
        >>> template = PromptTemplateSettings(system="Think.", user="{prompt} Use \\boxed{}.")
        >>> for message in templated("2+2?", template):
        ...     print(message["role"], message["content"])
        system Think.
        user 2+2? Use \boxed{}.
        >>> templated(templated("2+2?", template), template) == templated("2+2?", template)
        True
    """
    if template is None:
        return prompt
    if template.form == "text":
        if not isinstance(prompt, str):
            raise RowError("its prompt is chat messages; prompts.template.form: text needs text")
        return _wrapped(prompt, template.user)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    return _with_system(_with_user(messages, template.user), template.system)


def templated_conversation(
    conversation: Conversation, template: PromptTemplateSettings | None
) -> Conversation:
    """Return a conversation whose prompt, up to the first response, is in a template's form."""
    if template is None:
        return conversation
    if isinstance(conversation, tuple):
        prompt, response = templated(conversation[0], template), conversation[1]
        if isinstance(prompt, str):
            return prompt, response
        return [*prompt, {"role": ASSISTANT, "content": response}]
    first = [message["role"] for message in conversation].index(ASSISTANT)
    prompt = templated(conversation[:first], template)
    assert not isinstance(prompt, str)
    return [*prompt, *conversation[first:]]


def _with_user(messages: Sequence[Message], user: str) -> list[Message]:
    """Return the messages with the last one of the user wrapped."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        raise RowError("its prompt has no message of the user, which prompts.template.user wraps")
    last = places[-1]
    wrapped = {**messages[last], "content": _wrapped(messages[last]["content"], user)}
    return [*messages[:last], wrapped, *messages[last + 1 :]]


def _with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """Return the messages after the system's."""
    if system is None:
        return [*messages]
    if messages[0]["role"] not in INSTRUCTING:
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"].strip() != system.strip():
        raise RowError(
            f"its prompt has another message of the {messages[0]['role']} than"
            " prompts.template.system; remove one of them"
        )
    return [*messages]


def _wrapped(text: str, user: str) -> str:
    """Return a text in place of the placeholder, or as it is where it is wrapped already."""
    before, _, after = user.partition(PLACEHOLDER)
    fits = len(text) >= len(before) + len(after)
    if fits and text.startswith(before) and text.endswith(after):
        return text
    return f"{before}{text}{after}"
