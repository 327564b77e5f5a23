"""The two processes of a test by asserts: the program's and the examiner's.

A program can change anything in its own process, so the asserts run in the examiner's, where the
program's functions are `Remote`s: a call sends the arguments as plain data and receives plain data.
The program never sees the expected values, and none of its code runs in the examiner's process.

Plain data are None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict.
Any other object stays in its process and is sent as a number to call it by. Lists, dicts and sets
that a function changes in place change in the examiner's process too.

Runs inside the sandbox as a script, `program` or `tests`; imports only the standard library.
"""

from __future__ import annotations

import _thread
import builtins
import json
import math
import operator
import os
import re
import signal
import sys
import types

TYPE_CHECKING = False  # as typing's, whose import costs more than a run should
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MESSAGE_BYTES = 64 << 20
SHOWN = 300  # characters of a failed test and of a value
MUTABLE = (list, dict, set)
LARGE = 1 << 1024  # Python refuses to read decimals of thousands of digits
ATOMS = (bool, int, str)  # JSON's own; floats are sent as such too
COLLECTIONS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
QUALIFIER = re.compile(r"(?<![\w.])(\w+)\s*\.")  # `math` in `math.pi`
# The operations on the program's objects that the examiner may request, besides calls.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr,
    "getitem": operator.getitem,
    "iter": iter,
    "len": len,
    "next": next,
    "str": str,
}
PASSED, WRONG, ERROR = b"p", b"w", b"e"


class ProgramError(Exception):
    """An exception of the program that is not one of Python's own."""


