"""The verifier process: load, serve, stop, in that order. It is the one place where the parts of the service meet."""

import asyncio
import secrets
import signal
import time
from importlib.metadata import version

import grpc
import structlog
import uvloop
from prometheus_client import CollectorRegistry

from shared import logs
from shared.default_model import resolve
from shared.engine.pool import Pool, PoolConfig, load_pool
from shared.engine.stand_in import stand_in_pool
from shared.engine.thread import before_engine, settle_interpreter
from shared.errors import EngineFailure
from shared.link import MAX_DISTRIBUTION_PAIRS, MAX_PROPOSAL_TOKENS, PROTOCOL_REVISION, Welcome
from shared.rpc.convert_generate import Limits
from shared.rpc.exposition import exposition
from shared.rpc.guards import Gate, bearer_guard
from shared.rpc.health import Health, watch_engine
from shared.rpc.interceptors import CallInterceptor, Guard
from shared.rpc.options import GENERATE_MAX_MESSAGE_BYTES, LINK_MAX_MESSAGE_BYTES
from shared.rpc.server import bind, make_server, run_until_signal
from shared.rpc.serving_metrics import ServingMetrics
from shared.sampling import Mode
from shared.simulation import parse as parse_simulation
from shared.stand_in_tokenizer import stand_in_tokenizer
from shared.tokenizer import Tokenizer, load_tokenizer
from verifier_service.calibration import Space, calibrate
from verifier_service.config import VerifierConfig
from verifier_service.engine import Engine, EngineLimits
from verifier_service.expansion import Scorer
from verifier_service.info import ModelInfo, VerifierInfo
from verifier_service.link_servicer import SERVICE_NAME as LINK_SERVICE
from verifier_service.link_servicer import SILENCE_S, LinkServicer
from verifier_service.metrics import VerifierMetrics
from verifier_service.scheduler import SchedulerLimits
from verifier_service.service import Verifier
from verifier_service.servicer import SERVICE_NAME as VERIFIER_SERVICE
from verifier_service.servicer import VerifierServicer
from verifier_service.stats import Calibration
from verifier_service.step_cost import StepCost

_WATCH_S = 1.0
_CPU_PREFILL_TOKENS = 512

_log = structlog.stdlib.get_logger(__name__)


def run(config: VerifierConfig) -> None:
    """Runs the service until a signal ends it.

    Raises:
        UnsupportedModel: the target cannot be served.
        CannotListen: an address is in use.
        EngineFailure: the engine has stopped by itself.
    """
    logs.set_up("verifier", config.log_level, config.log_format)
    (uvloop.run if config.loop == "uvloop" else asyncio.run)(_serve(config))


async def _serve(config: VerifierConfig) -> None:
    registry, health, gate = CollectorRegistry(), await Health.of(VERIFIER_SERVICE, LINK_SERVICE), Gate("verifier")
    link_guards: list[Guard] = [gate]
    if config.link_token_file is not None:
        link_guards.append(bearer_guard(LINK_SERVICE, config.link_token_file.read_text().strip()))
    serving = ServingMetrics(registry, [VERIFIER_SERVICE, LINK_SERVICE])
    door = make_server(CallInterceptor([gate], observe=serving.observe_call), GENERATE_MAX_MESSAGE_BYTES, health, [VERIFIER_SERVICE])
    link_door = make_server(CallInterceptor(link_guards, SILENCE_S, observe=serving.observe_call), LINK_MAX_MESSAGE_BYTES, health, [LINK_SERVICE])
    address, link_address = bind(door, config.listen), bind(link_door, config.link)
    with exposition(registry, config.metrics) as metrics_address:
        # Listening before loading: health can tell, and clients are refused with a reason instead of a closed port.
        await asyncio.gather(door.start(), link_door.start())
        _log.info("listening", clients=address, links=link_address, metrics=metrics_address or "off")
        loop_watch = asyncio.create_task(serving.watch_loop())
        try:
            tokenizer, pool = await before_engine(lambda: _load(config))
            await _serve_loaded(config, registry, health, gate, (door, link_door), tokenizer, pool)
        finally:
            loop_watch.cancel()
            await asyncio.gather(door.stop(None), link_door.stop(None))


def _load(config: VerifierConfig) -> tuple[Tokenizer, Pool]:
    def tell(fraction: float, what: str) -> None:
        _log.info("loading", target=config.target, done=f"{fraction:.0%}", now=what)

    if config.simulate:
        _log.warning("simulation: there is no model, and the text means nothing", simulate=config.simulate)
        return stand_in_tokenizer(), stand_in_pool(parse_simulation(config.simulate), config.kv_blocks, config.block_size, config.max_model_len)
    directory = resolve(config.target)
    tokenizer = load_tokenizer(directory)
    pool_config = PoolConfig(
        directory,
        config.dtype,
        config.device,
        config.block_size,
        config.kv_blocks,
        config.kv_memory_fraction,
        config.max_num_seqs,
        config.max_model_len,
        config.threads,
    )
    return tokenizer, load_pool(pool_config, tell)


