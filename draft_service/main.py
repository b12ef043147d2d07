"""The draft service's process: load, attach, serve, stop. It is the one place where the parts of the service meet."""

import asyncio
import signal
import time
from importlib.metadata import version

import grpc
import structlog
import uvloop
from prometheus_client import CollectorRegistry

from draft_service.composite import CompositeProposer
from draft_service.config import DraftConfig
from draft_service.draft_model import DraftModel
from draft_service.drafter import Drafter
from draft_service.engine import DraftEngine
from draft_service.link_client import LINK_SERVICE_NAME, LinkClient, LinkState
from draft_service.metrics import DraftMetrics
from draft_service.ngram import NgramProposer
from draft_service.proposer import Proposer
from draft_service.servicer import SERVICE_NAME, DraftServicer
from draft_service.speculator_loader import load_proposer
from draft_service.stand_in import StandInProposer
from shared import logs
from shared.default_model import resolve
from shared.engine.pool import PoolConfig, load_pool
from shared.engine.thread import before_engine, settle_interpreter
from shared.errors import EngineFailure
from shared.link import PROTOCOL_REVISION, Hello
from shared.rpc.channel import open_channel
from shared.rpc.exposition import exposition
from shared.rpc.guards import Gate
from shared.rpc.health import Health, watch_engine
from shared.rpc.interceptors import CallInterceptor
from shared.rpc.options import GENERATE_MAX_MESSAGE_BYTES, LINK_MAX_MESSAGE_BYTES
from shared.rpc.server import bind, make_server, run_until_signal
from shared.rpc.serving_metrics import ServingMetrics
from shared.simulation import parse as parse_simulation
from shared.stand_in_tokenizer import stand_in_tokenizer
from shared.tokenizer import load_tokenizer

_WATCH_S = 1.0
_STALL_TIMEOUT_S = 30.0
# Of long prompts, in a draft step that others wait for. On a CPU a token more of a prompt costs as much in a small piece as in a large one.
_MAX_TOKENS_BESIDE = 32
_MAX_TOKENS_BESIDE_ON_GPU = 256

_log = structlog.stdlib.get_logger(__name__)


def run(config: DraftConfig) -> None:
    """Runs the service until a signal ends it.

    Raises:
        UnsupportedModel: the draft model cannot be served.
        CannotListen: an address is in use.
        EngineFailure: the engine, or another part that has to run, has stopped by itself.
    """
    logs.set_up("draft", config.log_level, config.log_format)
    (uvloop.run if config.loop == "uvloop" else asyncio.run)(_serve(config))


async def _serve(config: DraftConfig) -> None:
    registry, health, gate = CollectorRegistry(), await Health.of(SERVICE_NAME), Gate("draft service")
    await health.set_service(LINK_SERVICE_NAME, False)
    serving = ServingMetrics(registry, [SERVICE_NAME])
    door = make_server(CallInterceptor([gate], observe=serving.observe_call), GENERATE_MAX_MESSAGE_BYTES, health, [SERVICE_NAME])
    address = bind(door, config.listen)
    with exposition(registry, config.metrics) as metrics_address:
        await door.start()
        _log.info("listening", clients=address, metrics=metrics_address or "off")
        try:
            proposer, fingerprint = await before_engine(lambda: _load(config))
            await _serve_loaded(config, registry, serving, health, gate, door, proposer, fingerprint)
        finally:
            await door.stop(None)


def _load(config: DraftConfig) -> tuple[Proposer, str]:
    """The proposer, and the fingerprint of the tokenizer that it was made for; empty if it does with any."""
    if config.simulate:
        _log.warning("simulation: there is no model, and guesses are right by chance", simulate=config.simulate)
        return StandInProposer(parse_simulation(config.simulate)), stand_in_tokenizer().fingerprint
    lookup = NgramProposer(config.ngram_min, config.ngram_max)
    if config.proposer == "ngram":
        return lookup, ""
    proposer: Proposer
    if config.proposer == "speculator":
        proposer, fingerprint = load_proposer(
            config.speculator, config.speculator_target, config.dtype, config.device, config.threads, config.weights
        )
    else:
        proposer, fingerprint = _load_model(config)
    return CompositeProposer(lookup, proposer) if config.ngram_first == "on" else proposer, fingerprint


