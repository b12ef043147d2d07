"""`outrider up`: two configurations that fit each other, and two children that live and die together."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from client.pair import plan
from client.supervisor import Child, ChildDied, Supervisor
from client.up import check_addresses_are_free, children
from shared.config import ConfigError
from shared.errors import CannotListen

# A stand-in service: says that it runs, ends in an orderly way on SIGTERM, or in the way it is told to.
STAND_IN = """
import signal, sys, pathlib
def end(*_): print("bye", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else end)
print("hello", flush=True)
pathlib.Path(sys.argv[1]).touch()
if "dies" in sys.argv: sys.exit(3)
while True: signal.pause()
"""


def stand_in(name: str, directory: Path, *how: str) -> Child:
    started = directory / name

    async def is_ready() -> bool:
        return started.exists()

    return Child(name, (sys.executable, "-c", STAND_IN, str(started), *how), dict(os.environ), is_ready)


class Lines:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.said_after = asyncio.Event()

    def write(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        if line == "after":
            self.said_after.set()


async def live(supervisor: Supervisor) -> None:
    async with supervisor:
        await supervisor.wait_until_ready()
        await supervisor.wait_until_one_dies()


async def test_children_start_in_order_and_stop_in_the_opposite_order(tmp_path: Path) -> None:
    seen = Lines()
    async with Supervisor([stand_in("one", tmp_path), stand_in("two", tmp_path)], seen.write, grace_s=30) as supervisor:
        waited: list[Sequence[str]] = []
        await supervisor.wait_until_ready(waited.append)
    assert waited[0] == ["one", "two"]
    assert sorted(seen.lines[:2]) == [("one", "hello"), ("two", "hello")]
    assert seen.lines[2:] == [("two", "bye"), ("one", "bye")]


async def test_a_child_that_dies_is_told_with_its_code_and_the_other_is_stopped(tmp_path: Path) -> None:
    seen = Lines()
    with pytest.raises(ChildDied, match="two exited with code 3"):
        await live(Supervisor([stand_in("one", tmp_path), stand_in("two", tmp_path, "dies")], seen.write, grace_s=30))
    assert seen.lines[-1] == ("one", "bye")


async def test_a_child_that_dies_while_it_loads_ends_the_wait(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    dies = Child("two", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), dict(os.environ), never)
    with pytest.raises(ChildDied, match="two was killed by SIGKILL"):
        await live(Supervisor([stand_in("one", tmp_path), dies], lambda *_: None, grace_s=30))


async def test_a_child_that_does_not_listen_is_killed_after_its_grace(tmp_path: Path) -> None:
    seen = Lines()
    async with Supervisor([stand_in("one", tmp_path, "deaf")], seen.write, grace_s=0.05) as supervisor:
        await supervisor.wait_until_ready()
    assert seen.lines == [("one", "hello")]


async def test_a_program_that_does_not_exist_leaves_no_child_behind(tmp_path: Path) -> None:
    seen = Lines()
    first = stand_in("one", tmp_path)
    missing = Child("two", ("/nowhere/program",), {}, first.is_ready)
    with pytest.raises(FileNotFoundError):
        await live(Supervisor([first, missing], seen.write, grace_s=30))
    assert ("one", "bye") in seen.lines or not (tmp_path / "one").exists()


async def test_a_line_beyond_the_limit_does_not_block_its_child() -> None:
    async def ready() -> bool:
        return True

    seen = Lines()
    program = "print('x' * (3 << 20)); print('after', flush=True); import signal; signal.pause()"
    async with Supervisor([Child("one", (sys.executable, "-u", "-c", program), dict(os.environ), ready)], seen.write, grace_s=30):
        async with asyncio.timeout(60):
            await seen.said_after.wait()


RUN_UP = """
import asyncio, pathlib, sys
from rich.console import Console
from client.supervisor import Supervisor
from client.up import line_writer, run_up
from tests.test_client_up import stand_in
directory = pathlib.Path(sys.argv[1])
group = [stand_in("verifier", directory, *sys.argv[2:3]), stand_in("draft", directory, *sys.argv[3:4])]
console = Console(stderr=True, highlight=False)
asyncio.run(run_up(Supervisor(group, line_writer(console), 60.0), console, "all ready"))
print("orderly")
"""


def run_up(directory: Path, *how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN_UP, str(directory), *how]
    # A group of its own: the signals of these tests are meant for it alone.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=Path(__file__).parents[1]
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "all ready" in line:
            return process
    raise AssertionError("it never became ready")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_both_in_order(tmp_path: Path, number: signal.Signals) -> None:
    process = run_up(tmp_path)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "orderly\n")
    assert err.index("draft │ bye") < err.index("verifier │ bye")


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process = run_up(tmp_path, "deaf", "deaf")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("stopping" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_the_pair_meets_and_the_window_is_the_number_of_tokens_scored() -> None:
    pair = plan(["--listen", "127.0.0.1:7001", "--link", "127.0.0.1:7002"], [], ["max-draft-tokens=5", "log-level=debug"])
    assert (pair.draft.verifier, pair.draft.link) == ("127.0.0.1:7001", "127.0.0.1:7002")
    assert (pair.verifier.window, pair.verifier.max_draft_tokens) == (5, 5)
    assert (pair.verifier.log_level, pair.draft.log_level) == ("debug", "debug")


def test_what_is_set_wins_over_what_up_would_choose() -> None:
    pair = plan([], ["--draft", "a"], ["verifier.window=20", "draft.draft=b", "draft.link=127.0.0.1:7009", "verifier.kv_blocks=9"])
    assert (pair.verifier.window, pair.draft.draft, pair.draft.link, pair.verifier.kv_blocks, pair.draft.kv_blocks) == (
        20,
        "b",
        "127.0.0.1:7009",
        9,
        0,
    )


def test_a_draft_model_and_a_speculator_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="--speculator: cannot be given beside a draft model"):
        plan([], ["--draft", "a", "--speculator", "b"])


def test_every_mistake_in_either_service_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan([], [], ["block-size=0", "draft.nope=1", "nope", "quux=1", "draft.ngram-max=99"])
    assert set(caught.value.problems) == {
        "--block-size must be a whole number from 1 to 256; it is '0'",
        "--set draft.nope=1: draft has no setting nope",
        "--set nope: must be SETTING=VALUE, verifier.SETTING=VALUE or draft.SETTING=VALUE",
        "--set quux=1: neither service has a setting quux",
        "--ngram-max must be a whole number from 1 to 16; it is '99'",
    }


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("listen=127.0.0.1:7001", "verifier.listen and draft.listen are both on port 7001"),
        ("verifier.link=127.0.0.1:0", "verifier.link needs a port of its own, not 0: the other service and clients must find it"),
    ],
)
def test_addresses_that_cannot_work_on_one_machine_are_refused(assignment: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan([], [], [assignment])
    assert caught.value.problems == (problem,)


def test_the_children_take_turns_on_all_cores() -> None:
    verifier, draft = children(plan([], [], ["draft.draft=some/model"]))
    assert [child.name for child in (verifier, draft)] == ["verifier", "draft"]
    assert "--draft=some/model" in draft.command
    for child in (verifier, draft):
        assert child.environment["OMP_WAIT_POLICY"] == "PASSIVE"
        assert 0 < int(child.environment["GOMP_SPINCOUNT"]) < 20_000, "half a millisecond: the other service's turn"
        assert int(child.environment["OMP_NUM_THREADS"]) >= 1


def test_an_address_in_use_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match=address):
            check_addresses_are_free(plan([], [], [f"draft.metrics={address}", *elsewhere()]))
    check_addresses_are_free(plan([], [], [f"draft.metrics={address}", *elsewhere()]))


def elsewhere() -> list[str]:
    """Assignments that keep the other addresses off the default ports, which may be in use here."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    names = ("verifier.listen", "verifier.link", "draft.listen")
    return [f"{name}=127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)] + ["verifier.metrics="]
