"""What happens to drafters, verifiers, connections and clients never changes a token, over real gRPC between real processes.

Faults are fired on the n-th token that the clients have received. Every fault that ends or stops a drafter comes after drafts of its were
accepted, and the test says so.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest
from outrider.v1 import generate_pb2, link_pb2, link_pb2_grpc, verifier_pb2_grpc

from client import Client, Part
from client.bench.delay_proxy import DelayProxy
from client.convert import to_request
from shared.errors import Unavailable
from shared.sampling import SamplingParams
from tests.support.calls import AtToken, Referee, complete, complete_all, to_options
from tests.support.impostor import Impostor
from tests.support.model_dir import ModelDirs, save_models
from tests.support.processes import Services, VerifierProcess, scrape, until
from tests.support.stage import Stage
from verifier_service.request import Request, Stopping

MAX_DRAFT_TOKENS = 4
FAULT_AT = 60  # tokens received, over all requests of a test
NUM_TOKENS = 120
REQUESTS = [
    Request("greedy", (4, 20, 33), SamplingParams(temperature=0.0), Stopping(NUM_TOKENS), seed=0, max_draft_tokens=MAX_DRAFT_TOKENS),
    Request("sampled", (5, 6, 7, 8), SamplingParams(), Stopping(NUM_TOKENS), seed=1, max_draft_tokens=MAX_DRAFT_TOKENS),
    Request("top-k", (9, 10) * 6, SamplingParams(temperature=0.75, top_k=8), Stopping(NUM_TOKENS), seed=2, max_draft_tokens=MAX_DRAFT_TOKENS),
    Request(
        "penalties",
        (40, 41, 42),
        SamplingParams(temperature=0.875, repetition_penalty=1.25, frequency_penalty=0.375),
        Stopping(NUM_TOKENS),
        seed=3,
        max_draft_tokens=MAX_DRAFT_TOKENS,
    ),
]
STALE = ("duplicate", "mismatch", "late", "gap", "over_window", "unknown_sequence")
REJECTED = ("too_long", "bad_shape", "bad_probability", "bad_frame")
STEP = "verify_step_seconds"
RSS_SLACK_BYTES = 20 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelDirs:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def referee(models: ModelDirs) -> Referee:
    return Referee(models)


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


@pytest.fixture(autouse=True)
def logs(services: Services) -> Iterator[None]:
    yield
    services.show()


@pytest.fixture(scope="module")
def stage(services: Services, models: ModelDirs) -> Iterator[Stage]:
    stage = Stage(services, models, MAX_DRAFT_TOKENS)
    yield stage
    stage.close()


async def play(stage: Stage, referee: Referee, requests: list[Request], on_part: Callable[[Part], None]) -> None:
    """All requests at once; whatever `on_part` does, each is what plain decoding says."""
    completions = await complete_all(stage.verifier.address, requests, on_part)
    for request, completion in zip(requests, completions, strict=True):
        referee.check(request, completion)


async def drafts_are_accepted(stage: Stage, referee: Referee, preferred: str | None = None) -> None:
    """New requests are drafted for, sooner or later."""

    async def accepted() -> bool:
        request = replace(REQUESTS[0], preferred_drafter=preferred)
        async with Client(stage.verifier.address) as client:
            completion = await complete(client, request)
        referee.check(request, completion)
        return completion.usage.accepted_tokens > 0

    await until(accepted, "drafts are accepted")


async def test_a_killed_drafter_changes_nothing_and_its_successor_drafts_again(stage: Stage, referee: Referee) -> None:
    (drafter,) = await stage.with_drafters("a")
    fault = AtToken(FAULT_AT, lambda: drafter.send(signal.SIGKILL))
    await play(stage, referee, REQUESTS, fault)
    assert fault.accepted_before
    await stage.with_drafters()
    await stage.with_drafters("a")
    await drafts_are_accepted(stage, referee)


async def test_a_stopped_drafter_changes_nothing_and_drafts_again_once_it_goes_on(stage: Stage, referee: Referee) -> None:
    (drafter,) = await stage.with_drafters("a")
    stop = AtToken(FAULT_AT, lambda: drafter.send(signal.SIGSTOP))
    go_on = AtToken(FAULT_AT + 3 * NUM_TOKENS, lambda: drafter.send(signal.SIGCONT))

    def on_part(part: Part) -> None:
        stop(part)
        go_on(part)

    await play(stage, referee, REQUESTS, on_part)
    assert stop.accepted_before
    await drafts_are_accepted(stage, referee)


async def test_when_one_of_two_drafters_is_killed_the_other_takes_over(stage: Stage, referee: Referee) -> None:
    victim, _ = await stage.with_drafters("a", "b")
    fault = AtToken(FAULT_AT // 2, lambda: victim.send(signal.SIGKILL))
    late = {request.request_id: 0 for request in REQUESTS[:2]}  # accepted tokens in the second half of the victim's requests

    async with Client(stage.verifier.address) as client, asyncio.TaskGroup() as group:

        async def run(request: Request, is_victims: bool) -> None:
            received = 0

            def on_part(part: Part) -> None:
                nonlocal received
                received += len(part.token_ids)
                if is_victims:
                    fault(part)
                    late[request.request_id] += part.accepted if received > NUM_TOKENS // 2 else 0

            referee.check(request, await complete(client, request, on_part))

        for index, request in enumerate(REQUESTS):
            group.create_task(run(replace(request, preferred_drafter="ab"[index // 2]), index < 2))
    assert fault.accepted_before
    assert all(late.values())


async def test_a_broken_link_changes_nothing_and_is_made_again(stage: Stage, referee: Referee) -> None:
    (drafter,) = await stage.with_drafters("a")
    num_attached = drafter.count("attached to the verifier")
    cuts = [AtToken(number, stage.relay("a").cut) for number in (FAULT_AT, 2 * FAULT_AT, 4 * FAULT_AT)]

    def on_part(part: Part) -> None:
        for cut in cuts:
            cut(part)

    await play(stage, referee, REQUESTS, on_part)
    assert cuts[0].accepted_before
    await stage.with_drafters("a")
    await drafts_are_accepted(stage, referee)
    assert drafter.count("attached to the verifier") > num_attached


async def test_after_a_restart_of_the_verifier_the_drafter_is_back_and_broken_calls_are_resumed(stage: Stage, referee: Referee) -> None:
    (drafter,) = await stage.with_drafters("a")
    fault = AtToken(FAULT_AT, stage.verifier.kill)
    received: dict[str, tuple[int, ...]] = {}

    async def read_all(parts: AsyncIterator[Part]) -> None:
        async for part in parts:
            fault(part)

    async with Client(stage.verifier.address) as client, asyncio.TaskGroup() as group:

        async def run(request: Request) -> None:
            async with client.generate(request.prompt_ids, **to_options(request)) as generation:
                with pytest.raises(Unavailable) as caught:
                    await read_all(generation)
                assert caught.value.reason == "UNREACHABLE"
                received[request.request_id] = generation.token_ids

        for request in REQUESTS:
            group.create_task(run(request))
    assert fault.accepted_before
    await stage.with_drafters("a")
    assert drafter.process.poll() is None  # the same process, attached by itself
    rest = [replace(request, resume_ids=received[request.request_id]) for request in REQUESTS]
    completions = await complete_all(stage.verifier.address, rest)
    for whole, request, completion in zip(REQUESTS, rest, completions, strict=True):
        assert [*request.resume_ids, *completion.token_ids] == referee.tokens(whole)
    await drafts_are_accepted(stage, referee)


async def test_a_drafter_that_sends_garbage_is_counted_and_changes_nothing(stage: Stage, referee: Referee) -> None:
    await stage.with_drafters()
    verifier = stage.verifier
    before = await scrape(verifier.metrics)
    answers = {request.prompt_ids: referee.tokens(request) for request in REQUESTS}
    async with Client(verifier.address) as client:
        fingerprint = (await client.info()).model.tokenizer_fingerprint
    async with grpc.aio.insecure_channel(verifier.link) as channel:
        call: Any = link_pb2_grpc.LinkServiceStub(channel).Speculate()
        hello = link_pb2.Hello(
            protocol_revision=1,
            instance_id="impostor",
            name="impostor",
            tokenizer_fingerprint=fingerprint,
            modes=[generate_pb2.VERIFICATION_MODE_COUPLED],
            capacity=8,
        )
        await call.write(link_pb2.SpeculateRequest(hello=hello))
        assert (await call.read()).WhichOneof("frame") == "welcome"
        garbler = Impostor(call, answers)
        impostor = asyncio.create_task(garbler.run())
        seen = AtToken(1, lambda: None)
        await play(stage, referee, REQUESTS, seen)
        assert seen.accepted > 0

        for name, reasons in (("draft_stale_total", STALE), ("rejected_proposals_total", REJECTED)):
            for reason in reasons:

                async def counted(name: str = name, reason: str = reason) -> bool:
                    return (await scrape(verifier.metrics))(name, reason=reason) > before(name, reason=reason)

                await until(counted, f"{name} counts {reason}")
        assert not impostor.done()

        # Too much of it ends the link, and still no request.
        await play(stage, referee, REQUESTS, AtToken(FAULT_AT, garbler.flood))
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await impostor
    # Its own view depends on whether it read or wrote when the link ended; the verifier's does not.
    await asyncio.to_thread(verifier.wait_for, "call", method="/outrider.v1.LinkService/Speculate", code="INVALID_ARGUMENT", instance="impostor")


async def all_blocks_are_free(verifier: VerifierProcess) -> None:
    async def free() -> bool:
        samples = await scrape(verifier.metrics)
        return (samples("kv_blocks", state="used"), samples("num_requests_running"), samples("num_requests_waiting")) == (0, 0, 0)

    await until(free, "no request holds anything")
    samples = await scrape(verifier.metrics)
    assert samples("kv_blocks", state="free") + samples("kv_blocks", state="cached") == 1024


@pytest.mark.parametrize("names", [(), ("a",)], ids=["alone", "with-a-drafter"])
async def test_a_client_that_leaves_at_any_moment_frees_every_block(names: tuple[str, ...], stage: Stage, referee: Referee) -> None:
    await stage.with_drafters(*names)
    verifier = stage.verifier
    stay = replace(REQUESTS[1], request_id="stays", stopping=Stopping(24))
    await all_blocks_are_free(verifier)

    async def leave(how: str, number: int) -> None:
        """Reads until `number` tokens of a request are there, 0 for its start, and goes; below 0 nothing is read."""
        request = replace(REQUESTS[3], request_id=f"{how}-{number}")
        with DelayProxy(verifier.address) as relay:
            channel = grpc.aio.insecure_channel(relay.address)
            call: Any = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(as_message(request), timeout=0.2 if how == "deadline" else None)
            num_read = 0
            with suppress(grpc.aio.AioRpcError):
                while number >= 0 and (num_read < number or how == "deadline"):
                    num_read += len((await call.read()).output.token_ids)
            if how == "cancel":
                call.cancel()
            if how == "disconnect":
                relay.cut()
            await channel.close()

    for how, number in ((how, number) for how in ("cancel", "disconnect", "close", "deadline") for number in (-1, 0, 1, 12)):
        async with Client(verifier.address) as client:
            staying = asyncio.create_task(complete(client, stay))
            await leave(how, number)
            referee.check(stay, await staying)
    await all_blocks_are_free(verifier)
    # The same with nobody beside it, whose steps would tell.
    for how in ("cancel", "disconnect", "close", "deadline"):
        await leave(how, 5)
        await all_blocks_are_free(verifier)


def as_message(request: Request) -> generate_pb2.GenerateRequest:
    options = to_options(request)
    named = {name: options.pop(name) for name in ("mode", "request_id", "resume_token_ids")}
    return to_request(request.prompt_ids, options=options, **named)


async def load(verifier: VerifierProcess, referee: Referee, gone: asyncio.Event, on_part: Callable[[Part], None]) -> None:
    """Eight clients that ask again and again until told to stop."""

    async def ask(client: Client, request: Request) -> None:
        while not gone.is_set():
            referee.check(request, await complete(client, request, on_part))

    async with Client(verifier.address) as client, asyncio.TaskGroup() as group:
        for request in REQUESTS:
            for index in range(2):
                group.create_task(ask(client, replace(request, request_id=f"{request.request_id}-{index}")))


@pytest.mark.slow
async def test_a_drafter_that_is_stopped_for_30_s_under_load_costs_no_memory_and_holds_no_step_up(stage: Stage, referee: Referee) -> None:
    (drafter,) = await stage.with_drafters("a")
    for request in REQUESTS:
        referee.tokens(request)  # not while the load runs
    verifier = psutil.Process(stage.verifier.process.pid)
    stopped, gone = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        drafter.send(signal.SIGSTOP)
        stopped.set()

    fault = AtToken(20 * NUM_TOKENS, stop)  # after a while: the first requests make room that later ones use again
    loading = asyncio.create_task(load(stage.verifier, referee, gone, fault))
    await stopped.wait()
    assert fault.accepted_before
    before, rss = await scrape(stage.verifier.metrics), [verifier.memory_info().rss]
    rss += [verifier.memory_info().rss async for _ in every_second(30)]
    after = await scrape(stage.verifier.metrics)
    drafter.send(signal.SIGCONT)
    gone.set()
    await loading
    assert max(rss) - rss[0] < RSS_SLACK_BYTES
    waited_s, computed_s, num_steps = (after(name) - before(name) for name in ("draft_wait_seconds_sum", STEP + "_sum", STEP + "_count"))
    assert num_steps > 100
    assert waited_s < computed_s / 4  # to wait for it before each step, as long as may be, would be as much as the steps themselves
    await drafts_are_accepted(stage, referee)


async def every_second(num_seconds: int) -> AsyncIterator[float]:
    """The time stopped is part of what is tested, not a way to be in step with it."""
    end = time.monotonic() + num_seconds
    while time.monotonic() < end:
        await asyncio.sleep(1)
        yield time.monotonic()