def _load_model(config: DraftConfig) -> tuple[Proposer, str]:
    def tell(fraction: float, what: str) -> None:
        _log.info("loading", draft=config.draft, done=f"{fraction:.0%}", now=what)

    directory = resolve(config.draft)
    tokenizer = load_tokenizer(directory)
    pool_config = PoolConfig(
        directory,
        config.dtype,
        config.device,
        config.block_size,
        config.kv_blocks,
        config.kv_memory_fraction,
        config.capacity,
        0,
        config.threads,
        config.weights,
    )
    pool = load_pool(pool_config, tell)
    beside = _MAX_TOKENS_BESIDE if pool.model.device.type == "cpu" else _MAX_TOKENS_BESIDE_ON_GPU
    return DraftModel(pool.runner, pool.allocator, max_tokens_beside=beside, min_confidence=config.min_confidence), tokenizer.fingerprint


async def _serve_loaded(
    config: DraftConfig,
    registry: CollectorRegistry,
    serving: ServingMetrics,
    health: Health,
    gate: Gate,
    door: grpc.aio.Server,
    proposer: Proposer,
    fingerprint: str,
) -> None:
    settle_interpreter()
    metrics = DraftMetrics(registry, proposer.kinds)
    metrics.set_build_info(
        version=version("outrider"), protocol_revision=str(PROTOCOL_REVISION), proposer=proposer.name, tokenizer=fingerprint[:12] or "none"
    )
    drafter = Drafter(proposer, config.capacity, time.monotonic, metrics.observe_step)
    crashes: list[BaseException] = []

    def die(error: BaseException) -> None:
        crashes.append(error)
        # Only a new process can draft again: end in order, and let whoever started this one start it again.
        signal.raise_signal(signal.SIGTERM)

    engine = DraftEngine(drafter, die, time.monotonic)
    token = config.link_token_file.read_text().strip() if config.link_token_file is not None else ""
    wants_hidden_state = config.proposer == "speculator"
    hello = Hello(PROTOCOL_REVISION, config.instance_id, config.name, fingerprint, tuple(proposer.modes), config.capacity, wants_hidden_state)

    link_changed = asyncio.Event()

    def note(state: LinkState) -> None:
        link_changed.set()
        metrics.set_attached(state.attached)
        if not state.attached:
            metrics.count_reconnect(state.kind)

    async with (
        open_channel(config.link, LINK_MAX_MESSAGE_BYTES) as link_channel,
        open_channel(config.verifier, GENERATE_MAX_MESSAGE_BYTES) as verifier_channel,
    ):
        link = LinkClient(link_channel, hello, engine, token, on_state=note, on_round_trip=metrics.observe_round_trip)
        servicer = DraftServicer(verifier_channel, config.instance_id, config.name, proposer.name, config.link, lambda: link.state)
        servicer.serve_on(door)
        engine.start()
        metrics.watch_engine(lambda: engine.age_s)
        gate.open()
        await health.set_serving(True)
        _log.info("serving", proposer=proposer.name, verifier=config.verifier, link=config.link, instance=config.instance_id)
        try:
            async with asyncio.TaskGroup() as tasks:  # if one of them ends by itself, all end, and so does the process
                attachment = tasks.create_task(link.run())
                watches = (
                    watch_engine(lambda: engine.age_s, _STALL_TIMEOUT_S, health, lambda: metrics.observe(drafter.stats), _WATCH_S),
                    _watch_link(link, link_changed, health),
                    serving.watch_loop(),
                )
                watching = [tasks.create_task(watch) for watch in watches]
                try:
                    await run_until_signal([door], health, gate, config.drain_grace_s, link.stop)
                    await attachment
                finally:
                    for task in (attachment, *watching):
                        task.cancel()
                    await asyncio.to_thread(engine.stop)
        except ExceptionGroup as failures:
            _log.exception("a part of the draft service has failed")
            raise EngineFailure("a part of the draft service has failed; the log says which") from failures
    if crashes:
        raise EngineFailure("the engine has stopped by itself; the log says why")


async def _watch_link(link: LinkClient, changed: asyncio.Event, health: Health) -> None:
    """Tells health whether the draft service is attached. Its door serves either way: it passes calls on."""
    while True:
        await changed.wait()
        changed.clear()
        await health.set_service(LINK_SERVICE_NAME, link.state.attached)
