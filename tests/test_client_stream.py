"""The Python client against a real server: what comes back, what is sent, what is cancelled, what is raised."""

import asyncio
from collections.abc import Iterator

import pytest
from outrider.v1 import generate_pb2, info_pb2

from client import Client, Part
from shared.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from shared.sampling import Mode
from tests.support.scripted_server import FINISHED, STARTED, WHOLE, ScriptedServer, output, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


async def test_parts_come_in_order_and_the_result_has_the_whole(server: ScriptedServer) -> None:
    times = iter([100.0, 100.25, 102.0])
    async with Client(server.address, clock=lambda: next(times)) as client:
        generation = client.generate("Hi", max_tokens=4)
        parts = [part async for part in generation]
    assert parts == [Part("Hel", (10, 11), 1), Part("lo", (12, 13), 1)]
    result = generation.result
    assert (result.text, result.token_ids, result.prompt_token_ids) == ("Hello", (10, 11, 12, 13), (5, 6))
    assert (result.request_id, result.seed, result.reason, result.matched) == ("r-1", 42, "stop_string", "\n\n")
    assert (result.usage.acceptance_rate, result.usage.mean_accepted_length) == (0.5, 2.0)
    assert (result.timings.ttft_s, result.timings.total_s, result.timings.tokens_per_s) == (0.25, 2.0, 2.0)


async def test_complete_returns_the_result(server: ScriptedServer) -> None:
    async with Client(server.address) as client:
        assert (await client.complete("Hi")).text == "Hello"


async def test_every_option_reaches_its_field(server: ScriptedServer) -> None:
    async with Client(server.address) as client:
        await client.complete(
            "Hi", temperature=0, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=2, presence_penalty=1, frequency_penalty=-1,
            logit_bias={7: -5.0}, seed=2**64 - 1, max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True,
            max_draft_tokens=0, preferred_drafter="d", mode="rejection", request_id="mine", resume_token_ids=[1, 2],
        )  # fmt: skip
    expected = generate_pb2.GenerateRequest(
        text="Hi",
        sampling=generate_pb2.Sampling(
            temperature=0, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=2, presence_penalty=1, frequency_penalty=-1,
            logit_bias={7: -5.0}, seed=2**64 - 1,
        ),
        stopping=generate_pb2.Stopping(max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True),
        speculation=generate_pb2.Speculation(max_draft_tokens=0, preferred_drafter="d"),
        mode=generate_pb2.VERIFICATION_MODE_REJECTION,
        request_id="mine",
        resume_token_ids=[1, 2],
    )  # fmt: skip
    assert server.requests == [expected]


async def test_what_is_not_given_stays_unset(server: ScriptedServer) -> None:
    async with Client(server.address) as client:
        await client.complete("Hi", temperature=None)
    assert server.requests == [generate_pb2.GenerateRequest(text="Hi")]


async def test_messages_and_token_ids_are_prompts_too(server: ScriptedServer) -> None:
    async with Client(server.address) as client:
        await client.complete([{"role": "user", "content": "Hi"}])
        await client.complete([1, 2])
        await client.complete([])
    assert [request.WhichOneof("prompt") for request in server.requests] == ["chat", "token_ids", "token_ids"]
    assert server.requests[0].chat.messages[0].content == "Hi"
    assert list(server.requests[1].token_ids.ids) == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([1, -1], {}, "token_ids.ids"),
        (["a"], {}, "token_ids.ids"),
        ([{"role": "user"}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": 3}], {}, "chat.messages[0].content"),
        ("Hi", {"top_k": -1}, "sampling.top_k"),
        ("Hi", {"seed": 2**64}, "sampling.seed"),
        ("Hi", {"stop": [3]}, "stopping.stop"),
        ("Hi", {"logit_bias": {-1: 0.0}}, "sampling.logit_bias"),
        ("Hi", {"mode": "greedy"}, "mode"),
    ],
)
async def test_a_value_that_cannot_be_sent_names_its_field(prompt: list[int] | str, options: dict[str, object], field: str) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate(prompt, **options)  # type: ignore[arg-type]
    assert caught.value.field == field


async def test_an_unknown_option_is_a_type_error() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="temprature"):
            client.generate("Hi", temprature=1)


async def test_a_deadline_is_always_set(server: ScriptedServer) -> None:
    async with Client(server.address) as client:
        await client.complete("Hi")
        await client.complete("Hi", deadline_s=50)
    # The server reads it off its own clock, a little later or earlier.
    assert 400 < server.deadlines_s[0] < 601
    assert 0 < server.deadlines_s[1] < 51


