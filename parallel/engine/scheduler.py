"""The scheduler of rollouts over engines: every requested response is accepted exactly once.

A task goes to one engine and comes back as a Sample. Tasks with the longest expected responses go
first, and to the engine with the fewest tokens to sample, so that all engines end at about the same
time. An engine that dies, hangs or violates the protocol is lost, and its tasks are requeued with
the same seeds: a response is never dropped for its length, which would bias responses to be shorter
than the policy's.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from parallel.engine.client import EngineClient, EngineError, EngineRefused
from parallel.engine.wire import (
    Generate,
    Generation,
    GenerationRequest,
    InvalidResponse,
    Prompt,
    Sampling,
    sample_of,
)
from parallel.sample import Sample
from parallel.settings import ModelSettings

if TYPE_CHECKING:  # it imports Megatron, which the scheduler does not need
    from parallel.engine.fleet import Fleet

AHEAD = 4  # an engine gets up to 1 / 4 more tasks than it runs at once, so that it never idles
MEMORY = 64  # responses that a running mean covers; few, since the policy changes


class NoEngine(Exception):
    """Responses are missing and no engine is live; after a refit, `collect` can be called again.

    Not an EngineError, which would end the stage.
    """


@dataclass(frozen=True)
class Task:
    """A response to sample; `key` is the caller's name for it."""

    key: Hashable
    request: GenerationRequest


class _Entry(NamedTuple):
    """A task that is queued or in flight; sorted, the longest expected come first."""

    minus_expected: float  # tokens
    number: int  # in the order of submission; the engines' name for it
    task: Task
    at_once: bool


@dataclass(eq=False)
class _EngineCall:
    """A call to an engine: its tasks by number, and those that it has not answered."""

    client: EngineClient
    instance: str | None
    requested: dict[int, _Entry]
    unanswered: dict[int, _Entry]
    answers: list[tuple[_Entry, Generation, Sample]] = field(default_factory=list)  # not accepted
    open: bool = True


