"""A program earns the score of its tests, and none earns it by pretending."""

from __future__ import annotations

import time

import pytest

from stages.rewards.sandbox import Limits, equals, score
from tests.stages.conftest import children


def test_pairs_are_scored_separately_and_trailing_space_is_ignored() -> None:
    program = "x = int(input())\nprint(x + 1, end=' \\n\\n')\nif x == 2: raise ValueError(x)"
    pairs = [{"input": "1", "output": "2"}, {"input": "2", "output": "3"}]
    pairs += [{"input": "3\n", "output": "5\n"}, {"input": "4\n", "output": "5\n"}]
    result = score(program, pairs, Limits())
    assert result.verdicts == ("passed", "error", "wrong", "passed")
    assert result.passed == 0.5 and "ValueError: 2" in result.errors
    early = score(program, pairs, Limits(), stop_early=True)
    assert early.verdicts == ("passed", "error", "error", "error")


HONEST = """
import math
from dataclasses import dataclass
def add(a, b=1): return a + b
def sort(items): items.sort(); items[0] = list(items[0:1])
def squares(): yield from (n * n for n in range(4))
def fail(kind): raise {"value": ValueError, "own": Own}[kind]("so")
def apply(function, items): return [function(item) for item in items]
def kinds(): return (1, [2.5, float("inf")], {3: {4}}, b"5", None, 1j, frozenset([6]))
def select(x): return math.floor(x)
class Own(Exception): pass
@dataclass
class Stack:
    items: "list"
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
LIMIT = 10 ** 30
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3 and add(1) == 2 and add(1, b=4) == 5",
        "a = [3, 1, 2]\nsort(a)\nassert a == [[1], 2, 3]",
        "assert list(squares()) == [0, 1, 4, 9] and 9 in squares() and 5 not in squares()",
        "assert sorted(squares(), reverse=True)[0] == 9",
        "try:\n  fail('value')\n  assert False\nexcept ValueError as e:\n  assert str(e) == 'so'",
        "try:\n  fail('own')\n  assert False\nexcept Exception as e:\n  assert 'Own' in str(e)",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, [1]) == ['1']",
        "assert kinds() == (1, [2.5, float('inf')], {3: {4}}, b'5', None, 1j, frozenset([6]))",
        "assert [type(k) for k in kinds()][:3] == [int, list, dict]",
        "s = Stack([1]).push(2)\nassert s.items == [1, 2] and len(s) == 2 and s[1] == 2",
        "assert str(Stack([])) == 'Stack(items=[])'",
        "assert math.isclose(add(0.1, 0.2), 0.3) and select(1.5) == 1",
        "assert LIMIT == 10 ** 30 and add(10 ** 5000) == 10 ** 5000 + 1",
        "def check(candidate):\n  assert candidate(2, 2) == 4\ncheck(add)",
    ],
)
def test_asserts_see_the_program_s_names(test: str) -> None:
    result = score(HONEST, [test, f"assert not add\n{test}"], Limits())
    assert result.verdicts == ("passed", "wrong"), result.errors


# Programs that do not add, under tests that want them to.
FAKES = {
    "leaves early": "raise SystemExit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves when asked": "import os\ndef add(a, b): os._exit(0)",
    "leaves at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "says so": "print('passed\\npp')\ndef add(a, b): print('pp'); return 'passed'",
    "equals everything": """
