"""Conversations as samples: assistant turns are trained on, and all other tokens are masked.

A sample's prompt is what a rollout would read at that turn, and its texts are encoded as a rollout
encodes them: training sees the tokens that sampling sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel.sample import Sample
from stages.data.chat_template import TOOL_CALL
from stages.data.messages import is_learned
from stages.data.problem import ASSISTANT, Message, Tool
from stages.data.thoughts import THINK
from stages.data.tokenizer import Tokenizer, TokenizerError

SHOWN = 60  # characters of a rendering in an error
OPENING, CLOSING = THINK
NOT_RENDERED = "\0"  # begins no prompt
# Of an assistant's message: templates that do not know one leave it out silently.
LEARNED_KEYS = ("content", "reasoning_content", "thinking")


def response_sample(tokenizer: Tokenizer, prompt: str, response: str, domain: str) -> Sample:
    """Return a text prompt and a text response, with the main end token, as a sample.

    Example: the digit 2 is token 4, and 1 the end token.
        >>> from stages.data.tokenizer import CharacterTokenizer
        >>> sample = response_sample(CharacterTokenizer(), "1+1=", "2", "sums")
        >>> sample.prompt.tolist(), sample.response.tolist(), sample.loss_mask
        ([3, 65, 3, 69], [4, 1], None)
    """
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(prompt), np.int32),
        response=np.array([*tokenizer.encode(response), tokenizer.end_token], np.int32),
    )


def conversation_samples(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    domain: str,
    context_turns: int = 0,
    tools: Sequence[Tool] = (),
) -> list[Sample]:
    """Return a conversation as samples in which every assistant turn is learned once.

    The first `context_turns` assistant turns are only in the first prompt. There is one sample
    where the template renders earlier turns as it rendered them when they were the last; where it
    rewrites them, as Qwen3's drops their thoughts, or leaves out their end token, a further sample
    begins, whose prompt is what a rollout would read at that turn.
    Raises TokenizerError as `segments`.

    Example: two turns, each learned with its end token; what the user says between is masked.
        >>> from stages.data.tokenizer import CharacterTokenizer
        >>> texts = [("user", "1+1"), ("assistant", "2"), ("user", "b"), ("assistant", "no")]
        >>> messages = [{"role": role, "content": content} for role, content in texts]
        >>> [sample] = conversation_samples(tokenizer := CharacterTokenizer(), messages, "math")
        >>> tokenizer.decode_prompt(sample.prompt), tokenizer.decode_prompt(sample.response)
        ('user: 1+1 assistant: ', '2[END]user: b assistant: no[END]')
        >>> "".join("01"[learned] for learned in sample.loss_mask.tolist())
        '110000000000000000000111'
    """
    return [
        _sample(tokenizer, prompt, texts, answered, domain)
        for (prompt, *texts), answered in segments(tokenizer, messages, context_turns, tools)
    ]


def conversation_sample(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    domain: str,
    context_turns: int = 0,
    tools: Sequence[Tool] = (),
) -> Sample:
    """Return the only sample of a conversation, as `conversation_samples`.

    Raises TokenizerError also where there are several.
    """
    sample, *more = conversation_samples(tokenizer, messages, domain, context_turns, tools)
    if more:
        raise TokenizerError(
            f"model.tokenizer: its chat template rewrites earlier turns, so that the response has"
            f" {1 + len(more)} assistant turns after different prompts; write the earlier ones into"
            " the prompt"
        )
    return sample


def _sample(
    tokenizer: Tokenizer,
    prompt: str,
    texts: Sequence[str],
    answered: Sequence[Message],
    domain: str,
) -> Sample:
    """Return the sample of a prompt's text and of learned and masked texts in turn.

    The loss mask covers each learned text up to its end token, at which a rollout stops. Where the
    template writes none in a turn it is the first token of the next one, if that is an end token,
    and after the last turn, of `answered`, `closing_token`. Texts are encoded one by one, as a
    rollout's prompt and response are.
    """
    ids: list[int] = []
    learned: list[bool] = []
    ended = True
    for number, text in enumerate(texts):
        text_ids = tokenizer.encode(text)
        ends = [place for place, token in enumerate(text_ids) if token in tokenizer.end_tokens]
        if number % 2 == 0:  # an assistant turn
            ended = bool(ends)
            upto = ends[-1] + 1 if ended else len(text_ids)
        else:  # which begins with what ends the turn before, where that has no end token
            upto = int(not ended and ends[:1] == [0])
        ids += text_ids
        learned += [place < upto for place in range(len(text_ids))]
    if not ended:
        ids.append(closing_token(tokenizer, answered))
        learned.append(True)
    while not learned[-1]:  # the template's suffix after the last end token
        ids.pop()
        learned.pop()
    return Sample(
        domain=domain,
        prompt=np.array(tokenizer.encode(prompt), np.int32),
        response=np.array(ids, np.int32),
        loss_mask=None if all(learned) else np.array(learned),
    )


def segments(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    context_turns: int = 0,
    tools: Sequence[Tool] = (),
) -> list[tuple[list[str], Sequence[Message]]]:
    """Return the texts of every sample of a conversation, and its messages to the last learned one.

    A sample has a prompt, then learned and masked texts in turn. A learned text is an assistant
    turn with the template's suffix; it begins after the template's generation prompt, where a
    rollout's prompt ends.
    Raises TokenizerError where the template does not render a turn after its generation prompt:
    training would then see other tokens than sampling.
    """
    samples: list[tuple[list[str], Sequence[Message]]] = []
    text = ""
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    for place in turns[context_turns:]:
        if not is_learned(messages[place]):  # only in the prompts of later turns
            continue
        prompt = tokenizer.render(messages[:place], generation_prompt=True, tools=tools)
        answered = tokenizer.render(messages[: place + 1], generation_prompt=False, tools=tools)
        following = prompt[len(text) :] if samples and prompt.startswith(text) else None
        if following is not None and _ends(tokenizer, samples[-1][0][-1], following):
            texts = [*samples.pop()[0], following]
        else:
            texts = [prompt]
        try:
            turn, text = _turn(prompt, answered, messages[place], place), answered
        except TokenizerError:
            # DeepSeek-R1 opens the thoughts in the prompt and renders none in a turn.
            turn, text = _thinking_turn(tokenizer, prompt, messages[place]), NOT_RENDERED
            if not turn:
                raise
        samples.append(([*texts, turn], messages[: place + 1]))
    return samples


def _ends(tokenizer: Tokenizer, turn: str, following: str) -> bool:
    """Return whether an end token is in a turn, or begins what follows it before the next one.

    Two turns with no text between are one. DeepSeek-V3's template ends no turn of a single tool
    call: a sample of its own, completed with the end token, teaches that.
    """
    ids = [*tokenizer.encode(turn), *tokenizer.encode(following)[:1]]
    return not following or not set(ids).isdisjoint(tokenizer.end_tokens)


def closing_token(tokenizer: Tokenizer, messages: Sequence[Message]) -> int:
    """Return the end token after the last turn, which a template without one in it leaves out.

    It is the end token with which the template begins the next turn, the tool's after a turn that
    ends with a call of a tool, else the user's: GLM's `<|observation|>` or `<|user|>`. A template
    that begins no turn with an end token, or rejects the turn, leaves the first of
    `tokenizer.end_tokens`.
    """
    role = "tool" if _calls_tools(messages[-1]) else "user"
    try:
        before, after = (
            [token for token in tokenizer.encode(text) if token in tokenizer.end_tokens]
            for text in (
                tokenizer.render(messages, generation_prompt=False),
                tokenizer.render([*messages, {"role": role, "content": "?"}], False),
            )
        )
    except TokenizerError:
        return tokenizer.end_token
    return after[len(before)] if len(after) > len(before) else tokenizer.end_token


def _calls_tools(message: Message) -> bool:
    """Return whether a turn ends with a call of a tool, written into its content or beside it.

    As text a call is the end of what follows the thoughts: vLLM's parsers read no call in those,
    and templates write calls after the content.
    """
    opening, closing = TOOL_CALL
    answer = str(message.get("content") or "").rpartition(CLOSING)[2].strip()
    return bool(message.get("tool_calls")) or (opening in answer and answer.endswith(closing))


def _thinking_turn(tokenizer: Tokenizer, prompt: str, message: Message) -> str:
    """Return the text of a turn whose thoughts the prompt opens, as a rollout would write it.

    DeepSeek-R1's template ends a prompt with <think>, and renders no thoughts in any turn. The
    content may begin with <think>, or after it, as a collected response does. "" where the prompt
    does not end so, or the message has no thoughts.
    """
    content = str(message["content"])
    if thoughts := message.get("reasoning_content"):
        content = f"{OPENING}\n{thoughts}\n{CLOSING}\n\n{content}"
    opened = prompt.rstrip("\n")
    begins = content.lstrip().startswith(OPENING)
    if not opened.endswith(OPENING) or not (begins or CLOSING in content):
        return ""
    if message.get("tool_calls"):
        return ""
    if begins:
        newlines = "\n" * (len(prompt) - len(opened))
        content = content.lstrip().removeprefix(OPENING).removeprefix(newlines)
    return content + tokenizer.decode_prompt([tokenizer.end_token])


def _turn(prompt: str, answered: str, message: Message, place: int) -> str:
    """Return the text of an assistant turn after its prompt.

    Raises TokenizerError where it does not follow the prompt, or lacks a part of the message.
    """
    if not answered.startswith(prompt):
        same = next(i for i in range(len(prompt)) if prompt[i] != answered[i : i + 1])
        here, there = (repr(text[same : same + SHOWN]) for text in (prompt, answered))
        raise TokenizerError(
            f"model.tokenizer: its chat template renders message {place + 1} otherwise than after"
            f" its generation prompt: {here} there, {there} here; model.chat_template_arguments may"
            " choose another generation prompt, or use a template that renders both alike"
        )
    text = answered[len(prompt) :]
    for key in LEARNED_KEYS:
        # Templates trim contents and write their own whitespace around thoughts.
        if "".join(str(message.get(key) or "").split()) not in "".join(text.split()):
            raise TokenizerError(
                f"model.tokenizer: its chat template leaves out a part of the {key} of message"
                f" {place + 1}, {str(message[key])[:SHOWN]!r}; use a template that renders it, or"
                " remove it from the rows"
            )
    return text
