"""The client of one engine, on the trainer's main rank."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from parallel.engine.wire import (
    PROTOCOL,
    Address,
    CallFailure,
    EngineDescription,
    Generate,
    Generation,
    Join,
    Refit,
    Refitted,
    Wake,
    frames,
)
from parallel.errors import UserError
from parallel.files import RESTART_REQUEST, write_atomically
from parallel.settings import EngineSettings

POLL_SECONDS = 0.05
LAUNCHER_SECONDS = 60.0  # in which the launcher notices that an engine is gone
HEALTH_SECONDS = 5.0  # in which a healthy engine answers
LARGEST_ANSWER = 1 << 20  # bytes of an answer that is not streamed; the largest are error messages


def longest_wait(settings: EngineSettings) -> float:
    """Return the seconds that the main rank may wait for engines, while other ranks wait for it.

    An engine starts, is silent when it is asked for its description or to sleep, and is restarted.
    Engines are waited for at the same time.
    """
    start = settings.start_seconds + LAUNCHER_SECONDS
    return 2 * (start + 2 * settings.hang_timeout_seconds)


class EngineError(UserError):
    """An engine that did not start, died, hung, violated the protocol, or rejected a request."""


class EngineRefused(EngineError):
    """A healthy engine rejected the request."""


class EngineClient:
    """A client of one engine, whose process the launcher owns. Thread-safe.

    Every call has a timeout and raises EngineError on anything unexpected.

    Example: the calls of one stage to one engine, in their order.

        connect()                waits until the process has written its address; its description
        join(Join(...))          waits until all ranks of the trainer and of the engines have joined
        refit(Refit(version=1))  waits until the trainer's ranks have sent all weights
        generate(Generate(...))  yields a Generation for each prompt, in the order in which they end
        sleep(), wake(Wake(..))  where the engine shares its GPU with the trainer
    """

    def __init__(self, address_file: Path, settings: EngineSettings) -> None:
        self.address_file = address_file
        self.settings = settings
        self.address: Address | None = None

    @property
    def name(self) -> str:
        """The engine's name, with its number among the run's engines (its directory's name)."""
        return f"engine {self.address_file.parent.name}"

    def connect(self) -> EngineDescription:
        """Wait for an engine process other than the last known one; return its description.

        Waits for: the file of the address.
        Unblocked by: the engine's server, once it can sample; the launcher restarts one that died.

        A process that publishes its address but does not answer is retried for
        engine.hang_timeout_seconds, then the launcher is asked to restart it.

        Raises:
            EngineRefused: it has another protocol version.
            EngineError: no process published an address in time, or a silent one was not restarted.
                The launcher, which allows engine.start_timeout_seconds for a start, ends the stage
                before that.
        """
        wait = self.settings.start_seconds + LAUNCHER_SECONDS
        late = f"was not ready after {wait:g} s (engine.start_timeout_seconds)"
        missing = f"{late}: {self.address_file} is missing"
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            if (address := self.newcomer()) is None:
                time.sleep(POLL_SECONDS)
                continue
            self.address = address
            try:
                return self._describe_patiently()
            except EngineRefused:
                raise
            except EngineError as error:
                self.give_up(str(error))
                missing = f"was not replaced within {wait:g} s; {error}"
            # The replacement has as long to start as the process before it.
            deadline = time.monotonic() + wait
        raise EngineError(f"{self.name} {missing}")

    def _describe_patiently(self) -> EngineDescription:
        """Call `describe` for at most engine.hang_timeout_seconds, or until a process replaced it.

        An engine may be silent because it is stopped, swapped out, or has just died.
        """
        allowed = self.settings.hang_timeout_seconds
        deadline = time.monotonic() + allowed
        while self.newcomer() is None:
            try:
                return self.describe()
            except EngineRefused:
                raise
            except EngineError as error:
                if time.monotonic() > deadline:
                    silence = f"it did not answer for {allowed:g} s (engine.hang_timeout_seconds)"
                    raise EngineError(f"{silence}; {error}") from error
            time.sleep(POLL_SECONDS)
        raise EngineError("its process was replaced before it answered; connect to the new one")

    def newcomer(self) -> Address | None:
        """Return the published address if it is of another process than the last known one."""
        address, last_known = self._read_address(), self.address
        if address and last_known and address.instance == last_known.instance:
            return None
        return address

    def give_up(self, reason: str) -> None:
        """Ask the launcher to restart this engine; the next `connect` waits for the new process."""
        assert self.address is not None, "connect first"
        address = self._read_address()
        if address and address.instance == self.address.instance:  # not yet replaced
            write_atomically(self.address_file.with_name(RESTART_REQUEST), f"{reason}\n")

    def healthy(self) -> bool:
        """Return whether the engine answers and all of its processes live."""
        try:
            self._call("health", None, bool, HEALTH_SECONDS)
        except EngineError:
            return False
        return True

    def join(self, join: Join) -> None:
        """Have the engine plan a trainer's refits and connect to its ranks, which join too.

        Waits for: all ranks of `join.meetings`.
        Unblocked by: every trainer rank's `Outbox`, and `join` of every other engine.
        """
        self._call("join", join, None, join.timeout_seconds + HEALTH_SECONDS)

    def refit(self, refit: Refit) -> Refitted:
        """Have the engine take new weights, which the trainer's ranks send at the same time.

        Waits for: the engine's current step, then every bucket from the trainer's ranks.
        Unblocked by: `Outbox.send` on each of them; heartbeats show that the engine lives.
        """
        most = self.settings.request_timeout_seconds
        deadline = time.monotonic() + most
        for message in self._stream("refit", refit):
            if isinstance(message, Refitted):
                return message
            if isinstance(message, CallFailure):
                raise EngineRefused(f"{self.name} refused refit: {message.error}")
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} did not finish a refit within {most:g} s")
        raise EngineError(f"{self.name} did not answer refit")

    def sleep(self) -> None:
        """Have the engine drop its requests, its weights and its cache, and free their memory."""
        self._call("sleep", None, None, self.settings.hang_timeout_seconds)

    def wake(self, request: Wake) -> None:
        """Have a sleeping engine allocate its weights, or its cache, again."""
        self._call("wake", request, None, self.settings.hang_timeout_seconds)

    def generate(self, request: Generate) -> Iterator[Generation]:
        """Yield responses as they end; end early only by raising EngineError."""
        for message in self._stream("generate", request):
            if isinstance(message, CallFailure):
                raise EngineError(f"{self.name} failed while it generated: {message.error}")
            if isinstance(message, Generation):
                yield message

    def describe(self) -> EngineDescription:
        """Return the engine's description; raise EngineRefused at another protocol version."""
        described = self._call("describe", None, EngineDescription, HEALTH_SECONDS)
        if described.protocol != PROTOCOL:
            raise EngineRefused(
                f"{self.name} has protocol version {described.protocol}, the trainer"
                f" {PROTOCOL}; start both from the same installation"
            )
        return described

    def _read_address(self) -> Address | None:
        try:
            return msgspec.json.decode(self.address_file.read_bytes(), type=Address)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.address_file} holds no engine's address: {error}") from error

    def _call(self, name: str, body: Any, answer: Any, seconds: float) -> Any:
        with self._answer(name, body, seconds) as stream:
            return msgspec.msgpack.decode(_whole(stream), type=answer or Any)

    def _stream(self, name: str, body: Any) -> Iterator[Generation | Refitted | CallFailure | None]:
        """Yield the messages of a streamed answer, and None for each heartbeat."""
        with self._answer(name, body, self.settings.hang_timeout_seconds) as stream:
            yield from frames(stream)

    @contextmanager
    def _answer(self, name: str, body: Any, seconds: float) -> Iterator[http.client.HTTPResponse]:
        """Yield the unread answer to a call; each read times out after `seconds`.

        Errors, also those while it is read, become EngineErrors.
        """
        assert self.address is not None, "connect first"
        host, port = self.address.host, self.address.port
        connection = http.client.HTTPConnection(host, port, timeout=seconds)
        headers = {"Authorization": f"Bearer {self.address.token}"}
        started = False
        try:
            connection.request("POST", f"/{name}", msgspec.msgpack.encode(body), headers)
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    failure = msgspec.msgpack.decode(_whole(response), type=CallFailure)
                    raise EngineRefused(f"{self.name} refused {name}: {failure.error}")
                started = True
                yield response
        except (OSError, EOFError, http.client.HTTPException, msgspec.MsgspecError) as error:
            what = f"did not answer {name}: {error!r}"
            if started:
                what = f"broke off its answer to {name}: {error!r}"
            elif isinstance(error, TimeoutError):
                what = f"said nothing for {seconds:g} s after {name}"
            raise EngineError(f"{self.name} {what}") from error


def _whole(response: http.client.HTTPResponse) -> bytes:
    """Return a short answer; raise HTTPException, and read no more, past LARGEST_ANSWER bytes."""
    data = response.read(LARGEST_ANSWER + 1)
    if len(data) > LARGEST_ANSWER:
        raise http.client.HTTPException(f"more than {LARGEST_ANSWER} bytes")
    return data
