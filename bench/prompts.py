"""The prompts that are measured with: the lines of prompts.txt, which `outrider bench --prompts` reads too."""

from pathlib import Path

CODE_PROMPTS = tuple((Path(__file__).parent / "prompts.txt").read_text(encoding="utf-8").splitlines())