async def test_a_deadline_that_passes_is_a_timeout(server: ScriptedServer) -> None:
    server.script, server.hangs = WHOLE[:2], True
    async with Client(server.address) as client:
        with pytest.raises(TimeoutError):
            await client.complete("Hi", deadline_s=0.3)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (InvalidRequest("sampling.top_p", "must be above 0"), InvalidRequest),
        (Overloaded("no room", 2.5), Overloaded),
        (Unavailable("LOADING", "x"), Unavailable),
    ],
)
async def test_the_servers_errors_arrive_as_our_own(server: ScriptedServer, sent: OutriderError, kind: type[OutriderError]) -> None:
    server.script = [sent]
    async with Client(server.address) as client:
        with pytest.raises(kind) as caught:
            await client.complete("Hi")
    assert (caught.value.reason, caught.value.request_id, str(caught.value)) == (sent.reason, "r-1", str(sent))


async def test_an_error_in_the_middle_leaves_the_parts_that_came(server: ScriptedServer) -> None:
    server.script = [*WHOLE[:2], Unavailable("DRAINING", "going down")]
    async with Client(server.address) as client:
        generation = client.generate("Hi")
        assert (await anext(generation)).text == "Hel"
        with pytest.raises(Unavailable):
            await anext(generation)
        assert generation.token_ids == (10, 11)
        with pytest.raises(RuntimeError, match="not ended"):
            _ = generation.result


async def test_a_stream_without_an_ending_is_an_error(server: ScriptedServer) -> None:
    server.script = WHOLE[:2]
    async with Client(server.address) as client:
        with pytest.raises(OutriderError, match="ended before"):
            await client.complete("Hi")


async def test_leaving_the_block_cancels_the_call(server: ScriptedServer) -> None:
    server.script, server.hangs = WHOLE[:2], True
    async with Client(server.address) as client:
        async with client.generate("Hi") as generation:
            async for _ in generation:
                break
        assert await asyncio.to_thread(server.cancelled.wait, 10)


async def test_cancelling_the_task_cancels_the_call(server: ScriptedServer) -> None:
    server.script, server.hangs = WHOLE[:2], True
    async with Client(server.address) as client:
        generation = client.generate("Hi")
        await anext(generation)
        task = asyncio.create_task(anext(generation))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.cancelled.wait, 10)


async def test_text_may_come_after_its_ids_and_ttft_counts_ids(server: ScriptedServer) -> None:
    server.script = [STARTED, output("", 1), output("ü", 2), FINISHED]
    times = iter([0.0, 1.0, 9.0])
    async with Client(server.address, clock=lambda: next(times)) as client:
        result = await client.complete("Hi")
    assert (result.text, result.timings.ttft_s) == ("ü", 1.0)


async def test_the_same_client_talks_to_a_draft_service() -> None:
    with scripted_server("draft") as server:
        server.info = info_pb2.GetInfoResponse(draft_service=info_pb2.DraftServiceInfo(name="edge", proposer="ngram"))
        async with Client(server.address) as client:
            assert (await client.complete("Hi")).text == "Hello"
            info = await client.info()
        async with Client(server.address) as client:
            assert await client.info() == info
    assert info.draft_service is not None
    assert info.draft_service.name == "edge"
    assert len(server.requests) == 1


async def test_info_is_told_in_our_own_values(server: ScriptedServer) -> None:
    server.info = info_pb2.GetInfoResponse(
        version="1",
        protocol_revision=1,
        model=info_pb2.ModelInfo(name="m", vocab_size=100, max_model_len=64, dtype="float32", device="cpu"),
        limits=info_pb2.Limits(max_draft_tokens=8),
        modes=[generate_pb2.VERIFICATION_MODE_COUPLED, generate_pb2.VERIFICATION_MODE_REJECTION],
        drafters=[info_pb2.DrafterInfo(instance_id="i", name="n", capacity=4, sequences=1, suspended=True)],
        refused_drafters=[info_pb2.RefusedDrafter(instance_id="j", name="o", reason="wrong tokenizer")],
    )
    async with Client(server.address) as client:
        info = await client.info()
    assert (info.model.name, info.model.vocab_size, info.limits["max_draft_tokens"]) == ("m", 100, 8)
    assert info.modes == (Mode.COUPLED, Mode.REJECTION)
    assert info.drafters[0].suspended
    assert info.refused_drafters[0].reason == "wrong tokenizer"
    assert info.draft_service is None


async def test_health_tells_the_state_of_each_service(server: ScriptedServer) -> None:
    server.states.set("outrider.v1.LinkService", 2)
    async with Client(server.address) as client:
        assert await client.health() == "SERVING"
        assert await client.health("outrider.v1.LinkService") == "NOT_SERVING"
        assert await client.health("nobody") == "SERVICE_UNKNOWN"


async def test_nothing_at_the_address_is_unavailable() -> None:
    async with Client("127.0.0.1:1") as client:
        for call in (client.complete("Hi"), client.info(), client.health()):
            with pytest.raises(Unavailable) as caught:
                await call
            assert caught.value.reason == "UNREACHABLE"


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client("127.0.0.1:1").complete("Hi")


def test_the_client_needs_no_torch() -> None:
    import subprocess
    import sys

    probe = "import sys, client.client, client.cli, client.demo, client.pair; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_grpc_is_not_imported_before_it_can_be_told_to_be_quiet() -> None:
    import subprocess
    import sys

    probe = "import sys, client.cli; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