class Channel:
    """A channel of calls over two pipes: a line of JSON for a call, one for its result; may nest.

    The other end may call the objects that were sent to it as numbers. Only the program's end
    allows it other operations (`open_house`).
    """

    def __init__(self, reading: int, writing: int, open_house: bool) -> None:
        self._reader = open(reading, "rb")  # noqa: SIM115 - it lives as long as the process
        self._writer = open(writing, "wb")  # noqa: SIM115
        self._open_house = open_house
        self._objects: list[Any] = []
        self.ended = False

    def send(self, message: list[Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def receive(self) -> list[Any]:
        """Return the next message. Raises EOFError where there is none, or it is too long."""
        line = self._reader.readline(MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            self.ended = True
            raise EOFError("the other end has gone")
        return list(json.loads(line))

    def request(
        self, operation: str, target: int, *arguments: Any, **keyword_arguments: Any
    ) -> Any:
        """Return the result of `operation` on the other end's `target`, serving its calls."""
        self.send(["do", operation, target, self.encode(arguments), self.encode(keyword_arguments)])
        while True:
            kind, *content = self.receive()
            if kind == "do":
                self.serve(content)
            elif kind == "raised":
                raise self._exception(*map(str, content))
            else:
                value, afterwards = map(self.decode, content)
                _change(arguments, afterwards)
                return value

    def serve(self, content: list[Any]) -> None:
        """Answer a request of the other end."""
        try:
            operation, target, arguments, keyword_arguments = content
            arguments, keyword_arguments = self.decode(arguments), self.decode(keyword_arguments)
            if operation == "call":
                value = self._objects[target](*arguments, **keyword_arguments)
            elif self._open_house:
                value = OPERATIONS[operation](self._objects[target], *arguments)
            else:
                raise PermissionError(operation)
            changed = [
                argument if isinstance(argument, MUTABLE) else None for argument in arguments
            ]
            answer = ["returned", self.encode(value), self.encode(changed)]
        except Exception as error:
            sys.excepthook(*sys.exc_info())
            answer = ["raised", type(error).__name__, str(error)]
        self.send(answer)

    @staticmethod
    def _exception(name: str, text: str) -> Exception:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text) if text else kind()
            except TypeError:  # it needs other arguments, as UnicodeDecodeError does
                pass
        return ProgramError(f"{name}: {text}")

    def encode(self, value: Any) -> Any:
        """Return `value` as JSON: itself, or an object whose one key is its type.

        Example: (1, {2.5}) is {"tuple": [1, {"set": [2.5]}]}, and the third object {"mine": 2}.
        """
        if isinstance(value, int) and not -LARGE < value < LARGE:
            return {"int": hex(value)}
        if value is None or isinstance(value, ATOMS):
            return value
        if isinstance(value, float):
            return float(value)
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, bytes | bytearray):
            return {"bytes": value.hex()}
        if isinstance(value, dict):
            items = [[self.encode(key), self.encode(item)] for key, item in value.items()]
            return {"dict": items}
        for name, kind in COLLECTIONS.items():
            if isinstance(value, kind):
                return {name: [self.encode(item) for item in value]}
        is_builtin = isinstance(value, types.BuiltinFunctionType | type)
        # Only the program's end reads these by name; its own, such as `Text`, stay objects there.
        if is_builtin and value.__module__ == "builtins" and not self._open_house:
            return {"builtin": value.__name__}
        if isinstance(value, Remote):
            return {"yours": value._number}
        self._objects.append(value)
        return {"mine": len(self._objects) - 1}

    def decode(self, encoded: Any) -> Any:
        """Return the value that `encode` encoded. Raises ValueError for anything else."""
        if not isinstance(encoded, dict):
            return encoded
        ((name, content),) = encoded.items()
        if name == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if name in COLLECTIONS:
            return COLLECTIONS[name](self.decode(item) for item in content)
        if name == "int":
            return int(content, base=16)
        if name == "complex":
            return complex(*content)
        if name == "bytes":
            return bytes.fromhex(content)
        if name == "yours":
            return self._objects[content]
        if name == "mine":
            return Remote(self, int(content))
        if name == "builtin" and self._open_house:
            return getattr(builtins, content)
        raise ValueError(name)


class Remote:
    """An object of the other end, which equals only itself.

    It has no comparisons on purpose: the other end would see the expected value and could answer
    anything. `in` compares in this process, with the items of the iteration.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number

    def __call__(self, *arguments: Any, **keyword_arguments: Any) -> Any:
        return self._channel.request("call", self._number, *arguments, **keyword_arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.request("getattr", self._number, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._channel.request("iter", self._number)
        if not isinstance(iterator, Remote):
            raise TypeError("it is not an iterator")
        while True:
            try:
                yield self._channel.request("next", iterator._number)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._channel.request("next", self._number)

    def __len__(self) -> int:
        return self._channel.request("len", self._number)

    def __getitem__(self, key: Any) -> Any:
        return self._channel.request("getitem", self._number, key)

    def __str__(self) -> str:
        return str(self._channel.request("str", self._number))

    def __bool__(self) -> bool:
        return True


def _change(arguments: tuple[Any, ...], afterwards: Any) -> None:
    """Update the mutable `arguments` after a call, as the other end changed them."""
    for before, after in zip(arguments, afterwards, strict=True):
        if type(before) is not type(after) or before == after:
            continue
        if isinstance(before, list):
            before[:] = after
        elif isinstance(before, dict | set):
            before.clear()
            before.update(after)


def run_program() -> None:
    """Run the program, send its names, and serve the examiner's calls until it exits."""
    _thread.stack_size(int(sys.argv.pop()))
    channel = Channel(3, 4, open_house=True)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as `site` would
    # Not __main__: the code that a program runs as a script is not under test.
    module = types.ModuleType("program")
    sys.modules["program"] = module
    with open("/program.py", encoding="utf-8") as file:
        exec(compile(file.read(), "/program.py", "exec"), vars(module))
    names = {name: item for name, item in vars(module).items() if not name.startswith("__")}
    channel.send(["names", channel.encode(names)])
    try:
        while True:
            _, *content = channel.receive()
            channel.serve(content)
    except EOFError:
        os._exit(0)


def run_tests() -> None:
    """Run the tests; write one letter for each (PASSED, WRONG or ERROR)."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    with open(0, encoding="utf-8") as file:
        tests = json.load(file)
    channel = Channel(3, 4, open_house=False)
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        _, names = channel.receive()
        space |= _usable_names(channel.decode(names), tests)
    except Exception as error:
        channel.ended = True
        print(f"no test was run: {error!r}", file=sys.stderr)
    for test in tests:
        os.write(5, ERROR if channel.ended else _verdict(test, space, channel))


def _verdict(test: str | dict[str, Any], space: dict[str, Any], channel: Channel) -> bytes:
    try:
        if isinstance(test, dict):
            _check_call(test, space)
        else:
            exec(compile(test, "test", "exec"), space)
    except AssertionError as error:
        print(f"failed: {str(test)[:SHOWN]}", error, file=sys.stderr)
        return WRONG
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return ERROR
    return ERROR if channel.ended else PASSED


def _check_call(test: dict[str, Any], space: dict[str, Any]) -> None:
    """Call the function that a test names; raise AssertionError for another value than expected."""
    name, solution = test["function"], space.get("Solution")
    function = space[name] if solution is None else getattr(solution(), name)
    value = function(*test["arguments"])
    if not _is_near(value, test["expected"], test["tolerance"]):
        raise AssertionError(f"returned {value!r:.{SHOWN}}")


def _is_near(value: Any, expected: Any, tolerance: float) -> bool:
    """Return whether a value is the expected JSON: a tuple is a list, a float within tolerance."""
    if isinstance(expected, list):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(_is_near(*pair, tolerance) for pair in zip(value, expected, strict=True))
        )
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(value == expected)


def _usable_names(names: dict[str, Any], tests: list[Any]) -> dict[str, Any]:
    """Return the program's `names` that the tests may use.

    Python's own names are excluded: a program's `abs` or `math` would decide what is equal.
    """
    statements = [test for test in tests if isinstance(test, str)]
    qualifiers = {name for test in statements for name in QUALIFIER.findall(test)}
    standard_modules = {
        name: __import__(name) for name in qualifiers & sys.stdlib_module_names & names.keys()
    }
    hidden = {name for name in names if hasattr(builtins, name) or name.startswith("__")}
    return {name: item for name, item in names.items() if name not in hidden} | standard_modules


if __name__ == "__main__":
    {"program": run_program, "tests": run_tests}[sys.argv[1]]()
