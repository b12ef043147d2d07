"""A verifier's life: it loads, serves, drains and ends; and what health, reflection and `buf curl` see of it."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from outrider.v1 import generate_pb2, info_pb2, link_pb2, link_pb2_grpc, verifier_pb2_grpc

from client import Client
from shared.errors import Unavailable
from shared.rpc.health import HealthStatus, check
from shared.rpc.status import from_rpc_error
from tests.support.model_dir import MAX_MODEL_LEN, ModelDirs, save_models
from tests.support.processes import DEADLINE_S, Services, VerifierProcess

VERIFIER = "outrider.v1.VerifierService"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelDirs:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


@pytest.fixture(autouse=True)
def logs(services: Services) -> Iterator[None]:
    yield
    services.show()


@pytest.fixture(scope="module")
def verifier(services: Services, models: ModelDirs) -> VerifierProcess:
    return services.launch_verifier(models.target).serving()


def ask(**fields: Any) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=[5, 6, 7]), **fields)


async def test_while_it_loads_health_says_so_and_requests_are_refused_with_a_reason(services: Services, models: ModelDirs) -> None:
    verifier = services.launch_large_verifier(models.target, seconds=0.0, when="when-told", name="slow to load").listening()
    for service in ("", VERIFIER):
        assert await check(verifier.address, service) is HealthStatus.NOT_SERVING
    async with grpc.aio.insecure_channel(verifier.address) as channel, grpc.aio.insecure_channel(verifier.link) as link_channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        link: Any = link_pb2_grpc.LinkServiceStub(link_channel).Speculate()
        await link.write(link_pb2.SpeculateRequest(hello=link_pb2.Hello(protocol_revision=1, instance_id="early", name="early")))
        for refused in (stub.Generate(ask()).read(), stub.GetInfo(info_pb2.GetInfoRequest()), link.read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused
            error = from_rpc_error(caught.value)
            assert isinstance(error, Unavailable)
            assert error.reason == "LOADING"
        verifier.say("go on")
        await asyncio.to_thread(verifier.serving)
        assert await check(verifier.address, VERIFIER) is HealthStatus.SERVING
        assert (await stub.Generate(ask()).read()).HasField("started")


async def test_on_sigterm_what_runs_is_finished_what_is_new_is_refused_and_the_process_ends_well(services: Services, models: ModelDirs) -> None:
    verifier = services.launch_verifier(models.target, name="draining").serving()
    async with Client(verifier.address) as client:
        running = [client.generate([5, 6, index], max_tokens=1000, ignore_eos=True) for index in range(4)]
        for generation in running:
            await anext(generation)
        verifier.send(signal.SIGTERM)
        await asyncio.to_thread(verifier.wait_for, "stopping")
        with pytest.raises(Unavailable) as refused:
            await client.complete([5, 6, 7], max_tokens=1)
        assert refused.value.reason == "DRAINING"
        assert await check(verifier.address, VERIFIER) is HealthStatus.NOT_SERVING
        for generation in running:
            async for _ in generation:
                pass
            assert (generation.result.reason, len(generation.result.token_ids)) == ("length", 1000)
    assert await asyncio.to_thread(verifier.wait) == 0


def test_reflection_lists_the_services(verifier: VerifierProcess) -> None:
    for address, own in ((verifier.address, VERIFIER), (verifier.link, "outrider.v1.LinkService")):
        with grpc.insecure_channel(address) as channel:
            names = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert names == {own, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def buf_curl(address: str, method: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that come back; the schema is found by reflection."""
    command = [str(Path(sys.executable).parent / "buf"), "curl", "--http2-prior-knowledge", "--protocol", "grpc"]
    done = subprocess.run(
        [*command, "--data", json.dumps(data), f"http://{address}/{VERIFIER}/{method}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    decoder, messages, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].strip()
    return messages


def test_buf_curl_needs_nothing_but_the_address(verifier: VerifierProcess) -> None:
    (info,) = buf_curl(verifier.address, "GetInfo", {})
    assert info["protocolRevision"] == 1
    assert info["model"]["maxModelLen"] == MAX_MODEL_LEN
    asked = {"text": "hello the world", "sampling": {"temperature": 0}, "stopping": {"maxTokens": 8, "ignoreEos": True}}
    first, *outputs, last = buf_curl(verifier.address, "Generate", asked)
    assert first["started"]["promptTokenIds"]
    assert sum(len(message["output"]["tokenIds"]) for message in outputs) == 8
    assert last["finished"]["reason"] == "FINISH_REASON_LENGTH"
