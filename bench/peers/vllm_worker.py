"""vLLM on this machine's CPU as a worker: loads once, then answers jobs. Runs in the peers' environment.

    python -m bench.peers.vllm_worker --target DIR [--draft DIR --k 3 --draft-sampling probabilistic] [--threads 2]

The engine runs in this process, on all cores: vLLM's own choice (`VLLM_CPU_OMP_THREADS_BIND=auto`) leaves one core to its scheduler, which
on two cores halves it. Intel's OpenMP is preloaded, as vLLM's documentation asks for, and tcmalloc where it is found.
"""

import argparse
import os
import sys
import sysconfig
from ctypes.util import find_library
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.lines import Answer, Arrivals, Job, serve, take_stdout

if TYPE_CHECKING:
    from torch import Tensor

_MAX_MODEL_LEN = 2048


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="target model: directory or hub id")
    parser.add_argument("--draft", help="draft model: directory or hub id; plain decoding without")
    parser.add_argument("--k", type=int, default=3, help="draft tokens of a round")
    parser.add_argument("--draft-sampling", choices=["greedy", "probabilistic"], default="greedy", help="how the draft model picks at T > 0")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads")
    parser.add_argument("--openmp", choices=["intel", "gnu"], default="intel", help="which OpenMP")
    parser.add_argument("--kv-gib", type=int, default=1, help="memory of the KV cache")
    arguments = parser.parse_args()
    _enter_environment(arguments)
    output = take_stdout()
    peer = _Peer(arguments)
    serve(output, peer.description, peer.run)


def _enter_environment(arguments: argparse.Namespace) -> None:
    """Start over with the variables that have to be there before the first library is loaded."""
    if "OUTRIDER_PEER_STARTED" in os.environ:
        return
    os.environ |= {
        "OUTRIDER_PEER_STARTED": "1",
        "OMP_NUM_THREADS": str(arguments.threads),
        "VLLM_CPU_KVCACHE_SPACE": str(arguments.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }
    os.environ.pop("OMP_WAIT_POLICY", None)  # ours to have, for processes that share cores; vLLM has them to itself
    preload = [os.environ["LD_PRELOAD"]] if os.environ.get("LD_PRELOAD") else []
    if arguments.openmp == "intel":
        # What vLLM sets for its workers where it binds them.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: arguments.threads]))
        os.environ |= {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]", "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
        preload.append(str(Path(sysconfig.get_path("data"), "lib", "libiomp5.so")))
    if tcmalloc := find_library("tcmalloc_minimal"):
        preload.append(tcmalloc)
    os.environ["LD_PRELOAD"] = ":".join(preload)
    os.execv(sys.executable, [sys.executable, "-m", "bench.peers.vllm_worker", *sys.argv[1:]])


def _repair() -> None:
    """Without triton for CPUs, vLLM 0.32 leaves the temperatures of scored guesses uninitialised (vllm-project/vllm issue 55005).

    At T > 0 it would accept no guess and write noise; a peer that is broken is no peer.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x: "Tensor", cu_num_tokens: "Tensor", num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> "Tensor":
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


class _Peer:
    """The engine and what it counts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import vllm
        from vllm.platforms import current_platform

        _repair()
        speculative: dict[str, Any] | None = None
        if arguments.draft:
            speculative = {
                "method": "draft_model",
                "model": arguments.draft,
                "num_speculative_tokens": arguments.k,
                "max_model_len": _MAX_MODEL_LEN,
                "draft_sample_method": arguments.draft_sampling,
            }
        self._engine = vllm.LLM(
            model=arguments.target,
            dtype="bfloat16",
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=16,
            speculative_config=speculative,
            enable_prefix_caching=False,
            disable_log_stats=False,  # the counters of accepted tokens
        ).llm_engine
        self._num_jobs = 0
        self.description = {
            "engine": "vllm",
            "version": vllm.__version__,
            "platform": type(current_platform).__name__,
            "preloaded": os.environ["LD_PRELOAD"],
            "speculative": speculative and {key: speculative[key] for key in ("num_speculative_tokens", "draft_sample_method")},
        }

    def run(self, job: Job) -> Answer:
        """One batch; each step's tokens are stamped when the step returns. Seeds would cost the engine a second draw of its noise: it gets none."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        before = self._count()
        self._num_jobs += 1
        arrivals = Arrivals(len(job.prompts))
        for index, prompt in enumerate(job.prompts):
            parameters = SamplingParams(
                temperature=job.temperature,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._engine.add_request(f"{self._num_jobs}-{index}", {"prompt_token_ids": list(prompt)}, parameters)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                arrivals.add(int(output.request_id.partition("-")[2].partition("-")[0]), output.outputs[0].token_ids)
        accepted, rounds = (now - then for now, then in zip(self._count(), before, strict=True))
        return arrivals.to_answer(accepted / rounds if rounds else None)

    def _count(self) -> tuple[float, float]:
        """Accepted guesses and rounds so far."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self._engine.get_metrics()}
        return values.get("vllm:spec_decode_num_accepted_tokens", 0), values.get("vllm:spec_decode_num_drafts", 0)


if __name__ == "__main__":
    main()
