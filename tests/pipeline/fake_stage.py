"""A stage's rank that trains nothing: it leaves the files a stage leaves, or fails on demand.

python fake_stage.py JOB '{"STAGE": {"RANK": ACTION}}' ERROR_MARK
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 600  # as tests.awaiting's, which a rank's process does not find


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sys.exit(run(job, json.loads(sys.argv[2]), rank, world))


def run(job: dict, actions: dict[str, dict[str, str]], rank: int, world: int) -> int:
    """Do the rank's action and return its exit status."""
    print(f"rank {rank} of {world} starts", flush=True)
    action = actions.get(job["stage"], {}).get(str(rank), "work")
    try:
        ACTIONS[action](job, rank)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def work(job: dict, rank: int) -> None:
    if rank:
        return
    directory = Path(job["directory"])
    for step in (1, 2):
        line = {"step": step, "steps": 2, "time": time.time(), "loss": 1 / step}
        line |= {"mismatch_max": 2e-5 / step}
        with (directory / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")
    if job["kind"] == "export":
        Path(job["output"]).mkdir(parents=True)
    elif job["kind"] in ("evaluate", "gate"):
        measure(directory, job, first=0.5 if job["kind"] == "evaluate" else 0.7)
    elif job["kind"] == "preview":
        preview(directory, job)
    elif job["kind"] == "sample":
        collect(directory)
    else:
        untrained = job["kind"] in ("import", "merge_weights", "quantize")
        save(directory, job["stage"], 0 if untrained else 2)


def measure(directory: Path, job: dict, first: float) -> None:
    """Write results: the first model solves the share `first` of the problems, the others half."""
    models = {}
    for folder in ("models", "solved"):
        (directory / folder).mkdir(exist_ok=True)
    for name in job["models"]:
        domains = job["evaluated_on"].get(name, job["settings"]["domains"])
        share = 0.5 if models else first
        models[name] = dict.fromkeys(domains, score(share))
        right = [int(number < 400 * share) for number in range(400)]
        (directory / "models" / f"{name}.json").write_text(json.dumps(models[name]))
        (directory / "solved" / f"{name}.json").write_text(
            json.dumps(dict.fromkeys(domains, right))
        )
    numbers = list(map(str, range(400)))
    keys = dict.fromkeys(job["settings"]["domains"], numbers)
    (directory / "problems.json").write_text(json.dumps(keys))
    (directory / "results.json").write_text(json.dumps({"models": models}))


def score(accuracy: float) -> dict:
    return {"accuracy": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05, "n": 400}


def fall_short(job: dict, rank: int) -> None:
    """Write a gate's results in which its model is worse than the others."""
    if rank == 0:
        measure(Path(job["directory"]), job, first=0.3)


def draw_level(job: dict, rank: int) -> None:
    """Write a gate's results that nearly pass."""
    if rank == 0:
        measure(Path(job["directory"]), job, first=0.47)


def preview(directory: Path, job: dict) -> None:
    """Write three groups: one all right, one all wrong, one of both."""
    size = job["settings"]["domains"][job["domain"]]["sampling"]["group_size"]
    groups = [
        [
            {
                "prompt": "12-3=",
                "response": "<9>9",
                "reward": float(right),
                "parts": {"exact": float(right)},
                "solved": right,
                "finished": right,
                "tokens": 4,
            }
            for right in rights
        ]
        for rights in ([True] * size, [False] * size, [True] + [False] * (size - 1))
    ]
    found = {"groups": groups, "failures": [], "watch_failures": [], "parent": job["parent"]}
    (directory / "results.json").write_text(json.dumps(found))


def collect(directory: Path) -> None:
    rows = b"rows of Parquet"
    (directory / "collected.parquet").write_bytes(rows)
    found = {"digest": hashlib.sha256(rows).hexdigest(), "rows": 1, "drawn": 1, "dropped": {}}
    (directory / "collection.json").write_text(json.dumps(found))


def save(directory: Path, digest: str, step: int = 2) -> None:
    checkpoint = directory / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "checksums.json").write_text(json.dumps({"digest": digest, "files": {}}))


def learn_otherwise(job: dict, rank: int) -> None:
    """Leave another checkpoint than `work`."""
    work(job, rank)
    if rank == 0:
        save(Path(job["directory"]), f"{job['stage']} otherwise")


def end_early(job: dict, rank: int) -> None:
    """Be done at a step before the last, as a stop rule has it."""
    if rank:
        return
    directory = Path(job["directory"])
    save(directory, job["stage"])
    checkpoint = directory / "checkpoints" / "step_2"
    (checkpoint / "state.json").write_text(json.dumps({"ended": "good enough at step 1"}))
    checkpoint.rename(checkpoint.with_name("step_1"))


def save_then_hang(job: dict, rank: int) -> None:
    if rank == 0:
        save(Path(job["directory"]), job["stage"])
    hang(job, rank)


def save_then_break(job: dict, rank: int) -> None:
    """Fail after the first step, which is saved."""
    if rank == 0:
        save(Path(job["directory"]), job["stage"], step=1)
        break_down(job, rank)


