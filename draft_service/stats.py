"""Plain numbers about a draft service's work. `draft_service.metrics` alone turns them into Prometheus series."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ProposerStats:
    """What making guesses took, counted since the start.

    Args:
        forwards: batched calls of the proposer's model; 0 for one that has none.
        fed_tokens: tokens run through the model.
        catch_up_tokens: of those, the ones beyond one per sequence and forward: prompts, commits that the tail had not foreseen.
        unusable_rows: rows of logits that were not finite and gave no guess.
        free_blocks: KV blocks free now.
        used_blocks: KV blocks held now.
    """

    forwards: int = 0
    fed_tokens: int = 0
    catch_up_tokens: int = 0
    unusable_rows: int = 0
    free_blocks: int = 0
    used_blocks: int = 0


@dataclass(slots=True)
class DrafterStats:
    """What became of the guesses and of the sequences, counted since the start.

    Args:
        sequences: sequences drafted for now.
        steps: calls of the proposer.
        guesses_sent: guesses handed to the link; like the other counters of guesses, by the kind of the proposer that made them.
        guesses_matched: of those, the ones that the target's tokens later equalled, scored or not.
        guesses_dropped: of those, the ones taken back from the tail: contradicted, rewound, or of a sequence that ended.
        guesses_refuted: of those, the ones that the target's token differed from, all guesses before them being right. What came after them was
            never put to the test.
        guesses_doubted: of those sent, the ones after which drafting stopped, because the draft was less sure of them than it should be.
        rests: times that a sequence had nothing to add before the next commit, after such a guess or because there was none to be made.
        resyncs: new Begins asked for.
        declines: sequences refused.
        failures: calls of the proposer that failed by its own fault.
        proposer: what making the guesses took.
    """

    sequences: int = 0
    steps: int = 0
    guesses_sent: Counter[str] = field(default_factory=Counter)
    guesses_matched: Counter[str] = field(default_factory=Counter)
    guesses_dropped: Counter[str] = field(default_factory=Counter)
    guesses_refuted: Counter[str] = field(default_factory=Counter)
    guesses_doubted: Counter[str] = field(default_factory=Counter)
    rests: int = 0
    resyncs: int = 0
    declines: int = 0
    failures: int = 0
    proposer: ProposerStats = field(default_factory=ProposerStats)
