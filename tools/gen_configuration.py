"""Writes docs/configuration.md out of the services' schemas. `--check` only tells whether the file is up to date."""

import sys
from pathlib import Path

from draft_service.config import DraftConfig
from shared.config import describe
from verifier_service.config import VerifierConfig

PATH = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD = """\
# Configuration

Made by `python tools/gen_configuration.py` from the schemas in `verifier_service/config.py`, `draft_service/config.py` and
`shared/config.py`: change those, not this file.

Every setting is a flag (`--block-size 16` or `--block-size=16`) and an environment variable (`OUTRIDER_BLOCK_SIZE=16`). A flag wins
over a variable, a variable over the default. An unknown flag, an unknown `OUTRIDER_*` variable and a value out of range stop the
service before it starts; everything that is wrong is told at once. `outrider verifier --help` and `outrider draft --help` say the same
as this page.

`outrider up` takes any setting of either service as `--set verifier.SETTING=VALUE`, `--set draft.SETTING=VALUE`, or
`--set SETTING=VALUE` for whichever have it, and sets `window` to `max-draft-tokens` unless told otherwise. Both services have
all cores then and take turns, so it sets `OMP_WAIT_POLICY` and `GOMP_SPINCOUNT` as well ([why](performance.md#two-teams-of-threads)).

Two more variables: `OUTRIDER_ADDRESS` is where `outrider generate`, `chat`, `info` and `health` connect to; `OUTRIDER_CACHE` is
the directory of the default model (`~/.cache/outrider`).
"""


def make_text() -> str:
    """What the file has to say."""
    verifier, draft = describe(VerifierConfig), describe(DraftConfig)
    return f"{_HEAD}\n## Verifier service: `outrider verifier`\n\n{verifier}\n## Draft service: `outrider draft`\n\n{draft}"


def main() -> None:
    """Write the file, or compare it."""
    if "--check" in sys.argv[1:]:
        if not PATH.exists() or PATH.read_text() != make_text():
            sys.exit(f"{PATH.name} is out of date: run python tools/gen_configuration.py")
    else:
        PATH.write_text(make_text())


if __name__ == "__main__":
    main()
