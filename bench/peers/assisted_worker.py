"""Assisted generation of transformers as a worker: loads once, then answers jobs of one prompt. Runs in the peers' environment.

python -m bench.peers.assisted_worker --target DIR [--draft DIR --k 3] [--threads 2]
"""

import argparse
import os
from typing import Any

from bench.peers.lines import Answer, Arrivals, Job, serve, take_stdout


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="target model: directory or hub id")
    parser.add_argument("--draft", help="assistant model: directory or hub id; plain decoding without")
    parser.add_argument("--k", type=int, default=3, help="draft tokens of a round (`num_assistant_tokens`, constant)")
    parser.add_argument("--confidence", type=float, default=0.0, help="end a draft at a token less likely than this; 0 never does")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch's threads")
    arguments = parser.parse_args()
    output = take_stdout()
    os.environ.pop("OMP_WAIT_POLICY", None)  # ours to have, for processes that share cores; this one has them to itself
    peer = _Peer(arguments)
    serve(output, peer.description, peer.run)


class _Peer:
    """Both models, and how they generate."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import transformers

        torch.set_num_threads(arguments.threads)
        load = transformers.AutoModelForCausalLM.from_pretrained  # ready for inference, without dropout
        self._target = load(arguments.target, dtype=torch.bfloat16)
        self._options: dict[str, Any] = {}
        if arguments.draft:
            draft = load(arguments.draft, dtype=torch.bfloat16)
            draft.generation_config.num_assistant_tokens = arguments.k
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = arguments.confidence
            draft.generation_config.eos_token_id = None
            self._options["assistant_model"] = draft
        for setting in ("temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id"):
            setattr(self._target.generation_config, setting, None)  # the model's own habits: no engine here is to have them
        self.description = {
            "engine": "transformers",
            "version": transformers.__version__,
            "attention": self._target.config._attn_implementation,
            "threads": torch.get_num_threads(),
            "num_assistant_tokens": arguments.k if arguments.draft else 0,
        }

    def run(self, job: Job) -> Answer:
        """One prompt; the tokens of a round are stamped when the library hands them over.

        Raises:
            ValueError: several prompts: the library assists one at a time.
        """
        import torch

        if len(job.prompts) != 1:
            raise ValueError("assisted generation takes one prompt at a time")
        torch.manual_seed(job.seed)
        streamer = _Streamer(Arrivals(1))
        sampling: dict[str, Any] = {"do_sample": True, "temperature": job.temperature, "top_k": 0} if job.temperature > 0 else {"do_sample": False}
        prompt = torch.tensor([job.prompts[0]])
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": job.max_tokens, "pad_token_id": 0, **sampling, **self._options}
        self._target.generate(prompt, streamer=streamer, **options)
        return streamer.arrivals.to_answer(streamer.num_tokens / streamer.num_rounds - 1 if self._options else None)


class _Streamer:
    """Takes what `generate` hands over: first the prompt, then the tokens of each round."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.num_tokens = 0
        self.num_rounds = 0
        self._is_prompt = True

    def put(self, token_ids: Any) -> None:
        """The prompt, or new tokens."""
        if self._is_prompt:
            self._is_prompt = False
            return
        new = token_ids.flatten().tolist()
        self.num_rounds += 1
        self.num_tokens += len(new)
        self.arrivals.add(0, new)

    def end(self) -> None:
        """Nothing more comes."""


if __name__ == "__main__":
    main()
