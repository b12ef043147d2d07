import os

from hypothesis import Phase, settings

# No test may depend on what a hub answers today. Set before anything imports transformers; processes that tests start inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"

# The machine's load must not decide a test: no deadline per example, and the same examples in every run.
settings.register_profile("outrider", deadline=None, derandomize=True, print_blob=True)
# To look for new counterexamples: `pytest --hypothesis-profile=search`.
settings.register_profile("search", deadline=None, max_examples=1000)
# `make mutants` only wants to know that a test fails: the first counterexample will do.
settings.register_profile("mutants", parent=settings.get_profile("outrider"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("outrider")