def break_down(job: dict, rank: int) -> None:
    print("Traceback (most recent call last):\nValueError: broken")
    sys.exit(3)


def leave_early(job: dict, rank: int) -> None:
    sys.exit(0)


def speak_without_a_log(job: dict, rank: int) -> None:
    descriptor = int(os.environ["BRAID_STATUS_DESCRIPTOR"])
    os.write(descriptor, f"{sys.argv[3]}the disk is full\n".encode())
    sys.exit(1)


def warn_and_work(job: dict, rank: int) -> None:
    descriptor = int(os.environ["BRAID_STATUS_DESCRIPTOR"])
    os.write(descriptor, b"braid-notice: step_5 is damaged\nbraid-notice: it took step_4\n")
    work(job, rank)


def say_why(job: dict, rank: int) -> None:
    print(f"a long traceback\n{sys.argv[3]}domain chain_sum has no prompts")
    sys.exit(1)


def compute_long(job: dict, rank: int) -> None:
    """Compute for ever in the main thread, with the heartbeat of a real rank."""
    with _heartbeat(job, rank):
        hang_deaf(job, rank)


def be_stopped(job: dict, rank: int) -> None:
    """Be stopped after the first heartbeats, as by `kill -STOP`."""
    with _heartbeat(job, rank):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)


def _heartbeat(job: dict, rank: int) -> contextlib.AbstractContextManager[None]:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from parallel import timeline

    timeline.BEAT_SECONDS = 0.1
    return timeline.heartbeat(Path(sys.argv[1]).with_name(f"alive_{rank}"))


def lose_the_other(job: dict, rank: int) -> None:
    """Fail as a rank of gloo does a moment after the other one ended."""
    other = Path(sys.argv[1]).with_name(f"rank_{1 - rank}.log")
    while "broken" not in (other.read_text() if other.exists() else ""):
        time.sleep(0.02)
    time.sleep(0.2)
    print("Traceback (most recent call last):\nRuntimeError: Connection closed by peer [::1]:1234")
    sys.exit(1)


def be_killed(job: dict, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def engine_pid(address: Path) -> int | None:
    """Return the process that wrote the address, while the file exists."""
    try:
        return json.loads(address.read_text())["pid"]
    except FileNotFoundError:
        return None


def another_engine(address: Path, known: int | None) -> int:
    while (pid := engine_pid(address)) in (None, known):
        time.sleep(0.01)
    return pid


def await_engines(job: dict, rank: int) -> None:
    for address in job["engine_addresses"]:
        another_engine(Path(address), None)
    (Path(job["directory"]) / "cores").write_text(json.dumps(sorted(os.sched_getaffinity(0))))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    (Path(job["directory"]) / "gpus").write_text(json.dumps(visible))
    work(job, rank)


def meet_the_other_expert(job: dict, rank: int) -> None:
    """End well only beside the other expert, which has to be running at the same time."""
    directory = Path(job["directory"])
    (directory / "here").touch()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(directory.parent.glob("experts.*/here"))) < 2:
        if time.monotonic() > deadline:
            sys.exit(1)
        time.sleep(0.01)
    await_engines(job, rank)


def kill_the_last_engine(job: dict, rank: int) -> None:
    """Kill it once all have started, and wait until all its members have started again."""
    addresses = [Path(each).resolve() for each in job["engine_addresses"]]
    processes = {each: another_engine(each, None) for each in addresses}
    os.kill(processes[addresses[-1]], signal.SIGKILL)
    engine, _, _ = addresses[-1].parent.name.partition(".")
    for each in addresses:
        if each.parent.name.partition(".")[0] == engine:
            another_engine(each, processes[each])
    work(job, rank)


def kill_every_engine(job: dict, rank: int) -> None:
    killed = None
    while True:
        killed = another_engine(Path(job["engine_addresses"][0]), killed)
        os.kill(killed, signal.SIGKILL)


def give_an_engine_up(job: dict, rank: int) -> None:
    address = Path(job["engine_addresses"][0])
    silent = another_engine(address, None)
    address.with_name("restart").write_text("no answer for 120 s\n")
    another_engine(address, silent)
    work(job, rank)


def hang(job: dict, rank: int) -> None:
    (Path(job["directory"]) / f"pid_{rank}").write_text(str(os.getpid()))
    time.sleep(600)


def hang_deaf(job: dict, rank: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(job, rank)


ACTIONS = {
    action.__name__: action
    for action in (
        work,
        learn_otherwise,
        end_early,
        fall_short,
        draw_level,
        save_then_hang,
        save_then_break,
        break_down,
        say_why,
        leave_early,
        speak_without_a_log,
        warn_and_work,
        lose_the_other,
        be_killed,
        be_stopped,
        compute_long,
        await_engines,
        meet_the_other_expert,
        kill_the_last_engine,
        kill_every_engine,
        give_an_engine_up,
        hang,
        hang_deaf,
    )
}

if __name__ == "__main__":
    main()