def _calibrate(config: VerifierConfig, pool: Pool, vocab_size: int) -> Calibration:
    scorers: tuple[Scorer, ...] = ("multi_query", "expanded") if config.scorer == "auto" else (config.scorer,)
    max_rows = min(config.max_num_seqs * (config.max_draft_tokens + 1), config.max_step_tokens)
    space = Space(config.max_draft_tokens, max_rows, pool.max_model_len)
    return calibrate(pool.runner, pool.allocator, vocab_size, scorers, space, time.perf_counter)


async def _serve_loaded(
    config: VerifierConfig,
    registry: CollectorRegistry,
    health: Health,
    gate: Gate,
    doors: tuple[grpc.aio.Server, grpc.aio.Server],
    tokenizer: Tokenizer,
    pool: Pool,
) -> None:
    settle_interpreter()
    vocab_size = min(tokenizer.vocab_size, pool.model.vocab_size)  # an id needs text and logits
    calibration = await before_engine(lambda: _calibrate(config, pool, vocab_size))
    metrics = VerifierMetrics(registry, config.target, config.max_draft_tokens)
    model = ModelInfo(config.target, tokenizer.fingerprint, str(pool.model.dtype).removeprefix("torch."), str(pool.model.device))
    metrics.set_build_info(
        version=version("outrider"),
        protocol_revision=str(PROTOCOL_REVISION),
        model=config.target,
        tokenizer=tokenizer.fingerprint[:12],
        dtype=model.dtype,
        device=model.device,
    )
    metrics.set_calibration(calibration)
    default_mode = Mode(config.mode)
    limits = Limits(
        vocab_size=vocab_size,
        max_model_len=pool.max_model_len,
        max_prompt_bytes=config.max_prompt_bytes,
        max_draft_tokens=config.max_draft_tokens,
        modes=(default_mode, *(mode for mode in Mode if mode is not default_mode)),
    )
    verifier = Verifier(
        tokenizer.fingerprint,
        config.max_queue,
        config.max_num_seqs,
        time.monotonic,
        metrics.observe_step,
        metrics.observe_round_trip,
        # Nothing can be served any more: end in order, and let whoever started this process start it again.
        on_crash=lambda: signal.raise_signal(signal.SIGTERM),
    )
    # A CPU's time grows with every token: beyond these a longer chunk gains nothing, and the others wait for it.
    is_slow = pool.model.device.type == "cpu" and not config.simulate
    step_limits = SchedulerLimits(
        config.max_num_seqs,
        config.max_step_tokens,
        config.max_draft_tokens,
        config.max_prefill_tokens or (_CPU_PREFILL_TOKENS if is_slow else 0),
        prefix_cache=config.prefix_cache == "on",
    )
    verifier.start(
        lambda tell, on_forward: Engine(
            pool.runner,
            pool.allocator,
            vocab_size,
            EngineLimits(step_limits, config.window),
            calibration.scorer,
            tell,
            time.monotonic,
            lambda: secrets.randbits(64),
            StepCost(calibration.points),
            on_forward,
        )
    )
    metrics.watch_engine(lambda: verifier.engine_age_s)
    metrics.set_occupancy(0, 0, pool.allocator.num_free, 0, 0)

    def observe() -> None:
        drafters, allocator = verifier.drafters(), pool.allocator
        metrics.observe_links(verifier.link_counters().values(), len(drafters), sum(drafter.suspended for drafter in drafters))
        if verifier.num_live == 0:  # a cancellation that ends the work is followed by no step
            metrics.set_occupancy(0, 0, allocator.num_free - allocator.num_cached, allocator.num_used, allocator.num_cached)

    def describe() -> VerifierInfo:
        return VerifierInfo(model, limits, verifier.drafters(), verifier.refused_drafters())

    door, link_door = doors
    servicer = VerifierServicer(verifier, tokenizer, frozenset(pool.model.eos_token_ids), describe, metrics, lambda: secrets.randbits(64))
    welcome = Welcome(vocab_size, MAX_PROPOSAL_TOKENS, MAX_DISTRIBUTION_PAIRS, pool.max_model_len, pool.model.hidden_size)
    link_servicer = LinkServicer(verifier, welcome, on_bytes=metrics.count_link_bytes)
    servicer.serve_on(door)
    link_servicer.serve_on(link_door)
    gate.open()
    await health.set_serving(True)
    _log.info("serving", target=config.target, blocks=pool.allocator.num_blocks, block_size=config.block_size, max_model_len=pool.max_model_len)
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = watch_engine(lambda: verifier.engine_age_s, config.stall_timeout_s, health, observe, _WATCH_S)
            watch = tasks.create_task(watching)
            await run_until_signal(doors, health, gate, config.drain_grace_s, link_servicer.end_links)
            watch.cancel()
    finally:
        await verifier.close()
    if verifier.has_crashed:
        raise EngineFailure("the engine has stopped by itself; the log says why")