class Scheduler:
    """The rollouts of one stage. All methods but `wake` are for the main thread.

    `deterministic`: task i of a call to `submit` goes to engine i modulo their number, all in one
    call, and the answers are accepted when the call is complete, so that the same calls give the
    same bits. With several engines this requires that none is lost.

    `on_end` is called once with every accepted answer, in the thread of its call; its errors are
    raised by `collect`.

    Example: two idle engines, and tasks of which 30, 10 and 20 tokens are expected.

        submit([a, b, c])   a (30) goes to engine 0, c (20) to engine 1, then b (10) to engine 1
        collect(60.0)       waits for the first answer, such as [(b, sample)]; owed is then 2
        engine 1 dies       c is requeued with its seed and goes to engine 0: requeued is 1
        collect(60.0)       [(a, sample)], and at a further call [(c, sample)]; owed is 0
    """

    def __init__(
        self,
        engines: Fleet,
        model: ModelSettings,
        deterministic: bool,
        on_end: Callable[[Task, Generation, Sample], None] = lambda task, answer, sample: None,
    ) -> None:
        self.requeued = 0
        self.duplicates = 0
        self._engines = engines
        self._model = model
        self._deterministic = deterministic
        self._on_end = on_end
        # Running means of response lengths in tokens, with the number of responses, by `_keys`.
        self._means: dict[tuple[str, int | None], tuple[float, int]] = {}
        self._changed = threading.Condition()  # guards all of the scheduler
        self._submitted = 0
        self._owed: set[int] = set()
        self._immediate: list[_Entry] = []
        self._queue: list[_Entry] = []  # a heap
        self._calls: list[_EngineCall] = []
        self._finished: list[tuple[Task, Sample]] = []
        self._held = False
        self._woken = False
        self._failed_meanwhile: list[tuple[_EngineCall, str]] = []
        self._error: Exception | None = None

    @property
    def owed(self) -> int:
        """The number of responses that were requested and not yet accepted."""
        return len(self._owed)

    def submit(self, tasks: Iterable[Task], at_once: bool = False) -> None:
        """Request a response to each task; `at_once` before all others, dealt to every engine."""
        with self._changed:
            for task in tasks:
                expected = 0.0 if self._deterministic else self._expected(task.request)
                entry = _Entry(-expected, self._submitted, task, at_once or self._deterministic)
                self._enqueue(entry)
                self._owed.add(entry.number)
                self._submitted += 1
            self._deal()

    def supply(self, task: Task, sample: Sample) -> None:
        """Have `collect` return a response that was sampled earlier, such as a logged one."""
        with self._changed:
            self._finish(task, sample)
            self._changed.notify()

    def collect(self, seconds: float, more: bool = False) -> list[tuple[Task, Sample]]:
        """Return the responses accepted since the last call, in order; wait for at most `seconds`.

        `more`: also wait, with no response owed, for a call of `wake`.

        Waits for: a response, or `wake`.
        Unblocked by: a call's thread that accepts an answer or loses its engine; `supply`.

        Raises:
            NoEngine: responses are owed and no engine is live.
            EngineRefused: a healthy engine rejected a request.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._deal()
            while not (self._finished or self._woken) and (self._owed or more):
                if self._error is not None:
                    raise self._error
                if self._owed and not self._calls and not self._engines.live():
                    raise NoEngine(f"no engine is left for {len(self._owed)} responses")
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            finished, self._finished = self._finished, []
            self._woken = False
        return finished

    def wake(self) -> None:
        """Make `collect` return at once, now or at its next call. Thread-safe."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Start no calls within, while engines take new weights; calls in flight continue.

        Failures of calls are handled at the end, when it is known which engines are live.
        """
        with self._changed:
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                failed, self._failed_meanwhile = self._failed_meanwhile, []
                for call, reason in failed:
                    if call.open:
                        self._lose(call, reason)
                live = {self._instance(client) for client in self._engines.live()}
                for call in [call for call in self._calls if call.instance not in live]:
                    self._give_up(call)
                self._deal()

    def close(self) -> None:
        """Drop all tasks. A call's thread ends with the engine's next message, or its timeout."""
        with self._changed:
            self._held = True
            for call in self._calls:
                call.open = False
            self._calls.clear()
            self._immediate.clear()
            self._queue.clear()
            self._owed.clear()

    def _enqueue(self, entry: _Entry) -> None:
        if entry.at_once:
            self._immediate.append(entry)
        else:
            heapq.heappush(self._queue, entry)

    def _deal(self) -> None:
        """Assign queued tasks to the live engines, as far as they have room."""
        if self._held or not (self._queue or self._immediate) or not (live := self._engines.live()):
            return
        dealt: dict[EngineClient, list[_Entry]] = defaultdict(list)
        immediate, self._immediate = sorted(self._immediate, key=lambda entry: entry.number), []
        for index, entry in enumerate(immediate):
            dealt[live[index % len(live)]].append(entry)
        self._deal_by_length(live, dealt)
        for client, entries in dealt.items():
            by_sampling: dict[Sampling, list[_Entry]] = defaultdict(list)
            for entry in entries:
                by_sampling[entry.task.request.sampling].append(entry)
            # Below every expected length: such requests start before all others.
            foremost = -self._engines.descriptions[client].max_model_tokens
            for sampling, alike in by_sampling.items():
                prompts = []
                for minus_expected, number, task, at_once in alike:
                    priority = foremost if at_once else round(minus_expected)
                    request = task.request
                    prompts.append(Prompt(number, request.prompt, request.seed, priority))
                requested = {entry.number: entry for entry in alike}
                call = _EngineCall(client, self._instance(client), requested, dict(requested))
                self._calls.append(call)
                arguments = call, Generate(prompts, sampling)
                threading.Thread(target=self._read, args=arguments, daemon=True).start()

    def _deal_by_length(
        self, live: list[EngineClient], dealt: dict[EngineClient, list[_Entry]]
    ) -> None:
        """Assign the longest tasks to the engine with the fewest expected tokens.

        An engine gets more only when it owes no more than it runs at once, and then several, so
        that calls are few.
        """
        unanswered = {client: list(dealt[client]) for client in live}
        for call in self._calls:
            if call.client in unanswered:
                unanswered[call.client] += call.unanswered.values()
        count = {client: len(entries) for client, entries in unanswered.items()}
        tokens = {c: -sum(entry.minus_expected for entry in unanswered[c]) for c in live}
        sizes = {client: self._engines.descriptions[client].max_sequences for client in live}
        open_to = [client for client in live if count[client] <= sizes[client]]
        while self._queue and open_to:
            client = min(open_to, key=lambda engine: tokens[engine])
            entry = heapq.heappop(self._queue)
            dealt[client].append(entry)
            count[client] += 1
            tokens[client] -= entry.minus_expected
            if count[client] >= sizes[client] + max(1, sizes[client] // AHEAD):
                open_to.remove(client)

    def _read(self, call: _EngineCall, message: Generate) -> None:
        """Read the answers of one call, in its thread."""
        try:
            for generation in call.client.generate(message):
                if not self._take(call, generation):
                    return
            failure: Exception | str = "broke off its answer" if call.unanswered else ""
        except InvalidResponse as error:
            failure = f"sent an invalid response: {error}"
        except EngineError as error:
            refused = isinstance(error, EngineRefused) and call.client.healthy()
            failure = error if refused else str(error)
        except Exception as error:  # a bug of ours: `collect` raises it, instead of waiting
            failure = error
        with self._changed:
            if not call.open:
                pass
            elif isinstance(failure, Exception):
                self._error = failure
            elif failure:
                self._lose(call, failure)
            else:
                self._calls.remove(call)
            self._deal()
            self._changed.notify()

    def _take(self, call: _EngineCall, generation: Generation) -> bool:
        """Accept an answer once; return False when the call was given up."""
        entry = call.requested.get(generation.number)
        if entry is None:
            raise InvalidResponse(f"an answer to unknown request {generation.number}")
        sample = sample_of(entry.task.request, generation, self._model)
        with self._changed:
            # The call was given up while its engine still answered: the task is another call's now.
            if not call.open or entry.number not in call.unanswered:
                self.duplicates += 1
                return call.open
            del call.unanswered[entry.number]
            call.answers.append((entry, generation, sample))
            if not (self._deterministic and call.unanswered):
                for accepted, answer, ended in call.answers:
                    self._on_end(accepted.task, answer, ended)
                    self._owed.remove(accepted.number)
                    self._finish(accepted.task, ended)
                call.answers.clear()
                self._deal()
                self._changed.notify()
        return True

    def _finish(self, task: Task, sample: Sample) -> None:
        self._finished.append((task, sample))
        for key in _keys(task.request):
            mean, count = self._means.get(key, (0.0, 0))
            count = min(count + 1, MEMORY)
            self._means[key] = (mean + (len(sample.response) - mean) / count, count)

    def _expected(self, request: GenerationRequest) -> float:
        """Return the mean for the domain and prompt length, else the domain, else `max_tokens`."""
        means = (self._means[key][0] for key in _keys(request) if key in self._means)
        return next(means, float(request.sampling.max_tokens))

    def _lose(self, call: _EngineCall, reason: str) -> None:
        """Report the call's engine as lost and give up all calls to that process."""
        # A refit is in progress, which itself finds out which engines live.
        if self._held:
            self._failed_meanwhile.append((call, reason))
            return
        if self._instance(call.client) == call.instance:
            self._engines.lost(call.client, reason)
        for other in [other for other in self._calls if other.instance == call.instance]:
            self._give_up(other)

    def _give_up(self, call: _EngineCall) -> None:
        call.open = False
        self._calls.remove(call)
        again = [entry for number, entry in call.requested.items() if number in self._owed]
        self.requeued += len(again)
        for entry in again:
            self._enqueue(entry)

    def _instance(self, client: EngineClient) -> str | None:
        described = self._engines.descriptions.get(client)
        return described.instance if described else None


def _keys(request: GenerationRequest) -> list[tuple[str, int | None]]:
    return [(request.domain, len(request.prompt)), (request.domain, None)]
