"""The addresses that the processes of a real run listen on."""

from __future__ import annotations

import ipaddress
import time
from pathlib import Path

from tests.end_to_end.process_tree import KILLED, tree
from tests.runs import REPOSITORY, braid
from tests.sockets import listening

CONFIG = str(REPOSITORY / "configs" / "smoke.yaml")
# Messages, since shared memory needs no store; two engine ranks, which have a group of vLLM's.
ARGUMENTS = ("engine.tensor=2", "engine.transport=messages")
PARTS = ("rank 0", "rank 1", "engine", "engine's child")


def test_nothing_of_a_run_on_one_machine_is_reached_from_another(tmp_path: Path) -> None:
    log = tmp_path / "braid.log"
    only = ("--only", "cold_start", "--only", "experts.chain_sum")
    launched = braid(tmp_path, "run", CONFIG, *ARGUMENTS, *only, log=log)
    found: dict[str, set[str]] = {}
    while launched.poll() is None:
        processes = tree([launched.pid])
        names = {each.number: part for part in PARTS for each in KILLED[part](processes)}
        for number in processes:
            found.setdefault(names.get(number, "other"), set()).update(listening(number))
        time.sleep(0.1)
    assert launched.returncode == 0, log.read_text()
    assert all(found.get(part) for part in PARTS), found
    addresses = set.union(*found.values())
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), found