class All(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def add(a, b): return All()
""",
    "equals everything, a stranger": """
class All:
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __lt__(self, other): return True
    def __abs__(self): return 0
    def __float__(self): return 5.0
    def __contains__(self, other): return True
def add(a, b): return All()
""",
    "own comparisons": """
import math
def abs(x): return 0
def sorted(x): return 0
class math:
    isclose = lambda *a, **k: True
def add(a, b): return 0
""",
    "changes Python": """
import builtins, sys
builtins.abs = builtins.sorted = lambda x: 0
builtins.AssertionError = builtins.Exception
sys.modules["math"].isclose = lambda *a, **k: True
sys.excepthook = lambda *a: None
def add(a, b): return 0
""",
    "writes everywhere": """
import os
def add(a, b): return 0
for number in range(3, 64):
    try: os.write(number, b'p' * 9)
    except OSError: pass
""",
    "answers for all": """
import os
os.write(4, b'["names", {"dict": [["add", {"mine": 0}], ["__builtins__", {"dict": []}]]}]\\n')
os.write(4, b'["returned", {"mine": 0}, {"list": [null, null]}]\\n' * 99)
""",
    "calls back": """
import os
os.write(4, b'["names", {"dict": [["add", {"mine": 0}]]}]\\n')
os.write(4, b'["do", "get", 0, {"tuple": ["__globals__"]}, {"dict": []}]\\n' * 9)
os.write(4, b'["do", "call", -1, {"tuple": []}, {"dict": []}]\\n' * 9)
os.write(4, b'["returned", {"builtin": "eval"}, {"list": [null, null]}]\\n' * 99)
""",
    "kills the judge": """
import os, signal
def add(a, b):
    for p in range(2, 9):
        if p != os.getpid():
            try: os.kill(p, signal.SIGINT); os.kill(p, signal.SIGTERM); os.kill(p, signal.SIGKILL)
            except OSError: pass
    return 0
""",
    "looks for the answer": """
import gc, os, sys
def add(a, b):
    seen = [o for o in gc.get_objects() if isinstance(o, str) and 'assert' in o]
    try: seen += [os.read(0, 1 << 20), os.pread(5, 1 << 20, 0)]
    except OSError: pass
    frame = sys._getframe()
    while frame:
        seen += [v for v in frame.f_locals.values() if v == 5]; frame = frame.f_back
    return 5 if any(b'== 5' in s for s in seen if isinstance(s, bytes)) or 5 in seen else 0
""",
    "traces": "import sys\nsys.settrace(lambda *a: sys.exit(0))\ndef add(a, b): return 0",
    "raises": "def add(a, b): raise SystemExit(0)",
    "never ends": "def add(a, b):\n  while True: pass",
    "says too much": "def add(a, b): return 'x' * (100 << 20)",
    "says it deeply": "def add(a, b):\n  r = []\n  for _ in range(10**5): r = [r]\n  return r",
}
SUMS = [
    "assert add(2, 3) == 5",
    "assert abs(add(2, 3) - 5) < 1e-9",
    "assert sorted([add(2, 3)]) == [5]",
    "assert math.isclose(add(2, 3), 5)",
    "import math\nassert math.isclose(add(2, 3), 5)",
    "assert add(2, 3) in (5,) and 5 in add(2, 3)",
]


@pytest.mark.usefixtures("sentinel")
@pytest.mark.parametrize("name", FAKES)
def test_no_program_passes_an_assert_by_cheating(name: str) -> None:
    before = children()
    result = score(FAKES[name], SUMS, Limits(wall_seconds=1.0, memory_mebibytes=256))
    assert len(result.verdicts) == len(SUMS)
    assert "passed" not in result.verdicts, result
    assert children() == before


@pytest.mark.parametrize(
    ("output", "expected", "is_equal"),
    [
        ("0.30000000000000004", "0.3", True),
        ("0.333333", "0.333333333333", True),
        ("3", "3.0", True),
        ("3.0", "3", True),
        ("1e-7 2", "0.0 2", True),
        ("1000000.9", "1000000.0", True),  # relative
        ("0.30001", "0.3", False),
        ("3.0000001", "3", False),  # a whole number is expected
        ("1000000008", "1000000007", False),
        ("1.000000007e9", "1000000007", True),
        ("1.0000000070001e9", "1000000007", False),
        ("01", "1", False),
        ("1", "01", False),
        ("0.3 0.3", "0.3", False),
        ("0.3\n0.3", "0.3", False),
        ("0.3\n", "0.30", True),
        ("nan", "0.3", False),
        ("inf", "1e999", False),
        ("1e" + "9" * 20, "3", False),
        ("0.1e-" + "9" * 20, "0", False),
        ("Case #1: 0.49999999", "Case #1: 0.5", True),
        ("case #1: 0.49999999", "Case #1: 0.5", False),
        ("1.2.3", "1.2.30", False),
        ("0" * 500 + ".5", "0.5", False),
    ],
)
def test_an_expected_decimal_has_a_tolerance(output: str, expected: str, is_equal: bool) -> None:
    assert equals(output, expected, 1e-6) == is_equal
    assert equals(output, expected, 0) == (output.rstrip() == expected)


def test_a_long_output_is_compared_in_time() -> None:
    start = time.process_time()
    assert not equals("1" * (1 << 20) + "x", "1" * (1 << 20) + ".0", 1e-6)
    assert not equals("1.5 " * (1 << 18), "1.5 " * (1 << 18) + "2.5", 1e-6)
    assert time.process_time() - start < 3


SOLUTION = """class Solution:
    def twice(self, numbers: List[int], by: Optional[int] = 2):
        return tuple(by * x for x in deque(numbers)), inf > gcd(4, 6)
    def half(self, x): return x / 2
    def calls(self): self.n = getattr(self, "n", 0) + 1; return self.n
"""


def test_calls_of_a_function_or_a_method_are_compared_as_json() -> None:
    def verdicts(program: str, *tests: tuple[str, list[object], object]) -> list[str]:
        names = ("function", "arguments", "expected")
        calls = [dict(zip(names, test, strict=True)) for test in tests]
        return list(score(program, calls, Limits(), tolerance=1e-6).verdicts)

    assert (
        verdicts(
            SOLUTION,
            ("twice", [[1, 2]], [[2, 4], True]),
            ("twice", [[1], 3], [[3], True]),
            ("twice", [[1, 2]], [[2, 5], True]),
            ("half", [0.6000000001], 0.3),
            ("half", [6], 3),
            ("half", [0.61], 0.3),
            ("half", ["x"], 3),
            ("third", [1], 3),
            ("calls", [], 1),
            ("calls", [], 1),
        )
        == ["passed", "passed", "wrong", "passed", "passed", "wrong", "error", "error"]
        + ["passed"] * 2
    )
    program = "from __future__ import annotations\ndef f(x: Nothing): return pow(x, 2, 5)"
    assert verdicts(program, ("f", [4], 1), ("g", [4], 1)) == ["passed", "error"]
    # What is expected never reaches the program, and its own equality decides nothing.
    cheat = "class Same:\n  def __eq__(self, other): return True\ndef f(x): return Same()"
    assert verdicts(cheat, ("f", [4], 1), ("f", [4], [1]), ("f", [4], 1.0)) == ["wrong"] * 3


def test_a_program_may_rename_a_type_of_python() -> None:
    program = "from typing import *\nNumber = int\ndef f(x: Number): return Number(x)"
    assert score(program, ["assert f('3') == 3", "assert Number(2.5) == 2"], Limits()).passed == 1


def test_a_failed_call_with_large_arguments_does_not_end_the_run() -> None:
    call = {"function": "f", "arguments": ["x" * 200_000], "expected": 1}
    result = score("def f(x): return len(x) - 199999 if x[0] == 'y' else x", [call] * 9, Limits())
    assert result.verdicts == ("wrong",) * 9


@pytest.mark.parametrize(
    "program",
    [
        "print(10 ** 4999 + int('9' * 4999))",
        "import sys\nsys.stdin = open('/dev/stdin')\nn = int(input())\nprint(n)",
        "print(open('/dev/stdin').read(), end='')",
        "import sys\nassert sys.argv[1:] == []\nprint(open(0).read())",
    ],
)
def test_what_programs_of_contests_do_works(program: str) -> None:
    text = str(10**4 + 9) if "stdin" in program or "open" in program else "1" + "9" * 4999
    if "10 **" in program:
        text = "19" + "9" * 4998
    pair = {"input": text, "output": text}
    assert score(program, [pair], Limits()).verdicts == ("passed",)


def test_as_many_threads_start_as_the_limit_allows() -> None:
    program = (
        "import threading, time\n"
        "for _ in range(15): threading.Thread(target=time.sleep, args=(0.5,)).start()\n"
        "print(threading.active_count())"
    )
    for memory in (128, 512):
        limits = Limits(memory_mebibytes=memory, processes=16)
        assert score(program, [{"input": "", "output": "16"}], limits).verdicts == ("passed",)
    test = "assert f() == 16"
    function = program.replace("print(", "n = (") + "\ndef f(): return n"
    assert score(function, [test], Limits()).verdicts == ("passed",)
